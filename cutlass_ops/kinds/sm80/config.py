"""Configurations of Sm80 kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.declare.config import Config, InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder

_INSTRUCTION = InstructionShape(16, 8, 16)


@hashed_once
@dataclass(frozen=True, repr=False)
class Sm80Config(Config):
    """A multistage ``mma.sync`` kernel (CUTLASS 2.x), for sm_80 and every later target.

    Attributes
    ----------
    threadblock, warp, instruction
        Tile shapes in elements.
    stages : int
        Pipeline stages in shared memory. With 2, loads go through registers; with 3 or more, by ``cp.async``.
    stream_k : bool
        Whether the last wave's work is split along K over all multiprocessors.

    Raises
    ------
    ConfigError
        If a field has a value of the wrong type.

    Examples
    --------
    >>> co.Sm80Config(co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32), stages=4)
    Sm80Config(ThreadblockShape(128, 128, 32), WarpShape(64, 64, 32), stages=4)
    """

    threadblock: ThreadblockShape
    warp: WarpShape
    instruction: InstructionShape = _INSTRUCTION
    stages: int = 3
    stream_k: bool = False

    arch: ClassVar[str] = "sm80"
    default_target: ClassVar[str] = "sm_80"

    @property
    def warps(self) -> int:
        """Warps in one thread block."""
        t, w = self.threadblock, self.warp
        return (t.m // w.m) * (t.n // w.n) * (t.k // w.k)

    @property
    def slug(self) -> str:
        """Short readable name, unique among legal configurations."""
        tail = "_streamk" if self.stream_k else ""
        return f"sm80_{self.threadblock}_{self.warp}_{self.instruction}_s{self.stages}{tail}"

    @property
    def whole_k(self) -> bool:
        """Whether one thread block adds up all of a tile's K in order. All such kernels give the same bits."""
        return not self.stream_k

    def refuses(self, order: TileOrder) -> str | None:
        """Return why a launch cannot visit the tiles in an order; None if it can."""
        alike = order.raster == USUAL_ORDER.raster and not order.by_gpc
        return None if alike else "strips run along M; only swizzle can be chosen"
