"""Variants timed against each other with :mod:`cutlass_ops.timing`, ratios per round, and results as files.

In each round every variant runs once, in a fresh random order: a fixed order would give the one that follows a pause a
cooler chip. A ratio is formed within a round, then the median over rounds.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
import random
import statistics
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.timing import Run, Stopwatch

ROUNDS = 25


@dataclass(frozen=True)
class Timing:
    """Times of one variant, in milliseconds a call, one for each round."""

    rounds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds)


def time_interleaved(variants: Mapping[str, Run], expected_us: float, rounds: int = ROUNDS) -> dict[str, Timing]:
    """Time variants against each other.

    Parameters
    ----------
    variants : mapping of str to callable
        Each is called with a launch index, from which it picks its inputs.
    expected_us : float
        Rough time of one call, which sets how many fit in a replay.
    rounds : int
        Rounds that count; one more warms up.
    """
    watch = Stopwatch(expected_us)
    for name, run in variants.items():
        watch.add(name, run)
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        random.Random(number).shuffle(names)
        for name, microseconds in zip(names, watch.round(names), strict=True):
            times[name].append(microseconds / 1e3)
    return {name: Timing(tuple(each[1:])) for name, each in times.items()}


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
