"""Configurations of pointwise kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import Config, ThreadblockShape


@hashed_once
@dataclass(frozen=True, repr=False)
class PointwiseConfig(Config):
    """A kernel for an epilogue that does not read the accumulator, for sm_80 and every later target.

    Each warp has rows of 256 columns, of which a thread reads and writes eight at a time. The kernel is limited by
    memory bandwidth if each element takes few operations.

    Attributes
    ----------
    rows : int
        Rows of each of a thread block's eight warps. In a reduction over columns, each thread block gives one partial
        result.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.types.PointwiseConfig(rows=4)
    PointwiseConfig(rows=4)
    """

    rows: int = 16

    arch: ClassVar[str] = "pointwise"
    default_target: ClassVar[str] = "sm_80"

    warps: ClassVar[int] = 8

    @property
    def threadblock(self) -> ThreadblockShape:
        """What one thread block computes. K is not read."""
        return ThreadblockShape(self.rows * self.warps, 256, 16)

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. This kernel adds up nothing."""
        return False

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"pointwise_{self.rows}"
