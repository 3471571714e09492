"""Queries, keys and values of an attention as one GEMM behind its norm, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops.nn import epilogues
from cutlass_ops.run import norms, weights


class Projections:
    """The norm before an attention and its three projections, as one GEMM.

    It keeps a copy of the weights, side by side and with the norm's gamma folded in. In eager mode, a copy of what has
    changed since is made again. Copies and pickles have none, and make theirs at their first call.

    Parameters
    ----------
    layer : Module
        A decoder layer with ``input_layernorm`` and ``self_attn``.
    """

    def __init__(self, layer: Any) -> None:
        layers = _layers(layer)
        self._sizes = [each.weight.shape[0] for each in layers]
        self._epilogue = epilogues.after_norm(None, bias=layers[0].bias is not None)
        self._folded: Any = None
        self._bias: Tensor | None = None
        self._folded_from: Any = None
        self._fold(layer)

    def serves(self, x: Tensor) -> bool:
        """Whether a layer's call can take this way: it records no gradients, and has the weights' dtype."""
        if torch.is_grad_enabled():
            return False
        if self._folded is None:  # a copy, which cannot be made while PyTorch traces
            return not torch.compiler.is_compiling()
        found: bool = self._folded.matrix.dtype == x.dtype
        return found

    def __call__(self, layer: Any, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of x, which the norm has not seen."""
        if not torch.compiler.is_compiling() and self._folded_from != _state(layer):
            self._fold(layer)
        inputs: dict[str, Any] = {} if self._bias is None else {"bias": self._bias}
        eps = layer.input_layernorm.variance_epsilon
        d: Tensor = norms.rmsnorm_gemm(x, self._folded, eps=eps, epilogue=self._epilogue, **inputs)
        return torch.split(d, self._sizes, -1)

    def _fold(self, layer: Any) -> None:
        layers = _layers(layer)
        with torch.no_grad():
            together = torch.cat([each.weight for each in layers])
            self._folded = weights.prepare(together.t(), layer.input_layernorm.weight)
            biased = layers[0].bias is not None
            self._bias = torch.cat([each.bias for each in layers]) if biased else None
        self._folded_from = _state(layer)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_folded": None, "_bias": None, "_folded_from": None}


def _layers(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def _state(layer: Any) -> tuple[Any, ...]:
    """Return what changes when a parameter does."""
    found = [layer.input_layernorm.weight]
    for each in _layers(layer):
        found += [each.weight] if each.bias is None else [each.weight, each.bias]
    return tuple((p.data_ptr(), p.dtype, p.device, 0 if p.is_inference() else p._version) for p in found)


class Handing:
    """An attention whose projections give what was computed already; all else is the attention's own.

    Parameters
    ----------
    attention : Module
        The attention.
    projected : tuple of Tensor
        Queries, keys and values.
    """

    def __init__(self, attention: Any, projected: tuple[Tensor, ...]) -> None:
        self._attention, self._projected = attention, projected

    def q_proj(self, _: Tensor) -> Tensor:
        """Return the queries."""
        return self._projected[0]

    def k_proj(self, _: Tensor) -> Tensor:
        """Return the keys."""
        return self._projected[1]

    def v_proj(self, _: Tensor) -> Tensor:
        """Return the values."""
        return self._projected[2]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)
