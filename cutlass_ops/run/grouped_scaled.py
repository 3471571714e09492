"""Grouped GEMMs of quantised matrices: the epilogue applies the scales of rows, and of columns of each expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.run import groups, traced
from cutlass_ops.run.grouped import GroupedOp, MaskedOp
from cutlass_ops.run.ops import Op, op_of
from cutlass_ops.run.requests import prepared_by
from cutlass_ops.run.scaled import is_vector

_OWN = frozenset(("scale_a", "scale_b"))


@traced.remembered
def scaled_grouped_op(rows: bool = False, columns: bool = False, epilogue: Epilogue | None = None) -> GroupedOp:
    """Return the op behind :func:`scaled_grouped_gemm`. It takes (x, w, offsets, scale_a, scale_b, *inputs).

    Parameters
    ----------
    rows, columns : bool
        Whether each row of x, and each column of w, has a scale of its own.
    epilogue : Epilogue, optional
        What follows.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or cannot follow.
    """
    return GroupedOp(_scaled("grouped_gemm", rows, columns, epilogue))


@traced.remembered
def scaled_masked_op(
    rows: bool = False, columns: bool = False, epilogue: Epilogue | None = None, expected_rows: int | None = None
) -> MaskedOp:
    """Return the op behind :func:`scaled_grouped_gemm_masked`. It takes (x, w, counts, scale_a, scale_b, *inputs).

    Parameters
    ----------
    rows, columns, epilogue
        As for :func:`scaled_grouped_op`.
    expected_rows : int, optional
        The rows that a group is expected to have, for which kernels are chosen.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or cannot follow, or `expected_rows` is no positive int.
    """
    return MaskedOp(_scaled("grouped_gemm_masked", rows, columns, epilogue), groups.expected(expected_rows))


def _scaled(function: str, rows: bool, columns: bool, epilogue: Epilogue | None) -> Epilogue:
    """Return the epilogue that applies scales, before the one that follows.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or cannot follow.
    """
    scaled = composed.SCALED[rows, columns]
    if epilogue is None:
        return scaled
    after = op_of(epilogue).graph
    taken = sorted(_OWN & {i.name for i in after.inputs})
    if taken:
        raise ValueError(
            f"{epilogue.name} has an input {', '.join(taken)}, and so has scaled_{function}: rename the input"
        )
    if after.products:
        raise ValueError(
            f"{epilogue.name} has the product {after.products[0]}, which has scales of its own: write all scales into "
            f"the epilogue, and call {function}"
        )
    return Epilogue.of(
        f"scaled_{function}", f"{scaled.doc} Then {epilogue.name}: {epilogue.doc}", scaled.graph.then(after)
    )


def _prepare(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    scale_a: Tensor | float,
    scale_b: Tensor | float,
    epilogue: Epilogue | None,
) -> tuple[Op, tuple[Any, ...]]:
    return scaled_grouped_op(is_vector(scale_a), is_vector(scale_b), epilogue), (x, w, offsets, scale_a, scale_b)


@prepared_by(_prepare)
def scaled_grouped_gemm(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    scale_a: Tensor | float,
    scale_b: Tensor | float,
    *,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[rows of e] = epilogue(scale_a * scale_b[e] * (x[rows of e] @ w[e]), inputs) in one kernel.

    Groups are those of :func:`grouped_gemm`, and scales those of :func:`scaled_gemm`: factors, applied to the FP32 sums
    before the epilogue and the one rounding of D. There are none for blocks along K.

    Parameters
    ----------
    x : Tensor
        (T, K), FP8 (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``), row-major. Rows begin at multiples of 16 bytes:
        K is a multiple of 16, or rows are padded. FP16 and BF16 do as well.
    w : Tensor
        (E, K, N), either type of FP8, contiguous along K: ``weights.mT`` of weights (E, N, K). FP16 or BF16 if x is.
    offsets : Tensor
        (E,), INT32, on the device of x: the row at which each expert's rows end.
    scale_a : Tensor or float
        Of x: a number or a tensor without dimensions, or (T,), one for each row. FP32, FP16 or BF16.
    scale_b : Tensor or float
        Of w: a number or a tensor without dimensions, or (E, N), one for each column of each expert, or (N,).
    epilogue : Epilogue, optional
        Applied to the scaled product. It takes no ``Product``, which has scales of its own.
    out, out_dtype, **inputs
        As for :func:`grouped_gemm`. D's dtype is BF16 by default for FP8.

    Returns
    -------
    Tensor or named tuple
        D (T, N), or all outputs with D first. Rows of no expert are what a new tensor has: anything.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If the device is not of compute capability 9.0 (Hopper).
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x, weights = torch.randn(6, 32), torch.randn(2, 8, 32)  # (T, K), and (E, N, K)
    >>> scale_a, scale_b = (t.abs().amax(-1) / 448 for t in (x, weights))
    >>> a = (x / scale_a[:, None]).to(torch.float8_e4m3fn)
    >>> b = (weights / scale_b[..., None]).to(torch.float8_e4m3fn)
    >>> offsets = torch.tensor([2, 6], dtype=torch.int32)
    >>> d = co.scaled_grouped_gemm(a, b.mT, offsets, scale_a, scale_b)
    >>> d.dtype, d.shape
    (torch.bfloat16, torch.Size([6, 8]))
    >>> bool((d[:2] - x[:2] @ weights[0].t()).norm() < 0.1 * d[:2].norm())
    True
    """
    op, arguments = _prepare(x, w, offsets, scale_a, scale_b, epilogue)
    return op(*arguments, out=out, out_dtype=out_dtype, **inputs)


