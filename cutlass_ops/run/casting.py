"""Casts that torch.autocast asks for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.operand.sizes import lies_as


def autocast(
    a: Any, b: Any, inputs: tuple[Any, ...], names: Sequence[str], products: Sequence[str]
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a call's arguments with A, B and products in the dtype that torch.autocast asks for, if any is active.

    Like F.linear, it casts no FP64 and no FP8. Other inputs stay unchanged, since kernels compute with them in FP32.
    """
    dtype = autocast_dtype(a)
    if dtype is None:
        return a, b, inputs
    pairs = zip(names, inputs, strict=True)
    values = tuple(autocast_to(dtype, x) if name in products else x for name, x in pairs)
    return autocast_to(dtype, a), autocast_to(dtype, b), values


def autocast_dtype(tensor: Any) -> torch.dtype | None:
    """Return the dtype that torch.autocast asks for on a tensor's device; None if it is not active there."""
    if not torch.compiler.is_dynamo_compiling() and not any_autocast():
        return None  # at once: every call with a norm's vector asks
    if not isinstance(tensor, Tensor) or tensor.device.type not in _AUTOCASTING:
        return None
    if not torch.is_autocast_enabled(tensor.device.type):
        return None
    return torch.get_autocast_dtype(tensor.device.type)


def dtype_of(operand: Tensor) -> torch.dtype:
    """Return the dtype in which an operand is multiplied."""
    dtype = autocast_dtype(operand) if operand.dtype in _CAST else None
    return operand.dtype if dtype is None else dtype


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Turn torch.autocast off for code whose operands are cast already."""
    if device.type not in _AUTOCASTING or not (torch.compiler.is_dynamo_compiling() or any_autocast()):
        return nullcontext()  # entering torch.autocast takes longer than a launch
    return torch.autocast(device.type, enabled=False)


# PyTorch raises an error for other device types, such as "meta".
_AUTOCASTING = ("cpu", "cuda")
any_autocast = torch._C._is_any_autocast_enabled


def autocast_to(dtype: torch.dtype | None, x: Any) -> Any:
    """Return an operand in a dtype, if it is one of those that torch.autocast casts."""
    if dtype is None or not isinstance(x, Tensor) or x.dtype not in _CAST:
        return x
    if torch.compiler.is_dynamo_compiling():
        return x.to(dtype)
    parameter = x if x._base is None else x._base
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or x.dtype == dtype:
        return _TO[dtype](x) if dtype in _TO else x.to(dtype)
    # The call multiplies by the copy, which sends the parameter's gradient to the same place.
    cast: Any = parameter.to(dtype)
    cast.main_grad, cast.main_grad_of = main_grad, parameter
    if x._base is None or lies_as(x, parameter):
        return cast
    if parameter.ndim > 1 and lies_as(x, parameter.mT):
        return cast.mT
    # Other views have no place in main_grad: a call will raise an error.
    copy: Any = x.to(dtype)
    copy.main_grad, copy.main_grad_of = main_grad, parameter
    return copy


# They take half the time of ``to``.
_TO = {torch.bfloat16: Tensor.bfloat16, torch.float16: Tensor.half}
_CAST = frozenset((torch.float32, torch.bfloat16, torch.float16))
