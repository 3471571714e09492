"""The pointwise configurations that there are. There is no tuning table: the model chooses."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.declare.config import PointwiseConfig
from cutlass_ops.declare.signature import OpSignature

ROWS = (1, 2, 4, 8, 16, 32)

# Many rows a warp where there are many, so that reductions of columns have few parts.
UNTUNED = (PointwiseConfig(16), PointwiseConfig(2))


def candidates(_: OpSignature | None = None) -> Iterator[PointwiseConfig]:
    """Yield all numbers of rows."""
    return map(PointwiseConfig, ROWS)


def near(one: PointwiseConfig, other: PointwiseConfig) -> bool:
    """Return whether one has twice as many rows as the other."""
    return one.rows in (2 * other.rows, other.rows / 2)
