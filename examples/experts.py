"""A mixture of experts: rows sorted by expert, SwiGLU and the way back as two grouped GEMMs, compared with float64.

It runs on a GPU of compute capability 9.0, or on the CPU.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co


@co.epilogue
def swiglu(acc, up: co.Product):  # noqa: ANN001, ANN201
    """Return one product of a row with its expert's weights, gated by the other."""
    return co.silu(acc) * up


@co.epilogue
def weighted(acc, share: co.Col):  # noqa: ANN001, ANN201
    """Return an expert's result, times the share that the router gives it."""
    return acc * share


def sorted_by_expert(x: Tensor, router: Tensor, chosen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token of each row, its share, and where each expert's rows end. Nothing waits for the device."""
    shares, experts = F.softmax(x @ router, dim=1).topk(chosen, dim=1)
    shares = shares / shares.sum(1, keepdim=True)
    order = experts.flatten().argsort(stable=True)
    counts = torch.zeros(router.shape[1], dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
    return order // chosen, shares.flatten()[order].float(), counts.cumsum(0, dtype=torch.int32)


def fused(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, routing: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Compute the layer: weights are (experts, N, K), as torch.nn.Linear has them."""
    tokens, shares, offsets = routing
    hidden = co.grouped_gemm(x[tokens], gate.mT, offsets, epilogue=swiglu, up=up.mT)
    rows = co.grouped_gemm(hidden, down.mT, offsets, epilogue=weighted, share=shares, out_dtype=torch.float32)
    return torch.zeros(x.shape, device=x.device).index_add_(0, tokens, rows)


def exact(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, routing: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Compute the same in float64, expert by expert."""
    tokens, shares, offsets = routing
    found = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    begin = 0
    for expert, end in enumerate(offsets.tolist()):
        rows = slice(begin, end)
        mine = x[tokens[rows]].double()
        hidden = F.silu(mine @ gate[expert].double().t()) * (mine @ up[expert].double().t())
        found.index_add_(0, tokens[rows], (hidden @ down[expert].double().t()) * shares[rows, None].double())
        begin = end
    return found


def main() -> None:
    """Run the layer once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=4, help="experts of each token")
    args = parser.parse_args()
    torch.manual_seed(0)
    device, width, inner = "cuda" if torch.cuda.is_available() else "cpu", 256, 512

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).bfloat16()

    x = normal(args.tokens, width) * width**0.5
    router = torch.randn(width, args.experts, device=device).bfloat16()
    gate, up = normal(args.experts, inner, width), normal(args.experts, inner, width)
    down = normal(args.experts, width, inner)
    routing = sorted_by_expert(x, router, args.chosen)
    found, wanted = fused(x, gate, up, down, routing), exact(x, gate, up, down, routing)
    sizes = routing[2].diff(prepend=routing[2].new_zeros(1)).tolist()
    error = float((found.double() - wanted).norm() / wanted.norm())
    spread = f"{min(sizes)} to {max(sizes)} rows an expert"
    print(f"{args.tokens} tokens, {args.chosen} of {args.experts} experts each: {spread}")
    print(f"error against float64: {error:.2e}")
    if not error < 2.0**-7:
        sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
