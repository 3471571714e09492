"""Estimates from machine code how long epilogues with special functions compute, for the model of cutlass_ops.

    python benchmarks/epilogue_clocks.py
    python benchmarks/epilogue_clocks.py --epilogues gelu_saved --out benchmarks/results/epilogue_clocks.json

An instruction names how many clocks its warp waits before the next one, and which results it waits for first. A warp of
a pingpong kernel's epilogue has its scheduler to itself, so its time is about the sum of these. Only the stretch from
the first special function to the last one is counted, so that stores to memory are largely left out. Needs a compiler,
and no GPU.

Each row: {"epilogue", "tile", "clocks", "clocks_an_element", "instructions_an_element", "spilled"}, of a warp and tile,
and for each of a thread's elements of D.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import cutlass_ops as co
from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.base import arch, elf
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.spec import KernelSpec

# The lowest nine bits of an instruction.
_WGMMA, _MUFU = (0x1F0, 0x1F1, 0x1F3), 0x108
# Clocks until a result is there that an instruction says it waits for: of a special function, and of shared memory.
_LATENCY, _USUAL_LATENCY = {_MUFU: 22, 0x184: 30, 0x189: 25}, 20
_BARRIERS = 6


@co.epilogue
def gelu_saved(acc, bias: co.Row):  # noqa: ANN001, ANN201
    """D = GELU, with what its derivative reads: the forward of a linear layer in training."""
    y = acc + bias
    return {"d": co.e.gelu(y), "saved": y}


@co.epilogue
def silu_up(acc, gate: co.Tile):  # noqa: ANN001, ANN201
    """D = silu(gate) * up, of the second product in training, which is stored too."""
    return {"d": co.e.silu(gate) * acc, "saved": acc}


@co.epilogue
def swiglu_derivative(acc, gate: co.Tile, up: co.Tile):  # noqa: ANN001, ANN201
    """D = the gradient of the gate, with that of the other product beside it."""
    s = co.e.sigmoid(gate)
    return {"d": acc * up * (s + gate * s * (1.0 - s)), "of_up": acc * gate * s}


EPILOGUES = {"gelu_saved": gelu_saved, "silu_up": silu_up, "swiglu_derivative": swiglu_derivative}
# M, N, and whether the kernel computes the transposed problem: parts of 32, 16 and 8 columns.
TILES = ((128, 128, False), (192, 128, False), (128, 160, False), (128, 176, False), (128, 208, True), (128, 200, True))


class Stretch(NamedTuple):
    """A part of a kernel's code: clocks of a warp alone on its scheduler, and instructions."""

    clocks: int
    instructions: int


def stretches(code: bytes) -> Iterator[tuple[int, Stretch]]:
    """Yield each part between products that computes special functions, with how many there are."""
    parts: list[list[tuple[int, int]]] = [[]]
    for low, high in struct.iter_unpack("<QQ", code):
        if low & 0x1FF in _WGMMA:
            parts.append([])
        else:
            parts[-1].append((low & 0x1FF, high))
    for part in parts:
        special = [at for at, (op, _) in enumerate(part) if op == _MUFU]
        if special:
            yield len(special), walked(part[special[0] : special[-1] + 1])


def walked(part: Sequence[tuple[int, int]]) -> Stretch:
    """Add up the clocks of instructions, given as operation codes and upper halves, that run one after the other."""
    now, ready = 0, [0] * _BARRIERS
    for op, high in part:
        control = high >> 41
        stall, writes, reads, waits = control & 15, control >> 5 & 7, control >> 8 & 7, control >> 11 & 63
        now = max([now, *(ready[at] for at in range(_BARRIERS) if waits >> at & 1)])
        latency = _LATENCY.get(op, _USUAL_LATENCY)
        for at in {writes, reads}:
            if at < _BARRIERS:
                ready[at] = now + latency
        now += max(1, stall)
    return Stretch(now, len(part))


def specs(names: Iterable[str]) -> dict[tuple[str, str], KernelSpec]:
    """Return the kernels of epilogues."""
    found = {}
    for name in names:
        graph = EPILOGUES[name].graph
        tiles = {i.name: "bf16.row" if i.kind.value == "tile" else "bf16" for i in graph.inputs}
        outputs = {o.name: "bf16.row" for o in graph.outputs[1:]}
        for m, n, swapped in TILES:
            config = co.Sm90Config(co.ThreadblockShape(m, n, 64), schedule="pingpong", swap_ab=swapped)
            found[name, f"{m}x{n}{' swapped' if swapped else ''}"] = co.KernelSpec(
                a="bf16.row", b="bf16.col", d="bf16.row", epilogue=EPILOGUES[name], inputs=tiles, outputs=outputs,
                config=config,
            )  # fmt: skip
    return found


def row(name: str, tile: str, artifact: Artifact) -> dict[str, Any]:
    """Return what a kernel's code says."""
    config = artifact.spec.config
    assert isinstance(config, co.Sm90Config)
    elements = config.threadblock.m * config.threadblock.n // arch.WARPGROUP
    codes = elf.gpu_code(artifact.read_library())
    _, found = max(each for code in codes for each in stretches(code))
    spilled = sum(each["spill_stores"] for each in artifact.manifest["resources"])
    return {
        "epilogue": name, "tile": tile, "clocks": found.clocks,
        "clocks_an_element": round(found.clocks / elements, 1),
        "instructions_an_element": round(found.instructions / elements, 1),
        "spilled": spilled,
    }  # fmt: skip


def main() -> None:
    """Compile the kernels, and print what their code says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epilogues", nargs="+", default=list(EPILOGUES), choices=EPILOGUES)
    parser.add_argument("--out", type=Path, help="file for the rows, as JSON")
    args = parser.parse_args()
    wanted = specs(args.epilogues)
    rows = [row(*case, artifact) for case, artifact in zip(wanted, build_many(wanted.values()), strict=True)]
    for each in rows:
        print(each)
    if args.out:
        head = {"date": date.today().isoformat(), "nvcc": find_toolchain().identity["nvcc"].partition("+")[0]}
        args.out.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
