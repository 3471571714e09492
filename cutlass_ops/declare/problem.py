"""A problem: the extents of a GEMM, and how many GEMMs of these extents there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import plain

MOST_EXTENT = 1 << 40
# Elements of a matrix: more than any memory holds, and few enough to count bytes in 64 bits.
MOST_ELEMENTS = 1 << 48


class Problem(NamedTuple):
    """What one launch computes: D (M, N) = A (M, K) @ B (K, N), once or several times.

    Attributes
    ----------
    m, n, k : int
        Extents of each GEMM.
    count : int
        Number of GEMMs, each with matrices of its own. A :class:`~cutlass_ops.declare.form.Form` says what they are.
    """

    m: int
    n: int
    k: int
    count: int = 1  # type: ignore[assignment]  # a tuple's method of this name has no use here

    @classmethod
    def of(cls, given: object) -> Problem:
        """Return the problem that a user means by (M, N, K). Raises ValueError if it is not three positive integers."""
        lengths = (3, 4) if isinstance(given, Problem) else (3,)
        extents = [plain(x) for x in given] if isinstance(given, Sequence) and not isinstance(given, str) else []
        if len(extents) not in lengths or not all(_is_extent(x) for x in extents):
            raise ValueError(
                f"{given} is not a problem size: give (M, N, K), positive integers, such as (512, 4096, 4096)"
            )
        return cls(*extents)

    @property
    def extents(self) -> tuple[int, int, int]:
        """M, N and K as users see them."""
        return self.m, self.n, self.k

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k * self.count

    def bytes(self, a: float, b: float, d: float) -> float:
        """Return the bytes of all A, B and D together, given the bytes of an element of each."""
        return (self.m * self.k * a + self.k * self.n * b + self.m * self.n * d) * self.count

    def __str__(self) -> str:
        extents = f"{self.m}x{self.n}x{self.k}"
        return extents if self.count == 1 else f"{self.count}x{extents}"

    def to_json(self) -> list[int]:
        """Return the extents, and the count unless it is 1."""
        return [*self.extents] if self.count == 1 else [*self]

    @classmethod
    def from_json(cls, data: object) -> Problem:
        """Rebuild a problem from :meth:`to_json`'s value."""
        values = checked_json.sequence(data, "problem")
        if len(values) not in (3, 4):
            raise ConfigError(f"problem has {len(values)} extents: it has M, N and K, and may have a count")
        found = cls(*(checked_json.integer(value, "problem", 1, MOST_EXTENT) for value in values))
        m, n, k = found.extents
        if max(m * n, n * k, m * k) * found.count > MOST_ELEMENTS:
            what = "a matrix" if found.count == 1 else "matrices"
            raise ConfigError(f"problem {found} has {what} of more than {MOST_ELEMENTS:,} elements")
        return found


def _is_extent(value: object) -> bool:
    return type(value) is int and value > 0
