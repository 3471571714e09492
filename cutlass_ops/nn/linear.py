"""A linear layer with what follows it, as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutlass_ops.nn import epilogues, parallel

if TYPE_CHECKING:
    from cutlass_ops.run.ops import Op


class Linear(torch.nn.Linear):
    """activation(x @ weight.T + bias) + residual, in one kernel.

    It is a ``torch.nn.Linear``, with its parameters, their names and their initialisation.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether there is a bias.
    device, dtype
        Of the parameters. Kernels take FP16 and BF16; FP32 parameters are for ``torch.autocast``.
    activation : str, optional
        ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``, ``"hardswish"``, ``"mish"`` or
        ``"softplus"``.

    Attributes
    ----------
    weight : Parameter
        (N, K). If it has an attribute ``main_grad``, its gradient is added there: see docs/training.md.
    bias : Parameter or None
        (N,).

    Raises
    ------
    ValueError
        If there is no such activation.

    Examples
    --------
    >>> layer = co.nn.Linear(16, 8, activation="gelu", dtype=torch.bfloat16)
    >>> x, residual = torch.ones(4, 16).bfloat16(), torch.ones(4, 8).bfloat16()
    >>> layer(x).shape, layer(x, residual).shape
    (torch.Size([4, 8]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        epilogues.operation(activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation
        self._op, self._residual_op = (
            epilogues.linear_op(activation, bias=bias, residual=residual) for residual in (False, True)
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : Tensor
            (..., K), in the weight's dtype.
        residual : Tensor, optional
            (..., N), added behind the activation.

        Returns
        -------
        Tensor
            (..., N), in x's dtype; in FP32 with an FP32 residual, as in PyTorch.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message calls x ``a`` and the weight's transpose ``b``.
        """
        if parallel.is_spread(self.weight):
            return parallel.linear(self, x, residual)
        return apply(self._op, self._residual_op, x, self.weight, self.bias, residual)

    def extra_repr(self) -> str:
        """Return what ``repr`` says of the layer."""
        activation = f", activation={self.activation!r}" if self.activation else ""
        return super().extra_repr() + activation


def apply(op: Op, residual_op: Op, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """Call the one of two ops that takes a residual, if there is one."""
    inputs = () if bias is None else (bias,)
    if residual is None:
        found: Tensor = op(x, matrix(weight), *inputs)
        return found
    with_residual: Tensor = residual_op(x, matrix(weight), *inputs, residual, out_dtype=parallel.sum_dtype(x, residual))
    return with_residual


def matrix(weight: Tensor) -> Tensor:
    """Return the B of a weight (N, K).

    Raises
    ------
    NotImplementedError
        If its gradient is to be added to main_grad, which a compiled program does not see.
    """
    if torch.compiler.is_compiling() and getattr(weight, "main_grad", None) is not None:
        raise NotImplementedError(
            "a weight has a main_grad, and torch.compile would not add to it: remove it, or do not compile the module"
        )
    return weight.t()


def is_watched(*modules: torch.nn.Module) -> bool:
    """Whether a module has hooks, so that it must be called and not only its parameters be read."""
    return any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)
