"""How a matrix lies in memory, and so the type of operand that it is to a kernel: major and alignment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import DType
from cutlass_ops.declare.spec import Major, Operand
from cutlass_ops.run.sizes import surely
from cutlass_ops.run.tensors import how_to_copy

MAJORS: tuple[Major, ...] = ("row", "col")


@dataclass(frozen=True)
class Matrix:
    """The type of a matrix, or of one for each batch, aligned by address and strides, and its contiguous extent.

    TMA loads need no more. All other whole accesses, TMA stores included, need an aligned extent too.
    """

    operand: Operand
    length: int

    def for_vector_access(self) -> Operand:
        """Return the type for accesses that also need an aligned extent."""
        return Operand(self.operand.dtype, self.operand.major, math.gcd(self.operand.alignment, self.length))


def matrix(name: str, tensor: Tensor, dtype: DType, *, of_rows: bool = False) -> Matrix:
    """Return the type of a matrix, the last two dimensions of a tensor.

    A dimension of extent 1 allows both majors: it is the better aligned one, row-major if equal, or if there must be
    rows in memory.

    Raises
    ------
    ValueError
        If neither dimension is contiguous, or rows overlap in memory.
    """
    found = _readings(name, tensor, dtype)
    if of_rows and found[0].operand.major == "row":
        return found[0]
    return max(found, key=lambda m: m.operand.alignment)


def weights(
    b: Tensor, products: Mapping[str, Tensor], dtype: DType, majors: Sequence[Major] = MAJORS
) -> tuple[Matrix, ...]:
    """Return the types of B and of each product's matrix, with one major of those given and one alignment.

    Raises
    ------
    ValueError
        If they have no major in common, or a kernel cannot address one of them.
    """
    named = {"b": b} | dict(products)
    readings = {n: {m.operand.major: m for m in _readings(n, t, dtype)} for n, t in named.items()}
    common = [major for major in majors if all(major in by for by in readings.values())]
    alike = [[by[major] for by in readings.values()] for major in common]
    if not alike:
        found = ", ".join(f"{name} is {'- or '.join(by)}-major" for name, by in readings.items())
        raise ValueError(
            f"{found}: both weights need the same major. If one is weight.t(), pass the other as a transpose as well"
        )
    lowest = [min(m.operand.alignment for m in matrices) for matrices in alike]
    best = lowest.index(max(lowest))
    return tuple(replace(m, operand=replace(m.operand, alignment=lowest[best])) for m in alike[best])


def _readings(name: str, tensor: Tensor, dtype: DType) -> list[Matrix]:
    found = [m for inner in (1, 0) if (m := as_major(tensor, inner, dtype)) is not None]
    if not found:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: one dimension must have stride 1, "
            f"and the other a stride of at least its extent: {how_to_copy(name)}"
        )
    return found


def has_lines_along(tensor: Tensor, inner: int) -> bool:
    """Whether a matrix, the last two dimensions of a tensor, is contiguous along one of them: 0 or 1.

    An extent of 1 can make both true.
    """
    along, across = inner - 2, -1 - inner
    length, runs = tensor.shape[along], tensor.shape[across]
    lines = surely(tensor.stride(along) == 1) or surely(length <= 1)
    return lines and (surely(tensor.stride(across) >= length) or surely(runs <= 1))


def as_major(tensor: Tensor, inner: int, dtype: DType) -> Matrix | None:
    """Return the type of a matrix whose lines lie along a dimension, 0 or 1; None if they do not."""
    if not has_lines_along(tensor, inner):
        return None
    along, across = inner - 2, -1 - inner
    length, runs, ld = tensor.shape[along], tensor.shape[across], tensor.stride(across)
    addresses = math.gcd(tensor.data_ptr(), arch.TMA_ALIGNMENT_BYTES)
    if runs > 1:
        addresses = math.gcd(addresses, ld * dtype.bytes)
    for extent, stride in zip(tensor.shape[:-2], tensor.stride(), strict=False):
        if extent > 1:
            addresses = math.gcd(addresses, stride * dtype.bytes)
    return Matrix(Operand(dtype, "row" if inner == 1 else "col", addresses // dtype.bytes), length)


def aligning(name: str, tensor: Tensor, inner: int, pad: str) -> str:
    """Return what to do with a matrix whose lines do not begin at multiples of 16 bytes, for messages.

    Padding helps if lines are too long by a part of these. A copy helps if they are whole: they lie too far apart, or
    the first one has another address.

    Parameters
    ----------
    name : str
        The matrix.
    tensor : Tensor
        It, with its last two dimensions.
    inner : int
        The dimension that lines lie along, 0 or 1.
    pad : str
        What to pad.
    """
    step = arch.TMA_ALIGNMENT_BYTES // tensor.element_size()
    if tensor.shape[inner - 2] % step:
        return f"{pad} with zeros to a multiple of {step}"
    return f"call {name}.clone(), whose lines do"
