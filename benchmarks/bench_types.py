"""Measures GEMMs in TF32, 3xTF32, INT8 and FP64 against PyTorch.

    python benchmarks/bench_types.py --out benchmarks/results/types_h100.json
    python benchmarks/bench_types.py --rows 256 4096 --cases "tf32 plain row,row" --out /tmp/rows.json
    python benchmarks/bench_types.py --types f64 --out benchmarks/results/types_fp64_h200.json
    python benchmarks/bench_types.py --resume /tmp/rows.json --out /tmp/all.json    # only missing rows

TF32 is FP32 to FP32, where PyTorch is allowed TF32, and FP64 is FP64 throughout: plain, and with bias and ReLU. 3xTF32
is FP32 to FP32 against PyTorch's FP32. INT8 has scales of rows and columns, to BF16, or gives its sums in INT32;
PyTorch multiplies by torch._int_mm, and scales then. Of TF32 and INT8, wgmma reads the majors "row,col" only: others
are copied first, or take mma.sync. The peers: "eager", operation by operation; "cublaslt", its fused bias and ReLU;
"compile", torch.compile of the same with max-autotune.

Each row: {"case", "m", "n", "k", "ours_ms", "peers" (ms by name), "best_peer", "ratio_to_best_peer", "ratio_range",
"tflops", "error", "peers_error", "absent" (why, by name), "kernel"}. Errors are relative, of sampled rows, against
float64 of the operands as they are.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base.mma import MATHS
from cutlass_ops.declare.problem import Problem
from cutlass_ops.run import requests
from cutlass_ops.tuner.timing import expected_us, rotation

ROWS = (32, 256, 1024, 4096)
WEIGHTS = ((4096, 4096), (11008, 4096))
SQUARES = (1024, 2048, 8192)
# A type, what follows the product, and the majors of A and B.
CASES = (
    "tf32 plain row,col",
    "tf32 bias_relu row,col",
    "tf32 plain row,row",
    "tf32 plain col,row",
    "tf32 plain col,col",
    "i8 scaled row,col",
    "i8 scaled row,row",
    "i8 sums row,col",
    "i8 sums row,row",
    "3xtf32 plain row,col",
    "f64 plain row,col",
    "f64 bias_relu row,col",
    "f64 plain row,row",
)
PEERS = ("eager", "cublaslt", "compile")
_TORCH = {"tf32": torch.float32, "3xtf32": torch.float32, "i8": torch.int8, "f64": torch.float64}
# An error up to this counts as none: what they are compared with is a sum in FP64 itself.
_ROUNDING = 1e-14
_SAMPLED = 64


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors: A (M, K), B (K, N), where D (M, N) goes, and what its epilogue reads.

    These are a bias (N,), or the scales of A's rows and of B's columns.
    """

    a: Tensor
    b: Tensor
    out: Tensor
    others: tuple[Tensor, ...]


def draw(case: str, m: int, n: int, k: int, device: str = "cuda") -> Inputs:
    """Draw one set of inputs."""
    element, follows, majors = case.split()

    def matrix(rows: int, columns: int, major: str) -> Tensor:
        shape = (columns, rows) if major == "col" else (rows, columns)
        if element == "i8":
            drawn = torch.randint(-128, 128, shape, dtype=torch.int8, device=device)
        else:
            drawn = torch.randn(*shape, dtype=_TORCH[element], device=device)
        return drawn.t() if major == "col" else drawn

    of_a, of_b = majors.split(",")
    a, b = matrix(m, k, of_a), matrix(k, n, of_b)
    others: tuple[Tensor, ...] = ()
    if follows == "scaled":
        others = torch.rand(m, device=device), torch.rand(n, device=device)
    elif follows == "bias_relu":
        others = (torch.randn(n, dtype=_TORCH[element], device=device),)
    return Inputs(a, b, torch.empty(m, n, device=device, dtype=_out_dtype(case)), others)


def _out_dtype(case: str) -> torch.dtype:
    element, follows, _ = case.split()
    return {"scaled": torch.bfloat16, "sums": torch.int32}.get(follows, _TORCH[element])


def request(case: str, x: Inputs) -> requests.Request:
    """Return the op that a user's call is, and its arguments."""
    element, follows, _ = case.split()
    op = co.gemm_bias_relu if follows == "bias_relu" else co.gemm
    named: dict[str, Any] = {"math": element} if element in MATHS else {}
    named |= {"out_dtype": torch.int32} if follows == "sums" else {}
    operands = map(co.Scaled, (x.a, x.b), x.others) if follows == "scaled" else (x.a, x.b, *x.others)
    return requests.requested(op, *operands, **named)


# ---- Peers -------------------------------------------------------------------------------------------------------


@contextmanager
def tf32_allowed(case: str) -> Iterator[None]:
    """Let PyTorch multiply FP32 in TF32 if that is the case's type, else not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = case.startswith("tf32")
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _scaled(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (torch._int_mm(a, b).float() * scale_a[:, None] * scale_b).bfloat16()


def peers(case: str, names: tuple[str, ...] = PEERS) -> Mapping[str, Callable[[Inputs], Tensor]]:
    """Return a case's peers by name, each as a function that returns D."""
    eager: dict[str, Callable[..., Tensor]] = {
        "plain": torch.mm,
        "sums": torch._int_mm,
        "bias_relu": lambda a, b, bias: torch.addmm(bias, a, b).relu(),
        "scaled": _scaled,
    }
    follows = case.split()[1]
    found: dict[str, Callable[[Inputs], Tensor]] = {"eager": lambda x: eager[follows](x.a, x.b, *x.others)}
    if follows == "plain":
        found["eager"] = lambda x: torch.mm(x.a, x.b, out=x.out)
    if follows == "bias_relu":
        found["cublaslt"] = lambda x: torch._addmm_activation(x.others[0], x.a, x.b, use_gelu=False)
    if "compile" in names:
        compiled = harness.compiled(eager[follows])
        found["compile"] = lambda x: compiled(x.a, x.b, *x.others)
    return {name: function for name, function in found.items() if name in names}


