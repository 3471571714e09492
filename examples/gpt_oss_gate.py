"""The gate of gpt-oss's experts, both halves of it clamped, in the kernel that computes both products."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

import cutlass_ops as co

M, N, K = 192, 512, 256
ALPHA, LIMIT = 1.702, 7.0


@co.epilogue
def gpt_oss_gate(acc, up: co.Product, gate_bias: co.Row, up_bias: co.Row, alpha: co.Scalar, limit: co.Scalar):  # noqa: ANN001, ANN201
    """D = gate · sigmoid(alpha · gate) · (up + 1): the gate is clamped from above, and up on both sides."""
    gate = co.e.minimum(acc + gate_bias, limit)
    return gate * co.e.sigmoid(alpha * gate) * (co.e.clamp(up + up_bias, -limit, limit) + 1.0)


def in_pytorch(x: Tensor, w_gate: Tensor, w_up: Tensor, gate_bias: Tensor, up_bias: Tensor) -> Tensor:
    """Compute the same in PyTorch, in the type of its arguments."""
    gate = (x @ w_gate + gate_bias).clamp(max=LIMIT)
    up = (x @ w_up + up_bias).clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(ALPHA * gate) * (up + 1)


def main() -> None:
    """Run the epilogue and compare it with separate PyTorch operations."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(M, K).to(device, torch.bfloat16)
    # Weights (N, K), as linear layers have them; some values are beyond the limit.
    w_gate, w_up = ((0.2 * torch.randn(N, K)).to(device, torch.bfloat16).t() for _ in range(2))
    gate_bias, up_bias = (torch.randn(N).to(device, torch.bfloat16) for _ in range(2))

    h = co.gemm(
        x, w_gate, epilogue=gpt_oss_gate, up=w_up, gate_bias=gate_bias, up_bias=up_bias, alpha=ALPHA, limit=LIMIT
    )

    given = (x, w_gate, w_up, gate_bias, up_bias)
    exact = in_pytorch(*(t.double() for t in given))
    errors = [((t.double() - exact).norm() / exact.norm()).item() for t in (h, in_pytorch(*given))]
    clamped = (x.double() @ w_gate.double() + gate_bias.double() > LIMIT).double().mean().item()
    print(f"h {tuple(h.shape)} {h.dtype} on {device}; {clamped:.1%} of the gates are clamped")
    print(f"relative error against float64: {errors[0]:.2e}; PyTorch operation by operation: {errors[1]:.2e}")
    if not errors[0] <= 2 * errors[1]:
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
