"""Comparisons, conditions and what chooses by them."""

from __future__ import annotations

from cutlass_ops.epilogue.values import Value, apply, apply_float


def lt(x: Value | float, y: Value | float) -> Value:
    """Return whether x is less than y: false if either is NaN. Written x < y as well.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.lt(acc, 0.0), 0.1 * acc, acc)  # or acc < 0.0
    """
    return apply("lt", x, y)


def le(x: Value | float, y: Value | float) -> Value:
    """Return whether x is y or less: false if either is NaN. Written x <= y as well.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.le(acc, 0.0), 0.1 * acc, acc)  # or acc <= 0.0
    """
    return apply("le", x, y)


def gt(x: Value | float, y: Value | float) -> Value:
    """Return whether x is greater than y: false if either is NaN. Written x > y as well.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.gt(acc, 0.0), acc, 0.1 * acc)  # or acc > 0.0
    """
    return apply("gt", x, y)


def ge(x: Value | float, y: Value | float) -> Value:
    """Return whether x is y or greater: false if either is NaN. Written x >= y as well.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.ge(acc, 0.0), acc, 0.1 * acc)  # or acc >= 0.0
    """
    return apply("ge", x, y)


def eq(x: Value | float, y: Value | float) -> Value:
    """Return whether x equals y: false if either is NaN, and true for 0 and −0. Written x == y as well.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.eq(acc, 0.0), 1.0, acc)  # or acc == 0.0
    """
    return apply("eq", x, y)


def ne(x: Value | float, y: Value | float) -> Value:
    """Return whether x does not equal y: true if either is NaN. Written x != y as well.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.ne(acc, 0.0), 1.0 / acc, 0.0)  # or acc != 0.0
    """
    return apply("ne", x, y)


def logical_and(x: Value, y: Value) -> Value:
    """Return whether x and y are both true. Written x & y as well.

    Raises
    ------
    EpilogueError
        If an argument is no truth value, as a comparison gives.

    Examples
    --------
    >>> @co.epilogue
    ... def marked(acc):
    ...     return co.e.where(co.e.logical_and(acc > 0.0, acc < 1.0), acc, 0.0)  # or (acc > 0.0) & (acc < 1.0)
    """
    return apply("logical_and", x, y)


def logical_or(x: Value, y: Value) -> Value:
    """Return whether x or y is true. Written x | y as well.

    Raises
    ------
    EpilogueError
        If an argument is no truth value, as a comparison gives.

    Examples
    --------
    >>> @co.epilogue
    ... def marked(acc):
    ...     return co.e.where(co.e.logical_or(acc < 0.0, acc > 1.0), acc, 0.0)  # or (acc < 0.0) | (acc > 1.0)
    """
    return apply("logical_or", x, y)


def logical_not(x: Value) -> Value:
    """Return whether x is false. Written ~x as well.

    Raises
    ------
    EpilogueError
        If an argument is no truth value, as a comparison gives.

    Examples
    --------
    >>> @co.epilogue
    ... def marked(acc):
    ...     return co.e.where(co.e.logical_not(acc > 0.0), acc, 0.0)  # or ~(acc > 0.0)
    """
    return apply("logical_not", x)


def where(condition: Value, x: Value | float, y: Value | float) -> Value:
    """Return x where a condition is true, else y. The value that is not selected may be anything, even NaN.

    Raises
    ------
    EpilogueError
        If the condition is not a truth value, such as a comparison's result.

    Examples
    --------
    >>> @co.epilogue
    ... def causal(acc):
    ...     return co.e.where(co.e.column_index() <= co.e.row_index(), acc, float("-inf"))
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 2).bfloat16()
    >>> co.gemm(a, b, epilogue=causal).tolist()
    [[8.0, -inf], [8.0, 8.0]]
    """
    return apply("where", condition, x, y)


def isnan(x: Value | float) -> Value:
    """Return whether x is NaN.

    Examples
    --------
    >>> @co.epilogue
    ... def cleaned(acc):
    ...     return co.e.where(co.e.isnan(acc), 0.0, acc)
    """
    return apply("isnan", x)


def to_float(x: Value | float) -> Value:
    """Return a truth value as 1 or 0, and an index as a number rounded to FP32. A number is returned unchanged.

    Arithmetic and outputs convert in this way by themselves.

    Examples
    --------
    >>> @co.epilogue
    ... def positive(acc):
    ...     return co.e.to_float(acc > 0.0)
    >>> a, b = torch.tensor([[-1.5, 2.5]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=positive).tolist()
    [[0.0, 1.0]]
    """
    return apply_float(x)
