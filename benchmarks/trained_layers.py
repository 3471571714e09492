"""Layers that are trained: fused modules, the same in PyTorch of their parameters, and operands of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import cutlass_ops as co

DTYPE = torch.bfloat16


def plain_linear(m: Any, x: Tensor) -> Tensor:
    """Compute a linear layer with GELU."""
    return F.gelu(F.linear(x, m.weight, m.bias))


def plain_mlp(m: Any, x: Tensor) -> Tensor:
    """Compute two linear layers with GELU between them."""
    return F.linear(plain_linear(m.fc1, x), m.fc2.weight, m.fc2.bias)


def plain_swiglu(m: Any, x: Tensor) -> Tensor:
    """Compute a gated MLP."""
    return F.linear(F.silu(F.linear(x, m.gate_proj.weight)) * F.linear(x, m.up_proj.weight), m.down_proj.weight)


def plain_decoder(m: Any, x: Tensor) -> Tensor:
    """Compute a decoder layer."""
    return decoder(m, x, plain_swiglu)


def decoder(m: Any, x: Tensor, mlp: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Compute a decoder layer with an MLP of one's own."""
    attention, normed = m.self_attn, m.input_layernorm(x)
    heads = [
        F.linear(normed, p.weight).unflatten(-1, (-1, attention.head_dim)).transpose(-3, -2)
        for p in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    cos, sin = (t.unsqueeze(-3) for t in attention._angles(x.shape[-2], x))
    query, key = (h * cos + torch.cat((-h.chunk(2, -1)[1], h.chunk(2, -1)[0]), -1) * sin for h in heads[:2])
    attended = F.scaled_dot_product_attention(query, key, heads[2], is_causal=True, enable_gqa=attention.is_grouped)
    y = x + F.linear(attended.transpose(-3, -2).flatten(-2), attention.o_proj.weight)
    return y + mlp(m.mlp, m.post_attention_layernorm(y))


PLAIN = {"linear_gelu": plain_linear, "mlp": plain_mlp, "swiglu": plain_swiglu, "decoder": plain_decoder}


def module_of(layer: str, n: int, k: int, **draw: Any) -> nn.Module:
    """Return a fused module. Llama's heads have 128 columns, and 4 share keys and values."""
    if layer == "linear_gelu":
        return co.nn.Linear(k, n, activation="gelu", **draw)
    if layer == "mlp":
        return co.nn.MLP(k, n, **draw)
    if layer == "swiglu":
        return co.nn.GatedMLP(k, n, **draw)
    heads = max(k // 128, 4)
    return co.nn.DecoderBlock(k, n, heads, heads // 4, **draw)


def operands(layer: str, m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a layer's input and the gradient of its result. A decoder layer's rows are one sequence."""
    rows, of_d = (1, m) if layer == "decoder" else (m,), n if layer == "linear_gelu" else k
    x = torch.randn(*rows, k, device=device, dtype=DTYPE).requires_grad_()
    return x, torch.randn(*rows, of_d, device=device, dtype=DTYPE)
