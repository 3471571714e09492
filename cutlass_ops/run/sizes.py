"""Questions about extents that a tracer may not know, such as the rows that a mask selects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def surely(condition: bool | torch.SymBool) -> bool:
    """Whether a condition holds for all that a tracer knows: False where it depends on data."""
    # During tracing, an unknown answer also has the type of a plain one.
    if isinstance(condition, bool) and not torch.compiler.is_dynamo_compiling():
        return condition
    return bool(symbolic_shapes().guard_or_false(condition))


def same(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes are the same for all that a tracer knows."""
    if len(shape) != len(other):
        return False
    # Loops: each new number of rows comes by here.
    for x, y in zip(shape, other, strict=True):
        equal = x == y
        if equal is not True and not surely(equal):
            return False
    return True


def repeats(tensor: Tensor) -> bool:
    """Whether one place in memory is several elements."""
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        apart = stride != 0
        if apart is not True and surely(stride == 0) and not surely(extent <= 1):
            return True
    return False


def has_one_element(value: Tensor) -> bool:
    """Whether a tensor is known to have one element. Of an extent that a program leaves open, nobody asks."""
    count = value.numel()
    if torch.compiler.is_dynamo_compiling() or isinstance(count, torch.SymInt):
        return bool(symbolic_shapes().statically_known_true(count == 1))
    return count == 1


def symbolic_shapes() -> Any:
    """Return PyTorch's module of such extents, which is imported where there are any."""
    return torch.fx.experimental.symbolic_shapes
