"""A decoder layer as Llama has it, on fused GEMMs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.nn.launching import Prepares
from cutlass_ops.nn.linear import Linear
from cutlass_ops.nn.mlp import GatedMLP, call


class _Attention(torch.nn.Module):
    """Causal attention with rotated queries and keys. Its last GEMM adds the residual."""

    def __init__(
        self, hidden: int, heads: int, groups: int, dimension: int, theta: float, bias: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.q_proj = Linear(hidden, heads * dimension, bias, device, dtype)
        self.k_proj = Linear(hidden, groups * dimension, bias, device, dtype)
        self.v_proj = Linear(hidden, groups * dimension, bias, device, dtype)
        self.o_proj = Linear(heads * dimension, hidden, bias, device, dtype)
        self.head_dim, self.theta, self.is_grouped = dimension, theta, heads != groups

    def forward(
        self, x: Tensor, *, residual: Tensor, positions: tuple[Tensor, Tensor] | None, mask: Tensor | None
    ) -> Tensor:
        length = x.shape[-2]
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self._angles(length, x) if positions is None else positions
        query, key = (_rotated(x, cos.unsqueeze(-3), sin.unsqueeze(-3)) for x in (query, key))
        found = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        together = found.transpose(-3, -2).flatten(-2)
        if torch.compiler.is_exporting():
            # The decomposition of an exported attention may lay out its heads in another way.
            together = together.clone(memory_format=torch.contiguous_format)
        return call(self.o_proj, together, residual)

    def _angles(self, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head_dim, 2, device=x.device, dtype=torch.float32) / self.head_dim
        angles = torch.arange(length, device=x.device, dtype=torch.float32)[:, None] * self.theta**-steps
        both = torch.cat((angles, angles), -1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class DecoderBlock(torch.nn.Module, Prepares):
    """A decoder layer: RMSNorm, causal attention and a gated MLP. Epilogues of GEMMs add the residuals.

    Parameters are named as in Hugging Face's ``LlamaDecoderLayer`` and ``MistralDecoderLayer``, whose state_dicts load.

    Parameters
    ----------
    hidden_size, intermediate_size : int
        Size of the last dimension of x, and of the gate.
    num_heads : int
        Number of heads of queries.
    num_kv_heads : int, optional
        Number of heads of keys and values. Default: `num_heads`.
    head_dim : int, optional
        Size of a head. Default: ``hidden_size / num_heads``.
    eps : float
        The norms' eps.
    activation : str
        The gate's activation, as for :class:`Linear`.
    rope_theta : float
        Base of the frequencies of the rotary embedding, if no `position_embeddings` are passed.
    bias : bool
        Whether the attention's layers have biases.
    device, dtype
        Device and dtype of the parameters.

    Examples
    --------
    >>> block = co.nn.DecoderBlock(32, 64, num_heads=4, num_kv_heads=2, dtype=torch.bfloat16)
    >>> block(torch.randn(2, 8, 32).bfloat16()).shape
    torch.Size([2, 8, 32])
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        eps: float = 1e-6,
        activation: str = "silu",
        rope_theta: float = 10000.0,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = num_heads if num_kv_heads is None else num_kv_heads
        dimension = hidden_size / max(num_heads, 1) if head_dim is None else head_dim
        if min(num_heads, groups) < 1 or num_heads % groups or dimension < 2 or dimension % 2:
            raise ValueError(
                f"num_heads is {num_heads}, num_kv_heads {groups} and head_dim {dimension:g}: num_heads must be a "
                "multiple of num_kv_heads, and head_dim even"
            )
        self.input_layernorm = torch.nn.RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.self_attn = _Attention(hidden_size, num_heads, groups, int(dimension), rope_theta, bias, device, dtype)
        self.post_attention_layernorm = torch.nn.RMSNorm(hidden_size, eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(hidden_size, intermediate_size, activation, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : Tensor
            (batch, sequence, hidden_size).
        position_embeddings : tuple of Tensor, optional
            Cosines and sines of the rotary embedding, (batch, sequence, head_dim) or (sequence, head_dim). Default:
            those of positions 0, 1, 2 and so on.
        attention_mask : Tensor, optional
            As for ``F.scaled_dot_product_attention``. Default: causal.

        Returns
        -------
        Tensor
            Of x's shape.
        """
        z = self.input_layernorm(x)
        y = self.self_attn(z, residual=x, positions=position_embeddings, mask=attention_mask)
        return call(self.mlp, self.post_attention_layernorm(y), y)
