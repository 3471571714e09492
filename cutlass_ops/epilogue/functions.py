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
    """Return x + y.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row):
    ...     return co.e.add(acc, bias)  # or acc + bias
    """
    return apply("add", x, y)


def sub(x: Value | float, y: Value | float) -> Value:
    """Return x − y.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def centred(acc, mean: co.Col):
    ...     return co.e.sub(acc, mean)  # or acc - mean
    """
    return apply("sub", x, y)


def mul(x: Value | float, y: Value | float) -> Value:
    """Return x · y.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def scaled(acc, scale: co.Scalar):
    ...     return co.e.mul(acc, scale)  # or acc * scale
    """
    return apply("mul", x, y)


def div(x: Value | float, y: Value | float) -> Value:
    """Return x / y.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def normalised(acc, norm: co.Col):
    ...     return co.e.div(acc, norm)  # or acc / norm
    """
    return apply("div", x, y)


def neg(x: Value | float) -> Value:
    """Return −x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def negated(acc):
    ...     return co.e.neg(acc)  # or -acc
    """
    return apply("neg", x)


def minimum(x: Value | float, y: Value | float) -> Value:
    """Return the lesser of x and y, NaN if either is NaN.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def at_most_six(acc):
    ...     return co.e.minimum(acc, 6.0)
    """
    return apply("minimum", x, y)


def maximum(x: Value | float, y: Value | float) -> Value:
    """Return the greater of x and y, NaN if either is NaN.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def greater(acc, other: co.Tile):
    ...     return co.e.maximum(acc, other)
    """
    return apply("maximum", x, y)


def clamp(x: Value | float, min: Value | float | None = None, max: Value | float | None = None) -> Value:
    """Return minimum(maximum(x, min), max), leaving out a bound that is None; NaN stays NaN.

    Raises
    ------
    EpilogueError
        If both bounds are None; as for :func:`maximum` otherwise.

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
    """Return the magnitude of x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def magnitude(acc):
    ...     return co.e.abs(acc)  # or abs(acc)
    """
    return apply("abs", x)


def square(x: Value | float) -> Value:
    """Return x · x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def squared_relu(acc):
    ...     return co.e.square(co.e.relu(acc))
    """
    return apply("square", x)


def sqrt(x: Value | float) -> Value:
    """Return √x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def root(acc):
    ...     return co.e.sqrt(co.e.maximum(acc, 0.0))
    """
    return apply("sqrt", x)


def rsqrt(x: Value | float) -> Value:
    """Return 1 / √x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def normalised(acc, variance: co.Col):
    ...     return acc * co.e.rsqrt(variance + 1e-6)
    """
    return apply("rsqrt", x)


def exp(x: Value | float) -> Value:
    """Return eˣ.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def exponential(acc, greatest: co.Col):
    ...     return co.e.exp(acc - greatest)
    """
    return apply("exp", x)


def sin(x: Value | float) -> Value:
    """Return the sine of x, in radians: within 1e-6 of it for the FP32 value x, of at most 2¹⁸ turns.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def turned(acc, angle: co.Row):
    ...     return acc * co.e.sin(angle)
    """
    return apply("sin", x)


def cos(x: Value | float) -> Value:
    """Return the cosine of x, in radians: within 1e-6 of it for the FP32 value x, of at most 2¹⁸ turns.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def turned(acc, angle: co.Row):
    ...     return acc * co.e.cos(angle)
    """
    return apply("cos", x)


def tanh(x: Value | float) -> Value:
    """Return the hyperbolic tangent of x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def soft_capped(acc):
    ...     return 30.0 * co.e.tanh(acc / 30.0)
    """
    return apply("tanh", x)


def sigmoid(x: Value | float) -> Value:
    """Return 1 / (1 + e⁻ˣ).

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def gate(acc, bias: co.Row):
    ...     return co.e.sigmoid(acc + bias)
    """
    return apply("sigmoid", x)


def relu(x: Value | float) -> Value:
    """Return 0 where x < 0, else x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_relu(acc, bias: co.Row):
    ...     return co.e.relu(acc + bias)
    >>> a, b = torch.ones(1, 8).bfloat16(), torch.ones(8, 2).bfloat16()
    >>> co.gemm(a, b, epilogue=bias_relu, bias=torch.tensor([1.0, -9.0]).bfloat16()).tolist()
    [[9.0, 0.0]]
    """
    return apply("relu", x)


def leaky_relu(x: Value | float, negative_slope: Value | float = 0.01) -> Value:
    """Return x where x > 0, else x · negative_slope.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def leaky(acc):
    ...     return co.e.leaky_relu(acc, negative_slope=0.2)
    """
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
        If ``approximate`` is anything else; as for :func:`relu` otherwise.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_gelu(acc, bias: co.Row):
    ...     return co.e.gelu(acc + bias, approximate="tanh")
    """
    ops = {"none": "gelu", "tanh": "gelu_tanh"}
    if approximate not in ops:
        raise error("gelu", f"co.gelu knows approximate='none' and approximate='tanh', not {approximate!r}")
    return apply(ops[approximate], x)


