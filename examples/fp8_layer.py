"""A Llama decoder layer in FP8 in which no kernel only normalises, activates or quantises.

Four kernels besides attention, each a GEMM of FP8 operands:

1. QKV of the stream's copy in FP8, with queries and keys rotated. The norm's factor of each row is in the epilogue.
2. O + residual: the stream in BF16, the sums of squares of its rows, and its copy in FP8 times the next norm's gamma.
3. Gate and up, multiplied in one kernel, which stores FP8.
4. Down + residual: as 2, for the next layer.

Attention gives BF16, and what quantises it is the one exception. Scales of activations are of whole tensors, by
`co.nn.Fp8State`: delayed scaling while a few passes calibrate them, and static afterwards. Weights have a scale for
each column. The same layer with dynamic scales of rows is written in PyTorch below, as torchao has it, to compare with.

On a GPU the layer has the size of Llama-3.1-8B's, and needs Hopper. On the CPU it is smaller and runs on the reference
implementation.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
import transformer_block as block
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import cutlass_ops as co

FP8 = torch.float8_e4m3fn
# Sums by the Tensor Cores alone, as PyTorch's layer below has them: weights have both signs, so products cancel.
SUMS = "fast"


class Stream(NamedTuple):
    """The residual stream between layers.

    Attributes
    ----------
    y : Tensor
        (batch, sequence, hidden), BF16.
    copy : Tensor
        y times the next norm's gamma, in FP8.
    scale : Tensor
        What `copy` is to be multiplied by.
    statistic : RowStatistic
        Sums of squares of y's rows.
    """

    y: Tensor
    copy: Tensor
    scale: Tensor
    statistic: co.RowStatistic


def entering(x: Tensor, gamma: Tensor, state: co.nn.Fp8State, eps: float) -> Stream:
    """Return the stream that the first layer reads: no GEMM comes before that, so PyTorch makes its copy."""
    copy, scale = state.quantize(x * gamma)
    return Stream(x, copy, scale, co.RowStatistic(x.float().square().sum(-1), x.shape[-1], eps))


class Fp8Layer(torch.nn.Module):
    """The layer, made from one of transformers.

    Parameters
    ----------
    layer : LlamaDecoderLayer
        Its weights are quantised here.
    config : LlamaConfig
        The layer's.
    following : Tensor
        gamma of the norm that comes next: the next layer's first one.
    """

    def __init__(self, layer: torch.nn.Module, config: block.LlamaConfig, following: Tensor) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.config, self.eps = config, config.rms_norm_eps
        turning = torch.cat([attention.q_proj.weight, attention.k_proj.weight])
        heads = turning.unflatten(0, (-1, config.head_dim)).transpose(1, 2)
        qkv = torch.cat([block.in_pairs(heads).transpose(1, 2).flatten(0, 1), attention.v_proj.weight])
        weights = (qkv, attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight)
        # Columns have scales of their own. gamma is not in the weight: what makes a copy multiplies it by gamma.
        self.qkv, self.o, self.gate, self.up, self.down = (co.prepare(w.t(), dtype=FP8) for w in weights)
        values = len(attention.v_proj.weight)
        self.register_buffer("frequency", block.frequencies(config, values).to(qkv.device))
        self.register_buffer("after", layer.post_attention_layernorm.weight.detach())
        self.register_buffer("following", following.detach())
        # Of attention's output, of the stream's copies, and of the hidden activations.
        self.attended, self.middle, self.hidden, self.out = (co.nn.Fp8State(device=qkv.device) for _ in range(4))

    @property
    def states(self) -> tuple[co.nn.Fp8State, ...]:
        """The scales of what the layer quantises."""
        return self.attended, self.middle, self.hidden, self.out

    def forward(self, stream: Stream, positions: Tensor, cache: block.Cache | None = None) -> Stream:
        """Run the layer.

        Parameters
        ----------
        stream : Stream
            The residual stream before the layer.
        positions : Tensor
            (batch, sequence), FP32.
        cache : Cache, optional
            Earlier keys and values, for a sequence of one position.

        Returns
        -------
        Stream
            The residual stream after it.
        """
        rotation = {"epilogue": block.rotary, "position": positions, "frequency": self.frequency}
        qkv = co.rmsnorm_gemm(
            co.Scaled(stream.copy, stream.scale), self.qkv, rstd=stream.statistic, math=SUMS, **rotation
        )
        attended, scale = self.attended.quantize(self._attention(qkv, cache))
        made = self._plus_residual(attended, self.o, scale, stream.y, self.after, self.middle)
        measures = self.hidden.scaling == "delayed"
        hidden = co.gemm_swiglu(
            co.Scaled(made.copy, made.scale),
            self.gate,
            self.up,
            rstd=made.statistic,
            scale_out=self.hidden.scale,
            amax=measures,
            out_dtype=FP8,
            math=SUMS,
        )
        if measures:
            hidden, amax = hidden
            self.hidden.record(amax)
        return self._plus_residual(hidden, self.down, self.hidden.scale, made.y, self.following, self.out)

    def _plus_residual(
        self,
        x: Tensor,
        w: co.types.PreparedWeight,
        scale: Tensor,
        residual: Tensor,
        gamma: Tensor,
        state: co.nn.Fp8State,
    ) -> Stream:
        measures = state.scaling == "delayed"
        made = co.gemm_residual_rms(
            co.Scaled(x, scale), w, residual, eps=self.eps, gamma=gamma, scale_out=state.scale, amax=measures, math=SUMS
        )
        if measures:
            state.record(made.amax)
        return Stream(made.y, made.quantized, state.scale, made.rstd)

    def _attention(self, qkv: Tensor, cache: block.Cache | None) -> Tensor:
        every = qkv.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        return attention(self.config, every, cache)


def attention(config: block.LlamaConfig, heads: Tensor, cache: block.Cache | None) -> Tensor:
    """Return the attention of queries, keys and values, (batch, heads, sequence, dimension), side by side."""
    batch, _, sequence, _ = heads.shape
    count, groups = config.num_attention_heads, config.num_key_value_heads
    query, keys, values = heads.split((count, groups, groups), dim=1)
    if cache is not None:
        keys, values = cache.update(keys, values)
    found = F.scaled_dot_product_attention(query, keys, values, is_causal=sequence > 1, enable_gqa=count != groups)
    return found.transpose(1, 2).reshape(batch, sequence, -1)


def calibrate(layers: list[Fp8Layer], first: co.nn.Fp8State, run: Callable[[], object], passes: int = 3) -> None:
    """Run a few passes with delayed scaling, and keep the scales that they give.

    A first pass uses scales of 1, so that values beyond the largest of FP8 are cut off. Later ones see what earlier
    layers give with scales that fit.
    """
    states = [first, *(state for layer in layers for state in layer.states)]
    for _ in range(passes):
        run()
        for state in states:
            state.step()
    for state in states:
        state.scaling = "static"


# ---- The same in PyTorch, with dynamic scales of rows ----------------------------------------------------------------


class Rowwise(NamedTuple):
    """A weight (N, K) in FP8, and the scale of each of its rows (N, 1)."""

    data: Tensor
    scale: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Rowwise:
        """Quantise a matrix, or activations, by the greatest absolute value of each row."""
        scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / torch.finfo(FP8).max
        return cls((x.float() / scale).to(FP8), scale)

    def linear(self, x: Tensor) -> Tensor:
        """Quantise x, and multiply."""
        a = Rowwise.of(x.flatten(0, -2))
        if x.is_cuda:
            d = torch._scaled_mm(
                a.data, self.data.t(), a.scale, self.scale.t(), out_dtype=block.DTYPE, use_fast_accum=True
            )
        else:
            d = (a.data.float() @ self.data.float().t() * a.scale * self.scale.t()).to(block.DTYPE)
        return d.view(*x.shape[:-1], -1)


class RowwiseLayer(torch.nn.Module):
    """Transformers' layer with dynamic FP8: weights side by side where they read the same rows."""

    def __init__(self, layer: torch.nn.Module, config: block.LlamaConfig) -> None:
        super().__init__()
        attended, mlp = layer.self_attn, layer.mlp
        self.config, self.before, self.after = config, layer.input_layernorm, layer.post_attention_layernorm
        projections = (attended.q_proj, attended.k_proj, attended.v_proj)
        self.qkv = Rowwise.of(torch.cat([p.weight for p in projections]))
        self.o, self.down = Rowwise.of(attended.o_proj.weight), Rowwise.of(mlp.down_proj.weight)
        self.both = Rowwise.of(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: block.Cache | None = None) -> Tensor:
        """Return the layer's output for x (batch, sequence, hidden)."""
        heads = self.qkv.linear(self._norm(x, self.before)).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
        turning = self.config.num_attention_heads + self.config.num_key_value_heads
        query_and_keys, values = heads[:, :turning], heads[:, turning:]
        turned, _ = apply_rotary_pos_emb(query_and_keys, query_and_keys[:, :1], *rope)
        y = x + self.o.linear(attention(self.config, torch.cat([turned, values], dim=1), cache))
        gate, up = self.both.linear(self._norm(y, self.after)).chunk(2, dim=-1)
        return y + self.down.linear(F.silu(gate) * up)

    def _norm(self, x: Tensor, norm: torch.nn.Module) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], norm.weight, self.config.rms_norm_eps)


