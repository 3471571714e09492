"""Times of kernels at a problem: measured, else the model's, corrected by measurements nearby."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from cutlass_ops.choose.notes import Errors, Notes, Where, coordinates
from cutlass_ops.choose.pool import Pool
from cutlass_ops.choose.tables import Columns, Table
from cutlass_ops.declare.chips import peaks_of
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems
from cutlass_ops.kinds.sm90.model import costs_of
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.kinds.traits import Traits

Source = Literal["model", "interpolated", "measured"]
SOURCES: tuple[Source, ...] = ("model", "interpolated", "measured")

# Times that differ by less than this are equal up to noise.
_NOISE = 0.005


@dataclass(frozen=True)
class Candidate:
    """A kernel at a problem."""

    config: Config
    microseconds: float  # measured or predicted time
    source: Source  # where the time comes from
    order: TileOrder = USUAL_ORDER  # the order of its tiles

    @property
    def ordered(self) -> Ordered:
        """The configuration with the order of its tiles."""
        return Ordered(self.config, self.order)


@dataclass(frozen=True, eq=False)
class Times:
    """What one table says of the kernels of a pool."""

    # The measurements that count. Their configurations are the pool's.
    columns: Columns
    problems: Places  # all problems of the table, of shape (problems, 4), even those at which none counts
    rows: Places  # the problem of each measurement, as an index into these
    microseconds: Floats  # the time of each measurement

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
    """The measured kernels of each problem, by configuration. If several tables have a problem, the first counts."""

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


# Weight of the mean error of all kernels of a kind (`benchmarks/evaluate_dispatch.py`).
_PRIOR = 1.0
# Weight of nearby measurements from which a time counts as interpolated.
_NEAR = 0.5
# Problems to foretell at once: bounds memory.
_AT_ONCE = 512


@dataclass(frozen=True, eq=False)
class Expected:
    """Expected times of kernels at problems. Arrays of shape (problems, kernels)."""

    times: Floats  # microseconds
    sources: Places  # where they come from, as indices into `SOURCES`
    by_gpc: Flags  # whether the model prefers a tile order by GPC

    def decisive(self) -> Floats:
        """Return the times; infinite for unmeasured kernels at problems where others were measured."""
        measured = self.sources == SOURCES.index("measured")
        return np.where(measured.any(1, keepdims=True) & ~measured, np.inf, self.times)


class Foretold(NamedTuple):
    """Times by the model, corrected by measurements nearby."""

    times: Floats  # microseconds, of shape (problems, kernels)
    # Whether the model prefers a tile order by GPC. The shape is the same.
    by_gpc: Flags
    # The weight of measurements nearby. The shape is the same.
    weight: Floats
    # The model's mean error for each kind near each problem: log2 of measured over predicted time. The shape is
    # (problems, kinds).
    usual: Floats

    def part(self, which: Flags | slice) -> Foretold:
        """Return what is foretold of some of the problems."""
        return Foretold(self.times[which], self.by_gpc[which], self.weight[which], self.usual[which])

    def of(self, kernels: Sequence[int] | Places) -> Foretold:
        """Return what is foretold of some of the kernels."""
        return Foretold(self.times[:, kernels], self.by_gpc[:, kernels], self.weight[:, kernels], self.usual)


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Measurements and the model's errors for a pool of kernels on a device."""

    pool: Pool
    device: Device  # where they run
    measured: Measurements  # measurements, each kernel in its best tile order
    notes: Notes  # errors of the model

    @classmethod
    def of(cls, tables: Sequence[Table], kernels: Collection[Config], pool: Pool, device: Device) -> Knowledge:
        """Return what tables have on some kernels of a pool. If several have a problem, the first counts."""
        index = {config: at for at, config in enumerate(pool.configs)}
        measured: list[Times] = []
        errors: list[Errors] = []
        for table in tables:
            found = Times.of(table.columns, kernels, index, device)
            # Times depend on majors and device, but the model's error is the same.
            there = replace(device, multiprocessors=table.multiprocessors, name=table.device)
            majors = table.signature.majors
            alike = majors == pool.traits.majors
            laid_out = pool if alike else replace(pool, traits=replace(pool.traits, majors=majors))
            of_table = _errors(found, laid_out, there)
            own = next((e for e, t in zip(errors, tables, strict=False) if t.device == device.name), None)
            errors.append(of_table if own is None or table.device == device.name else of_table.on(own))
            # Measurements of another layout, or of a chip whose Tensor Cores are slower, are only estimates.
            same_cores = peaks_of(table.device).products == peaks_of(device.name).products
            if same_cores and pool.is_like(table.signature):
                measured.append(found)
        return cls(pool, device, Measurements(measured), Notes.of(errors))

    def expected(self, problems: Sequence[Problem]) -> Expected:
        """Return the expected times of every kernel at some problems."""
        return self.with_measured(dict(enumerate(problems)), self.foretold(problems))

    def with_measured(self, problems: Mapping[int, Problem], foretold: Foretold) -> Expected:
        """Return the expected times from those foretold: what was measured takes their place."""
        times = foretold.times.copy()
        sources = np.where(foretold.weight > _NEAR, SOURCES.index("interpolated"), SOURCES.index("model"))
        for at, problem in ((at, problem) for at, problem in problems.items() if problem in self.measured):
            places, microseconds = self.measured.times(problem)
            times[at, places], sources[at, places] = microseconds, SOURCES.index("measured")
        return Expected(times, sources, foretold.by_gpc)

    def foretold(self, problems: Problems) -> Foretold:
        """Return the times of every kernel at some problems by the model, corrected by measurements nearby."""
        extents = Extents.of(problems)
        parts = (extents.part(slice(at, at + _AT_ONCE)) for at in range(0, extents.size, _AT_ONCE))
        found = [self._foretold(part) for part in parts]
        return found[0] if len(found) == 1 else Foretold(*map(np.concatenate, zip(*found, strict=True)))

    def _foretold(self, problems: Extents) -> Foretold:
        errors, weight = self.notes.near(Where.of(problems, self.pool))
        kinds, kind_of_each = self._kinds
        # Without the mean of each kind, an optimistic model would rank unmeasured kernels first.
        usual = (errors @ kinds) / (weight @ kinds + _PRIOR)
        model, by_gpc = self.pool.times_and_order(problems, self.device)
        times = self._corrected(model, errors, weight, usual[:, kind_of_each], self._handicaps)
        return Foretold(times, by_gpc, weight, usual)

    def foretold_one(self, places: Places, problems: Extents, usual: Floats) -> tuple[Floats, Flags, Floats]:
        """Return the times of one kernel at each problem, the orders by GPC, and the weights: shapes (problems,)."""
        errors, weight = self.notes.near_one(places, Where.of_each(places, problems, self.pool))
        model, by_gpc = self.pool.times_of(places, problems, self.device)
        _, kind_of_each = self._kinds
        mine = usual[np.arange(len(places)), kind_of_each[places]]
        return self._corrected(model, errors, weight, mine, self._handicaps[places]), by_gpc, weight

    def _corrected(self, model: Floats, errors: Floats, weight: Floats, usual: Floats, handicaps: Floats) -> Floats:
        found = errors + _PRIOR * usual
        found /= weight + _PRIOR
        np.exp2(found, out=found)
        found *= model
        found *= handicaps
        return found

    def ranked(self, problem: Problem, among: Iterable[Config], count: int | None = None) -> list[Candidate]:
        """Return the best candidates for a problem, best first. If some were measured, only these."""
        places = [self._index[c] for c in among]
        known = self.expected([problem])
        times, sources = known.times[0, places], known.sources[0, places]
        measured = sources == SOURCES.index("measured")
        wanted = np.flatnonzero(measured) if measured.any() else np.arange(len(places))
        wanted = wanted[times[wanted].argsort(kind="stable")][:count]
        return [self._candidate(problem, places[at], known) for at in wanted.tolist()]

    def every(self, problem: Problem, among: Iterable[Config] | None = None) -> list[Candidate]:
        """Return all kernels, or some, that can be launched at a problem, the fastest first, measured or not."""
        known = self.expected([problem])
        times = known.times[0]
        wanted = range(len(times)) if among is None else sorted(self._index[c] for c in among)
        places = sorted((at for at in wanted if np.isfinite(times[at])), key=times.__getitem__)
        return [self._candidate(problem, at, known) for at in places]

    def _candidate(self, problem: Problem, place: int, known: Expected) -> Candidate:
        config, source = self.pool.configs[place], SOURCES[int(known.sources[0, place])]
        if source == "measured":
            return self.measured[problem][config]
        order = self.order(config, problem, by_gpc=bool(known.by_gpc[0, place]))
        return Candidate(config, float(known.times[0, place]), source, order)

    def order(self, config: Config, problem: Problem, *, by_gpc: bool) -> TileOrder:
        """Return the order of a kernel's tiles at a problem where none was measured."""
        return order_of(config, problem, self.pool.traits, self.device, by_gpc=by_gpc)

    @cached_property
    def decided(self) -> dict[Hashable, Any]:
        """What others decided by it alone, by key: kept as long as it is."""
        return {}

    @cached_property
    def _handicaps(self) -> Floats:
        return np.array([kind_of(c).handicap(c) for c in self.pool.configs])

    @cached_property
    def _kinds(self) -> tuple[Floats, Places]:
        """Whether each kernel is of each kind, as numbers of shape (kernels, kinds), and each kernel's kind."""
        kinds = [kind_of(c) for c in self.pool.configs]
        known = list(dict.fromkeys(kinds))
        each = np.array([known.index(kind) for kind in kinds], np.int64)
        return (each[:, None] == np.arange(len(known))).astype(np.float64), each

    @property
    def kind_of_each(self) -> Places:
        """Each kernel's kind, as an index into :attr:`Foretold.usual`."""
        return self._kinds[1]

    @cached_property
    def _index(self) -> dict[Config, int]:
        return {c: at for at, c in enumerate(self.pool.configs)}


def order_of(config: Config, problem: Problem, traits: Traits, device: Device, *, by_gpc: bool) -> TileOrder:
    """Return the order of a kernel's tiles at a problem of a signature with some traits, where none was measured."""
    whole = traits.whole(problem)
    orders = kind_of(config).orders_by_gpc(config, whole, device) if by_gpc else ()
    return orders[0] if orders else config.usual_order(whole)


def _errors(measured: Times, pool: Pool, device: Device) -> Errors:
    """Return the model's errors for the kernels of a pool."""
    kernels = measured.columns.kernels
    problems = Extents.of_array(measured.problems)
    each = problems.part(measured.rows)
    predicted, _ = pool.times_of(kernels, each, device)
    where = Where.of_each(kernels, each, pool)
    # Kernels that cannot be launched have no predicted time.
    known = np.isfinite(predicted)
    errors = np.log2(measured.microseconds[known] / predicted[known])
    return Errors(coordinates(problems, pool), measured.rows[known], kernels[known], where.tiles[known], errors)
