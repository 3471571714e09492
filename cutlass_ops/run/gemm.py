"""The verb: a GEMM of tensors or operand values, with any epilogue, for one product, batches or groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn import Parameter

from cutlass_ops.base.mma import Math
from cutlass_ops.declare.form import DENSE, GROUPED, MASKED, RAGGED_K
from cutlass_ops.epilogue import Epilogue, Value
from cutlass_ops.operand import groups as of_groups
from cutlass_ops.run import traced
from cutlass_ops.run.grouped import FORMS, GroupsOp
from cutlass_ops.run.ops import Op, graph_op, op_of
from cutlass_ops.run.values import VALUES, Groups, OperandA, OperandB, OwnWeight, PreparedWeight, Scaled

Given: TypeAlias = Epilogue | Callable[[Value], Any] | None


# ---- Operand values as tensors -----------------------------------------------------------------------------------


def flattened(epilogue: Given, name: str, a: Any, b: Any, groups: Any) -> tuple[Op, tuple[Any, ...]]:
    """Return the op of a call with operand values or groups, and what it takes before the epilogue's inputs.

    That is A, B, where groups end, and the scales that there are. `name` is the op's, or empty for the epilogue's.
    Raises TypeError or ValueError if operands, groups and epilogue do not go together.
    """
    # Written out, for warm calls.
    values_a, scale_a = a if isinstance(a, Scaled) else (a, None)
    values_b: Any = b
    scale_b: Any = None
    further: tuple[Any, ...] = ()
    if isinstance(b, Scaled):
        values_b, scale_b = b
        if isinstance(values_b, OwnWeight) and values_b.takes_scale:
            values_b, part = values_b.parts
            further = (part,)
    elif isinstance(b, OwnWeight):
        values_b, scale_b = b.parts
    has_scales = scale_a is not None or scale_b is not None
    tensors = (values_a, scale_a, values_b, scale_b) if has_scales else ()
    kind = _kind(epilogue, name, b, values_b, groups, tensors)
    known = None if kind is None else _KNOWN.get(kind)
    if known is None:
        known = _made(epilogue, name, b, groups, values_a, scale_a, values_b, scale_b)
        if kind is not None:
            if len(_KNOWN) >= _MOST_KNOWN:
                _KNOWN.clear()
            _KNOWN[kind] = known
    op, a_has_one, fitted = known
    ends = () if groups is None else (groups.offsets if groups.counts is None else groups.counts,)
    if scale_a is None:
        given = (values_a, values_b, *ends, *further)
        return op, given if scale_b is None else (*given, scale_b)
    if fitted is not None:
        scale_b = fitted(values_a, scale_a, values_b, scale_b)
    of_a: Any = scale_a
    return op, (values_a, values_b, *ends, *further, of_a.squeeze() if a_has_one else of_a, scale_b)


# How a call is flattened: its op, whether a's scale is a tensor of one element with dimensions, and what brings b's
# scale into the shape that the op takes. A kernel reads numbers from tensors without dimensions.
_Known: TypeAlias = tuple[Op, bool, Callable[[Any, Any, Any, Any], Any] | None]
# By all that decides it, for calls with plain arguments.
_KNOWN: dict[Any, _Known] = {}
_MOST_KNOWN = 4096


def _kind(epilogue: Any, name: str, given_b: Any, b: Any, groups: Any, tensors: tuple[Any, ...]) -> Any:
    """Return all that decides how a call is flattened; None if it needs a closer look."""
    if torch.compiler.is_dynamo_compiling() or not (epilogue is None or type(epilogue) is Epilogue):
        return None
    if not isinstance(b, Tensor) or (type(given_b) is PreparedWeight and given_b.column_sum is not None):
        return None
    of_b = given_b.values if type(given_b) is Scaled else given_b
    found: list[Any] = [epilogue, name, type(given_b), type(of_b), b.dim()]
    if isinstance(of_b, OwnWeight):
        found.append(of_b.numbers)
    if groups is not None:
        if type(groups) is not Groups or type(groups.expected) not in (int, type(None)):
            return None
        found += (groups.offsets is None, groups.counts is None, groups.expected)
    for x in tensors:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            try:
                found += (x.shape, x.dtype)
            except RuntimeError:  # nested tensors have none
                return None
        elif kind is float or kind is int or x is None:
            found.append(kind)
        else:
            return None
    return tuple(found)


def _made(epilogue: Given, name: str, given_b: Any, groups: Any, a: Any, scale_a: Any, b: Any, scale_b: Any) -> _Known:
    form = _form(groups, b)
    own = given_b.values if isinstance(given_b, Scaled) else given_b
    has_form = isinstance(own, OwnWeight) and (own is given_b or own.takes_scale)
    before = own.before(a, scale_a, None if own is given_b else scale_b) if has_form else None
    if before is not None and groups is not None:
        raise TypeError(
            f"b is {before.name}, and groups of rows have no kernels for such weights: call gemm for each group, with "
            "its rows and its own weight"
        )
    expected = None if groups is None else of_groups.settled(groups.expected)
    if (before is not None and own is given_b) or (scale_a is None and scale_b is None):
        return op_for(epilogue, form, before, expected, name), False, None
    from cutlass_ops.run import scaled  # late: its epilogues take tracing

    scaled.require_both(scale_a, scale_b, a, b)
    if form == RAGGED_K.name:
        raise TypeError("a and b have scales, and a sum over each group's rows has none: pass the values alone")
    found, fitted = scale_b, None
    if isinstance(given_b, PreparedWeight):
        found, fitted = scaled.of_prepared(a, scale_a, b, scale_b), scaled.of_prepared
    # A weight in a form of its own has no scales of blocks.
    scales: Any = scaled.scales_of(a, b if before is None else own, scale_a, found, groups=groups is not None)
    if groups is not None and not scales[2]:
        found, fitted = scaled.of_columns(a, scale_a, b, scale_b), scaled.of_columns
    elif groups is None and scales[1] and isinstance(b, Tensor) and b.ndim == found.ndim == 2:
        found, fitted = found[0], scaled.of_row
    elif fitted is None and not scales[2] and scaled.is_one(scale_b):
        found, fitted = scale_b.squeeze(), scaled.of_one
    has_one = not (scales[0] or scales[2]) and scaled.is_one(scale_a)
    if before is not None:
        scales = scaled.after(before, scales)
    return op_for(epilogue, form, scales, expected, name), has_one, None if found is scale_b else fitted


def _form(groups: Any, b: Any) -> str:
    """Return the name of a call's form. Batches have that of one product."""
    if groups is None:
        return DENSE.name
    if not isinstance(groups, Groups):
        shown = "offsets" if isinstance(groups, Tensor) else "..."
        raise TypeError(
            f"groups must be cutlass_ops.Groups, not {type(groups).__name__}: pass groups=cutlass_ops.Groups({shown})"
        )
    if (groups.offsets is None) == (groups.counts is None):
        which = "neither offsets nor counts" if groups.offsets is None else "both offsets and counts"
        raise TypeError(f"groups has {which}: pass cutlass_ops.Groups(offsets) or cutlass_ops.Groups(counts=counts)")
    if groups.counts is not None:
        return MASKED.name
    if groups.expected is not None:
        raise TypeError("groups has expected, which is for groups with counts: leave it out, or pass counts=")
    return RAGGED_K.name if isinstance(b, Tensor) and b.ndim == 2 else GROUPED.name


