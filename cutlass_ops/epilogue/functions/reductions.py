"""Reductions over D's rows or columns."""

from __future__ import annotations

from cutlass_ops.epilogue.values import Reduction, Value, apply, reduce


def sum(x: Value | float, dim: int) -> Reduction:
    """Return the sum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), shape (N,).

    Examples
    --------
    >>> @co.epilogue
    ... def with_sums(acc):
    ...     return {"d": acc, "row_sum": co.e.sum(acc, dim=1)}
    >>> a, b = torch.ones(1, 8).bfloat16(), torch.ones(8, 2).bfloat16()
    >>> d, row_sum = co.gemm(a, b, epilogue=with_sums)
    >>> row_sum.tolist()
    [16.0]
    """
    return reduce("sum", x, dim)


def sum_square(x: Value | float, dim: int) -> Reduction:
    """Return the sum of x · x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,).

    Examples
    --------
    >>> @co.epilogue
    ... def with_sums(acc):
    ...     return {"d": acc, "row_sum_square": co.e.sum_square(acc, dim=1)}
    >>> a, b = torch.ones(1, 2).bfloat16(), torch.eye(2).bfloat16()
    >>> d, row_sum_square = co.gemm(a, b, epilogue=with_sums)
    >>> row_sum_square.tolist()
    [2.0]
    """
    return reduce("sum_square", x, dim)


def max(x: Value | float, dim: int) -> Reduction:
    """Return the maximum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,).

    Examples
    --------
    >>> @co.epilogue
    ... def with_maximum(acc):
    ...     return {"d": acc, "column_max": co.e.max(acc, dim=0)}
    >>> a, b = torch.tensor([[1.0], [3.0]]).bfloat16(), torch.ones(1, 1).bfloat16()
    >>> d, column_max = co.gemm(a, b, epilogue=with_maximum)
    >>> column_max.tolist()
    [3.0]
    """
    return reduce("max", x, dim)


def amax(x: Value | float, dim: int) -> Reduction:
    """Return the maximum of |x| over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,).

    It is ``max(abs(x), dim)``. With delayed scaling of FP8, the scale of the next call is computed from it.

    Examples
    --------
    >>> @co.epilogue
    ... def quantised(acc, scale: co.Scalar):
    ...     return {"d": acc * co.e.reciprocal(scale), "amax": co.e.amax(acc, dim=1)}
    >>> a, b = torch.tensor([[-3.0, 1.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> d, amax = co.gemm(a, b, epilogue=quantised, scale=0.5, out_dtype=torch.float8_e4m3fn)
    >>> d.float().tolist(), amax.tolist()
    ([[-6.0, 2.0]], [3.0])
    """
    return reduce("max", apply("abs", x), dim, "amax")


def min(x: Value | float, dim: int) -> Reduction:
    """Return the minimum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,).

    Examples
    --------
    >>> @co.epilogue
    ... def with_minimum(acc):
    ...     return {"d": acc, "column_min": co.e.min(acc, dim=0)}
    >>> a, b = torch.tensor([[1.0], [3.0]]).bfloat16(), torch.ones(1, 1).bfloat16()
    >>> d, column_min = co.gemm(a, b, epilogue=with_minimum)
    >>> column_min.tolist()
    [1.0]
    """
    return reduce("min", x, dim)


def argmax(x: Value | float, dim: int) -> Reduction:
    """Return the index of the maximum of x in each row of D (``dim=1``), shape (M,), or each column (``dim=0``), (N,).

    Of equal elements, the first counts. If there is a NaN, it is the index of the first one. Over no elements it is −1.
    The dtype is INT32; PyTorch's is INT64.

    Examples
    --------
    >>> @co.epilogue
    ... def placed(acc):
    ...     return {"d": acc, "at": co.e.argmax(acc, dim=1)}
    >>> a, b = torch.tensor([[1.0, 3.0, 3.0]]).bfloat16(), torch.eye(3).bfloat16()
    >>> co.gemm(a, b, epilogue=placed).at.tolist()
    [1]
    """
    return reduce("argmax", x, dim)


def argmin(x: Value | float, dim: int) -> Reduction:
    """Return the index of the minimum of x in each row of D (``dim=1``), shape (M,), or each column (``dim=0``), (N,).

    Of equal elements, the first counts. If there is a NaN, it is the index of the first one. Over no elements it is −1.
    The dtype is INT32; PyTorch's is INT64.

    Examples
    --------
    >>> @co.epilogue
    ... def placed(acc):
    ...     return {"d": acc, "at": co.e.argmin(acc, dim=1)}
    >>> a, b = torch.tensor([[1.0, 3.0, 3.0]]).bfloat16(), torch.eye(3).bfloat16()
    >>> co.gemm(a, b, epilogue=placed).at.tolist()
    [0]
    """
    return reduce("argmin", x, dim)


def logsumexp(x: Value | float, dim: int) -> Reduction:
    """Return ln Σ eˣ over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,).

    Nothing overflows, since the maximum is kept beside the sum. A cross-entropy needs this of its logits.

    Examples
    --------
    >>> @co.epilogue
    ... def with_statistics(acc):
    ...     return {"d": acc, "lse": co.e.logsumexp(acc, dim=1)}
    >>> a, b = torch.tensor([[200.0, 200.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=with_statistics).lse.tolist()
    [200.693...]
    """
    return reduce("logsumexp", x, dim)
