"""Errors of the time models at measurements, and their weighted sums near other problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlass_ops.choose.pool import Pool
from cutlass_ops.kinds.arrays import Extents, Floats, Places, Problems

# How far a measurement reaches: standard deviations in log2 of M, log2 of K, and the number of operands that are not
# aligned to cache lines; in log2 of the number of tiles (`benchmarks/evaluate_dispatch.py`).
_REACH = np.array([0.6, 1.3, 0.5])
_REACH_OF_TILES = 0.6
# With at least this many problems, notes are summed by products of matrices: of this many kernels and problems at once.
# Larger ones would fall out of the cache, and have a BLAS start threads.
_MANY, _TOGETHER, _COLUMNS = 12, 16, 128
# Numbers for which memory is asked for at least, though most of it is never touched. The C library keeps for later what
# is freed, up to about the largest part that was freed before: else a thousand pages come and go with each weight.
_SPARE = 1 << 21


class Where(NamedTuple):
    """Coordinates of problems for a pool, in units of the reach of a measurement."""

    problems: Floats  # (problems, 3): log2 of M, log2 of K, and the number of operands not aligned to cache lines
    tiles: Floats  # (problems, kernels): log2 of the number of tiles

    @classmethod
    def of(cls, problems: Problems, pool: Pool) -> Where:
        """Return the coordinates of problems for a pool."""
        extents = Extents.of(problems)
        return cls(coordinates(extents, pool), np.log2(pool.tiles(extents)) / _REACH_OF_TILES)

    @classmethod
    def of_each(cls, places: Places, extents: Extents, pool: Pool) -> Where:
        """Return the coordinates of problems, each for one kernel of a pool: tiles of shape (problems,)."""
        return cls(coordinates(extents, pool), np.log2(pool.tiles_of(places, extents)) / _REACH_OF_TILES)


def coordinates(extents: Extents, pool: Pool) -> Floats:
    """Return the coordinates of problems that do not depend on a kernel, as :class:`Where` has them."""
    found = np.empty((extents.size, 3))
    # Groups along K may have no rows at all.
    found[:, 0], found[:, 1] = np.log2(extents.m[:, 0]), np.log2(np.maximum(extents.k[:, 0], 1))
    found[:, 2] = pool.traits.odd(extents)
    return np.asarray(found / _REACH)


class Errors(NamedTuple):
    """Errors of the model, as :class:`Notes` has them, but in the order of the measurements."""

    problems: Floats
    rows: Places
    kernels: Places
    tiles: Floats
    errors: Floats

    def on(self, own: Errors) -> Errors:
        """Return one chip's errors as they would be on another, on which `own` ones were measured.

        Chips differ in clocks and limits of power, so all kernels take some percent longer than predicted on one of
        them. Unless that is taken into account, those that only the other chip has measured seem faster. The shift is
        the mean difference of measurements that both have, near each problem.
        """
        names, its_names = self._names(own)
        _, mine, theirs = np.intersect1d(names, its_names, return_indices=True)
        if not len(mine):
            return self
        count = np.bincount(self.rows[mine], minlength=len(self.problems))
        sums = np.bincount(self.rows[mine], own.errors[theirs] - self.errors[mine], len(self.problems))
        both = np.flatnonzero(count)
        weights = np.exp(-0.5 * ((self.problems[:, None] - self.problems[both]) ** 2).sum(2))
        shifts = weights @ sums[both] / (weights @ count[both] + 1)
        return self._replace(errors=self.errors + shifts[self.rows])

    def _names(self, other: Errors) -> list[NDArray[np.complex128]]:
        """Return a number for each measurement of both: the same for one kernel at one problem."""
        _, places = np.unique(np.concatenate((self.problems, other.problems)), axis=0, return_inverse=True)
        parts = np.split(places.reshape(-1), [len(self.problems)])
        most = 1 + max(x.kernels.max(initial=0) for x in (self, other))
        # The tiles tell apart what differs in N alone.
        return [part[x.rows] * most + x.kernels + 1j * x.tiles for x, part in zip((self, other), parts, strict=True)]


@dataclass(frozen=True, eq=False)
class Notes:
    """Errors of the model at measurements, sorted by kernel."""

    problems: Floats  # coordinates of the measured problems, as in `Where`
    # Each note's problem, as an index into these, and its kernel, as an index into the pool.
    rows: Places
    kernels: Places
    tiles: Floats  # each note's coordinate by its kernel's tiles, as in `Where`
    errors: Floats  # log2 of measured over predicted time

    @classmethod
    def of(cls, found: Sequence[Errors]) -> Notes:
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
        kernels, middle, groups = self._groups
        problems = (where.problems - self._middle).T
        tiles = where.tiles.T[kernels] - middle
        mine = np.empty((len(kernels), len(problems) + 3, len(where.tiles)), np.float32)
        mine[:, 0], mine[:, 1:-2], mine[:, -2] = tiles, problems, 1
        tiles *= tiles
        tiles += (problems**2).sum(0)
        tiles *= -0.5
        mine[:, -1] = tiles
        sums = np.empty((len(kernels), 2, len(where.tiles)), np.float32)
        most = max(group.notes[..., 0].size for group in groups) * _COLUMNS
        memory = np.empty(max(most, _SPARE), np.float32)
        for part in (slice(at, at + _COLUMNS) for at in range(0, len(where.tiles), _COLUMNS)):
            for group in groups:
                given = mine[group.place, :, part]
                shape = *group.notes.shape[:2], given.shape[2]
                weights = memory[: math.prod(shape)].reshape(shape)
                np.exp(np.matmul(group.notes, given, out=weights), out=weights)
                sums[group.place, :, part] = group.sums @ weights
        found[:, :, kernels] = sums.transpose(1, 2, 0)

    def near_one(self, places: Places, where: Where) -> tuple[Floats, Floats]:
        """Return the results of :meth:`near` for one kernel at each problem."""
        aside = ((self.problems[:, 1:] - where.problems[:1, 1:]) ** 2).sum(1)[self.rows]
        measured = self.problems[self.rows, 0]
        # One kernel after the other.
        order = np.argsort(places, kind="stable")
        rows, tiles = where.problems[order, :1], where.tiles[order, None]
        kernels, first = np.unique(places[order], return_index=True)
        begins = [*first.tolist(), len(places)]
        ends = np.searchsorted(self.kernels, [kernels, kernels + 1]).T.tolist()
        found = np.empty((2, len(places)))
        for begin, end, (note, last) in zip(begins, begins[1:], ends, strict=False):
            weights = rows[begin:end] - measured[note:last]
            weights *= weights
            away = tiles[begin:end] - self.tiles[note:last]
            away *= away
            weights += away
            weights += aside[note:last]
            weights *= -0.5
            with np.errstate(under="ignore"):
                np.exp(weights, out=weights)
                weights.sum(1, out=found[0, begin:end])
                np.matmul(weights, self.errors[note:last], out=found[1, begin:end])
        totals, errors = np.empty_like(found)
        totals[order], errors[order] = found
        return errors, totals

    @cached_property
    def _middle(self) -> Floats:
        """Amid the measured problems: squares of coordinates relative to it are small, and so are their roundings."""
        return np.asarray(self.problems.mean(0))

    @cached_property
    def _groups(self) -> tuple[Places, Floats, list[_Group]]:
        """All kernels with notes, amid what each one's coordinates by tiles are, of shape (kernels, 1), and groups."""
        counts = np.bincount(self.kernels)
        first = np.cumsum(counts) - counts
        problems = self.problems - self._middle
        noted = np.argsort(counts, kind="stable")[np.count_nonzero(counts == 0) :]
        middle = (np.bincount(self.kernels, self.tiles)[noted] / counts[noted])[:, None]
        found = []
        for place in (slice(at, at + _TOGETHER) for at in range(0, len(noted), _TOGETHER)):
            kernels = noted[place]
            each = np.arange(counts[kernels].max())
            there = each < counts[kernels, None]
            at = np.where(there, first[kernels, None] + each, 0)
            tiles, where = self.tiles[at] - middle[place], problems[self.rows[at]]
            notes = np.empty((*at.shape, 3 + len(_REACH)), np.float32)
            notes[..., 0], notes[..., 1:-2], notes[..., -1] = tiles, where, 1
            notes[..., -2] = -0.5 * (tiles**2 + (where**2).sum(2))
            sums = np.stack([there, there * self.errors[at]], 1).astype(np.float32)
            found.append(_Group(place, notes, sums))
        return noted, middle, found


class _Group(NamedTuple):
    """The notes of some kernels that have about as many.

    Half the negative square of a distance is a product: (x - y)² is x² - 2xy + y².
    """

    place: slice  # the kernels' place among all that have notes
    # The coordinates of each note by tiles and by problem, half the negative sum of their squares, and 1, of shape
    # (kernels, notes, coordinates + 2).
    notes: NDArray[np.float32]
    # Matrices that add up weights, and errors by weights, of shape (kernels, 2, notes). What fills up the notes of
    # kernels that have fewer counts for nothing.
    sums: NDArray[np.float32]
