"""What is decided once for a weight (N, K): the kernels that it may need, and which serves how many rows, as steps.

The expected time of a kernel jumps when it needs another row of tiles, and is smooth in between. So it is computed at
the ends of such pieces and interpolated, and only for the few kernels that may be the fastest there. If two of them
come close, both are computed. If an inexact time could still decide, times are computed as a call would have them.

The search takes as long as all else that is decided for a weight: ten to twenty milliseconds, once, since later
processes read its result.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cutlass_ops.base import arch, checked_json
from cutlass_ops.base.dtypes import bf16
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose.knowledge import Foretold, Knowledge, order_of
from cutlass_ops.declare.config import Config, Ordered, config_from_json, config_to_json
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import FEW
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places
from cutlass_ops.kinds.traits import Traits

# Steps end at this number of rows. With more rows, a GEMM takes longer than choosing its kernel.
MOST_ROWS = 1 << 13
# Up to this many rows, times are computed at each number of rows instead of interpolated.
_EACH = 256
# A kernel is considered between two numbers of rows if, at one of them, its time is at most this part above the best
# time that some kernel keeps at both. A quarter of the distance of the two numbers is added to it, since corrections
# by measurements change with distance.
_BEHIND, _APART = 0.02, 0.25
# The same for pieces whose times were computed.
_BEHIND_PIECE = 0.002
# Relative errors of interpolated and of computed times. Computed ones have errors too: `Notes` sums in FP32.
_INTERPOLATED, _COMPUTED = 1e-4, 4e-6
# The model's mean error is interpolated as well. Its own error is its change over the interval, plus this part of it.
_OF_MEANS = 0.02
# If A's lines lie along M, they begin where the L2 cache's lines do if the number of rows is a multiple of this.
_LINE = bf16.count_in(arch.CACHE_LINE_BYTES)
_UNDECIDED = -1
# At most this many ties are decided, a millisecond each. Most weights have a dozen; a call asks the policy for more.
_MOST_TIES = 256


def _has_lines_along_m(knowledge: Knowledge) -> bool:
    """Whether A's lines lie along M, so that times depend on how these meet the L2 cache's lines."""
    return "m" in knowledge.pool.traits.lines


@dataclass(frozen=True)
class Steps:
    """The fastest of a weight's kernels at each number of rows up to :data:`MOST_ROWS`."""

    starts: tuple[int, ...]  # the first number of rows of each step
    # What serves: twice a kernel's index, plus one if its tiles are ordered by GPC. -1 where that is not decided.
    kernels: tuple[int, ...]

    def at(self, rows: int) -> tuple[int, bool] | None:
        """Return a kernel's index, and whether its tiles are ordered by GPC; None if that is not decided."""
        found = _UNDECIDED if rows > MOST_ROWS else self.kernels[bisect_right(self.starts, rows) - 1]
        return None if found == _UNDECIDED else (found >> 1, bool(found & 1))

    @classmethod
    def of_each(cls, each: NDArray[np.int16]) -> Steps:
        """Return the steps of what serves at each number of rows up to :data:`MOST_ROWS`."""
        starts = np.flatnonzero(np.diff(each, prepend=_UNDECIDED - 1))
        return cls(tuple((starts + 1).tolist()), tuple(each[starts].tolist()))


def steps_of(knowledge: Knowledge, kept: Places, foretold: Foretold, problems: Extents) -> Steps:
    """Return the steps of a weight's kernels."""
    mine = foretold.of(kept)
    rows = problems.m[:, 0].astype(np.int64)
    further = np.setdiff1d(_further_rows(knowledge), rows)
    found = knowledge.foretold(problems._replace(m=further[:, None].astype(np.float64))).of(kept)
    rows = np.concatenate([rows, further])
    order = rows.argsort()
    rows = rows[order]
    foretold = Foretold(*(np.concatenate(both)[order] for both in zip(mine, found, strict=True)))
    each = _each(foretold, rows)
    # Calls of groups ask for these numbers of rows alone (`declare.rows.nearest`).
    if knowledge.pool.traits.grouped:
        return Steps.of_each(each)
    smooth = rows <= MOST_ROWS
    if _has_lines_along_m(knowledge):
        smooth &= rows % _LINE != 0
    problems = problems._replace(m=rows[smooth, None].astype(np.float64))
    between, kernels = _Search(knowledge, kept, foretold.part(smooth), problems).between()
    each[between - 1] = kernels
    # What interpolation does not decide is foretold: a few numbers of rows in a hundred.
    left = np.setdiff1d(np.flatnonzero(each == _UNDECIDED) + 1, rows)
    if len(left):
        each[left - 1] = _each(_foretold(knowledge, kept, problems, left), left)[left - 1]
    _decide_ties(each, partial(_foretold, knowledge, kept, problems))
    return Steps.of_each(each)


