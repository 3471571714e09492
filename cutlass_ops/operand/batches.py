"""Dimensions of batches: how they broadcast, how they are folded for kernels, and what memory they share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor

from cutlass_ops.declare.form import Form, why_one_gemm
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.operations import UNIFORM
from cutlass_ops.operand.sizes import copied, surely

# Leading dimensions that kernels know, each with a stride of its own (batched.h).
MOST = 2


# Inputs that may have dimensions of batches.
WITH_BATCHES = (Kind.ROW, Kind.COL, Kind.TILE, Kind.PRODUCT)


class Frame(NamedTuple):
    """The extents of a call's operands, against which its inputs are checked."""

    form: Form
    leading: tuple[int, ...]  # the dimensions of D before N, as the caller sees them
    each: tuple[int, ...]  # the dimensions of batches, or the number of groups
    m: int  # rows of each GEMM, or of all groups
    n: int
    k: int

    def own(self, kind: Kind) -> tuple[int, ...]:
        """Return the shape of a row, a column, a tile or a product's matrix for one GEMM."""
        if kind in (Kind.ROW, Kind.COL):
            return (self.n,) if kind is Kind.ROW else (self.m,)
        return (self.m if kind is Kind.TILE else self.k, self.n)


def require(graph: Graph) -> None:
    """Raise ValueError for an epilogue that has no meaning for each batch by itself. The message says what to do."""
    if graph.parts:
        raise ValueError(f"b has batches, and {graph.parts_are} of one A and one B: call the op for each batch")
    if any(node.op == UNIFORM for node in graph.nodes):
        raise ValueError(
            "b has batches, and the epilogue draws random numbers by row and column, the same for every batch: call "
            "the op for each batch with a seed of its own"
        )


def why_apart(graph: Graph) -> str | None:
    """Return why each batch takes its own launch, in words; None if one kernel computes them all."""
    why = why_one_gemm(graph)
    return why and f"{why}: each batch is a call of its own"


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape to which PyTorch broadcasts shapes, or None."""
    rank = max(map(len, shapes))
    found = []
    for extents in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        # Only by comparisons: an extent that torch.compile does not know has no hash.
        extent = next((each for each in extents if not surely(each == 1)), 1)
        if any(not surely(each == extent) and not surely(each == 1) for each in extents):
            return None
        found.append(extent)
    return tuple(found)


def spread(kind: Kind, value: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> Tensor | None:
    """Return an epilogue's input as it is shared, or with all batches; None if its shape does not fit.

    `own` is the shape for one batch, and `shape` the dimensions of batches. The input's leading dimensions may
    broadcast to those. As in PyTorch, a row may have 1 before N, and a column 1 after M. A tile may have 1 for M or N;
    it is then copied.
    """
    value = without_ones(kind, value, shape, own)
    if kind is Kind.TILE and value.ndim < 2:
        return None
    lead, last = tuple(value.shape[: -len(own)]), tuple(value.shape[-len(own) :])
    repeats = kind is Kind.TILE and _fits(last, own)
    if not _fits(lead, shape) or (last != own and not repeats):
        return None
    if _repeats(value, own):
        value = copied(value.expand(*lead, *own))
    if surely(value.numel() == prod(own)):
        return value.reshape(own)
    return value.expand(*shape, *own)


def is_copied(kind: Kind, value: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether :func:`spread` copies an input that fits."""
    return _repeats(without_ones(kind, value, shape, own), own)


