"""Configurations of small kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import Config, ThreadblockShape


@hashed_once
@dataclass(frozen=True, repr=False)
class SmallConfig(Config):
    """An ``mma.sync`` kernel for batches of small GEMMs, for sm_80 and every later target.

    Each warp computes its own tiles, and meanwhile loads the operands of its next ones. Operands may have any
    alignment. The kernel serves larger GEMMs too, but reads A and B again for each tile.

    Attributes
    ----------
    threadblock : ThreadblockShape
        Rows and columns of a warp's tile, and how much of K it loads at a time.
    stages : int
        Pipeline stages of each warp in shared memory, loads in flight included.
    warps : int
        Warps of a thread block. They share no data.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.types.SmallConfig(co.ThreadblockShape(32, 32, 32))
    SmallConfig(ThreadblockShape(32, 32, 32))
    """

    threadblock: ThreadblockShape
    stages: int = 3
    warps: int = 2

    arch: ClassVar[str] = "small"
    default_target: ClassVar[str] = "sm_80"

    @property
    def whole_k(self) -> bool:
        """Whether one warp adds up all of a tile's K in order. All such kernels give the same bits."""
        return True

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        return f"small_{self.threadblock}_s{self.stages}_w{self.warps}"
