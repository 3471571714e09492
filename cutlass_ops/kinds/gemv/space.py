"""Which configurations of ordinary loads there are to choose from, and those chosen from where nothing was tuned."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.signature import OpSignature

_ROWS = (1, 2, 4, 8, 16)
_WARPS = (4, 8, 16)
_PIECES = {False: (4, 8, 16), True: (1, 2, 4, 8)}  # by column, by tile

# For few rows, where lines are aligned to 16 bytes and K lies along them.
UNTUNED = (GemvConfig(1), GemvConfig(2), GemvConfig(8, 8, 4), GemvConfig(16, 8, 4))


def candidates(_: OpSignature | None = None) -> Iterator[GemvConfig]:
    """Yield the configurations of kernels of ordinary loads that are worth measuring."""
    for rows, warps in product(_ROWS, _WARPS):
        yield from (GemvConfig(rows, warps, pieces) for pieces in _PIECES[GemvConfig(rows).by_tile])


def near(one: GemvConfig, other: GemvConfig) -> bool:
    """Whether one differs by its rows, its warps or its pieces alone."""
    return (one.rows != other.rows) + (one.warps != other.warps) + (one.pieces != other.pieces) == 1
