"""How an epilogue's operations are spelled in C++.

The functions in namespace ``cutlass_ops`` are defined in ``templates/include/cutlass_ops/epilogue_math.h``, or in the
header that :data:`HEADERS` names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cutlass_ops.base.dtypes import DType, dtype, f32, f64
from cutlass_ops.epilogue.nodes import Node
from cutlass_ops.epilogue.operations import OPS, TO_FLOAT, Type, to_fp32

# Where functions are defined that few epilogues need.
HEADERS: dict[str, str] = {name: info.header for name, info in OPS.items() if info.header}

# What FP64 epilogues need besides: functions of these names, of double values.
DOUBLES = "cutlass_ops/doubles.h"

# What values are in C++, inside a function: those of an FP64 epilogue are of that type.
_TYPES: dict[Type, str] = {Type.TRUTH: "bool", Type.INDEX: "int"}


def type_of(kind: Type, compute: DType = f32) -> str:
    """Return what a value is in C++, inside a function of an epilogue that computes in a type."""
    return _TYPES.get(kind, compute.cpp)


def float_literal(value: float, compute: DType = f32) -> str:
    """Spell an FP32 value in C++ with the fewest decimal digits that a compiler reads back exactly."""
    if compute is f64:
        return f"double({float_literal(value)})"
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


def exact_inverse(node: Node) -> float | None:
    """Return a power of two's inverse: to multiply by it gives the bits of a division. None for another constant."""
    if node.op != "const" or not isinstance(node.attr, float) or not math.isfinite(node.attr):
        return None
    mantissa, exponent = math.frexp(node.attr)
    # 2^126 is the greatest whose inverse is a normal number, and its own is one as well.
    return 1 / node.attr if abs(mantissa) == 0.5 and abs(exponent - 1) <= 126 else None


def integer_literal(value: int) -> str:
    """Spell a whole number of 32 bits in C++, which reads a sign as an operator."""
    if value == -(1 << 31):
        return "(-2147483647 - 1)"
    return f"({value})" if value < 0 else str(value)


def seed_literal(value: int) -> str:
    """Spell a whole number of 64 bits in C++."""
    return "INT64_MIN" if value == -(1 << 63) else f"INT64_C({value})"


def cpp_expression(node: Node, arg_names: Sequence[str], compute: DType = f32, kind: Type = Type.FLOAT) -> str:
    """Spell one operation or constant as a C++ expression."""
    if node.op == "const" and isinstance(node.attr, float):
        return float_literal(node.attr, compute)
    if node.op == "integer":
        return integer_literal(int(node.attr or 0))
    if node.op not in OPS or not OPS[node.op].cpp:
        raise ValueError(f"{node.op!r} is not an operation on an element: its value has a name in the kernel")
    info = OPS[node.op]
    if len(arg_names) != info.arity:
        raise ValueError(f"{node.op} takes {info.arity} arguments, not {len(arg_names)}")
    if node.op == "cast":
        return f"{info.cpp}<{dtype(str(node.attr)).cpp}>({arg_names[0]})"
    if node.op == TO_FLOAT:
        return f"{compute.cpp}({arg_names[0]})"
    if info.cpp.startswith("cutlass_ops::"):
        return f"{info.cpp}({', '.join(arg_names)})"
    # Indices wrap, as unsigned numbers do. A compiler assumes that signed ones never overflow.
    wraps = kind is Type.INDEX
    args = [f"unsigned({x})" if wraps else x for x in arg_names]
    text = f"{info.cpp}{args[0]}" if info.arity == 1 else f"{args[0]} {info.cpp} {args[1]}"
    return f"int({text})" if wraps else f"({text})"
