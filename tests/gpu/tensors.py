"""Tensors as callers have them: padded, offset, transposed, and outputs in a frame that shows stray writes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


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


class Framed:
    """An output inside a larger buffer, all of it NaN: what the kernel leaves is seen, and what it should not touch."""

    def __init__(self, rows: int, cols: int, dtype: str, major: str = "row", *, aligned: bool = True) -> None:
        inner, outer = (cols, rows) if major == "row" else (rows, cols)
        left = 8 if aligned else 3
        ld = (inner + 31) // 8 * 8 + (0 if aligned else 1)
        self.buffer = torch.full((outer + 2, ld), float("nan"), device="cuda", dtype=DTYPES[dtype])
        window = self.buffer[1 : outer + 1, left : left + inner]
        self.out = window if major == "row" else window.t()
        self._window = window

    def assert_frame_untouched(self, what: str = "") -> None:
        """Require NaN everywhere outside of the output."""
        outside = torch.ones_like(self.buffer, dtype=torch.bool)
        rows, cols = self._window.shape
        offset = (self._window.data_ptr() - self.buffer.data_ptr()) // self.buffer.element_size()
        top, left = divmod(offset, self.buffer.shape[1])
        outside[top : top + rows, left : left + cols] = False
        stray = (outside & ~self.buffer.isnan()).nonzero()
        assert not len(stray), (
            f"the kernel wrote outside of its output {what}: {len(stray)} elements, the first at {stray[0].tolist()} "
            f"where the output begins at {[top, left]}"
        )
