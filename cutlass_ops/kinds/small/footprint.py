"""The shared memory of a small kernel (``templates/include/cutlass_ops/small.h``)."""

from __future__ import annotations

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.config import SmallConfig
from cutlass_ops.declare.spec import KernelSpec

# Elements between the lines of an operand, columns between those of sums, and rows of sums that pass at a time.
_PADDING, _SUMS_PADDING, _SUMS_ROWS = 8, 4, 16


def shared_memory(spec: KernelSpec, config: SmallConfig, stages: int | None = None) -> int:
    """Return the bytes of a thread block: of each warp its stages, and sums on their way to D."""
    tile = config.threadblock
    a = _lines(tile.m, tile.k) if spec.a.major == "row" else _lines(tile.k, tile.m)
    b = _lines(tile.k, tile.n) if spec.b.major == "row" else _lines(tile.n, tile.k)
    sums = _SUMS_ROWS * (tile.n + _SUMS_PADDING) * f32.bytes
    return config.warps * ((stages or config.stages) * (a + b) * spec.a.dtype.bytes + sums)


def _lines(count: int, length: int) -> int:
    return count * (length + _PADDING)
