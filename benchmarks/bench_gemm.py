"""Fused GEMMs against cuBLASLt, eager PyTorch and torch.compile.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h100.json
    python benchmarks/bench_gemm.py --ops bias_relu --dtypes bf16 --peers cublaslt eager --out /tmp/r.json
    python benchmarks/bench_gemm.py --resume /tmp/r.json --out /tmp/all.json    # the rows that are not there yet

Each row: {"op", "dtype", "m", "n", "k", "ours_ms", "peers": {name: ms}, "ratio_to_best_peer", "ratio_range", "kernel"}.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import shapes
import torch
import torch._inductor.config
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import ops
from cutlass_ops.timing import expected_us, rotation

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@co.epilogue
def bias_gelu_residual(acc, bias: co.Row, residual: co.Tile):  # noqa: ANN001, ANN201
    """D = gelu(A @ B + bias) + residual, GELU by tanh."""
    return co.gelu(acc + bias, approximate="tanh") + residual


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors; the weight is (N, K), as in torch.nn.Linear."""

    a: Tensor
    weight: Tensor
    bias: Tensor
    residual: Tensor
    out: Tensor


def _relu(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.relu(F.linear(x, w, b))


def _gelu_residual(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh") + r


@dataclass(frozen=True)
class Benchmark:
    """An op, its composition in PyTorch, and the nearest that cuBLASLt offers."""

    op: ops.Op
    inputs: tuple[str, ...]
    eager: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    cublaslt: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


BENCHMARKS = {
    "bias_relu": Benchmark(
        ops.gemm_bias_relu, ("bias",), _relu,
        lambda x, w, b, r: torch._addmm_activation(b, x, w.t(), use_gelu=False),
    ),
    "bias_gelu_residual": Benchmark(
        ops.op(bias_gelu_residual), ("bias", "residual"), _gelu_residual,
        lambda x, w, b, r: torch._addmm_activation(b, x, w.t(), use_gelu=True) + r,
    ),
}  # fmt: skip


def make_inputs(m: int, n: int, k: int, dtype: torch.dtype) -> list[Inputs]:
    """Draw as many sets of inputs as rotation needs."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    count = rotation(2 * (m * k + n * k + 2 * m * n))
    return [
        Inputs(draw(m, k), draw(n, k) / k**0.5, draw(n), draw(m, n), torch.empty(m, n, device="cuda", dtype=dtype))
        for _ in range(count)
    ]


def check(bench: Benchmark, x: Inputs, k: int) -> float:
    """Compare sampled rows with float64; return our error over eager's.

    Raises
    ------
    AssertionError
        If the error is more than twice eager PyTorch's, or anything was left unwritten.
    """
    x.out.fill_(float("nan"))
    bench.op(x.a, x.weight.t(), *(getattr(x, name) for name in bench.inputs), out=x.out)
    rows = torch.randint(x.a.shape[0], (64,), device="cuda")
    exact = bench.eager(x.a[rows].double(), x.weight.double(), x.bias.double(), x.residual[rows].double())
    eager = bench.eager(x.a, x.weight, x.bias, x.residual)[rows]
    ours_error, eager_error = ((v.double() - exact).norm() / exact.norm() for v in (x.out[rows], eager))
    assert not x.out.isnan().any(), "output left unwritten"
    ratio = float(ours_error / eager_error)
    assert ratio <= 2, f"error is {ratio:.2f} times eager's"
    return ratio


def run_case(name: str, dtype: str, m: int, n: int, k: int, peers: list[str]) -> dict[str, Any]:
    """Check and time one case."""
    bench = BENCHMARKS[name]
    sets = make_inputs(m, n, k, DTYPES[dtype])
    with torch.no_grad():
        error = check(bench, sets[0], k)
        plan = bench.op.plan(sets[0].a, sets[0].weight.t(), *(getattr(sets[0], i) for i in bench.inputs))

        def ours(index: int) -> object:
            x = sets[index % len(sets)]
            return bench.op(x.a, x.weight.t(), *(getattr(x, i) for i in bench.inputs), out=x.out)

        variants: dict[str, Callable[[int], object]] = {"ours": ours}
        for peer in peers:
            function = _peer(bench, peer)
            variants[peer] = lambda index, f=function: f(*_eager_arguments(sets[index % len(sets)]))
        times = harness.time_interleaved(variants, expected_us(m, n, k))
    mine = times.pop("ours")
    best = min(times, key=lambda p: times[p].median)
    ratio = harness.ratios(mine, times[best])
    return {
        "op": name, "dtype": dtype, "m": m, "n": n, "k": k,
        "ours_ms": round(mine.median, 5),
        "peers": {p: round(t.median, 5) for p, t in times.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "error_over_eager": round(error, 3),
        "kernel": plan.spec.config.slug,
    }  # fmt: skip


def _peer(bench: Benchmark, name: str) -> Callable[..., Tensor]:
    if name == "cublaslt":
        return bench.cublaslt
    if name == "eager":
        return bench.eager
    torch._dynamo.reset()
    # Threads, since autotuning compiles again what worker processes compiled: 8 s a shape instead of 1.
    torch._inductor.config.compile_threads = 1
    return torch.compile(bench.eager, mode="max-autotune-no-cudagraphs", dynamic=False)


def _eager_arguments(x: Inputs) -> tuple[Tensor, ...]:
    return x.a, x.weight, x.bias, x.residual


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios, for each op and dtype and over all."""
    groups: dict[str, list[dict[str, Any]]] = {"all": rows}
    for row in rows:
        groups.setdefault(f"{row['op']} {row['dtype']}", []).append(row)
    result = {}
    for name, members in groups.items():
        worst = min(members, key=lambda r: r["ratio_to_best_peer"])
        large = [r["ratio_to_best_peer"] for r in members if r["m"] >= 128]
        result[name] = {
            "geomean": round(harness.geomean([r["ratio_to_best_peer"] for r in members]), 4),
            "worst": worst["ratio_to_best_peer"],
            "worst_shape": [worst["m"], worst["n"], worst["k"]],
            "worst_from_m_128": min(large, default=None),
            "shapes": len(members),
        }
    return result


def measured(paths: list[Path], environment: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of earlier results.

    Raises
    ------
    SystemExit
        If a result belongs to another chip, date or version: one table never mixes them.
    """
    rows: list[dict[str, Any]] = []
    for path in paths:
        result = json.loads(path.read_text())
        differs = {key: (result.get(key), value) for key, value in environment.items() if result.get(key) != value}
        if differs:
            raise SystemExit(f"{path} was measured elsewhere: {differs}; measure it again")
        rows += result["rows"]
    return rows


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(BENCHMARKS), choices=list(BENCHMARKS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--peers", nargs="+", default=["cublaslt", "eager", "compile"])
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="results whose rows need no repetition")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.environment()
    begin, rows = time.monotonic(), measured(args.resume, environment)
    done = {(r["op"], r["dtype"], r["m"], r["n"], r["k"]) for r in rows}
    for op in args.ops:
        for dtype in args.dtypes:
            for m, n, k in shapes.GRID:
                if (args.rows is not None and m not in args.rows) or (op, dtype, m, n, k) in done:
                    continue
                if time.monotonic() - begin > args.limit:
                    print(f"stopped at the limit before {op} {dtype} {m}x{n}x{k}")
                    break
                row = run_case(op, dtype, m, n, k, args.peers)
                rows.append(row)
                peers = " ".join(f"{p} {t * 1e3:.1f}" for p, t in row["peers"].items())
                print(
                    f"{op} {dtype} {m}x{n}x{k}: ours {row['ours_ms'] * 1e3:.1f} us, {peers}, "
                    f"ratio {row['ratio_to_best_peer']:.3f} {row['ratio_range']} {row['kernel']}",
                    flush=True,
                )
                harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
