"""The feed-forward part of a transformer's layer: two linear layers, or three with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops.nn import epilogues
from cutlass_ops.nn.linear import Linear, is_watched, matrix
from cutlass_ops.nn.parallel import is_spread, sum_dtype
from cutlass_ops.run.chained import chain
from cutlass_ops.run.gated import gated_op


class MLP(torch.nn.Module):
    """fc2(activation(fc1(x))) + residual, in two kernels.

    The backward multiplies by the activation's derivative in the epilogue of a GEMM, or with biases in a kernel between
    two, which also adds up the gradient of the first bias.

    Parameters
    ----------
    in_features, hidden_features : int
        Extents of x and of what the activation gives.
    out_features : int, optional
        By default `in_features`.
    activation : str
        As for :class:`Linear`.
    bias : bool
        Whether the layers have biases.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    fc1, fc2 : Linear
        The layers. They are not called, unless they have hooks or DTensors: their parameters are read.

    Examples
    --------
    >>> mlp = co.nn.MLP(16, 64, dtype=torch.bfloat16)
    >>> x = torch.ones(4, 16).bfloat16()
    >>> mlp(x, residual=x).shape, [name for name, _ in mlp.named_parameters()]
    (torch.Size([4, 16]), ['fc1.weight', 'fc1.bias', 'fc2.weight', 'fc2.bias'])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        out_features: int | None = None,
        activation: str = "gelu",
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.fc1 = Linear(in_features, hidden_features, bias, device, dtype, activation=activation)
        self.fc2 = Linear(hidden_features, out_features or in_features, bias, device, dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the layers for x (..., K), and add a residual (..., N)."""
        first, second = self.fc1, self.fc2
        if is_watched(first, second) or is_spread(first.weight) or is_spread(second.weight):
            found: Tensor = second(first(x)) if residual is None else second(first(x), residual)
            return found
        return two_layers(
            (first._op, second._op if residual is None else second._residual_op),
            x,
            (matrix(first.weight), matrix(second.weight)),
            (first.bias, second.bias),
            residual,
        )


class GatedMLP(torch.nn.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x)) + residual.

    ``activation="silu"`` is SwiGLU, ``"gelu"`` or ``"gelu_tanh"`` GeGLU. Without gradients, one kernel multiplies x by
    both weights on Hopper. With gradients, each product is a GEMM of its own, since the backward needs both.

    Parameters
    ----------
    in_features, hidden_features : int
        Extents of x, and of what the gate multiplies.
    activation : str
        As for :class:`Linear`.
    bias : bool
        Whether the layers have biases.
    device, dtype
        Of the parameters.

    Attributes
    ----------
    gate_proj, up_proj, down_proj : Linear
        The layers, named as in Hugging Face's Llama. They are not called, unless they have hooks or DTensors: their
        parameters are read.

    Examples
    --------
    >>> mlp = co.nn.GatedMLP(16, 64, dtype=torch.bfloat16)
    >>> mlp(torch.ones(4, 16).bfloat16()).shape, [name for name, _ in mlp.named_parameters()]
    (torch.Size([4, 16]), ['gate_proj.weight', 'up_proj.weight', 'down_proj.weight'])
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        activation: str = "silu",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(in_features, hidden_features, bias, device, dtype, activation=activation)
        self.up_proj = Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = Linear(hidden_features, in_features, bias, device, dtype)
        self._op = gated_op(epilogues.operation(activation), biased=bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the layers for x (..., K), and add a residual of x's shape."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if is_watched(gate, up, down) or any(is_spread(m.weight) for m in (gate, up, down)):
            product = gate(x) * up(x)
            found: Tensor = down(product) if residual is None else down(product, residual)
            return found
        return gated_layers(
            (self._op, down._op if residual is None else down._residual_op),
            x,
            (gate.weight, up.weight, down.weight),
            (gate.bias, up.bias, down.bias),
            residual,
        )


def two_layers(
    ops: tuple[Any, Any],
    x: Tensor,
    matrices: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    residual: Tensor | None,
) -> Tensor:
    """Compute two layers by two ops, whose matrices are (K, N)."""
    first, second = ([] if bias is None else [bias] for bias in biases)
    if residual is not None:
        second.append(residual)
    return chain(*ops, x, *matrices, first, second, out_dtype=sum_dtype(x, residual))


def gated_layers(
    ops: tuple[Any, Any],
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None, Tensor | None],
    residual: Tensor | None,
) -> Tensor:
    """Compute gate, up and down by two ops, whose weights are (N, K)."""
    gate, up, down = map(matrix, weights)
    first = [up, *(bias for bias in biases[:2] if bias is not None)]
    second = [each for each in (biases[2], residual) if each is not None]
    return chain(*ops, x, gate, down, first, second, out_dtype=sum_dtype(x, residual))
