"""Times FP64 kernels against torch.mm: raw data for their costs, and for which of them to choose from.

    python benchmarks/sweep_fp64.py --out benchmarks/results/sweep_fp64_h100.json
    python benchmarks/sweep_fp64.py --rows 32 256 --majors row,row --out /tmp/sweep.json
    python benchmarks/fit_sm80.py benchmarks/results/sweep_fp64_h100.json    # the costs

No epilogue. Each row: {"alignment", "element_bytes", "majors", "m", "n", "k", "peer_ms", "times": {slug: ms}}; the peer
is torch.mm. The first kernels of `space.UNTUNED_FP64` are those that calls choose from; the others have more stages,
another K or another instruction of Hopper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.dtypes import f64
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.config import InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm80.space import UNTUNED_FP64
from cutlass_ops.operand.call import device_of
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.tuner.timing import expected_us, rotation
from cutlass_ops.tuner.tuning import signature_at

# M, N and K of the tile, M and N of warps' tiles, K of the instruction, stages.
FURTHER = (
    *((128, 128, 16, 32, 64, 4, 5), (128, 128, 16, 64, 32, 4, 4), (128, 128, 32, 32, 64, 4, 3)),
    *((64, 128, 16, 32, 64, 4, 3), (64, 128, 32, 32, 64, 4, 3), (64, 128, 16, 32, 32, 4, 4)),
    *((128, 64, 32, 32, 32, 16, 3), (64, 128, 32, 32, 32, 16, 3), (128, 64, 32, 32, 32, 8, 3)),
    *((128, 64, 32, 32, 32, 4, 3), (64, 64, 16, 32, 32, 8, 4), (64, 64, 32, 32, 32, 16, 3)),
    *((32, 128, 32, 32, 32, 16, 3), (32, 128, 16, 32, 32, 8, 5), (32, 128, 16, 32, 32, 4, 5)),
    *((64, 256, 16, 32, 64, 4, 3), (256, 64, 16, 64, 32, 4, 3)),
)
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 4096)
WEIGHTS = ((4096, 4096), (11008, 4096))
OTHERS = ((2048, 2048, 2048), (8192, 8192, 8192), (256, 256, 65536), (4096, 32, 4096))
MAJORS = ("row,col", "row,row", "col,row", "col,col")


def configs() -> list[Sm80Config]:
    """Return what is compared: the choices, and each further one with and without stream-K."""
    found = list(UNTUNED_FP64)
    for m, n, k, warp_m, warp_n, of_instruction, stages in FURTHER:
        for stream_k in (False, True):
            tile, warp = ThreadblockShape(m, n, k), WarpShape(warp_m, warp_n, k)
            instruction = InstructionShape(16, 8, of_instruction)
            found.append(Sm80Config(tile, warp, instruction, stages=stages, stream_k=stream_k))
    return list(dict.fromkeys(found))


def signature(majors: str, device: Device) -> OpSignature:
    """Return that of a GEMM without an epilogue, of operands aligned to 16 bytes."""
    a, b = majors.split(",")
    return signature_at(builtin.identity.graph, Problem(64, *WEIGHTS[0]), f64.name, a, b, None, device)


def specs(majors: str, device: Device) -> list[KernelSpec]:
    """Return the legal kernels among them."""
    every = (device.spec(signature(majors, device), config) for config in configs())
    return [spec for spec in every if not legality.check(spec)]


def draw(m: int, n: int, k: int, majors: str, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Draw A and B; D is not written yet."""
    of_a, of_b = majors.split(",")

    def matrix(rows: int, columns: int, major: str) -> Tensor:
        shape = (rows, columns) if major == "row" else (columns, rows)
        drawn = torch.randn(*shape, dtype=torch.float64, device=device)
        return drawn if major == "row" else drawn.t()

    return matrix(m, k, of_a), matrix(k, n, of_b), torch.empty(m, n, dtype=torch.float64, device=device)


Run = Callable[[Tensor, Tensor, Tensor], object]


def running(kernel: Callable[..., object]) -> Run:
    """Return what runs a kernel on A and B."""
    return lambda a, b, out: kernel(a, b, out=out)


def checked(runs: dict[str, Run], a: Tensor, b: Tensor, out: Tensor) -> None:
    """Require of each kernel what torch.mm gives, but for rounding.

    Raises
    ------
    AssertionError
        If one is wrong.
    """
    exact = a @ b
    for name, run in runs.items():
        out.fill_(float("nan"))
        run(a, b, out)
        error = float((out - exact).norm() / exact.norm())
        assert error < 1e-14, f"{name} is wrong at {a.shape[0]}x{b.shape[1]}x{a.shape[1]}: {error}"


def row(problem: tuple[int, int, int], majors: str, runs: dict[str, Run], rounds: int) -> dict[str, Any]:
    """Check and time every kernel at a problem."""
    of = Problem(*problem)
    sets = [draw(*problem, majors) for _ in range(rotation(of.bytes(8, 8, 8)))]
    checked(runs, *sets[0])
    everything: dict[str, Run] = {"peer": lambda a, b, out: torch.mm(a, b, out=out), **runs}
    variants: dict[str, Callable[[int], object]] = {
        name: lambda index, run=run: run(*sets[index % len(sets)]) for name, run in everything.items()
    }
    timed = harness.time_interleaved(variants, 8 * expected_us(of), rounds=rounds)
    times = {name: round(each.median, 5) for name, each in timed.items()}
    m, n, k = problem
    head = {"alignment": 2, "element_bytes": f64.bytes_of(1), "majors": majors, "m": m, "n": n, "k": k}
    return {**head, "peer_ms": times.pop("peer"), "times": times}


def problems(rows: list[int] | None) -> Iterator[tuple[int, int, int]]:
    """Yield those with some numbers of rows, or all."""
    grid = [(m, n, k) for n, k in WEIGHTS for m in ROWS] + list(OTHERS)
    yield from (each for each in grid if rows is None or each[0] in rows)


def main() -> None:
    """Build the kernels, check and time them at each problem, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--majors", default=MAJORS[0], choices=MAJORS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, begin, found = harness.begin(), time.monotonic(), []
    wanted = specs(args.majors, device_of(torch.device("cuda", 0)))
    build_many(wanted)
    runs = {spec.config.slug: running(co.build(spec)) for spec in wanted}
    print(f"{len(runs)} kernels after {time.monotonic() - begin:.0f} s", flush=True)
    for problem in problems(args.rows):
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {problem}")
            break
        found.append(row(problem, args.majors, runs, args.rounds))
        times, peer = found[-1]["times"], found[-1]["peer_ms"]
        best = ", ".join(f"{name} {times[name] * 1e3:.1f}" for name in sorted(times, key=times.__getitem__)[:4])
        print(
            f"{'x'.join(map(str, problem))}: peer {peer * 1e3:.1f} us, ratio {peer / min(times.values()):.3f}, {best}",
            flush=True,
        )
        harness.save(args.out, {**head, "rows": found})


if __name__ == "__main__":
    main()
