"""The operations of an epilogue, and what it may gather from A, in tables.

Most operations take and give FP32 values; :class:`Type` lists what else there is. :mod:`cutlass_ops.kinds.cpp` spells
them in C++, and :mod:`cutlass_ops.operand.reference` holds the same table for PyTorch.
"""

from __future__ import annotations

import ctypes
import math
from enum import Enum
from typing import NamedTuple


class Type(str, Enum):
    """The type of a value. Only FP32 values are stored and reduced: the tracer converts what an epilogue returns.

    ``TRUTH`` is a truth value, which a comparison gives. ``INDEX`` is a whole number of 32 bits with a sign, which
    counts rows or columns. ``SEED`` is a whole number of 64 bits with a sign, which only a random number takes.
    """

    FLOAT = "float"
    TRUTH = "truth"
    INDEX = "index"
    SEED = "seed"


# Types of the arguments, and of the value.
Signature = tuple[tuple[Type, ...], Type]

_F, _T, _I, _S = Type.FLOAT, Type.TRUTH, Type.INDEX, Type.SEED
_ORDERS: tuple[Signature, ...] = (((_F, _F), _T), ((_I, _I), _T))
_EQUALS: tuple[Signature, ...] = (*_ORDERS, ((_T, _T), _T))
_BOTH: tuple[Signature, ...] = (((_T, _T), _T),)
_WHOLE: tuple[Signature, ...] = (((_F, _F), _F), ((_I, _I), _I))

_MORE = "cutlass_ops/functions.h"
_TURNS = "cutlass_ops/trigonometry.h"
_NORMAL = "cutlass_ops/normal.h"


