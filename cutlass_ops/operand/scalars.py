"""Numbers among the arguments of a call, in Python and as arguments of PyTorch's operators."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.epilogue.graph import fits
from cutlass_ops.epilogue.values import shown
from cutlass_ops.operand import sizes


def scalar_argument(name: str, value: Any) -> Tensor | float:
    """Convert a scalar for an operator: a tensor, or a number that is a constant of the program.

    A number that varies between calls of a compiled program becomes a tensor. Otherwise each value would recompile it.
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
    """Return a 64-bit integer as an operator takes it: a tensor, since an operator's numbers are doubles."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.SymInt) or torch.compiler.is_dynamo_compiling():
        if isinstance(value, (bool, float, str)):
            raise TypeError(f"{name} must be an int or a tensor of one whole number, not {type(value).__name__}")
        return torch.mul(torch.ones((), dtype=torch.int64, device="cpu"), value)
    return torch.tensor(integer(name, value), dtype=torch.int64, device="cpu")


def integer(name: str, value: Any) -> int:
    """Return a 64-bit integer that is no tensor. Raises TypeError for other types, and ValueError for more bits."""
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        value = value.item()  # NumPy's
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or a tensor of one whole number, not {type(value).__name__}")
    if not fits(value, 64):
        raise ValueError(f"{name} is {shown(value)}: an Integer has 64 bits, from -2**63 up to 2**63 - 1")
    return value


_LARGEST = int(sys.float_info.max)
# The least number that FP32 rounds to infinity.
BEYOND_FP32 = 2.0**128 - 2.0**103


def require_fp32(name: str, value: float) -> None:
    """Raise ValueError if a finite scalar becomes infinite in FP32, as a kernel takes it. Infinity is allowed."""
    if math.isfinite(value) and abs(value) >= BEYOND_FP32:
        raise ValueError(f"{name} is {value}, beyond FP32's range: pass a number up to 3.4e38, or math.inf if meant")


def number(name: str, value: Any) -> float:
    """Return a number as a float. Raises TypeError if it is not real, ValueError beyond a double's range."""
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        value = value.item()  # NumPy's
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise _no_number(name, value)
    # PyTorch's tracer would mistake float()'s OverflowError for its own.
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(_BEYOND.format(name))
    try:
        return float(value)
    except OverflowError:  # such as a fraction
        raise ValueError(_BEYOND.format(name)) from None
    except (TypeError, ValueError):
        raise _no_number(name, value) from None


_BEYOND = "{} is beyond the range of a double: pass a number up to 3.4e38, or math.inf if meant"


def _no_number(name: str, value: object) -> TypeError:
    # If tensors have their own meaning, such as scales of rows, nothing else counts as a tensor.
    several = isinstance(value, (list, tuple)) or hasattr(value, "__array__")
    instead = f". Of several numbers, pass torch.as_tensor({name}) where there may be a tensor" if several else ""
    return TypeError(f"{name} must be a number or a tensor of one element, not {type(value).__name__}{instead}")
