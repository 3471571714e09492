"""Measures GEMMs in TF32 and INT8 against PyTorch.

    python benchmarks/bench_types.py --out benchmarks/results/types_h100.json
    python benchmarks/bench_types.py --rows 16 4096 --types "tf32 row,row" --out /tmp/rows.json
    python benchmarks/bench_types.py --resume /tmp/rows.json --out /tmp/all.json    # only missing rows

TF32: FP32 to FP32, against torch.mm with TF32 allowed. INT8: with scales of rows and columns to BF16, against
torch._int_mm and a compiled kernel that scales.

Each row: {"type", "majors", "m", "n", "k", "ours_ms", "peer", "peer_ms", "ratio", "ratio_range", "tflops", "error",
"peer_error", "kernel"}. Errors are relative, of sampled rows, against float64 of the operands as they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
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
# A type, and the majors of A and B.
CASES = ("tf32 row,col", "tf32 row,row", "tf32 col,row", "i8 row,col")
PEERS = {"tf32": "torch.mm", "i8": "torch._int_mm and scales"}
_SAMPLED = 64


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors: A (M, K), B (K, N), where D (M, N) goes, and scales of rows and columns for INT8."""

    a: Tensor
    b: Tensor
    out: Tensor
    scale_a: Tensor | None = None
    scale_b: Tensor | None = None


def draw(case: str, m: int, n: int, k: int) -> Inputs:
    """Draw one set of inputs."""
    element, majors = case.split()

    def matrix(rows: int, columns: int, major: str) -> Tensor:
        shape = (columns, rows) if major == "col" else (rows, columns)
        if element == "i8":
            drawn = torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda")
        else:
            drawn = torch.randn(*shape, device="cuda")
        return drawn.t() if major == "col" else drawn

    of_a, of_b = majors.split(",")
    a, b = matrix(m, k, of_a), matrix(k, n, of_b)
    if element == "i8":
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        return Inputs(a, b, out, torch.rand(m, device="cuda"), torch.rand(n, device="cuda"))
    return Inputs(a, b, torch.empty(m, n, device="cuda", dtype=torch.float32))


def scaled(acc: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Scale sums as scaled_gemm does, and round them once."""
    return (acc.float() * scale_a[:, None] * scale_b).bfloat16()


def by_torch(x: Inputs, scale: Callable[..., Tensor] = scaled) -> Tensor:
    """Multiply by PyTorch: FP32 in TF32, or INT8 and then `scale`."""
    if x.scale_a is not None:
        return scale(torch._int_mm(x.a, x.b), x.scale_a, x.scale_b)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return torch.mm(x.a, x.b, out=x.out)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def by_us(x: Inputs) -> Tensor:
    """Multiply by this library."""
    op, arguments, named = request(x)
    found: Tensor = op(*arguments, **{**named, "out": x.out})
    return found


def request(x: Inputs) -> requests.Request:
    """Return the op that a user's call is, and its arguments."""
    if x.scale_a is not None:
        return requests.requested(co.scaled_gemm, x.a, x.b, x.scale_a, x.scale_b)
    return requests.requested(co.gemm, x.a, x.b, math="tf32")


def error(found: Tensor, x: Inputs, rows: Tensor) -> float:
    """Return the relative error of some rows in the Frobenius norm."""
    wanted = x.a[rows].double() @ x.b.double()
    if x.scale_a is not None and x.scale_b is not None:
        wanted = wanted * x.scale_a[rows, None].double() * x.scale_b.double()
    return float((found[rows].double() - wanted).norm() / wanted.norm())


def run_case(case: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Check and time one case.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as the peer's.
    """
    element, majors = case.split()
    size = 1 if element == "i8" else 4
    sets = [draw(case, m, n, k) for _ in range(rotation(Problem(m, n, k).bytes(size, size, size)))]
    first, rows, scale = sets[0], torch.randint(m, (_SAMPLED,), device="cuda"), harness.compiled(scaled)
    first.out.fill_(float("nan"))
    errors = error(by_us(first), first, rows), error(by_torch(first, scale), first, rows)
    assert errors[0] <= 2 * errors[1], f"error is {errors[0]:.2g}, and the peer's {errors[1]:.2g}"
    op, arguments, named = request(first)
    kernel = op.plan(*arguments, **named).spec.config.slug
    prepared = [(x, request(x)) for x in sets]

    def ours(index: int) -> object:
        x, (op, arguments, named) = prepared[index % len(prepared)]
        return op(*arguments, **{**named, "out": x.out})

    peer = PEERS[element]
    variants = {"ours": ours, peer: lambda index: by_torch(sets[index % len(sets)], scale)}
    times = harness.time_interleaved(variants, expected_us(Problem(m, n, k), size))
    ratio = harness.ratios(times["ours"], times[peer])
    return {
        "type": element,
        "majors": majors,
        "m": m,
        "n": n,
        "k": k,
        "ours_ms": round(times["ours"].median, 5),
        "peer": peer,
        "peer_ms": round(times[peer].median, 5),
        "ratio": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(2 * m * n * k / times["ours"].median / 1e9, 1),
        "error": errors[0],
        "peer_error": errors[1],
        "kernel": kernel,
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


def problems(case: str, rows: list[int] | None) -> list[tuple[int, int, int]]:
    """Return the problems: each weight at each number of rows, and squares. torch._int_mm takes more than 16 rows."""
    grid = [(m, n, k) for (n, k), m in product(WEIGHTS, ROWS)] + [(x, x, x) for x in SQUARES]
    least = 17 if case.startswith("i8") else 1
    return [each for each in dict.fromkeys(grid) if each[0] >= least and (rows is None or each[0] in rows)]


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=list(CASES), choices=CASES, help="types, each with majors")
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {(f"{r['type']} {r['majors']}", r["m"], r["n"], r["k"]) for r in rows}
    for case, (m, n, k) in ((of, each) for of in args.types for each in problems(of, args.rows)):
        if (case, m, n, k) in done:
            continue
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {case} {m}x{n}x{k}")
            break
        row = run_case(case, m, n, k)
        rows.append(row)
        ours, peer = row["ours_ms"] * 1e3, row["peer_ms"] * 1e3
        print(f"{case} {m}x{n}x{k}: ours {ours:.1f} us, {row['peer']} {peer:.1f}, ratio {row['ratio']}", flush=True)
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
