"""Tensors as callers may have them: views of larger buffers at odd addresses, with poison around and in outputs."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.declare.spec import Operand

# Bits that no kernel should write or use: NaN, and a whole number that shows in integers.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON = {
    torch.bfloat16: 0x7FC1,
    torch.float16: 0x7E01,
    torch.float32: 0x7FC00001,
    torch.float64: 0x7FF8000000000001,
    torch.float8_e4m3fn: 0x7F,
    torch.float8_e5m2: 0x7D,
    torch.int8: 0x4D,
    torch.int32: 0x4D4D4D4D,
}
_VECTOR_BYTES = 16
_GUARD = 128  # elements before and after a view
_LINES = 300  # lines before and after a placed matrix, for writes by false offsets


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

    @classmethod
    def within(
        cls, shape: Sequence[int], strides: Sequence[int], lead: int, count: int, dtype: torch.dtype, device: str
    ) -> Placed:
        """Place a view with given strides, `lead` elements after the start of a buffer of `count` elements."""
        bits = torch.full((count,), _POISON[dtype], dtype=_BITS[dtype.itemsize], device=device)
        return cls(bits.view(dtype).as_strided(tuple(shape), tuple(strides), lead), bits, _POISON[dtype])

    def inside(self, bits: Tensor) -> Tensor:
        """Return the view's place in a buffer like its own."""
        return bits.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset())

    def set(self, values: Tensor) -> Placed:
        """Fill the view."""
        self.view.copy_(values)
        return self

    def refill(self) -> None:
        """Poison the buffer, the view included."""
        self.bits.fill_(self.poison)

    def stray(self, *own: Any) -> int:
        """Count elements that were written outside of the view, or of its parts at some indices."""
        rest = self.bits.clone()
        for index in own or (...,):
            self.inside(rest)[index] = self.poison
        return int((rest != self.poison).sum())

    def assert_only(self, *own: Any, what: str = "") -> None:
        """Require poison everywhere around the view, or around its parts at some indices."""
        stray = self.stray(*own)
        assert not stray, f"{stray} elements outside of {what or 'the output'} were written"


def torch_dtype(operand: Operand) -> torch.dtype:
    """Return the type of an operand's tensors."""
    found: torch.dtype = getattr(torch, operand.dtype.torch_name)
    return found


def placed(shape: Sequence[int], operand: Operand, *, apart: int = 2, device: str = "cuda") -> Placed:
    """Place a vector or a matrix exactly as badly as its declared type allows.

    It is aligned to what the type declares and to no more. Batches, in dimensions before a matrix, are `apart` lines
    from each other.
    """
    dtype, step = torch_dtype(operand), operand.alignment
    if len(shape) == 1:
        return Placed.within(shape, (1,), step, shape[0] + 2 * step + 1, dtype, device)
    *batches, rows, columns = shape
    lines, length = (rows, columns) if operand.major == "row" else (columns, rows)
    # An odd multiple, so that no line is aligned better than the type says.
    pitch = ((-(-length // step) + 3) | 1) * step
    of_batch = (lines + apart) * pitch
    lead = _LINES * pitch + step  # an odd multiple of the alignment too
    strides = [of_batch * math.prod(batches[at + 1 :]) for at in range(len(batches))]
    strides += [pitch, 1] if operand.major == "row" else [1, pitch]
    return Placed.within(shape, strides, lead, lead + of_batch * math.prod(batches) + _LINES * pitch, dtype, device)


@dataclass(frozen=True)
class Memory:
    """Where a drawn call's tensors are.

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
        # An empty matrix lies as a part of one that is not.
        lines, length = (max(1, x) for x in ((rows, columns) if major == "row" else (columns, rows)))
        step = _VECTOR_BYTES // dtype.itemsize if aligned else 1
        # Not aligned: even distances, so that the lines' length is odd if their extent is.
        gaps = (0, 0, step, 4 * step) if aligned else (0, 0, 2, 8)
        pitch = -(-length // step) * step + self.rng.choice(gaps)
        apart = lines * pitch + self.rng.choice(gaps)
        lead = _GUARD + self.rng.choice((0, step, 3 * step))
        count = lead + apart * max(1, math.prod(batches)) + _GUARD
        strides = [apart * math.prod(batches[at + 1 :]) for at in range(len(batches))]
        strides += [pitch, 1] if major == "row" else [1, pitch]
        return Placed.within(shape, strides, lead, count, dtype, self.device)

    def vector(self, length: int, dtype: torch.dtype) -> Placed:
        """Return a vector at any address of an element."""
        lead = _GUARD + self.rng.choice((0, 1, 3))
        return Placed.within((length,), (1,), lead, lead + length + _GUARD, dtype, self.device)

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
        return values(shape, dtype, size, self.device)

    def factors(self, shape: Sequence[int]) -> Tensor:
        """Draw what results are scaled by, in FP32."""
        return torch.rand(tuple(shape), device=self.device) + 0.25


# Up to where a type has every whole number; of FP32, where TF32 has.
_EVERY = {torch.float8_e5m2: 8, torch.float8_e4m3fn: 16, torch.int8: 127, torch.bfloat16: 256}
_EVERY_OF_OTHERS = 2048


@dataclass(frozen=True)
class WholeMemory(Memory):
    """Draws whole numbers, three quarters of them zeros, and powers of two as factors: results have one right value.

    Attributes
    ----------
    largest : int
        The largest number that is drawn, before `size` multiplies it.
    """

    largest: int = 1

    def values(self, shape: Sequence[int], dtype: torch.dtype, size: float = 1.0) -> Tensor:
        """Draw whole numbers, times `size`."""
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        ends = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
        most = min(self.largest, _EVERY.get(dtype, _EVERY_OF_OTHERS), int(ends / size))
        drawn = torch.randint(1, most + 1, tuple(shape), device=self.device).to(wide)
        # Of eight cases, one is positive and one negative.
        sign = torch.randint(0, 8, tuple(shape), device=self.device)
        return torch.where(sign == 0, drawn, torch.where(sign == 1, -drawn, 0.0)) * size

    def factors(self, shape: Sequence[int]) -> Tensor:
        """Draw powers of two from 1 to 16."""
        return 2.0 ** torch.randint(0, 5, tuple(shape), device=self.device).float()


def values(shape: Sequence[int], dtype: torch.dtype, size: float = 1.0, device: str = "cuda") -> Tensor:
    """Draw normal numbers that a type has, in FP32 or FP64; of INT8 any."""
    if dtype is torch.int8:
        return torch.randint(-128, 128, tuple(shape), dtype=dtype, device=device)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    drawn = torch.randn(tuple(shape), dtype=wide, device=device) * size
    most = torch.finfo(dtype).max
    return drawn.clamp(-most, most) if dtype.itemsize == 1 else drawn


def whole(*shape: int, largest: int = 16, device: str = "cuda") -> Tensor:
    """Draw whole numbers, so that sums of products are exact and there is one right answer to the last bit."""
    return torch.randint(-largest, largest + 1, shape, device=device).float()


def dirty_the_allocator() -> None:
    """Leave bytes that are no zeros in PyTorch's cache, where a workspace will come from."""
    blocks = [
        torch.full((size,), 255, dtype=torch.uint8, device="cuda") for size in (1 << 12, 1 << 18, 1 << 20, 1 << 25)
    ]
    del blocks
