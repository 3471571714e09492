"""A norm and the linear layer behind it, as one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops.nn import epilogues
from cutlass_ops.nn.linear import Linear, matrix
from cutlass_ops.run import norms, weights
from cutlass_ops.run.results import PreparedLayerNormWeight, PreparedWeight


class _NormLinear(torch.nn.Module):
    """A norm and a linear layer. Subclasses say how the norm's parameters become part of the weight."""

    norm: Any
    linear: Linear

    def __init__(self, norm: torch.nn.Module, linear: Linear) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        self._epilogue = epilogues.after_norm(linear.activation, bias=linear.bias is not None)
        self._folded: Any = None
        self._folded_from: Any = None

    def fold(self) -> Any:
        """Fold the norm's parameters into a copy of the weight, once, for calls without gradients.

        The copy takes as much memory as the weight. Calls with gradients do not use it. Without :meth:`fold`, each call
        folds, which reads and writes the whole weight. In eager mode, a parameter that has changed is folded again at
        the next call. A compiled program takes the copy as it is: call :meth:`fold` again after a change.

        Returns
        -------
        Module
            The module itself.
        """
        with torch.no_grad():
            self._folded, self._folded_from = self._prepared(), self._state()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer for x (..., K)."""
        bias = self.linear.bias
        inputs = {} if bias is None else {"bias": bias}
        folded = None
        if self._folded is not None and not torch.is_grad_enabled():
            if not torch.compiler.is_compiling() and self._folded_from != self._state():
                self.fold()
            folded = self._folded
        return self._run(x, folded, inputs)

    def _state(self) -> tuple[Any, ...]:
        """Return what changes when a parameter does."""
        parameters = (self.linear.weight, *self.norm.parameters(recurse=False))
        versions = [0 if p.is_inference() else p._version for p in parameters]
        return tuple((p.data_ptr(), p.dtype, p.device, v) for p, v in zip(parameters, versions, strict=True))

    def _prepared(self) -> Any:
        raise NotImplementedError

    def _run(self, x: Tensor, folded: Any, inputs: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    def _apply(self, *args: Any, **named: Any) -> Any:
        self._folded = self._folded_from = None  # of parameters that are elsewhere from here on
        return super()._apply(*args, **named)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folded": None, "_folded_from": None}


class RMSNormLinear(_NormLinear):
    """linear(rmsnorm(x)) in one kernel, with an activation behind it.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether the linear layer has a bias.
    eps : float
        Added to the mean of squares.
    device, dtype
        Of the parameters.
    activation : str, optional
        As for :class:`Linear`.

    Attributes
    ----------
    norm : torch.nn.RMSNorm
        Its weight (K,) is folded into the linear layer's: see :meth:`fold`.
    linear : Linear
        The linear layer.

    Examples
    --------
    >>> layer = co.nn.RMSNormLinear(16, 8, dtype=torch.bfloat16)
    >>> with torch.no_grad():
    ...     d = layer.fold()(torch.ones(4, 16).bfloat16())
    >>> d.shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([4, 8]), ['norm.weight', 'linear.weight'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        eps: float = 1e-6,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        norm = torch.nn.RMSNorm(in_features, eps, device=device, dtype=dtype)
        super().__init__(norm, Linear(in_features, out_features, bias, device, dtype, activation=activation))

    def _prepared(self) -> PreparedWeight:
        return weights.prepare(self.linear.weight.t(), self.norm.weight)

    def _run(self, x: Tensor, folded: Any, inputs: dict[str, Any]) -> Tensor:
        weight, gamma = (matrix(self.linear.weight), self.norm.weight) if folded is None else (folded, None)
        found: Tensor = norms.rmsnorm_gemm(x, weight, gamma, eps=self.norm.eps, epilogue=self._epilogue, **inputs)
        return found


class LayerNormLinear(_NormLinear):
    """linear(layernorm(x)) in one kernel, with an activation behind it.

    The kernel subtracts the mean from sums: :func:`cutlass_ops.layernorm_gemm` says for which x that is exact enough.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether the linear layer has a bias.
    eps : float
        Added to the variance.
    device, dtype
        Of the parameters.
    activation : str, optional
        As for :class:`Linear`.

    Attributes
    ----------
    norm : torch.nn.LayerNorm
        Its weight and bias (K,) are folded into the linear layer's weight: see :meth:`fold`.
    linear : Linear
        The linear layer.

    Examples
    --------
    >>> layer = co.nn.LayerNormLinear(16, 8, dtype=torch.bfloat16)
    >>> layer(torch.randn(4, 16).bfloat16()).shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([4, 8]), ['norm.weight', 'norm.bias', 'linear.weight', 'linear.bias'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
    ) -> None:
        norm = torch.nn.LayerNorm(in_features, eps, device=device, dtype=dtype)
        super().__init__(norm, Linear(in_features, out_features, bias, device, dtype, activation=activation))

    def _prepared(self) -> PreparedLayerNormWeight:
        return weights.prepare_layernorm(self.linear.weight.t(), self.norm.weight, self.norm.bias)

    def _run(self, x: Tensor, folded: Any, inputs: dict[str, Any]) -> Tensor:
        vectors = (self.norm.weight, self.norm.bias) if folded is None else (None, None)
        weight = matrix(self.linear.weight) if folded is None else folded
        found: Tensor = norms.layernorm_gemm(x, weight, *vectors, eps=self.norm.eps, epilogue=self._epilogue, **inputs)
        return found
