"""Numbers among the arguments of a call: as they are, and as PyTorch's operators take them."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.epilogue.graph import fits
from cutlass_ops.run import sizes


def scalar_argument(name: str, value: Any) -> Tensor | float:
    """Convert a scalar for an operator: a tensor, or a number that is a constant of the program.

    A number that varies between calls of a compiled program becomes a tensor. Otherwise each value would recompile it.

    Raises
    ------
    TypeError, ValueError
        As for :func:`number`.
    """
    if isinstance(value, Tensor):
        return value
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat))
    if not symbolic and torch.compiler.is_dynamo_compiling() and not isinstance(value, (bool, str)):
        if type(value) not in (int, float):
            return torch.as_tensor(value)  # the tracer treats NumPy's scalars as arrays
        # During tracing, a variable argument also has the type of a plain number.
        symbolic = not sizes.symbolic_shapes().has_static_value(value)
    if symbolic:
        return torch.mul(torch.ones((), dtype=torch.float64, device="cpu"), value)
    return number(name, value)


def integer_argument(name: str, value: Any) -> Tensor:
    """Return a whole number of 64 bits as an operator takes it: a tensor, since its numbers are doubles.

    Raises
    ------
    TypeError, ValueError
        If it is no such number: see :func:`integer`.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.SymInt) or torch.compiler.is_dynamo_compiling():
        if isinstance(value, (bool, float, str)):
            raise TypeError(f"{name} must be an int or a tensor of one whole number, not {type(value).__name__}")
        return torch.mul(torch.ones((), dtype=torch.int64, device="cpu"), value)
    return torch.tensor(integer(name, value), dtype=torch.int64, device="cpu")


def integer(name: str, value: Any) -> int:
    """Return a whole number of 64 bits that is no tensor.

    Raises
    ------
    TypeError
        If it is no whole number.
    ValueError
        If it has more bits.
    """
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        value = value.item()  # NumPy's
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or a tensor of one whole number, not {type(value).__name__}")
    if not fits(value, 64):
        raise ValueError(f"{name} is {value}: an Integer has 64 bits, from -2**63 up to 2**63 - 1")
    return value


_LARGEST = int(sys.float_info.max)
# The least number that FP32 rounds to infinity.
BEYOND_FP32 = 2.0**128 - 2.0**103


def require_fp32(name: str, value: float) -> None:
    """Require a scalar that does not become infinite as a kernel takes it.

    Raises
    ------
    ValueError
        If it does. Infinity itself is fine.
    """
    if math.isfinite(value) and abs(value) >= BEYOND_FP32:
        raise ValueError(f"{name} is {value}, beyond FP32's range: pass a number up to 3.4e38, or math.inf if meant")


def number(name: str, value: Any) -> float:
    """Return a scalar that is not a tensor as a float.

    Raises
    ------
    TypeError
        If it is not a real number.
    ValueError
        If it is beyond the range of a double.
    """
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        value = value.item()  # NumPy's
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise _no_number(name, value)
    # PyTorch's tracer would mistake float()'s OverflowError for its own.
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{name} is beyond the range of a double: pass a number up to 3.4e38, or math.inf if meant")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _no_number(name, value) from None


def _no_number(name: str, value: object) -> TypeError:
    # Where tensors have a meaning of their own, such as scales of rows, nothing else is taken for one.
    several = isinstance(value, (list, tuple)) or hasattr(value, "__array__")
    instead = f". Of several numbers, pass torch.as_tensor({name}) where there may be a tensor" if several else ""
    return TypeError(f"{name} must be a number or a tensor of one element, not {type(value).__name__}{instead}")
