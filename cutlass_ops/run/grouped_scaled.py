"""Grouped GEMMs of quantised matrices, with scales of rows and of each expert's columns, or of blocks along K."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import mma
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.run import groups, traced
from cutlass_ops.run.grouped import GroupedOp, MaskedOp, masked_op_of
from cutlass_ops.run.ops import Op
from cutlass_ops.run.requests import prepared_by
from cutlass_ops.run.scaled import followed, is_vector, same_along_k, scaling


@traced.remembered
def scaled_grouped_op(
    rows: bool = False, columns: bool = False, epilogue: Epilogue | None = None, blocks: bool = False
) -> GroupedOp:
    """Return the op behind :func:`scaled_grouped_gemm`. It takes (x, w, offsets, scale_a, scale_b, *inputs).

    Parameters
    ----------
    rows, columns : bool
        Whether each row of x, and each column of w, has a scale of its own.
    epilogue : Epilogue, optional
        What follows.
    blocks : bool
        Whether blocks of x and of each expert's weight have scales instead.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or cannot follow.
    """
    return GroupedOp(followed("grouped_gemm", rows, columns, blocks, epilogue))


@traced.remembered
def scaled_masked_op(
    rows: bool = False,
    columns: bool = False,
    epilogue: Epilogue | None = None,
    blocks: bool = False,
    expected_rows: int | None = None,
) -> MaskedOp:
    """Return the op behind :func:`scaled_grouped_gemm_masked`. It takes (x, w, counts, scale_a, scale_b, *inputs).

    Parameters
    ----------
    rows, columns, epilogue, blocks
        As for :func:`scaled_grouped_op`.
    expected_rows : int, optional
        The rows that a group is expected to have, for which kernels are chosen.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or cannot follow, or `expected_rows` is no positive int.
    """
    found = followed("grouped_gemm_masked", rows, columns, blocks, epilogue)
    return masked_op_of(found, groups.expected(expected_rows))


def _are_of_blocks(x: Any, w: Any, scale_a: Any, scale_b: Any) -> bool:
    """Whether the scales are those of blocks: of x with its dimensions, of w with its three.

    (T, 1) and (E, 1, N) may be scales of rows and of columns, as PyTorch has them: the other operand's then say what
    they are.

    Raises
    ------
    ValueError
        If blocks of one operand have scales and blocks of the other have none.
    """
    if not (isinstance(x, Tensor) and isinstance(w, Tensor) and w.ndim == 3):
        return False  # refused later
    fits_a = isinstance(scale_a, Tensor) and scale_a.ndim == x.ndim
    fits_b = isinstance(scale_b, Tensor) and scale_b.ndim == 3
    experts, k, n = w.shape
    steps = mma.blocks(k)
    of_a = fits_a and scale_a.shape[-1] != 1
    of_b = fits_b and is_vector(scale_b) and tuple(scale_b.shape) != (experts, 1, n)
    if of_b and not of_a and steps > 1 and tuple(scale_b.shape) == (experts, n, 1):
        raise ValueError(
            f"scale_b has shape {(experts, n, 1)}: scales of columns are {(experts, n)} or {(experts, 1, n)}, so pass "
            "scale_b.mT"
        )
    if of_b and not fits_a:
        wanted = (*x.shape[:-1], steps)
        raise ValueError(
            f"scale_b has shape {tuple(scale_b.shape)}, as scales of blocks do, and scale_a has none for blocks of x: "
            f"pass {wanted} as well. The same scale along K is {same_along_k('scale_a', scale_a, wanted, 'x')}"
        )
    if of_a and not fits_b:
        wanted = (experts, n, steps)
        raise ValueError(
            f"scale_a has shape {tuple(scale_a.shape)}, as scales of blocks do, and scale_b has none for blocks of w: "
            f"pass {(experts, mma.blocks(n), steps)} or {wanted} as well. The same scale along K is "
            + same_along_k("scale_b", scale_b, wanted, "w")
        )
    # As in `scaled`: of extents that a program leaves open, the answers above are no bools.
    if of_a or of_b:  # noqa: SIM103
        return True
    return False


def _of_columns(scale: Any, w: Any) -> Any:
    """Return w's scales of columns in the shape of a Row: (N,), or (E, N). Others are returned as they are.

    Raises
    ------
    ValueError
        If there is one for each expert, which nothing but the caller tells from one for each column.
    """
    if not (isinstance(scale, Tensor) and isinstance(w, Tensor) and w.ndim == 3 and is_vector(scale)):
        return scale
    (experts, _, n), shape = w.shape, tuple(scale.shape)
    if shape == (experts,):
        both = f", or scale_b[None] for one for each of {n} columns" if n == experts else ""
        raise ValueError(
            f"scale_b has shape {shape}, and w has {experts} experts: pass scale_b[:, None].repeat(1, {n}) for a scale "
            f"for each expert{both}"
        )
    if shape == (1, n):
        return scale.squeeze(0)
    return scale.squeeze(1) if shape == (experts, 1, n) else scale


def _prepared(
    make: Callable[..., Op], x: Any, w: Any, ends: Any, scale_a: Any, scale_b: Any, epilogue: Any, *given: Any
) -> tuple[Op, tuple[Any, ...]]:
    """Return an op with scales like those that are given, and its arguments."""
    rows, columns, blocks = scaling(scale_a, scale_b, _are_of_blocks(x, w, scale_a, scale_b))
    scale_b = scale_b if blocks else _of_columns(scale_b, w)
    return make(rows, columns, epilogue, blocks, *given), (x, w, ends, scale_a, scale_b)


@prepared_by(
    lambda x, w, offsets, scale_a, scale_b, epilogue: _prepared(
        scaled_grouped_op, x, w, offsets, scale_a, scale_b, epilogue
    )
)
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
    math: mma.Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[rows of e] = epilogue(scale_a * scale_b[e] * (x[rows of e] @ w[e]), inputs) in one kernel.

    Groups are as for :func:`grouped_gemm`, and scales as for :func:`scaled_gemm`: factors, applied to the FP32 sums
    before the epilogue and before D is rounded, once. Blocks along K may have their own scales.

    Parameters
    ----------
    x : Tensor
        (T, K), FP8 (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``), row-major. Rows begin at multiples of 16 bytes:
        K is a multiple of 16, or rows are padded. May also be FP16 or BF16.
    w : Tensor
        (E, K, N), either type of FP8, contiguous along K: ``weights.mT`` of weights (E, N, K). Of x's dtype if that is
        not FP8.
    offsets : Tensor
        (E,), INT32, on the device of x: the row at which each expert's rows end.
    scale_a : Tensor or float
        Scales of x, in FP32, FP16 or BF16: a number, a tensor of one element, or (T,), one for each row. Or block
        scales in FP32 with any strides: (T, ceil(K / 128)), one for each 1x128.
    scale_b : Tensor or float
        Scales of w, in FP32, FP16 or BF16: a number, a tensor of one element, (E, N) or (E, 1, N), one for each column
        of each expert, or (N,) or (1, N), one for each column of all experts. (N,) is refused if N is the number of
        experts. If x has block scales, w needs block scales too, in FP32 with any strides: (E, ceil(N / 128), ceil(K /
        128)), one for each 128x128, or (E, N, ceil(K / 128)), one for each 128 elements along a column.
    epilogue : Epilogue, optional
        Applied to the scaled product. It cannot have a ``Product``, which needs its own scales.
    out, out_dtype, math, **inputs
        As for :func:`grouped_gemm`.

    Returns
    -------
    Tensor or named tuple
        D (T, N), or all outputs with D first. Rows that belong to no expert are uninitialised.

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
    >>> (a, scale_a), (b, scale_b) = (co.quantize(t, "e4m3", block=None) for t in (x, weights))
    >>> offsets = torch.tensor([2, 6], dtype=torch.int32)
    >>> d = co.scaled_grouped_gemm(a, b.mT, offsets, scale_a, scale_b)
    >>> d.dtype, d.shape
    (torch.bfloat16, torch.Size([6, 8]))
    >>> bool((d[:2] - x[:2] @ weights[0].t()).norm() < 0.1 * d[:2].norm())
    True
    """
    op, arguments = _prepared(scaled_grouped_op, x, w, offsets, scale_a, scale_b, epilogue)
    return op(*arguments, out=out, out_dtype=out_dtype, math=math, **inputs)


