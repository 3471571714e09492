"""Fits the cost model's numbers of a chip to measurements, and prints how well the model ranks.

    python benchmarks/fit_model.py cutlass_ops/tuned/nvidia-h100*.json benchmarks/results/sweep_*_h100.json

Reads tuning tables and the results of sweep.py. Only kernels that raced together are compared: each file by itself.

Prints the fitted :class:`cutlass_ops.kinds.sm90.model.Costs`, to be copied there by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cutlass_ops.choose import tables
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config
from cutlass_ops.kinds.sm90.model import Floats

Entry = tuple[Sm90Config, bool]  # a kernel, and whether its tiles were ordered by GPC
Sweep = dict[Problem, dict[Entry, float]]
Lines = tuple[model.Extent, model.Extent]

_SLUG = re.compile(r"sm90_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)_(?P<schedule>ws|pp|coop)(?P<swap>_swap)?")
_SCHEDULES: dict[str, Schedule] = {"ws": "warp_specialized", "pp": "pingpong", "coop": "cooperative"}

# Times far from the best of their shape matter little for a choice.
RELEVANT = 0.15


def read(path: Path) -> Sweep:
    """Return for each shape of a file the best time, in microseconds, of each configuration.

    Over the orders of its tiles and its ways to take means, except that orders by GPC count as a configuration of their
    own, as to the model.
    """
    data = json.loads(path.read_text())
    if "points" in data:
        return _read_table(tables.Table.from_json(data))
    found: Sweep = {}
    for row in data["rows"]:
        times = found.setdefault(Problem(row["m"], row["n"], row["k"]), {})
        for name, ms in row["times"].items():
            entry = parse(name.split("|")[0]), False
            times[entry] = min(times.get(entry, math.inf), ms * 1e3)
    return found


def _read_table(table: tables.Table) -> Sweep:
    # Two products take as long as one with twice the columns, which the model predicts.
    products = 1 + len(table.signature.epilogue.products)
    found: Sweep = {}
    for point in table.points:
        times: dict[Entry, float] = {}
        for one in point.measured:
            if isinstance(one.config, Sm90Config):
                entry = replace(one.config, means=Sm90Config.means), one.order.by_gpc
                # Medians of a race that ended early are of a cooler chip; ratios are not.
                time = point.measured[0].microseconds * (1 + one.behind)
                times[entry] = min(times.get(entry, math.inf), time)
        # Kernels of ordinary loads have a model of their own, and some problems only them.
        if times:
            found[point.problem._replace(n=point.problem.n * products)] = times
    return found


def parse(slug: str) -> Sm90Config:
    """Return the configuration that a slug names."""
    match = _SLUG.fullmatch(slug)
    assert match is not None, slug
    m, n, k, along_m, along_n = map(int, match.groups()[:5])
    config = Sm90Config(
        ThreadblockShape(m, n, k),
        ClusterShape(along_m, along_n),
        schedule=_SCHEDULES[match["schedule"]],
        swap_ab=match["swap"] is not None,
    )
    assert config.slug == slug
    return config


@dataclass(frozen=True, eq=False)
class Measured:
    """A sweep as a matrix of shape (problems, configurations): microseconds, NaN where nothing was measured.

    ``lines`` says along which extents the lines of A and of B lie in memory, as the model's ``times`` wants to know.
    """

    problems: tuple[Problem, ...]
    batch: model.Batch
    times: Floats
    lines: Lines

    @classmethod
    def of(cls, path: Path) -> Measured:
        """Return a file as a matrix."""
        sweep = read(path)
        entries = tuple(dict.fromkeys(entry for times in sweep.values() for entry in times))
        rows = [[times.get(entry, math.nan) for entry in entries] for times in sweep.values()]
        configs, by_gpc = zip(*entries, strict=True)
        return cls(tuple(sweep), model.Batch.of(configs, by_gpc), np.array(rows), _lines(path))

    @property
    def behind(self) -> Floats:
        """By what part each is slower than the best of its problem."""
        return self.times / np.nanmin(self.times, 1, keepdims=True) - 1

    def predicted(self, chip: model.Costs) -> Floats:
        """Return the model's microseconds."""
        return model.times(self.batch, self.problems, chip, lines=self.lines)


