"""The operations of an epilogue, and what it may gather from A, in tables.

Operations take and give FP32 values. :mod:`cutlass_ops.kinds.cpp` spells them in C++, and
:mod:`cutlass_ops.run.reference` holds the same table for PyTorch.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple


class OpInfo(NamedTuple):
    """One operation.

    Attributes
    ----------
    arity : int
        Number of arguments.
    cpp : str
        A C++ operator (``"+"``), or the qualified name of a device function on floats; empty for :data:`SWAP_PAIRS`.
    formula : str
        What it computes, of arguments x and y.
    torch : str
        The equivalent PyTorch expression.
    """

    arity: int
    cpp: str
    formula: str
    torch: str


# The one operation that takes a value of another element of D: that of the column beside this one.
SWAP_PAIRS = "swap_pairs"

OPS: dict[str, OpInfo] = {
    "add": OpInfo(2, "+", "x + y", "torch.add(x, y)"),
    "sub": OpInfo(2, "-", "x − y", "torch.sub(x, y)"),
    "mul": OpInfo(2, "*", "x · y", "torch.mul(x, y)"),
    "div": OpInfo(2, "/", "x / y", "torch.div(x, y)"),
    "neg": OpInfo(1, "-", "−x", "torch.neg(x)"),
    "minimum": OpInfo(2, "cutlass_ops::minimum", "the lesser of x and y; NaN if either is", "torch.minimum(x, y)"),
    "maximum": OpInfo(2, "cutlass_ops::maximum", "the greater of x and y; NaN if either is", "torch.maximum(x, y)"),
    "abs": OpInfo(1, "cutlass_ops::abs", "x without its sign", "torch.abs(x)"),
    "square": OpInfo(1, "cutlass_ops::square", "x · x", "torch.square(x)"),
    "sqrt": OpInfo(1, "cutlass_ops::sqrt", "√x", "torch.sqrt(x)"),
    "rsqrt": OpInfo(1, "cutlass_ops::rsqrt", "1 / √x", "torch.rsqrt(x)"),
    "exp": OpInfo(1, "cutlass_ops::exp", "eˣ", "torch.exp(x)"),
    "sin": OpInfo(1, "cutlass_ops::sin", "sin x, of radians", "torch.sin(x)"),
    "cos": OpInfo(1, "cutlass_ops::cos", "cos x, of radians", "torch.cos(x)"),
    "tanh": OpInfo(1, "cutlass_ops::tanh", "tanh x", "torch.tanh(x)"),
    "sigmoid": OpInfo(1, "cutlass_ops::sigmoid", "1 / (1 + e⁻ˣ)", "torch.sigmoid(x)"),
    "relu": OpInfo(1, "cutlass_ops::relu", "0 if x < 0, else x (so NaN stays NaN)", "torch.relu(x)"),
    "leaky_relu": OpInfo(2, "cutlass_ops::leaky_relu", "x if x > 0, else x · y", "F.leaky_relu(x, y)"),
    "gelu": OpInfo(1, "cutlass_ops::gelu", "x/2 · (1 + erf(x / √2))", "F.gelu(x)"),
    "gelu_tanh": OpInfo(
        1, "cutlass_ops::gelu_tanh", "x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))", 'F.gelu(x, approximate="tanh")'
    ),
    "silu": OpInfo(1, "cutlass_ops::silu", "x / (1 + e⁻ˣ)", "F.silu(x)"),
    "hardswish": OpInfo(1, "cutlass_ops::hardswish", "x · min(max(x + 3, 0), 6) / 6", "F.hardswish(x)"),
    "cast": OpInfo(1, "cutlass_ops::cast", "x rounded to the dtype, to nearest even", "x.to(dtype).to(x.dtype)"),
    SWAP_PAIRS: OpInfo(
        1, "", "x of column n + 1 where n is even, of n − 1 where n is odd", "x.reshape(-1, 2).flip(1).reshape(x.shape)"
    ),
}


class GatheredInfo(NamedTuple):
    """One value for each row of D that a kernel gathers from A.

    Attributes
    ----------
    formula : str
        What it is, of A's row a.
    torch : str
        The equivalent PyTorch expression.
    """

    formula: str
    torch: str


# Leaves of a graph, as the accumulator is: FP32, and 0 where K is 0.
GATHERED: dict[str, GatheredInfo] = {
    "mean_of_a": GatheredInfo("Σ a / K over A's row", "a.float().mean(1)"),
    "mean_square_of_a": GatheredInfo("Σ a · a / K over A's row", "a.float().square().mean(1)"),
}


def to_fp32(value: float) -> float:
    """Round to the nearest FP32 value, ties to even; beyond FP32's range that is an infinity."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return rounded
