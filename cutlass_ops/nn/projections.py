"""Queries, keys and values of an attention as one GEMM behind its norm, without gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.nn import epilogues
from cutlass_ops.nn.folded import Folded
from cutlass_ops.nn.reading import are_read, is_foreign, rows
from cutlass_ops.run import norms, weights
from cutlass_ops.run.values import PreparedWeight


class Projections:
    """The norm before an attention and its three projections, as one GEMM.

    It reads a decoder layer with ``input_layernorm`` and ``self_attn``, whose projections are of the classes `linears`.
    It keeps a copy of the weights, side by side and with the norm's gamma folded in. In eager mode, the copy is made
    again if a parameter has changed, or gradients were recorded. Copies and pickles make theirs at their first call.
    """

    def __init__(self, layer: Any, linears: tuple[type, ...]) -> None:
        self._norm_class = type(layer.input_layernorm)
        self._folded = Folded()
        self.fold(layer, linears)

    def fold(self, layer: Any, linears: tuple[type, ...]) -> None:
        """Fold again. Raises ValueError if modules are called, not read, or a parameter was made in inference mode."""
        if not self._are_read(layer, linears):
            raise ValueError(
                "a projection or the norm before it has a hook, another class, a parametrization, or a weight that is "
                "quantised or a DTensor, so it must be called and cannot be folded: remove that, or do not fold"
            )
        self._folded.fold(lambda: _together(layer), lambda: _sources(layer))

    def run(self, layer: Any, x: Tensor, linears: tuple[type, ...]) -> tuple[Tensor, ...] | None:
        """Return queries, keys and values of x, which the norm has not seen; None if modules must be called for them.

        This way records no gradients, and needs x in the weights' dtype. It calls no module, so none may be watched.
        """
        if torch.is_grad_enabled():
            self._folded.drop()
            return None
        if not self._are_read(layer, linears) or is_foreign(x, *(each.weight for each in _layers(layer))):
            return None
        found = self._folded.current(lambda: _together(layer), lambda: _sources(layer))
        if found is None or found.matrix.dtype != x.dtype:
            return None
        inputs: dict[str, Any] = {} if found.bias is None else {"bias": found.bias}
        eps = layer.input_layernorm.variance_epsilon
        d: Tensor = norms.rmsnorm_gemm(rows(x), found.weight, eps=eps, epilogue=found.epilogue, **inputs)
        return torch.split(d, found.sizes, -1)

    def _are_read(self, layer: Any, linears: tuple[type, ...]) -> bool:
        query, key, value = _layers(layer)
        if not are_read(linears, query, key, value) or not are_read((self._norm_class,), layer.input_layernorm):
            return False
        return (query.bias is None) == (key.bias is None) == (value.bias is None)


class _Together(NamedTuple):
    """Three projections side by side."""

    weight: PreparedWeight  # with the norm's gamma folded in
    bias: Tensor | None
    epilogue: Epilogue | None  # adds the biases
    sizes: list[int]  # the columns of each

    @property
    def matrix(self) -> Tensor:
        return self.weight.matrix


def _together(layer: Any) -> _Together:
    layers = _layers(layer)
    biased = layers[0].bias is not None
    together = torch.cat([each.weight for each in layers])
    return _Together(
        weights.prepare(together.t(), layer.input_layernorm.weight),
        torch.cat([each.bias for each in layers]) if biased else None,
        epilogues.after_norm(None, bias=biased),
        [each.weight.shape[0] for each in layers],
    )


def _layers(layer: Any) -> tuple[Any, ...]:
    attention = layer.self_attn
    return attention.q_proj, attention.k_proj, attention.v_proj


def _sources(layer: Any) -> tuple[Tensor, ...]:
    """Return the parameters that are folded."""
    layers = _layers(layer)
    biases = (each.bias for each in layers if each.bias is not None)
    return layer.input_layernorm.weight, *(each.weight for each in layers), *biases


class Handing:
    """An attention that uses queries, keys and values that were computed already; all else is the attention's own."""

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
