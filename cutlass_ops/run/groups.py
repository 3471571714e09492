"""Groups of rows: the checks of a call's tensors, where groups end, and what a kernel is chosen for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutlass_ops.base import arch, dtypes, mma
from cutlass_ops.base.dtypes import FP8, bf16, f16
from cutlass_ops.base.whole import plain
from cutlass_ops.declare.form import GROUPED, MASKED, RAGGED_K, Form, why_one_gemm
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import FEW, ROWS, nearest
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import BLOCKS, Input, Kind
from cutlass_ops.run import batches
from cutlass_ops.run.inputs import VECTORS, check_blocks, check_inputs, own_shapes
from cutlass_ops.run.matrices import aligning, as_major, has_lines_along, matrix
from cutlass_ops.run.operands import Arguments, multiplied, require_scalings, require_sums
from cutlass_ops.run.sizes import agree, repeats, surely
from cutlass_ops.run.tensors import as_stored, element_type, fold, require_same_device, require_tensor

_DTYPES = (f16, bf16)
# What users call for each form.
FUNCTIONS = {
    GROUPED.name: "grouped_gemm",
    MASKED.name: "grouped_gemm_masked",
    RAGGED_K.name: "grouped_gemm_wgrad",
}
# What these take by names that an epilogue's inputs may have elsewhere.
_OWN = {GROUPED.name: ("x", "w"), MASKED.name: ("x", "w", "expected_rows"), RAGGED_K.name: ("x", "gradient")}

# Where a group's rows are: in a tensor with all rows, or in one with a dimension of groups before that of rows.
Place: TypeAlias = slice | tuple[int, slice]


def matrix_names(form: Form) -> tuple[str, str]:
    """Return what users call A and B."""
    of_a, of_b, *_ = _OWN.get(form.name, ("a", "b"))
    return of_a, of_b


def require(graph: Graph, form: Form = GROUPED) -> None:
    """Refuse an epilogue that no kernel computes for groups.

    Raises
    ------
    ValueError
        If it is one. The message says what to do.
    """
    why = why_one_gemm(graph, form)
    if why:
        raise ValueError(f"{why}: call gemm for each expert, or leave that out of the epilogue")
    name = FUNCTIONS[form.name]
    taken = sorted({*form.operands, *_OWN[form.name]} & {i.name for i in graph.inputs})
    if taken:
        raise ValueError(f"the epilogue has an input {taken[0]}, and so has {name}: rename the input")


def form_of_call(form: Form, a: Any) -> Form:
    """Return the form of a call of one exact kernel, given the kernel's: by A's dimensions, groups may have room."""
    return MASKED if form == GROUPED and isinstance(a, Tensor) and a.ndim == 3 else form


def check_arguments(
    graph: Graph,
    x: Any,
    w: Any,
    ends: Any,
    inputs: Mapping[str, Any],
    form: Form = GROUPED,
    math: mma.Math | None = None,
) -> Arguments:
    """Check the operands and inputs of a call against each other.

    Parameters
    ----------
    graph : Graph
        The epilogue.
    x, w : Tensor
        The operands.
    ends : Tensor
        Where groups end; masked, how many rows each has.
    inputs : mapping of str to Tensor or float
        The epilogue's inputs by name.
    form : Form
        Whether groups follow each other, or each has room for as many rows.
    math : str, optional
        How sums of FP8 products are added up.

    Raises
    ------
    TypeError
        If an argument is not a tensor, has the wrong dtype, or is missing or unknown.
    ValueError
        If shapes or devices differ, or the epilogue has no meaning for groups.
    """
    found = _check_operands(x, w, ends, form, math)
    require(graph, form)
    require_sums(graph, math)
    require_scalings(graph, found, x, w, "xw")
    x, w = as_stored(x), as_stored(w)
    (*leading, k), (experts, _, n) = x.shape, w.shape
    fold("x", x, (prod(leading), k))  # one distance leads through the rows of all groups
    if graph.swaps_pairs and n % 2:
        raise ValueError(f"w has {n} columns, and the epilogue swaps pairs of them: N must be even, so pad w by one")
    # A row or a matrix for each expert is no input of one GEMM, and the first one is.
    each = {i.name: as_stored(inputs[i.name]) for i in graph.inputs if _is_of_experts(i, inputs, w)}
    shared = {**inputs, **{name: value[0] for name, value in each.items()}}
    blocks = {
        i.name: check_blocks(i, inputs[i.name], x, w) for i in graph.inputs if i.kind in BLOCKS and i.name in inputs
    }
    checked = check_inputs(graph, shared, x, w[0], tuple(leading), blocks)
    for declared in graph.inputs:
        value = checked[declared.name]
        if declared.kind not in (Kind.COL, Kind.TILE) or not isinstance(value, Tensor):
            continue
        if declared.kind is Kind.TILE and not has_lines_along(value, 1):
            raise ValueError(
                f"{declared.name} has strides {value.stride()}, and groups are rows in memory: pass "
                f"{declared.name}.contiguous()"
            )
        checked[declared.name] = value.view(*leading, *value.shape[1:])  # as x has its rows
    (of_form,) = form.operands
    values = {of_form: ends, **{i.name: each.get(i.name, checked[i.name]) for i in graph.inputs}}
    given = [(i.name, inputs[i.name]) for i in graph.inputs if i.kind in VECTORS]
    spread = tuple(name for name, value in given if values[name].shape != value.shape)
    copied = tuple(name for name, value in given if name not in each and repeats(value))
    problem = Problem(leading[-1], n, k, experts)
    return Arguments(problem, tuple(leading), x, w, values, spread, copied, form, math=math)


def _check_operands(x: Any, w: Any, ends: Any, form: Form, math: mma.Math | None) -> mma.MmaSpec:
    shape_of_x, (of_form,) = "(T, K)" if form == GROUPED else "(E, M, K)", form.operands
    for name, value, shape in (("x", x, shape_of_x), ("w", w, "(E, K, N)"), (of_form, ends, "(E,)")):
        require_tensor(name, value)
        if value.ndim != shape.count(",") + (name != of_form):
            raise ValueError(f"{name} has shape {tuple(value.shape)}: it must be {shape}")
    found = mma.mma_of(element_type("x", x, dtypes.GROUPED), element_type("w", w, dtypes.GROUPED))
    if found is None:
        raise TypeError(f"w is {w.dtype} and x is {x.dtype}: x and w must have the same dtype, or both FP8")
    multiplied("x", x, math)
    if not agree(x.shape[-1:], w.shape[1:2]) or (form == MASKED and not agree(x.shape[:1], w.shape[:1])):
        hint = ". w looks like weights of shape (E, N, K): pass w.mT" if x.shape[-1] == w.shape[2] else ""
        raise ValueError(f"x {tuple(x.shape)} and w {tuple(w.shape)}: they must be {shape_of_x} and (E, K, N){hint}")
    if surely(w.shape[0] == 0) or surely(w.shape[1] == 0):
        raise ValueError(f"w has shape {tuple(w.shape)}: it must have at least one expert, and K above 0")
    _check_ends(of_form, ends)
    if not agree(ends.shape, w.shape[:1]):  # torch.bincount leaves open how many there are
        says = "where the rows of each end, as torch.cumsum(rows_of_each, 0) does"
        name_of_first = f"{of_form}[1:]" if form == GROUPED and ends.shape[0] == w.shape[0] + 1 else ""
        raise ValueError(
            f"{of_form} has {ends.shape[0]} elements and w has {w.shape[0]} experts: it must say "
            + (says if form == GROUPED else "how many rows each has")
            + (f". A first 0 is left out: pass {name_of_first}" if name_of_first else "")
        )
    require_same_device("w", w, x, "x")
    require_same_device(of_form, ends, x, "x")
    return found


def _check_ends(name: str, ends: Tensor) -> None:
    if ends.dtype == torch.bool:
        raise TypeError(f"{name} is {ends.dtype}: pass numbers of rows, as torch.int32")
    if ends.dtype != torch.int32:
        raise TypeError(f"{name} is {ends.dtype}: pass {name}.int()")
    if ends.stride(0) != 1 and not surely(ends.shape[0] <= 1):
        raise ValueError(f"{name} has stride {ends.stride(0)}: call {name}.contiguous() first")


def check_arguments_of_k(graph: Graph, a: Any, b: Any, offsets: Any, inputs: Mapping[str, Any]) -> Arguments:
    """Check the operands and inputs of a call with groups of K against each other: see :func:`check_arguments`.

    Raises
    ------
    TypeError, ValueError
        As there.
    """
    for name, value in (("x", a), ("gradient", b), ("offsets", offsets)):
        require_tensor(name, value)
    if a.ndim != 2 or b.ndim != 2 or not agree(a.shape[1:], b.shape[:1]):
        raise ValueError(
            f"x {tuple(a.mT.shape if a.ndim == 2 else a.shape)} and gradient {tuple(b.shape)}: they must be (T, K) and "
            "(T, N)"
        )
    if element_type("x", a, _DTYPES) != element_type("gradient", b, _DTYPES):
        raise TypeError(f"gradient is {b.dtype} and x is {a.dtype}: x and gradient must have the same dtype")
    if offsets.ndim != 1 or not offsets.shape[0]:
        raise ValueError(f"offsets has shape {tuple(offsets.shape)}: it must be (E,), with at least one expert")
    _check_ends("offsets", offsets)
    require_same_device("gradient", b, a, "x")
    require_same_device("offsets", offsets, a, "x")
    require(graph, RAGGED_K)
    a, b, experts = as_stored(a), as_stored(b), offsets.shape[0]
    (m, rows), n = a.shape, b.shape[1]
    if graph.swaps_pairs and n % 2:
        raise ValueError(f"gradient has {n} columns, and the epilogue swaps pairs of them: N must be even")
    # What the epilogue reads and writes is as it would be for a batch of each expert.
    checked = check_inputs(graph, inputs, a, b.expand(experts, rows, n), (experts, m))
    own = own_shapes(m, n, rows)
    given = [(i, inputs[i.name]) for i in graph.inputs if i.kind in VECTORS]
    copied = tuple(i.name for i, x in given if batches.is_copied(i.kind, x, (experts,), own[i.kind]))
    spread = tuple(i.name for i, x in given if checked[i.name].shape != x.shape)  # type: ignore[union-attr]
    found = {"offsets": offsets, **checked}
    return Arguments(Problem(m, n, rows, experts), (experts, m), a, b, found, spread, copied, RAGGED_K)


def check_lines_of_k(arguments: Arguments) -> None:
    """Refuse operands of groups of K that TMA cannot read: there are no other kernels.

    Raises
    ------
    ValueError
        If a matrix is not aligned to 16 bytes, or its rows are not contiguous. The message says what to pass.
    """
    if 0 in arguments.problem:
        return
    for name, tensor in (("x", arguments.a.mT), ("gradient", arguments.b)):
        _check_rows(name, tensor, "pad them")


def _check_rows(name: str, tensor: Tensor, pad: str) -> None:
    """Refuse rows that TMA cannot read."""
    rows = as_major(tensor, 1, element_type(name, tensor))
    if rows is None:
        raise ValueError(
            f"{name} has strides {tensor.stride()}, and groups are rows in memory: pass {name}.contiguous()"
        )
    if not rows.operand.aligned:
        raise _misaligned(name, tensor, 1, pad)


def _misaligned(name: str, tensor: Tensor, inner: int, pad: str) -> ValueError:
    return ValueError(
        f"{name} has shape {tuple(tensor.shape)}, strides {tensor.stride()} and storage offset "
        f"{tensor.storage_offset()}, and its lines do not begin at multiples of {arch.TMA_ALIGNMENT_BYTES} bytes: "
        + aligning(name, tensor, inner, pad)
    )


def _is_of_experts(declared: Input, inputs: Mapping[str, Any], w: Tensor) -> bool:
    """Whether an input has a row, or a further weight, for each expert.

    Raises
    ------
    ValueError
        If it has another shape, and is not one row for all.
    """
    value, (experts, k, n) = inputs.get(declared.name), w.shape
    if declared.kind is Kind.PRODUCT and isinstance(value, Tensor):
        if value.shape != w.shape:
            raise ValueError(
                f"{declared.name} has shape {tuple(value.shape)}: as a Product it must have w's shape (E, K, N), "
                f"{(experts, k, n)}"
            )
        return True
    if declared.kind is not Kind.ROW or not isinstance(value, Tensor) or value.ndim < 2:
        return False
    if tuple(value.shape) != (experts, n):
        if surely(value.shape[0] == 1):
            return False  # one row for all, as PyTorch would broadcast it
        raise ValueError(
            f"{declared.name} has shape {tuple(value.shape)}: as a Row it must have shape {(experts, n)}, a row for "
            f"each expert, or {(n,)} for all"
        )
    if n > 1 and value.stride(1) != 1:
        raise ValueError(f"{declared.name} has strides {value.stride()}: call {declared.name}.contiguous() first")
    return True


def check_lines(arguments: Arguments, products: Mapping[str, Tensor]) -> None:
    """Refuse operands that TMA cannot read: there are no other kernels.

    Raises
    ------
    ValueError
        If a matrix is not aligned to 16 bytes, or x is not row-major. The message says what to pass.
    """
    if 0 in arguments.problem:
        return
    _check_rows("x", arguments.a, "pad K of x and w")
    for name, w in {"w": arguments.b, **products}.items():
        if element_type(name, w) in FP8 and as_major(w, 0, element_type(name, w)) is None:
            raise ValueError(
                f"{name} is {w.dtype} and has strides {w.stride()}, and Tensor Cores read this type along K only: pass "
                f"weights (E, N, K) as {name}.mT"
            )
        lines = matrix(name, w, element_type(name, w)).operand
        if not lines.aligned:
            by_columns = lines.major == "col"
            pad = "pad K of x and w" if by_columns else f"pass weights (E, N, K) as {name}.mT, or pad N"
            raise _misaligned(name, w, 0 if by_columns else 1, pad)


def ends(offsets: Tensor, rows: int) -> Iterator[slice]:
    """Yield the rows of each group, from offsets that the host may read.

    Raises
    ------
    ValueError
        If they fall, or are beyond the last row.
    """
    first = 0
    for at, end in enumerate(offsets.tolist()):
        if not first <= end <= rows:
            raise ValueError(
                f"offsets[{at}] is {end}, after {first}, and x has {rows} rows: offsets are where groups end, so they "
                "must not fall, nor be above the number of rows"
            )
        yield slice(first, end)
        first = end


def rows_of_each(arguments: Arguments) -> Iterator[tuple[Place, int]]:
    """Yield where each group's rows are, and how many, from a call on the host.

    Raises
    ------
    ValueError
        If a group ends before it begins, or beyond the rows that there are.
    """
    (of_form,) = arguments.form.operands
    given, m = arguments.inputs[of_form], arguments.problem.m
    assert isinstance(given, Tensor)
    if arguments.form == GROUPED:
        yield from ((rows, rows.stop - rows.start) for rows in ends(given, m))
        return
    for group, count in enumerate(given.tolist()):
        if not 0 <= count <= m:
            raise ValueError(
                f"{of_form}[{group}] is {count}, and x has room for {m} rows of each group: pass numbers from 0 to {m}"
            )
        yield (group, slice(0, count)), count


def typical(rows: int, n: int, k: int, groups: int) -> Problem:
    """Return the problem for which a kernel is chosen: M is the mean of the groups' rows.

    How rows are spread over the groups, the host does not know: the time models assume several ways
    (``kinds/spreads.py``). The mean is rounded to a number of rows for which kernels are chosen in advance.
    """
    return Problem(nearest(rows / groups), n, k, groups)


def typical_of_k(m: int, n: int, rows: int, groups: int) -> Problem:
    """Return the problem for which a kernel is chosen that multiplies groups of K: K is the mean of what they have."""
    return Problem(m, n, nearest(rows / groups), groups)


def expected(rows: int | None) -> int:
    """Return the rows that a masked group is expected to have, of which near numbers are one; 0 if nobody says.

    Raises
    ------
    TypeError
        If it is no int.
    ValueError
        If it is below 0.
    """
    if rows is None:
        return 0
    rows = plain(rows)
    if type(rows) is not int:
        raise TypeError(f"expected_rows is {rows!r}: pass an int, or omit it")
    if rows < 0:
        raise ValueError(f"expected_rows is {rows}: pass the rows that a group has on average, or omit it")
    return nearest(rows)  # of 0, as a mean of few rows is when it is rounded down, 1


def settled(rows: int | None) -> int | None:
    """Return expected rows as a number that is known.

    While PyTorch traces, it may be a symbol, and an op is made for one number. Comparisons settle which is the nearest,
    so that the program serves all numbers that have it.
    """
    if rows is None or not torch.compiler.is_dynamo_compiling():
        return rows
    if rows > _NUMBERS_OF_ROWS[-1]:
        return int(rows)  # beyond the table, an eager call keeps the number as well
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

    TMA stops at the end of a group for D and one input (M, N). Where there are more such tensors, or one is not
    aligned, all of them go through registers, which a lower alignment says.
    """
    graph = signature.epilogue
    read = [i.kind is Kind.TILE for i in graph.inputs]
    written = [o.kind is Kind.TILE for o in graph.outputs[1:]]
    tiles = [signature.d]
    tiles += [t for t, is_tile in zip(signature.inputs, read, strict=True) if is_tile]
    tiles += [t for t, is_tile in zip(signature.outputs, written, strict=True) if is_tile]
    if all(t.aligned for t in tiles) and sum(read) <= 1 and not any(written):
        return signature
    lowest = min(min(t.alignment, arch.TMA_ALIGNMENT_BYTES // t.dtype.bytes // 2) for t in tiles)

    def lower(operand: Operand, is_tile: bool) -> Operand:
        return replace(operand, alignment=lowest) if is_tile else operand

    return replace(
        signature,
        d=lower(signature.d, True),
        inputs=tuple(map(lower, signature.inputs, read)),
        outputs=tuple(map(lower, signature.outputs, written)),
    )
