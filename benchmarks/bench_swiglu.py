"""Measures SwiGLU as one kernel, against two GEMMs, eager PyTorch and torch.compile.

    python benchmarks/bench_swiglu.py --out benchmarks/results/swiglu_h100.json
    python benchmarks/bench_swiglu.py --set unseen --out benchmarks/results/swiglu_unseen_h100.json
    python benchmarks/bench_swiglu.py --rows 16 4096 --skip compile --out /tmp/r.json

Each row: {"dtype", "m", "n", "k", "error_over_eager", "kernel", "ms": {name: ms}, "over_ours": {name: ratio, range}};
N is the number of output columns. `two_gemms` are this library's; the second takes the first one's result as a tile.
`eager_one_linear` multiplies by both weights at once, as serving engines store them, and then gates.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from typing import Any

import harness
import shapes
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import composed
from cutlass_ops.run import ops
from cutlass_ops.tuner.timing import expected_us, rotation

SETS = {"grid": shapes.GATES, "unseen": shapes.UNSEEN_GATES}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
PEERS = ("two_gemms", "eager", "eager_one_linear", "compile")


def eager(x: Tensor, both: Tensor) -> Tensor:
    """Compute the same in PyTorch, from both weights (2 N, K), the gate's first."""
    gate, up = both.chunk(2)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def one_linear(x: Tensor, both: Tensor) -> Tensor:
    """Compute the same with one product."""
    gate, up = F.linear(x, both).chunk(2, dim=-1)
    return F.silu(gate) * up


def two_gemms(x: Tensor, both: Tensor, out: Tensor) -> Tensor:
    """Compute the same with two GEMMs, the fallback of :func:`cutlass_ops.gemm_swiglu`."""
    gate, up = both.chunk(2)
    gated = co.gemm(x, gate.t(), epilogue=composed.swiglu_gate)
    return co.gemm(x, up.t(), epilogue=composed.swiglu_up, gate=gated, out=out)


def build_ahead(dtypes: list[str], problems: list[shapes.Shape]) -> None:
    """Compile all kernels in parallel."""
    calls: list[tuple[ops.Op, tuple[Any, ...]]] = []
    for dtype, (m, n, k) in product(dtypes, problems):
        x, w, gate = (torch.empty(s, device="meta", dtype=DTYPES[dtype]) for s in ((m, k), (n, k), (m, n)))
        calls += [
            (ops.op(composed.swiglu), (x, w.t(), w.t())),
            (ops.op(composed.swiglu_gate), (x, w.t())),
            (ops.op(composed.swiglu_up), (x, w.t(), gate)),
        ]
    harness.build_ahead(calls)


def run_case(dtype: str, m: int, n: int, k: int, peers: list[str]) -> dict[str, Any]:
    """Check and time one shape."""
    count = rotation(2 * (m * k + 2 * n * k + m * n))
    draw = {"device": "cuda", "dtype": DTYPES[dtype]}
    sets = [
        (torch.randn(m, k, **draw), torch.randn(2 * n, k, **draw).div_(k**0.5), torch.empty(m, n, **draw))
        for _ in range(count)
    ]

    def ours(index: int) -> Tensor:
        x, both, out = sets[index % count]
        gate, up = both.chunk(2)
        return co.gemm_swiglu(x, gate.t(), up.t(), out=out)

    x, both, out = sets[0]
    out.fill_(float("nan"))
    found, sampled = ours(0), torch.randint(m, (64,), device="cuda")
    assert not found.isnan().any(), "output left unwritten"
    error = harness.check(found[sampled], eager(x[sampled].double(), both.double()), eager(x, both)[sampled])
    compiled = harness.compiled(one_linear) if "compile" in peers else one_linear
    known = {
        "ours": ours,
        "two_gemms": lambda i: two_gemms(*sets[i % count]),
        "eager": lambda i: eager(*sets[i % count][:2]),
        "eager_one_linear": lambda i: one_linear(*sets[i % count][:2]),
        "compile": lambda i: compiled(*sets[i % count][:2]),
    }
    variants = {name: known[name] for name in ("ours", *peers)}
    gate, up = both.chunk(2)
    plan = ops.op(composed.swiglu).plan(x, gate.t(), up.t())
    return {
        "dtype": dtype, "m": m, "n": n, "k": k,
        "error_over_eager": round(error, 3),
        "kernel": plan.spec.config.slug,
        **harness.compare(variants, expected_us(Problem(m, 2 * n, k))),
    }  # fmt: skip


def main() -> None:
    """Run the grid and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=list(SETS), default="grid")
    parser.add_argument("--rows", nargs="+", type=int, default=None, help="only these M")
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--skip", nargs="+", default=[], choices=PEERS, help="variants to leave out")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    head, rows = harness.environment(), []
    problems = [p for p in SETS[args.set] if args.rows is None or p[0] in args.rows]
    build_ahead(args.dtypes, problems)
    with torch.no_grad():
        for dtype, (m, n, k) in product(args.dtypes, problems):
            rows.append(run_case(dtype, m, n, k, [p for p in PEERS if p not in args.skip]))
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