@prepared_by(
    lambda x, w, counts, scale_a, scale_b, epilogue, expected_rows: _prepared(
        scaled_masked_op, x, w, counts, scale_a, scale_b, epilogue, expected_rows
    )
)
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
    math: mma.Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute D[e, rows] = epilogue(scale_a * scale_b[e] * (x[e, rows] @ w[e]), inputs) in one kernel.

    Groups are as for :func:`grouped_gemm_masked`, and scales as for :func:`scaled_grouped_gemm`.

    Parameters
    ----------
    x : Tensor
        (E, M, K), FP8 (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``), with rows as for :func:`grouped_gemm_masked`.
        May also be FP16 or BF16.
    w : Tensor
        (E, K, N), either type of FP8, contiguous along K: ``weights.mT`` of weights (E, N, K). Of x's dtype if that is
        not FP8.
    counts : Tensor
        (E,), INT32, on the device of x: the number of used rows of each group, from 0 to M.
    scale_a : Tensor or float
        Scales of x, in FP32, FP16 or BF16: a number, a tensor of one element, or (E, M), one for each row. Or block
        scales in FP32 with any strides: (E, M, ceil(K / 128)), one for each 1x128.
    scale_b : Tensor or float
        Scales of w, as for :func:`scaled_grouped_gemm`.
    epilogue : Epilogue, optional
        Applied to the scaled product. It cannot have a ``Product``, which needs its own scales.
    expected_rows, out, out_dtype, math, **inputs
        As for :func:`grouped_gemm_masked`.

    Returns
    -------
    Tensor or named tuple
        D (E, M, N), or all outputs with D first. Rows from a group's count on are uninitialised.

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
    >>> (a, scale_a), (b, scale_b) = (co.quantize(t, "e4m3", block=None) for t in (x, weights))  # (E, M), and (E, N)
    >>> counts = torch.tensor([4, 1], dtype=torch.int32)
    >>> d = co.scaled_grouped_gemm_masked(a, b.mT, counts, scale_a, scale_b)
    >>> d.dtype, d.shape
    (torch.bfloat16, torch.Size([2, 4, 8]))
    >>> bool((d[0] - x[0] @ weights[0].t()).norm() < 0.1 * d[0].norm())
    True
    """
    rows = groups.settled(expected_rows)
    op, arguments = _prepared(scaled_masked_op, x, w, counts, scale_a, scale_b, epilogue, rows)
    return op(*arguments, out=out, out_dtype=out_dtype, math=math, **inputs)
