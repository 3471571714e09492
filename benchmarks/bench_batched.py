"""Measures batches of GEMMs against torch.bmm, and with an epilogue against torch.compile.

    python benchmarks/bench_batched.py --out benchmarks/results/batched_h100.json
    python benchmarks/bench_batched.py --cases small --epilogues none --out /tmp/small.json
    python benchmarks/bench_batched.py --resume /tmp/small.json --out /tmp/all.json    # only missing rows

A is (batches, M, K) and B (batches, K, N), row-major both; "heads" are permuted views of (tokens, heads, K) tensors,
and "scores" multiply queries by transposed keys. The epilogue is relu(A @ B + bias) with one bias (N,) for all batches.

Each row: {"case", "batches", "m", "n", "k", "dtype", "epilogue", "ours_ms", "peers": {name: ms}, "best_peer",
"ratio_to_best_peer", "ratio_range", "tflops", "gb_per_s", "error", "peers_error", "kernel"}. Errors are relative, of
sampled batches, against float64. Bytes are those of all operands and D, once. "small" has the times of small kernels
(SmallConfig), where D has at most 64 rows and columns, whatever kernel the call chooses.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds.small.kind import UNTUNED
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import ops, requests
from cutlass_ops.tuner.timing import expected_us, rotation

_SAMPLED, _SMALL = 4, 64


@dataclass(frozen=True)
class Case:
    """Batches of one size.

    Attributes
    ----------
    problem : Problem
        Extents and number of batches.
    dtype : torch.dtype
        Of A, B and D.
    layout : str
        ``"rows"``: A and B are row-major and contiguous. ``"heads"``: A and D are views of (M, batches, K) and
        (M, batches, N). ``"scores"``: A as for heads, and B is the transpose of such a view.
    """

    problem: Problem
    dtype: torch.dtype
    layout: str = "rows"


CASES = {
    "small": Case(Problem(64, 64, 64, 1000), torch.float16),
    "small_bf16": Case(Problem(64, 64, 64, 1000), torch.bfloat16),
    "tiny": Case(Problem(16, 16, 16, 4096), torch.float16),
    "wide": Case(Problem(1024, 1024, 128, 64), torch.bfloat16),
    "large": Case(Problem(2048, 2048, 2048, 8), torch.bfloat16),
    "scores": Case(Problem(4096, 4096, 128, 32), torch.bfloat16, "scores"),
    "values": Case(Problem(4096, 128, 4096, 32), torch.bfloat16, "heads"),
    "few_rows": Case(Problem(128, 4096, 4096, 32), torch.bfloat16),
}
EPILOGUES = ("none", "bias_relu")


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors."""

    a: Tensor
    b: Tensor
    bias: Tensor
    out: Tensor


def draw(case: Case, device: str = "cuda") -> Inputs:
    """Draw one set of inputs, such that the accumulator's variance is 1."""
    m, n, k, count = case.problem

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * k**-0.25).to(case.dtype)

    def heads(rows: int, columns: int) -> Tensor:
        return normal(rows, count, columns).transpose(0, 1)

    a = normal(count, m, k) if case.layout == "rows" else heads(m, k)
    b = heads(n, k).mT if case.layout == "scores" else normal(count, k, n) if case.layout == "rows" else heads(k, n)
    out = torch.empty(count, m, n, dtype=case.dtype, device=device)
    if case.layout == "heads":
        out = torch.empty(m, count, n, dtype=case.dtype, device=device).transpose(0, 1)
    return Inputs(a, b, torch.randn(n, device=device).to(case.dtype), out)


def exact(epilogue: str, x: Inputs, batches: Tensor) -> Tensor:
    """Return D of some batches in float64."""
    acc = x.a[batches].double() @ x.b[batches].double()
    return acc if epilogue == "none" else torch.relu(acc + x.bias.double())


def op_of(epilogue: str) -> ops.Op:
    """Return the op that computes D."""
    return ops.op_of(None) if epilogue == "none" else requests.called(builtin.bias_relu)


def ours(epilogue: str, x: Inputs) -> Tensor:
    """Compute D into its memory by this library."""
    found = co.gemm(x.a, x.b, out=x.out) if epilogue == "none" else co.gemm_bias_relu(x.a, x.b, x.bias, out=x.out)
    assert isinstance(found, Tensor)
    return found


def peers(epilogue: str) -> dict[str, Callable[[Inputs], Tensor]]:
    """Return PyTorch's ways to compute D, by name."""

    def bmm(x: Inputs) -> Tensor:
        return torch.bmm(x.a, x.b, out=x.out)

    def eager(x: Inputs) -> Tensor:
        return torch.relu(torch.bmm(x.a, x.b) + x.bias)

    def baddbmm(x: Inputs) -> Tensor:
        return torch.relu(torch.baddbmm(x.bias, x.a, x.b))

    if epilogue == "none":
        return {"bmm": bmm}
    compiled = harness.compiled(lambda a, b, bias: torch.relu(torch.bmm(a, b) + bias))
    return {"bmm_relu": eager, "baddbmm": baddbmm, "compile": lambda x: compiled(x.a, x.b, x.bias)}


