"""A custom epilogue: a Python function, traced once, that becomes part of the GEMM's kernel."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co

M, N, K = 256, 512, 384


@co.epilogue
def swish_residual(acc, bias: co.Row, residual: co.Tile, scale: co.Scalar):  # noqa: ANN001, ANN201
    """D = silu(A @ B + bias) * scale + residual, and the sum of squares of D's rows, for a following RMSNorm."""
    d = co.e.silu(acc + bias) * scale + residual
    return {"d": d, "row_sum_square": co.sum_square(d, dim=1)}


def main() -> None:
    """Run the epilogue and compare it with separate PyTorch operations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    a, b, bias, residual = (torch.randn(shape).to(device, torch.bfloat16) for shape in ((M, K), (K, N), (N,), (M, N)))
    print(swish_residual)

    result = co.gemm(a, b, epilogue=swish_residual, bias=bias, residual=residual, scale=0.5)

    exact = F.silu(a.double() @ b.double() + bias.double()) * 0.5 + residual.double()
    torchs = F.silu(a @ b + bias) * 0.5 + residual
    error, torch_error = ((d.double() - exact).abs().max().item() for d in (result.d, torchs))
    sums = ((result.row_sum_square.double() / exact.square().sum(1)) - 1).abs().max().item()
    print(
        f"d {tuple(result.d.shape)} {result.d.dtype}, row_sum_square {tuple(result.row_sum_square.shape)} "
        f"{result.row_sum_square.dtype}, on {device}"
    )
    print(f"largest error of d against float64: {error:.2e}; four PyTorch operations: {torch_error:.2e}")
    print(f"largest relative error of row_sum_square: {sums:.2e}")
    if error > 2 * torch_error or sums > 1e-4:
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
