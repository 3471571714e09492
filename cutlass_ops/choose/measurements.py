"""What tables say of the kernels of a pool: the time of each at measured problems, in its best order of tiles."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from cutlass_ops.choose.points import Columns
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Floats, Places
from cutlass_ops.kinds.sm90.model import costs_of

Source = Literal["model", "interpolated", "measured"]
SOURCES: tuple[Source, ...] = ("model", "interpolated", "measured")

# Times that differ by less than this are equal up to noise.
_NOISE = 0.005


@dataclass(frozen=True)
class Candidate:
    """A kernel at a problem.

    Attributes
    ----------
    config : Config
        Its configuration.
    microseconds : float
        Measured or predicted time.
    source : {"model", "interpolated", "measured"}
        Where the time comes from.
    order : TileOrder
        The order of its tiles.
    """

    config: Config
    microseconds: float
    source: Source
    order: TileOrder = USUAL_ORDER

    @property
    def ordered(self) -> Ordered:
        """The configuration with the order of its tiles."""
        return Ordered(self.config, self.order)


@dataclass(frozen=True, eq=False)
class Times:
    """What one table says of the kernels of a pool.

    Attributes
    ----------
    columns : Columns
        The measurements that count. Their configurations are the pool's.
    problems : array
        All problems of the table, of shape (problems, 4), even those at which none counts.
    rows : array
        The problem of each measurement, as an index into these.
    microseconds : array
        The time of each measurement.
    """

    columns: Columns
    problems: Places
    rows: Places
    microseconds: Floats

    @classmethod
    def of(cls, columns: Columns, among: Collection[Config], index: Mapping[Config, int], device: Device) -> Times:
        """Return the times of some kernels of a pool, of which each has an index."""
        here = np.array([index[c] if c in among else -1 for c in columns.configs], np.int64)
        kernels = here[columns.kernels]
        # A kernel's first order of tiles is its best one.
        first = np.zeros(len(kernels), np.bool_)
        first[np.unique(columns.points * (len(index) + 1) + kernels, return_index=True)[1]] = True
        which = first & (kernels >= 0)
        rows, microseconds = columns.points[which], columns.raced[which]
        own = replace(columns.part(which), configs=tuple(index), kernels=kernels[which])
        return cls(own, columns.problems, rows, _ranked(own, microseconds, device))

    @cached_property
    def starts(self) -> Places:
        """The first measurement of each problem, and the number of all: of shape (problems + 1,)."""
        return np.searchsorted(self.rows, np.arange(len(self.problems) + 1))

    def at(self, row: int) -> tuple[Places, Floats]:
        """Return the measured kernels of a problem, and their microseconds."""
        part = slice(*self.starts[row : row + 2].tolist())
        return self.columns.kernels[part], self.microseconds[part]

    def ordered(self, row: int, kernel: int) -> Ordered:
        """Return a kernel that was measured at a problem, in its best order of tiles."""
        columns, (first, after) = self.columns, self.starts[row : row + 2].tolist()
        at = first + int((columns.kernels[first:after] == kernel).argmax())
        return Ordered(columns.configs[kernel], columns.orders[columns.places[at]])

    def candidates(self, row: int) -> dict[Config, Candidate]:
        """Return the measured kernels of a problem, the first of the table first."""
        columns, (first, after) = self.columns, self.starts[row : row + 2].tolist()
        found = (
            Candidate(columns.configs[columns.kernels[at]], us, "measured", columns.orders[columns.places[at]])
            for at, us in zip(range(first, after), self.microseconds[first:after].tolist(), strict=True)
        )
        return {candidate.config: candidate for candidate in found}


class Measurements(Mapping[Problem, Mapping[Config, Candidate]]):
    """The measured kernels of each problem, by configuration. If several tables have a problem, the first counts.

    Parameters
    ----------
    tables : sequence of Times
        What the tables say.
    """

    def __init__(self, tables: Sequence[Times]) -> None:
        self._places: dict[tuple[int, ...], tuple[Times, int]] = {}
        for table in tables:
            for row, problem in enumerate(map(tuple, table.problems.tolist())):
                self._places.setdefault(problem, (table, row))
        self._made: dict[Problem, Mapping[Config, Candidate]] = {}

    def __getitem__(self, problem: Problem) -> Mapping[Config, Candidate]:
        table, row = self._places[problem]
        # A choice looks at few of a table's problems, again and again.
        if problem not in self._made:
            self._made[problem] = table.candidates(row)
        return self._made[problem]

    def __contains__(self, problem: object) -> bool:
        return problem in self._places

    def __iter__(self) -> Iterator[Problem]:
        return (Problem(*problem) for problem in self._places)

    def __len__(self) -> int:
        return len(self._places)

    def times(self, problem: Problem) -> tuple[Places, Floats]:
        """Return the measured kernels of a problem, as indices into the pool, and their microseconds."""
        table, row = self._places[problem]
        return table.at(row)

    def ordered(self, problem: Problem, kernel: int) -> Ordered:
        """Return a kernel, an index into the pool, that was measured at a problem, in its best order of tiles."""
        table, row = self._places[problem]
        return table.ordered(row, kernel)


def _ranked(measured: Columns, microseconds: Floats, device: Device) -> Floats:
    """Sort equally fast long kernels by tile size, largest first, by exchanging their times.

    The largest tile reads least per multiplication and so draws least power, which limits the clock of long kernels.
    """
    if not len(microseconds):
        return microseconds
    points = measured.points
    least = np.minimum.reduceat(microseconds, measured.starts[:-1])[points]
    equal = np.flatnonzero((least > costs_of(device).throttle_after) & (microseconds <= least * (1 + _NOISE)))
    kernels, which = np.unique(measured.kernels[equal], return_inverse=True)
    reads = np.array([_reads(measured.configs[at]) for at in kernels.tolist()], np.float64)[which]
    by_reads = equal[np.lexsort((reads, points[equal]))]
    by_time = equal[np.lexsort((microseconds[equal], points[equal]))]
    found: Floats = np.array(microseconds)
    found[by_reads] = microseconds[by_time]
    return found


def _reads(config: Config) -> float:
    """Return the elements of A and B that a tile reads per multiplication."""
    tile = config.threadblock
    return 1 / tile.m + 1 / tile.n
