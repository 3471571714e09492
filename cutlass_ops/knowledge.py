"""What is known of kernels at a problem: measured times, else the model's, corrected by what was measured nearby."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from cutlass_ops import heuristics
from cutlass_ops.config import Config, Sm90Config
from cutlass_ops.device import Device, Problem, with_order
from cutlass_ops.heuristics import Pool
from cutlass_ops.tables import Table

Source = Literal["model", "interpolated", "measured"]
SOURCES: tuple[Source, ...] = ("model", "interpolated", "measured")

# How far a measurement reaches: standard deviation in powers of two of M, of the number of tiles and of K, and in
# operands whose lines begin between the L2 cache's; and how much what the model errs by there for all kernels of a kind
# weighs against it (`benchmarks/evaluate_dispatch.py`).
_REACH = (0.6, 0.6, 1.3, 0.5)
_PRIOR = 1.0
_EXPONENT = -0.5 / math.log(2)  # of a normal distribution, to the base 2
# Measurements that are no further apart say nothing: what differs is noise.
_NOISE = 0.005
# What stream-K has to be ahead by, as its times are foretold: where it came first it took that much longer, by the
# measurements of bias + ReLU at weights that were left out. Others did not.
_STREAM_K = 1.03
# How much must have been measured nearby for a time to be more than the model's word.
_NEAR = 0.5


@dataclass(frozen=True)
class Candidate:
    """A kernel at a problem.

    Attributes
    ----------
    config : Config
        Its configuration with the order of its tiles.
    microseconds : float
        Measured or predicted time.
    source : {"model", "interpolated", "measured"}
        Where the time comes from.
    """

    config: Config
    microseconds: float
    source: Source


@dataclass(frozen=True, eq=False)
class Expected:
    """What is known of kernels at problems. Tensors of shape (problems, kernels).

    Attributes
    ----------
    times : Tensor
        Microseconds.
    sources : Tensor
        Where they come from, as places in :data:`SOURCES`.
    by_gpc : Tensor
        Where the model would have an order of tiles by GPC.
    """

    times: Tensor
    sources: Tensor
    by_gpc: Tensor

    def decisive(self) -> Tensor:
        """Return the times, infinite for what was not measured where others were."""
        measured = self.sources == SOURCES.index("measured")
        return torch.where(measured.any(1, keepdim=True) & ~measured, torch.inf, self.times)


@dataclass(frozen=True, eq=False)
class _Errors:
    """By how much the model was off, a measurement after the other: which kernel's, where, and as a power of two."""

    kernels: Tensor
    places: Tensor
    values: Tensor


