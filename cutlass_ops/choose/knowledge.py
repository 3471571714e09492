"""Times of kernels at a problem: measured, else the model's, corrected by measurements nearby."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlass_ops.choose.pool import Pool
from cutlass_ops.choose.tables import Table
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

# How far a measurement reaches: standard deviations in log2 of M, log2 of K, and the number of operands that are not
# aligned to cache lines; in log2 of the number of tiles; and the weight of the mean error of all kernels of a kind
# (`benchmarks/evaluate_dispatch.py`).
_REACH = np.array([0.6, 1.3, 0.5])
_REACH_OF_TILES = 0.6
_PRIOR = 1.0
# Times that differ by less than this are equal up to noise.
_NOISE = 0.005
# Weight of nearby measurements from which a time counts as interpolated.
_NEAR = 0.5
# Problems to foretell at once: bounds memory.
_AT_ONCE = 512
# From so many problems on, notes are summed by products of matrices: those of so many kernels, for so many problems.
# Larger ones would fall out of the cache, and have a BLAS start threads.
_MANY, _TOGETHER, _COLUMNS = 12, 16, 128


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
class Expected:
    """Expected times of kernels at problems. Arrays of shape (problems, kernels).

    Attributes
    ----------
    times : array
        Microseconds.
    sources : array
        Where they come from, as indices into :data:`SOURCES`.
    by_gpc : array
        Whether the model prefers a tile order by GPC.
    """

    times: Floats
    sources: Places
    by_gpc: Flags

    def decisive(self) -> Floats:
        """Return the times; infinite for unmeasured kernels at problems where others were measured."""
        measured = self.sources == SOURCES.index("measured")
        return np.where(measured.any(1, keepdims=True) & ~measured, np.inf, self.times)


class Foretold(NamedTuple):
    """Times by the model, corrected by measurements nearby.

    Attributes
    ----------
    times : array
        Microseconds, of shape (problems, kernels).
    by_gpc : array
        Whether the model prefers a tile order by GPC. The shape is the same.
    weight : array
        The weight of measurements nearby. The shape is the same.
    usual : array
        The model's mean error for each kind near each problem: log2 of measured over predicted time. The shape is
        (problems, kinds).
    """

    times: Floats
    by_gpc: Flags
    weight: Floats
    usual: Floats

    def part(self, which: Flags) -> Foretold:
        """Return what is foretold of some of the problems."""
        return Foretold(self.times[which], self.by_gpc[which], self.weight[which], self.usual[which])


class Where(NamedTuple):
    """Coordinates of problems for a pool, in units of the reach of a measurement.

    Attributes
    ----------
    problems : array
        (problems, 3): log2 of M, log2 of K, and the number of operands not aligned to cache lines.
    tiles : array
        (problems, kernels): log2 of the number of tiles.
    """

    problems: Floats
    tiles: Floats

    @classmethod
    def of(cls, problems: Problems, pool: Pool) -> Where:
        """Return the coordinates of problems for a pool."""
        extents = Extents.of(problems)
        return cls(_coordinates(extents, pool), np.log2(pool.tiles(extents)) / _REACH_OF_TILES)


def _coordinates(extents: Extents, pool: Pool) -> Floats:
    found = np.empty((extents.size, 3))
    found[:, 0], found[:, 1] = np.log2(extents.m[:, 0]), np.log2(extents.k[:, 0])
    found[:, 2] = pool.traits.odd(extents)
    return np.asarray(found / _REACH)


class _Errors(NamedTuple):
    """Errors of the model, as :class:`Notes` has them, but in the order of the measurements."""

    problems: Floats
    rows: Places
    kernels: Places
    tiles: Floats
    errors: Floats


@dataclass(frozen=True, eq=False)
class Notes:
    """Errors of the model at measurements, sorted by kernel.

    Attributes
    ----------
    problems : array
        Coordinates of the measured problems, as in :class:`Where`.
    rows, kernels : array
        Each note's problem, as an index into these, and its kernel, as an index into the pool.
    tiles : array
        Each note's coordinate by its kernel's tiles, as in :class:`Where`.
    errors : array
        log2 of measured over predicted time.
    """

    problems: Floats
    rows: Places
    kernels: Places
    tiles: Floats
    errors: Floats

    @classmethod
    def of(cls, found: Sequence[_Errors]) -> Notes:
        """Return measurements by kernel."""
        nothing = np.zeros(0, np.int64)
        kernels = np.concatenate([nothing, *(e.kernels for e in found)])
        before = np.cumsum([0, *(len(e.problems) for e in found)])
        rows = np.concatenate([nothing, *(e.rows + first for e, first in zip(found, before, strict=False))])
        problems = np.concatenate([np.zeros((0, len(_REACH))), *(e.problems for e in found)])
        tiles = np.concatenate([np.zeros(0), *(e.tiles for e in found)])
        errors = np.concatenate([np.zeros(0), *(e.errors for e in found)])
        order = np.argsort(kernels, kind="stable")
        return cls(problems, rows[order], kernels[order], tiles[order], errors[order])

    def near(self, where: Where) -> tuple[Floats, Floats]:
        """Return the weighted sum of errors near problems and the sum of weights, of shape (problems, kernels)."""
        found = np.zeros((2, *where.tiles.shape))
        if len(self.errors):
            with np.errstate(under="ignore"):
                (self._sum_many if len(where.tiles) >= _MANY else self._sum_few)(where, found)
        return found[1], found[0]

    def _sum_few(self, where: Where, found: Floats) -> None:
        starts = np.flatnonzero(np.diff(self.kernels, prepend=-1))
        kernels = self.kernels[starts]
        for at, (mine, tiles) in enumerate(zip(where.problems, where.tiles, strict=True)):
            away = ((self.problems - mine) ** 2).sum(1)
            weights = np.exp(-0.5 * ((tiles.take(self.kernels) - self.tiles) ** 2 + away.take(self.rows)))
            found[0, at, kernels] = np.add.reduceat(weights, starts)
            found[1, at, kernels] = np.add.reduceat(weights * self.errors, starts)

    def _sum_many(self, where: Where, found: Floats) -> None:
        """Sum up in FP32, for speed, with squares of distances by products of matrices: see :class:`_Group`."""
        memory = np.empty(max(group.notes[..., 0].size for group in self._groups) * _COLUMNS, np.float32)
        for part in (slice(at, at + _COLUMNS) for at in range(0, len(where.tiles), _COLUMNS)):
            problems = (where.problems[part] - self._middle).T
            squares = (problems**2).sum(0)
            for group in self._groups:
                tiles = where.tiles[part, group.kernels].T - group.middle
                mine = np.empty((len(tiles), group.notes.shape[2], tiles.shape[1]), np.float32)
                mine[:, 0], mine[:, 1:-2], mine[:, -2] = tiles, problems, 1
                mine[:, -1] = -0.5 * (tiles**2 + squares)
                kernels, notes, _ = group.notes.shape
                weights = memory[: kernels * notes * tiles.shape[1]].reshape(kernels, notes, -1)
                np.exp(np.matmul(group.notes, mine, out=weights), out=weights)
                found[:, part, group.kernels] = (group.sums @ weights).transpose(1, 2, 0)

    def near_one(self, places: Places, where: Where) -> tuple[Floats, Floats]:
        """Return the results of :meth:`near` for one kernel at each problem.

        Parameters
        ----------
        places : array
            The kernels, one for each problem.
        where : Where
            Problems that differ in M alone, with the tiles of these kernels, of shape (problems,).
        """
        errors, totals = np.zeros((2, len(places)))
        aside = ((self.problems[:, 1:] - where.problems[:1, 1:]) ** 2).sum(1)
        ends = np.cumsum(np.bincount(self.kernels, minlength=int(places.max(initial=-1)) + 1)).tolist()
        for kernel in sorted({*places.tolist()}):
            notes, mine = slice(ends[kernel - 1] if kernel else 0, ends[kernel]), np.flatnonzero(places == kernel)
            rows = self.rows[notes]
            weights = where.problems[mine, :1] - self.problems[rows, 0]
            weights *= weights
            tiles = where.tiles[mine, None] - self.tiles[notes]
            tiles *= tiles
            weights += tiles
            weights += aside[rows]
            weights *= -0.5
            with np.errstate(under="ignore"):
                np.exp(weights, out=weights)
                totals[mine], errors[mine] = weights.sum(1), weights @ self.errors[notes]
        return errors, totals

    @cached_property
    def _middle(self) -> Floats:
        """Amid the measured problems: squares of coordinates relative to it are small, and so are their roundings."""
        return np.asarray(self.problems.mean(0))

    @cached_property
    def _groups(self) -> list[_Group]:
        counts = np.bincount(self.kernels)
        first = np.cumsum(counts) - counts
        problems = self.problems - self._middle
        found = []
        noted = np.argsort(counts, kind="stable")[np.count_nonzero(counts == 0) :]
        for kernels in (noted[at : at + _TOGETHER] for at in range(0, len(noted), _TOGETHER)):
            each = np.arange(counts[kernels].max())
            there = each < counts[kernels, None]
            at = np.where(there, first[kernels, None] + each, 0)
            middle = (self.tiles[at] * there).sum(1, keepdims=True) / counts[kernels, None]
            tiles, where = self.tiles[at] - middle, problems[self.rows[at]]
            notes = np.empty((*at.shape, 3 + len(_REACH)), np.float32)
            notes[..., 0], notes[..., 1:-2], notes[..., -1] = tiles, where, 1
            notes[..., -2] = -0.5 * (tiles**2 + (where**2).sum(2))
            sums = np.stack([there, there * self.errors[at]], 1).astype(np.float32)
            found.append(_Group(kernels, middle, notes, sums))
        return found


class _Group(NamedTuple):
    """The notes of some kernels that have about as many.

    Half the negative square of a distance is a product: (x - y)² is x² - 2xy + y².

    Attributes
    ----------
    kernels : array
        The kernels, of shape (kernels,).
    middle : array
        Amid the coordinates of each kernel's notes by its tiles, of shape (kernels, 1).
    notes : array
        The coordinates of each note by tiles and by problem, half the negative sum of their squares, and 1, of shape
        (kernels, notes, coordinates + 2).
    sums : array
        Matrices that add up weights, and errors by weights, of shape (kernels, 2, notes). What fills up the notes of
        kernels that have fewer counts for nothing.
    """

    kernels: Places
    middle: Floats
    notes: NDArray[np.float32]
    sums: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Measurements and the model's errors for a pool of kernels on a device.

    Attributes
    ----------
    pool : Pool
        The kernels.
    device : Device
        Where they run.
    measured : mapping of problem to mapping of Config to Candidate
        Measurements, each kernel in its best tile order.
    notes : Notes
        Errors of the model.
    """

    pool: Pool
    device: Device
    measured: Mapping[Problem, Mapping[Config, Candidate]]
    notes: Notes

    @classmethod
    def of(cls, tables: Sequence[Table], kernels: Collection[Config], pool: Pool, device: Device) -> Knowledge:
        """Return what tables have on some kernels of a pool. If several have a problem, the first counts."""
        measured: dict[Problem, Mapping[Config, Candidate]] = {}
        errors: list[_Errors] = []
        for table in tables:
            found = {p: _ranked(times, device) for p, times in _measurements(table, kernels).items()}
            # Times depend on majors and device, but the model's error is the same.
            there = replace(device, multiprocessors=table.multiprocessors, name=table.device)
            laid_out = replace(pool, traits=replace(pool.traits, majors=table.signature.majors))
            errors.append(_errors(found, laid_out, there))
            # Measurements of another layout are only estimates.
            if pool.is_like(table.signature):
                measured = found | measured
        return cls(pool, device, measured, Notes.of(errors))

    def expected(self, problems: Sequence[Problem]) -> Expected:
        """Return the expected times of every kernel at some problems."""
        return self.with_measured(problems, self.foretold(problems))

    def with_measured(self, problems: Sequence[Problem], foretold: Foretold) -> Expected:
        """Return the expected times at problems from those foretold: what was measured there takes their place."""
        times = foretold.times.copy()
        sources = np.where(foretold.weight > _NEAR, SOURCES.index("interpolated"), SOURCES.index("model"))
        for at, problem in enumerate(problems):
            for config, candidate in self.measured.get(problem, {}).items():
                place = self._index[config]
                times[at, place], sources[at, place] = candidate.microseconds, SOURCES.index("measured")
        return Expected(times, sources, foretold.by_gpc)

    def foretold(self, problems: Problems) -> Foretold:
        """Return the times of every kernel at some problems by the model, corrected by measurements nearby."""
        extents = Extents.of(problems)
        parts = (extents.part(slice(at, at + _AT_ONCE)) for at in range(0, extents.size, _AT_ONCE))
        found = [self._foretold(part) for part in parts]
        return Foretold(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def _foretold(self, problems: Extents) -> Foretold:
        errors, weight = self.notes.near(Where.of(problems, self.pool))
        kinds, kind_of_each = self._kinds
        # Without the mean of each kind, an optimistic model would rank unmeasured kernels first.
        usual = (errors @ kinds) / (weight @ kinds + _PRIOR)
        model, by_gpc = self.pool.times_and_order(problems, self.device)
        times = self._corrected(model, errors, weight, usual[:, kind_of_each], self._handicaps)
        return Foretold(times, by_gpc, weight, usual)

    def foretold_one(self, places: Places, problems: Extents, usual: Floats) -> tuple[Floats, Flags, Floats]:
        """Return the times of one kernel at each problem, the orders by GPC, and the weights: shapes (problems,).

        Parameters
        ----------
        places : array
            The kernels, one for each problem.
        problems : Extents
            Problems that differ in M alone.
        usual : array
            The model's mean errors at each problem, one for each kind.
        """
        where = Where(
            _coordinates(problems, self.pool), np.log2(self.pool.tiles_of(places, problems)) / _REACH_OF_TILES
        )
        errors, weight = self.notes.near_one(places, where)
        model, by_gpc = self.pool.times_of(places, problems, self.device)
        _, kind_of_each = self._kinds
        mine = usual[np.arange(len(places)), kind_of_each[places]]
        return self._corrected(model, errors, weight, mine, self._handicaps[places]), by_gpc, weight

    def _corrected(self, model: Floats, errors: Floats, weight: Floats, usual: Floats, handicaps: Floats) -> Floats:
        return model * np.exp2((errors + _PRIOR * usual) / (weight + _PRIOR)) * handicaps

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


def _reads(config: Config) -> float:
    """Return the elements of A and B that a tile reads per multiplication."""
    tile = config.threadblock
    return 1 / tile.m + 1 / tile.n


def _measurements(table: Table, kernels: Collection[Config]) -> dict[Problem, dict[Config, Candidate]]:
    """Return the measurements of some kernels, each in its best tile order."""
    found: dict[Problem, dict[Config, Candidate]] = {}
    # A table's points share configuration objects: compare identities, for speed.
    configs = {id(m.config): m.config for point in table.points for m in point.measured}
    mine = {at for at, config in configs.items() if config in kernels}
    for point in table.points:
        here = found.setdefault(point.problem, {})
        for m in point.measured:
            if id(m.config) in mine and m.config not in here:
                # Medians of a race that was left early are of a cooler chip; ratios within a round are not.
                time = point.measured[0].microseconds * (1 + m.behind)
                here[m.config] = Candidate(m.config, time, "measured", m.order)
    return found


def _ranked(measured: Mapping[Config, Candidate], device: Device) -> dict[Config, Candidate]:
    """Sort equally fast long kernels by tile size, largest first, by exchanging their times.

    The largest tile reads least per multiplication and so draws least power, which limits the clock of long kernels.
    """
    times = sorted(c.microseconds for c in measured.values())
    if not times or times[0] <= costs_of(device).throttle_after:
        return dict(measured)
    equal = [kernel for kernel, c in measured.items() if c.microseconds <= times[0] * (1 + _NOISE)]
    equal.sort(key=_reads)
    return {**measured, **{k: replace(measured[k], microseconds=us) for k, us in zip(equal, times, strict=False)}}


def _errors(measured: Mapping[Problem, Mapping[Config, Candidate]], pool: Pool, device: Device) -> _Errors:
    """Return the model's errors for the kernels of a pool."""
    index = {c: at for at, c in enumerate(pool.configs)}
    rows = np.repeat(np.arange(len(measured)), [len(known) for known in measured.values()])
    kernels = np.array([index[c] for known in measured.values() for c in known], np.int64)
    times = np.array([x.microseconds for known in measured.values() for x in known.values()], np.float64)
    problems = Extents.of(list(measured))
    each = problems.part(rows)
    predicted, _ = pool.times_of(kernels, each, device)
    # Kernels that cannot be launched have no predicted time.
    known = np.isfinite(predicted)
    errors = np.log2(times[known] / predicted[known])
    tiles = np.log2(pool.tiles_of(kernels, each)) / _REACH_OF_TILES
    return _Errors(_coordinates(problems, pool), rows[known], kernels[known], tiles[known], errors)
