"""What the caller gave: two operands and a problem, from texts and sizes or from tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import DType
from cutlass_ops.tools.contract.tensor_cores import ELEMENTS, element

_FORM = "DTYPE[.row|.col][.alignN], such as 'bf16.row' or 'f16.col.align4'"
_TEXT = re.compile(r"(?P<dtype>[\w.]*?\w)(\.(?P<major>row|col))?(\.align(?P<alignment>[0-9]{1,4}))?")
# How the Tensor Cores read FP32 in memory.
PRECISIONS = ("ieee", "tf32", "tf32x3")


@dataclass(frozen=True)
class Given:
    """One operand."""

    dtype: str  # element type in memory
    major: str  # ``"row"`` or ``"col"``
    line_bytes: int  # greatest power of two, up to 16, that divides the address of every line in bytes

    @property
    def element(self) -> DType:
        """Its element type."""
        return ELEMENTS[self.dtype]

    @property
    def aligned(self) -> bool:
        """Whether TMA can address it."""
        return self.line_bytes >= arch.TMA_ALIGNMENT_BYTES

    def __str__(self) -> str:
        tail = "" if self.aligned else f".align{max(self.element.count_in(self.line_bytes), 1)}"
        return f"{self.dtype}.{self.major}{tail}"


@dataclass(frozen=True)
class Asked:
    """The whole question: operands, problem, and how FP32 is multiplied."""

    a: Given
    b: Given
    m: int
    n: int
    k: int
    precision: str = "ieee"  # ``"ieee"``, ``"tf32"`` or ``"tf32x3"``: how FP32 operands are multiplied

    @property
    def types(self) -> tuple[str, str]:
        """The types that are multiplied: FP32 is TF32 if the precision allows it."""
        if (self.a.dtype, self.b.dtype) == ("f32", "f32") and self.precision != "ieee":
            return "tf32", "tf32"
        return self.a.dtype, self.b.dtype

    @property
    def products(self) -> int:
        """How many Tensor Core products make one of the caller's."""
        return 3 if self.precision == "tf32x3" and self.types[0] == "tf32" else 1

    def extent_along(self, name: str) -> str:
        """Return the extent along an operand's lines: ``"m"``, ``"n"`` or ``"k"``."""
        if name == "a":
            return "k" if self.a.major == "row" else "m"
        return "n" if self.b.major == "row" else "k"


def from_text(text: str, major: str, m: int, n: int, k: int, *, first: bool) -> Given:
    """Read ``"bf16.row"``; lines are as long as the problem says, and the address is a multiple of 16 bytes."""
    match = _TEXT.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(f"operand {text!r} is not of the form {_FORM}")
    dtype, major = element(match["dtype"]), match["major"] or major
    given = Given("f32" if dtype in PRECISIONS else dtype, major, arch.TMA_ALIGNMENT_BYTES)
    rows = (m, k) if first else (k, n)
    lines = given.element.bytes_of(rows[1] if major == "row" else rows[0])
    elements = int(match["alignment"] or given.element.count_in(arch.TMA_ALIGNMENT_BYTES))
    if elements < 1 or elements & (elements - 1):
        raise ValueError(f"operand {text!r} is aligned to {elements} elements: use a power of two, such as .align8")
    declared = given.element.bytes_of(elements)
    return replace(given, line_bytes=math.gcd(lines, declared, arch.TMA_ALIGNMENT_BYTES))


def require_text(text: str) -> None:
    """Require a text such as ``"bf16.row"``; a ValueError says what it may be."""
    from_text(text, "row", 1, 1, 1, first=True)


def require_effect(precision: str, a: str, b: str) -> None:
    """Require operands for which a precision makes a difference; a ValueError says what to do."""
    require_fp32(precision, {repr(text): from_text(text, "row", 1, 1, 1, first=True).dtype for text in (a, b)})
    named = precision_of(a)
    if named not in ("ieee", precision):
        raise ValueError(f"precision {precision!r} contradicts {a!r}: leave it out, or write f32 instead of {named}")


def require_fp32(precision: str, operands: Mapping[str, str]) -> None:
    """Require operands of FP32, given by their names in messages and types; a ValueError says what to do."""
    for name, dtype in operands.items():
        if dtype != "f32":
            raise ValueError(f"precision {precision!r} has no effect on {name}: leave it out, or make A and B f32")


def precision_of(text: str) -> str:
    """Return the precision that a text such as ``"tf32.row"`` names: ``"ieee"`` for another type."""
    match = _TEXT.fullmatch(text.strip().lower())
    named = element(match["dtype"]) if match else ""
    return named if named in PRECISIONS else "ieee"


def from_tensor(name: str, tensor: Any) -> Given:
    """Read a matrix: type, major, and the alignment of its address and leading dimension."""
    if tensor.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: pass a matrix")
    rows, columns = tensor.stride()
    major = "row" if columns == 1 or tensor.shape[1] == 1 else "col" if rows == 1 or tensor.shape[0] == 1 else ""
    if not major:
        raise ValueError(
            f"{name} has strides {tensor.stride()}: one must be 1, or no kernel reads it as it is. Call "
            f"{name}.contiguous() first"
        )
    given = Given(element(tensor.dtype), major, arch.TMA_ALIGNMENT_BYTES)
    ld = rows if major == "row" else columns
    return replace(given, line_bytes=math.gcd(tensor.data_ptr(), given.element.bytes_of(ld), arch.TMA_ALIGNMENT_BYTES))
