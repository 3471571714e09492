"""The mixture of experts of Qwen3-MoE and of Mixtral on two grouped GEMMs, compared with Hugging Face's transformers.

The layer is made from a block of transformers, without a copy of its weights: `gate_up_proj` (experts, 2 x inner,
hidden) has the gates' rows before the others, so that each half is a view, as is the transpose of `down_proj` (experts,
hidden, inner). Only columns that alternate, such as gpt-oss's, would have to be copied once.

1. The router: softmax and top-k, as the block has it. Tokens are sorted by expert.
2. Gate and up of each row's expert, multiplied in one kernel.
3. Down, times the router's share of the row. Each token then adds up its experts' rows, always in the same order.

Nothing waits for the device, so that the layer runs in a CUDA graph and under torch.compile with `fullgraph=True`. On a
GPU the layers have the sizes of Qwen3-30B-A3B and Mixtral-8x7B, and need Hopper. On the CPU they are smaller and run on
the reference implementation.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

import cutlass_ops as co

DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Model:
    """One of the models: its block, its configuration, and sizes for a GPU and for the CPU."""

    block: type[torch.nn.Module]
    config: type[Any]
    full: dict[str, Any]
    small: dict[str, Any]


_QWEN3 = {"norm_topk_prob": True, "num_experts_per_tok": 8}
_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "qwen3": Model(
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig,
        {**_QWEN3, "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128},
        {**_QWEN3, "hidden_size": 128, "moe_intermediate_size": 96, "num_experts": 32},
    ),
    "mixtral": Model(
        MixtralSparseMoeBlock,
        MixtralConfig,
        {**_MIXTRAL, "hidden_size": 4096, "intermediate_size": 14336},
        {**_MIXTRAL, "hidden_size": 128, "intermediate_size": 352},
    ),
}


def random_block(model: Model, sizes: dict[str, Any], device: str) -> torch.nn.Module:
    """Return transformers' block with random weights.

    Its experts compute by `grouped_mm`, as those of a model loaded by `from_pretrained` do where PyTorch has it.
    """
    config = model.config(**sizes, experts_implementation="grouped_mm")
    with torch.device(device):
        block = model.block(config).to(DTYPE).eval().requires_grad_(False)
    for parameter in block.parameters():
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    return block


@co.epilogue
def swiglu(acc, up: co.Product):  # noqa: ANN001, ANN201
    """Return one product of a row with its expert's weights, gated by the other."""
    return co.e.silu(acc) * up


@co.epilogue
def weighted(acc, share: co.Col):  # noqa: ANN001, ANN201
    """Return an expert's result, times the share that the router gives it."""
    return acc * share


class Slots(NamedTuple):
    """Tokens and their chosen experts, sorted by expert.

    Attributes
    ----------
    tokens : Tensor
        (slots,), INT64: the token of each.
    shares : Tensor
        (slots,), FP32: the share that the router gives each.
    ends : Tensor
        (experts,), INT32: where each expert's slots end.
    back : Tensor
        (slots,), INT64: where the slots of the first token are, then of the second, and so on.
    """

    tokens: Tensor
    shares: Tensor
    ends: Tensor
    back: Tensor