def without_ones(kind: Kind, value: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> Tensor:
    """Return an input without the extent of 1 by which PyTorch would broadcast it: see :func:`spread`."""
    if value.ndim > 1 and kind is Kind.ROW and surely(value.shape[-2] == 1):
        return value.squeeze(-2)
    if value.ndim < 2 or kind is not Kind.COL or tuple(value.shape[-2:]) != (*own, 1):
        return value
    # With M = 1, either of the two last extents may be M: with all dimensions, it is the one before.
    is_last = own == (1,) and value.ndim < len(shape) + 2 and _fits(tuple(value.shape[:-1]), shape)
    return value if is_last else value.squeeze(-1)


def is_ambiguous(kind: Kind, value: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
    """Whether a column of one row may belong to either of two dimensions of batches of the same size."""
    if kind is not Kind.COL or own != (1,) or not 2 < value.ndim < len(shape) + 2 or value.shape[-1] != 1:
        return False
    readings = [tuple(value.shape[:-1]), tuple(value.shape[:-2])]
    return value.shape[-2] == 1 and value.numel() > 1 and all(_fits(lead, shape) for lead in readings)


def _repeats(value: Tensor, own: tuple[int, ...]) -> bool:
    """Whether one batch's input repeats values, or has fewer of them."""
    ends = range(-len(own), 0)
    if tuple(value.shape[-len(own) :]) != own:
        return True
    return any(surely(value.stride(i) == 0) and not surely(value.shape[i] <= 1) for i in ends)


def _fits(lead: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return broadcast(lead, shape) == shape


def folded(tensors: Mapping[str, Tensor], own: Mapping[str, int], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return tensors with all batches, in as many dimensions as kernels know, without copies.

    Inputs without dimensions of batches stay unchanged. `own` says how many last dimensions of each tensor are no
    batches, and `shape` has the dimensions of batches.
    """
    every = {
        name: x.expand(*shape, *x.shape[x.ndim - own[name] :])
        for name, x in tensors.items()
        if x.ndim > own[name] or name in ("a", "b")
    }
    if len(shape) <= MOST:
        return {**tensors, **every}
    # Each group is a run of dimensions through which one stride leads, in every tensor.
    groups: list[list[int]] = []
    for at, extent in enumerate(shape):
        if extent == 1:
            continue
        if groups and all(x.stride(groups[-1][-1]) == x.stride(at) * extent for x in every.values()):
            groups[-1].append(at)
        else:
            groups.append([at])
    if len(groups) > MOST:
        name = max(every, key=lambda name: _groups(every[name], shape))
        raise ValueError(
            f"the batches {shape} need {len(groups)} strides, and kernels know {MOST}: pass "
            f"{name}.expand({tuple(every[name].shape)}).contiguous()"
        )
    extents = [prod(shape[at] for at in group) for group in groups] or [1]
    found = {}
    for name, x in every.items():
        last = x.ndim - own[name]
        strides = [x.stride(group[-1]) for group in groups] or [0]
        found[name] = x.as_strided((*extents, *x.shape[last:]), (*strides, *x.stride()[last:]))
    return {**tensors, **found}


def _groups(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Return how many strides a tensor alone needs for its batches."""
    several = [at for at, extent in enumerate(shape) if extent > 1]
    pairs = itertools.pairwise(several)
    return 1 + sum(tensor.stride(x) != tensor.stride(y) * shape[y] for x, y in pairs)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def is_nested(tensor: Tensor) -> bool:
    """Whether each repetition along a dimension ends before the next begins: then no two elements share memory."""
    return _is_nested(tensor.stride(), tensor.shape)


def _is_nested(strides: Sequence[int], extents: Sequence[int]) -> bool:
    below = 1
    for stride, extent in sorted(zip(strides, extents, strict=True)):
        if extent > 1 and stride < below:
            return False
        below += stride * (extent - 1)
    return True


def meet(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors that lie in the same range of memory may share any of it.

    Slices of one buffer, such as its columns or heads, interleave without sharing an element.
    """
    if x.stride() != y.stride() or x.dtype != y.dtype or not _is_nested(x.stride(), list(map(max, x.shape, y.shape))):
        return True
    every = zip(x.stride(), x.shape, y.shape, strict=True)
    levels = sorted((level for level in every if max(level[1:]) > 1), reverse=True)
    size = x.element_size()

    def within(offset: int, at: int) -> bool:
        # Whether an element of y, `offset` bytes behind one of x, or one that the levels from `at` on repeat, meets it.
        if at == len(levels):
            return -size < offset < size
        pitch, of_x, of_y = levels[at][0] * size, *levels[at][1:]
        if pitch == 0:
            return within(offset, at + 1)
        below = offset // pitch
        return any(within(offset - steps * pitch, at + 1) for steps in (below, below + 1) if -of_y < steps < of_x)

    return within(y.data_ptr() - x.data_ptr(), 0)
