"""Operands and other matrices of a call, as objects: their elements, their layouts in memory, and what they stand for.

What a call asks of A and B, it asks of a :class:`Matrix`. Another kind of operand is a class here. It says which inputs
hold its tensors besides the matrix (`takes`), checks them, and says which numbers the operand stands for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.base import arch, mma
from cutlass_ops.base.dtypes import FP8, HELD, SPARSE, DType, e2m1, f32, i4, tf32, u4
from cutlass_ops.base.dtypes import dtype as named
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.spec import Major, Operand
from cutlass_ops.epilogue.graph import Expression
from cutlass_ops.epilogue.nodes import PARTS, Kind
from cutlass_ops.operand import packing, sparsity
from cutlass_ops.operand.batches import Frame
from cutlass_ops.operand.sizes import surely
from cutlass_ops.operand.tensors import element_type, fold, how_to_copy

MAJORS: tuple[Major, ...] = ("row", "col")
# Types of tensors that are multiplied. FP32 has a type for each way to multiply it.
MULTIPLIED = (*(t for t in mma.OPERANDS if mma.math_of(t) is None), f32)


@dataclass(frozen=True)
class Layout:
    """The type of a matrix, aligned by address and strides, and its contiguous extent.

    TMA loads need no more. All other whole accesses, TMA stores included, need an aligned extent too.
    """

    operand: Operand
    length: int

    def for_vector_access(self) -> Operand:
        """Return the type for accesses that also need an aligned extent."""
        return Operand(self.operand.dtype, self.operand.major, math.gcd(self.operand.alignment, self.length))


class Held(NamedTuple):
    """How a weight in a form of its own holds its elements in memory."""

    along_k: int  # elements of the matrix, along K, for one of the tensor
    dtype: torch.dtype | None  # of the tensor; None for that of A


@dataclass(frozen=True, eq=False)
class Matrix:
    """A dense matrix, or one for each batch or group: the last two dimensions of a tensor.

    Attributes
    ----------
    name : str
        What messages call it.
    tensor : Tensor
        Its values in memory.
    element : DType
        What the Tensor Cores multiply, or an epilogue reads or stores.
    further : dict of str to Tensor
        Its other tensors, by the names of the inputs that hold them. All of them have the matrix's batches or groups.
    """

    name: str
    tensor: Tensor
    element: DType
    further: Mapping[str, Tensor] = field(default_factory=dict)

    # The kind of the input that holds an operand's further tensor, by the operand's name.
    takes: ClassVar[Mapping[str, Kind]] = {}
    # None if the tensor has the matrix's shape.
    held: ClassVar[Held | None] = None
    trains: ClassVar[bool] = False  # whether a tensor with another shape has a gradient, of that shape

    @classmethod
    def element_of(cls, name: str, tensor: Tensor, allowed: Sequence[DType] = HELD) -> DType:
        """Return the type of its elements. Raises TypeError if it is not allowed."""
        return element_type(name, tensor, allowed)

    @classmethod
    def multiplied(cls, name: str, tensor: Tensor, math: mma.Math | None, allowed: Sequence[DType]) -> DType:
        """Return the type in which the Tensor Cores multiply an operand."""
        found = cls.element_of(name, tensor, allowed)
        if found is not f32:
            if math in mma.MATHS:
                raise TypeError(f"{name} is {tensor.dtype}, and math={math!r} is for torch.float32 operands: omit math")
            if math is not None and found not in FP8:
                raise TypeError(f"{name} is {tensor.dtype}, and math={math!r} is for FP8 operands: omit math")
            return found
        if math is None or math in mma.ACCUMULATIONS:
            raise TypeError(
                f"{name} is {tensor.dtype}, which Tensor Cores cannot multiply directly: convert a and b to "
                "torch.bfloat16 or torch.float16; or use torch.matmul. Ops such as cutlass_ops.gemm also take "
                "math='tf32', which rounds a and b to 10 bits of fraction, or math='3xtf32', which has nearly FP32's "
                "accuracy, at a third of the speed of 'tf32' or less"
            )
        return mma.MATHS[math]

    @classmethod
    def shapes(cls, kind: Kind, frame: Frame) -> list[tuple[int, ...]]:
        """Return the shapes that a further tensor may have, the usual one first."""
        raise NotImplementedError(f"{cls.__name__} has one tensor")

    @classmethod
    def of_further(cls, of_a: torch.dtype) -> torch.dtype:
        """Return the usual type of a further tensor, beside A's type."""
        return torch.float32

    @classmethod
    def check_further(cls, name: str, kind: Kind, value: Any, frame: Frame) -> Tensor:
        """Check a further tensor against the extents of a call. Return it as kernels take it."""
        raise NotImplementedError(f"{cls.__name__} has one tensor")

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents that it stands for."""
        return tuple(self.tensor.shape)

    @property
    def block(self) -> mma.Block | None:
        """Rows and columns that share a scale; None without scales."""
        return None

    def require_multiplied(self, found: mma.MmaSpec, math: mma.Math | None) -> None:
        """Raise TypeError if the instructions of both types, or a way to add up products, do not fit this kind."""

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the numbers that it stands for, as the Tensor Cores multiply them; by default in its own dtype."""
        found = as_multiplied(self.tensor, self.element)
        return found if dtype is None else found.to(dtype)

    def held_of(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the tensor, from that of the matrix, if a weight in a form of its own `trains`."""
        raise NotImplementedError

    def factors(self, dtype: torch.dtype) -> Tensor | None:
        """Return what sums over each BLOCK_K of K are multiplied by, (rows or columns, steps); None for 1."""
        return None

    def sums(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers whose products are added up, before any factors."""
        return self.values(dtype)

    def at(self, place: Any) -> Matrix:
        """Return one batch or group, or some rows or columns."""
        return replace(self, tensor=self.tensor[place], further={n: x[place] for n, x in self.further.items()})

    @cached_property
    def layouts(self) -> dict[Major, Layout]:
        """Its layout for each major that its strides allow. A dimension of extent 1 allows both."""
        found: dict[Major, Layout] = {}
        for major in MAJORS:
            inner = int(major == "row")
            if not has_lines_along(self.tensor, inner):
                continue
            along, across = inner - 2, -1 - inner
            shape, strides = self.tensor.shape, self.tensor.stride()
            apart = [strides[across]] if shape[across] > 1 else []
            apart += [stride for extent, stride in zip(shape[:-2], strides, strict=False) if extent > 1]
            size = self.tensor.element_size()
            aligned = math.gcd(self.tensor.data_ptr(), arch.TMA_ALIGNMENT_BYTES, *(stride * size for stride in apart))
            alignment = self.element.count_in(aligned)
            found[major] = Layout(Operand(self.element, major, alignment), self.shape[along])
        return found

    def layout(self, *, of_rows: bool = False) -> Layout:
        """Return the better aligned layout; the row-major one if both are equal, or if `of_rows`."""
        if not self.layouts:
            raise ValueError(
                f"{self.name} has shape {tuple(self.tensor.shape)} and strides {self.tensor.stride()}: one dimension "
                f"must have stride 1, and the other a stride of at least its extent: {how_to_copy(self.name)}"
            )
        if of_rows and "row" in self.layouts:
            return self.layouts["row"]
        return max(self.layouts.values(), key=lambda found: found.operand.alignment)

    def misaligned(self, major: Major, pad: str, instead: str = "") -> ValueError:
        """Return the error for lines that do not begin at multiples of 16 bytes.

        `pad` says what may be padded, and `instead` what else helps.

        Padding helps if the length of lines is no multiple of 16 bytes. Otherwise a copy does: the lines lie too far
        apart, or the first one has another address.
        """
        x, step = self.tensor, arch.TMA_ALIGNMENT_BYTES // self.tensor.element_size()
        is_short = x.shape[-1 if major == "row" else -2] % step
        helps = f"{pad} with zeros to a multiple of {step}" if is_short else f"call {self.name}.clone(), whose lines do"
        return ValueError(
            f"{self.name} is {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()} and storage offset "
            f"{x.storage_offset()}, and its lines do not begin at multiples of {arch.TMA_ALIGNMENT_BYTES} bytes: "
            f"{helps}{instead}"
        )


class BlockScaled(Matrix):
    """An operand whose blocks have scales: of 1x128 for A, of 128x128 or of 128 of a column for B."""

    takes: ClassVar[Mapping[str, Kind]] = {"a": Kind.BLOCKS_A, "b": Kind.BLOCKS_B}

    @classmethod
    def shapes(cls, kind: Kind, frame: Frame) -> list[tuple[int, ...]]:  # noqa: D102
        steps, rows = mma.blocks(frame.k), math.prod(frame.leading)
        if kind is Kind.BLOCKS_A:
            return [(*frame.leading, steps), *([] if frame.each else [(rows, steps)])]
        return [(*frame.each, mma.blocks(frame.n), steps), (*frame.each, frame.n, steps)]

    @classmethod
    def check_further(cls, name: str, kind: Kind, value: Any, frame: Frame) -> Tensor:  # noqa: D102
        if value.dtype != torch.float32:
            raise TypeError(f"{name} is {value.dtype}: scales of blocks are torch.float32, so pass {name}.float()")
        shapes, block = cls.shapes(kind, frame), mma.BLOCK_K
        if tuple(value.shape) not in shapes:
            what = f"{shapes[0]}, a scale for each 1x{block} of a"
            if kind is Kind.BLOCKS_B:
                what = f"{shapes[0]}, a scale for each {block}x{block} of b, "
                what += f"or {shapes[1]}, one for each {block} of a column"
            transposed = value.ndim > 1 and tuple(value.mT.shape) in shapes
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: with M={math.prod(frame.leading)}, N={frame.n} and "
                f"K={frame.k} it must have shape {what}"
                + (f". It looks transposed: pass {name}.{'mT' if frame.each else 't()'}" if transposed else "")
            )
        return value if frame.each or kind is Kind.BLOCKS_B else fold(name, value, shapes[1])

    def require_multiplied(self, found: mma.MmaSpec, math: mma.Math | None) -> None:  # noqa: D102
        name = next(iter(self.further), "the epilogue")
        if math == "fast":
            raise TypeError(f"math is 'fast', and {name} has scales of blocks, which need promoted sums: omit math")
        if not found.promotes:
            raise TypeError(
                f"{self.name} is {self.tensor.dtype}, and {name} has scales of blocks, which only FP8 operands can "
                "have: use a scale for each row and each column, or one number"
            )

    @property
    def block(self) -> mma.Block:  # noqa: D102
        if self.name == "a":
            return 1, mma.BLOCK_K
        # For one column, both kinds are the same.
        return mma.BLOCK_K, mma.BLOCK_K if self._scale.shape[-2] == mma.blocks(self.shape[-1]) else 1

    @property
    def _scale(self) -> Tensor:
        (scale,) = self.further.values()
        return scale

    def factors(self, dtype: torch.dtype) -> Tensor:  # noqa: D102
        lines = self.shape[-2 if self.name == "a" else -1]
        scale = self._scale.to(dtype)
        return scale if scale.shape[0] == lines else scale.repeat_interleave(mma.BLOCK_K, 0)[:lines]

    def sums(self, dtype: torch.dtype) -> Tensor:  # noqa: D102
        return super().values(dtype)

    def values(self, dtype: torch.dtype | None = None) -> Tensor:  # noqa: D102
        dtype = self._scale.dtype if dtype is None else dtype
        k = self.shape[-1 if self.name == "a" else -2]
        spread = self.factors(dtype).repeat_interleave(mma.BLOCK_K, 1)[:, :k]
        return super().values(dtype) * (spread if self.name == "a" else spread.t())