def _foretold(knowledge: Knowledge, kept: Places, problems: Extents, rows: Places) -> Foretold:
    """Return the times of a weight's kernels at some numbers of rows."""
    return knowledge.foretold(problems._replace(m=rows[:, None].astype(np.float64))).of(kept)


def _decide_ties(each: NDArray[np.int16], foretold: Callable[[Places], Foretold]) -> None:
    """Break ties that only rounding separates, as a single call would."""
    for row in np.flatnonzero(each == _UNDECIDED)[:_MOST_TIES] + 1:
        found = foretold(np.array([row]))
        best = found.times[0].argmin()
        if not np.isfinite(found.times[0, best]):
            return  # no kernel can be launched, and none can with more rows
        each[row - 1] = _numbers(best, found.by_gpc[0, best])


def _further_rows(knowledge: Knowledge) -> Places:
    """Return the numbers of rows at which times must be foretold before others are searched."""
    # With few rows, the model's mean error changes most from one number to the next.
    found = [np.arange(1, FEW + 1)]
    if _has_lines_along_m(knowledge):
        # Each multiple of a line is a case of its own.
        beside = np.arange(16 * _LINE + 8, MOST_ROWS, _LINE)
        found += [np.arange(_LINE, MOST_ROWS + 1, _LINE), beside, np.array([MOST_ROWS - 1])]
    return np.concatenate(found)


def _each(foretold: Foretold, rows: Places) -> NDArray[np.int16]:
    """Return what serves at each number of rows up to :data:`MOST_ROWS`, where that is foretold and decides."""
    best, at = foretold.times.argmin(1), np.arange(len(rows))
    least = foretold.times[at, best]
    alone = (foretold.times <= least[:, None] * (1 + _COMPUTED)).sum(1) == 1
    decided = np.isfinite(least) & alone & (rows <= MOST_ROWS)
    found = np.full(MOST_ROWS, _UNDECIDED, np.int16)
    found[rows[decided] - 1] = _numbers(best, foretold.by_gpc[at, best])[decided]
    return found


class _Pieces(NamedTuple):
    """Parts of intervals in which a kernel has equally many tiles. Intervals lie between foretold numbers of rows."""

    # Indices of the interval and of the kernel, of shape (pieces,).
    intervals: Places
    kernels: Places
    rows: Floats  # two numbers of rows between which times are interpolated, of shape (2, pieces)
    # The kernel's times there, whether it prefers an order by GPC, and its relative error by that of mean errors.
    times: Floats
    by_gpc: Flags
    errors: Floats
    bends: Floats  # the largest relative distance of times from the line between the two, of shape (pieces,)


class _Curves(NamedTuple):
    """A kernel between two foretold numbers of rows: a row of pieces. Arrays of one dimension."""

    # Indices of the interval and of the kernel.
    intervals: Places
    kernels: Places
    high: Floats  # the rows of a piece
    before: Floats  # how many such pieces lie before the first one, counted from the first row of the problem
    begin: Places  # the index of the first piece


