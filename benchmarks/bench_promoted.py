"""Races ways to add up the steps of FP8 GEMMs with scales of blocks, at large problems.

    python benchmarks/bench_promoted.py --out /tmp/promoted.json
    python benchmarks/bench_promoted.py --list               # what would race, without a GPU
    python benchmarks/bench_promoted.py --problems 4096x7168x5120 --ways new old --out /tmp/promoted.json

At each problem, the kernel that is chosen and those that are expected to be next race in several ways, which are
macros of `mainloop.h` and `block_scales.h`. `old` is how it was: columns from 128 on in two pieces. `together` has
whole steps, and both warpgroups begin at the same time. `new` is what a kernel does now: the second warpgroup begins
later. With `turns`, only one multiplies at a time. With `rows`, two pieces of columns read A from shared memory once.
A tile that is the same in some ways races once.

Peers are those of bench_fp8.py: torch._scaled_mm, torch.nn.functional.scaled_mm and, where it is on PYTHONPATH,
DeepGEMM. A kernel whose rows are farther from float64 than bench_fp8.py allows is an error, and does not race.

Each row: {"m", "n", "k", "kernel", "way", "order", "ms", "tflops", "error", "chosen"}, or {"m", "n", "k", "peer", "ms",
"tflops", "error"} of a peer. With "ratio", peers' rows have the fastest kernel's time over theirs within a round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import bench_fp8
import harness
import torch
from bench_fp8 import Inputs

from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.artifacts.loader import LoadedKernel, load, refusal
from cutlass_ops.base import env
from cutlass_ops.base.dtypes import e4m3
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.compilation.builder import build_artifact, prepare_headers
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.declare.spelling import problems_of
from cutlass_ops.kinds import legality, render
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand.call import device_of, signature_of
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.tuner.comparing import ratios, time_interleaved
from cutlass_ops.tuner.timing import expected_us, rotation

PROBLEMS = (
    "4096x7168x5120", "1536x5120x27648", "3072x18432x7168", "8192x8192x8192", "4096x7168x16384", "512x10240x8192",
    "192x8192x28672", "64x57344x8192", "2048x2048x7168",
)  # fmt: skip
# What a source defines before anything else.
WAYS: dict[str, tuple[str, ...]] = {
    "new": (),
    "old": ("CUTLASS_OPS_SPLIT", "CUTLASS_OPS_LATE", "CUTLASS_OPS_ORDER 0"),
    "together": ("CUTLASS_OPS_ORDER 0",),
    "turns": ("CUTLASS_OPS_ORDER 2",),
    "rows": ("CUTLASS_OPS_READS_A",),
}
# Kernels predicted to take longer than this, relative to the best, do not race.
_WITHIN = 1.25
_ROUNDS = 15


@dataclass(frozen=True)
class Entrant:
    """A kernel, a way to add up, and an order of tiles."""

    config: Sm90Config
    way: str
    order: TileOrder

    def __str__(self) -> str:
        return f"{self.config.slug} {self.way} ({self.order})"


def ways_of(config: Sm90Config, wanted: Sequence[str]) -> list[str]:
    """Return the ways in which a kernel differs, as `mainloop.h` decides (kWhole, kInTurn and kReadsA)."""
    tile = config.threadblock
    if config.schedule != "cooperative" or config.swap_ab:
        return ["new"]
    across = 2 if config.side_by_side else 1
    rows, columns = tile.m // 64 * across // 2, tile.n // across
    if rows == 1 and 128 <= columns <= 208:
        return [way for way in wanted if way != "rows"]
    if rows * columns <= 208:
        return ["new"]
    return [way for way in wanted if way != "together" and (way != "rows" or rows == 1)]


@cache
def signature(device: Device) -> OpSignature:
    """Return what is multiplied: FP8 with scales of blocks, and D in BF16."""
    asked = bench_fp8.request(bench_fp8.draw("blocks", 256, 256, 256, "cpu"), "promoted")
    a, b, *inputs = asked.arguments
    return signature_of(asked.op.checked_call(a, b, inputs, None, None), device)


def entrants(problem: Problem, device: Device, count: int, wanted: Sequence[str]) -> list[Entrant]:
    """Return what races at a problem: the kernel that is chosen, and the best of the others that are expected."""
    policy = policies.policy(signature(device), device)
    chosen, order = dispatch.choose(signature(device), device, problem)[:2]
    listed = policy.every(problem)
    ordered = [
        Ordered(chosen.config, order),
        *(c.ordered for c in listed if c.microseconds < _WITHIN * listed[0].microseconds),
    ]
    kernels: dict[Sm90Config, TileOrder] = {}
    for each in ordered:
        config = each.config
        if isinstance(config, Sm90Config) and len(kernels) < 1 + count:
            kernels.setdefault(config, each.order)
    return [Entrant(config, way, first) for config, first in kernels.items() for way in ways_of(config, wanted)]


def source_of(spec: KernelSpec, way: str) -> str:
    """Return a kernel's source in some way."""
    return "".join(f"#define {each}\n" for each in WAYS[way]) + render.render(spec)


