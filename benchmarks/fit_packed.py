"""Fits the time models of a packed weight's kernels to a sweep, and prints how well they rank them.

    python benchmarks/fit_packed.py benchmarks/results/sweep_packed_h200.json

``bench_packed.py --sweep`` writes such a file. Prints the fitted :class:`cutlass_ops.kinds.packed.model.Numbers` and
:class:`cutlass_ops.kinds.sm90.model.Converting`, to be copied there by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cutlass_ops.declare.config import Config
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.packed import model
from cutlass_ops.kinds.packed.kind import candidates
from cutlass_ops.kinds.sm90 import model as of_sm90
from cutlass_ops.kinds.sm90.packed import untuned

# Times far from the best of their problem matter little for a choice.
RELEVANT = 0.1
# What a wrong choice counts, relative to the mean error of predictions.
OF_CHOICE = 0.5
SLACK = 0.025  # a weight keeps no further kernel for less (choose/policies.py)
MULTIPROCESSORS, BYTES_OF_B = 132, 0.5
# What is known, or has no effect of its own that a few rows show.
KNOWN = ("bandwidth", "start", "warps")


class Raced(NamedTuple):
    """The kernels of one kind at a problem, and their microseconds."""

    problem: Problem
    configs: tuple[Any, ...]
    microseconds: tuple[float, ...]


def read(path: Path, pool: Iterable[Config]) -> list[Raced]:
    """Return the times of a pool's kernels in a sweep, each with the best order of tiles."""
    by_slug, found = {config.slug: config for config in pool}, []
    for row in json.loads(path.read_text())["rows"]:
        best: dict[Config, float] = {}
        for slug, microseconds, order in row["kernels"]:
            if (config := by_slug.get(slug)) is not None and "gpc" not in order:
                best[config] = min(microseconds, best.get(config, math.inf))
        if len(best) > 2:
            found.append(Raced(Problem(row["m"], row["n"], row["k"]), tuple(best), tuple(best.values())))
    return found


def of_rows(raced: Raced, numbers: model.Numbers) -> list[float]:
    """Return the times that the model for few rows predicts."""
    widths = 2, BYTES_OF_B, 2
    found = model.times(model.Lines.of(raced.configs), [raced.problem], MULTIPROCESSORS, widths, numbers)
    return list(found[0].tolist())


def of_tiles(raced: Raced, numbers: of_sm90.Converting) -> list[float]:
    """Return the times that the model of Sm90 kernels predicts."""
    batch, problems, chip = of_sm90.Batch.of(raced.configs), [raced.problem], of_sm90.H200
    cover = of_sm90.grid(batch, problems, chip)
    adding = of_sm90.converting(batch, cover, chip, numbers)
    found = of_sm90.times(batch, problems, chip, cover=cover, narrow=BYTES_OF_B / 2, adding=adding)
    return list(found[0].tolist())


def regret(raced: Raced, expected: list[float], slack: float = 0.0) -> float:
    """Return by how much what may be chosen is slower than the best: the kernels within a slack of the least time."""
    chosen = (
        us for us, foretold in zip(raced.microseconds, expected, strict=True) if foretold <= (1 + slack) * min(expected)
    )
    return max(chosen) / min(raced.microseconds) - 1


def loss(measured: list[Raced], predicted: Callable[[Raced], list[float]]) -> float:
    """Return the mean absolute logarithm of predicted over measured near the best, and what wrong choices count."""
    total = weights = chosen = 0.0
    for raced in measured:
        expected, best = predicted(raced), min(raced.microseconds)
        chosen += regret(raced, expected, SLACK)
        for foretold, time in zip(expected, raced.microseconds, strict=True):
            weight = math.exp(-math.log(time / best) / RELEVANT)
            total, weights = total + weight * abs(math.log(foretold / time)), weights + weight
    return total / weights + OF_CHOICE * chosen


def fit(measured: list[Raced], numbers: Any, predicted: Callable[[Raced, Any], list[float]], rounds: int) -> Any:
    """Improve the numbers by random steps along one or two of them."""
    names = [name for name in numbers._fields if name not in KNOWN]
    rng, width = random.Random(1), 0.2
    best = loss(measured, lambda raced: predicted(raced, numbers))
    for _ in range(rounds):
        moved: Mapping[str, float] = {
            name: getattr(numbers, name) * math.exp(rng.gauss(0, width))
            for name in rng.sample(names, rng.choice((1, 2)))
        }
        tried = numbers._replace(**moved)
        value = loss(measured, lambda raced, tried=tried: predicted(raced, tried))  # type: ignore[misc]
        if value < best:
            numbers, best = tried, value
        else:
            width = max(0.02, width * 0.997)
    return numbers


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--rounds", type=int, default=2000)
    args = parser.parse_args()
    models: Any = ((candidates(), model.H200, of_rows), (untuned(), of_sm90.CONVERTING, of_tiles))
    for pool, before, predicted in models:
        measured = read(args.sweep, pool)
        fitted = fit(measured, before, predicted, args.rounds)
        for name, numbers in (("before", before), ("fitted", fitted)):
            off = [f"{regret(raced, predicted(raced, numbers), SLACK):.3f}" for raced in measured]
            print(f"{name}: chosen over best, less 1: {', '.join(off)}")
        print(*(f"    {name}: float = {value:.3g}" for name, value in fitted._asdict().items()), sep="\n")


if __name__ == "__main__":
    main()
