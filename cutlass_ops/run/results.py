"""The results of an epilogue with several outputs: a tuple with named elements.

One class serves all epilogues, so that PyTorch can save programs that return it and load them in a process that has
never seen the epilogue.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree

from cutlass_ops.base import dtypes, mma
from cutlass_ops.epilogue.graph import Expression
from cutlass_ops.epilogue.nodes import Kind

_USUAL: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {
    (getattr(torch, m.a.torch_name), getattr(torch, m.b.torch_name)): getattr(torch, m.result.torch_name)
    for m in mma.MMAS
}


# PyTorch's types of FP8, by our names.
FP8: dict[str, torch.dtype] = {t.name: getattr(torch, t.torch_name) for t in dtypes.FP8}


def usual_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return D's dtype for operands of these dtypes where a call asks for none: A's, and BF16 for FP8."""
    return _USUAL.get((a, b), a)


def quantized_dtype(graph: Expression) -> torch.dtype | None:
    """Return D's dtype if the epilogue quantises it, else None."""
    return None if graph.quantized is None else FP8[graph.quantized]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


# Scales in 16 bytes: lines of M-major scales are padded to so many, as DeepGEMM pads them.
_LINE = 4


def scale_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of new scales of blocks, (..., M, blocks): M-major, with padded lines."""
    *batch, _ = shape
    return *contiguous(batch), -(-math.prod(batch) // _LINE) * _LINE


def new_strides(kind: Kind, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new output: contiguous, but for scales of blocks."""
    return scale_strides(shape) if kind is Kind.BLOCKS_D else contiguous(shape)


class Outputs(tuple[Any, ...]):
    """The results of a call with several outputs.

    Parameters
    ----------
    fields : iterable of str
        The outputs' names, D's first.
    values : iterable of Tensor
        Their values.

    Examples
    --------
    >>> outputs = Outputs(("d", "row_max"), (1, 2))
    >>> d, row_max = outputs
    >>> outputs.row_max
    2
    """

    _fields: tuple[str, ...]

    def __new__(cls, fields: Iterable[str], values: Iterable[Any]) -> Outputs:  # noqa: D102
        self = super().__new__(cls, values)
        self._fields = tuple(fields)
        return self

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", ())
        if name in fields:
            return self[fields.index(name)]
        raise AttributeError(f"there is no output {name!r}: the outputs are {', '.join(fields)}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def _asdict(self) -> dict[str, Any]:
        """Return the outputs by name."""
        return dict(zip(self._fields, self, strict=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return Outputs, (self._fields, tuple(self))

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"


_pytree.register_pytree_node(
    Outputs,
    lambda outputs: (list(outputs), outputs._fields),
    lambda values, fields: Outputs(fields, values),
    serialized_type_name="cutlass_ops.Outputs",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