def silu(x: Value | float) -> Value:
    """Return x / (1 + e⁻ˣ).

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def swiglu(acc, up: co.Product):
    ...     return co.e.silu(acc) * up
    """
    return apply("silu", x)


def hardswish(x: Value | float) -> Value:
    """Return x · min(max(x + 3, 0), 6) / 6.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_hardswish(acc, bias: co.Row):
    ...     return co.e.hardswish(acc + bias)
    """
    return apply("hardswish", x)


def mean_of_a() -> Value:
    """Return the mean over K of A's row: one FP32 value for each row of D, gathered by the kernel.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function.

    Examples
    --------
    >>> @co.epilogue
    ... def centred(acc, column_sum: co.Row):
    ...     return acc - co.e.mean_of_a() * column_sum
    >>> a, b = torch.tensor([[1.0, 3.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=centred, column_sum=torch.ones(2)).tolist()
    [[-1.0, 1.0]]
    """
    return apply("mean_of_a")


def mean_square_of_a() -> Value:
    """Return the mean over K of the squares of A's row: one FP32 value for each row of D, gathered by the kernel.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function.

    Examples
    --------
    >>> @co.epilogue
    ... def rms_normed(acc, eps: co.Scalar):
    ...     return acc * co.e.rsqrt(co.e.mean_square_of_a() + eps)
    >>> a, b = torch.tensor([[2.0, -2.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=rms_normed, eps=0.0).tolist()
    [[1.0, -1.0]]
    """
    return apply("mean_square_of_a")


def cast(x: Value | float, dtype: str | DType) -> Value:
    """Return x rounded to a dtype, ``"bf16"`` or ``"f16"``, to nearest even; arithmetic goes on in FP32.

    Raises
    ------
    EpilogueError
        If there is no such dtype; as for :func:`relu` otherwise.

    Examples
    --------
    >>> @co.epilogue
    ... def rounded_first(acc, bias: co.Row):
    ...     return co.e.relu(co.e.cast(acc, "bf16") + bias)
    """
    return apply_cast(x, dtype)


def swap_pairs(x: Value | float) -> Value:
    """Return x of the other column of a pair: columns 0 and 1 of D are one, 2 and 3 the next. N must be even.

    With it a rotary embedding of neighbouring columns is an epilogue: ``x * cos(angle) + swap_pairs(x) * sin(angle)``,
    whose angle is negative in even columns.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def rotary(acc, position: co.Col, frequency: co.Row):
    ...     angle = position * frequency
    ...     return acc * co.e.cos(angle) + co.e.swap_pairs(acc) * co.e.sin(angle)
    """
    return apply("swap_pairs", x)


def sum(x: Value | float, dim: int) -> Reduction:
    """Return the sum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), shape (N,).

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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
