"""Times of kernels at a problem: measured, else the model's, corrected by measurements nearby."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from cutlass_ops.choose.pool import Pool, at_once
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places
from cutlass_ops.kinds.sm90.model import costs_of
from cutlass_ops.kinds.table import kind_of

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
    def of(cls, problems: Sequence[Problem], pool: Pool) -> Where:
        """Return the coordinates of problems for a pool."""
        extents = Extents.of(problems)
        m, k = np.log2(extents.m[:, 0]), np.log2(extents.k[:, 0])
        tiles = np.log2(pool.tiles(problems)) / _REACH_OF_TILES
        return cls(np.stack([m, k, pool.traits.odd(problems)], 1) / _REACH, tiles)


class _Errors(NamedTuple):
    """Errors of the model: coordinates of problems, and each measurement's problem, kernel and error."""

    where: Where
    rows: Places
    kernels: Places
    values: Floats


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
        before = np.cumsum([0, *(len(e.where.problems) for e in found)])
        rows = np.concatenate([nothing, *(e.rows + first for e, first in zip(found, before, strict=False))])
        problems = np.concatenate([np.zeros((0, len(_REACH))), *(e.where.problems for e in found)])
        tiles = np.concatenate([np.zeros(0), *(e.where.tiles[e.rows, e.kernels] for e in found)])
        errors = np.concatenate([np.zeros(0), *(e.values for e in found)])
        order = np.argsort(kernels, kind="stable")
        return cls(problems, rows[order], kernels[order], tiles[order], errors[order])

    def near(self, where: Where) -> tuple[Floats, Floats]:
        """Return the weighted sum of errors near problems and the sum of weights, of shape (problems, kernels)."""
        errors, totals = np.zeros_like(where.tiles), np.zeros_like(where.tiles)
        kernels, starts = self._noted
        step = at_once(max(len(self.errors), len(self.problems)))
        for first in range(0, len(where.tiles) if len(kernels) else 0, step):
            part = slice(first, first + step)
            # Distances that do not depend on the kernel are computed once for each measured problem.
            away = ((where.problems[part, None] - self.problems) ** 2).sum(2).take(self.rows, 1)
            away += (where.tiles[part].take(self.kernels, 1) - self.tiles) ** 2
            with np.errstate(under="ignore"):
                weights = np.exp(-0.5 * away)
                totals[part, kernels] = np.add.reduceat(weights, starts, 1)
                errors[part, kernels] = np.add.reduceat(weights * self.errors, starts, 1)
        return errors, totals

    @cached_property
    def _noted(self) -> tuple[Places, Places]:
        """The kernels with notes, and the first index of each."""
        kernels, starts = np.unique(self.kernels, return_index=True)
        return kernels, starts


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
        found = [self._expected(part) for part in self.pool.parts(problems)]
        return Expected(*(np.concatenate(each) for each in zip(*found, strict=True)))

    def _expected(self, problems: Sequence[Problem]) -> tuple[Floats, Places, Flags]:
        errors, weight = self.notes.near(Where.of(problems, self.pool))
        error = (errors + _PRIOR * self._usual(errors, weight)) / (weight + _PRIOR)
        model, by_gpc = self.pool.times_and_order(problems, self.device)
        times = model * np.exp2(error) * self._handicaps
        sources = np.where(weight > _NEAR, SOURCES.index("interpolated"), SOURCES.index("model"))
        for at, problem in enumerate(problems):
            for config, candidate in self.measured.get(problem, {}).items():
                place = self._index[config]
                times[at, place], sources[at, place] = candidate.microseconds, SOURCES.index("measured")
        return times, sources, by_gpc

    def _usual(self, errors: Floats, weight: Floats) -> Floats:
        """Return the model's mean error for each kind near each problem, from sums of errors and weights.

        Without it, an optimistic model would rank unmeasured kernels first.
        """
        usual = np.zeros_like(errors)
        for kind in self._kinds:
            usual[:, kind] = errors[:, kind].sum(1, keepdims=True) / (weight[:, kind].sum(1, keepdims=True) + _PRIOR)
        return usual

    def ranked(self, problem: Problem, among: Iterable[Config], count: int | None = None) -> list[Candidate]:
        """Return the best candidates for a problem, best first. If some were measured, only these."""
        places = [self._index[c] for c in among]
        known = self.expected([problem])
        times, sources = known.times[0, places], known.sources[0, places]
        measured = sources == SOURCES.index("measured")
        wanted = np.flatnonzero(measured) if measured.any() else np.arange(len(places))
        wanted = wanted[times[wanted].argsort(kind="stable")][:count]
        return [self._candidate(problem, places[at], known) for at in wanted.tolist()]

    def every(self, problem: Problem) -> list[Candidate]:
        """Return all kernels that can be launched at a problem, the fastest first, be they measured or not."""
        known = self.expected([problem])
        times = known.times[0]
        places = [at for at in times.argsort(kind="stable").tolist() if np.isfinite(times[at])]
        return [self._candidate(problem, at, known) for at in places]

    def _candidate(self, problem: Problem, place: int, known: Expected) -> Candidate:
        config, source = self.pool.configs[place], SOURCES[int(known.sources[0, place])]
        if source == "measured":
            return self.measured[problem][config]
        whole = self.pool.traits.whole(problem)
        orders = kind_of(config).orders_by_gpc(config, whole, self.device) if bool(known.by_gpc[0, place]) else ()
        order = orders[0] if orders else config.usual_order(whole)
        return Candidate(config, float(known.times[0, place]), source, order)

    @cached_property
    def _handicaps(self) -> Floats:
        return np.array([kind_of(c).handicap(c) for c in self.pool.configs])

    @cached_property
    def _kinds(self) -> list[list[int]]:
        """The indices of each kind's kernels."""
        kinds = [kind_of(c) for c in self.pool.configs]
        return [[at for at, k in enumerate(kinds) if k is kind] for kind in dict.fromkeys(kinds)]

    @cached_property
    def _index(self) -> dict[Config, int]:
        return {c: at for at, c in enumerate(self.pool.configs)}


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
    entries = [(row, index[c], x.microseconds) for row, known in enumerate(measured.values()) for c, x in known.items()]
    rows, kernels = np.array([e[:2] for e in entries], np.int64).reshape(-1, 2).T
    problems = list(measured)
    predicted = pool.times(problems, device)[rows, kernels]
    times = np.array([e[2] for e in entries], np.float64)
    # Kernels that cannot be launched have no predicted time.
    known = np.isfinite(predicted)
    errors = np.log2(times[known] / predicted[known])
    return _Errors(Where.of(problems, pool), rows[known], kernels[known], errors)
