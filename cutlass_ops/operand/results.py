"""What calls return besides tensors: results with names, and a norm's statistic.

PyTorch's tracers must know these classes before they meet one. A process that loads a saved program must, too. So the
library imports this module at once. It imports the modules that compute with its classes when they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from cutlass_ops.base import arch, dtypes, mma
from cutlass_ops.epilogue.graph import Expression
from cutlass_ops.epilogue.nodes import Kind

_USUAL: dict[tuple[torch.dtype, torch.dtype], torch.dtype] = {
    (getattr(torch, m.a.torch_name), getattr(torch, m.b.torch_name)): getattr(torch, m.result.torch_name)
    for m in mma.MMAS
}


# PyTorch's FP8 types, by our names.
FP8: dict[str, torch.dtype] = {t.name: getattr(torch, t.torch_name) for t in dtypes.FP8}


def usual_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return D's dtype for operands of these dtypes if a call asks for none: A's, or BF16 for FP8."""
    return _USUAL.get((a, b), a)


def quantized_dtype(graph: Expression) -> torch.dtype | None:
    """Return D's dtype if the epilogue quantises it, else None."""
    return None if graph.quantized is None else FP8[graph.quantized]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor."""
    return tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))


# Scales in 16 bytes: lines of M-major scales are padded to a multiple, as in DeepGEMM.
_LINE = 4


def scale_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of new scales of blocks, (..., M, blocks): M-major, with padded lines."""
    *batch, _ = shape
    return *contiguous(batch), -(-math.prod(batch) // _LINE) * _LINE


def operand_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new FP8 operand (..., M, K), with lines aligned for the Tensor Cores."""
    *batch, k = shape
    return contiguous((*batch, -(-k // arch.TMA_ALIGNMENT_BYTES) * arch.TMA_ALIGNMENT_BYTES))


def new_strides(kind: Kind, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new output: contiguous, except for scales of blocks."""
    return scale_strides(shape) if kind is Kind.BLOCKS_D else contiguous(shape)


class Outputs(tuple[Any, ...]):
    """The results of a call with several outputs.

    One class serves all epilogues, so a process can load a program whose epilogue it has never seen. The class does not
    know the names. PyTorch's backward hooks of modules, collation and FSDP make a tuple again from its class and values
    alone, and so get a plain tuple.

    ``Outputs(fields, values)`` takes the outputs' names, a tuple of str with D's first, and their values, an iterable
    of Tensor.

    Examples
    --------
    >>> outputs = co.types.Outputs(("d", "row_max"), (1, 2))
    >>> d, row_max = outputs
    >>> outputs.row_max
    2
    """

    _fields: tuple[str, ...]

    def __new__(cls, *given: Any) -> Outputs:  # noqa: D102
        # Inlined, and checks only the first name: each warm call makes one.
        if len(given) == 2 and type(given[0]) is tuple and given[0] and type(given[0][0]) is str:
            self = tuple.__new__(cls, given[1])
            self._fields = given[0]
            return self
        # The values of a tuple that is made again, as one or as several arguments.
        return tuple(given[0]) if len(given) == 1 else given  # type: ignore[return-value]

    @classmethod
    def _make(cls, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(values)

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("_fields", ())
        if name in fields:
            return self[fields.index(name)]
        raise AttributeError(f"there is no output {name!r}: the outputs are {', '.join(fields)}")

    # A tuple's methods, unless an output has such a name.
    @property
    def count(self) -> Any:
        """The output of this name, or the tuple's method."""
        return self.__getattr__("count") if "count" in self._fields else super().count

    @property
    def index(self) -> Any:
        """The output of this name, or the tuple's method."""
        return self.__getattr__("index") if "index" in self._fields else super().index

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def _asdict(self) -> dict[str, Any]:
        """Return the outputs by name."""
        return dict(zip(self._fields, self, strict=True))

    def _replace(self, **others: Any) -> Outputs:
        """Return these outputs with others in place of some, as a named tuple does."""
        if unknown := sorted(set(others) - set(self._fields)):
            raise ValueError(f"there is no output {unknown[0]!r}: the outputs are {', '.join(self._fields)}")
        return Outputs(self._fields, tuple((self._asdict() | others).values()))

    def __reduce__(self) -> tuple[Any, ...]:
        return Outputs, (self._fields, tuple(self))

    def __repr__(self) -> str:
        return f"Outputs({', '.join(f'{name}={value!r}' for name, value in self._asdict().items())})"


@dataclass(frozen=True, eq=False)
class RowStatistic:
    """The RMSNorm statistic of a tensor's rows, computed by a GEMM's epilogue.

    Attributes
    ----------
    sum_square : Tensor
        Sum of squares of each row, FP32, (...): the tensor's shape without the last dimension.
    count : int
        Elements in a row.
    eps : float
        Added to the mean of squares, inside the square root.

    Examples
    --------
    >>> a, b = torch.ones(1, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> residual = torch.full((1, 4), -6.0).bfloat16()
    >>> y, rstd = co.gemm_residual_rms(a, b, residual, eps=0.0)
    >>> y.tolist()
    [[2.0, 2.0, 2.0, 2.0]]
    >>> rstd.sum_square.tolist(), rstd.count, rstd.rstd.tolist()
    ([16.0], 4, [0.5])
    """

    sum_square: Tensor
    count: int
    eps: float

    @property
    def rstd(self) -> Tensor:
        """1 / √(mean of squares + eps) of each row, FP32. Reading it launches kernels."""
        return (self.sum_square / max(self.count, 1) + self.eps).rsqrt()


class ResidualRms(NamedTuple):
    """Result of :func:`cutlass_ops.gemm_residual_rms`: y (..., M, N) and the statistic of its rows.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> made = co.gemm_residual_rms(a, b, torch.zeros(2, 4).bfloat16(), eps=1e-6)
    >>> made.y.shape, made.rstd.sum_square.shape
    (torch.Size([2, 4]), torch.Size([2]))
    """

    y: Tensor
    rstd: RowStatistic


class QuantizedResidualRms(NamedTuple):
    """Result of :func:`cutlass_ops.gemm_residual_rms` with a copy in FP8.

    Attributes
    ----------
    y : Tensor
        (..., M, N), FP16 or BF16.
    rstd : RowStatistic
        The statistic of y's rows.
    quantized : Tensor
        y · gamma / scale_out, (..., M, N), in FP8.
    amax : Tensor or None
        Largest absolute value of each row of y · gamma, (..., M), FP32; None without ``amax=True``.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> made = co.gemm_residual_rms(a, b, torch.zeros(2, 4).bfloat16(), eps=1e-6, scale_out=0.25)
    >>> made.quantized.dtype, made.quantized.shape, made.amax
    (torch.float8_e4m3fn, torch.Size([2, 4]), None)
    """

    y: Tensor
    rstd: RowStatistic
    quantized: Tensor
    amax: Tensor | None


# Lets traced and saved programs take and return these.
_pytree.register_pytree_node(
    Outputs,
    lambda outputs: (list(outputs), outputs._fields),
    lambda values, fields: Outputs(fields, values),
    serialized_type_name="cutlass_ops.Outputs",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
_pytree.register_pytree_node(
    RowStatistic,
    lambda x: ([x.sum_square], [x.count, x.eps]),
    lambda tensors, numbers: RowStatistic(*tensors, *numbers),
    serialized_type_name="cutlass_ops.RowStatistic",
)
_pytree._register_namedtuple(ResidualRms, serialized_type_name="cutlass_ops.types.ResidualRms")
_pytree._register_namedtuple(QuantizedResidualRms, serialized_type_name="cutlass_ops.types.QuantizedResidualRms")
