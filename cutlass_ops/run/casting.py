"""What torch.autocast asks for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.run.sizes import lies_as


def autocast(
    a: Any, b: Any, inputs: tuple[Any, ...], names: Sequence[str], products: Sequence[str]
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a call's arguments with A, B and products in the dtype that torch.autocast asks for, if any is active.

    What is cast is what F.linear casts of its operands: no FP64, and no FP8. Other inputs stay as they are, since
    kernels compute with them in FP32.
    """
    dtype = autocast_dtype(a)
    if dtype is None:
        return a, b, inputs
    pairs = zip(names, inputs, strict=True)
    values = tuple(autocast_to(dtype, x) if name in products else x for name, x in pairs)
    return autocast_to(dtype, a), autocast_to(dtype, b), values


def autocast_dtype(tensor: Any) -> torch.dtype | None:
    """Return the dtype that torch.autocast asks for on a tensor's device; None if it is not active there."""
    if not torch.compiler.is_dynamo_compiling() and not _any_autocast():
        return None  # at once: every call with a norm's vector asks
    if not isinstance(tensor, Tensor) or tensor.device.type not in _AUTOCASTING:
        return None
    if not torch.is_autocast_enabled(tensor.device.type):
        return None
    return torch.get_autocast_dtype(tensor.device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Turn torch.autocast off for what computes with operands that are cast already."""
    if device.type not in _AUTOCASTING:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


# PyTorch refuses the question for others, such as "meta".
_AUTOCASTING = ("cpu", "cuda")
_any_autocast = torch._C._is_any_autocast_enabled


def autocast_to(dtype: torch.dtype | None, x: Any) -> Any:
    """Return an operand in a dtype, if it is one of those that torch.autocast casts."""
    if dtype is None or not isinstance(x, Tensor) or x.dtype not in _CAST:
        return x
    if torch.compiler.is_dynamo_compiling():
        return x.to(dtype)
    parameter = x if x._base is None else x._base
    main_grad = getattr(parameter, "main_grad", None)
    if main_grad is None or x.dtype == dtype:
        return x.to(dtype)
    # What a call multiplies by is the copy: it takes the parameter's gradient to the same place.
    cast: Any = parameter.to(dtype)
    cast.main_grad, cast.main_grad_of = main_grad, parameter
    if x._base is None or lies_as(x, parameter):
        return cast
    if parameter.ndim > 1 and lies_as(x, parameter.mT):
        return cast.mT
    # Other views have no place in main_grad, as a call will say.
    copy: Any = x.to(dtype)
    copy.main_grad, copy.main_grad_of = main_grad, parameter
    return copy


_CAST = frozenset((torch.float32, torch.bfloat16, torch.float16))
