"""Reliable timing on a CUDA device.

Every variant is captured in a CUDA graph of several launches over rotated inputs. This excludes host time and a warm L2
cache. In a round, all graphs are replayed once without a pause: after a pause, the chip would be cooler and faster.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

import torch

from cutlass_ops.declare.chips import USUAL
from cutlass_ops.declare.problem import Problem

Run = Callable[[int], object]

# Rotated inputs have at least this many times the size of the L2 cache, within the minimum and maximum number of sets.
# A single set would not rotate; more than twelve would fill the memory at large problems.
_L2_FULL = 3
_SETS = (2, 12)
# Rough throughput of an H100, and the time of a launch in microseconds.
_FLOP_PER_US = 6.5e8
_BYTES_PER_US = 2.8e6
_START_US = 4.0
# Time of one replay: long enough for an event's resolution, short enough for many rounds.
_REPLAY_US = 1500.0
_MAX_LAUNCHES = 32


def rotation(bytes_touched: float, l2_bytes: float = USUAL.l2_bytes) -> int:
    """Return how many sets of inputs to rotate, so that the L2 cache has lost a set when it is used again."""
    fewest, most = _SETS
    return max(fewest, min(most, math.ceil(_L2_FULL * l2_bytes / bytes_touched)))


def expected_us(problem: Problem, element_bytes: float = 2) -> float:
    """Estimate a problem's time in microseconds, only to decide how often to repeat it."""
    moved = problem.bytes(element_bytes, element_bytes, element_bytes)
    return max(problem.flops / _FLOP_PER_US, moved / _BYTES_PER_US) + _START_US


class Stopwatch:
    """Time variants captured in CUDA graphs, round by round."""

    def __init__(self, expected: float) -> None:
        self._launches = max(3, min(_MAX_LAUNCHES, round(_REPLAY_US / expected)))
        # A graph does not own its launches' memory, so keep the captured function with it.
        self._graphs: dict[object, tuple[torch.cuda.CUDAGraph, Run]] = {}

    def add(self, name: object, run: Run) -> None:
        """Capture a variant. ``run`` takes a launch index, which selects its inputs."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for index in range(3):
                run(index)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(self._launches):
                run(index)
        self._graphs[name] = graph, run

    def round(self, names: Sequence[object]) -> list[float]:
        """Replay variants in this order and return the microseconds of one call of each."""
        # Warm up with the last variant, so that the first does not follow a pause.
        self._replay(names[-1])
        events = [_event() for _ in range(len(names) + 1)]
        events[0].record()
        for name, end in zip(names, events[1:], strict=True):
            self._replay(name)
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 / self._launches for begin, end in pairwise(events)]

    def _replay(self, name: object) -> None:
        graph, _ = self._graphs[name]
        graph.replay()


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


Entrant = TypeVar("Entrant", bound=Hashable)

# (rounds, limit): after this many rounds, an entrant drops out if it is slower than the leader by more than the limit
# in all but its best quarter of rounds.
_LIMITS = ((2, 0.25), (3, 0.10), (5, 0.05), (8, 0.03))


@dataclass(frozen=True)
class Standing(Generic[Entrant]):
    """An entrant's result."""

    entrant: Entrant
    times: tuple[float, ...]  # in each of its rounds, in the unit of the measurement
    behind: float  # average time relative to the winner's, minus one: 0 for the winner, 0.02 for 2% slower

    @property
    def median(self) -> float:
        """The median of its times."""
        return statistics.median(self.times)


def race(
    entrants: Sequence[Entrant],
    measure: Callable[[Sequence[Entrant]], Sequence[float]],
    *,
    guests: Sequence[Entrant] = (),
    rounds: int = 15,
    seed: int = 0,
) -> list[Standing[Entrant]]:
    """Run a race of distinct, hashable entrants; return all standings, the fastest first.

    `measure` runs entrants once in the given order and returns their times, which must be positive. Guests run in every
    round but never lead or drop out. Entrants that ran more rounds come before those that dropped out; guests are last.
    Raises ValueError if there is no entrant, an entrant is listed twice, or there are no rounds.
    """
    everyone = [*entrants, *guests]
    if not entrants or len(set(everyone)) != len(everyone):
        raise ValueError(f"a race needs distinct entrants, and at least one: {everyone}")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}: use at least 1")
    rng = random.Random(seed)
    times: dict[Entrant, list[float]] = {e: [] for e in everyone}
    running = list(entrants)
    for number in range(1, rounds + 1):
        order = [*running, *guests]
        rng.shuffle(order)
        for entrant, time in zip(order, measure(order), strict=True):
            times[entrant].append(time)
        leader = _leader(times, running)
        running = [e for e in running if not _hopeless(_ratios(times[e], times[leader]), number)]
    winner = _leader(times, running)
    standings = [Standing(e, tuple(t), _middle(_ratios(t, times[winner])) - 1) for e, t in times.items()]
    invited = set(guests)
    return sorted(standings, key=lambda s: (s.entrant in invited, -len(s.times), s.behind))


def _leader(times: dict[Entrant, list[float]], running: Sequence[Entrant]) -> Entrant:
    """Return the running entrant with the smallest average ratio to the fastest time of each round."""
    fastest = [min(each) for each in zip(*(times[e] for e in running), strict=True)]
    return min(running, key=lambda e: _middle(_ratios(times[e], fastest)))


def _middle(values: Sequence[float]) -> float:
    """Return the mean of the middle half."""
    cut = len(values) // 4
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _ratios(own: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the ratios of the rounds that both ran."""
    return [a / b for a, b in zip(own, other, strict=False)]


def _hopeless(ratios: Sequence[float], number: int) -> bool:
    limit = next((part for after, part in reversed(_LIMITS) if number >= after), None)
    lucky = sorted(ratios)[len(ratios) // 4]
    return limit is not None and lucky > 1 + limit