def _prepare_masked(
    x: Tensor,
    w: Tensor,
    counts: Tensor,
    scale_a: Tensor | float,
    scale_b: Tensor | float,
    epilogue: Epilogue | None,
    expected_rows: int | None,
) -> tuple[Op, tuple[Any, ...]]:
    op = scaled_masked_op(is_vector(scale_a), is_vector(scale_b), epilogue, expected_rows)
    return op, (x, w, counts, scale_a, scale_b)


@prepared_by(_prepare_masked)
def scaled_grouped_gemm_masked(
    x: Tensor,
    w: Tensor,
    counts: Tensor,
    scale_a: Tensor | float,
    scale_b: Tensor | float,
    *,
    epilogue: Epilogue | None = None,
    expected_rows: int | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[e, rows] = epilogue(scale_a * scale_b[e] * (x[e, rows] @ w[e]), inputs) in one kernel.

    Groups are those of :func:`grouped_gemm_masked`, and scales those of :func:`scaled_grouped_gemm`.

    Parameters
    ----------
    x : Tensor
        (E, M, K), FP8 (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``), with rows as for
        :func:`grouped_gemm_masked`. FP16 and BF16 do as well.
    w : Tensor
        (E, K, N), either type of FP8, contiguous along K: ``weights.mT`` of weights (E, N, K). FP16 or BF16 if x is.
    counts : Tensor
        (E,), INT32, on the device of x: how many rows each group has, from 0 to M.
    scale_a : Tensor or float
        Of x: a number or a tensor without dimensions, or (E, M), one for each row. FP32, FP16 or BF16.
    scale_b : Tensor or float
        Of w: a number or a tensor without dimensions, or (E, N), one for each column of each group, or (N,).
    epilogue : Epilogue, optional
        Applied to the scaled product. It takes no ``Product``, which has scales of its own.
    expected_rows, out, out_dtype, **inputs
        As for :func:`grouped_gemm_masked`. D's dtype is BF16 by default for FP8.

    Returns
    -------
    Tensor or named tuple
        D (E, M, N), or all outputs with D first. Rows behind a group's count are what a new tensor has: anything.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If the device is not of compute capability 9.0 (Hopper).
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x, weights = torch.randn(2, 4, 32), torch.randn(2, 8, 32)  # (E, M, K), and (E, N, K)
    >>> scale_a, scale_b = (t.abs().amax(-1) / 448 for t in (x, weights))  # (E, M), and (E, N)
    >>> a = (x / scale_a[..., None]).to(torch.float8_e4m3fn)
    >>> b = (weights / scale_b[..., None]).to(torch.float8_e4m3fn)
    >>> counts = torch.tensor([4, 1], dtype=torch.int32)
    >>> d = co.scaled_grouped_gemm_masked(a, b.mT, counts, scale_a, scale_b)
    >>> d.dtype, d.shape
    (torch.bfloat16, torch.Size([2, 4, 8]))
    >>> bool((d[0] - x[0] @ weights[0].t()).norm() < 0.1 * d[0].norm())
    True
    """
    op, arguments = _prepare_masked(x, w, counts, scale_a, scale_b, epilogue, expected_rows)
    return op(*arguments, out=out, out_dtype=out_dtype, **inputs)