@dataclass(frozen=True, eq=False)
class Notes:
    """By how much the model was off where kernels were measured. Tensors of shape (configurations, most notes of one).

    Attributes
    ----------
    places : Tensor
        As :func:`_places` has them, in a last dimension; infinite where there are fewer notes.
    error : Tensor
        Measured over predicted, as a power of two.
    """

    places: Tensor
    error: Tensor

    @classmethod
    def of(cls, found: Sequence[_Errors], kernels: int) -> Notes:
        """Return measurements by kernel."""
        none = _Errors(torch.zeros(0, dtype=torch.int64), torch.zeros(0, len(_REACH)), torch.zeros(0))
        kernel = torch.cat([e.kernels for e in (none, *found)])
        order = kernel.argsort(stable=True)
        counts = kernel.bincount(minlength=kernels)
        places = torch.full((kernels, max(counts.tolist(), default=0), len(_REACH)), torch.inf)
        errors = torch.zeros(places.shape[:2])
        # Which of its kernel's notes each one is.
        note = torch.arange(len(kernel)) - (counts.cumsum(0) - counts)[kernel[order]]
        places[kernel[order], note] = torch.cat([e.places for e in (none, *found)])[order]
        errors[kernel[order], note] = torch.cat([e.values for e in (none, *found)])[order]
        return cls(places, errors)

    def near(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of errors near places (problems, configurations, 4), and of their weights."""
        errors, totals = torch.zeros(places.shape[:2]), torch.zeros(places.shape[:2])
        # One problem after the other, exp2, and so few kernels at once that one thread does it.
        step = max(1, heuristics.ONE_THREAD // max(1, self.error.shape[1]))
        for first in range(0, len(self.error), step):
            part = slice(first, first + step)
            for at, place in enumerate(places[:, part]):
                away = torch.zeros(())
                for mine, its, reach in zip(place.unbind(1), self.places[part].unbind(2), _REACH, strict=True):
                    away = away + ((mine[:, None] - its) / reach).square_()
                weights = torch.exp2(away * _EXPONENT)
                totals[at, part] = weights.sum(1)
                errors[at, part] = (weights * self.error[part]).sum(1)
        return errors, totals


def _places(problems: Sequence[Problem], pool: Pool, device: Device) -> Tensor:
    """Return where problems lie for each kernel of a pool, as notes are compared by it: shape (problems, kernels, 4).

    Powers of two of M, of the number of tiles and of K; and of how many operands the lines begin between the cache's.
    """
    m, _, k = torch.tensor(problems, dtype=torch.float64).reshape(-1, 3, 1).unbind(1)
    tiles = pool.tiles(problems, device)
    # M, tiles and K; torch.log2 shares even 2048 elements between threads.
    extents = torch.stack([m.expand_as(tiles), tiles, k.expand_as(tiles)], 2)
    places = torch.xlogy(1 / math.log(2), extents)
    return torch.cat([places, pool.odd(problems)[:, None, None].expand_as(places[:, :, :1])], 2).float()


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What is known of a pool of kernels on a device.

    Attributes
    ----------
    pool : Pool
        The kernels.
    device : Device
        Where they run.
    measured : mapping of problem to mapping of Config to Candidate
        Each kernel in its best order of tiles.
    notes : Notes
        Where the model was off.
    """

    pool: Pool
    device: Device
    measured: Mapping[Problem, Mapping[Config, Candidate]]
    notes: Notes

    @classmethod
    def of(cls, tables: Sequence[Table], kernels: Collection[Config], pool: Pool, device: Device) -> Knowledge:
        """Return what tables say of those kernels of a pool that they are about; at a problem the first has its say."""
        measured: dict[Problem, Mapping[Config, Candidate]] = {}
        errors: list[_Errors] = []
        for table in tables:
            found = {p: _ranked(times, device) for p, times in _measurements(table, kernels).items()}
            # Operands of other majors take other times, and other devices do, but the model is off by as much.
            there = replace(device, multiprocessors=table.multiprocessors, name=table.device)
            errors.append(_errors(found, replace(pool, majors=table.signature.majors), there))
            # Where operands have to be copied or D is scattered, what is known of others is an estimate.
            if pool.is_like(table.signature):
                measured = found | measured
        return cls(pool, device, measured, Notes.of(errors, len(pool.configs)))

    def expected(self, problems: Sequence[Problem]) -> Expected:
        """Return what is known of every kernel at some problems."""
        found = [self.notes.near(_places(part, self.pool, self.device)) for part in self.pool.parts(problems)]
        errors, weight = (torch.cat(each) for each in zip(*found, strict=True))
        error = (errors + _PRIOR * self._usual(errors, weight)) / (weight + _PRIOR)
        model, by_gpc = self.pool.times_and_order(problems, self.device)
        times = model * torch.exp2(error) * self._handicaps
        sources = torch.where(weight > _NEAR, SOURCES.index("interpolated"), SOURCES.index("model"))
        for at, problem in enumerate(problems):
            for config, candidate in self.measured.get(problem, {}).items():
                place = self._index[config]
                times[at, place], sources[at, place] = candidate.microseconds, SOURCES.index("measured")
        return Expected(times, sources, by_gpc)

    def _usual(self, errors: Tensor, weight: Tensor) -> Tensor:
        """Return what the model errs by for kernels of one kind, given sums of errors and weights near each problem.

        Where the model promises too much, a kernel of which nothing is known would else come before those that are.
        """
        usual = torch.zeros_like(errors)
        for kind in self._kinds:
            usual[:, kind] = errors[:, kind].sum(1, keepdim=True) / (weight[:, kind].sum(1, keepdim=True) + _PRIOR)
        return usual

    def ranked(self, problem: Problem, among: Iterable[Config], count: int | None = None) -> list[Candidate]:
        """Return the first candidates for a problem, the best first; where some of them were measured, only these."""
        places = [self._index[c] for c in among]
        known = self.expected([problem])
        times, sources = known.times[0, places], known.sources[0, places]
        measured = sources == SOURCES.index("measured")
        wanted = measured.nonzero()[:, 0] if bool(measured.any()) else torch.arange(len(places))
        wanted = wanted[times[wanted].argsort(stable=True)][:count]
        return [self._candidate(problem, places[at], known) for at in wanted.tolist()]

    def _candidate(self, problem: Problem, place: int, known: Expected) -> Candidate:
        config, source = self.pool.configs[place], SOURCES[int(known.sources[0, place])]
        if source == "measured":
            return self.measured[problem][config]
        whole = self.pool.whole(problem)
        orders = heuristics.orders_by_gpc(config, whole, self.device) if bool(known.by_gpc[0, place]) else ()
        ordered = orders[0] if orders else with_order(config, whole)
        return Candidate(ordered, float(known.times[0, place]), source)

    @cached_property
    def _handicaps(self) -> Tensor:
        split = (isinstance(c, Sm90Config) and c.scheduler == "stream_k" for c in self.pool.configs)
        return torch.tensor([_STREAM_K if each else 1.0 for each in split], dtype=torch.float64)

    @cached_property
    def _kinds(self) -> list[Tensor]:
        """The places of each kind's kernels, as kinds have models of their own."""
        kinds = [type(c) for c in self.pool.configs]
        return [torch.tensor([at for at, k in enumerate(kinds) if k is kind]) for kind in dict.fromkeys(kinds)]

    @cached_property
    def _index(self) -> dict[Config, int]:
        return {c: at for at, c in enumerate(self.pool.configs)}


def _reads(config: Config) -> float:
    """Return the elements of A and B that a tile reads for each product."""
    tile = config.threadblock
    return 1 / tile.m + 1 / tile.n


def _measurements(table: Table, kernels: Collection[Config]) -> dict[Problem, dict[Config, Candidate]]:
    """Return what was measured of some kernels, each in its best order of tiles."""
    found: dict[Problem, dict[Config, Candidate]] = {}
    # A table's points share their configurations; to compare objects is enough, and much faster.
    configs = {id(m.config): m.config for point in table.points for m in point.measured}
    binaries = {at: config.binary() for at, config in configs.items()}
    mine = {at: kernel for at, kernel in binaries.items() if kernel in kernels}
    for point in table.points:
        here = found.setdefault(point.problem, {})
        for m in point.measured:
            kernel = mine.get(id(m.config))
            if kernel is not None and kernel not in here:
                # Medians of a race that was left early are of a cooler chip; ratios within a round are not.
                here[kernel] = Candidate(m.config, point.measured[0].microseconds * (1 + m.behind), "measured")
    return found


def _ranked(measured: Mapping[Config, Candidate], device: Device) -> dict[Config, Candidate]:
    """Return measurements such that of long kernels that are equally fast the one with the largest tile comes first.

    It reads least for each product and so draws least power, which sets the clock of long kernels. They exchange times.
    """
    times = sorted(c.microseconds for c in measured.values())
    if not times or times[0] <= heuristics.chip_of(device).throttle_after:
        return dict(measured)
    equal = [kernel for kernel, c in measured.items() if c.microseconds <= times[0] * (1 + _NOISE)]
    equal.sort(key=_reads)
    return {**measured, **{k: replace(measured[k], microseconds=us) for k, us in zip(equal, times, strict=False)}}


def _errors(measured: Mapping[Problem, Mapping[Config, Candidate]], pool: Pool, device: Device) -> _Errors:
    """Return where and by how much the model is off for the kernels of a pool."""
    index = {c: at for at, c in enumerate(pool.configs)}
    entries = [(row, index[c], x.microseconds) for row, known in enumerate(measured.values()) for c, x in known.items()]
    rows, kernels = torch.tensor([e[:2] for e in entries], dtype=torch.int64).reshape(-1, 2).unbind(1)
    times = torch.tensor([e[2] for e in entries], dtype=torch.float64)
    problems = list(measured)
    predicted = pool.times(problems, device)[rows, kernels]
    # By the model some cannot be launched there, whatever a table says: an infinite error would spoil all others.
    known = predicted.isfinite()
    errors = (times / predicted).log2().float()
    return _Errors(kernels[known], _places(problems, pool, device)[rows, kernels][known], errors[known])