@traced.remembered
def op_for(
    epilogue: Given = None,
    form: str = "dense",
    scales: tuple[bool, bool, bool] | Epilogue | None = None,
    expected: int | None = None,
    name: str = "",
) -> Op:
    """Return the op behind :func:`gemm`, for ``tune`` and ``plan``. It takes (a, b, *ends, *scales, *inputs).

    `form` is that of the call: groups of the form ``"grouped"`` and ``"ragged_k"`` have offsets, those of ``"masked"``
    counts, for `expected` rows. `scales` says whether each row of A, and each column of B, has a scale, or whether
    blocks have scales instead; or it is the epilogue that applies what operands have; None if there is nothing. Raises
    TypeError or ValueError if `epilogue` is not an epilogue, or does not go with the rest.
    """
    op = op_of(epilogue)
    found = op.epilogue
    if scales is not None:
        from cutlass_ops.run import scaled  # late, as above

        found = scaled.followed(scales, found)
    name = name or op.name
    if form != DENSE.name:
        return _of_groups(Epilogue(name, found.doc, found.graph), form, of_groups.expected(expected))
    return op if scales is None and name == op.name else graph_op(name, found.graph, found.doc)


@functools.lru_cache(maxsize=1024)
def _of_groups(epilogue: Epilogue, form: str, expected: int) -> GroupsOp:
    """Return the op of groups: expected numbers of rows that are near each other share one."""
    return GroupsOp(epilogue, FORMS[form], expected)


