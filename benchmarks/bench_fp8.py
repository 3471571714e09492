"""Measures scaled FP8 GEMMs against PyTorch and, where it is installed, DeepGEMM.

    python benchmarks/bench_fp8.py --out benchmarks/results/fp8_h100.json
    python benchmarks/bench_fp8.py --scales blocks --rows 1 16 64 128 512 1024 4096 8192 --out /tmp/blocks.json
    python benchmarks/bench_fp8.py --scales blocks --problems 4096x7168x5120,16384 512x10240x8192 --out /tmp/large.json
    python benchmarks/bench_fp8.py --resume /tmp/blocks.json --out /tmp/all.json    # only missing rows

Scales: one of each tensor ("tensor"), one for each row of A and column of B ("rows"), 1x128 blocks of A with 128x128
of B ("blocks") or with 1x128 of B ("blocks_1d"). Operands are e4m3, D is BF16. Sums are "fast" or "promoted", as
``math`` of gemm has it; with scales of blocks they are promoted. Fast ones are compared with both ways of
torch._scaled_mm, promoted ones with that without fast accumulation, whose accuracy they have.

Scales of blocks have further peers: torch.nn.functional.scaled_mm ("recipes"), which is told what the scales are, and
DeepGEMM ("deep_gemm"), in the one case that it has on Hopper, 128x128 of B. It is not a part of this repository: put
it on PYTHONPATH. Every peer gets scales in the layout that it reads without a copy. DeepGEMM compiles a kernel at its
first call, so these calls are made ahead, by several processes.

Each row: {"scales", "sums", "m", "n", "k", "ours_ms", "peers": {name: ms}, "best_peer", "ratio_to_best_peer",
"ratio_range", "tflops", "error", "peers_error": {name: error}, "absent": {name: why}, "kernel"}. Errors are relative,
of sampled rows, against float64. A peer without such scales, or with a wrong result, is absent, with the reason.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import harness
import shapes
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.dtypes import e4m3
from cutlass_ops.base.mma import BLOCK_K, Math
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spelling import problems_of
from cutlass_ops.operand import reference
from cutlass_ops.run import requests
from cutlass_ops.tuner.timing import expected_us, rotation

SCALES = ("tensor", "rows", "blocks", "blocks_1d")
SUMS: tuple[Math, ...] = ("fast", "promoted")
# How much larger our error may be than that of the peer that adds up in the same way.
_ALLOWED = {"fast": 2.0, "promoted": 1.1}
# A larger error of a peer shows that it took the scales for others.
_WRONG = 0.05
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SAMPLED = 64
# DeepGEMM's columns of scales have 16 bytes, or a multiple of that: the bulk tensor copy engine reads them.
_SCALES_TOGETHER = 4
# Processes that make DeepGEMM's first calls: each has a context on the GPU.
_PROCESSES = 8


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors: A (M, K), B (K, N) and scales as co.Scaled takes them, for D (M, N).

    Scales of blocks 1x128 lie as PyTorch wants them: those of neighbouring rows beside each other. `padded_scale_a`
    has the same, with room for a multiple of four rows, as DeepGEMM wants them. It is `scale_a` where M is one.
    """

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    padded_scale_a: Tensor
    out: Tensor


