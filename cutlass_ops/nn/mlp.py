"""The feed-forward part of a transformer's layer: two linear layers, or three with a gate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.nn import epilogues
from cutlass_ops.nn.linear import Activated, Linear, activated, are_plain
from cutlass_ops.nn.parallel import plus, sum_dtype
from cutlass_ops.nn.reading import (
    add_to_main_grad,
    is_foreign,
    is_watched,
    matrices,
    matrix,
    must_leave_trace,
    parameter,
    rows,
    vectors,
)
from cutlass_ops.run.chained import chain
from cutlass_ops.run.gated import gated_op


class MLP(Activated, torch.nn.Module):
    """An MLP in two kernels: fc2(activation(fc1(x))) + residual.

    Without biases, the backward multiplies by the activation's derivative in the epilogue of a GEMM. With biases, a
    kernel between two GEMMs does so, and adds up the gradient of the first bias.

    Parameters
    ----------
    in_features, hidden_features : int
        Size of the last dimension of x, and of the activation's result.
    out_features : int, optional
        Size of the result's last dimension. Default: `in_features`.
    activation : str
        As for :class:`Linear`.
    bias : bool
        Whether the layers have biases.
    device, dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    fc1, fc2 : Linear
        The layers, without the activation. Only their parameters are read; they are called only if they have hooks,
        DTensors or another class, or in FP32.
    activation : str
        Read-only.

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
        self.fc1 = Linear(in_features, hidden_features, bias, device, dtype)
        out_features = in_features if out_features is None else out_features
        self.fc2 = Linear(hidden_features, out_features, bias, device, dtype)
        self._set_activation(activation)
        self._ops = epilogues.linear_ops(activation)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Compute the layers for x (..., K), and add a residual (..., N), which is passed by name."""
        first, second = self.fc1, self.fc2
        if not are_plain(first, second):
            return call(second, activated(self._known, self._ops, first, x), residual)
        weights, biases = read(first, second)
        if is_foreign(x, *weights):
            between = epilogues.activated(self._known, F.linear(x, weights[0], biases[0]))
            return plus(F.linear(between, weights[1], biases[1]), residual)
        return two_layers((self._ops, second._ops), x, weights, biases, residual)


class GatedMLP(Activated, torch.nn.Module):
    """A gated MLP: down_proj(activation(gate_proj(x)) * up_proj(x)) + residual.

    ``activation="silu"`` gives SwiGLU, ``"gelu"`` and ``"gelu_tanh"`` give GeGLU. On Hopper, without gradients, one
    kernel multiplies x by both weights. With gradients, each product is a separate GEMM, since the backward needs both.

    Parameters
    ----------
    in_features, hidden_features : int
        Size of the last dimension of x, and of the gate.
    activation : str
        As for :class:`Linear`.
    bias : bool
        Whether the layers have biases.
    device, dtype
        Device and dtype of the parameters.

    Attributes
    ----------
    gate_proj, up_proj, down_proj : Linear
        The layers, without the activation, named as in Hugging Face's Llama. Only their parameters are read; they are
        called only if they have hooks, DTensors or another class, or in FP32.
    activation : str
        Read-only.

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
        self.gate_proj = Linear(in_features, hidden_features, bias, device, dtype)
        self.up_proj = Linear(in_features, hidden_features, bias, device, dtype)
        self.down_proj = Linear(hidden_features, in_features, bias, device, dtype)
        self._set_activation(activation)
        self._ops, self._gate_ops = gated_ops(activation), epilogues.linear_ops(activation)

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Compute the layers for x (..., K), and add a residual of x's shape."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if not are_plain(gate, up, down) or (gate.bias is None) != (up.bias is None):
            return call(down, activated(self._known, self._gate_ops, gate, x) * up(x), residual)
        weights, biases = read(gate, up, down)
        if is_foreign(x, *weights):
            of_gate = epilogues.activated(self._known, F.linear(x, weights[0], biases[0]))
            return plus(F.linear(of_gate * F.linear(x, weights[1], biases[1]), weights[2], biases[2]), residual)
        return gated_layers((self._ops, down._ops), x, weights, biases, residual)


def read(*layers: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the weights of layers, and their biases."""
    return tuple([parameter(m, "weight") for m in layers]), tuple([parameter(m, "bias") for m in layers])


def call(module: Any, x: Tensor, residual: Tensor | None) -> Tensor:
    """Call a module, and add a residual. One of ours adds it, unless hooks or a wrapper must see its result alone."""
    if residual is not None and type(module) in (Linear, MLP, GatedMLP) and not is_watched(module):
        with_residual: Tensor = module(x, residual=residual)
        return with_residual
    return plus(module(x), residual)


def two_layers(
    ops: tuple[epilogues.LinearOps, epilogues.LinearOps],
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
    as_b: Callable[[Tensor], Tensor] = matrix,
) -> Tensor:
    """Compute two layers by the ops of each."""
    if must_leave_trace(*weights):
        return add_to_main_grad(two_layers, ops, x, weights, biases, residual, as_b)
    first, of_first = epilogues.chosen(ops[0], biases[0], None)
    second, of_second = epilogues.chosen(ops[1], biases[1], residual)
    b1, b2 = map(as_b, weights)
    return chain(first, second, rows(x), b1, b2, of_first, of_second, out_dtype=sum_dtype(x, residual))


def gated_ops(activation: str | None) -> tuple[Any, Any]:
    """Return the ops of a gate, without and with biases."""
    written = epilogues.written(activation)
    return gated_op(written), gated_op(written, biased=True)


def gated_layers(
    ops: tuple[tuple[Any, Any], epilogues.LinearOps],
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    residual: Tensor | None,
) -> Tensor:
    """Compute gate, up and down by the ops of the gate and of the last layer. Gate and up both have a bias, or none."""
    if must_leave_trace(*weights):
        return add_to_main_grad(gated_layers, ops, x, weights, biases, residual)
    (gate, up), down = matrices(*weights[:2]), matrix(weights[2])
    first, of_first = ops[0][int(biases[0] is not None)], [up, *vectors(*biases[:2])]
    second, of_second = epilogues.chosen(ops[1], biases[2], residual)
    return chain(first, second, rows(x), gate, down, of_first, of_second, out_dtype=sum_dtype(x, residual))