def build(
    kernels: Iterable[tuple[Sm90Config, str]], device: Device, seconds: float
) -> dict[tuple[Sm90Config, str], Artifact]:
    """Compile kernels, as many at a time as there are processors, until the time is over; print what fails."""
    each = list(dict.fromkeys(kernels))
    end, found = time.monotonic() + seconds, {}

    def one(config: Sm90Config, way: str) -> Artifact:
        if time.monotonic() > end:
            raise TimeoutError("no time was left to compile it")
        spec = signature(device).spec(config)
        legality.require_legal(spec)
        return build_artifact(spec, source=source_of(spec, way))

    with ThreadPoolExecutor(env.jobs()) as pool:
        pool.submit(prepare_headers, signature(device).spec(each[0][0]))
        futures = {kernel: pool.submit(one, *kernel) for kernel in each}
    for (config, way), future in futures.items():
        if (failed := future.exception()) is None:
            found[config, way] = future.result()
        else:
            print(f"{config.slug} {way}: {bench_fp8.first_line(failed)}", flush=True)
    return found


def arguments(x: Inputs) -> list[Any]:
    """Return what a kernel takes: A, B, D and the scales."""
    asked = bench_fp8.request(x, "promoted")
    a, b, *inputs = asked.arguments
    call = asked.op.checked_call(a, b, inputs, x.out, None)
    return [call.arguments.a, call.arguments.b, *call.outputs, *call.arguments.inputs.values()]


def launcher(kernel: LoadedKernel, order: TileOrder, problem: Problem, sets: Sequence[Inputs]) -> Callable[[int], int]:
    """Return what launches a kernel with one of the sets of inputs."""
    numbers = order.numbers
    size = int(kernel.workspace_size(*problem, *numbers))
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None
    given = [arguments(x) for x in sets]

    def run(index: int) -> int:
        return kernel.launch(*given[index % len(given)], *numbers, workspace)

    return run


def by_peer(peer: Callable[[Inputs], torch.Tensor], sets: Sequence[Inputs], index: int) -> torch.Tensor:
    """Have a peer multiply one of the sets of inputs."""
    return peer(sets[index % len(sets)])


def right(run: Callable[[int], int], first: Inputs, rows: torch.Tensor, wanted: torch.Tensor, most: float) -> float:
    """Launch a kernel once, and return its error.

    Raises
    ------
    AssertionError
        If it refuses the call, or its error is larger than `most`.
    """
    first.out.fill_(float("nan"))
    status = run(0)
    torch.cuda.synchronize()
    assert status == 0, f"it refused an argument: {refusal(status)}"
    error = bench_fp8.error(first.out[rows], wanted)
    assert error <= most, f"its error is {error:.2g}, and at most {most:.2g} is allowed"
    return error


