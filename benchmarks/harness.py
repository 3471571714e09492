"""Timing that can be trusted: correct first, inputs rotated, variants interleaved in random order, ratios per round.

Every variant of a case is captured in a CUDA graph of several launches over rotated inputs, so that host cost and a
warm L2 cache stay out. In each round all graphs are replayed once, in a fresh random order: a fixed order would give
the variant that follows the pause a cooler chip. A ratio is formed within a round, then the median over rounds.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import random
import statistics
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Run = Callable[[int], object]

L2_BYTES = 50e6
ROUNDS = 15


@dataclass(frozen=True)
class Timing:
    """Times of one variant, in milliseconds a call, one for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)


def rotation(bytes_touched: float) -> int:
    """Return how many sets of inputs to rotate so that none is still in the L2 cache when its turn comes."""
    return max(2, min(12, math.ceil(3 * L2_BYTES / bytes_touched)))


def time_interleaved(variants: Mapping[str, Run], expected_ms: float, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time variants against each other.

    Parameters
    ----------
    variants : mapping of str to callable
        Each is called with a launch index, from which it picks its inputs.
    expected_ms : float
        Rough time of one call, which sets how many fit in a replay of about two milliseconds.
    rounds : int
        Rounds that count; one more warms up.
    """
    launches = max(3, min(32, round(2.0 / expected_ms)))
    graphs = {name: _capture(run, launches) for name, run in variants.items()}
    names = list(graphs)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        random.Random(number).shuffle(names)
        graphs[names[-1]].replay()  # the first in the order must not follow a pause
        for name in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[name].replay()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
    return {
        name: Timing(tuple(begin.elapsed_time(end) / launches for begin, end in pairs[1:]))
        for name, pairs in events.items()
    }


def _capture(run: Run, launches: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(3):
            run(index)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            run(index)
    return graph


def ratios(ours: Timing, peer: Timing) -> dict[str, float]:
    """Return peer / ours: the median over the rounds, and the range."""
    each = sorted(p / o for o, p in zip(ours.rounds, peer.rounds, strict=True))
    return {"median": round(statistics.median(each), 4), "min": round(each[0], 4), "max": round(each[-1], 4)}


def geomean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def environment() -> dict[str, Any]:
    """Return the chip, date and versions that a result belongs to."""
    import cutlass_ops

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    driver, power = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].split(", ")
    return {
        "chip": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "driver": driver,
        "power_limit": power,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cutlass_ops": cutlass_ops.__version__,
    }


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, one row a line, so that a change of it reads well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = ",\n  ".join(json.dumps(row) for row in result["rows"])
    path.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {rows}\n ]\n}}\n')
