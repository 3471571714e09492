"""A Llama decoder layer on fused GEMMs, compared with the one in Hugging Face's transformers.

Four kernels besides attention: RMSNorm → QKV, with queries and keys rotated; O + residual; RMSNorm → gate and up,
multiplied in the same kernel; down + residual. A norm's kernel computes the statistic of its rows, or takes sums of
squares from the previous GEMM (`Statistic.PASSED`). On a GPU the layer has the size of Llama-3.1-8B's. On the CPU it is
smaller and runs on the reference implementation.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import cutlass_ops as co

DTYPE = torch.bfloat16
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
SMALL = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 2}


def configuration(sizes: dict[str, int]) -> LlamaConfig:
    """Return Llama-3.1's configuration with these sizes and PyTorch's attention."""
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    return LlamaConfig(**sizes, rms_norm_eps=1e-5, rope_parameters=rope, attn_implementation="sdpa")


def random_layer(config: LlamaConfig, device: str) -> LlamaDecoderLayer:
    """Return transformers' layer with random weights and norms of the usual scale after training."""
    layer = LlamaDecoderLayer(config, 0).to(device, DTYPE).eval().requires_grad_(False)
    for name, parameter in layer.named_parameters():
        if "layernorm" in name:
            parameter.normal_(1.0, 0.2)
        else:
            parameter.normal_(0.0, parameter.shape[1] ** -0.5)
    return layer


class Cache:
    """Keys and values of a fixed number of positions. Each call overwrites the last ones."""

    def __init__(self, batch: int, length: int, config: LlamaConfig, device: str) -> None:
        shape = (batch, config.num_key_value_heads, length, config.head_dim)
        self._keys, self._values = (torch.randn(shape, device=device, dtype=DTYPE) for _ in range(2))

    def double(self) -> Cache:
        """Return a copy in FP64."""
        other = copy.copy(self)
        other._keys, other._values = self._keys.double(), self._values.double()
        return other

    def in_pairs(self) -> Cache:
        """Return a copy with keys in the fused layer's order."""
        other = copy.copy(self)
        other._keys, other._values = in_pairs(self._keys), self._values.clone()
        return other

    def update(self, keys: Tensor, values: Tensor, layer: int = 0, **_: object) -> tuple[Tensor, Tensor]:
        """Write the new positions and return all. This is the cache interface of transformers."""
        new = keys.shape[2]
        self._keys[:, :, -new:], self._values[:, :, -new:] = keys, values
        return self._keys, self._values


@co.epilogue
def rotary(acc, position: co.Col, frequency: co.Row):  # noqa: ANN001, ANN201
    """Rotate pairs of columns by an angle in radians. The frequency is negative in a pair's first column."""
    angle = position * frequency
    return acc * co.cos(angle) + co.swap_pairs(acc) * co.sin(angle)


def in_pairs(heads: Tensor) -> Tensor:
    """Interleave the halves of a head (..., dimension), which transformers rotates against each other.

    Reordering queries and keys alike does not change their products.
    """
    return heads.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def frequencies(config: LlamaConfig, values: int) -> Tensor:
    """Return radians per position for each column of QKV: signed in pairs, and zero for values."""
    inverse = LlamaRotaryEmbedding(config).inv_freq
    head = torch.stack((-inverse, inverse), dim=1).flatten()
    return torch.cat([head.repeat(config.num_attention_heads + config.num_key_value_heads), torch.zeros(values)])


class Statistic(Enum):
    """The source of a norm's statistic of its rows."""

    TAKEN = "taken by the norm's own kernel"
    PASSED = "passed on by the GEMM before"