class _Search:
    """The search for a weight's steps. Kernels are named by their place among those kept."""

    def __init__(self, knowledge: Knowledge, kept: Places, foretold: Foretold, problems: Extents) -> None:
        self._knowledge, self._kept, self._problems = knowledge, kept, problems
        self._rows = problems.m[:, 0].astype(np.int64)
        self._times, self._by_gpc = foretold.times, foretold.by_gpc
        self._weight, self._usual = foretold.weight, foretold.usual
        self._kinds = knowledge.kind_of_each[kept]
        ends = np.abs(np.stack([self._usual[:-1], self._usual[1:]]))
        self._error_of_means = np.log(2) * (np.abs(np.diff(self._usual, axis=0)) + _OF_MEANS * ends.max(0))

    def _contenders(self) -> tuple[Places, Places]:
        """Return each interval and kernel that may be the fastest somewhere in it."""
        ends = np.stack([self._times[:-1], self._times[1:]])
        reached = ends.max(0).min(1) * (1 + _BEHIND + _APART * np.diff(self._rows) / self._rows[:-1])
        # An interval in which a kernel becomes impossible is left to the policy.
        possible = np.isfinite(ends)
        usable = (possible[0] == possible[1]).all(1) & np.isfinite(reached) & (np.diff(self._rows) > 1)
        intervals, kernels = np.nonzero((ends.min(0) <= reached[:, None]) & usable[:, None])
        return intervals, kernels

    def _computed(self) -> tuple[_Curves, _Pieces]:
        """Return the contenders and their pieces."""
        intervals, kernels = self._contenders()
        start, end = self._rows[intervals], self._rows[intervals + 1]
        high = np.where(start < _EACH, 1.0, self._knowledge.pool.cluster_rows[self._kept[kernels]])
        before = np.ceil((start + 1) / high) - 1
        of, number = _numbered((np.ceil((end - 1) / high) - before).astype(np.int64))
        curves = _Curves(intervals, kernels, high, before, np.searchsorted(of, np.arange(len(kernels))))

        # If an end of the interval is in the piece, times are known there.
        intervals, kernels, high, start, end = (x[of] for x in (intervals, kernels, high, start, end))
        lowest, highest = (before[of] + number) * high + 1, (before[of] + number + 1) * high
        if _has_lines_along_m(self._knowledge):
            highest = np.maximum(highest - (highest % _LINE == 0), lowest)
        known = np.stack([lowest <= start, highest >= end])
        rows = np.stack([np.maximum(lowest, start), np.minimum(highest, end)])
        ends = np.stack([intervals, intervals + 1]), kernels
        times, by_gpc = np.asarray(self._times[ends]), np.asarray(self._by_gpc[ends])
        errors = self._error_of_means[intervals, self._kinds[kernels]] / (self._weight[ends] + 1)
        unknown = np.nonzero(~known)
        _, piece = unknown
        found = self._predicted(rows[unknown], kernels[piece], intervals[piece])
        times[unknown], by_gpc[unknown], errors[unknown] = found
        bends = np.full(len(kernels), _INTERPOLATED)
        if self._knowledge.pool.traits.gathers:
            # Somewhere in a piece, a kernel begins to wait for means of A's rows, and its times bend. The middle shows
            # at least half of the largest distance from the line.
            middle, _, _ = self._predicted(rows.mean(0), kernels, intervals)
            bends += 2 * np.abs(middle / times.mean(0) - 1)
        return curves, _Pieces(intervals, kernels, rows, times, by_gpc, errors, bends)

    def _predicted(self, rows: Floats, kernels: Places, intervals: Places) -> tuple[Floats, Flags, Floats]:
        """Return one kernel's time at each number of rows, whether by GPC, and its error by the mean errors."""
        log, logs = np.log2(rows), np.log2(self._rows)
        usual = np.stack([np.interp(log, logs, each) for each in self._usual.T], 1)
        problems = self._problems._replace(m=rows[:, None])
        times, by_gpc, weight = self._knowledge.foretold_one(self._kept[kernels], problems, usual)
        return times, by_gpc, self._error_of_means[intervals, self._kinds[kernels]] / (weight + 1)

    def between(self) -> tuple[Places, Places]:
        """Return the numbers of rows between those foretold, and what serves at each."""
        curves, pieces = self._computed()
        if not len(curves.kernels):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first = np.flatnonzero(np.diff(curves.intervals, prepend=-1))
        low, high = (
            np.minimum.reduceat(pieces.times.min(0) * (1 - pieces.bends), curves.begin),
            np.maximum.reduceat(pieces.times.max(0), curves.begin),
        )
        counts = np.diff(first, append=len(low))
        fast = low <= np.repeat(np.minimum.reduceat(high, first), counts) * (1 + _BEHIND_PIECE)
        left, many = np.flatnonzero(fast), np.add.reduceat(fast.astype(np.int64), first)

        # The times of these kernels at each number of rows.
        intervals = curves.intervals[first]
        of, number = _numbered(np.diff(self._rows)[intervals] - 1)
        rows = self._rows[intervals[of]] + 1 + number
        if _has_lines_along_m(self._knowledge):
            of, rows = of[rows % _LINE != 0], rows[rows % _LINE != 0]
        at, number = _numbered(many[of])
        curve = left[(np.cumsum(many) - many)[of][at] + number]
        piece = curves.begin[curve] + (np.ceil(rows[at] / curves.high[curve]) - 1 - curves.before[curve]).astype(
            np.int64
        )
        begin, end = pieces.rows
        slopes = np.diff(pieces.times, axis=0)[0] / np.maximum(end - begin, 1)
        times = pieces.times[0, piece] + slopes[piece] * (rows[at] - begin[piece])
        kinds = self._kinds[pieces.kernels]
        fastest, close = _fastest(at, times, pieces.errors[0, piece], kinds[piece], pieces.bends[piece])
        kernels = _numbers(pieces.kernels, pieces.by_gpc[0])[piece[fastest]]

        # Where that does not decide, compute the times of those that are close.
        differ = (pieces.by_gpc[0] != pieces.by_gpc[1])[piece[fastest]]
        unclear = differ | (np.bincount(at, close) > 1)
        again = np.flatnonzero(close & unclear[at])
        if len(again):
            names = pieces.kernels[piece[again]]
            times, by_gpc, errors = self._predicted(
                rows[at[again]].astype(np.float64), names, pieces.intervals[piece[again]]
            )
            fastest, close = _fastest(at[again], times, errors, self._kinds[names], np.full(len(times), _COMPUTED))
            decided = np.bincount(at[again], close)[unclear.nonzero()[0]] == 1
            kernels[unclear] = np.where(decided, _numbers(names, by_gpc)[fastest], _UNDECIDED)
        return rows, kernels


