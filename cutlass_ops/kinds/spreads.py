"""How rows may be spread over groups. The host knows how many rows and groups there are, and not which has how many.

A kernel is chosen that does well for several spreads: see :data:`ASSUMED`. Tuning draws groups by them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from cutlass_ops.kinds.arrays import Extents, Floats

# Means of the four quarters of a normal distribution, in standard deviations.
_QUARTERS = (-1.27, -0.32, 0.32, 1.27)
_EULER = 0.5772156649


class Groups(NamedTuple):
    """Groups of several sizes."""

    rows: Floats  # the rows of a group of each size, at least 1: of shape (sizes, *problems)
    counts: Floats  # how many groups have that size, which need not be whole. The shape meets that of `rows`.


@dataclass(frozen=True)
class Spread:
    """One way in which rows may be spread."""

    name: str  # what it is called
    weight: float  # how much it counts in the choice of a kernel. All weights add up to 1.
    # Returns the groups that have rows. Takes the rows of all groups together, and the number of groups.
    groups: Callable[[Floats, Floats], Groups]
    # Returns how many rows each group has relative to the others. Takes the groups' ranks, 1, 2 and so on.
    shares: Callable[[Floats], Floats]
    by_chance: bool = False  # whether each row takes a group by chance

    def drawn(self, rows: int, groups: int, generator: np.random.Generator) -> list[int]:
        """Return how many rows each group has, all together `rows`. Ranks come in a random order."""
        shares = self.shares(np.arange(1.0, groups + 1))
        shares = shares / shares.sum()
        if self.by_chance:
            return [int(size) for size in generator.multinomial(rows, shares)]
        sizes = np.floor(rows * shares).astype(np.int64)
        lacking = np.argsort(sizes - rows * shares, kind="stable")[: rows - int(sizes.sum())]
        sizes[lacking] += 1
        return [int(size) for size in generator.permutation(sizes)]

    def of(self, problems: Extents) -> Groups:
        """Return the groups of problems whose M is the mean of a group's rows."""
        return self.groups(problems.m * problems.gemms, problems.gemms)


def _equal(rows: Floats, groups: Floats) -> Groups:
    """All groups have as many."""
    return _whole([(rows / groups, groups)])


def _random(rows: Floats, groups: Floats) -> Groups:
    """Each row takes a group at random. With one group, chance changes nothing."""
    mean = rows / groups
    deviation = np.sqrt(mean * (1 - 1 / groups))
    return _whole([(mean + at * deviation, groups / 4) for at in _QUARTERS])


def _zipf(rows: Floats, groups: Floats) -> Groups:
    """Zipf's law: the group of rank r has a share of 1 / r. Ranks from one power of two to the next count alike."""
    whole, found, first = _harmonic(groups), [], 0
    while first < groups.max():
        last = np.minimum(max(1, 2 * first), groups)
        count = np.maximum(last - first, 0)
        share = np.where(count > 0, (_harmonic(last) - _harmonic(np.float64(first))) / whole, 0)
        found.append((rows * share / np.maximum(count, 1), count))
        first = max(1, 2 * first)
    return _whole(found)


def _one(rows: Floats, groups: Floats) -> Groups:
    """All rows are of one group."""
    return _whole([(rows, np.ones_like(groups))])


# Equal groups are what a router is trained for, and real ones are between these and Zipf's. That one has all rows is
# rare, but small tiles take several times as long then.
ASSUMED = (
    Spread("equal", 0.4, _equal, np.ones_like),
    Spread("random", 0.1, _random, np.ones_like, by_chance=True),
    Spread("Zipf", 0.3, _zipf, lambda ranks: 1 / ranks),
    Spread("one", 0.2, _one, lambda ranks: np.where(ranks == 1, 1.0, 0.0)),
)


def in_order(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of spreads, written in any case, in one order; none if they are all."""
    known = {spread.name.lower(): spread.name for spread in ASSUMED}
    if isinstance(names, str):
        raise ValueError(f"spreads is {names!r}: pass a sequence of names, such as [{names!r}]")
    wrong = [name for name in names if str(name).lower() not in known]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a spread of rows: use some of {', '.join(known.values())}")
    asked = {name.lower() for name in names}
    found = tuple(name for lower, name in known.items() if lower in asked)
    return () if len(found) == len(known) else found


def named(names: Sequence[str]) -> tuple[Spread, ...]:
    """Return spreads by their names, with weights that add up to 1; without names, all that are assumed."""
    wanted = in_order(names)
    found = [spread for spread in ASSUMED if not wanted or spread.name in wanted]
    whole = sum(spread.weight for spread in found)
    return tuple(replace(spread, weight=spread.weight / whole) for spread in found)


def _whole(sizes: list[tuple[Floats, Floats]]) -> Groups:
    """Return groups of whole rows. Where there are fewer rows than groups, some have none and the others one."""
    shape = np.broadcast_shapes(*(np.shape(x) for size in sizes for x in size))
    rows, count = (np.stack([np.broadcast_to(x, shape) for x in each]) for each in zip(*sizes, strict=True))
    count = np.where(rows < 1, count * np.maximum(rows, 0), count)
    return Groups(np.maximum(1, np.rint(rows)), count)


def _harmonic(n: Floats) -> Floats:
    """Return the sum of 1 / r for r up to n, by Euler and Maclaurin: within 0.3%."""
    few = np.maximum(n, 1)
    return np.where(n > 0, np.log(few) + _EULER + 1 / (2 * few) - 1 / (12 * few**2) + 1 / (120 * few**4), 0)
