"""Reliable timing on a CUDA device.

Every variant is captured in a CUDA graph of several launches over rotated inputs. This excludes host time and a warm L2
cache. In a round, all graphs are replayed once without a pause: after a pause, the chip would be cooler and faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

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
    """Return how many sets of inputs to rotate so that no set is still in the L2 cache when it is used again."""
    fewest, most = _SETS
    return max(fewest, min(most, math.ceil(_L2_FULL * l2_bytes / bytes_touched)))


def expected_us(problem: Problem, element_bytes: int = 2) -> float:
    """Estimate a problem's time in microseconds, only to decide how often to repeat it."""
    moved = problem.bytes(element_bytes, element_bytes, element_bytes)
    return max(problem.flops / _FLOP_PER_US, moved / _BYTES_PER_US) + _START_US


class Stopwatch:
    """Time variants captured in CUDA graphs, round by round.

    Parameters
    ----------
    expected : float
        Rough time of one call in microseconds, which determines the number of calls per replay.
    """

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
