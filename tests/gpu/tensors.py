"""Tensors as callers have them: padded, offset, transposed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from cutlass_ops.operand.call import device_of

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def require_hopper() -> None:
    """Skip a test whose kernels are compiled for Hopper on other GPUs."""
    if not device_of(torch.device("cuda", torch.cuda.current_device())).has_tma:
        pytest.skip("these kernels need Hopper")


def matrix(rows: int, cols: int, dtype: str, major: str = "row", *, aligned: bool = True) -> Tensor:
    """Draw a matrix of order 1/√extent, its leading dimension a multiple of 16 bytes or exactly the extent."""
    if major == "col":
        return matrix(cols, rows, dtype, "row", aligned=aligned).t()
    ld = (cols + 15) // 8 * 8 if aligned else cols
    buffer = torch.randn(rows, ld, device="cuda") / math.sqrt(max(rows, cols)) ** 0.5
    return buffer.to(DTYPES[dtype])[:, :cols]


def vector(length: int, dtype: str, *, offset: int = 0) -> Tensor:
    """Draw a vector that starts `offset` elements into its buffer."""
    return torch.randn(length + offset, device="cuda").to(DTYPES[dtype])[offset:]


@contextmanager
def without_synchronisation() -> Iterator[None]:
    """Make whatever waits for the device an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
