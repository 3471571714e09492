"""Arithmetic."""

from __future__ import annotations

from cutlass_ops.epilogue.values import Value, apply, apply_power, error


def add(x: Value | float, y: Value | float) -> Value:
    """Return x + y.

    Examples
    --------
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row):
    ...     return co.e.add(acc, bias)  # or acc + bias
    """
    return apply("add", x, y)


def sub(x: Value | float, y: Value | float) -> Value:
    """Return x − y.

    Examples
    --------
    >>> @co.epilogue
    ... def centred(acc, mean: co.Col):
    ...     return co.e.sub(acc, mean)  # or acc - mean
    """
    return apply("sub", x, y)


def mul(x: Value | float, y: Value | float) -> Value:
    """Return x · y.

    Examples
    --------
    >>> @co.epilogue
    ... def scaled(acc, scale: co.Scalar):
    ...     return co.e.mul(acc, scale)  # or acc * scale
    """
    return apply("mul", x, y)


def div(x: Value | float, y: Value | float) -> Value:
    """Return x / y.

    Examples
    --------
    >>> @co.epilogue
    ... def normalised(acc, norm: co.Col):
    ...     return co.e.div(acc, norm)  # or acc / norm
    """
    return apply("div", x, y)


def neg(x: Value | float) -> Value:
    """Return −x.

    Examples
    --------
    >>> @co.epilogue
    ... def negated(acc):
    ...     return co.e.neg(acc)  # or -acc
    """
    return apply("neg", x)


def minimum(x: Value | float, y: Value | float) -> Value:
    """Return the lesser of x and y, NaN if either is NaN.

    Examples
    --------
    >>> @co.epilogue
    ... def at_most_six(acc):
    ...     return co.e.minimum(acc, 6.0)
    """
    return apply("minimum", x, y)


def maximum(x: Value | float, y: Value | float) -> Value:
    """Return the greater of x and y, NaN if either is NaN.

    Examples
    --------
    >>> @co.epilogue
    ... def greater(acc, other: co.Tile):
    ...     return co.e.maximum(acc, other)
    """
    return apply("maximum", x, y)


def clamp(x: Value | float, min: Value | float | None = None, max: Value | float | None = None) -> Value:
    """Return minimum(maximum(x, min), max). A bound of None is left out. NaN stays NaN.

    Raises
    ------
    EpilogueError
        If both bounds are None.

    Examples
    --------
    >>> @co.epilogue
    ... def hard_tanh(acc, limit: co.Scalar):
    ...     return co.e.clamp(acc, min=-1.0, max=limit)
    """
    if min is not None and max is not None:
        return minimum(maximum(x, min), max)
    if min is not None:
        return maximum(x, min)
    if max is not None:
        return minimum(x, max)
    raise error("clamp", "co.clamp needs min, max or both")


def abs(x: Value | float) -> Value:
    """Return the absolute value of x.

    Examples
    --------
    >>> @co.epilogue
    ... def magnitude(acc):
    ...     return co.e.abs(acc)  # or abs(acc)
    """
    return apply("abs", x)


def square(x: Value | float) -> Value:
    """Return x · x.

    Examples
    --------
    >>> @co.epilogue
    ... def squared_relu(acc):
    ...     return co.e.square(co.e.relu(acc))
    """
    return apply("square", x)


def sqrt(x: Value | float) -> Value:
    """Return √x.

    Examples
    --------
    >>> @co.epilogue
    ... def root(acc):
    ...     return co.e.sqrt(co.e.maximum(acc, 0.0))
    """
    return apply("sqrt", x)


def rsqrt(x: Value | float) -> Value:
    """Return 1 / √x.

    Examples
    --------
    >>> @co.epilogue
    ... def normalised(acc, variance: co.Col):
    ...     return acc * co.e.rsqrt(variance + 1e-6)
    """
    return apply("rsqrt", x)


def sign(x: Value | float) -> Value:
    """Return 1 if x > 0, −1 if x < 0, else 0, also for NaN, as in PyTorch.

    Examples
    --------
    >>> @co.epilogue
    ... def signs(acc):
    ...     return co.e.sign(acc)
    """
    return apply("sign", x)


def reciprocal(x: Value | float) -> Value:
    """Return 1 / x.

    Examples
    --------
    >>> @co.epilogue
    ... def inverted(acc):
    ...     return co.e.reciprocal(acc)
    """
    return apply("reciprocal", x)


def pow(x: Value | float, y: Value | float) -> Value:
    """Return x to the power of y. Written x ** y as well.

    If y is one of the Python numbers 2, 3, 0.5, −0.5, −1 and −2, it is computed by products, a root or a reciprocal, as
    in PyTorch.

    Examples
    --------
    >>> @co.epilogue
    ... def cubed(acc, exponent: co.Scalar):
    ...     return co.e.pow(co.e.abs(acc), exponent) + acc**3
    """
    return apply_power(x, y)
