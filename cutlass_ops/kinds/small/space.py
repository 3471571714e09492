"""The search space of small kernels, and the choices without a tuning table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutlass_ops.declare.config import SmallConfig, ThreadblockShape
from cutlass_ops.declare.signature import OpSignature

_SIDES = (16, 32, 64)
_STAGES = (2, 3, 4)
_WARPS = (1, 2, 4)

# One for each size, with so many stages that a multiprocessor has most of its share of a thousand batches on its way.
UNTUNED = (
    SmallConfig(ThreadblockShape(64, 64, 64), stages=2),
    SmallConfig(ThreadblockShape(32, 64, 64), stages=2),
    SmallConfig(ThreadblockShape(64, 32, 64), stages=2),
    SmallConfig(ThreadblockShape(32, 32, 32), warps=4),
    SmallConfig(ThreadblockShape(16, 16, 16), stages=4, warps=4),
)


def candidates(_: OpSignature | None = None) -> Iterator[SmallConfig]:
    """Yield all combinations of tile, stages and warps."""
    for m, n, k, stages, warps in product(_SIDES, _SIDES, _SIDES, _STAGES, _WARPS):
        yield SmallConfig(ThreadblockShape(m, n, k), stages, warps)


def near(one: SmallConfig, other: SmallConfig) -> bool:
    """Return whether two configurations differ in exactly one of: tile M, N, K, stages, warps."""
    mine, its = ((*_tile(c), c.stages, c.warps) for c in (one, other))
    return sum(x != y for x, y in zip(mine, its, strict=True)) == 1


def _tile(config: SmallConfig) -> tuple[int, int, int]:
    return config.threadblock.m, config.threadblock.n, config.threadblock.k
