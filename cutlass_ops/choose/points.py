"""The measurements of a table: as points that people read and tuners add to, and as arrays that a choice computes with.

A choice looks at ten thousand measurements. As objects, these take ten times as long to make and to go through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeAlias, overload

import numpy as np

from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Flags, Floats, Places

# The least distance of an estimate behind the fastest: more than dispatch treats as equal.
ESTIMATED = 0.005
# Bounds of measurements: far beyond any kernel's, with finite ratios and logarithms. A table has three digits of a
# microsecond.
MICROSECONDS = (0.001, 1e12)
BEHIND = (-0.9, 1e6)

# A day, and the spreads of groups of rows.
Session: TypeAlias = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Measured:
    """One configuration's time at a problem.

    Attributes
    ----------
    config : Config
        The configuration.
    microseconds : float
        Median over the rounds.
    behind : float
        Median over the rounds of its time over the fastest's of the same round, minus one.
    order : TileOrder
        The order of its tiles.
    """

    config: Config
    microseconds: float
    behind: float
    order: TileOrder = USUAL_ORDER

    @property
    def ordered(self) -> Ordered:
        """The configuration with the order of its tiles."""
        return Ordered(self.config, self.order)


@dataclass(frozen=True)
class Point:
    """One problem, measured in one session.

    Attributes
    ----------
    problem : Problem
        Its extents.
    date : str
        Day of the session, such as ``"2026-11-21"``.
    measured : tuple of Measured
        Measurements, fastest first.
    peers : tuple of (str, float)
        Microseconds of peers, by name.
    spreads : tuple of str
        Of groups: how their rows were spread (``kinds/spreads.py``), if not in all ways that are assumed. Times are
        geometric means over these.
    """

    problem: Problem
    date: str
    measured: tuple[Measured, ...]
    peers: tuple[tuple[str, float], ...] = ()
    spreads: tuple[str, ...] = ()

    def joined(self, older: Point) -> Point:
        """Return the point with an older point's other kernels, rescaled by a kernel that both have.

        Without such a kernel, or of rows that were spread otherwise, the older measurements are not comparable and are
        dropped.
        """
        if self.spreads != older.spreads:
            return self
        before = {m.config: m for m in reversed(older.measured)}
        anchor = next((m for m in self.measured if m.config in before), None)
        if anchor is None:
            return self
        factor = (1 + anchor.behind) / (1 + before[anchor.config].behind)
        best = self.measured[0].microseconds
        known = {m.config for m in self.measured}
        further = [
            Measured(m.config, best * (1 + m.behind) * factor, (1 + m.behind) * factor - 1, m.order)
            for m in older.measured
            if m.config not in known
        ]
        # An estimate must neither displace nor equal the measured fastest, or kernels would be chosen by estimates.
        least = best * (1 + ESTIMATED)
        further = [m if m.behind > ESTIMATED else Measured(m.config, least, ESTIMATED, m.order) for m in further]
        further = [m for m in further if m.behind <= BEHIND[1] and m.microseconds <= MICROSECONDS[1]]
        measured = tuple(sorted([*self.measured, *further], key=lambda m: m.behind))
        return replace(self, measured=measured, peers=self.peers or older.peers)


@dataclass(frozen=True, eq=False)
class Columns:
    """The measurements of points as arrays: those of one point follow each other, the fastest first.

    Attributes
    ----------
    configs, orders : tuple
        The configurations, and the orders of tiles.
    sessions : tuple of (str, tuple of str)
        The day of each point, and its spreads.
    problems : array
        M, N, K and the number of GEMMs of each point, of shape (points, 4).
    points, kernels, places : array
        Each measurement's point, configuration and order of tiles, as indices into these.
    microseconds, behind : array
        Its numbers, as :class:`Measured` has them.
    """

    configs: tuple[Config, ...]
    orders: tuple[TileOrder, ...]
    sessions: tuple[Session, ...]
    problems: Places
    points: Places
    kernels: Places
    places: Places
    microseconds: Floats
    behind: Floats

    @classmethod
    def of(cls, points: Iterable[Point]) -> Columns:
        """Return the measurements of points."""
        points = tuple(points)
        # Points share objects: comparing identities is faster than hashing each measurement's configuration.
        shared = {id(m.config): m.config for point in points for m in point.measured}
        configs = {config: at for at, config in enumerate(dict.fromkeys(shared.values()))}
        orders = {order: at for at, order in enumerate(dict.fromkeys(m.order for p in points for m in p.measured))}
        place = {known: configs[config] for known, config in shared.items()}
        rows = [
            [(place[id(m.config)], orders[m.order], m.microseconds, m.behind) for m in point.measured]
            for point in points
        ]
        sessions = tuple((point.date, point.spreads) for point in points)
        return cls.read(tuple(configs), tuple(orders), sessions, [point.problem for point in points], rows)

    @classmethod
    def read(
        cls,
        configs: tuple[Config, ...],
        orders: tuple[TileOrder, ...],
        sessions: tuple[Session, ...],
        problems: Sequence[Problem],
        rows: Sequence[Sequence[Sequence[float]]],
    ) -> Columns:
        """Return measurements that are written as rows: the place of a configuration, of an order, and both numbers."""
        counts = [len(each) for each in rows]
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.float64, 4 * sum(counts)).reshape(-1, 4)
        kernels, places, microseconds, behind = np.ascontiguousarray(flat.T)
        points = np.repeat(np.arange(len(counts)), counts)
        extents = np.array(problems, np.int64).reshape(-1, len(Problem._fields))
        indices = points, kernels.astype(np.int64), places.astype(np.int64)
        return cls(configs, orders, sessions, extents, *indices, microseconds, behind)

    @cached_property
    def starts(self) -> Places:
        """The first measurement of each point, and the number of all: of shape (points + 1,)."""
        return np.searchsorted(self.points, np.arange(len(self.problems) + 1))

    @cached_property
    def raced(self) -> Floats:
        """The microseconds of each measurement by the fastest of its race.

        Medians of a race that was left early are of a cooler chip; ratios within a round are not.
        """
        return np.asarray(self.microseconds[self.starts[:-1]][self.points] * (1 + self.behind))

    def part(self, which: Flags) -> Columns:
        """Return some of the measurements, and the points that have any of them."""
        of = self.points[which]
        points = np.unique(of)
        return Columns(
            configs=self.configs,
            orders=self.orders,
            sessions=tuple(self.sessions[at] for at in points.tolist()),
            problems=self.problems[points],
            points=np.searchsorted(points, of),
            kernels=self.kernels[which],
            places=self.places[which],
            microseconds=self.microseconds[which],
            behind=self.behind[which],
        )


class Recorded(Sequence[Point]):
    """Points that are kept as arrays, and made where somebody looks at them.

    Parameters
    ----------
    columns : Columns
        Their measurements.
    peers : sequence of tuple
        The microseconds of each point's peers, by name.
    """

    def __init__(self, columns: Columns, peers: Sequence[tuple[tuple[str, float], ...]]) -> None:
        self.columns, self._peers = columns, peers

    @cached_property
    def _all(self) -> tuple[Point, ...]:
        of = self.columns
        rows = zip(of.kernels.tolist(), of.microseconds.tolist(), of.behind.tolist(), of.places.tolist(), strict=True)
        measured = [Measured(of.configs[at], us, behind, of.orders[order]) for at, us, behind, order in rows]
        starts = of.starts.tolist()
        about = zip(of.problems.tolist(), of.sessions, self._peers, starts, starts[1:], strict=False)
        return tuple(
            Point(Problem(*problem), date, tuple(measured[first:after]), peers, spreads)
            for problem, (date, spreads), peers, first, after in about
        )

    def __len__(self) -> int:
        return len(self.columns.problems)

    def __iter__(self) -> Iterator[Point]:
        return iter(self._all)

    @overload
    def __getitem__(self, at: int) -> Point: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Point, ...]: ...
    def __getitem__(self, at: Any) -> Any:
        return self._all[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorded | tuple) and self._all == tuple(other)

    def __hash__(self) -> int:
        return hash(self._all)

    def __repr__(self) -> str:
        return repr(self._all)


def columns_of(points: Sequence[Point]) -> Columns:
    """Return the measurements of points as arrays."""
    return points.columns if isinstance(points, Recorded) else Columns.of(points)