@dataclass(frozen=True, eq=False)
class FusedLayer:
    """The layer's prepared weights: each norm's gamma is folded into the next weights."""

    config: LlamaConfig
    statistic: Statistic
    qkv: co.types.PreparedWeight
    frequency: Tensor
    o: Tensor
    gate: co.types.PreparedWeight
    up: co.types.PreparedWeight
    down: Tensor

    @classmethod
    def of(cls, layer: LlamaDecoderLayer, config: LlamaConfig, statistic: Statistic = Statistic.TAKEN) -> FusedLayer:
        """Prepare a layer of transformers. B is the transpose of its weights (N, K)."""
        attention, mlp = layer.self_attn, layer.mlp
        turning = torch.cat([attention.q_proj.weight, attention.k_proj.weight])
        heads = turning.unflatten(0, (-1, config.head_dim)).transpose(1, 2)
        qkv = torch.cat([in_pairs(heads).transpose(1, 2).flatten(0, 1), attention.v_proj.weight])
        before, after = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        return cls(
            config,
            statistic,
            co.prepare(qkv.t(), before),
            frequencies(config, len(attention.v_proj.weight)).to(qkv.device),
            attention.o_proj.weight.t(),
            co.prepare(mlp.gate_proj.weight.t(), after),
            co.prepare(mlp.up_proj.weight.t(), after),
            mlp.down_proj.weight.t(),
        )

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        statistic: co.RowStatistic | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, co.RowStatistic | None]:
        """Run the layer.

        Parameters
        ----------
        x : Tensor
            (batch, sequence, hidden).
        positions : Tensor
            (batch, sequence), FP32.
        statistic : RowStatistic, optional
            The statistic of x from the previous layer. Without it, the first kernel computes it from x.
        cache : Cache, optional
            Earlier keys and values, for a sequence of one position.

        Returns
        -------
        tuple
            The layer's output, and its statistic for the next layer, or None.
        """
        rotation = {"epilogue": rotary, "position": positions, "frequency": self.frequency}
        attended = self._attention(co.rmsnorm_gemm(x, self.qkv, **rotation, **self._known(statistic)), cache)
        y, statistic = self._plus_residual(attended, self.o, x)
        hidden = co.gemm_swiglu(y, self.gate, self.up, **self._known(statistic))
        return self._plus_residual(hidden, self.down, y)

    def _known(self, statistic: co.RowStatistic | None) -> dict[str, Any]:
        return {"eps": self.config.rms_norm_eps} if statistic is None else {"rstd": statistic}

    def _plus_residual(self, x: Tensor, w: Tensor, residual: Tensor) -> tuple[Tensor, co.RowStatistic | None]:
        if self.statistic is Statistic.PASSED:
            return co.gemm_residual_rms(x, w, residual, eps=self.config.rms_norm_eps)
        return co.gemm_residual(x, w, residual), None

    def _attention(self, qkv: Tensor, cache: Cache | None) -> Tensor:
        batch, sequence, _ = qkv.shape
        heads, groups = self.config.num_attention_heads, self.config.num_key_value_heads
        every = qkv.view(batch, sequence, heads + 2 * groups, -1).transpose(1, 2)
        query, keys, values = every.split((heads, groups, groups), dim=1)
        if cache is not None:
            keys, values = cache.update(keys, values)
        attended = F.scaled_dot_product_attention(
            query, keys, values, is_causal=sequence > 1, enable_gqa=heads != groups
        )
        return attended.transpose(1, 2).reshape(batch, sequence, -1)


def error(found: Tensor, exact: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def main() -> None:
    """Run two layers in three ways and compare them with FP64."""
    torch.manual_seed(0)
    device, sizes = ("cuda", EIGHT_B) if torch.cuda.is_available() else ("cpu", SMALL)
    config = configuration(sizes)
    layers = [random_layer(config, device) for _ in range(2)]
    x = torch.randn(2, 64, config.hidden_size, device=device, dtype=DTYPE)
    embedding, positions = LlamaRotaryEmbedding(config).to(device), torch.arange(64, device=device).expand(2, -1)
    rope, exact_rope = embedding(x, positions), embedding(x.double(), positions)
    with torch.inference_mode():
        theirs, found = x, {}
        for layer in layers:
            theirs = layer(theirs, position_embeddings=rope)
        for way in Statistic:
            ours, statistic = x, None
            for layer in layers:
                ours, statistic = FusedLayer.of(layer, config, way)(ours, positions.float(), statistic)
            found[way] = ours
        exact = x.double()
        for layer in layers:
            exact = layer.double()(exact, position_embeddings=exact_rope)
    their_error = error(theirs, exact)
    print(f"two decoder layers, hidden size {config.hidden_size}, {DTYPE}, on {device}; errors against float64")
    print(f"transformers' LlamaDecoderLayer: {their_error:.2e}")
    for way, ours in found.items():
        print(f"statistic {way.value}: {error(ours, exact):.2e}")
        if not error(ours, exact) <= 2 * their_error:
            sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
