"""The search space of GEMV configurations, and the choices without a tuning table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.signature import OpSignature

_ROWS = (1, 2, 4, 8, 16)
_WARPS = (4, 8, 16)
_PIECES = {False: (4, 8, 16), True: (1, 2, 4, 8)}  # by column, by tile

# For small M, with K-major operands aligned to 16 bytes.
UNTUNED = (GemvConfig(1), GemvConfig(2), GemvConfig(8, 8, 4), GemvConfig(16, 8, 4))


def candidates(_: OpSignature | None = None) -> Iterator[GemvConfig]:
    """Yield the GEMV configurations that are worth measuring."""
    for rows, warps in product(_ROWS, _WARPS):
        yield from (GemvConfig(rows, warps, pieces) for pieces in _PIECES[GemvConfig(rows).by_tile])


def near(one: GemvConfig, other: GemvConfig) -> bool:
    """Return whether two configurations differ only in rows, only in warps or only in pieces."""
    return (one.rows != other.rows) + (one.warps != other.warps) + (one.pieces != other.pieces) == 1
