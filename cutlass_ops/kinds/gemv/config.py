"""Configurations of GEMV kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import Config, ThreadblockShape


@hashed_once
@dataclass(frozen=True, repr=False)
class GemvConfig(Config):
    """A kernel for few rows of A, which loads without TMA, for sm_80 and every later target.

    With up to four rows, each warp multiplies them by one column of B along all of K, in FP32 arithmetic. With eight or
    sixteen rows, a thread block has sixteen columns, its warps share K, and ``mma.sync`` multiplies. The kernel serves
    any number of rows, but reads B again for every ``rows`` of them.

    Attributes
    ----------
    rows : int
        Rows of A that are multiplied at a time.
    warps : int
        Warps of a thread block.
    pieces : int
        Loads of 16 bytes from a column of B that a thread has in flight at a time; with eight rows or more, from each
        of two columns.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.types.GemvConfig(rows=4)
    GemvConfig(rows=4)
    """

    rows: int = 1
    warps: int = 8
    pieces: int = 8

    arch: ClassVar[str] = "gemv"
    default_target: ClassVar[str] = "sm_80"
    few_rows: ClassVar[bool] = True

    @property
    def by_tile(self) -> bool:
        """Whether the warps of a thread block share its columns, and Tensor Cores multiply."""
        return self.rows >= 8

    @property
    def threadblock(self) -> ThreadblockShape:
        """What one thread block computes at a time, in elements of 16 bits."""
        if self.by_tile:
            return ThreadblockShape(self.rows, 16, 32 * self.warps * self.pieces)
        return ThreadblockShape(self.rows, self.warps, 256 * self.pieces)

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. False: lanes share K."""
        return False

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"gemv_{self.rows}x{self.warps}_p{self.pieces}"
