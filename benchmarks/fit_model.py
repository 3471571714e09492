"""Fits the cost model's numbers of a chip to measurements, and says how well the model ranks.

    python benchmarks/fit_model.py cutlass_ops/tuned/*.json benchmarks/results/sweep_*_h100.json

Reads tuning tables and the results of sweep.py.

Prints the fitted :class:`cutlass_ops.model.Chip`, to be copied into ``cutlass_ops/model.py`` by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from cutlass_ops import model, tables
from cutlass_ops.config import ClusterShape, Schedule, Sm90Config, ThreadblockShape

Shape = tuple[int, int, int]
Sweep = dict[Shape, dict[Sm90Config, float]]

_SLUG = re.compile(r"sm90_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)_(?P<schedule>ws|pp|coop)(?P<swap>_swap)?")
_SCHEDULES: dict[str, Schedule] = {"ws": "warp_specialized", "pp": "pingpong", "coop": "cooperative"}

# Times far from the best of their shape say little about a choice.
RELEVANT = 0.15


def read(paths: Sequence[Path]) -> Sweep:
    """Return for each shape the best time, in microseconds, of each configuration over the orders of its tiles."""
    found: Sweep = {}
    for path in paths:
        data = json.loads(path.read_text())
        if "points" in data:
            _read_table(tables.Table.from_json(data), found)
            continue
        for row in data["rows"]:
            times = found.setdefault((row["m"], row["n"], row["k"]), {})
            for name, ms in row["times"].items():
                config = parse(name.split("|")[0])
                times[config] = min(times.get(config, math.inf), ms * 1e3)
    return found


def _read_table(table: tables.Table, found: Sweep) -> None:
    for point in table.points:
        times = found.setdefault(point.problem, {})
        for m in point.measured:
            config = m.config.binary()
            if isinstance(config, Sm90Config):
                # Medians of a race that ended early are of a cooler chip; ratios are not.
                time = point.measured[0].microseconds * (1 + m.behind)
                times[config] = min(times.get(config, math.inf), time)


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


def loss(sweep: Sweep, chip: model.Chip) -> float:
    """Return the mean squared logarithm of predicted over measured, near each shape's best."""
    total = weights = 0.0
    for shape, times in sweep.items():
        best = min(times.values())
        for config, time in times.items():
            weight = math.exp(-(time / best - 1) / RELEVANT)
            total += weight * math.log(model.predict(config, shape, chip) / time) ** 2
            weights += weight
    return total / weights


def regret(sweep: Sweep, chip: model.Chip, count: int) -> tuple[float, float]:
    """Return the time of the best of the model's first `count` over the best of all: geometric mean and worst."""
    ratios = []
    for shape, times in sweep.items():
        first = sorted(times, key=lambda c: model.predict(c, shape, chip))[:count]
        ratios.append(min(times[c] for c in first) / min(times.values()))
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)


def fit(sweep: Sweep, chip: model.Chip, rounds: int) -> model.Chip:
    """Improve a chip's numbers by random steps along one or two of them."""
    rng, best, width = random.Random(0), loss(sweep, chip), 0.2
    for _ in range(rounds):
        tried = chip
        for _ in range(rng.choice((1, 2))):
            tried = _moved(tried, rng, width)
        value = loss(sweep, tried)
        if value < best:
            chip, best = tried, value
        else:
            width = max(0.02, width * 0.997)
    return chip


FITTED = ("clock", "fill", "l2", "dram", "launch", "cluster", "throttle", "reread", "serial")
PER_SCHEDULE = ("efficiency", "epilogue")


def _moved(chip: model.Chip, rng: random.Random, width: float) -> model.Chip:
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
    sweep = read(args.sweeps)
    print(f"{len(sweep)} shapes, {sum(map(len, sweep.values()))} times")
    for title, chip in (("before", model.H100), ("after", fit(sweep, model.H100, args.rounds))):
        print(f"{title}: error {math.sqrt(loss(sweep, chip)):.3f}")
        for count in (1, 8, 16):
            mean, worst = regret(sweep, chip, count)
            print(f"  best of the first {count}: {mean:.4f} times the best of all, at worst {worst:.3f}")
    print(chip)


if __name__ == "__main__":
    main()