class Packed(Matrix):
    """A weight with 4 bits for a number, and a scale for each group along K of a column: see :mod:`..packing`.

    There is a subclass for each type of numbers. The tensor is (K / 2, N), contiguous along K.
    """

    held = Held(2, torch.uint8)
    packed: ClassVar[DType]
    parts: ClassVar[int] = 1  # values for each group: a scale, and perhaps a zero point

    @classmethod
    def of_further(cls, of_a: torch.dtype) -> torch.dtype:  # noqa: D102
        return of_a

    @classmethod
    def element_of(cls, name: str, tensor: Tensor, allowed: Sequence[DType] = HELD) -> DType:  # noqa: D102
        if tensor.dtype != torch.uint8:
            raise TypeError(f"{name} is {tensor.dtype}: packed numbers are torch.uint8, two in a byte")
        return cls.packed

    @classmethod
    def shapes(cls, kind: Kind, frame: Frame) -> list[tuple[int, ...]]:  # noqa: D102
        groups = [frame.k // group for group in packing.GROUPS[::-1] if frame.k % group == 0]
        return [(frame.n, cls.parts * count) for count in dict.fromkeys((*groups, 1))]

    @classmethod
    def check_further(cls, name: str, kind: Kind, value: Any, frame: Frame) -> Tensor:  # noqa: D102
        if frame.form != DENSE:
            raise TypeError(f"b is packed, and {frame.form} calls take no packed weights: call gemm for each of them")
        scale: Tensor = value
        packing.require_extents(frame.n, frame.k)
        element_type(name, scale, tuple(named(each) for each in PARTS[kind].dtypes))
        shapes = cls.shapes(kind, frame)
        if tuple(scale.shape) not in shapes:
            raise ValueError(
                f"{name} has shape {tuple(scale.shape)}: with N={frame.n} and K={frame.k} it must have shape "
                f"{' or '.join(map(str, shapes))}, {cls.parts} for each group along K of a column"
            )
        return scale if scale.is_contiguous() else scale.contiguous()

    def require_multiplied(self, found: mma.MmaSpec, math: mma.Math | None) -> None:  # noqa: D102
        if math is not None:
            raise TypeError(f"math is {math!r}, and b is packed, of which there is one product: omit math")
        if self.further and self.scale.dtype is not getattr(torch, found.a.torch_name):
            raise TypeError(
                f"a is {found.a.torch_name}, and b is packed for {self.scale.dtype}: convert a, or pack b with dtype="
            )

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102
        half, n = self.tensor.shape
        return 2 * half, n

    @property
    def scale(self) -> Tensor:
        """The scales, and perhaps zero points, in the packed order."""
        (scale,) = self.further.values()
        return scale

    @property
    def block(self) -> mma.Block:  # noqa: D102
        groups = self.scale.shape[-1] // self.parts
        return (mma.WHOLE_K if groups == 1 else self.shape[0] // groups), 1

    def values(self, dtype: torch.dtype | None = None) -> Tensor:  # noqa: D102
        return packing.dequantized(self.tensor.t(), self.scale, self.packed, dtype).t()


class PackedI4(Packed):
    """Numbers from -8 to 7."""

    takes: ClassVar[Mapping[str, Kind]] = {"b": Kind.GROUPS_I4}
    packed = i4


class PackedU4(Packed):
    """Numbers from 0 to 15, less the zero point of their group."""

    takes: ClassVar[Mapping[str, Kind]] = {"b": Kind.GROUPS_U4}
    packed, parts = u4, 2


class PackedE2M1(Packed):
    """FP4."""

    takes: ClassVar[Mapping[str, Kind]] = {"b": Kind.GROUPS_E2M1}
    packed = e2m1


class Sparse(Matrix):
    """A weight with two of each four elements along K, and their places: see :mod:`..sparsity`.

    The tensor is (K / 2, N), contiguous along K.
    """

    takes: ClassVar[Mapping[str, Kind]] = {"b": Kind.META_B}
    held, trains = Held(2, None), True

    @classmethod
    def of_further(cls, of_a: torch.dtype) -> torch.dtype:  # noqa: D102
        return torch.uint8

    @classmethod
    def element_of(cls, name: str, tensor: Tensor, allowed: Sequence[DType] = HELD) -> DType:  # noqa: D102
        found = next((each for each in SPARSE if tensor.dtype is getattr(torch, each.torch_name)), None)
        if found is None:
            known = ", ".join(f"torch.{each.torch_name}" for each in SPARSE)
            raise TypeError(f"{name} is {tensor.dtype}: a sparse weight is in one of {known}")
        return found

    @classmethod
    def multiplied(cls, name: str, tensor: Tensor, math: mma.Math | None, allowed: Sequence[DType]) -> DType:  # noqa: D102
        return cls.element_of(name, tensor)

    @classmethod
    def shapes(cls, kind: Kind, frame: Frame) -> list[tuple[int, ...]]:  # noqa: D102
        return [sparsity.meta_shape(frame.n, frame.k)]

    @classmethod
    def check_further(cls, name: str, kind: Kind, value: Any, frame: Frame) -> Tensor:  # noqa: D102
        if frame.form != DENSE:
            raise TypeError(f"b is sparse, and {frame.form} calls take no sparse weights: call gemm for each of them")
        meta: Tensor = value
        sparsity.require_extents(frame.n, frame.k)
        if meta.dtype != torch.uint8:
            raise TypeError(f"{name} is {meta.dtype}: metadata of a sparse weight are torch.uint8")
        (shape,) = cls.shapes(kind, frame)
        if tuple(meta.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(meta.shape)}: with N={frame.n} and K={frame.k} it must have shape {shape}"
            )
        return meta if meta.is_contiguous() else meta.contiguous()

    def require_multiplied(self, found: mma.MmaSpec, math: mma.Math | None) -> None:  # noqa: D102
        if math is not None:
            raise TypeError(f"math is {math!r}, and b is sparse, of which there is one product: omit math")

    @property
    def shape(self) -> tuple[int, ...]:  # noqa: D102
        half, n = self.tensor.shape
        return 2 * half, n

    @property
    def block(self) -> mma.Block:  # noqa: D102
        return mma.META_BLOCK, mma.META_BLOCK

    def values(self, dtype: torch.dtype | None = None) -> Tensor:  # noqa: D102
        (meta,) = self.further.values()
        found = sparsity.dense(self.tensor.t(), meta).t()
        return found if dtype is None else found.to(dtype)

    def held_of(self, gradient: Tensor) -> Tensor:  # noqa: D102
        # An optimiser that changes stored elements keeps their places: it trains with a fixed mask.
        (meta,) = self.further.values()
        return sparsity.stored(gradient.t(), meta, self.tensor.itemsize).t()


_WITH_PARTS: tuple[type[Matrix], ...] = (BlockScaled, PackedI4, PackedU4, PackedE2M1, Sparse)
# Kinds of operands with further tensors, by the kinds of the inputs that hold these. Others are dense.
OPERANDS: dict[Kind, type[Matrix]] = {kind: cls for cls in _WITH_PARTS for kind in cls.takes.values()}


def operand(name: Literal["a", "b"], tensor: Tensor, graph: Expression, inputs: Mapping[str, Any], *of: Any) -> Matrix:
    """Return A or B of a call with its further tensors, which are inputs of the epilogue.

    `of` is how products are computed, and the types that are allowed: see :meth:`Matrix.multiplied`. Without it,
    nothing is checked, and FP32 values are not rounded.
    """
    cls, mine = Matrix, []
    for i in graph.inputs:
        for kind, known in OPERANDS.items():  # by identity: enumerations have slow hashes
            if i.kind is kind and known.takes.get(name) is kind:
                cls = known
                mine.append(i)
    element = cls.multiplied(name, tensor, *of) if of else cls.element_of(name, tensor)
    # Those that are missing are named when inputs are checked.
    return cls(name, tensor, element, {i.name: inputs[i.name] for i in mine if i.name in inputs})


def alike(matrices: Sequence[Matrix], majors: Sequence[Major] = MAJORS) -> Layout:
    """Return the layout of B and of each product's matrix: one major of those given, and the lowest alignment."""
    for matrix in matrices:
        matrix.layout()
    common = [[m.layouts[major] for m in matrices] for major in majors if all(major in m.layouts for m in matrices)]
    if not common:
        found = ", ".join(f"{m.name} is {'- or '.join(m.layouts)}-major" for m in matrices)
        raise ValueError(
            f"{found}: both weights need the same major. If one is weight.t(), pass the other as a transpose as well"
        )
    lowest = [min(layouts, key=lambda layout: layout.operand.alignment) for layouts in common]
    best = max(range(len(common)), key=lambda at: lowest[at].operand.alignment)
    return replace(common[best][0], operand=lowest[best].operand)


def has_lines_along(tensor: Tensor, inner: int) -> bool:
    """Whether a matrix, the last two dimensions of a tensor, is contiguous along one of them: 0 or 1.

    An extent of 1 can make both true.
    """
    along, across = inner - 2, -1 - inner
    length, runs = tensor.shape[along], tensor.shape[across]
    lines = surely(tensor.stride(along) == 1) or surely(length <= 1)
    return lines and (surely(tensor.stride(across) >= length) or surely(runs <= 1))


def as_multiplied(x: Tensor, element: DType) -> Tensor:
    """Return a tensor as the Tensor Cores read it: FP32 rounded to TF32, ties away from zero; other types unchanged.

    A kernel rounds in the same way. Infinities and NaN stay. Values nearer to 2**128 than to TF32's largest number
    become infinite.
    """
    if element is not tf32:
        return x
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + _HALF_OF_TF32) & ~(2 * _HALF_OF_TF32 - 1)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


_HALF_OF_TF32 = 1 << 12  # half of TF32's last bit, in FP32's bits