class OpInfo(NamedTuple):
    """One operation."""

    arity: int  # number of arguments
    # A C++ operator (``"+"``), or the qualified name of a device function. Empty if a value needs more than those
    # of its arguments, as :data:`SWAP_PAIRS` does.
    cpp: str
    formula: str  # what it computes from x and y, or c, x and y
    torch: str  # the equivalent PyTorch expression
    # Where the device function is defined, if not in ``cutlass_ops/epilogue_math.h``. Only kernels that use it
    # include the header.
    header: str = ""
    typed: tuple[Signature, ...] = ()  # the types that it takes and gives, the usual ones first; empty if all are FP32
    # The gradient of each argument: an expression of g (the gradient of the result), r (the result), arguments by
    # the formula's names, numbers and operations. A part that occurs several times has a name. Ties and kinks are
    # PyTorch's. ``"0"`` is a gradient that is always 0.
    vjp: tuple[str, ...] = ()
    # whether epilogues in FP64 have it: ``cutlass_ops/doubles.h`` then defines it if it is a function
    in_fp64: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the arguments in formulas."""
        return ("c", "x", "y") if self.arity == 3 else ("x", "y")[: self.arity]

    @property
    def signatures(self) -> tuple[Signature, ...]:
        """The types that it takes and gives, the usual ones first."""
        return self.typed or (((_F,) * self.arity, _F),)


# The only operation that takes a value of another element of D: that of the neighbouring column.
SWAP_PAIRS = "swap_pairs"
# The only operation that depends on an element's place, and on numbers that are the same for all elements.
UNIFORM = "uniform"
# Converts a value of another type to FP32.
TO_FLOAT = "to_float"

OPS: dict[str, OpInfo] = {
    "add": OpInfo(2, "+", "x + y", "torch.add(x, y)", typed=_WHOLE, vjp=("g", "g")),
    "sub": OpInfo(2, "-", "x − y", "torch.sub(x, y)", typed=_WHOLE, vjp=("g", "-g")),
    "mul": OpInfo(2, "*", "x · y", "torch.mul(x, y)", typed=_WHOLE, vjp=("g * y", "g * x")),
    "div": OpInfo(2, "cutlass_ops::divide", "x / y", "torch.div(x, y)", vjp=("g / y", "-g * (r / y)")),
    "neg": OpInfo(1, "-", "−x", "torch.neg(x)", typed=(((_F,), _F), ((_I,), _I)), vjp=("-g",)),
    "minimum": OpInfo(
        2,
        "cutlass_ops::minimum",
        "the lesser of x and y; NaN if either is",
        "torch.minimum(x, y)",
        vjp=("where(x > y, 0, where(x == y, 0.5 * g, g))", "where(x < y, 0, where(x == y, 0.5 * g, g))"),
    ),
    "maximum": OpInfo(
        2,
        "cutlass_ops::maximum",
        "the greater of x and y; NaN if either is",
        "torch.maximum(x, y)",
        vjp=("where(x < y, 0, where(x == y, 0.5 * g, g))", "where(x > y, 0, where(x == y, 0.5 * g, g))"),
    ),
    "lt": OpInfo(2, "<", "whether x is less than y", "torch.lt(x, y)", typed=_ORDERS, vjp=("0", "0")),
    "le": OpInfo(2, "<=", "whether x is y or less", "torch.le(x, y)", typed=_ORDERS, vjp=("0", "0")),
    "gt": OpInfo(2, ">", "whether x is greater than y", "torch.gt(x, y)", typed=_ORDERS, vjp=("0", "0")),
    "ge": OpInfo(2, ">=", "whether x is y or greater", "torch.ge(x, y)", typed=_ORDERS, vjp=("0", "0")),
    "eq": OpInfo(2, "==", "whether x equals y; NaN equals nothing", "torch.eq(x, y)", typed=_EQUALS, vjp=("0", "0")),
    "ne": OpInfo(2, "!=", "whether x does not equal y", "torch.ne(x, y)", typed=_EQUALS, vjp=("0", "0")),
    "logical_and": OpInfo(
        2, "&&", "whether x and y are both true", "torch.logical_and(x, y)", typed=_BOTH, vjp=("0", "0")
    ),
    "logical_or": OpInfo(2, "||", "whether x or y is true", "torch.logical_or(x, y)", typed=_BOTH, vjp=("0", "0")),
    "logical_not": OpInfo(1, "!", "whether x is false", "torch.logical_not(x)", typed=(((_T,), _T),), vjp=("0",)),
    "where": OpInfo(
        3,
        "cutlass_ops::where",
        "x where c is true, else y",
        "torch.where(c, x, y)",
        _MORE,
        (((_T, _F, _F), _F), ((_T, _I, _I), _I)),
        vjp=("0", "where(c, g, 0)", "where(c, 0, g)"),
    ),
    "isnan": OpInfo(1, "cutlass_ops::isnan", "whether x is NaN", "torch.isnan(x)", _MORE, (((_F,), _T),), vjp=("0",)),
    TO_FLOAT: OpInfo(
        1,
        "float",
        "1 or 0 for a truth value; an index rounded to FP32",
        "x.float()",
        typed=(((_T,), _F), ((_I,), _F)),
        vjp=("0",),
    ),
    "abs": OpInfo(1, "cutlass_ops::abs", "the absolute value of x", "torch.abs(x)", vjp=("g * sign(x)",)),
    "sign": OpInfo(
        1, "cutlass_ops::sign", "1 if x > 0, −1 if x < 0, else 0 (also for NaN)", "torch.sign(x)", _MORE, vjp=("0",)
    ),
    "floor": OpInfo(1, "cutlass_ops::floor", "the largest integer not above x", "torch.floor(x)", _MORE, vjp=("0",)),
    "ceil": OpInfo(1, "cutlass_ops::ceil", "the smallest integer not below x", "torch.ceil(x)", _MORE, vjp=("0",)),
    "round": OpInfo(1, "cutlass_ops::round", "the nearest integer, ties to even", "torch.round(x)", _MORE, vjp=("0",)),
    "trunc": OpInfo(1, "cutlass_ops::trunc", "x rounded toward 0", "torch.trunc(x)", _MORE, vjp=("0",)),
    "reciprocal": OpInfo(1, "cutlass_ops::reciprocal", "1 / x", "torch.reciprocal(x)", _MORE, vjp=("-g * (r * r)",)),
    "square": OpInfo(1, "cutlass_ops::square", "x · x", "torch.square(x)", vjp=("g * (x + x)",)),
    "sqrt": OpInfo(1, "cutlass_ops::sqrt", "√x", "torch.sqrt(x)", vjp=("g / (r + r)",)),
    "rsqrt": OpInfo(1, "cutlass_ops::rsqrt", "1 / √x", "torch.rsqrt(x)", vjp=("-0.5 * g * (r * r * r)",)),
    "pow": OpInfo(
        2,
        "cutlass_ops::pow",
        "x to the power of y",
        "torch.pow(x, y)",
        _MORE,
        vjp=("where(y == 0, 0, g * (y * pow(x, y - 1)))", "where((x == 0) & (y >= 0), 0, g * (r * log(x)))"),
    ),
    "exp": OpInfo(1, "cutlass_ops::exp", "eˣ", "torch.exp(x)", vjp=("g * r",)),
    "exp2": OpInfo(1, "cutlass_ops::exp2", "2ˣ", "torch.exp2(x)", _MORE, vjp=("g * (r * 0.6931471805599453)",)),
    "expm1": OpInfo(1, "cutlass_ops::expm1", "eˣ − 1, exact near 0", "torch.expm1(x)", _MORE, vjp=("g * (r + 1)",)),
    "log": OpInfo(1, "cutlass_ops::log", "ln x", "torch.log(x)", _MORE, vjp=("g / x",)),
    "log2": OpInfo(1, "cutlass_ops::log2", "log₂ x", "torch.log2(x)", _MORE, vjp=("g / (x * 0.6931471805599453)",)),
    "log1p": OpInfo(1, "cutlass_ops::log1p", "ln (1 + x), exact near 0", "torch.log1p(x)", _MORE, vjp=("g / (x + 1)",)),
    "erf": OpInfo(
        1,
        "cutlass_ops::erf",
        "2/√π · ∫₀ˣ e^(−t²) dt",
        "torch.erf(x)",
        _MORE,
        vjp=("g * (1.1283791670955126 * exp(-(x * x)))",),
    ),
    "ndtr": OpInfo(
        1,
        "cutlass_ops::normal::cdf",
        "1/√(2π) · ∫₋∞ˣ e^(−t²/2) dt",
        "torch.special.ndtr(x)",
        _NORMAL,
        vjp=("g * (0.3989422804014327 * exp(-0.5 * (x * x)))",),
    ),
    "sin": OpInfo(1, "cutlass_ops::sin", "sin x, of radians", "torch.sin(x)", _TURNS, vjp=("g * cos(x)",)),
    "cos": OpInfo(1, "cutlass_ops::cos", "cos x, of radians", "torch.cos(x)", _TURNS, vjp=("-g * sin(x)",)),
    "tanh": OpInfo(1, "cutlass_ops::tanh", "tanh x", "torch.tanh(x)", vjp=("g * (1 - r * r)",)),
    "sigmoid": OpInfo(1, "cutlass_ops::sigmoid", "1 / (1 + e⁻ˣ)", "torch.sigmoid(x)", vjp=("g * ((1 - r) * r)",)),
    "relu": OpInfo(
        1, "cutlass_ops::relu", "0 if x < 0, else x (NaN stays NaN)", "torch.relu(x)", vjp=("where(r <= 0, 0, g)",)
    ),
    "leaky_relu": OpInfo(
        2,
        "cutlass_ops::leaky_relu",
        "x if x > 0, else x · y",
        "F.leaky_relu(x, y)",
        vjp=("where(x > 0, g, g * y)", "where(x > 0, 0, g * x)"),
    ),
    "elu": OpInfo(
        2,
        "cutlass_ops::elu",
        "x if x > 0, else y · (eˣ − 1)",
        "F.elu(x, y)",
        _MORE,
        vjp=("where(x > 0, g, g * (y * exp(x)))", "where(x > 0, 0, g * expm1(x))"),
    ),
    "gelu": OpInfo(
        1,
        "cutlass_ops::normal::gelu",
        "x/2 · (1 + erf(x / √2))",
        "F.gelu(x)",
        _NORMAL,
        vjp=("g * (ndtr(x) + x * (0.3989422804014327 * exp(-0.5 * (x * x))))",),
    ),
    "gelu_tanh": OpInfo(
        1,
        "cutlass_ops::gelu_tanh",
        "x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))",
        'F.gelu(x, approximate="tanh")',
        vjp=(
            "s = sigmoid(x * (1.5957691216057308 + 0.07135481627260025 * (x * x))); "
            "g * (s + x * (s * (1 - s)) * (1.5957691216057308 + 0.21406444881780076 * (x * x)))",
        ),
    ),
    "silu": OpInfo(
        1, "cutlass_ops::silu", "x / (1 + e⁻ˣ)", "F.silu(x)", vjp=("s = sigmoid(x); g * (s * (1 + x * (1 - s)))",)
    ),
    "mish": OpInfo(
        1,
        "cutlass_ops::mish",
        "x · tanh(ln(1 + eˣ))",
        "F.mish(x)",
        _MORE,
        vjp=("t = tanh(softplus(x)); g * (t + x * sigmoid(x) * (1 - t * t))",),
    ),
    "softplus": OpInfo(
        1,
        "cutlass_ops::softplus",
        "ln(1 + eˣ), and x where x > 20",
        "F.softplus(x)",
        _MORE,
        vjp=("where(x > 20, g, g * sigmoid(x))",),
    ),
    "hardswish": OpInfo(
        1,
        "cutlass_ops::hardswish",
        "x · min(max(x + 3, 0), 6) / 6",
        "F.hardswish(x)",
        vjp=("where(x <= -3, 0, where(x < 3, g * (x / 3 + 0.5), g))",),
    ),
    "cast": OpInfo(
        1,
        "cutlass_ops::cast",
        "x rounded to the dtype, to nearest even",
        "x.to(dtype).to(x.dtype)",
        vjp=("g",),
        in_fp64=False,
    ),
    SWAP_PAIRS: OpInfo(
        1,
        "",
        "in column n, the x of column n + 1 if n is even, of column n − 1 if n is odd",
        "x.reshape(-1, 2).flip(1).reshape(x.shape)",
        vjp=("swap_pairs(g)",),
        in_fp64=False,
    ),
    UNIFORM: OpInfo(
        2,
        "",
        "a random number in [0, 1), from seed x and offset y",
        "cutlass_ops.operand.reference.uniform(x, y, M, N)",
        "cutlass_ops/random.h",
        (((_S, _S), _F),),
        vjp=("0", "0"),
        in_fp64=False,
    ),
}


class GatheredInfo(NamedTuple):
    """One value for each row of D that a kernel gathers from A."""

    formula: str  # of A's row a
    torch: str  # the equivalent PyTorch expression


# Leaves of a graph, as the accumulator is: FP32, and 0 if K is 0.
GATHERED: dict[str, GatheredInfo] = {
    "mean_of_a": GatheredInfo("Σ a / K over A's row", "a.float().mean(1)"),
    "mean_square_of_a": GatheredInfo("Σ a · a / K over A's row", "a.float().square().mean(1)"),
}


class IndexInfo(NamedTuple):
    """Where an element of D is."""

    formula: str  # what it counts
    torch: str  # the equivalent PyTorch expression


# Leaves of a graph as well, of the type INDEX.
INDICES: dict[str, IndexInfo] = {
    "row_index": IndexInfo("the row of D, counted from 0", "torch.arange(M)[:, None]"),
    "column_index": IndexInfo("the column of D, counted from 0", "torch.arange(N)"),
}


class ReductionInfo(NamedTuple):
    """One reduction of a value over each row or each column of D."""

    formula: str
    torch: str  # the equivalent PyTorch expression
    # The dtype of its results if a declaration names no other. A reduction that gives indices allows ``"i32"``
    # alone.
    result: str = "f32"
    empty: float = 0.0  # its result over nothing
    header: str = ""  # where C++ has it, if not in ``cutlass_ops/reduce.h``
    paired: bool = False  # whether each result is kept as two numbers, not one FP32 value
    # The gradient of x, as in :class:`OpInfo`; empty if there is none. It may also use `place`, where x is along
    # the reduction, and `at`, the result of the reduction that says where its result is: ``arg`` and its name.
    vjp: str = ""

    @property
    def kept_bytes(self) -> int:
        """Bytes that it keeps for each result."""
        return 8 if self.paired else 4


_REDUCTIONS = "cutlass_ops/reductions.h"

REDUCTIONS: dict[str, ReductionInfo] = {
    "sum": ReductionInfo("Σ x", "x.sum(dim)", vjp="g"),
    "sum_square": ReductionInfo("Σ x · x", "x.square().sum(dim)", vjp="g * (x + x)"),
    "max": ReductionInfo(
        "the greatest x; NaN if any x is NaN", "x.amax(dim)", empty=-math.inf, vjp="where(place == at, g, 0)"
    ),
    "min": ReductionInfo(
        "the least x; NaN if any x is NaN",
        "x.amin(dim)",
        empty=math.inf,
        header=_REDUCTIONS,
        vjp="where(place == at, g, 0)",
    ),
    "argmax": ReductionInfo(
        "the index of the greatest x, the first of equal ones; of the first NaN if there is one",
        "x.argmax(dim).int()",
        "i32",
        -1,
        _REDUCTIONS,
        True,
    ),
    "argmin": ReductionInfo(
        "the index of the least x, the first of equal ones; of the first NaN if there is one",
        "x.argmin(dim).int()",
        "i32",
        -1,
        _REDUCTIONS,
        True,
    ),
    "logsumexp": ReductionInfo(
        "ln Σ eˣ, without overflow",
        "x.logsumexp(dim)",
        empty=-math.inf,
        header=_REDUCTIONS,
        paired=True,
        vjp="g * exp(x - r)",
    ),
}


def to_fp32(value: float) -> float:
    """Round to the nearest FP32 value, ties to even; beyond FP32's range that is an infinity."""
    return ctypes.c_float(value).value  # PyTorch's tracer recurses endlessly in struct.pack
