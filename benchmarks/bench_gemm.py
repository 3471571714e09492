"""Measures fused GEMMs against cuBLASLt, eager PyTorch and torch.compile.

    python benchmarks/bench_gemm.py --out benchmarks/results/gemm_h100.json
    python benchmarks/bench_gemm.py --ops bias_relu --dtypes bf16 --peers cublaslt eager --out /tmp/r.json
    python benchmarks/bench_gemm.py --resume /tmp/r.json --out /tmp/all.json    # only missing rows

    python benchmarks/bench_gemm.py --set decode --ops gemm --peers eager --out benchmarks/results/gemm_decode_h100.json
    python benchmarks/bench_gemm.py --layouts row-row col-col --rows 1024 --out /tmp/majors.json
    python benchmarks/bench_gemm.py --held-out --ops bias_relu --out /tmp/held_out.json    # as if tuned on the others

Each row: {"set", "op", "dtype", "layout", "m", "n", "k", "ours_ms", "peers": {name: ms}, "best_peer",
"ratio_to_best_peer", "ratio_range", "plain_over_ours", "error_over_eager", "bandwidth", "kernel"}. A layout names the
majors of A and B. `plain` is our GEMM without an epilogue, the limit for one with an epilogue.
The bandwidth is that of operands and D, each once, over that of a device-to-device copy of 1 GiB.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import harness
import shapes
import torch
import torch._inductor.config
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.choose.tables import Table
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import named, ops
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.tuner.timing import expected_us, rotation
from cutlass_ops.tuner.tuning import signature_at

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@co.epilogue
def bias_gelu_residual(acc, bias: co.Row, residual: co.Tile):  # noqa: ANN001, ANN201
    """D = gelu(A @ B + bias) + residual, GELU by tanh."""
    return co.gelu(acc + bias, approximate="tanh") + residual


@dataclass(frozen=True)
class Inputs:
    """One set of a case's tensors: A (M, K), B (K, N) and possible inputs of epilogues."""

    a: Tensor
    b: Tensor
    bias: Tensor
    residual: Tensor
    out: Tensor


def _linear(x: Inputs) -> Tensor:
    return F.linear(x.a, x.b.t(), x.bias)


@dataclass(frozen=True)
class Benchmark:
    """An op, its composition in PyTorch, and the same with cuBLASLt's epilogue, if there is one."""

    op: ops.Op
    inputs: tuple[str, ...]
    eager: Callable[[Inputs], Tensor]
    cublaslt: Callable[[Inputs], Tensor] | None = None


BENCHMARKS = {
    "gemm": Benchmark(ops.op_of(None), (), lambda x: torch.mm(x.a, x.b)),
    "bias_relu": Benchmark(
        named.gemm_bias_relu, ("bias",), lambda x: F.relu(_linear(x)),
        lambda x: torch._addmm_activation(x.bias, x.a, x.b, use_gelu=False),
    ),
    "bias_silu": Benchmark(named.gemm_bias_silu, ("bias",), lambda x: F.silu(_linear(x))),
    "bias_gelu_residual": Benchmark(
        ops.op(bias_gelu_residual), ("bias", "residual"),
        lambda x: F.gelu(_linear(x), approximate="tanh") + x.residual,
        lambda x: torch._addmm_activation(x.bias, x.a, x.b, use_gelu=True) + x.residual,
    ),
}  # fmt: skip
LAYOUTS = ("row-col", "row-row", "col-row", "col-col")


def make_inputs(m: int, n: int, k: int, dtype: torch.dtype, layout: str = "row-col") -> list[Inputs]:
    """Draw enough sets of inputs to rotate."""
    major_a, major_b = layout.split("-")

    def draw(rows: int, columns: int, major: str = "row") -> Tensor:
        if major == "col":
            return torch.randn(columns, rows, device="cuda", dtype=dtype).t()
        return torch.randn(rows, columns, device="cuda", dtype=dtype)

    count = rotation(2 * (m * k + n * k + 2 * m * n))
    return [
        Inputs(draw(m, k, major_a), draw(k, n, major_b).div_(k**0.5), draw(1, n)[0], draw(m, n), draw(m, n))
        for _ in range(count)
    ]


