"""Activations of neural networks."""

from __future__ import annotations

from cutlass_ops.epilogue.functions.conditions import where
from cutlass_ops.epilogue.functions.transcendental import exp, log1p
from cutlass_ops.epilogue.values import Value, apply, apply_float, error, shown


def sigmoid(x: Value | float) -> Value:
    """Return 1 / (1 + e⁻ˣ).

    Examples
    --------
    >>> @co.epilogue
    ... def gate(acc, bias: co.Row):
    ...     return co.e.sigmoid(acc + bias)
    """
    return apply("sigmoid", x)


def relu(x: Value | float) -> Value:
    """Return 0 where x < 0, else x.

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
        ``"none"`` for x/2 · (1 + erf(x / √2)), ``"tanh"`` for the approximation by tanh, as in PyTorch.

    Raises
    ------
    EpilogueError
        If ``approximate`` is anything else.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_gelu(acc, bias: co.Row):
    ...     return co.e.gelu(acc + bias, approximate="tanh")
    """
    ops = {"none": "gelu", "tanh": "gelu_tanh"}
    if not isinstance(approximate, str) or approximate not in ops:
        raise error("gelu", f"approximate is {shown(approximate)}: use 'none' or 'tanh'")
    return apply(ops[approximate], x)


def silu(x: Value | float) -> Value:
    """Return x / (1 + e⁻ˣ).

    Examples
    --------
    >>> @co.epilogue
    ... def swiglu(acc, up: co.Product):
    ...     return co.e.silu(acc) * up
    """
    return apply("silu", x)


def hardswish(x: Value | float) -> Value:
    """Return x · min(max(x + 3, 0), 6) / 6.

    Examples
    --------
    >>> @co.epilogue
    ... def bias_hardswish(acc, bias: co.Row):
    ...     return co.e.hardswish(acc + bias)
    """
    return apply("hardswish", x)


def mish(x: Value | float) -> Value:
    """Return x · tanh(ln(1 + eˣ)).

    Examples
    --------
    >>> @co.epilogue
    ... def activated(acc):
    ...     return co.e.mish(acc)
    """
    return apply("mish", x)


def softplus(x: Value | float, beta: float = 1.0, threshold: float = 20.0) -> Value:
    """Return ln(1 + eˣᵇ) / b, where b is beta; x itself where x · b is above the threshold.

    Examples
    --------
    >>> @co.epilogue
    ... def softened(acc):
    ...     return co.e.softplus(acc) + co.e.softplus(acc, beta=2.0)
    """
    number = apply_float(x)
    if isinstance(beta, Value) or isinstance(threshold, Value):
        raise error("softplus", "co.softplus takes Python numbers for beta and threshold: use co.softplus(x * b) / b")
    for each in (beta, threshold):
        apply_float(each)  # what is no number at all is an error
    if (beta, threshold) == (1.0, 20.0):
        return apply("softplus", number)
    scaled = number * beta
    return where(scaled > threshold, number, log1p(exp(scaled)) / beta)


def elu(x: Value | float, alpha: Value | float = 1.0) -> Value:
    """Return x where x > 0, else alpha · (eˣ − 1).

    Examples
    --------
    >>> @co.epilogue
    ... def activated(acc, bias: co.Row):
    ...     return co.e.elu(acc + bias, alpha=0.5)
    """
    return apply("elu", x, alpha)
