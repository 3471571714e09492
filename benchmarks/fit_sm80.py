"""Fits the Sm80 cost model to a sweep, and prints how well it ranks.

    python benchmarks/fit_sm80.py benchmarks/results/sweep_sm80_h100.json

Prints the fitted :class:`cutlass_ops.kinds.sm80.model.Costs`, to be copied there by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path

from cutlass_ops.declare.config import Sm80Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm80 import model as model_sm80
from cutlass_ops.kinds.sm80.model import Costs

# Alignment and problem, and each configuration's microseconds there.
Place = tuple[int, Problem]
Sweep = dict[Place, dict[Sm80Config, float]]

_SLUG = re.compile(r"sm80_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)x(\d+)_16x8x16_s(\d)(_streamk)?")
MULTIPROCESSORS = 132
# Times far from the best of their problem matter little for a choice.
RELEVANT = 0.3


def read(path: Path) -> Sweep:
    """Return a sweep's measurements."""
    rows = json.loads(path.read_text())["rows"]
    return {
        (r["alignment"], Problem(r["m"], r["n"], r["k"])): {parse(slug): ms * 1e3 for slug, ms in r["times"].items()}
        for r in rows
    }


def parse(slug: str) -> Sm80Config:
    """Return the configuration that a slug names."""
    match = _SLUG.fullmatch(slug)
    assert match is not None, slug
    m, n, k, warp_m, warp_n, warp_k, stages = map(int, match.groups()[:7])
    tile, warp = ThreadblockShape(m, n, k), WarpShape(warp_m, warp_n, warp_k)
    return Sm80Config(tile, warp, stages=stages, stream_k=match[8] is not None)


def predicted(place: Place, configs: Iterable[Sm80Config], costs: Costs) -> dict[Sm80Config, float]:
    """Return the model's times at a place."""
    alignment, problem = place
    each = tuple(configs)
    times = model_sm80.times(model_sm80.Blocks.of(each), [problem], MULTIPROCESSORS, alignment, costs)[0].tolist()
    return dict(zip(each, times, strict=True))


def loss(sweep: Sweep, costs: Costs) -> float:
    """Return the mean squared logarithm of predicted over measured, near each place's best."""
    total = weights = 0.0
    for place, times in sweep.items():
        best, model = min(times.values()), predicted(place, times, costs)
        for config, time in times.items():
            weight = math.exp(-(time / best - 1) / RELEVANT)
            weights += weight
            total += weight * math.log(model[config] / time) ** 2
    return total / weights


def regret(sweep: Sweep, costs: Costs, count: int) -> tuple[float, float]:
    """Return the time of the best of the model's first `count` over the best of all: geometric mean and worst."""
    ratios = []
    for place, times in sweep.items():
        model = predicted(place, times, costs)
        first = sorted(times, key=model.__getitem__)[:count]
        ratios.append(min(times[c] for c in first) / min(times.values()))
    return math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)


def fit(sweep: Sweep, costs: Costs, rounds: int) -> Costs:
    """Improve the numbers by random steps along one or two of them."""
    rng, best, width = random.Random(0), loss(sweep, costs), 0.3
    names = [f.name for f in fields(Costs)]
    for _ in range(rounds):
        moved = {n: getattr(costs, n) * math.exp(rng.gauss(0, width)) for n in rng.sample(names, rng.choice((1, 2)))}
        tried = replace(costs, **moved)
        value = loss(sweep, tried)
        if value < best:
            costs, best = tried, value
        else:
            width = max(0.03, width * 0.998)
    return costs


def main() -> None:
    """Fit and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--rounds", type=int, default=1500)
    args = parser.parse_args()
    sweep = read(args.sweep)
    print(f"{len(sweep)} problems, {sum(map(len, sweep.values()))} times")
    for title, costs in (("before", model_sm80.H100), ("after", fit(sweep, model_sm80.H100, args.rounds))):
        print(f"{title}: error {math.sqrt(loss(sweep, costs)):.3f}")
        for count in (1, 3, 8):
            mean, worst = regret(sweep, costs, count)
            print(f"  best of the first {count}: {mean:.4f} times the best of all, at worst {worst:.3f}")
    print(costs)


if __name__ == "__main__":
    main()
