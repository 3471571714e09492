"""The functions of the epilogue language, for use inside an ``@epilogue`` function.

Arguments are traced values or Python numbers, results are traced values. Formulas and PyTorch equivalents stand in
:data:`cutlass_ops.epilogue.operations.OPS` and docs/epilogues.md; NaN and infinities behave as in PyTorch.
"""

from __future__ import annotations

from cutlass_ops.base.dtypes import DType
from cutlass_ops.epilogue.values import Reduction, Value, apply, apply_cast, apply_float, apply_power, error, reduce

__all__ = [
    "abs",
    "add",
    "argmax",
    "argmin",
    "cast",
    "ceil",
    "clamp",
    "column_index",
    "cos",
    "div",
    "dropout_mask",
    "elu",
    "eq",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "ge",
    "gelu",
    "gt",
    "hardswish",
    "isnan",
    "le",
    "leaky_relu",
    "log",
    "log1p",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logsumexp",
    "lt",
    "max",
    "maximum",
    "mean_of_a",
    "mean_square_of_a",
    "min",
    "minimum",
    "mish",
    "mul",
    "ne",
    "neg",
    "pow",
    "reciprocal",
    "relu",
    "round",
    "row_index",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softplus",
    "sqrt",
    "square",
    "sub",
    "sum",
    "sum_square",
    "swap_pairs",
    "tanh",
    "to_float",
    "trunc",
    "uniform",
    "where",
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


def lt(x: Value | float, y: Value | float) -> Value:
    """Return whether x is less than y: false if either is NaN. Written x < y as well.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.lt(acc, 0.0), 0.1 * acc, acc)  # or acc < 0.0
    """
    return apply("lt", x, y)


def le(x: Value | float, y: Value | float) -> Value:
    """Return whether x is y or less: false if either is NaN. Written x <= y as well.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.le(acc, 0.0), 0.1 * acc, acc)  # or acc <= 0.0
    """
    return apply("le", x, y)


def gt(x: Value | float, y: Value | float) -> Value:
    """Return whether x is greater than y: false if either is NaN. Written x > y as well.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.gt(acc, 0.0), acc, 0.1 * acc)  # or acc > 0.0
    """
    return apply("gt", x, y)


def ge(x: Value | float, y: Value | float) -> Value:
    """Return whether x is y or greater: false if either is NaN. Written x >= y as well.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.ge(acc, 0.0), acc, 0.1 * acc)  # or acc >= 0.0
    """
    return apply("ge", x, y)


def eq(x: Value | float, y: Value | float) -> Value:
    """Return whether x equals y: false if either is NaN, and true for 0 and −0. Written x == y as well.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def compared(acc):
    ...     return co.e.where(co.e.eq(acc, 0.0), 1.0, acc)  # or acc == 0.0
    """
    return apply("eq", x, y)


def ne(x: Value | float, y: Value | float) -> Value:
    """Return whether x does not equal y: true if either is NaN. Written x != y as well.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

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
        Outside of an epilogue function, or if an argument is no truth value, as a comparison gives.

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
        Outside of an epilogue function, or if an argument is no truth value, as a comparison gives.

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
        Outside of an epilogue function, or if an argument is no truth value, as a comparison gives.

    Examples
    --------
    >>> @co.epilogue
    ... def marked(acc):
    ...     return co.e.where(co.e.logical_not(acc > 0.0), acc, 0.0)  # or ~(acc > 0.0)
    """
    return apply("logical_not", x)


def where(condition: Value, x: Value | float, y: Value | float) -> Value:
    """Return x where a condition is true, else y. The other one may be anything, NaN among it.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, if the condition is no truth value, as a comparison gives, or if another
        argument is neither a traced value nor a number.

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

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def cleaned(acc):
    ...     return co.e.where(co.e.isnan(acc), 0.0, acc)
    """
    return apply("isnan", x)


def to_float(x: Value | float) -> Value:
    """Return a truth value as 1 or 0, and an index as a number, rounded to FP32; a number stays what it is.

    Arithmetic and outputs do so by themselves.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

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


def sign(x: Value | float) -> Value:
    """Return 1 if x > 0, −1 if x < 0, else 0: so for NaN, as in PyTorch.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def signs(acc):
    ...     return co.e.sign(acc)
    """
    return apply("sign", x)


def floor(x: Value | float) -> Value:
    """Return the greatest whole number that is not above x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def floored(acc):
    ...     return co.e.floor(acc)
    """
    return apply("floor", x)


def ceil(x: Value | float) -> Value:
    """Return the least whole number that is not below x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def raised(acc):
    ...     return co.e.ceil(acc)
    """
    return apply("ceil", x)


def round(x: Value | float) -> Value:
    """Return the nearest whole number, ties to even.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def rounded(acc):
    ...     return co.e.round(acc)
    >>> a, b = torch.tensor([[-1.5, 2.5]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=rounded).tolist()
    [[-2.0, 2.0]]
    """
    return apply("round", x)


def trunc(x: Value | float) -> Value:
    """Return x without what follows the point: the whole number next to it on the way to 0.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def cut(acc):
    ...     return co.e.trunc(acc)
    """
    return apply("trunc", x)


def reciprocal(x: Value | float) -> Value:
    """Return 1 / x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def inverted(acc):
    ...     return co.e.reciprocal(acc)
    """
    return apply("reciprocal", x)


def pow(x: Value | float, y: Value | float) -> Value:
    """Return x to the power of y. Written x ** y as well.

    Where y is 2, 3, 0.5, −0.5, −1 or −2, a Python number, it is a product, a root or a reciprocal, as in PyTorch.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def cubed(acc, exponent: co.Scalar):
    ...     return co.e.pow(co.e.abs(acc), exponent) + acc**3
    """
    return apply_power(x, y)


def exp2(x: Value | float) -> Value:
    """Return 2 to the power of x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def doubled(acc):
    ...     return co.e.exp2(acc)
    """
    return apply("exp2", x)


def expm1(x: Value | float) -> Value:
    """Return e to the power of x, less 1: exact where x is small.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def grown(acc):
    ...     return co.e.expm1(acc)
    """
    return apply("expm1", x)


def log(x: Value | float) -> Value:
    """Return the natural logarithm of x: −∞ at 0, NaN below.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def logarithm(acc):
    ...     return co.e.log(acc)
    """
    return apply("log", x)


def log2(x: Value | float) -> Value:
    """Return the logarithm of x to base 2: −∞ at 0, NaN below.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def bits(acc):
    ...     return co.e.log2(acc)
    """
    return apply("log2", x)


def log1p(x: Value | float) -> Value:
    """Return the natural logarithm of 1 + x: exact where x is small, −∞ at −1, NaN below.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def logarithm(acc):
    ...     return co.e.log1p(acc)
    """
    return apply("log1p", x)


def erf(x: Value | float) -> Value:
    """Return the error function of x.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def error_function(acc):
    ...     return co.e.erf(acc)
    """
    return apply("erf", x)


def mish(x: Value | float) -> Value:
    """Return x · tanh(ln(1 + eˣ)).

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def activated(acc):
    ...     return co.e.mish(acc)
    """
    return apply("mish", x)


def softplus(x: Value | float, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """Return ln(1 + eˣᵇ) / b, where b is beta; x itself where x · b is above the threshold.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def softened(acc):
    ...     return co.e.softplus(acc) + co.e.softplus(acc, beta=2.0)
    """
    number = apply_float(x)
    if (beta, threshold) == (1.0, 20.0):
        return apply("softplus", number)
    scaled = number * beta
    return where(scaled > threshold, number, log1p(exp(scaled)) / beta)


def elu(x: Value | float, alpha: Value | float = 1.0) -> Value:
    """Return x where x > 0, else alpha · (eˣ − 1).

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if an argument is neither a traced value nor a number.

    Examples
    --------
    >>> @co.epilogue
    ... def activated(acc, bias: co.Row):
    ...     return co.e.elu(acc + bias, alpha=0.5)
    """
    return apply("elu", x, alpha)


def row_index() -> Value:
    """Return the row of D where a value is, from 0 on: a whole number of 32 bits.

    Leading dimensions of A are folded into its rows, and rows of all of them are counted. Indices add, subtract,
    multiply and compare as whole numbers, with each other and with Python's. Elsewhere they count as FP32 values.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function.

    Examples
    --------
    >>> @co.epilogue
    ... def causal(acc):
    ...     return co.e.where(co.e.column_index() <= co.e.row_index(), acc, 0.0)
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=causal).tolist()
    [[8.0, 0.0, 0.0], [8.0, 8.0, 0.0]]
    """
    return apply("row_index")


def column_index() -> Value:
    """Return the column of D where a value is, from 0 on: a whole number of 32 bits, as :func:`row_index` is.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function.

    Examples
    --------
    >>> @co.epilogue
    ... def sloped(acc, slope: co.Scalar):
    ...     return acc + slope * co.e.column_index()
    >>> a, b = torch.zeros(1, 8).bfloat16(), torch.zeros(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=sloped, slope=0.5).tolist()
    [[0.0, 0.5, 1.0]]
    """
    return apply("column_index")


def uniform(seed: Value | int, offset: Value | int = 0) -> Value:
    """Return a random number from 0 up to 1, without 1, for each element of D: a multiple of 2⁻²⁴.

    It is a word of Philox 4x32-10, of which the seed is the key, and the counter is the column and the row, each
    without bit 3, and the low and the high half of the offset. Bit 3 of the row and of the column choose the word. So
    it depends on the seed, the offset and the place alone. :func:`cutlass_ops.run.reference.uniform` gives the same
    bits.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if the seed or the offset is neither a parameter annotated
        :class:`cutlass_ops.Integer` nor a Python int of 64 bits.

    Examples
    --------
    >>> @co.epilogue
    ... def noisy(acc, seed: co.Integer):
    ...     return acc + co.e.uniform(seed)
    >>> a, b = torch.zeros(1, 8).bfloat16(), torch.zeros(8, 2).bfloat16()
    >>> co.gemm(a, b, epilogue=noisy, seed=1, out_dtype=torch.float32).tolist()
    [[...]]
    """
    return apply("uniform", seed, offset)


def dropout_mask(p: Value | float, seed: Value | int, offset: Value | int = 0) -> Value:
    """Return whether dropout keeps an element: whether :func:`uniform` is p or more, of which the probability is 1 − p.

    The mask is not that of torch.nn.functional.dropout for the same seed, which depends on how PyTorch launches its
    kernel.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if the seed or the offset is neither a parameter annotated
        :class:`cutlass_ops.Integer` nor a Python int of 64 bits.

    Examples
    --------
    >>> @co.epilogue
    ... def dropped(acc, residual: co.Tile, seed: co.Integer):
    ...     return co.e.where(co.e.dropout_mask(0.25, seed), acc / 0.75, 0.0) + residual
    >>> a, b = torch.ones(4, 8).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> d = co.gemm(a, b, epilogue=dropped, residual=torch.zeros(4, 4), seed=3, out_dtype=torch.float32)
    >>> sorted(set(d.flatten().tolist()))
    [0.0, 10.666666984558105]
    """
    return apply("ge", uniform(seed, offset), p)


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


def min(x: Value | float, dim: int) -> Reduction:
    """Return the minimum of x over each row of D (``dim=1``), shape (M,), or over each column (``dim=0``), (N,).

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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
    """Return where the maximum of x lies in each row of D (``dim=1``), shape (M,), or in each column (``dim=0``), (N,).

    It is the first of several that are greatest, and the first NaN if there is any. Over nothing it is −1. The dtype is
    INT32, where PyTorch gives INT64.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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
    """Return where the minimum of x lies in each row of D (``dim=1``), shape (M,), or in each column (``dim=0``), (N,).

    It is the first of several that are least, and the first NaN if there is any. Over nothing it is −1. The dtype is
    INT32, where PyTorch gives INT64.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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

    Nothing overflows: the maximum is kept beside the sum. It is what a cross-entropy needs of its logits.

    Raises
    ------
    EpilogueError
        Outside of an epilogue function, or if x is neither a traced value nor a number, or dim is neither 0 nor 1.

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
