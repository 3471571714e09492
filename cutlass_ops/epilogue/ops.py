"""The operations of an epilogue and what it may gather from A, in tables, and how operations are spelled in C++.

Operations take and give FP32 values. The functions in namespace ``cutlass_ops`` are defined in
``templates/include/cutlass_ops/epilogue_math.h``, or in the header that :data:`HEADERS` names;
:mod:`cutlass_ops.reference` holds the same table for PyTorch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cutlass_ops.dtypes import dtype

if TYPE_CHECKING:
    from cutlass_ops.epilogue.graph import Node


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

# Where functions are defined that few epilogues need.
HEADERS: dict[str, str] = {"sin": "cutlass_ops/trigonometry.h", "cos": "cutlass_ops/trigonometry.h"}


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


def float_literal(value: float) -> str:
    """Spell an FP32 value in C++ with the fewest decimal digits that a compiler reads back exactly.

    Raises
    ------
    ValueError
        If the value is not exactly an FP32 value.
    """
    if math.isnan(value):
        return "cutlass_ops::nan()"
    if math.isinf(value):
        return "cutlass_ops::infinity()" if value > 0 else "(-cutlass_ops::infinity())"
    if to_fp32(value) != value:
        raise ValueError(f"{value!r} is not an FP32 value: round it with to_fp32")
    text = next(t for t in (f"{value:.{digits}g}" for digits in range(1, 18)) if _reads_back(t, value))
    if "." not in text and "e" not in text:
        text += ".0"
    return f"({text}f)" if text.startswith("-") else f"{text}f"


def _reads_back(text: str, value: float) -> bool:
    # A C++ compiler rounds the decimal to FP32 once, this test twice, by way of FP64. Both agree where the FP64
    # neighbours round to the same FP32 value as well.
    near = float(text)
    return all(to_fp32(x) == value for x in (math.nextafter(near, -math.inf), near, math.nextafter(near, math.inf)))


def cpp_expression(node: Node, arg_names: Sequence[str]) -> str:
    """Spell one operation or constant as a C++ expression of type float.

    Parameters
    ----------
    node : Node
        A constant or an operation of :data:`OPS`; the other leaves are the renderer's to name.
    arg_names : sequence of str
        C++ expressions of the arguments, each an identifier or bracketed.

    Raises
    ------
    ValueError
        If the node is neither, or has another number of arguments.
    """
    if node.op == "const" and isinstance(node.attr, float):
        return float_literal(node.attr)
    if node.op not in OPS or node.op == SWAP_PAIRS:
        raise ValueError(f"{node.op!r} is not an operation on an element: its value has a name in the kernel")
    info = OPS[node.op]
    if len(arg_names) != info.arity:
        raise ValueError(f"{node.op} takes {info.arity} arguments, not {len(arg_names)}")
    if node.op == "cast":
        return f"{info.cpp}<{dtype(str(node.attr)).cpp}>({arg_names[0]})"
    if info.cpp.startswith("cutlass_ops::"):
        return f"{info.cpp}({', '.join(arg_names)})"
    if info.arity == 1:
        return f"({info.cpp}{arg_names[0]})"
    return f"({arg_names[0]} {info.cpp} {arg_names[1]})"