# ---- The function ------------------------------------------------------------------------------------------------


@overload
def gemm(
    a: OperandA,
    b: OperandB,
    *,
    epilogue: None = None,
    groups: Groups | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Tensor: ...


@overload
def gemm(
    a: OperandA,
    b: OperandB,
    *,
    epilogue: Epilogue,
    groups: Groups | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any: ...


@overload
def gemm(
    a: OperandA,
    b: OperandB,
    *,
    epilogue: Callable[[Value], Value],
    groups: Groups | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Tensor: ...


def gemm(
    a: OperandA,
    b: OperandB,
    *,
    epilogue: Epilogue | Callable[[Value], Any] | None = None,
    groups: Groups | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute D = epilogue(A @ B, inputs) in one kernel.

    Until the kernel is compiled and loaded, PyTorch's own operators serve calls. :func:`warm_up` compiles it ahead.

    Parameters
    ----------
    a : Tensor or Scaled
        (..., M, K), FP16, BF16, INT8, FP64, FP8, or FP32 with `math`. FP8 is row-major; other types have either major
        and any stride between lines. If b has two dimensions, leading dimensions are folded into M. The epilogue
        computes in FP32, or in FP64 for FP64. On Hopper, INT8 that is not contiguous along K is copied at each call,
        and so is TF32 if that is faster. In batches, and on Ampere and Ada, INT8 must be contiguous along K.
    b : Tensor, Scaled or PreparedWeight
        (K, N), the same dtype, or either type of FP8, column-major, if a is FP8. Pass a weight (N, K) as
        ``weight.t()``. With leading dimensions, (..., K, N), there is one GEMM for each batch: leading dimensions of a
        and b broadcast as in ``torch.matmul``. They must fold into two dimensions. Or the result of :func:`prepare`.
    epilogue : Epilogue or lambda, optional
        A function decorated with :func:`cutlass_ops.epilogue`, or a lambda of the accumulator alone, which every call
        traces again. Default: D = A @ B.
    groups : Groups, optional
        Where groups of rows end, on Hopper. a (T, K) and b (E, K, N) with offsets: D (T, N), where each group of rows
        is multiplied by its own matrix. a (E, M, K) and b (E, K, N) with counts: D (E, M, N), of which the first rows
        of each group are computed. a (K, T), the transposed rows, and b (T, N) with offsets: D (E, K, N), a sum over
        each group's rows, as the gradient of weights is. Operands are FP16 or BF16, and FP8 except for such sums. Rows
        of a are contiguous, and all lines begin at multiples of 16 bytes. Rows of no group are not computed and not
        written. Epilogues have no reductions. docs/grouped.md says more.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name.
    out_dtype : torch.dtype, optional
        D's dtype: FP16, BF16 or FP32, and on Hopper FP8, which saturates. Default: that of ``a``, or BF16 for FP8 and
        INT8. With FP64 operands, D is FP64. With INT8 operands, D may also be INT8, which saturates, rounds to nearest
        even and turns NaN into 0. It may be INT32, the sums themselves, if the `epilogue` returns only ``acc``.
    math : {"tf32", "3xtf32", "fast", "promoted"}, optional
        For FP32 operands, which Tensor Cores cannot multiply directly: ``"tf32"`` rounds them to 10 bits of fraction;
        ``"3xtf32"`` splits each into two such numbers and adds up three products, at a third of the speed or less. For
        FP8 operands, how products are added up: ``"fast"`` by the Tensor Cores alone; ``"promoted"`` also in FP32,
        after every 128 elements along K. Default for FP8: ``"promoted"`` for K above 128, or above 512 if all results
        are FP8. Other operands take no `math`.
    **inputs
        The epilogue's inputs by name: Row (N,), Col (M,), Tile (M, N), Scalar a number or a tensor of one element,
        Product (K, N) of ``b``'s dtype and major, Integer an int or an integer tensor of one element. With batches, an
        input may have batch dimensions before its own; they broadcast. A row may have leading dimensions of 1, a column
        a last dimension of 1, and a tile 1 for M or N. Inputs with a stride of 0 are copied at each call. With groups,
        a Row may be (E, N), one for each, and a Product is (E, K, N).

    Returns
    -------
    Tensor or named tuple
        D (..., M, N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    NotImplementedError
        If an argument requires grad, and there is no gradient: that of groups with counts, or of sums over groups.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the call waits for its kernel, and that cannot be compiled, stored or loaded. Otherwise, PyTorch serves.

    Examples
    --------
    >>> a = torch.ones(2, 8).bfloat16()  # (M, K)
    >>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)
    >>> co.gemm(a, b).tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    >>> co.gemm(a, b, epilogue=lambda acc: co.e.relu(acc - 5)).tolist()
    [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
    >>> @co.epilogue
    ... def scaled(acc, bias: co.Row, scale: co.Scalar):
    ...     return (acc + bias) * scale
    >>> bias = torch.tensor([0.0, 1.0, 2.0]).bfloat16()
    >>> co.gemm(a, b, epilogue=scaled, bias=bias, scale=0.5, out_dtype=torch.float32).tolist()
    [[4.0, 4.5, 5.0], [4.0, 4.5, 5.0]]

    Batches, each with its own bias:

    >>> q, k = torch.ones(2, 4, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16()
    >>> co.gemm(q, k.mT, epilogue=scaled, bias=torch.zeros(2, 3).bfloat16(), scale=0.5).shape
    torch.Size([2, 4, 3])

    FP8 with scales, here one for each row of x and each column of the weight:

    >>> x, w = (co.Scaled.quantize(torch.randn(n, 32), block=None) for n in (4, 8))
    >>> co.gemm(x, w.t()).shape
    torch.Size([4, 8])

    Groups of rows, the first of two and the second of three, each with its own weight:

    >>> x, weights = torch.ones(5, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16()
    >>> groups = co.Groups(torch.tensor([2, 5], dtype=torch.int32))
    >>> bias = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]).bfloat16()  # a row for each group
    >>> co.gemm(x, weights.mT, epilogue=scaled, groups=groups, bias=bias, scale=0.5)[:, 0].tolist()
    [4.0, 4.0, 4.5, 4.5, 4.5]

    Exact sums of INT8 products, and their quantisation:

    >>> x, w = torch.full((1, 16), 127, dtype=torch.int8), torch.full((2, 16), 2, dtype=torch.int8)
    >>> co.gemm(x, w.t(), out_dtype=torch.int32).tolist()
    [[4064, 4064]]
    >>> co.gemm(x, w.t(), epilogue=scaled, bias=torch.tensor([-4000.0, 0.0]), scale=0.1, out_dtype=torch.int8).tolist()
    [[6, 127]]

    An epilogue with further outputs gives a named tuple:

    >>> @co.epilogue
    ... def with_sums(acc):
    ...     return {"d": co.e.relu(acc), "row_sum": co.e.sum(acc, dim=1)}
    >>> d, row_sum = co.gemm(a, b, epilogue=with_sums)
    >>> row_sum.tolist()
    [24.0, 24.0]
    """
    if groups is None and not isinstance(a, VALUES) and not isinstance(b, VALUES):
        return op_of(epilogue)(a, b, out=out, out_dtype=out_dtype, math=math, **inputs)
    op, tensors = flattened(epilogue, "", a, b, groups)
    return op(*tensors, out=out, out_dtype=out_dtype, math=math, **inputs)
