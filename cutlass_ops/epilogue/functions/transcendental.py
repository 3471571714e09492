"""Exponentials, logarithms and trigonometric functions."""

from __future__ import annotations

from cutlass_ops.epilogue.values import Value, apply


def exp(x: Value | float) -> Value:
    """Return eˣ.

    Examples
    --------
    >>> @co.epilogue
    ... def exponential(acc, greatest: co.Col):
    ...     return co.e.exp(acc - greatest)
    """
    return apply("exp", x)


def sin(x: Value | float) -> Value:
    """Return the sine of x, in radians: within 1e-6 of it for the FP32 value x, of at most 2¹⁸ turns.

    Examples
    --------
    >>> @co.epilogue
    ... def turned(acc, angle: co.Row):
    ...     return acc * co.e.sin(angle)
    """
    return apply("sin", x)


def cos(x: Value | float) -> Value:
    """Return the cosine of x, in radians: within 1e-6 of it for the FP32 value x, of at most 2¹⁸ turns.

    Examples
    --------
    >>> @co.epilogue
    ... def turned(acc, angle: co.Row):
    ...     return acc * co.e.cos(angle)
    """
    return apply("cos", x)


def tanh(x: Value | float) -> Value:
    """Return the hyperbolic tangent of x.

    Examples
    --------
    >>> @co.epilogue
    ... def soft_capped(acc):
    ...     return 30.0 * co.e.tanh(acc / 30.0)
    """
    return apply("tanh", x)


def exp2(x: Value | float) -> Value:
    """Return 2 to the power of x.

    Examples
    --------
    >>> @co.epilogue
    ... def doubled(acc):
    ...     return co.e.exp2(acc)
    """
    return apply("exp2", x)


def expm1(x: Value | float) -> Value:
    """Return eˣ − 1, accurate also for small x.

    Examples
    --------
    >>> @co.epilogue
    ... def grown(acc):
    ...     return co.e.expm1(acc)
    """
    return apply("expm1", x)


def log(x: Value | float) -> Value:
    """Return the natural logarithm of x: −∞ at 0, NaN below.

    Examples
    --------
    >>> @co.epilogue
    ... def logarithm(acc):
    ...     return co.e.log(acc)
    """
    return apply("log", x)


def log2(x: Value | float) -> Value:
    """Return the logarithm of x to base 2: −∞ at 0, NaN below.

    Examples
    --------
    >>> @co.epilogue
    ... def bits(acc):
    ...     return co.e.log2(acc)
    """
    return apply("log2", x)


def log1p(x: Value | float) -> Value:
    """Return the natural logarithm of 1 + x, accurate also for small x: −∞ at −1, NaN below.

    Examples
    --------
    >>> @co.epilogue
    ... def logarithm(acc):
    ...     return co.e.log1p(acc)
    """
    return apply("log1p", x)


def erf(x: Value | float) -> Value:
    """Return the error function of x.

    Examples
    --------
    >>> @co.epilogue
    ... def error_function(acc):
    ...     return co.e.erf(acc)
    """
    return apply("erf", x)


def ndtr(x: Value | float) -> Value:
    """Return the cumulative distribution function of the normal distribution at x, as ``torch.special.ndtr`` does.

    ``x * ndtr(x)`` is GELU. Unlike 0.5 (1 + erf(x / √2)), it has no cancellation at negative x.

    Examples
    --------
    >>> @co.epilogue
    ... def distribution(acc):
    ...     return co.e.ndtr(acc)
    """
    return apply("ndtr", x)
