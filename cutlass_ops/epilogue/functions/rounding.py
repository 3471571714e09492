"""Rounding, and the other value of a pair."""

from __future__ import annotations

from cutlass_ops.base.dtypes import DType
from cutlass_ops.epilogue import values
from cutlass_ops.epilogue.values import Quantized, Value, apply, apply_cast


def floor(x: Value | float) -> Value:
    """Return the largest integer that is not above x.

    Examples
    --------
    >>> @co.epilogue
    ... def floored(acc):
    ...     return co.e.floor(acc)
    """
    return apply("floor", x)


def ceil(x: Value | float) -> Value:
    """Return the smallest integer that is not below x.

    Examples
    --------
    >>> @co.epilogue
    ... def raised(acc):
    ...     return co.e.ceil(acc)
    """
    return apply("ceil", x)


def round(x: Value | float) -> Value:
    """Return the nearest integer, ties to even.

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
    """Return x rounded toward 0 to an integer.

    Examples
    --------
    >>> @co.epilogue
    ... def cut(acc):
    ...     return co.e.trunc(acc)
    """
    return apply("trunc", x)


def cast(x: Value | float, dtype: str | DType) -> Value:
    """Return x rounded to a dtype, to nearest even. The result is FP32 again.

    The dtype is ``"bf16"``, ``"f16"``, ``"e4m3"`` or ``"e5m2"``. The last two are FP8 and saturate: values beyond the
    largest finite value, 448 or 57344, become that value, infinities included. NaN stays NaN.

    Raises
    ------
    EpilogueError
        If there is no such dtype.

    Examples
    --------
    >>> @co.epilogue
    ... def rounded_first(acc, bias: co.Row):
    ...     return co.e.relu(co.e.cast(acc, "bf16") + bias)
    >>> @co.epilogue
    ... def error_of_fp8(acc):
    ...     return acc - co.e.cast(acc, "e4m3")
    >>> a, b = torch.tensor([[17.0, 500.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> co.gemm(a, b, epilogue=error_of_fp8).tolist()
    [[1.0, 52.0]]
    """
    return apply_cast(x, dtype)


def quantize(x: Value | float, dtype: str | DType, block: int = 128) -> Quantized:
    """Return x quantised to FP8, as D, with one scale for every 128 columns of each row as a second output.

    The outputs are ``"d"``, (M, N), and ``"d_scale"``, (M, ceil(N / 128)) in FP32, M-major with lines padded to 16
    bytes: a :class:`cutlass_ops.Scaled` of both is an operand of the next GEMM. Let m be the largest absolute value of
    a block, and at least 2⁻¹¹⁰. For ``"e4m3"``, the scale is m / 448 and D is x · (448 / m); for ``"e5m2"`` with 57344
    in place of 448. D is rounded as by :func:`cast`. A NaN makes the scale of its block NaN, and an infinity makes it
    infinite. N must be a multiple of 16. It needs Hopper.

    ``cutlass_ops.Scaled.quantize`` does the same to a tensor.

    Parameters
    ----------
    x : Value
        The value to store.
    dtype : str or DType
        ``"e4m3"`` or ``"e5m2"``.
    block : int
        Number of columns that share a scale: 128.

    Returns
    -------
    Quantized
        To be returned as D.

    Raises
    ------
    EpilogueError
        If the type or the block is not supported.

    Examples
    --------
    >>> @co.epilogue
    ... def swiglu(acc, up: co.Product):
    ...     return co.e.quantize(co.e.silu(acc) * up, "e4m3")
    >>> x, gate, up = torch.randn(4, 64).bfloat16(), torch.randn(384, 64).bfloat16(), torch.randn(384, 64).bfloat16()
    >>> h = co.gemm(x, gate.t(), epilogue=swiglu, up=up.t())
    >>> h.d.dtype, h.d.shape, h.d_scale.shape
    (torch.float8_e4m3fn, torch.Size([4, 384]), torch.Size([4, 3]))

    The next GEMM takes both:

    >>> down, scale = torch.randn(16, 384).to(torch.float8_e4m3fn), torch.rand(1, 3)
    >>> co.gemm(co.Scaled(*h), co.Scaled(down.t(), scale)).shape
    torch.Size([4, 16])
    """
    return values.quantize(x, dtype, block)


def swap_pairs(x: Value | float) -> Value:
    """Return x of the other column of a pair. Columns 0 and 1 of D are one pair, 2 and 3 the next. N must be even.

    It makes a rotary embedding of neighbouring columns an epilogue: ``x * cos(angle) + swap_pairs(x) * sin(angle)``,
    with negative angles in even columns.

    Examples
    --------
    >>> @co.epilogue
    ... def rotary(acc, position: co.Col, frequency: co.Row):
    ...     angle = position * frequency
    ...     return acc * co.e.cos(angle) + co.e.swap_pairs(acc) * co.e.sin(angle)
    """
    return apply("swap_pairs", x)
