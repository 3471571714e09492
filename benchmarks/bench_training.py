"""Measures forward and backward of layers: fused modules against eager PyTorch, torch.compile and Liger-Kernel.

    python benchmarks/bench_training.py --out benchmarks/results/training_h100.json
    python benchmarks/bench_training.py --layers linear_gelu --shapes 4096x14336x4096 --out /tmp/r.json
    python benchmarks/bench_training.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows and variants
    python benchmarks/bench_training.py --sets small --out /tmp/small.json          # stops after 8 minutes
    python benchmarks/bench_training.py --sets drawn --seed 811b0248 --out /tmp/drawn.json

A step computes the layer, and the gradients of its input and of all parameters, which are BF16. `recompute` is the
fused module under ``co.recompute()``, `ours_compiled` the fused module under torch.compile. `liger` is left out where
it is not installed. M is the number of rows, K the layer's width, N what its first matrix gives.

Each row: {"layer", "m", "n", "k", "error_over_eager", "ms": {name: ms}, "over_ours": {name: ratio and range},
"peak_mib": {name: MiB}, "launches": {name: number}}. The error is the largest over the result and all gradients, in
FP64. Peak memory is that of one step, without the parameters and inputs. A step's kernels, copies and fills are its
launches.

"ms" are times in CUDA graphs. The small shapes also have "loop_ms" of steps one after the other, as the host enqueues
them, and "step_ms" of steps that are each waited for; each has its ratios, "loop_over_ours" and "step_over_ours". The
drawn shapes have "step_ms" alone. They are in no table: a commit that is newer than the tables is the seed.

torch.compile takes minutes for a layer. With ``--skip compile`` and ``--resume`` later, the variants that rows lack are
measured in alternation with ours once more. So a row's ratios may be of several runs, each with its own rounds of ours;
the milliseconds of ours are those of the first.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import random
import re
import time
import unittest.mock
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from trained_layers import DTYPE, PLAIN, decoder, module_of, operands

import cutlass_ops as co
from cutlass_ops.base import env, programs, resources
from cutlass_ops.choose import tables
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run.recorded import PlainCall, calls_of
from cutlass_ops.tuner.timing import expected_us, rotation

PEERS = ("recompute", "ours_compiled", "eager", "compile", "liger")
# M×N×K of layers. The first is the one that is quoted; the others are layers of GPT-2, Llama and Qwen.
SHAPES = {
    "linear_gelu": (
        *((4096, 14336, 4096), (4096, 4096, 14336), (4096, 4096, 4096), (8192, 14336, 4096)),
        *((2048, 14336, 4096), (1024, 14336, 4096), (8192, 3072, 768), (16384, 3072, 768)),
        *((8192, 5120, 1280), (4096, 8192, 2048), (8192, 8192, 8192), (4096, 28672, 8192)),
    ),
    "mlp": ((4096, 14336, 4096), (8192, 3072, 768), (8192, 14336, 4096), (4096, 8192, 2048)),
    "swiglu": ((4096, 14336, 4096), (8192, 14336, 4096), (4096, 12288, 4096), (8192, 8192, 2048)),
    "decoder": ((4096, 14336, 4096), (8192, 14336, 4096)),
}
# Steps so short that the host matters.
SMALL = ((512, 3072, 768), (1024, 2816, 1024), (2048, 4096, 1024))
DRAWN = 12
_TOGETHER = 8  # layers whose kernels are compiled together
# How steps are timed, in the order of `--sets`: in CUDA graphs, enqueued in a loop, and one by one.
HOW: dict[str, tuple[str, ...]] = {"large": ("graph",), "small": ("graph", "loop", "step"), "drawn": ("step",)}

Gradients = Sequence[Tensor]
Layer = Callable[[Tensor], Tensor]


class Variants(NamedTuple):
    """Ways to compute one layer, by name: functions of x, all of the same parameters."""

    module: nn.Module
    layers: dict[str, Layer]
    plain: Callable[[nn.Module, Tensor], Tensor]


def _liger_swiglu(m: Any, x: Tensor) -> Tensor:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gate, up = F.linear(x, m.gate_proj.weight), F.linear(x, m.up_proj.weight)
    return F.linear(LigerSiLUMulFunction.apply(gate, up), m.down_proj.weight)


def _liger_decoder(m: Any, x: Tensor) -> Tensor:
    return decoder(m, x, _liger_swiglu)


_LIGER = {"swiglu": _liger_swiglu, "decoder": _liger_decoder}


def variants(layer: str, n: int, k: int, peers: Sequence[str], **draw: Any) -> Variants:
    """Return a layer's variants: `ours` and some peers."""
    torch.manual_seed(0)
    module, plain = module_of(layer, n, k, **draw), PLAIN[layer]

    def recomputing(x: Tensor) -> Tensor:
        with co.recompute():
            found: Tensor = module(x)
        return found

    known: dict[str, Callable[[], Layer]] = {
        # First, since they forget what was compiled before.
        "compile": lambda: harness.compiled(lambda x: plain(module, x)),
        "ours_compiled": lambda: torch.compile(module, dynamic=False, fullgraph=True),
        "recompute": lambda: recomputing,
        "eager": lambda: lambda x: plain(module, x),
    }
    if layer in _LIGER:
        known["liger"] = lambda: lambda x: _LIGER[layer](module, x)
    made = {name: make() for name, make in known.items() if name in peers}
    return Variants(module, {"ours": module, **{name: made[name] for name in peers}}, plain)


