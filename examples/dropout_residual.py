"""Dropout and a residual in the kernel of the GEMM before them, with a mask that can be computed again."""

from __future__ import annotations

import sys

import torch

import cutlass_ops as co
from cutlass_ops.operand import reference

M, N, K, P = 256, 512, 384, 0.1
SEED = 0x1234_5678_9ABC_DEF0


@co.epilogue
def dropout_residual(acc, bias: co.Row, residual: co.Tile, p: co.Scalar, seed: co.Integer, step: co.Integer):  # noqa: ANN001, ANN201
    """D = dropout(A @ B + bias) + residual."""
    kept = co.e.dropout_mask(p, seed, step)
    return co.e.where(kept, (acc + bias) / (1.0 - p), 0.0) + residual


def main() -> None:
    """Run two steps, and compare each with PyTorch in float64 under the same mask."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    a, b, bias, residual = (torch.randn(shape).to(device, torch.bfloat16) for shape in ((M, K), (K, N), (N,), (M, N)))
    branch = (a.double() @ b.double() + bias.double()) / (1 - P)

    masks = []
    for step in range(2):
        d = co.gemm(a, b, epilogue=dropout_residual, bias=bias, residual=residual, p=P, seed=SEED, step=step)
        # What a backward pass would do: the same numbers once more.
        mask = reference.uniform(SEED, step, M, N, device) >= torch.tensor(P)
        exact = torch.where(mask, branch, 0.0) + residual.double()
        error = ((d.double() - exact).norm() / exact.norm()).item()
        print(f"step {step}: {mask.double().mean().item():.1%} kept, relative error against float64 {error:.1e}")
        if error > 4e-3:
            sys.exit("the result is wrong")
        masks.append(mask)
    print(f"both steps keep {(masks[0] & masks[1]).double().mean().item():.1%}")


if __name__ == "__main__":
    main()
