"""Groups of rows: the checks of a call's tensors, where groups end, and what a kernel is chosen for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutlass_ops.base.frozen import plain
from cutlass_ops.declare.form import GROUPED, MASKED, RAGGED_K, Form, why_one_gemm
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import FEW, ROWS, nearest
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand.sizes import agree, surely

# Where a group's rows are: in a tensor with all rows, or in one with a dimension of groups before that of rows.
Place: TypeAlias = slice | tuple[int, slice]


def require(graph: Graph, form: Form = GROUPED) -> None:
    """Raise ValueError for an epilogue that no kernel computes for groups. The message says what to do."""
    why = why_one_gemm(graph, form)
    if why:
        raise ValueError(f"{why}: call gemm for each expert, or leave that out of the epilogue")
    taken = sorted(set(form.operands) & {i.name for i in graph.inputs})
    if taken:
        raise ValueError(f"the epilogue has an input {taken[0]}, as groups have: rename the input")


def form_of_call(form: Form, a: Any) -> Form:
    """Return the form of an exact kernel's call, given the kernel's form: A's dimensions say if groups have room."""
    return MASKED if form == GROUPED and isinstance(a, Tensor) and a.ndim == 3 else form


def check_ends(form: Form, name: str, ends: Tensor, b: Sequence[int]) -> None:
    """Check where groups end, or how many rows each has, against B's shape. Raises TypeError or ValueError."""
    if ends.ndim != 1 or not ends.shape[0]:
        raise ValueError(f"{name} has shape {tuple(ends.shape)}: it must be (E,), with at least one expert")
    if ends.dtype == torch.bool:
        raise TypeError(f"{name} is {ends.dtype}: pass numbers of rows, as torch.int32")
    if ends.dtype != torch.int32:
        raise TypeError(f"{name} is {ends.dtype}: pass {name}.int()")
    if ends.stride(0) != 1 and not surely(ends.shape[0] <= 1):
        raise ValueError(f"{name} has stride {ends.stride(0)}: call {name}.contiguous() first")
    if form == RAGGED_K:
        return
    experts, k, _ = b
    if surely(experts == 0) or surely(k == 0):
        raise ValueError(f"b has shape {tuple(b)}: it must have at least one expert, and K above 0")
    if not agree(ends.shape, (experts,)):  # torch.bincount does not fix how many there are
        says = "where the rows of each end, as torch.cumsum(rows_of_each, 0) does"
        first = f". A first 0 is left out: pass {name}[1:]" if ends.shape[0] == experts + 1 else ""
        raise ValueError(
            f"{name} has {ends.shape[0]} elements and b has {experts} experts: it must say "
            + (says + first if form == GROUPED else "how many rows each has")
        )


def ends(offsets: Tensor, rows: int) -> Iterator[slice]:
    """Yield the rows of each group, from offsets on the host. Raises ValueError if they fall or are too large."""
    first = 0
    for at, end in enumerate(offsets.tolist()):
        if not first <= end <= rows:
            raise ValueError(
                f"offsets[{at}] is {end}, after {first}, and there are {rows} rows: offsets are where groups end, so "
                "they must not fall, nor be above the number of rows"
            )
        yield slice(first, end)
        first = end


def rows_of_each(form: Form, given: Tensor, m: int) -> Iterator[tuple[Place, int]]:
    """Yield the place of each group's rows, and their number, from offsets or counts on the host."""
    if form == GROUPED:
        yield from ((rows, rows.stop - rows.start) for rows in ends(given, m))
        return
    for group, count in enumerate(given.tolist()):
        if not 0 <= count <= m:
            raise ValueError(
                f"counts[{group}] is {count}, and a has room for {m} rows of each group: pass numbers from 0 to {m}"
            )
        yield (group, slice(0, count)), count


def typical(rows: int, n: int, k: int, groups: int) -> Problem:
    """Return the problem for which a kernel is chosen: M is the mean of the groups' rows.

    The host does not know how rows are spread over the groups: the time models assume several ways
    (``kinds/spreads.py``). The mean is rounded to a number of rows for which kernels are chosen in advance.
    """
    return Problem(nearest(rows / groups), n, k, groups)


def typical_of_k(m: int, n: int, rows: int, groups: int) -> Problem:
    """Return the problem for which a kernel with groups of K is chosen: K is the groups' mean."""
    return Problem(m, n, nearest(rows / groups), groups)


def expected(rows: int | None) -> int:
    """Return the rows that a masked group is expected to have, rounded so that near numbers share it; 0 if unknown."""
    if rows is None:
        return 0
    rows = plain(rows)
    if type(rows) is not int:
        raise TypeError(f"expected is {rows!r}: pass an int, or omit it")
    if rows < 0:
        raise ValueError(f"expected is {rows}: pass the rows that a group has on average, or omit it")
    return nearest(rows)  # for 0, such as a mean of few rows that is rounded down, this is 1


def settled(rows: int | None) -> int | None:
    """Return expected rows as a known number.

    While PyTorch traces, it may be a symbol, but an op is made for one number. Comparisons settle which number is
    nearest, so the program serves all numbers that round to it.
    """
    if rows is None or not torch.compiler.is_dynamo_compiling():
        return rows
    if rows > _NUMBERS_OF_ROWS[-1]:
        return int(rows)  # beyond the table, an eager call keeps the number, too
    low, high = 0, len(_NUMBERS_OF_ROWS) - 1
    while low < high:
        middle = (low + high) // 2
        if rows <= _NUMBERS_OF_ROWS[middle]:
            high = middle
        else:
            low = middle + 1
    above: int = _NUMBERS_OF_ROWS[low]
    below: int = _NUMBERS_OF_ROWS[low - 1] if low else above
    return below if rows - below < above - rows else above


# Below 0 is an error, which a trace raises as well.
_NUMBERS_OF_ROWS = (-1, *range(FEW + 1), *(rows for rows in ROWS[:-1] if rows > FEW))


def read_by_registers(signature: OpSignature) -> OpSignature:
    """Return the types of kernels that serve a call of groups.

    TMA stops at the end of a group for D and one input (M, N). If there are more such tensors, or one is not aligned,
    all of them go through registers. A lower alignment in the types says so.
    """
    graph = signature.epilogue
    read = [i.kind is Kind.TILE for i in graph.inputs]
    written = [o.kind is Kind.TILE for o in graph.outputs[1:]]
    tiles = [signature.d]
    tiles += [t for t, is_tile in zip(signature.inputs, read, strict=True) if is_tile]
    tiles += [t for t, is_tile in zip(signature.outputs, written, strict=True) if is_tile]
    if all(t.aligned for t in tiles) and sum(read) <= 1 and not any(written):
        return signature
    lowest = min(min(t.alignment, t.dtype.tma_alignment // 2) for t in tiles)

    def lower(operand: Operand, is_tile: bool) -> Operand:
        return replace(operand, alignment=lowest) if is_tile else operand

    return replace(
        signature,
        d=lower(signature.d, True),
        inputs=tuple(map(lower, signature.inputs, read)),
        outputs=tuple(map(lower, signature.outputs, written)),
    )