def peers_of(layer: str, skipped: Sequence[str]) -> list[str]:
    """Return the names of a layer's variants besides ours, as far as they are there and not to be left out."""
    has_liger = layer in _LIGER and importlib.util.find_spec("liger_kernel") is not None
    return [name for name in PEERS if name not in skipped and (name != "liger" or has_liger)]


def step(layer: Layer, parameters: Sequence[Tensor], x: Tensor, grad: Tensor) -> Gradients:
    """Return a layer's result, and the gradients of x and of the parameters."""
    d = layer(x)
    return d.detach(), *torch.autograd.grad(d, [x, *parameters], grad)


def error(found: Variants, x: Tensor, grad: Tensor) -> float:
    """Return the largest error of ours over eager's, of the result and all gradients.

    Raises
    ------
    AssertionError
        If one is more than twice as large.
    """
    parameters = list(found.module.parameters())
    ours = step(found.module, parameters, x, grad)
    theirs = step(lambda x: found.plain(found.module, x), parameters, x, grad)
    wide = copy.deepcopy(found.module).double()
    exact = step(
        lambda x: found.plain(wide, x), list(wide.parameters()), x.detach().double().requires_grad_(), grad.double()
    )
    return max(harness.check(*each) for each in zip(ours, exact, theirs, strict=True))


def peak_mib(layer: Layer, parameters: Sequence[Tensor], x: Tensor, grad: Tensor) -> float:
    """Return the memory that a step takes besides what is there before and after it.

    Raises
    ------
    RuntimeError
        If every step leaves something, so that no two begin alike.
    """
    step(layer, parameters, x, grad)
    for _ in range(5):
        before = harness.memory_at_rest()
        torch.cuda.reset_peak_memory_stats()
        step(layer, parameters, x, grad)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        if harness.memory_at_rest() == before:
            return round((peak - before) / 2**20, 1)
    raise RuntimeError("each of five steps left memory behind: what one takes is not known")


def drawn(seed: str) -> tuple[tuple[int, int, int], ...]:
    """Draw shapes that are in no table, with 2,048 to 16,384 rows, by the hash of a commit.

    Raises
    ------
    SystemExit
        If there is no such commit.
    """
    if re.fullmatch("[0-9a-f]{40}", seed) is None:
        status, said = programs.ask(["git", "-C", str(Path(__file__).parent), "rev-parse", seed], 30.0)
        seed = said.strip()
        if status != 0:
            raise SystemExit(f"{seed}: pass a commit of this repository, or all 40 digits of its hash")
    known = {p.problem.extents[:3] for path in resources.tuned().glob("*.json") for p in tables.load(path).points}
    draw, found = random.Random(int(seed, 16)), list[tuple[int, int, int]]()
    while len(found) < DRAWN:
        m, k = round(2 ** draw.uniform(8, 11)) * 8, round(2 ** draw.uniform(3.6, 6.6)) * 64
        n = round(draw.uniform(1.5, 4) * k / 64) * 64
        if not known & {(m, n, k), (m, k, n)}:
            found.append((m, n, k))
    return tuple(found)


def shapes(layer: str, which: str, seed: str) -> tuple[tuple[int, int, int], ...]:
    """Return the shapes of a layer in a set. Decoder layers are long, and only in the first."""
    if which == "large":
        return SHAPES[layer]
    if layer == "decoder":
        return ()
    return SMALL if which == "small" else drawn(seed)


def compare(runs: dict[str, Callable[[int], object]], how: str, expected_us: float) -> dict[str, Any]:
    """Time variants in turns; return milliseconds, and the others' times over the first one's, with the way's name."""
    if how == "graph":
        return harness.compare(runs, expected_us)
    # As for users: PyTorch records small layers.
    with unittest.mock.patch.dict(os.environ, {env.STAND_IN.name: "1"}):
        return _in_turns(runs, how, expected_us)


def _in_turns(runs: dict[str, Callable[[int], object]], how: str, expected_us: float) -> dict[str, Any]:
    names, times = list(runs), {name: list[float]() for name in runs}
    count = max(5, min(100, round(5e4 / expected_us)))
    for number in range(harness.ROUNDS + 1):
        random.Random(number).shuffle(names)
        for name in names:
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for index in range(count):
                runs[name](index)
                if how == "step":
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            times[name].append((time.perf_counter() - begin) / count * 1e3)
    timings = {name: harness.Timing(tuple(each[1:])) for name, each in times.items()}
    ours, *others = runs
    return {
        f"{how}_ms": {name: round(timing.median, 5) for name, timing in timings.items()},
        f"{how}_over_ours": {name: harness.ratios(timings[ours], timings[name]) for name in others},
    }


