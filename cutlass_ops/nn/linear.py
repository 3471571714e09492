"""A linear layer with what follows it, as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's usual name
from torch import Tensor

from cutlass_ops.nn import epilogues, parallel
from cutlass_ops.nn.reading import add_to_main_grad, is_own, is_spread, matrix, must_leave_trace, rows, vectors


class Linear(torch.nn.Linear):
    """activation(x @ weight.T + bias) + residual, in one kernel.

    It is a subclass of ``torch.nn.Linear``: the parameters, their names and their initialisation are the same.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether there is a bias.
    device, dtype
        Device and dtype of the parameters. Kernels take FP16 and BF16; FP32 parameters need ``torch.autocast``.
    activation : str, optional
        ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``, ``"hardswish"``, ``"mish"`` or
        ``"softplus"``.

    Attributes
    ----------
    weight : Parameter
        (N, K). If it has an attribute ``main_grad``, its gradient is added there: see docs/training.md.
    bias : Parameter or None
        (N,).
    activation : str or None
        Read-only.

    Raises
    ------
    ValueError
        If the activation is unknown. The message lists the known ones.

    Examples
    --------
    >>> layer = co.nn.Linear(16, 8, activation="gelu", dtype=torch.bfloat16)
    >>> x, residual = torch.ones(4, 16).bfloat16(), torch.ones(4, 8).bfloat16()
    >>> layer(x).shape, layer(x, residual=residual).shape
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
        ops = epilogues.linear_ops(activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._activation, self._ops = activation, ops

    @property
    def activation(self) -> str | None:
        """The activation's name, which does not change."""
        return self._activation

    def forward(self, x: Tensor, *, residual: Tensor | None = None) -> Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : Tensor
            (..., K), in the weight's dtype.
        residual : Tensor, optional
            (..., N), added after the activation. Pass it by name: hooks such as ``RowwiseParallel``'s drop further
            positional arguments.

        Returns
        -------
        Tensor
            (..., N), in x's dtype; in FP32 with an FP32 residual, as in PyTorch.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message calls x ``a`` and the weight's transpose ``b``.
        """
        weight = self.weight
        if is_spread(weight):
            return parallel.linear(self, x, residual)
        if is_own(weight):
            return self._by_pytorch(x, residual)
        return apply(self._ops, x, weight, self.bias, residual)

    def _by_pytorch(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Compute the layer where only the weight's own class can multiply by it."""
        d = F.linear(x, self.weight, self.bias)
        if self.activation == "gelu_tanh":
            d = F.gelu(d, approximate="tanh")
        elif self.activation not in (None, "none"):
            d = getattr(F, self.activation)(d)  # the other names are PyTorch's
        return d if residual is None else d + residual

    def extra_repr(self) -> str:
        """Return the settings, for the layer's ``repr``."""
        activation = f", activation={self.activation!r}" if self.activation else ""
        return super().extra_repr() + activation


def apply(
    ops: epilogues.LinearOps,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    as_b: Callable[[Tensor], Tensor] = matrix,
) -> Tensor:
    """Call the one of a layer's ops that takes its bias and a residual, if there are any."""
    if must_leave_trace(weight):
        return add_to_main_grad(apply, ops, x, weight, bias, residual, as_b)
    op = ops[int(bias is not None)][int(residual is not None)]
    if residual is None:
        found: Tensor = op(rows(x), as_b(weight), *vectors(bias))
        return found
    out_dtype = parallel.sum_dtype(x, residual)
    with_residual: Tensor = op(rows(x), as_b(weight), *vectors(bias), rows(residual), out_dtype=out_dtype)
    return with_residual