def _lines(path: Path) -> Lines:
    data = json.loads(path.read_text())
    if "points" not in data:
        return "k", "k"
    a, b = tables.Table.from_json(data).signature.majors
    return "k" if a == "row" else "m", "k" if b == "col" else "n"


def loss(files: Sequence[Measured], chip: model.Costs) -> float:
    """Return the mean squared logarithm of predicted over measured, near each shape's best.

    What all of a shape's predictions have in common does no harm to a choice, and counts a quarter.
    """
    total = count = 0.0
    for measured in files:
        errors = np.nan_to_num(np.log(measured.predicted(chip) / measured.times))
        weights = np.nan_to_num(np.exp(-measured.behind / RELEVANT))
        common = (weights * errors).sum(1, keepdims=True) / weights.sum(1, keepdims=True)
        within, all_of_it = (weights * (errors - common) ** 2).sum(), (weights * errors**2).sum()
        total += float(within + 0.25 * all_of_it)
        count += float(weights.sum())
    return total / count


def regret(files: Sequence[Measured], chip: model.Costs, count: int) -> tuple[float, float]:
    """Return the time of the best of the model's first `count` over the best of all: geometric mean and worst."""
    ratios = np.concatenate([_regrets(measured, chip, count) for measured in files])
    return float(np.exp(np.log(ratios).mean())), float(ratios.max())


def _regrets(measured: Measured, chip: model.Costs, count: int) -> Floats:
    predicted = np.where(np.isnan(measured.times), math.inf, measured.predicted(chip))
    first = predicted.argsort(1)[:, :count]
    return 1 + np.nanmin(np.take_along_axis(measured.behind, first, 1), 1)


def fit(files: Sequence[Measured], chip: model.Costs, rounds: int) -> model.Costs:
    """Improve a chip's numbers by random steps along one or two of them."""
    rng, best, width = random.Random(0), loss(files, chip), 0.2
    for _ in range(rounds):
        tried = chip
        for _ in range(rng.choice((1, 2))):
            tried = _moved(tried, rng, width)
        value = loss(files, tried)
        if value < best:
            chip, best = tried, value
        else:
            width = max(0.02, width * 0.997)
    return chip


FITTED = (
    *("clock", "fill", "l2", "lookups", "dram", "overlap", "cluster", "throttle", "throttle_after"),
    *("reread", "straddle", "multicast", "merge", "alone", "split", "meet", "exchange"),
)
PER_SCHEDULE = ("launch", "epilogue")


def _moved(chip: model.Costs, rng: random.Random, width: float) -> model.Costs:
    factor = math.exp(rng.gauss(0, width))
    name = rng.choice((*FITTED, *PER_SCHEDULE))
    if name in FITTED:
        return replace(chip, **{name: getattr(chip, name) * factor})
    schedule = rng.choice(("warp_specialized", "pingpong", "cooperative"))
    each = getattr(chip, name)
    return replace(chip, **{name: replace(each, **{schedule: getattr(each, schedule) * factor})})


def main() -> None:
    """Fit and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    files = [Measured.of(path) for path in args.sweeps]
    times = sum(int((~np.isnan(each.times)).sum()) for each in files)
    print(f"{sum(len(each.problems) for each in files)} shapes, {times} times")
    for title, chip in (("before", model.H100), ("after", fit(files, model.H100, args.rounds))):
        print(f"{title}: error {math.sqrt(loss(files, chip)):.3f}")
        for count in (1, 8, 16):
            mean, worst = regret(files, chip, count)
            print(f"  best of the first {count}: {mean:.4f} times the best of all, at worst {worst:.3f}")
    print(chip)


if __name__ == "__main__":
    main()
