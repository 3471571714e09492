"""Requirements of every tensor of a call: it is dense, has memory, and has an element type that kernels know."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base.dtypes import HELD, READ, DType
from cutlass_ops.operand import batches, sizes, watching

_DTYPES: dict[torch.dtype, DType] = {getattr(torch, t.torch_name): t for t in HELD}


def element_type(name: str, tensor: Tensor, allowed: Sequence[DType] = HELD) -> DType:
    """Return a tensor's element type. Raises TypeError if it is not allowed."""
    found = _DTYPES.get(tensor.dtype)
    if found is None or found not in allowed:
        names = ", ".join(str(getattr(torch, t.torch_name)) for t in HELD if t in allowed)
        raise TypeError(f"{name} is {tensor.dtype}: use one of {names}")
    return found


def is_read(tensor: Tensor) -> bool:
    """Whether an epilogue reads a tensor's element type."""
    return _DTYPES.get(tensor.dtype) in READ


def require_tensor(name: str, value: Any) -> None:
    """Require a dense tensor without a tangent. Raises TypeError or ValueError that says what to do."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}{_instead(name, value)}")
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: pass {name}.values() or {name}.to_padded_tensor(0)")
    if value.layout != torch.strided:
        raise TypeError(f"{name} has layout {value.layout}: call {name}.to_dense() first")
    if value.is_quantized:
        raise TypeError(f"{name} is a quantised tensor, {value.dtype}: pass {name}.dequantize() or {name}.int_repr()")
    if watching.is_left_over(value):
        raise TypeError(
            f"{name} was made inside of a torch.func transform, such as vmap, and no kernel reads it: pass the tensor "
            "that was given to the transform, or one of its results"
        )
    watching.refuse_tangent(name, value)


def refuse_shapeless(**values: Any) -> None:
    """Refuse tensors whose shape is not that of their memory, before anything asks for it. Raises TypeError."""
    for name, value in values.items():
        if not isinstance(value, Tensor):
            continue
        if value.is_nested or value.layout is not torch.strided or watching.is_left_over(value):
            require_tensor(name, value)


def _instead(name: str, value: Any) -> str:
    """Return what to pass instead of an operand value, or of another package's array, for messages."""
    if hasattr(value, "__dlpack__"):
        package = {"jax": "jax", "jaxlib": "jax", "cupy": "cupy"}.get(type(value).__module__.partition(".")[0])
        own = f"call the function of this name in cutlass_ops.{package}, or " if package else ""
        return f": {own}pass torch.from_dlpack({name})"
    part = next((part for part in ("matrix", "values") if isinstance(getattr(value, part, None), Tensor)), None)
    if part is None:
        return ""
    scale = f", and {name}.scale as an input of the epilogue" if getattr(value, "scale", None) is not None else ""
    return f": pass {name}.{part}{scale}"


def refuse_differentiated(name: str, value: Any) -> None:
    """Raise ValueError for a tensor whose use autograd should record, if nothing records it."""
    if watching.is_differentiated(value):
        raise ValueError(
            f"{name} requires grad, and this has no backward: call under torch.no_grad(), or pass {name}.detach()"
        )


def require_memory(name: str, tensor: Tensor) -> None:
    """Raise TypeError or ValueError for a tensor that wraps others, or whose storage was freed."""
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}, which has no memory of its own: pass the tensor that it wraps"
        )
    if tensor.device.type != "meta" and tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise ValueError(f"{name} has no memory, since its storage was freed or resized to 0: pass another tensor")


def require_same_device(name: str, tensor: Tensor, a: Tensor, name_of_a: str = "a") -> None:
    """Raise ValueError that names the tensor if it is not on A's device."""
    if tensor.device != a.device:
        raise ValueError(f"{name} is on {tensor.device} and {name_of_a} is on {a.device}: move them to one device")


def as_stored(value: Any) -> Any:
    """Return a lazy negation, or lazy zeros, as a tensor in memory that kernels can read; others unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value._is_zerotensor() else value.resolve_neg()


def require_output(name: str, value: Any) -> None:
    """Require a tensor that can be written in place: see :func:`require_tensor`, also for errors."""
    require_tensor(name, value)
    if value.is_neg() or value._is_zerotensor():
        lazy = "a lazy negation" if value.is_neg() else "lazily zero"
        raise ValueError(f"{name} is {lazy}: pass a tensor from torch.empty, for example")


def fold(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a view with leading dimensions folded into M. Raises ValueError if strides do not allow it."""
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
    """Return what to do about an argument whose strides no kernel takes. A copy of an output would be lost."""
    if name.startswith("out"):
        return "pass a tensor from torch.empty, and copy it"
    return f"call {name}.contiguous() first"


def writing(*tensors: Tensor) -> AbstractContextManager[object]:
    """Return a context in which PyTorch may write tensors: inference tensors only change in inference mode.

    Kernels write them in any mode, so code on the CPU must as well.
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
