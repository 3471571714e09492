"""New tensors for warm calls, by the function that compiled programs of PyTorch allocate their buffers with.

``torch.empty`` and its like read their arguments by name, ask which backend makes tensors, and pass autograd's layers
before they ask the allocator. That takes twice as long as the rest. Programs of ``torch.compile`` ask the allocator at
once. The tensor is the same. Only modes would have seen more, and a warm call has asked for these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

_Make: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

# PyTorch's own, for its programs: a later version may not have them. They take tuples alone, no torch.Size.
_programs: Any = getattr(torch._C._dynamo, "guards", None)
_on_cuda: _Make | None = getattr(_programs, "_empty_strided_cuda", None)
_on_cpu: _Make | None = getattr(_programs, "_empty_strided_cpu", None)
_current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


def new_tensor(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor on another's device, of so many elements that many apart.

    It is ``like.new_empty_strided(shape, strides, dtype=dtype)`` in a third of the time, unless something watches this
    thread's operators: then it must be that. `shape` and `strides` are tuples, and no other sequences.
    """
    if like.is_cuda:
        # The quick function knows no device but the current one.
        if _on_cuda is not None and _current_device is not None and like.get_device() == _current_device():
            return _on_cuda(shape, strides, dtype)
    elif _on_cpu is not None and like.is_cpu:
        return _on_cpu(shape, strides, dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)