@dataclass(frozen=True, eq=False)
class MoeLayer:
    """The layer's weights, all of them views of a block's, and its steps.

    Attributes
    ----------
    router : Tensor
        (experts, hidden).
    gate, up : Tensor
        (experts, hidden, inner).
    down : Tensor
        (experts, inner, hidden).
    every : Tensor
        (experts,): the experts' numbers, in the type in which slots are sorted. INT16 has a quarter of INT64's digits.
    chosen : int
        Experts of each token.
    normalizes : bool
        Whether a token's shares are divided by their sum.
    counted : range
        So many slots are sorted by counting those before each. torch.compile sorts fewer or more of them faster.
    """

    router: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    every: Tensor
    chosen: int
    normalizes: bool
    counted: range = range(65, 1025)

    @classmethod
    def of(cls, block: torch.nn.Module) -> MoeLayer:
        """Take the weights of a block of transformers. The layer sees later changes of them.

        Raises
        ------
        TypeError
            If it is not a block of Qwen3-MoE or Mixtral.
        ValueError
            If its experts' activation is not SiLU.
        """
        if not isinstance(block, (Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock)):
            raise TypeError(
                f"{type(block).__name__} is neither a Qwen3MoeSparseMoeBlock nor a MixtralSparseMoeBlock: pass "
                "model.model.layers[i].mlp of such a model"
            )
        router, experts = block.gate, block.experts
        activation = experts.config.hidden_act
        if activation != "silu":
            raise ValueError(f"the experts' activation is {activation}, and the epilogue has SiLU: change `swiglu`")
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        return cls(
            router.weight.detach(),
            gate.mT,
            up.mT,
            experts.down_proj.detach().mT,
            torch.arange(len(gate), dtype=torch.int16, device=gate.device),
            router.top_k,
            normalizes(block),
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Run the layer on x (..., hidden), BF16 or FP16 as the weights, and return as much."""
        tokens = x.reshape(-1, x.shape[-1])
        slots = self.arrange(*self.route(tokens))
        rows = self.project(self.expand(self.gather(tokens, slots), slots), slots)
        return self.combine(rows, slots).view_as(x)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shares of each token's experts, FP32, and the experts: (tokens, chosen) each."""
        # Logits in the weights' dtype, as transformers has them: others would choose other experts in close cases.
        likely = F.softmax(F.linear(tokens, self.router), dim=-1, dtype=torch.float32)
        shares, experts = likely.topk(self.chosen, dim=-1)
        return shares / shares.sum(-1, keepdim=True) if self.normalizes else shares, experts

    def arrange(self, shares: Tensor, experts: Tensor) -> Slots:
        """Sort the slots by expert."""
        owners = experts.flatten().to(self.every.dtype)
        at = torch.arange(len(owners), device=owners.device)
        if len(owners) in self.counted:
            # A slot follows those before it, which torch.compile counts in one kernel. Of a sort it makes none.
            before = (owners < owners[:, None]) | ((owners == owners[:, None]) & (at < at[:, None]))
            back = before.sum(1)
            ends = (owners <= self.every[:, None]).sum(1, dtype=torch.int32)
            order = torch.empty_like(back).scatter_(0, back, at)
        else:
            owners, order = owners.sort(stable=True)
            # Where each expert's rows end: bincount would read its result's size on the host.
            ends = torch.searchsorted(owners, self.every, right=True, out_int32=True)
            back = torch.empty_like(order).scatter_(0, order, at)
        return Slots(order // self.chosen, shares.flatten()[order], ends, back)

    def gather(self, tokens: Tensor, slots: Slots) -> Tensor:
        """Return each slot's row of the tokens: (slots, hidden)."""
        return tokens[slots.tokens]

    def expand(self, rows: Tensor, slots: Slots) -> Tensor:
        """Return the gated products of rows with their experts' weights: (slots, inner)."""
        return co.gemm(rows, self.gate, groups=co.Groups(slots.ends), epilogue=swiglu, up=self.up)

    def project(self, gated: Tensor, slots: Slots) -> Tensor:
        """Return what experts give their slots, times the router's shares: (slots, hidden)."""
        return co.gemm(gated, self.down, groups=co.Groups(slots.ends), epilogue=weighted, share=slots.shares)

    def combine(self, rows: Tensor, slots: Slots) -> Tensor:
        """Add up the rows of each token: (tokens, hidden)."""
        # Sums in this order have the same bits each time; those of index_add do not. Written as additions, since
        # torch.compile makes one kernel of these that reads whole rows, and of a sum over the slots one that does not.
        each = (rows[at].float() for at in slots.back.unflatten(0, (-1, self.chosen)).unbind(1))
        return functools.reduce(torch.add, each).to(rows.dtype)


def normalizes(block: torch.nn.Module) -> bool:
    """Whether a block's router divides a token's shares by their sum. Mixtral's always does."""
    return bool(getattr(block.gate, "norm_topk_prob", True))


def exact_output(block: torch.nn.Module, x: Tensor) -> Tensor:
    """Return a block's output in FP64, of the experts that its router chooses in the dtype of x.

    In FP64 a router chooses other experts wherever rounding decides between two. Such a token's output is quite
    another, and no less right.
    """
    tokens = x.reshape(-1, x.shape[-1])
    _, _, experts = block.gate(tokens)
    wide = copy.deepcopy(block).double()
    wide.experts.config._experts_implementation = "eager"  # the others have no FP64
    logits, _, _ = wide.gate(tokens.double())
    shares = F.softmax(logits, dim=-1).gather(1, experts)
    if normalizes(block):
        shares = shares / shares.sum(-1, keepdim=True)
    return wide.experts(tokens.double(), experts, shares).view_as(x)


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()


# Sequences, and positions of each.
CASES = {"prefill": (3, 67), "decoding": (5, 1)}


def milliseconds(name: str, layer: MoeLayer, block: torch.nn.Module, x: Tensor) -> str:
    """Return rough times in CUDA graphs, as text. benchmarks/bench_moe.py measures with care."""
    from triton.testing import do_bench_cudagraph  # comes with PyTorch for GPUs

    ours, theirs = (torch.compile(each, dynamic=False, fullgraph=True) for each in (layer, block))
    ms = [do_bench_cudagraph(lambda each=each: each(x)) for each in (ours, theirs)]
    return f"{name}: {ms[0]:.3f} ms, and torch.compile of transformers' {ms[1]:.3f} ms"


@torch.no_grad()
def main() -> None:
    """Run both models' layers, and compare them with transformers'."""
    os.environ["CUTLASS_OPS_STAND_IN"] = "0"  # calls wait for the kernels that they choose, which are timed
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, model in MODELS.items():
        sizes = model.full if device == "cuda" else model.small
        block = random_block(model, sizes, device)
        layer = MoeLayer.of(block)
        experts, hidden, inner = layer.gate.shape
        print(
            f"{name}: {layer.chosen} of {experts} experts a token, hidden size {hidden}, inner {inner}, {DTYPE}, on "
            f"{device}; errors against float64"
        )
        for case, shape in CASES.items():
            x = torch.randn(*shape, hidden, device=device, dtype=DTYPE)
            exact = exact_output(block, x)
            ours, theirs = error(layer(x), exact), error(block(x), exact)
            print(f"{case}, {shape[0]} x {shape[1]} tokens: {ours:.2e}, and transformers' {theirs:.2e}")
            if not ours <= 1.5 * theirs:
                sys.exit("the result is wrong")
            if device == "cuda":
                print(milliseconds(case, layer, block, x))


if __name__ == "__main__":
    main()
