"""Questions about extents that a tracer may not know, such as the rows that a mask selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition is known to hold: False if the answer depends on data."""
    # To PyTorch's tracer, an unknown answer is a bool, too.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    return bool(symbolic_shapes().guard_or_false(condition))


def same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are known to be the same."""
    if len(shape) != len(other):
        return False
    # A loop is faster than all(), and each new number of rows passes here.
    for x, y in zip(shape, other, strict=True):
        equal = x == y
        if equal is not True and not surely(equal):
            return False
    return True


def agree(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are the same, or may be. A traced program then checks this each time it runs."""
    if len(shape) != len(other) or any(surely(x != y) for x, y in zip(shape, other, strict=True)):
        return False
    for x, y in zip(shape, other, strict=True):
        if not surely(x == y):
            torch._check(x == y)  # type: ignore[no-untyped-call]
    return True


def lies_as(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have the same shape and strides."""
    return x.shape == y.shape and x.stride() == y.stride()


def repeats(tensor: Tensor) -> bool:
    """Whether several elements share one place in memory."""
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        apart = stride != 0
        if apart is not True and surely(stride == 0) and not surely(extent <= 1):
            return True
    return False


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that :func:`repeats`, in which each element has its own place."""
    # To PyTorch, an empty tensor is contiguous with any strides.
    return tensor.new_empty(tensor.shape) if surely(tensor.numel() == 0) else tensor.contiguous()


def has_one_element(value: Tensor) -> bool:
    """Whether a tensor is known to have one element. It does not ask about extents that a program leaves open."""
    count = value.numel()
    if torch.compiler.is_dynamo_compiling() or isinstance(count, torch.SymInt):
        return bool(symbolic_shapes().statically_known_true(count == 1))
    return count == 1


def symbolic_shapes() -> Any:
    """Return PyTorch's module of such extents, which is imported only if there are any."""
    return torch.fx.experimental.symbolic_shapes
