"""Numbers of rows of A for which a weight's kernels are chosen in advance."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

# Up to so many rows, kernels are chosen for each number.
FEW = 32


def _rows() -> Iterator[int]:
    """Yield numbers of rows, in steps of 8 or of at most a thirty-second."""
    yield from (1, 2, 4)
    rows = 8
    while rows <= 16384:
        yield rows
        rows += max(8, (1 << rows.bit_length()) >> 6)
    yield 1 << 26


ROWS = tuple(_rows())


def nearest(rows: float) -> int:
    """Return the number of rows nearest to a mean for which kernels are chosen in advance, at least 1.

    Beyond the last of them, it is the mean itself, rounded.
    """
    if rows <= FEW or rows > ROWS[-2]:
        return max(1, round(rows))
    at = bisect_left(ROWS, rows)
    below, above = ROWS[at - 1], ROWS[at]
    return below if rows - below < above - rows else above