def _numbers(kernels: Places, by_gpc: Flags) -> Places:
    return 2 * kernels + by_gpc


def _fastest(groups: Places, times: Floats, errors: Floats, kinds: Places, bends: Floats) -> tuple[Places, Flags]:
    """Return the index of the fastest of each group, and whether each member may be the fastest.

    Members of a group lie together. Kernels of one kind share the error of its mean error, so only the difference of
    their errors counts.
    """
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    counts = np.diff(first, append=len(times))
    least = np.repeat(np.minimum.reduceat(times, first), counts)
    hits = np.flatnonzero(times == least)
    fastest = hits[np.searchsorted(hits, first)]
    best = np.repeat(fastest, counts)
    alike = np.where(kinds == kinds[best], -errors[best], errors[best])
    return fastest, times <= least * (1 + np.maximum(bends, bends[best]) + np.abs(errors + alike))


def _numbered(counts: Places) -> tuple[Places, Places]:
    """Repeat each index by its count. Return these, and the place of each among its repetitions."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


@dataclass(frozen=True, eq=False)
class Weight:
    """What is decided once for a weight."""

    signature: OpSignature  # the signature of its calls
    device: Device  # where they run
    kept: tuple[Config, ...]  # the kernels that it may need at any number of rows
    steps: Steps  # which of them serves at each number of rows, by what is foretold
    measured: Mapping[int, Ordered]  # the fastest of them by number of rows, where any was measured
    peers: Mapping[int, str]  # the peer that serves instead, by number of rows
    is_deterministic: bool = False  # whether the user's tuning chose the kernels so that no choice changes a bit
    _by_gpc: dict[int, TileOrder] = field(default_factory=dict, repr=False)

    def serves(self, problem: Problem) -> Ordered | None:
        """Return the kernel that serves one of the weight's problems; None if that was not decided."""
        known = self.measured.get(problem.m)
        if known is not None:
            return known
        found = self.steps.at(problem.m)
        if found is None:
            return None
        place, by_gpc = found
        config = self.kept[place]
        if not by_gpc:
            return Ordered(config, order_of(config, problem, self._traits, self.device, by_gpc=False))
        # If a kernel has an order by GPC, it is always the same.
        if place not in self._by_gpc:
            self._by_gpc[place] = order_of(config, problem, self._traits, self.device, by_gpc=True)
        return Ordered(config, self._by_gpc[place])

    @cached_property
    def specs(self) -> Mapping[Config, KernelSpec]:
        """The specifications of :attr:`kept`."""
        return {c: _spec_of(self.signature, self.device, c) for c in self.kept}

    @cached_property
    def _traits(self) -> Traits:
        return Traits.of(self.signature)

    def to_json(self) -> dict[str, Any]:
        """Return what was decided as plain values, without the signature and the device."""
        index = {config: at for at, config in enumerate(self.kept)}
        return {
            "kept": [config_to_json(c) for c in self.kept],
            "starts": self.steps.starts,
            "kernels": self.steps.kernels,
            "measured": [[m, index[x.config], x.order.to_json()] for m, x in self.measured.items()],
            "peers": list(self.peers.items()),
        }

    @classmethod
    def from_json(cls, data: object, signature: OpSignature, device: Device) -> Weight:
        """Rebuild what :meth:`to_json` returned, for the same signature and device."""
        given = checked_json.mapping(data, "a decision", None)
        try:
            kept = tuple(map(config_from_json, given["kept"]))
            steps = Steps(tuple(map(int, given["starts"])), tuple(map(int, given["kernels"])))
            measured = {int(m): Ordered(kept[at], TileOrder.from_json(order)) for m, at, order in given["measured"]}
            peers = {int(m): str(name) for m, name in given["peers"]}
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise ConfigError(f"a decision is not whole: {exc!r}") from None
        in_range = all(-1 <= number < 2 * len(kept) for number in steps.kernels)
        if steps.starts[:1] != (1,) or len(steps.starts) != len(steps.kernels) or not in_range:
            raise ConfigError("a decision's steps are not whole")
        return cls(signature, device, kept, steps, measured, peers)


@lru_cache(maxsize=1 << 14)
def _spec_of(signature: OpSignature, device: Device, config: Config) -> KernelSpec:
    """Return the specification of a kernel: made once for all weights."""
    return device.spec(signature, config)
