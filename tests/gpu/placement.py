"""Tensors placed exactly as badly as their declared type allows, with NaN all around."""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Kind

DEVICE = "cuda"


def torch_dtype(operand: Operand) -> torch.dtype:
    return getattr(torch, operand.dtype.torch_name)


def whole(*shape: int, largest: int = 16) -> Tensor:
    """Draw whole numbers, so that sums of products are exact and there is one right answer to the last bit."""
    return torch.randint(-largest, largest + 1, shape, device=DEVICE).float()


class Placed:
    """A tensor inside a buffer of NaN, aligned to what its type declares and to no more.

    Attributes
    ----------
    view : Tensor
        The tensor.
    """

    def __init__(self, rows: int, cols: int, operand: Operand) -> None:
        runs, length = (rows, cols) if operand.major == "row" else (cols, rows)
        step = operand.alignment
        # An odd multiple, so that no row is aligned better than the type says.
        pitch = (-(-length // step) + 3) | 1
        self._buffer = torch.full((runs + 2, pitch * step), float("nan"), dtype=torch_dtype(operand), device=DEVICE)
        self._at = (slice(1, 1 + runs), slice(2 * step, 2 * step + length))
        window = self._buffer[self._at]
        self.view = window if operand.major == "row" else window.t()

    def set(self, values: Tensor) -> Placed:
        self.view.copy_(values)
        return self

    def assert_frame_untouched(self) -> None:
        """Require NaN, to the bit that was written, everywhere around the tensor."""
        frame = self._buffer.clone()
        frame[self._at] = float("nan")
        bits = {2: torch.int16, 4: torch.int32}[frame.element_size()]
        fresh = torch.full_like(frame, float("nan"))
        assert torch.equal(frame.view(bits), fresh.view(bits)), "something wrote outside of the tensor"


class PlacedVector:
    """A vector at an odd address, between NaN."""

    def __init__(self, length: int, operand: Operand) -> None:
        self._buffer = torch.full((length + 2,), float("nan"), dtype=torch_dtype(operand), device=DEVICE)
        self.view = self._buffer[1:-1]

    def set(self, values: Tensor) -> PlacedVector:
        self.view.copy_(values)
        return self

    def assert_frame_untouched(self) -> None:
        assert self._buffer[0].isnan(), "something wrote before the vector"
        assert self._buffer[-1].isnan(), "something wrote after the vector"


def place(kind: Kind, operand: Operand, m: int, n: int) -> Placed | PlacedVector:
    if kind is Kind.TILE:
        return Placed(m, n, operand)
    return PlacedVector(n if kind is Kind.ROW else m, operand)


def fit(spec: KernelSpec, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Round a shape up to what the kernel's accesses and pairs must divide: only what TMA loads may end anywhere."""
    step = {"m": 1, "n": 1, "k": 1}

    def whole_accesses(operand: Operand, rows: str, cols: str) -> None:
        inner = cols if operand.major == "row" else rows
        step[inner] = max(step[inner], operand.alignment)

    if spec.sm90 is None:
        whole_accesses(spec.a, "m", "k")
        whole_accesses(spec.b, "k", "n")
    whole_accesses(spec.d, "m", "n")
    if spec.epilogue.swaps_pairs:
        step["n"] = max(step["n"], 2)
    for i, operand in zip(spec.epilogue.inputs, spec.inputs, strict=True):
        if i.kind is Kind.TILE and not operand.aligned:
            whole_accesses(operand, "m", "n")
    for o, operand in zip(spec.epilogue.outputs[1:], spec.outputs, strict=True):
        if o.kind is Kind.TILE:
            whole_accesses(operand, "m", "n")
    m, n, k = (-(-extent // step[side]) * step[side] for extent, side in zip(shape, "mnk", strict=True))
    return m, n, k


def dirty_the_allocator() -> None:
    """Leave bytes that are no zeros in PyTorch's cache, where a workspace will come from."""
    sizes = (1 << 12, 1 << 18, 1 << 20, 1 << 25)
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for size in sizes]
    del blocks
