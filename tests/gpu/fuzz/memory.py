"""Tensors as callers may have them: views of larger buffers at odd addresses, with poison around and in outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Bits that no kernel should write or use: NaN, and a whole number that shows in INT8.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = {
    torch.bfloat16: 0x7FC1,
    torch.float16: 0x7E01,
    torch.float32: 0x7FC00001,
    torch.float64: 0x7FF8000000000001,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7D,
    torch.int8: 0x4D,
}
_VECTOR_BYTES = 16
_GUARD = 128  # elements before and after a view


@dataclass(frozen=True)
class Placed:
    """A view inside a buffer of poison.

    Attributes
    ----------
    view : Tensor
        The view.
    bits : Tensor
        The buffer, as whole numbers.
    poison : int
        What it was filled with.
    """

    view: Tensor
    bits: Tensor
    poison: int

    def inside(self, bits: Tensor) -> Tensor:
        """Return the view's place in a buffer like its own."""
        return bits.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())

    def refill(self) -> None:
        """Poison the buffer, the view included."""
        self.bits.fill_(self.poison)

    def stray(self, used: int | None = None) -> int:
        """Count elements that were written outside of the view, or of its first rows."""
        rest = self.bits.clone()
        self.inside(rest)[slice(used)].fill_(self.poison)
        return int((rest != self.poison).sum())


@dataclass(frozen=True)
class Memory:
    """Where a call's tensors are.

    Attributes
    ----------
    device : str
        A device's type; on "meta", tensors have no data.
    rng : random.Random
        Decides addresses and strides.
    """

    device: str
    rng: random.Random

    def placed(self, shape: Sequence[int], dtype: torch.dtype, major: str = "row", *, aligned: bool = True) -> Placed:
        """Return a matrix, with batches before it, whose lines begin at multiples of 16 bytes, or anywhere."""
        *batches, rows, columns = shape
        lines, length = (rows, columns) if major == "row" else (columns, rows)
        step = _VECTOR_BYTES // dtype.itemsize if aligned else 1
        # Not aligned: even distances, so that the lines' length is odd if their extent is.
        gaps = (0, 0, step, 4 * step) if aligned else (0, 0, 2, 8)
        pitch = -(-length // step) * step + self.rng.choice(gaps)
        apart = lines * pitch + self.rng.choice(gaps)
        lead = _GUARD + self.rng.choice((0, step, 3 * step))
        count = lead + apart * max(1, math.prod(batches)) + _GUARD
        strides = [apart * math.prod(batches[at + 1 :]) for at in range(len(batches))]
        strides += [pitch, 1] if major == "row" else [1, pitch]
        return self._within(tuple(shape), tuple(strides), lead, count, dtype)

    def vector(self, length: int, dtype: torch.dtype) -> Placed:
        """Return a vector at any address of an element."""
        lead = _GUARD + self.rng.choice((0, 1, 3))
        return self._within((length,), (1,), lead, lead + length + _GUARD, dtype)

    def _within(
        self, shape: tuple[int, ...], strides: tuple[int, ...], lead: int, count: int, dtype: torch.dtype
    ) -> Placed:
        bits = torch.full((count,), _POISON[dtype], dtype=_BITS[dtype.itemsize], device=self.device)
        return Placed(bits.view(dtype).as_strided(shape, strides, lead), bits, _POISON[dtype])

    # Values, of which a view is filled.

    def matrix(
        self, shape: Sequence[int], dtype: torch.dtype, size: float = 1.0, major: str = "row", *, aligned: bool = True
    ) -> Tensor:
        """Draw a normal matrix of a deviation."""
        view = self.placed(shape, dtype, major, aligned=aligned).view
        return view.copy_(self.values(shape, dtype, size))

    def numbers(self, length: int, dtype: torch.dtype, size: float = 1.0) -> Tensor:
        """Draw a normal vector."""
        return self.vector(length, dtype).view.copy_(self.values((length,), dtype, size))

    def values(self, shape: Sequence[int], dtype: torch.dtype, size: float = 1.0) -> Tensor:
        """Draw normal numbers, contiguous; of INT8 any."""
        if dtype is torch.int8:
            return torch.randint(-128, 128, tuple(shape), dtype=dtype, device=self.device)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        drawn = torch.randn(tuple(shape), dtype=wide, device=self.device) * size
        most = torch.finfo(dtype).max
        return drawn.clamp(-most, most) if dtype.itemsize == 1 else drawn
