"""Measures errors of norms fused with GEMMs against float64, beside those of F.rms_norm or F.layer_norm and F.linear.

    python benchmarks/accuracy_rmsnorm.py --out benchmarks/results/accuracy_rmsnorm_h100.json
    python benchmarks/accuracy_rmsnorm.py --sizes 64 256 4096    # M, N and K; without --out it only prints

It runs on the CPU if there is no GPU. Each row: {"op", "case", "dtype", "way", "m", "n", "k", "error", "pytorch",
"ratio", "worst_row_ratio"}: relative errors in the Frobenius norm, ours over PyTorch's, and the same for the worst row
of each. The way is the source of the row statistic. `mean r`: the mean of a row is r times its deviation. Ways that end
in `modelled` run no kernel: sums are truncated to FP32 after every 16 products, a guess at what Tensor Cores do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import harness
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.declare.problem import Problem

EPS = 1e-5
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
RATIOS = (10, 50, 80, 100, 200, 1000)
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _random(x: Tensor) -> Tensor:
    return x


def _outliers(x: Tensor) -> Tensor:
    x[:, ::61] *= 1000
    return x


def cases() -> dict[str, Callable[[Tensor], Tensor]]:
    """Return functions of normal rows, by the case's name."""
    found = {"random": _random, "outlier channels": _outliers, "tiny": lambda x: x * 1e-4}
    return found | {f"mean {ratio}": lambda x, ratio=ratio: x + ratio for ratio in RATIOS}


def _moments(x: Tensor) -> dict[str, Tensor]:
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    return {"mean": mean, "rstd": (variance + EPS).rsqrt()}


def _sums(x: Tensor) -> co.RowStatistic:
    return co.RowStatistic(x.float().square().sum(-1), x.shape[-1], EPS)


def _truncated_sums(x: Tensor, w: Tensor) -> Tensor:
    """Return x @ w, (M, N), in FP32, rounded towards zero after every 16 products."""
    acc = torch.zeros(x.shape[0], w.shape[1], device=x.device)
    for k in range(0, x.shape[1], 16):
        exact = acc.double() + x[:, k : k + 16].double() @ w[k : k + 16].double()
        nearest = exact.float()
        beyond = nearest.double().abs() > exact.abs()
        acc = torch.where(beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    return acc


def _modelled(
    x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor, moments: Callable[[Tensor], dict[str, Tensor]]
) -> Tensor:
    prepared, found = co.prepare(w.t(), gamma, beta, norm="layer"), moments(x)
    centred = _truncated_sums(x, prepared.matrix) - found["mean"][:, None] * prepared.column_sum
    return (centred * found["rstd"][:, None] + prepared.shift).to(x.dtype)


def _one_pass(x: Tensor) -> dict[str, Tensor]:
    mean = x.float().mean(-1)
    variance = (x.float().square().mean(-1) - mean.square()).clamp_min(0)
    return {"mean": mean, "rstd": (variance + EPS).rsqrt()}


# The ways of each op, for x (M, K), weight (N, K), gamma and beta (K,).
WAYS: dict[str, dict[str, Way]] = {
    "rmsnorm_gemm": {
        "gathered": lambda x, w, gamma, beta: co.rmsnorm_gemm(x, co.prepare(w.t(), gamma), eps=EPS),
        "sums given": lambda x, w, gamma, beta: co.rmsnorm_gemm(x, co.prepare(w.t(), gamma), rstd=_sums(x)),
    },
    "layernorm_gemm": {
        "gathered": lambda x, w, gamma, beta: co.layernorm_gemm(
            x, co.prepare(w.t(), gamma, beta, norm="layer"), eps=EPS
        ),
        "moments given": lambda x, w, gamma, beta: co.layernorm_gemm(
            x, co.prepare(w.t(), gamma, beta, norm="layer"), **_moments(x)
        ),
        "gathered, modelled": lambda *tensors: _modelled(*tensors, _one_pass),
        "moments given, modelled": lambda *tensors: _modelled(*tensors, _moments),
    },
}  # fmt: skip


def pytorch(op: str, x: Tensor, w: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Compute the same with PyTorch's two operations, in the precision of the tensors."""
    if op == "rmsnorm_gemm":
        return F.linear(F.rms_norm(x, x.shape[-1:], gamma, EPS), w)
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), w)


def measure(sizes: tuple[int, int, int], device: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the result."""
    m, n, k = Problem.of(sizes).extents
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def draw(make: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        return make(normal(m, k)), normal(n, k) / k**0.5, 1 + 0.2 * normal(k), normal(k)

    if device == "cuda":
        _build_ahead(draw(_random))
    for op, ways in WAYS.items():
        for name, make in cases().items():
            x32, w32, gamma32, beta32 = draw(make)
            for dtype, torch_dtype in DTYPES.items():
                tensors = [t.to(torch_dtype) for t in (x32, w32, gamma32, beta32)]
                exact = pytorch(op, *(t.double() for t in tensors))
                theirs = errors(pytorch(op, *tensors), exact)
                for way, function in ways.items():
                    ours = errors(function(*tensors), exact)
                    yield {
                        "op": op, "case": name, "dtype": dtype, "way": way, "m": m, "n": n, "k": k,
                        "error": float(f"{ours[0]:.3g}"), "pytorch": float(f"{theirs[0]:.3g}"),
                        "ratio": round(ours[0] / theirs[0], 3), "worst_row_ratio": round(ours[1] / theirs[1], 3),
                    }  # fmt: skip


def _build_ahead(drawn: tuple[Tensor, ...]) -> None:
    """Compile the kernels of all ways in parallel."""
    harness.side_by_side(
        partial(way, *(t.to(dtype) for t in drawn))
        for ways in WAYS.values()
        for name, way in ways.items()
        for dtype in DTYPES.values()
        if not name.endswith("modelled")
    )


def errors(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the relative error of the whole and of the worst row."""
    difference = found.double() - exact
    rows = difference.norm(dim=1) / exact.norm(dim=1)
    return float(difference.norm() / exact.norm()), float(rows.max())


def main() -> None:
    """Measure, print and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs=3, type=int, default=[256, 1024, 4096], metavar=("M", "N", "K"))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    with torch.no_grad():
        for row in measure(tuple(args.sizes), device):
            rows.append(row)
            print(
                f"{row['op']:15} {row['case']:16} {row['dtype']:4} {row['way']:23} error {row['error']:.2e} PyTorch "
                f"{row['pytorch']:.2e} ratio {row['ratio']:.2f} worst row {row['worst_row_ratio']:.2f}",
                flush=True,
            )
    if args.out is not None:
        harness.save(args.out, {**harness.about(device), "rows": rows})


if __name__ == "__main__":
    main()