def quantised(x: Tensor, rows: int, along_k: int) -> tuple[Tensor, Tensor]:
    """Return x (R, K) in FP8 and the scale of each block, of shape (ceil(R / rows), ceil(K / along_k))."""
    r, k = x.shape
    blocks, steps = -(-r // rows), -(-k // along_k)
    whole = x.new_zeros(blocks * rows, steps * along_k)
    whole[:r, :k] = x
    parts = whole.view(blocks, rows, steps, along_k)
    scale = parts.abs().amax((1, 3)) / _LARGEST
    narrow = (parts / scale.clamp(min=1e-30)[:, None, :, None]).view_as(whole)[:r, :k]
    return narrow.to(torch.float8_e4m3fn).contiguous(), scale


def draw(scales: str, m: int, n: int, k: int, device: str = "cuda") -> Inputs:
    """Draw and quantise one set of inputs."""
    sizes = {
        "tensor": ((m, k), (n, k)),
        "rows": ((1, k), (1, k)),
        "blocks": ((1, BLOCK_K), (BLOCK_K, BLOCK_K)),
        "blocks_1d": ((1, BLOCK_K), (1, BLOCK_K)),
    }
    (a, scale_a), (w, scale_b) = (
        quantised(torch.randn(rows, k, device=device), *size) for rows, size in zip((m, n), sizes[scales], strict=True)
    )
    if scales == "tensor":
        scale_a, scale_b = scale_a.view(()), scale_b.view(())
    elif scales == "rows":
        scale_a, scale_b = scale_a.view(-1), scale_b.view(-1)
    else:
        scale_a = by_columns(scale_a)
        scale_b = by_columns(scale_b) if scales == "blocks_1d" else scale_b
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    padded = by_columns(scale_a, _SCALES_TOGETHER) if scales.startswith("blocks") and m % _SCALES_TOGETHER else scale_a
    return Inputs(a, w.t(), scale_a, scale_b, padded, out)


def by_columns(scale: Tensor, multiple: int = 1) -> Tensor:
    """Return a copy of a matrix whose columns are contiguous, each with room for a multiple of so many rows."""
    rows, columns = scale.shape
    room = scale.new_zeros(columns, -(-rows // multiple) * multiple)
    room[:, :rows] = scale.t()
    return room[:, :rows].t()


def sums_of(scales: str) -> tuple[Math, ...]:
    """Return the ways in which sums of products with such scales are added up."""
    return ("promoted",) if scales.startswith("blocks") else SUMS


def request(x: Inputs, sums: Math) -> requests.Request:
    """Return the op that a user's call is, and its arguments."""
    return requests.requested(co.gemm, co.Scaled(x.a, x.scale_a), co.Scaled(x.b, x.scale_b), math=sums)


def build_ahead(cases: Iterable[tuple[str, Math, tuple[int, int, int]]]) -> None:
    """Compile what the cases need, as many kernels at a time as there are processors."""
    calls = (request(draw(scales, *problem, "meta"), sums) for scales, sums, problem in cases)
    harness.build_ahead((call.op, call.arguments) for call in calls)


def exact(scales: str, x: Inputs, rows: Tensor) -> Tensor:
    """Return some rows of D in float64."""
    a, scale_a, scale_b = x.a[rows].double(), x.scale_a.double(), x.scale_b.double()
    if scales.startswith("blocks"):
        first, second = reference.dequantised(a, x.b, scale_a[rows], scale_b)
        return first @ second
    if scales == "rows":
        scale_a = scale_a[rows, None]
    return a @ x.b.double() * scale_a * scale_b


def peers(scales: str, sums: Math) -> Mapping[str, Callable[[Inputs], Tensor]]:
    """Return the peers that may know such scales and sums, by name, each as a function that returns D."""

    def scaled_mm(x: Inputs, *, fast: bool) -> Tensor:
        scale_a, scale_b = x.scale_a, x.scale_b
        if scales == "rows":
            scale_a, scale_b = scale_a[:, None], scale_b[None]
        elif scales.startswith("blocks"):
            scale_b = scale_b.t()
        return torch._scaled_mm(x.a, x.b, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def with_recipes(x: Inputs) -> Tensor:
        functional, of_b = torch.nn.functional, "BlockWise128x128" if scales == "blocks" else "BlockWise1x128"
        return functional.scaled_mm(
            x.a, x.b,
            x.scale_a, functional.ScalingType.BlockWise1x128,
            x.scale_b.t() if scales == "blocks" else x.scale_b, getattr(functional.ScalingType, of_b),
            output_dtype=torch.bfloat16,
        )  # fmt: skip

    def by_deep_gemm(x: Inputs) -> Tensor:
        deep_gemm().fp8_gemm_nt((x.a, x.padded_scale_a), (x.b.t(), x.scale_b), x.out)
        return x.out

    found: dict[str, Callable[[Inputs], Tensor]] = {"scaled_mm": lambda x: scaled_mm(x, fast=False)}
    if sums == "fast":
        found["scaled_mm_fast"] = lambda x: scaled_mm(x, fast=True)
    if scales.startswith("blocks"):
        found["recipes"] = with_recipes
    if scales == "blocks":
        found["deep_gemm"] = by_deep_gemm
    return found


@lru_cache(maxsize=1)
def deep_gemm() -> Any:
    """Return the module.

    Raises
    ------
    ImportError
        If it is not installed, or does not load.
    """
    return import_module("deep_gemm")


def prepare_deep_gemm(problems: Sequence[tuple[int, int, int]]) -> bool:
    """Have several processes make DeepGEMM's first calls, each of which compiles a kernel to its folder.

    Returns whether it can be called: a call may end its process.
    """
    try:
        deep_gemm()
    except ImportError as reason:
        print(f"without DeepGEMM: {reason}")
        return False
    count = min(_PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for problem, failed in zip(problems, pool.map(call_deep_gemm, problems), strict=True):
                if failed is not None:
                    print(f"DeepGEMM at {problem}: {failed}")
        except BrokenProcessPool:
            print("without DeepGEMM: a call ended its process")
            return False
    return True


def call_deep_gemm(problem: tuple[int, int, int]) -> str | None:
    """Call DeepGEMM once, and return why it failed, if it did."""
    try:
        peers("blocks", "promoted")["deep_gemm"](draw("blocks", *problem))
        torch.cuda.synchronize()
    except (RuntimeError, AssertionError) as reason:
        return first_line(reason)
    return None


def first_line(reason: BaseException) -> str:
    """Return the beginning of an error's message."""
    return str(reason).partition("\n")[0][:200]


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.double() - wanted).norm() / wanted.norm())


def run_case(scales: str, sums: Math, m: int, n: int, k: int, names: list[str]) -> dict[str, Any]:
    """Check and time one case.

    Raises
    ------
    AssertionError
        If our result is wrong, or much farther from float64 than that of the peer that adds up in the same way.
    """
    problem = Problem(m, n, k)
    sets = [draw(scales, m, n, k) for _ in range(rotation(problem.bytes(1, 1, 2)))]
    first = sets[0]
    rows = torch.randint(m, (_SAMPLED,), device="cuda")
    wanted = exact(scales, first, rows)
    first.out.fill_(float("nan"))
    co.gemm(co.Scaled(first.a, first.scale_a), co.Scaled(first.b, first.scale_b), out=first.out, math=sums)
    ours_error = error(first.out[rows], wanted)
    op, arguments, _ = request(first, sums)
    kernel = op.plan(*arguments).spec.config.slug

    def ours(index: int) -> object:
        x = sets[index % len(sets)]
        return co.gemm(co.Scaled(x.a, x.scale_a), co.Scaled(x.b, x.scale_b), out=x.out, math=sums)

    variants: dict[str, Callable[[int], object]] = {"ours": ours}
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, function in peers(scales, sums).items():
        if name not in names:
            continue
        try:
            errors[name] = error(function(first)[rows], wanted)
        except (RuntimeError, ValueError, ImportError, AssertionError, AttributeError) as reason:
            absent[name] = first_line(reason)
            continue
        if not errors[name] <= _WRONG:
            absent[name] = f"its result is wrong: an error of {errors[name]:.2g}"
            continue
        variants[name] = lambda index, f=function: f(sets[index % len(sets)])
    alike = errors.get("scaled_mm_fast" if sums == "fast" else "scaled_mm", 0.01)
    assert ours_error <= _ALLOWED[sums] * alike, f"error is {ours_error:.2g}, and peers have {errors}"
    times = harness.time_interleaved(variants, expected_us(problem, e4m3.bits / 8))
    mine = times.pop("ours")
    best = min(times, key=lambda name: times[name].median, default=None)
    ratio = harness.ratios(mine, times[best]) if best else {"median": None, "min": None, "max": None}
    return {
        "scales": scales,
        "sums": sums,
        "m": m,
        "n": n,
        "k": k,
        "ours_ms": round(mine.median, 5),
        "peers": {name: round(each.median, 5) for name, each in times.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(2 * m * n * k / mine.median / 1e9, 1),
        "error": round(ours_error, 6),
        "peers_error": {name: round(each, 6) for name, each in errors.items()},
        "absent": absent,
        "kernel": kernel,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios by kind of scales and of sums, over the rows with a peer."""
    result = {}
    for way in ((scales, sums) for scales in SCALES for sums in sums_of(scales)):
        of = [r for r in rows if (r["scales"], r["sums"]) == way]
        members = [r for r in of if r["ratio_to_best_peer"] is not None]
        if not members:
            continue
        worst = min(members, key=lambda r: r["ratio_to_best_peer"])
        result[", ".join(way)] = {
            "geomean": round(harness.geomean([r["ratio_to_best_peer"] for r in members]), 4),
            "worst": worst["ratio_to_best_peer"],
            "worst_shape": [worst["m"], worst["n"], worst["k"]],
            "losses": sum(r["ratio_to_best_peer"] < 1 for r in members),
            "shapes": len(members),
        }
    return result


def problems(rows: list[int] | None) -> list[tuple[int, int, int]]:
    """Return the problems: each weight at each number of rows, and squares."""
    return [each for each in dict.fromkeys(shapes.FP8) if rows is None or each[0] in rows]


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", nargs="+", default=list(SCALES), choices=SCALES)
    parser.add_argument("--sums", nargs="+", default=list(SUMS), choices=SUMS)
    parser.add_argument("--peers", nargs="+", default=["scaled_mm", "scaled_mm_fast", "recipes", "deep_gemm"])
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--problems", nargs="+", type=problems_of, help="these instead, such as 512x10240x8192")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {(r["scales"], r["sums"], r["m"], r["n"], r["k"]) for r in rows}
    ways = [(scales, sums) for scales in args.scales for sums in sums_of(scales) if sums in args.sums]
    asked = [problem.extents for each in args.problems for problem in each] if args.problems else problems(args.rows)
    every = [(*way, problem) for way, problem in product(ways, asked)]
    cases = [case for case in every if (*case[:2], *case[2]) not in done]
    build_ahead(cases)
    blocks = [problem for scales, _, problem in cases if scales == "blocks"]
    if blocks and "deep_gemm" in args.peers:
        args.peers = [name for name in args.peers if name != "deep_gemm" or prepare_deep_gemm(blocks)]
    for scales, sums, (m, n, k) in cases:
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {scales} {sums} {m}x{n}x{k}")
            break
        rows.append(run_case(scales, sums, m, n, k, args.peers))
        row = rows[-1]
        others = " ".join(f"{name} {ms * 1e3:.1f}" for name, ms in row["peers"].items())
        print(
            f"{scales} {sums} {m}x{n}x{k}: ours {row['ours_ms'] * 1e3:.1f} us, {others}, "
            f"ratio {row['ratio_to_best_peer']} {row['kernel']}",
            flush=True,
        )
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
