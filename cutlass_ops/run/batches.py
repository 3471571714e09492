"""Dimensions of batches: how they broadcast, how they fold to those that kernels know, and what memory they share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from torch import Tensor

from cutlass_ops.declare.form import why_one_gemm
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.operations import UNIFORM
from cutlass_ops.run.sizes import copied, surely

# Leading dimensions that kernels know, each with a stride of its own (batched.h).
MOST = 2


def require(graph: Graph) -> None:
    """Refuse an epilogue that means nothing for each batch by itself.

    Raises
    ------
    ValueError
        If it is one. The message says what to do.
    """
    if graph.block_scales:
        raise ValueError(
            f"b has batches, and {' and '.join(graph.block_scales)} are scales of blocks of one A and one B: call "
            "the op for each batch"
        )
    if any(node.op == UNIFORM for node in graph.nodes):
        raise ValueError(
            "b has batches, and the epilogue draws random numbers by row and column, the same for every batch: call "
            "the op for each batch with a seed of its own"
        )


def why_apart(graph: Graph) -> str | None:
    """Say why batches take a launch each, in words; None if one kernel computes them all."""
    why = why_one_gemm(graph)
    return why and f"{why}: each batch is a call of its own"


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape to which shapes broadcast as PyTorch has it, or None."""
    rank = max(map(len, shapes))
    found = []
    for extents in zip(*((1,) * (rank - len(shape)) + shape for shape in shapes), strict=True):
        # By comparisons alone: an extent that torch.compile does not know has no hash.
        extent = next((each for each in extents if not surely(each == 1)), 1)
        if any(not surely(each == extent) and not surely(each == 1) for each in extents):
            return None
        found.append(extent)
    return tuple(found)


def spread(kind: Kind, value: Tensor, shape: tuple[int, ...], own: tuple[int, ...]) -> Tensor | None:
    """Return an epilogue's input as it is shared, or with all batches; None if its shape does not fit.

    Parameters
    ----------
    kind : Kind
        A row, a column or a tile.
    value : Tensor
        Of the shape `own`, perhaps with leading dimensions that broadcast to those of the batches. A row with 1 before
        N, or a column with 1 after M, is what PyTorch would broadcast. A tile may have 1 for M or N; it is copied then.
    shape : tuple of int
        The dimensions of batches.
    own : tuple of int
        The shape for one batch.
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
    if surely(value.numel() == _size(own)):
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
    """Whether a column of one row could be of one dimension of batches or of another, which are as large."""
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


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size


def folded(tensors: Mapping[str, Tensor], own: Mapping[str, int], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return tensors with all batches, in as many dimensions as kernels know, without copies.

    Tensors without dimensions of batches that are not operands stay as they are.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        A, B, and inputs.
    own : mapping of str to int
        How many last dimensions of each are no batches.
    shape : tuple of int
        The dimensions of batches.

    Raises
    ------
    ValueError
        If strides do not allow that. The message names a tensor and says what to do.
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
    extents = [_size(tuple(shape[at] for at in group)) for group in groups] or [1]
    found = {}
    for name, x in every.items():
        last = x.ndim - own[name]
        strides = [x.stride(group[-1]) for group in groups] or [0]
        found[name] = x.as_strided((*extents, *x.shape[last:]), (*strides, *x.stride()[last:]))
    return {**tensors, **found}


def _groups(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """Return how many strides a tensor by itself needs for its batches."""
    several = [at for at, extent in enumerate(shape) if extent > 1]
    pairs = itertools.pairwise(several)
    return 1 + sum(tensor.stride(x) != tensor.stride(y) * shape[y] for x, y in pairs)


# ---- Memory ----------------------------------------------------------------------------------------------------------


def is_nested(tensor: Tensor) -> bool:
    """Whether what a dimension repeats ends before it begins again: then no two elements share memory."""
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