def run_case(
    layer: str, m: int, n: int, k: int, peers: Sequence[str], ways: Sequence[str] = ("graph",)
) -> dict[str, Any]:
    """Check and time one layer."""
    found = variants(layer, n, k, peers, device="cuda", dtype=DTYPE)
    parameters = list(found.module.parameters())
    size = sum(p.numel() for p in parameters)
    count = rotation(2 * (sum(x.numel() for x in operands(layer, m, n, k, "meta")) + size))
    sets = [operands(layer, m, n, k, "cuda") for _ in range(count)]
    worst = error(found, *sets[0])
    torch.cuda.empty_cache()
    memory = {name: peak_mib(each, parameters, *sets[0]) for name, each in found.layers.items()}
    launches = {
        name: harness.launches(lambda each=each: step(each, parameters, *sets[0]))
        for name, each in found.layers.items()
    }
    runs = {name: lambda i, each=each: step(each, parameters, *sets[i % count]) for name, each in found.layers.items()}
    expected = 3 * expected_us(Problem(m, max(size // k, 1), k))  # forward and two gradients read each weight once
    return {
        "layer": layer, "m": m, "n": n, "k": k,
        "error_over_eager": round(worst, 3),
        **{key: x for how in ways for key, x in compare(runs, how, expected).items()},
        "peak_mib": memory,
        "launches": launches,
    }  # fmt: skip


# What a row has for each variant, ours among them in all but the ratios.
_OF_VARIANTS = (
    *("ms", "over_ours", "loop_ms", "loop_over_ours", "step_ms", "step_over_ours"),
    *("peak_mib", "launches"),
)


def joined(row: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the variants that a later one has besides."""
    known = {key: row.get(key, {}) for key in _OF_VARIANTS if key in later}
    more = {key: {n: x for n, x in later[key].items() if n not in known[key]} for key in known}
    return {**row, **{key: {**known[key], **more[key]} for key in known}}


def calls(layer: str, m: int, n: int, k: int) -> list[PlainCall]:
    """Return the GEMMs of a step, found without data."""
    module = module_of(layer, n, k, device="meta", dtype=DTYPE)
    return calls_of(lambda: step(module, list(module.parameters()), *operands(layer, m, n, k, "meta")))


def build_ahead(cases: Sequence[tuple[str, int, int, int]]) -> None:
    """Compile the kernels of all layers in parallel: first the GEMMs, then what a step of each needs besides."""
    found = [call for case in cases for call in calls(*case)]
    harness.build_ahead([(c.called, (c.a, c.b, *c.inputs)) for c in found], [c.out_dtype for c in found])

    def first(layer: str, m: int, n: int, k: int) -> None:
        module = module_of(layer, n, k, device="cuda", dtype=DTYPE)
        step(module, list(module.parameters()), *operands(layer, m, n, k, "cuda"))

    harness.side_by_side(partial(first, *case) for case in cases)
    torch.cuda.empty_cache()


def main() -> None:
    """Run all layers and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--sets", nargs="+", default=["large", "small"], choices=list(HOW))
    parser.add_argument("--seed", default="", metavar="COMMIT", help="by which shapes are drawn")
    parser.add_argument("--shapes", nargs="+", default=None, metavar="MxNxK", help="only these")
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants to leave out")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--limit", type=float, default=450.0, help="begin no layer after this many seconds")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if "drawn" in args.sets and not args.seed:
        parser.error("--seed is missing")
    begin, head = time.monotonic(), harness.begin()
    rows: dict[tuple[str, int, int, int], dict[str, Any]] = {}
    for row in harness.measured(args.resume, head):
        _add(rows, row)
    wanted = None if args.shapes is None else {tuple(map(int, shape.split("x"))) for shape in args.shapes}
    cases = {
        (layer, *shape): HOW[which]
        for which in args.sets
        for layer in args.layers
        for shape in shapes(layer, which, args.seed)
        if wanted is None or shape in wanted
    }
    peers = {
        case: [p for p in peers_of(case[0], args.skip) if p not in rows.get(case, {}).get("launches", ())]
        for case in cases
    }
    left = [case for case in cases if case not in rows or peers[case]]

    def save() -> None:
        harness.save(args.out, {**head, "rows": list(rows.values())})

    save()
    for at, case in enumerate(left):
        if time.monotonic() - begin > args.limit:
            break
        if at % _TOGETHER == 0:
            build_ahead(left[at : at + _TOGETHER])
        row = run_case(*case, peers[case], cases[case])
        print(row, flush=True)
        _add(rows, row)
        save()


def _add(rows: dict[tuple[str, int, int, int], dict[str, Any]], row: dict[str, Any]) -> None:
    """Add a row to those that are there, by layer and extents, or what it has besides to the one that is."""
    case = row["layer"], row["m"], row["n"], row["k"]
    rows[case] = joined(rows[case], row) if case in rows else row


if __name__ == "__main__":
    main()
