"""A linear layer with what follows it, as one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's usual name
from torch import Tensor

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.nn import epilogues, parallel
from cutlass_ops.nn.launching import Prepares
from cutlass_ops.nn.reading import (
    add_to_main_grad,
    are_read,
    is_foreign,
    is_spread,
    matrix,
    must_leave_trace,
    needs_pytorch,
    parameter,
    rows,
)


class Activated(Prepares):
    """A module with an activation that does not change."""

    _activation: str | None  # as given
    _known: str  # its name in ``epilogues.ACTIVATIONS``

    def _set_activation(self, activation: str | None) -> None:
        self._activation, self._known = activation, epilogues.known(activation)

    @property
    def activation(self) -> str | None:
        """The activation's name, which does not change."""
        return self._activation

    def extra_repr(self) -> str:
        """Return the activation, for the module's ``repr``."""
        return f"activation={self.activation!r}" if self.activation else ""


class Linear(Activated, torch.nn.Linear):
    """activation(x @ weight.T + bias) + residual, in one kernel.

    It is a subclass of ``torch.nn.Linear``: the parameters, their names and their initialisation are the same. In other
    dtypes than FP16, BF16 and FP8 it computes as PyTorch does.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether there is a bias.
    device, dtype
        Device and dtype of the parameters. Kernels take FP16 and BF16, and FP32 inside ``torch.autocast``.
    activation : str, optional
        ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"quick_gelu"``, ``"silu"``, ``"sigmoid"``, ``"tanh"``,
        ``"hardswish"``, ``"leaky_relu"``, ``"mish"``, ``"relu2"``, ``"relu6"`` or ``"softplus"``. Hugging Face's other
        names for these, such as ``"gelu_new"``, ``"gelu_pytorch_tanh"`` and ``"swish"``, are known too.
    epilogue : Epilogue, optional
        In place of an activation: D = epilogue(x @ weight.T + bias) + residual. Its inputs are passed to the call by
        name. It has D as its only output.

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
    TypeError, ValueError
        If the activation is unknown, or the epilogue does not fit. The message says what to do.

    Examples
    --------
    >>> layer = co.nn.Linear(16, 8, activation="gelu", dtype=torch.bfloat16)
    >>> x, residual = torch.ones(4, 16).bfloat16(), torch.ones(4, 8).bfloat16()
    >>> layer(x).shape, layer(x, residual=residual).shape
    (torch.Size([4, 8]), torch.Size([4, 8]))

    An epilogue with an input:

    >>> @co.epilogue
    ... def scaled(acc, scale: co.Scalar):
    ...     return co.e.tanh(acc) * scale
    >>> layer = co.nn.Linear(16, 8, epilogue=scaled, dtype=torch.bfloat16)
    >>> layer(x, scale=0.5, residual=residual).shape
    torch.Size([4, 8])
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
        epilogue: Epilogue | None = None,
    ) -> None:
        if epilogue is not None and activation is not None:
            raise TypeError(f"activation is {activation!r}, and there is an epilogue: write the activation into it")
        ops = epilogues.linear_ops(activation) if epilogue is None else epilogues.ops_with(epilogue)
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_activation(activation)
        self._epilogue, self._ops = epilogue, ops

    @property
    def is_activated(self) -> bool:
        """Whether an activation or an epilogue follows the bias."""
        return self._known != "none" or self._epilogue is not None

    def forward(  # type: ignore[override]
        self, x: Tensor, *, residual: Tensor | None = None, **inputs: Any
    ) -> Tensor:
        """Compute the layer.

        Parameters
        ----------
        x : Tensor
            (..., K), in the weight's dtype.
        residual : Tensor, optional
            (..., N), added after the activation. Pass it by name: hooks such as ``RowwiseParallel``'s drop further
            positional arguments.
        **inputs
            The epilogue's inputs, as for :func:`cutlass_ops.gemm`.

        Returns
        -------
        Tensor
            (..., N), in x's dtype; in FP32 with an FP32 residual, as in PyTorch.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message calls x ``a`` and the weight's transpose ``b``.
        """
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        # If torch.fx traces this module itself, `inputs` is a Proxy.
        given = self._given(inputs) if self._epilogue is not None or (isinstance(inputs, dict) and inputs) else ()
        if is_spread(weight):
            return parallel.linear(self, x, residual)
        if needs_pytorch(x, weight):
            d = F.linear(x, weight, bias)
            after = self._epilogue
            d = epilogues.activated(self._known, d) if after is None else epilogues.evaluated(after.graph, x, d, inputs)
            return parallel.plus(d, residual)
        return apply(self._ops, x, weight, bias, residual, inputs=given)

    def _given(self, inputs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the epilogue's inputs in its order. Raises TypeError if one is missing or unknown."""
        names = () if self._epilogue is None else tuple(i.name for i in self._epilogue.graph.inputs)
        wrong = sorted(set(names) ^ set(inputs))
        if wrong:
            what = "is missing" if wrong[0] in names else "is no input"
            raise TypeError(
                f"{wrong[0]} {what}: besides x and residual=, this layer takes {', '.join(names) or 'nothing'} by name"
            )
        return tuple(inputs[name] for name in names)

    def extra_repr(self) -> str:
        """Return the settings, for the layer's ``repr``."""
        epilogue = "" if self._epilogue is None else f"epilogue={self._epilogue.name}"
        return ", ".join(filter(None, (torch.nn.Linear.extra_repr(self), super().extra_repr(), epilogue)))


def apply(
    ops: epilogues.LinearOps,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    as_b: Callable[[Tensor], Tensor] = matrix,
    inputs: Sequence[Any] = (),
) -> Tensor:
    """Call the layer's op that takes its bias and a residual, if there are any, and further inputs."""
    if must_leave_trace(weight):
        return add_to_main_grad(apply, ops, x, weight, bias, residual, as_b, inputs)
    op, given = epilogues.chosen(ops, bias, residual, inputs)
    out_dtype = parallel.sum_dtype(x, residual)
    found: Tensor = op(rows(x), as_b(weight), *given, out_dtype=out_dtype)
    return found


def activated(activation: str, ops: epilogues.LinearOps, layer: Any, x: Tensor) -> Tensor:
    """Return activation(layer(x)): by these ops in one kernel, or after the call of a layer that must be called."""
    if is_plain(x, layer):
        return apply(ops, x, layer.weight, layer.bias, None)
    return epilogues.activated(activation, layer(x))


def is_plain(x: Any, *layers: Any) -> bool:
    """Whether kernels serve x, as the layers would be called."""
    return are_plain(*layers) and not is_foreign(x, *(layer.weight for layer in layers))


def are_plain(*layers: Any) -> bool:
    """Whether reading the weights of layers equals calling them, and nothing follows their biases."""
    return are_read(_OWN, *layers) and not any(layer.is_activated for layer in layers)


# The class whose parameters are read; a subclass may have another forward.
_OWN = (Linear,)
