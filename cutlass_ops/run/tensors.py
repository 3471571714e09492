"""What every tensor of a call must be: a dense one with memory, of an element type that kernels know."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base.dtypes import HELD, READ, DType
from cutlass_ops.run import batches, sizes, watching

_DTYPES: dict[torch.dtype, DType] = {getattr(torch, t.torch_name): t for t in HELD}


def element_type(name: str, tensor: Tensor, allowed: Sequence[DType] = HELD) -> DType:
    """Return a tensor's element type.

    Raises
    ------
    TypeError
        If it is not allowed.
    """
    found = _DTYPES.get(tensor.dtype)
    if found is None or found not in allowed:
        names = ", ".join(str(getattr(torch, t.torch_name)) for t in HELD if t in allowed)
        raise TypeError(f"{name} is {tensor.dtype}: use one of {names}")
    return found


def is_read(tensor: Tensor) -> bool:
    """Whether an epilogue reads a tensor's element type."""
    return _DTYPES.get(tensor.dtype) in READ


def require_tensor(name: str, value: Any) -> None:
    """Require a dense tensor without a tangent.

    Raises
    ------
    TypeError, ValueError
        If it is not one. The message says what to do.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}{_instead(name, value)}")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: pass {name}.values() or {name}.to_padded_tensor(0)")
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}: call {name}.to_dense() first")
    watching.refuse_tangent(name, value)


def _instead(name: str, value: Any) -> str:
    """Return what to pass instead of a prepared weight, or of another package's array, for messages."""
    if hasattr(value, "__dlpack__"):
        return f": pass torch.from_dlpack({name})"
    if not isinstance(getattr(value, "matrix", None), Tensor):
        return ""
    scale = f" and, as a Row of the epilogue, {name}.scale" if getattr(value, "scale", None) is not None else ""
    return f": pass {name}.matrix{scale}, or call the function whose weight it was prepared to be"


def refuse_differentiated(name: str, value: Any) -> None:
    """Refuse a tensor whose use autograd should record, where nothing does.

    Raises
    ------
    ValueError
        If it is one. The message says what to do.
    """
    if watching.is_differentiated(value):
        raise ValueError(
            f"{name} requires grad, and this has no backward: call under torch.no_grad(), or pass {name}.detach()"
        )


def require_memory(name: str, tensor: Tensor) -> None:
    """Require a tensor with memory that a kernel can read.

    Raises
    ------
    TypeError, ValueError
        If it wraps other tensors, or its storage was freed.
    """
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own: pass the tensor that it wraps"
        )
    if tensor.device.type != "meta" and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"{name} has no memory, since its storage was freed or resized to 0: pass another tensor")


def require_same_device(name: str, tensor: Tensor, a: Tensor, name_of_a: str = "a") -> None:
    """Require a tensor to be on A's device.

    Raises
    ------
    ValueError
        If it is on another. The message names it.
    """
    if tensor.device != a.device:
        raise ValueError(f"{name} is on {tensor.device} and {name_of_a} is on {a.device}: move them to one device")


def as_stored(tensor: Tensor) -> Tensor:
    """Return a tensor without a lazy negation, since kernels read memory as it is."""
    return tensor.resolve_neg()


def fold(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View a tensor with its leading dimensions folded into M, without a copy.

    Raises
    ------
    ValueError
        If its strides do not allow the view.
    """
    if sizes.same(tensor.shape, shape):
        return tensor
    try:
        return tensor.view(shape)
    except RuntimeError:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}, which cannot be viewed as {shape} "
            f"without a copy: {how_to_copy(name)}"
        ) from None


def how_to_copy(name: str) -> str:
    """Return what to do about an argument with strides that no kernel takes. A copy of an output would be lost."""
    if name.startswith("out"):
        return "pass a tensor from torch.empty, and copy it"
    return f"call {name}.contiguous() first"


def writing(*tensors: Tensor) -> AbstractContextManager[object]:
    """Return a context in which PyTorch writes tensors: those of inference mode in that mode alone.

    Kernels write them anywhere, so that what runs on the CPU must as well.
    """
    return torch.inference_mode() if any(x.is_inference() for x in tensors) else nullcontext()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share memory."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    (x_begin, x_end), (y_begin, y_end) = _bytes(x), _bytes(y)
    if x_end <= y_begin or y_end <= x_begin:
        return False
    return batches.meet(x, y)


def _bytes(tensor: Tensor) -> tuple[int, int]:
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()
