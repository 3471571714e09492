"""Configurations of kernels for few rows and a packed weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.kinds.gemv.config import GemvConfig


@hashed_once
@dataclass(frozen=True, repr=False)
class PackedRowsConfig(GemvConfig):
    """A kernel for few rows of A and a packed weight, by ``mma.sync``.

    A thread block has some lines of the weight, 16 columns of B each, and its warps share K. It reads the weight again
    for every ``rows`` of A.

    Attributes
    ----------
    rows : int
        Rows of A that are multiplied at a time: 8 or 16.
    warps : int
        Warps of a thread block: 4, 8 or 16.
    pieces : int
        Pieces of 64 along K of each line that a warp has on their way at a time: 1, 2 or 4.
    lines : int
        Lines of a thread block: 1, 2, 4 or 8. More of them share what is read of A. N must have as many.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.types.PackedRowsConfig(lines=2)
    PackedRowsConfig(lines=2)
    """

    rows: int = 8
    warps: int = 8
    pieces: int = 2
    lines: int = 4

    arch: ClassVar[str] = "packed_rows"

    @property
    def threadblock(self) -> ThreadblockShape:
        """What one thread block computes at a time."""
        return ThreadblockShape(self.rows, 16 * self.lines, 64 * self.warps * self.pieces)

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"packed_{self.rows}x{self.lines}x{self.warps}_p{self.pieces}"
