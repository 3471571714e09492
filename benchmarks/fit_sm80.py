"""Fits the Sm80 cost model to a sweep, and prints how well it ranks.

    python benchmarks/fit_sm80.py benchmarks/results/sweep_sm80_h100.json
    python benchmarks/fit_sm80.py benchmarks/results/sweep_fp64_h100.json    # FP64's

Prints the fitted :class:`cutlass_ops.kinds.sm80.model.Costs`, to be copied there by hand. Of FP64, those kernels count
whose instruction the model knows, m16n8k4; how the others compare is printed as well, and how the choice that ships
compares with torch.mm.
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
from typing import NamedTuple

from cutlass_ops.declare.config import InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm80 import model as model_sm80
from cutlass_ops.kinds.sm80 import space as space_sm80
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm80.model import Costs


class Place(NamedTuple):
    """Where kernels were timed: an alignment in elements, a problem, and the bytes of an element."""

    alignment: int
    problem: Problem
    element_bytes: int = 2


# Each configuration's microseconds at a place.
Sweep = dict[Place, dict[Sm80Config, float]]

_SLUG = re.compile(r"sm80_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)x(\d+)_s(\d)(_streamk)?")
_FITTED = {2: InstructionShape(16, 8, 16), 8: InstructionShape(16, 8, 4)}  # by an element's bytes
MULTIPROCESSORS = 132
# Times far from the best of their problem matter little for a choice.
RELEVANT = 0.3


def read(path: Path) -> Sweep:
    """Return a sweep's measurements."""
    rows = json.loads(path.read_text())["rows"]
    return {
        Place(r["alignment"], Problem(r["m"], r["n"], r["k"]), r.get("element_bytes", 2)): {
            parse(slug): ms * 1e3 for slug, ms in r["times"].items()
        }
        for r in rows
    }


def parse(slug: str) -> Sm80Config:
    """Return the configuration that a slug names."""
    match = _SLUG.fullmatch(slug)
    assert match is not None, slug
    numbers = list(map(int, match.groups()[:10]))
    tile, warp, instruction = ThreadblockShape(*numbers[:3]), WarpShape(*numbers[3:6]), InstructionShape(*numbers[6:9])
    return Sm80Config(tile, warp, instruction, stages=numbers[9], stream_k=match[11] is not None)


def known(sweep: Sweep) -> Sweep:
    """Return the times of kernels whose instruction the model knows."""
    return {
        place: {config: time for config, time in times.items() if config.instruction == _FITTED[place.element_bytes]}
        for place, times in sweep.items()
    }


def by_instruction(sweep: Sweep) -> dict[str, float]:
    """Return the best times with each instruction over the best of all, as a geometric mean."""
    found: dict[str, list[float]] = {}
    for times in sweep.values():
        for instruction in {config.instruction for config in times}:
            best = min(time for config, time in times.items() if config.instruction == instruction)
            found.setdefault(str(instruction), []).append(math.log(best / min(times.values())))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in sorted(found.items())}


def predicted(place: Place, configs: Iterable[Sm80Config], costs: Costs) -> dict[Sm80Config, float]:
    """Return the model's times at a place."""
    alignment, problem, size = place
    each = tuple(configs)
    blocks = model_sm80.Blocks.of(each)
    times = model_sm80.times(blocks, [problem], MULTIPROCESSORS, alignment, costs, (size, size))[0].tolist()
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


def against_peer(path: Path, sweep: Sweep) -> dict[Place, float]:
    """Return torch.mm's time over that of the choice that ships for FP64, at each problem of a sweep of it."""
    peers = {Problem(r["m"], r["n"], r["k"]): r["peer_ms"] * 1e3 for r in json.loads(path.read_text())["rows"]}
    found = {}
    for place, times in sweep.items():
        offered = [config for config in space_sm80.UNTUNED_FP64 if config in times]
        model = predicted(place, offered, model_sm80.H100_FP64)
        found[place] = peers[place.problem] / times[min(offered, key=model.__getitem__)]
    return found


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
    every = read(args.sweep)
    sweep = known(every)
    print(f"{len(sweep)} problems, {sum(map(len, sweep.values()))} times")
    if every != sweep:
        print(f"best times with each instruction, over those of all: {by_instruction(every)}")
    double = {place.element_bytes for place in sweep} == {8}
    begin = model_sm80.H100_FP64 if double else model_sm80.H100
    for title, costs in (("before", begin), ("after", fit(sweep, begin, args.rounds))):
        print(f"{title}: error {math.sqrt(loss(sweep, costs)):.3f}")
        for count in (1, 3, 8):
            mean, worst = regret(sweep, costs, count)
            print(f"  best of the first {count}: {mean:.4f} times the best of all, at worst {worst:.3f}")
    print(costs)
    if double:
        ratios = against_peer(args.sweep, sweep)
        few = {p for p in ratios if min(p.problem.m, p.problem.n) < 128 or p.problem.k > 8192}
        for title, places in (("many rows", ratios.keys() - few), ("few rows or columns, or a long K", few)):
            each = [ratios[p] for p in places]
            mean = math.exp(sum(map(math.log, each)) / len(each))
            lost = sum(ratio < 0.98 for ratio in each)
            said = f"{len(each)} problems, {mean:.3f}, worst {min(each):.3f}, {lost} below 0.98"
            print(f"of torch.mm's speed, {title}: {said}")


if __name__ == "__main__":
    main()
