"""A norm and the linear layer behind it, as one kernel."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.nn import epilogues
from cutlass_ops.nn.folded import Folded, of_launch
from cutlass_ops.nn.linear import Activated, Linear, activated
from cutlass_ops.nn.reading import are_read, has_main_grad, is_foreign, matrix, rows
from cutlass_ops.run import casting, norms, weights
from cutlass_ops.run.values import PreparedWeight


class NormLinear(Activated, torch.nn.Module):
    """A norm and a linear layer. Subclasses say how the norm's parameters become part of the weight."""

    norm: Any
    linear: Linear
    # The norm that is read; a subclass may have another forward.
    _norm_class: type[torch.nn.Module]

    def __init__(self, norm: torch.nn.Module, linear: Linear, activation: str | None) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        self._set_activation(activation)
        self._ops = epilogues.linear_ops(activation)
        self._epilogues = tuple(epilogues.after_norm(activation, bias=bias) for bias in (False, True))
        self._folded, self._is_folded = Folded(), False

    def fold(self) -> Any:
        """Fold the norm's parameters into a copy of the weight, once, for calls without gradients.

        The copy takes as much memory as the weight. Without :meth:`fold`, each call of an :class:`RMSNormLinear` folds,
        which reads and writes the whole weight, and PyTorch computes the norm of a :class:`LayerNormLinear`. In eager
        mode, the copy is renewed if a parameter has changed, and after ``train()``, ``eval()``, or a call with
        gradients, since a step of an optimizer may follow. Writes by ``parameter.data`` are not detected, and compiled
        programs detect no changes: call :meth:`fold` again after them.

        Returns
        -------
        Module
            The module itself.

        Raises
        ------
        TypeError, ValueError
            If the weight is not in FP16 or BF16, if norm or layer has hooks or another class, or if a parameter was
            created in inference mode.
        """
        if not self._is_read(self.norm, self.linear):
            raise ValueError(
                "norm or linear has a hook, another class or activation, a parametrization, or a weight that is "
                "quantised or a DTensor, so it must be called and cannot be folded: remove that, or do not fold"
            )
        weight = self._weight()
        if weight.dtype not in (torch.float16, torch.bfloat16):
            raise TypeError(
                f"linear.weight is {weight.dtype}: convert the module to torch.bfloat16, or fold inside torch.autocast"
            )
        folded = Folded()
        folded.fold(self._prepared, self._sources)
        self._folded, self._is_folded = folded, True
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer for x (..., K)."""
        norm, linear = self.norm, self.linear
        # What would be added to main_grad is the gradient of the weight, and not of its product with the norm's.
        if not self._is_read(norm, linear) or has_main_grad(linear.weight):
            self._drop()
            return activated(self._known, self._ops, linear, norm(x))
        if is_foreign(x, linear.weight):
            self._drop()
            return epilogues.activated(self._known, F.linear(norm(x), linear.weight, linear.bias))
        bias = linear.bias
        inputs = {} if bias is None else {"bias": bias.contiguous()}
        return self._run(rows(x), norm, linear, self._folded_for(x), self._epilogues[int(bias is not None)], inputs)

    @property
    def folds(self) -> bool:
        """Whether :meth:`fold` was called. Copies and pickles of the module have no folded weight."""
        return self._is_folded

    def _is_read(self, norm: Any, linear: Any) -> bool:
        """Whether norm and layer need not be called. Others may have taken their places."""
        if not are_read((self._norm_class, Linear), norm, linear):
            return False
        return not linear.is_activated and norm.eps is not None

    def _folded_for(self, x: Tensor) -> Any:
        """Return the folded weight for a call, or None."""
        if torch.is_grad_enabled():
            self._drop()
            return None
        found = self._folded.current(self._prepared, self._sources) if self._is_folded else None
        found = of_launch(self, self._prepared) if found is None else found
        wanted = casting.autocast_dtype(x) or x.dtype
        return found if found is not None and found.matrix.dtype == wanted else None

    def _drop(self) -> None:
        self._folded.drop()

    def _sources(self) -> tuple[Tensor, ...]:
        """Return the parameters that are folded."""
        return self.linear.weight, *(p for p in self.norm._parameters.values() if p is not None)

    def _weight(self) -> Tensor:
        """Return the weight (K, N) as a call would multiply by it."""
        weight = self.linear.weight
        found: Tensor = casting.autocast_to(casting.autocast_dtype(weight), weight)
        return matrix(found)

    def _prepared(self) -> Any:
        raise NotImplementedError

    def _run(
        self, x: Tensor, norm: Any, linear: Any, folded: Any, epilogue: Epilogue | None, inputs: dict[str, Any]
    ) -> Tensor:
        raise NotImplementedError

    def train(self, mode: bool = True) -> Any:
        """Set the mode, as ``torch.nn.Module.train`` does. A folded weight is renewed by the next call."""
        self._drop()
        return super().train(mode)

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, torch.nn.Module) and "_folded" in self.__dict__:
            self._drop()  # an adapter that is merged and goes may have written by ``parameter.data``
        super().__setattr__(name, value)

    def _apply(self, *args: Any, **named: Any) -> Any:
        self._drop()  # parameters are elsewhere from here on
        return super()._apply(*args, **named)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any) -> None:
        self._drop()  # PyTorch's tracer would take what was folded before
        super()._load_from_state_dict(*args)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_is_folded": False}


class RMSNormLinear(NormLinear):
    """activation(linear(rmsnorm(x))) in one kernel.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether the linear layer has a bias.
    eps : float
        Added to the mean of squares.
    device, dtype
        Device and dtype of the parameters.
    activation : str, optional
        As for :class:`Linear`.

    Attributes
    ----------
    norm : torch.nn.RMSNorm
        The norm. Its weight (K,) is folded into the linear layer's weight: see :meth:`fold`.
    linear : Linear
        The linear layer, without the activation.
    activation : str or None
        Read-only.

    Examples
    --------
    >>> layer = co.nn.RMSNormLinear(16, 8, dtype=torch.bfloat16)
    >>> with torch.no_grad():
    ...     d = layer.fold()(torch.ones(4, 16).bfloat16())
    >>> d.shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([4, 8]), ['norm.weight', 'linear.weight'])
    """

    _norm_class = torch.nn.RMSNorm

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
        super().__init__(norm, Linear(in_features, out_features, bias, device, dtype), activation)

    def _prepared(self) -> PreparedWeight:
        weight, gamma = self._weight(), self.norm.weight
        # A norm without a weight.
        gamma = weight.new_ones(weight.shape[0]) if gamma is None else gamma
        return weights.prepare(weight, gamma)

    def _run(
        self, x: Tensor, norm: Any, linear: Any, folded: Any, epilogue: Epilogue | None, inputs: dict[str, Any]
    ) -> Tensor:
        weight, gamma = (matrix(linear.weight), norm.weight) if folded is None else (folded, None)
        found: Tensor = norms.rmsnorm_gemm(x, weight, gamma, eps=norm.eps, epilogue=epilogue, **inputs)
        return found


class LayerNormLinear(NormLinear):
    """activation(linear(layernorm(x))) in one kernel.

    The kernel subtracts the mean after summation: :func:`cutlass_ops.layernorm_gemm` says for which x this is accurate.

    Parameters
    ----------
    in_features, out_features : int
        K and N.
    bias : bool
        Whether the linear layer has a bias.
    eps : float
        Added to the variance.
    device, dtype
        Device and dtype of the parameters.
    activation : str, optional
        As for :class:`Linear`.

    Attributes
    ----------
    norm : torch.nn.LayerNorm
        The norm. Its weight and bias (K,) are folded into the linear layer's weight and bias: see :meth:`fold`.
    linear : Linear
        The linear layer, without the activation.
    activation : str or None
        Read-only.

    Examples
    --------
    >>> layer = co.nn.LayerNormLinear(16, 8, dtype=torch.bfloat16)
    >>> layer(torch.randn(4, 16).bfloat16()).shape, [name for name, _ in layer.named_parameters()]
    (torch.Size([4, 8]), ['norm.weight', 'norm.bias', 'linear.weight', 'linear.bias'])
    """

    _norm_class = torch.nn.LayerNorm

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
        super().__init__(norm, Linear(in_features, out_features, bias, device, dtype), activation)

    def _prepared(self) -> PreparedWeight:
        return weights.prepare(self._weight(), self.norm.weight, self.norm.bias, norm="layer")

    def _run(
        self, x: Tensor, norm: Any, linear: Any, folded: Any, epilogue: Epilogue | None, inputs: dict[str, Any]
    ) -> Tensor:
        vectors = (norm.weight, norm.bias) if folded is None else (None, None)
        weight = matrix(linear.weight) if folded is None else folded
        found: Tensor = norms.layernorm_gemm(x, weight, *vectors, eps=norm.eps, epilogue=epilogue, **inputs)
        return found
