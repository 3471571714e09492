"""Measures RMSNorm fused with the next GEMM, against the GEMM alone, eager PyTorch and torch.compile.

    python benchmarks/bench_rmsnorm.py --out benchmarks/results/rmsnorm_h100.json
    python benchmarks/bench_rmsnorm.py --set unseen --skip ways --out benchmarks/results/rmsnorm_unseen_h100.json
    python benchmarks/bench_rmsnorm.py --rows 16 4096 --dtypes bf16 --skip compile --out /tmp/r.json

Each row: {"dtype", "m", "n", "k", "error_over_eager", "kernel", "ms": {name: ms}, "over_ours": {name: ratio, range}}.
`ours` is dispatch's choice. `gathered`, `beside` and `ahead` compute the statistic from x with the same tiles, if legal
(`Sm90Config.means`). `statistic` takes sums of squares, as from a previous GEMM. `gemm` is our GEMM without a norm, the
limit for the fused kernel.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import harness
import shapes
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.config import Means
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand.call import device_of
from cutlass_ops.run import norms, ops
from cutlass_ops.tuner.timing import expected_us, rotation

SETS = {"grid": shapes.NORMS, "unseen": shapes.UNSEEN_NORMS}
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
PEERS = ("ways", "statistic", "gemm", "eager", "compile")
EPS = 1e-5


def eager(x: Tensor, weight: Tensor, gamma: Tensor) -> Tensor:
    """Compute the same in PyTorch."""
    return F.linear(F.rms_norm(x, x.shape[-1:], gamma, EPS), weight)


@dataclass(frozen=True)
class Inputs:
    """One set of a shape's tensors."""

    x: Tensor
    weight: Tensor
    gamma: Tensor
    out: Tensor
    prepared: co.types.PreparedWeight
    statistic: co.RowStatistic

    @classmethod
    def draw(cls, m: int, n: int, k: int, dtype: torch.dtype) -> Inputs:
        """Draw x (M, K), weight (N, K) and gamma (K,)."""
        draw = {"device": "cuda", "dtype": dtype}
        x, weight = torch.randn(m, k, **draw), torch.randn(n, k, **draw).div_(k**0.5)
        gamma = torch.randn(k, **draw).mul_(0.2).add_(1)
        statistic = co.RowStatistic(x.float().square().sum(1), k, EPS)
        return cls(x, weight, gamma, torch.empty(m, n, **draw), co.prepare(weight.t(), gamma), statistic)


VARIANTS: dict[str, Callable[[Inputs], Tensor]] = {
    "ours": lambda t: co.rmsnorm_gemm(t.x, t.prepared, eps=EPS, out=t.out),
    "statistic": lambda t: co.rmsnorm_gemm(t.x, t.prepared, rstd=t.statistic, out=t.out),
    "gemm": lambda t: co.gemm(t.x, t.prepared.matrix, out=t.out),
    "eager": lambda t: eager(t.x, t.weight, t.gamma),
}


def ways(x: Tensor, w: Tensor) -> dict[str, KernelSpec]:
    """Return the kernel of `ours` for x (M, K) and w (K, N), with each other way to compute the means.

    A GEMV kernel has only one way.
    """
    device = device_of(torch.device("cuda", 0))
    signature, problem = harness.asked(norms.rmsnorm_op(), (x, w, EPS), device)
    _, config = dispatch.choose(signature, device, problem)
    if not isinstance(config, Sm90Config):
        return {}
    others = {way: signature.spec(replace(config, means=way)) for way in get_args(Means) if way != config.means}
    return {way: spec for way, spec in others.items() if not legality.check(spec)}


def build_ahead(dtypes: list[str], problems: list[shapes.Shape], peers: list[str]) -> None:
    """Compile all kernels in parallel."""
    calls: list[tuple[ops.Op, tuple[Any, ...]]] = []
    further: dict[KernelSpec, None] = {}
    for dtype, (m, n, k) in product(dtypes, problems):
        a, w = (torch.empty(shape, device="meta", dtype=DTYPES[dtype]) for shape in ((m, k), (n, k)))
        sums = torch.empty(m, device="meta")
        calls += [
            (norms.rmsnorm_op(), (a, w.t(), EPS)),
            (norms.rmsnorm_op(given="sums"), (a, w.t(), sums, 1 / k, EPS)),
            (ops.op_of(None), (a, w.t())),
        ]
        if "ways" in peers:
            further |= dict.fromkeys(ways(a, w.t()).values())
    harness.build_ahead(calls)
    build_many(further)


def check(t: Inputs) -> float:
    """Compare sampled rows of both ways with float64; return the larger error over eager's."""
    sampled = torch.randint(t.x.shape[0], (64,), device=t.x.device)
    exact = eager(t.x[sampled].double(), t.weight.double(), t.gamma.double())
    theirs, found = eager(t.x, t.weight, t.gamma)[sampled], []
    for name in ("ours", "statistic"):
        t.out.fill_(float("nan"))
        VARIANTS[name](t)
        assert not t.out.isnan().any(), "output left unwritten"
        found.append(harness.check(t.out[sampled], exact, theirs))
    return max(found)


def run_case(dtype: str, m: int, n: int, k: int, peers: list[str]) -> dict[str, Any]:
    """Check and time one shape."""
    sets = [Inputs.draw(m, n, k, DTYPES[dtype]) for _ in range(rotation(2 * (m * k + n * k + m * n)))]
    error, known = check(sets[0]), dict(VARIANTS)
    if "compile" in peers:
        compiled = harness.compiled(eager)
        known["compile"] = lambda t: compiled(t.x, t.weight, t.gamma)
    for way, spec in ways(sets[0].x, sets[0].prepared.matrix).items() if "ways" in peers else ():
        kernel = co.build(spec)
        known[way] = lambda t, kernel=kernel: kernel(t.x, t.prepared.matrix, EPS, out=t.out)
    wanted = [name for name in known if name in ("ours", *peers, *get_args(Means))]
    variants = {name: lambda i, f=known[name]: f(sets[i % len(sets)]) for name in wanted}
    plan = norms.rmsnorm_op().plan(sets[0].x, sets[0].prepared.matrix, EPS)
    return {
        "dtype": dtype, "m": m, "n": n, "k": k,
        "error_over_eager": round(error, 3),
        "kernel": plan.spec.config.slug,
        **harness.compare(variants, expected_us(Problem(m, n, k))),
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
    head, rows, peers = harness.begin(), [], [p for p in PEERS if p not in args.skip]
    problems = [p for p in SETS[args.set] if args.rows is None or p[0] in args.rows]
    build_ahead(args.dtypes, problems, peers)
    with torch.no_grad():
        for dtype, (m, n, k) in product(args.dtypes, problems):
            rows.append(run_case(dtype, m, n, k, peers))
            print(rows[-1], flush=True)
            harness.save(args.out, {**head, "rows": rows})


if __name__ == "__main__":
    main()