def run_problem(
    problem: Problem, racing: Sequence[Entrant], built: Mapping[tuple[Sm90Config, str], Artifact], names: Sequence[str]
) -> list[dict[str, Any]]:
    """Check and time the kernels of a problem."""
    m, n, k = problem.extents
    sets = [bench_fp8.draw("blocks", m, n, k) for _ in range(rotation(problem.bytes(1, 1, 2)))]
    first, rows = sets[0], torch.randint(m, (64,), device="cuda")
    wanted = bench_fp8.exact("blocks", first, rows)
    variants: dict[str, Callable[[int], object]] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, function in bench_fp8.peers("blocks", "promoted").items():
        try:
            error = bench_fp8.error(function(first)[rows], wanted)
            assert error <= 0.05, f"its result is wrong: an error of {error:.2g}"
        except Exception as reason:
            print(f"{problem} without {name}: {bench_fp8.first_line(reason)}")
            continue
        if name in names:
            variants[name] = partial(by_peer, function, sets)
        about[name] = {"peer": name, "error": round(error, 6)}
    most = 1.1 * about["scaled_mm"]["error"] if "scaled_mm" in about else 0.01
    about = {name: each for name, each in about.items() if name in variants}
    for entrant in racing:
        artifact = built.get((entrant.config, entrant.way))
        if artifact is None:
            continue
        run = launcher(load(artifact), entrant.order, problem, sets)
        try:
            error = right(run, first, rows, wanted, most)
        except AssertionError as reason:
            print(f"WRONG {problem} {entrant}: {reason}", flush=True)
            continue
        variants[str(entrant)] = run
        about[str(entrant)] = {
            "kernel": entrant.config.slug,
            "way": entrant.way,
            "order": str(entrant.order),
            "chosen": entrant.config == racing[0].config,
            "error": round(error, 6),
        }
    times = time_interleaved(variants, expected_us(problem, e4m3.bits / 8), _ROUNDS)
    ours = [name for name in times if "kernel" in about[name]]
    best = min(ours, key=lambda name: times[name].median, default=None)
    found = []
    for name, timing in sorted(times.items(), key=lambda each: each[1].median):
        row = {"m": m, "n": n, "k": k, **about[name], "ms": round(timing.median, 5)}
        row["tflops"] = round(problem.flops / timing.median / 1e9, 1)
        if "peer" in row and best is not None:
            row["ratio"] = ratios(times[best], timing)["median"]
        found.append(row)
    return found


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the TFLOP/s at each problem: of the best kernel in each way, of the chosen one as it is now, of peers."""
    found: dict[str, Any] = {}
    for row in rows:
        here = found.setdefault(f"{row['m']}x{row['n']}x{row['k']}", {})
        names = [row["peer"]] if "peer" in row else [row["way"]] + ["chosen"] * (row["chosen"] and row["way"] == "new")
        for name in names:
            here[name] = max(here.get(name, 0.0), row["tflops"])
    return found


def main() -> None:
    """Race, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", type=problems_of, default=[problems_of(each) for each in PROBLEMS])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--kernels", type=int, default=5, help="how many race beside the chosen one")
    parser.add_argument("--peers", nargs="+", default=["scaled_mm", "deep_gemm"])
    parser.add_argument("--compile", type=float, default=130.0, help="begin no compilation after this many seconds")
    parser.add_argument("--limit", type=float, default=235.0, help="begin no problem after this many seconds")
    parser.add_argument("--list", action="store_true", help="print what would race on an H200, and end")
    parser.add_argument("--out", type=Path, required=False)
    args = parser.parse_args()
    begin, problems = time.monotonic(), [problem for each in args.problems for problem in each]
    device = gpu_named("H200") if args.list else device_of(torch.device("cuda", 0))
    racing = {problem: entrants(problem, device, args.kernels, args.ways) for problem in problems}
    # Chosen kernels first: if time runs out, others are missing.
    kernels = dict.fromkeys(
        (e.config, e.way) for at in range(100) for each in racing.values() for e in each[at : at + 1]
    )
    if args.list:
        for problem, each in racing.items():
            print(problem, *map(str, each), sep="\n    ")
        print(f"{len(kernels)} kernels to compile")
        return
    if args.out is None:
        parser.error("--out is needed")
    environment = harness.begin()
    built = build(kernels, device, args.compile)
    print(f"{len(built)} of {len(kernels)} kernels after {time.monotonic() - begin:.0f} s", flush=True)
    if "deep_gemm" in args.peers and not bench_fp8.prepare_deep_gemm([problem.extents for problem in problems]):
        args.peers.remove("deep_gemm")
    rows: list[dict[str, Any]] = []
    for problem, each in racing.items():
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {problem}")
            break
        rows += run_problem(problem, each, built, args.peers)
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
        print(f"{problem} after {time.monotonic() - begin:.0f} s: {summary(rows)[str(problem)]}", flush=True)


if __name__ == "__main__":
    main()
