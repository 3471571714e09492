"""Measures GEMMs in TF32 against torch.mm with TF32 allowed.

    python benchmarks/bench_types.py --out benchmarks/results/types_h100.json
    python benchmarks/bench_types.py --rows 16 4096 --majors row,row --out /tmp/rows.json
    python benchmarks/bench_types.py --resume /tmp/rows.json --out /tmp/all.json    # only missing rows

Each row: {"type", "majors", "m", "n", "k", "ours_ms", "peer", "peer_ms", "ratio", "ratio_range", "tflops", "error",
"peer_error", "kernel"}. Errors are relative, of sampled rows, against float64 of the operands as they are.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run import requests
from cutlass_ops.tuner.timing import expected_us, rotation

ROWS = (1, 16, 64, 256, 1024, 4096)
WEIGHTS = ((4096, 4096), (11008, 4096))
SQUARES = (512, 1024, 2048, 4096, 8192)
MAJORS = ("row,col", "row,row", "col,row")
_SAMPLED = 64


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors: A (M, K), B (K, N) and where D (M, N) goes."""

    a: Tensor
    b: Tensor
    out: Tensor


def draw(majors: str, m: int, n: int, k: int) -> Inputs:
    """Draw one set of inputs."""

    def matrix(rows: int, columns: int, major: str) -> Tensor:
        if major == "col":
            return torch.randn(columns, rows, device="cuda").t()
        return torch.randn(rows, columns, device="cuda")

    a, b = majors.split(",")
    return Inputs(matrix(m, k, a), matrix(k, n, b), torch.empty(m, n, device="cuda"))


def by_torch(x: Inputs) -> Tensor:
    """Multiply by PyTorch in TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return torch.mm(x.a, x.b, out=x.out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def by_us(x: Inputs) -> Tensor:
    """Multiply by this library in TF32."""
    found: Tensor = co.gemm(x.a, x.b, out=x.out, math="tf32")
    return found


def error(found: Tensor, x: Inputs, rows: Tensor) -> float:
    """Return the relative error of some rows in the Frobenius norm."""
    wanted = x.a[rows].double() @ x.b.double()
    return float((found[rows].double() - wanted).norm() / wanted.norm())


def run_case(majors: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Check and time one case.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as the peer's.
    """
    sets = [draw(majors, m, n, k) for _ in range(rotation(Problem(m, n, k).bytes(4, 4, 4)))]
    first, rows = sets[0], torch.randint(m, (_SAMPLED,), device="cuda")
    first.out.fill_(float("nan"))
    errors = [error(function(first), first, rows) for function in (by_us, by_torch)]
    assert errors[0] <= 2 * errors[1], f"error is {errors[0]:.2g}, and the peer's {errors[1]:.2g}"
    times = harness.time_interleaved(
        {
            "ours": lambda index: by_us(sets[index % len(sets)]),
            "torch.mm": lambda index: by_torch(sets[index % len(sets)]),
        },
        expected_us(Problem(m, n, k), 4),
    )
    ours, peer = times["ours"], times["torch.mm"]
    ratio = harness.ratios(ours, peer)
    return {
        "type": "tf32",
        "majors": majors,
        "m": m,
        "n": n,
        "k": k,
        "ours_ms": round(ours.median, 5),
        "peer": "torch.mm",
        "peer_ms": round(peer.median, 5),
        "ratio": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(2 * m * n * k / ours.median / 1e9, 1),
        "error": errors[0],
        "peer_error": errors[1],
        "kernel": requests.requested(co.gemm, first.a, first.b, math="tf32").op.plan(first.a, first.b).spec.config.slug,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios by type and majors."""
    found = {}
    for key in dict.fromkeys((r["type"], r["majors"]) for r in rows):
        members = [r for r in rows if (r["type"], r["majors"]) == key]
        worst = min(members, key=lambda r: r["ratio"])
        found[" ".join(key)] = {
            "geomean": round(harness.geomean([r["ratio"] for r in members]), 4),
            "worst": worst["ratio"],
            "worst_shape": [worst["m"], worst["n"], worst["k"]],
            "losses": sum(r["ratio"] < 1 for r in members),
            "shapes": len(members),
        }
    return found


def problems(rows: list[int] | None) -> list[tuple[int, int, int]]:
    """Return the problems: each weight at each number of rows, and squares."""
    grid = [(m, n, k) for (n, k), m in product(WEIGHTS, ROWS)] + [(x, x, x) for x in SQUARES]
    return [each for each in dict.fromkeys(grid) if rows is None or each[0] in rows]


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--majors", nargs="+", default=list(MAJORS), choices=MAJORS)
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {(r["majors"], r["m"], r["n"], r["k"]) for r in rows}
    for majors, (m, n, k) in product(args.majors, problems(args.rows)):
        if (majors, m, n, k) in done:
            continue
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {majors} {m}x{n}x{k}")
            break
        row = run_case(majors, m, n, k)
        rows.append(row)
        ours, peer = row["ours_ms"] * 1e3, row["peer_ms"] * 1e3
        print(f"{majors} {m}x{n}x{k}: ours {ours:.1f} us, {row['peer']} {peer:.1f}, ratio {row['ratio']}", flush=True)
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