def check(bench: Benchmark, x: Inputs) -> float:
    """Compare sampled rows with float64; return our error over eager's.

    Raises
    ------
    AssertionError
        If the error is more than twice eager PyTorch's, or an element was not written.
    """
    x.out.fill_(float("nan"))
    bench.op(x.a, x.b, *(getattr(x, name) for name in bench.inputs), out=x.out)
    rows = torch.randint(x.a.shape[0], (64,), device="cuda")
    sampled = Inputs(x.a[rows].double(), x.b.double(), x.bias.double(), x.residual[rows].double(), x.out[rows])
    exact, eager = bench.eager(sampled), bench.eager(x)[rows]
    ours_error, eager_error = ((v.double() - exact).norm() / exact.norm() for v in (sampled.out, eager))
    assert not x.out.isnan().any(), "output left unwritten"
    ratio = float(ours_error / eager_error)
    assert ratio <= 2, f"error is {ratio:.2f} times eager's"
    return ratio


@dataclass(frozen=True)
class Case:
    """The case of a row."""

    set: str
    op: str
    dtype: str
    layout: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.op} {self.dtype} {self.layout} {self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class Part:
    """Cases that run together, and the problems of their weights that count as tuned meanwhile."""

    cases: list[Case]
    weights: frozenset[tuple[int, int]] = frozenset()
    tuned: frozenset[Problem] = frozenset()

    @contextmanager
    def known(self) -> Iterator[None]:
        """Choose kernels as if the shipped tables had no other problems of these weights."""
        shipped = policies._shipped

        def less(device: str, signature: OpSignature) -> Table | None:
            table = shipped(device, signature)
            return table and replace(table, points=tuple(p for p in table.points if self._counts(p.problem)))

        policies._shipped = less
        policies.forget(shipped=True)
        try:
            yield
        finally:
            policies._shipped = shipped
            policies.forget(shipped=True)

    def _counts(self, problem: Problem) -> bool:
        return (problem.n, problem.k) not in self.weights or problem in self.tuned


def halves(cases: list[Case]) -> list[Part]:
    """Return each half of the cases, with the problems of the other half counting as tuned."""
    of = {case: Problem(case.m, case.n, case.k) for case in cases}
    problems = list(dict.fromkeys(of.values()))
    weights = frozenset((p.n, p.k) for p in problems)
    found = []
    for mine, others in ((problems[::2], problems[1::2]), (problems[1::2], problems[::2])):
        found.append(Part([case for case in cases if of[case] in mine], weights, frozenset(others)))
    return found


def in_order(parts: list[Part], done: set[tuple[Any, ...]], device: Device) -> Iterator[Case]:
    """Yield the missing cases part by part, with the part's tuned problems set and all kernels built."""
    for part in parts:
        with part.known():
            left = [case for case in part.cases if astuple(case) not in done]
            build_many(kernels_of(left, device))
            yield from left


def kernels_of(cases: list[Case], device: Device) -> list[KernelSpec]:
    """Return the kernels that serve cases, each once."""
    specs = {}
    for case in cases:
        for op in (case.op, "gemm"):
            signature, problem = asked(replace(case, op=op), device)
            specs[dispatch.choose(signature, device, problem)[0]] = None
    return list(specs)


def asked(case: Case, device: Device) -> tuple[OpSignature, Problem]:
    """Return a case's signature, device and problem for dispatch."""
    problem, (a, b) = Problem(case.m, case.n, case.k), case.layout.split("-")
    return signature_at(BENCHMARKS[case.op].op.graph, problem, case.dtype, a, b, None, device), problem


def run_case(case: Case, peers: list[str], copy_bandwidth: float) -> dict[str, Any]:
    """Check and time one case."""
    bench, m, n, k = BENCHMARKS[case.op], case.m, case.n, case.k
    sets = make_inputs(m, n, k, DTYPES[case.dtype], case.layout)
    with torch.no_grad():
        error = check(bench, sets[0])
        plan = bench.op.plan(sets[0].a, sets[0].b, *(getattr(sets[0], i) for i in bench.inputs))

        def ours(index: int) -> object:
            x = sets[index % len(sets)]
            return bench.op(x.a, x.b, *(getattr(x, i) for i in bench.inputs), out=x.out)

        def plain(index: int) -> object:
            x = sets[index % len(sets)]
            return co.gemm(x.a, x.b, out=x.out)

        variants: dict[str, Callable[[int], object]] = {"ours": ours}
        if bench.inputs:
            variants["plain"] = plain
        for name, function in _peers(bench, peers).items():
            variants[name] = lambda index, f=function: f(sets[index % len(sets)])
        times = harness.time_interleaved(variants, expected_us(Problem(m, n, k)))
    mine, without = times.pop("ours"), times.pop("plain", None)
    best = min(times, key=lambda p: times[p].median)
    ratio = harness.ratios(mine, times[best])
    moved = 2 * (m * k + k * n + m * n)
    return {
        **asdict(case),
        "ours_ms": round(mine.median, 5),
        "peers": {p: round(t.median, 5) for p, t in times.items()},
        "best_peer": best,
        "ratio_to_best_peer": ratio["median"],
        "ratio_range": [ratio["min"], ratio["max"]],
        "plain_over_ours": 1.0 if without is None else harness.ratios(mine, without)["median"],
        "error_over_eager": round(error, 3),
        "bandwidth": round(moved / (mine.median * 1e-3) / copy_bandwidth, 4),
        "kernel": plan.spec.config.slug,
    }


def _peers(bench: Benchmark, names: list[str]) -> dict[str, Callable[[Inputs], Tensor]]:
    found: dict[str, Callable[[Inputs], Tensor]] = {}
    if "eager" in names:
        found["eager"] = bench.eager
    if "cublaslt" in names and bench.cublaslt is not None:
        found["cublaslt"] = bench.cublaslt
    if "compile" in names:
        found["compile"] = _compiled(bench)
    return found


def _compiled(bench: Benchmark) -> Callable[[Inputs], Tensor]:
    torch._dynamo.reset()
    # Threads, since autotuning repeats the compilations of worker processes: 8 s per shape instead of 1.
    torch._inductor.config.compile_threads = 1

    def function(*tensors: Tensor) -> Tensor:
        return bench.eager(Inputs(*tensors))

    compiled = torch.compile(function, mode="max-autotune-no-cudagraphs", dynamic=False)
    return lambda x: compiled(x.a, x.b, x.bias, x.residual, x.out)


def copy_bandwidth() -> float:
    """Return bytes a second, read and written, of a device-to-device copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = harness.time_interleaved({"copy": lambda _: target.copy_(source)}, 700.0)
    return 2 * source.numel() / (times["copy"].median * 1e-3)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the ratios, for each op and dtype and over all."""
    groups: dict[str, list[dict[str, Any]]] = {"all": rows}
    for row in rows:
        groups.setdefault(" ".join(row[name] for name in ("set", "op", "dtype", "layout")), []).append(row)
    result = {}
    for name, members in groups.items():
        worst = min(members, key=lambda r: r["ratio_to_best_peer"])
        large = [r["ratio_to_best_peer"] for r in members if r["m"] >= 128]
        result[name] = {
            "geomean": round(harness.geomean([r["ratio_to_best_peer"] for r in members]), 4),
            "worst": worst["ratio_to_best_peer"],
            "worst_shape": [worst["m"], worst["n"], worst["k"]],
            "worst_from_m_128": min(large, default=None),
            "bandwidth": round(harness.geomean([r["bandwidth"] for r in members]), 4),
            "shapes": len(members),
        }
    return result


def _line(case: Case, row: dict[str, Any]) -> str:
    peers = " ".join(f"{p} {t * 1e3:.1f}" for p, t in row["peers"].items())
    return (
        f"{case}: ours {row['ours_ms'] * 1e3:.1f} us, {peers}, ratio {row['ratio_to_best_peer']:.3f} "
        f"{row['ratio_range']} bandwidth {row['bandwidth']:.2f} {row['kernel']}"
    )


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(shapes.SETS), default="grid")
    parser.add_argument("--ops", nargs="+", default=["bias_relu", "bias_gelu_residual"], choices=list(BENCHMARKS))
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", default=["row-col"], choices=LAYOUTS, help="majors of A and B")
    parser.add_argument("--peers", nargs="+", default=["cublaslt", "eager", "compile"])
    parser.add_argument("--held-out", action="store_true", help="each half of the set as if tuned on the other alone")
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--limit", type=float, default=1e9, help="stop after this many seconds")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="result with rows to keep")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    environment = harness.begin()
    begin, rows = time.monotonic(), harness.measured(args.resume, environment)
    done = {tuple(r[name] for name in Case.__dataclass_fields__) for r in rows}
    bandwidth = copy_bandwidth()
    head = {**environment, "copy_gb_per_s": round(bandwidth / 1e9, 1)}
    wanted = product(args.ops, args.dtypes, args.layouts, shapes.SETS[args.set])
    name = f"{args.set}, held out" if args.held_out else args.set
    cases = [Case(name, *kind, m, n, k) for *kind, (m, n, k) in wanted if args.rows is None or m in args.rows]
    parts = halves(cases) if args.held_out else [Part(cases)]
    for case in in_order(parts, done, device_of(torch.device("cuda", 0))):
        if time.monotonic() - begin > args.limit:
            print(f"stopped at the limit before {case}")
            break
        rows.append(run_case(case, args.peers, bandwidth))
        print(_line(case, rows[-1]), flush=True)
        harness.save(args.out, {**head, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