# ---- Errors ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """Rows to run layers on: one sequence or several, or one position of several behind a cache."""

    name: str
    batch: int
    sequence: int
    cached: int


CASES = (Case("prefill", 2, 64, 0), Case("decoding", 16, 1, 128))


def errors(config: block.LlamaConfig, case: Case, device: str, count: int = 2) -> dict[str, float]:
    """Return the errors of layers in FP8 against the same layers in BF16.

    They are relative to the output, and to what the layers add to the residual stream, where no residual hides them.
    """
    layers = [block.random_layer(config, device) for _ in range(count)]
    gammas = [layer.input_layernorm.weight for layer in layers]
    ours = [Fp8Layer(layer, config, gamma) for layer, gamma in zip(layers, [*gammas[1:], gammas[0]], strict=True)]
    theirs = [RowwiseLayer(layer, config) for layer in layers]
    x = torch.randn(case.batch, case.sequence, config.hidden_size, device=device, dtype=block.DTYPE)
    first = max(case.cached - case.sequence, 0)
    positions = torch.arange(first, first + case.sequence, device=device).repeat(case.batch, 1)
    rope = block.LlamaRotaryEmbedding(config).to(device)(x, positions)
    caches = [block.Cache(case.batch, case.cached, config, device) if case.cached else None for _ in layers]
    paired = [None if cache is None else cache.in_pairs() for cache in caches]
    state = co.nn.Fp8State(device=device)

    def run() -> Tensor:
        stream = entering(x, gammas[0], state, config.rms_norm_eps)
        for layer, cache in zip(ours, paired, strict=True):
            stream = layer(stream, positions.float(), cache)
        return stream.y

    calibrate(ours, state, run)
    wanted = rowwise = x
    for layer, other, cache in zip(layers, theirs, caches, strict=True):
        wanted = layer(wanted, None, None, cache, position_embeddings=rope)
        rowwise = other(rowwise, rope, cache)
    found = {"fp8": run(), "rowwise": rowwise}
    report = {name: block.error(y, wanted.double()) for name, y in found.items()}
    return report | {
        f"{name}, added": block.error(y.double() - x, wanted.double() - x.double()) for name, y in found.items()
    }


@torch.no_grad()
def main() -> None:
    """Run two layers in each case, and compare their errors with those of dynamic scales of rows."""
    torch.manual_seed(0)
    device, sizes = ("cuda", block.EIGHT_B) if torch.cuda.is_available() else ("cpu", block.SMALL)
    config = block.configuration(sizes)
    print(f"two decoder layers in FP8, hidden size {config.hidden_size}, on {device}; errors against BF16")
    for case in CASES:
        found = errors(config, case, device)
        for name, what in (("fp8", "static scales of tensors, fused"), ("rowwise", "dynamic scales of rows, PyTorch")):
            print(
                f"{case.name}, {what}: {found[name]:.2e} of the output, {found[f'{name}, added']:.2e} of what is added"
            )
        if not found["fp8, added"] <= 1.5 * found["rowwise, added"]:
            sys.exit("the result is wrong")


if __name__ == "__main__":
    main()