def small_kernels(case: Case) -> tuple[co.types.SmallConfig, ...]:
    """Return the small kernels that are worth a look at a case."""
    m, n, *_ = case.problem
    if max(m, n) > _SMALL:
        return ()
    return tuple(c for c in UNTUNED if c.threadblock.m <= max(16, m) and c.threadblock.n <= max(16, n))


def build_ahead(cases: Iterable[tuple[str, str]]) -> None:
    """Compile what the cases need, as many kernels at a time as there are processors."""
    device, specs = device_of(torch.device("cuda", 0)), {}
    for name, epilogue in cases:
        x = draw(CASES[name], "meta")
        inputs = () if epilogue == "none" else (x.bias,)
        signature, problem = harness.asked(op_of(epilogue), (x.a, x.b, *inputs), device)
        found = [device.spec(signature, config) for config in small_kernels(CASES[name])]
        specs |= dict.fromkeys([dispatch.choose(signature, device, problem)[0], *found])
    build_many(list(specs))


def run_exact(kernel: Any, epilogue: str, x: Inputs) -> Tensor:
    """Compute D into its memory by one kernel."""
    found = kernel(x.a, x.b, *(() if epilogue == "none" else (x.bias,)), out=x.out)
    assert isinstance(found, Tensor)
    return found


def error(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.double() - wanted).norm() / wanted.norm())


def run_case(name: str, epilogue: str) -> dict[str, Any]:
    """Check and time one case.

    Raises
    ------
    AssertionError
        If our result is wrong, or more than twice as far from float64 as the best peer's.
    """
    case = CASES[name]
    m, n, k, count = case.problem
    width = case.dtype.itemsize
    moved = case.problem.bytes(width, width, width)
    sets = [draw(case) for _ in range(rotation(moved))]
    first = sets[0]
    batches = torch.randint(count, (_SAMPLED,), device="cuda")
    wanted = exact(epilogue, first, batches)
    first.out.fill_(float("nan"))
    ours_error = error(ours(epilogue, first)[batches], wanted)
    assert not first.out.isnan().any(), "parts of D were not written"
    op = op_of(epilogue)
    inputs = () if epilogue == "none" else (first.bias,)
    decision = op.plan(first.a, first.b, *inputs, out=first.out)
    variants: dict[str, Callable[[int], object]] = {"ours": lambda index: ours(epilogue, sets[index % len(sets)])}
    for config in small_kernels(case):
        kernel = co.build(decision.device.spec(decision.signature, config))
        first.out.fill_(float("nan"))
        kernel(first.a, first.b, *inputs, out=first.out)
        assert error(first.out[batches], wanted) <= 2 * ours_error, f"{config.slug} is wrong"
        variants[config.slug] = lambda index, f=kernel: run_exact(f, epilogue, sets[index % len(sets)])
    errors: dict[str, float] = {}
    for peer, function in peers(epilogue).items():
        errors[peer] = error(function(first)[batches], wanted)
        variants[peer] = lambda index, f=function: f(sets[index % len(sets)])
    assert ours_error <= 2 * min(errors.values()), f"error is {ours_error:.2g}, and peers have {errors}"
    times = harness.time_interleaved(variants, expected_us(case.problem, width))
    mine = times.pop("ours")
    small = {config.slug: round(times.pop(config.slug).median, 5) for config in small_kernels(case)}
    best = min(times, key=lambda peer: times[peer].median)
    ratio = harness.ratios(mine, times[best])
    return {
        "case": name,
        "batches": count,
        "m": m,
        "n": n,
        "k": k,
        "dtype": str(case.dtype).removeprefix("torch."),
        "epilogue": epilogue,
        "ours_ms": round(mine.median, 5),
        "peers": {peer: round(each.median, 5) for peer, each in times.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "tflops": round(case.problem.flops / mine.median / 1e9, 1),
        "gb_per_s": round(moved / mine.median / 1e6, 1),
        "error": round(ours_error, 6),
        "peers_error": {peer: round(each, 6) for peer, each in errors.items()},
        "kernel": decision.spec.config.slug,
        "small": small,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios by epilogue."""
    result = {}
    for epilogue in EPILOGUES:
        members = [r for r in rows if r["epilogue"] == epilogue]
        if not members:
            continue
        worst = min(members, key=lambda r: r["ratio_to_best_peer"])
        result[epilogue] = {
            "geomean": round(harness.geomean([r["ratio_to_best_peer"] for r in members]), 4),
            "worst": worst["ratio_to_best_peer"],
            "worst_case": worst["case"],
            "losses": sum(r["ratio_to_best_peer"] < 1 for r in members),
            "cases": len(members),
        }
    return result


def main() -> None:
    """Run the cases and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--epilogues", nargs="+", default=list(EPILOGUES), choices=EPILOGUES)
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {(r["case"], r["epilogue"]) for r in rows}
    cases = [case for case in product(args.cases, args.epilogues) if case not in done]
    build_ahead(cases)
    for name, epilogue in cases:
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {name} {epilogue}")
            break
        rows.append(run_case(name, epilogue))
        row = rows[-1]
        others = " ".join(f"{peer} {ms * 1e3:.1f}" for peer, ms in row["peers"].items())
        print(
            f"{name} {epilogue} {CASES[name].problem}: ours {row['ours_ms'] * 1e3:.1f} us, {others}, "
            f"ratio {row['ratio_to_best_peer']} {row['kernel']}",
            flush=True,
        )
        harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
