"""The functions of the epilogue language, for use inside an ``@epilogue`` function.

Arguments are traced values or Python numbers, results are traced values. Formulas and PyTorch equivalents stand in
:data:`cutlass_ops.epilogue.operations.OPS` and docs/epilogues.md; NaN and infinities behave as in PyTorch.
"""

from __future__ import annotations

from cutlass_ops.base.dtypes import DType
from cutlass_ops.epilogue.values import Reduction, Value, apply, apply_cast, error, reduce

__all__ = [
    "abs",
    "add",
    "cast",
    "clamp",
    "cos",
    "div",
    "exp",
    "gelu",
    "hardswish",
    "leaky_relu",
    "max",
    "maximum",
    "mean_of_a",
    "mean_square_of_a",
    "minimum",
    "mul",
    "neg",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "sqrt",
    "square",
    "sub",
    "sum",
    "sum_square",
    "swap_pairs",
    "tanh",
]


def add(x: Value | float, y: Value | float) -> Value:
    """Return x + y."""
    return apply("add", x, y)


def sub(x: Value | float, y: Value | float) -> Value:
    """Return x − y."""
    return apply("sub", x, y)


def mul(x: Value | float, y: Value | float) -> Value:
    """Return x · y."""
    return apply("mul", x, y)


def div(x: Value | float, y: Value | float) -> Value:
    """Return x / y."""
    return apply("div", x, y)


def neg(x: Value | float) -> Value:
    """Return −x."""
    return apply("neg", x)


def minimum(x: Value | float, y: Value | float) -> Value:
    """Return the lesser of x and y, NaN if either is NaN."""
    return apply("minimum", x, y)


def maximum(x: Value | float, y: Value | float) -> Value:
    """Return the greater of x and y, NaN if either is NaN."""
    return apply("maximum", x, y)


def clamp(x: Value | float, min: Value | float | None = None, max: Value | float | None = None) -> Value:
    """Return minimum(maximum(x, min), max), leaving out a bound that is None; NaN stays NaN.

    Raises
    ------
    EpilogueError
        If both bounds are None.
    """
    if min is not None and max is not None:
        return minimum(maximum(x, min), max)
    if min is not None:
        return maximum(x, min)
    if max is not None:
        return minimum(x, max)
    raise error("clamp", "co.clamp needs min, max or both")


def abs(x: Value | float) -> Value:
    """Return the magnitude of x."""
    return apply("abs", x)


def square(x: Value | float) -> Value:
    """Return x · x."""
    return apply("square", x)


def sqrt(x: Value | float) -> Value:
    """Return √x."""
    return apply("sqrt", x)


def rsqrt(x: Value | float) -> Value:
    """Return 1 / √x."""
    return apply("rsqrt", x)


def exp(x: Value | float) -> Value:
    """Return eˣ."""
    return apply("exp", x)


def sin(x: Value | float) -> Value:
    """Return the sine of x, in radians: within 1e-6 of it for the FP32 value x, of at most 2¹⁸ turns."""
    return apply("sin", x)


def cos(x: Value | float) -> Value:
    """Return the cosine of x, in radians: within 1e-6 of it for the FP32 value x, of at most 2¹⁸ turns."""
    return apply("cos", x)


def tanh(x: Value | float) -> Value:
    """Return the hyperbolic tangent of x."""
    return apply("tanh", x)


def sigmoid(x: Value | float) -> Value:
    """Return 1 / (1 + e⁻ˣ)."""
    return apply("sigmoid", x)


def relu(x: Value | float) -> Value:
    """Return 0 where x < 0, else x."""
    return apply("relu", x)


def leaky_relu(x: Value | float, negative_slope: Value | float = 0.01) -> Value:
    """Return x where x > 0, else x · negative_slope."""
    return apply("leaky_relu", x, negative_slope)


def gelu(x: Value | float, approximate: str = "none") -> Value:
    """Return the Gaussian error linear unit of x.

    Parameters
    ----------
    x : value or number
        The argument.
    approximate : str
        ``"none"`` for x/2 · (1 + erf(x / √2)), ``"tanh"`` for its approximation by tanh, as in PyTorch.

    Raises
    ------
    EpilogueError
        If ``approximate`` is anything else.
    """
    ops = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in ops:
        raise error("gelu", f"co.gelu knows approximate='none' and approximate='tanh', not {approximate!r}")
    return apply(ops[approximate], x)


def silu(x: Value | float) -> Value:
    """Return x / (1 + e⁻ˣ)."""
    return apply("silu", x)


def hardswish(x: Value | float) -> Value:
    """Return x · min(max(x + 3, 0), 6) / 6."""
    return apply("hardswish", x)


def mean_of_a() -> Value:
    """Return the mean over K of A's row: one FP32 value for each row of D, gathered by the kernel."""
    return apply("mean_of_a")


def mean_square_of_a() -> Value:
    """Return the mean over K of the squares of A's row: one FP32 value for each row of D, gathered by the kernel."""
    return apply("mean_square_of_a")


def cast(x: Value | float, dtype: str | DType) -> Value:
    """Return x rounded to a dtype, ``"bf16"`` or ``"f16"``, to nearest even; arithmetic goes on in FP32.

    Raises
    ------
    EpilogueError
        If there is no such dtype.
    """
    return apply_cast(x, dtype)


def swap_pairs(x: Value | float) -> Value:
    """Return x of the other column of a pair: columns 0 and 1 of D are one, 2 and 3 the next. N must be even.

    With it a rotary embedding of neighbouring columns is an epilogue: ``x * cos(angle) + swap_pairs(x) * sin(angle)``,
    whose angle is negative in even columns.
    """
    return apply("swap_pairs", x)


def sum(x: Value | float, dim: int) -> Reduction:
    """Return the sum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), shape (N,)."""
    return reduce("sum", x, dim)


def sum_square(x: Value | float, dim: int) -> Reduction:
    """Return the sum of x · x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,)."""
    return reduce("sum_square", x, dim)


def max(x: Value | float, dim: int) -> Reduction:
    """Return the maximum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,)."""
    return reduce("max", x, dim)
