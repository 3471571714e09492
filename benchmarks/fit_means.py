"""Fits the cost model's extra time for means of A's rows to sweeps, and prints its error.

    python benchmarks/fit_means.py benchmarks/results/sweep_means_h100.json    # and later ones of single ways

Reads results of sweep_means.py; the last file with a way counts. Prints the fitted
:class:`cutlass_ops.kinds.sm90.model.Taking`, to be copied there by hand. Kernels of `beside` that visit all rows in the
first of several waves are ignored, since dispatch lets them visit new rows last.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cutlass_ops.declare.config import Means, config_from_json
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.sm90.model import Floats, PerSchedule, Taking

# Larger errors are outliers.
_OUTLIER = 0.15


@dataclass(frozen=True, eq=False)
class Measured:
    """Kernels that compute means in one way, each at a problem: the time without means, and the extra time with them.

    Attributes
    ----------
    problems : tuple of Problem
        The problem of each kernel.
    batch : model.Batch
        The kernels.
    given, later : array
        Microseconds without means, and extra microseconds with them, (kernels,).
    """

    problems: tuple[Problem, ...]
    batch: model.Batch
    given: Floats
    later: Floats

    @classmethod
    def of(cls, rows: Sequence[dict[str, Any]], way: Means) -> Measured:
        """Return a sweep's measurements of a way."""
        found = []
        for row in rows:
            config, order = config_from_json(row["config"]), TileOrder.from_json(row["order"])
            problem = Problem(row["m"], row["n"], row["k"])
            assert isinstance(config, Sm90Config)
            if way in row["us"] and (way != "beside" or not _rows_first(config, order, problem)):
                us = row["us"]
                found.append((problem, replace(config, means=way), us["given"], us[way] - us["given"]))
        problems, configs, given, later = zip(*found, strict=True)
        return cls(problems, model.Batch.of(configs), np.array(given), np.array(later))

    def errors(self, taking: Taking) -> Floats:
        """Return the model's error as a part of each kernel's whole time."""
        given = np.broadcast_to(self.given, (len(self.problems), len(self.given)))
        predicted = model.means(self.batch, self.problems, given, taking=taking).diagonal()
        return (predicted - self.later) / (self.given + self.later)


def _rows_first(config: Sm90Config, order: TileOrder, problem: Problem) -> bool:
    waves = model.grid(model.Batch.of([config]), [problem], model.H100).waves
    return waves.item() > 1 and config.ordered and (order.raster == "along_m") != config.swap_ab


def latest(files: Sequence[Path]) -> dict[Means, Measured]:
    """Return each way's measurements, from the last sweep that has it."""
    found = {}
    for rows in (json.loads(file.read_text())["rows"] for file in files):
        found |= {way: Measured.of(rows, way) for way in model.WAYS if any(way in row["us"] for row in rows)}
    return found


def loss(measured: Sequence[Measured], taking: Taking) -> float:
    """Return the mean squared error, with outliers clipped."""
    errors = np.concatenate([each.errors(taking) for each in measured])
    return float(np.minimum(errors**2, _OUTLIER**2).mean())


def fit(measured: Sequence[Measured], taking: Taking, rounds: int) -> Taking:
    """Improve the numbers by random steps along one of them."""
    rng, best = random.Random(0), loss(measured, taking)
    for _ in range(rounds):
        tried = _moved(taking, rng)
        value = loss(measured, tried)
        if value < best:
            taking, best = tried, value
    return taking


def _moved(taking: Taking, rng: random.Random) -> Taking:
    name, factor = rng.choice([f.name for f in fields(Taking)]), math.exp(rng.gauss(0, 0.2))
    value = getattr(taking, name)
    if not isinstance(value, PerSchedule):
        return replace(taking, **{name: value * factor})
    # Persistent kernels are alike.
    persistent = rng.random() < 0.5
    schedules = ("pingpong", "cooperative") if persistent else ("warp_specialized",)
    return replace(taking, **{name: replace(value, **{s: value.of(s) * factor for s in schedules})})


def main() -> None:
    """Fit and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=4000)
    args = parser.parse_args()
    measured = latest(args.sweeps)
    taking = fit(list(measured.values()), model.TAKING, args.rounds)
    for title, each in (("before", model.TAKING), ("after", taking)):
        print(title, end=":")
        for way, those in measured.items():
            print(f" {way} {math.sqrt(loss([those], each)):.4f} ({len(those.problems)})", end="")
        print()
    print(taking)


if __name__ == "__main__":
    main()