# ---- Measuring -------------------------------------------------------------------------------------------------------


def exact(case: str, x: Inputs, rows: Tensor) -> Tensor:
    """Return some rows of D in float64."""
    d, follows = x.a[rows].double() @ x.b.double(), case.split()[1]
    if follows == "scaled":
        return d * x.others[0][rows, None].double() * x.others[1].double()
    return (d + x.others[0].double()).relu() if follows == "bias_relu" else d


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.double() - wanted).norm() / wanted.norm())


def run_case(case: str, m: int, n: int, k: int, names: tuple[str, ...]) -> dict[str, Any]:
    """Check and time one case.

    Raises
    ------
    AssertionError
        If our result is more than twice as far from float64 as the best peer's.
    """
    problem, element = Problem(m, n, k), case.split()[0]
    size = _TORCH[element].itemsize
    sets = [draw(case, m, n, k) for _ in range(rotation(problem.bytes(size, size, max(size, 2))))]
    first, rows = sets[0], torch.randint(m, (_SAMPLED,), device="cuda")
    wanted = exact(case, first, rows)
    prepared = [(x, request(case, x)) for x in sets]
    op, arguments, named = prepared[0][1]
    kernel = op.plan(*arguments, **named).spec.config.slug

    def ours(index: int) -> object:
        x, (op, arguments, named) = prepared[index % len(prepared)]
        return op(*arguments, **{**named, "out": x.out})

    first.out.fill_(float("nan") if first.out.is_floating_point() else -1)
    ours(0)
    ours_error = error(first.out[rows], wanted)
    variants: dict[str, Callable[[int], object]] = {"ours": ours}
    errors: dict[str, float] = {}
    absent: dict[str, str] = {}
    for name, function in peers(case, names).items():
        try:
            errors[name] = error(function(first)[rows], wanted)
        except (RuntimeError, ValueError, NotImplementedError) as reason:
            absent[name] = str(reason).partition("\n")[0][:200]
            continue
        variants[name] = lambda index, f=function: f(sets[index % len(sets)])
    assert ours_error <= 2 * max(min([*errors.values(), 1.0]), _ROUNDING), (
        f"error is {ours_error:.2g}, and peers have {errors}"
    )
    times = harness.time_interleaved(variants, expected_us(problem, size))
    mine = times.pop("ours")
    best = min(times, key=lambda name: times[name].median)
    ratio = harness.ratios(mine, times[best])
    return {
        "case": case,
        "m": m,
        "n": n,
        "k": k,
        "ours_ms": round(mine.median, 5),
        "peers": {name: round(each.median, 5) for name, each in times.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(2 * m * n * k / mine.median / 1e9, 1),
        "error": ours_error,
        "peers_error": errors,
        "absent": absent,
        "kernel": kernel,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios by case: to the fastest peer, and to eager PyTorch."""
    found = {}
    for case in dict.fromkeys(r["case"] for r in rows):
        members = [r for r in rows if r["case"] == case]
        worst = min(members, key=lambda r: r["ratio_to_best_peer"])
        eager = [r["peers"]["eager"] / r["ours_ms"] for r in members if "eager" in r["peers"]]
        found[case] = {
            "geomean": round(harness.geomean([r["ratio_to_best_peer"] for r in members]), 4),
            "worst": worst["ratio_to_best_peer"],
            "worst_shape": [worst["m"], worst["n"], worst["k"]],
            "losses": sum(r["ratio_to_best_peer"] < 1 for r in members),
            "shapes": len(members),
            "geomean_to_eager": round(harness.geomean(eager), 4) if eager else None,
        }
    return found


def problems(rows: list[int] | None) -> list[tuple[int, int, int]]:
    """Return the problems: each weight at each number of rows, and squares."""
    grid = [(m, n, k) for (n, k), m in product(WEIGHTS, ROWS)] + [(x, x, x) for x in SQUARES]
    return [each for each in grid if rows is None or each[0] in rows]


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--types", nargs="+", default=list(_TORCH), choices=list(_TORCH), help="only these types")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {(r["case"], r["m"], r["n"], r["k"]) for r in rows}
    cases = [case for case in args.cases if case.split()[0] in args.types]
    left = [(case, each) for each, case in product(problems(args.rows), cases) if (case, *each) not in done]
    calls = [request(case, draw(case, *each, device="meta")) for case, each in left]
    harness.build_ahead((call[:2] for call in calls), (call.named.get("out_dtype") for call in calls))
    for case, each in left:
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {case} {each}")
            break
        with tf32_allowed(case):
            row = run_case(case, *each, tuple(args.peers))
        rows.append(row)
        others = " ".join(f"{name} {ms * 1e3:.1f}" for name, ms in row["peers"].items())
        print(
            f"{case} {'x'.join(map(str, each))}: ours {row['ours_ms'] * 1e3:.1f} us, {others}, "
            f"ratio {row['ratio_to_best_peer']} {row['kernel']}",
            flush=True,
        )
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
