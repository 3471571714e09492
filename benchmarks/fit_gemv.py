"""Fits the cost model of GEMV kernels to tuning tables, and prints how well it ranks them.

    python benchmarks/fit_gemv.py cutlass_ops/tuned/nvidia-h100*.json

Prints the fitted :class:`cutlass_ops.kinds.gemv.model.Numbers`, to be copied there by hand.
Tables of norms, second products and reductions are ignored, since these take extra time.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from cutlass_ops.choose import tables
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.gemv import model as model_gemv
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.gemv.model import H100, Numbers

# {problem: {kernel: microseconds}}, with the problems of each table kept apart.
Measured = dict[tuple[int, Problem], dict[GemvConfig, float]]

# Times far from the best of their problem matter little for a choice.
RELEVANT = 0.1


def read(found: Iterable[Table]) -> Measured:
    """Return the measurements of GEMV kernels at problems with several of them."""
    times: Measured = defaultdict(dict)
    for number, table in enumerate(found):
        epilogue = table.signature.epilogue
        if epilogue.products or epilogue.gathered or any(o.reduce for o in epilogue.outputs):
            continue
        for point in table.points:
            for one in point.measured:
                if isinstance(one.config, GemvConfig):
                    time = point.measured[0].microseconds * (1 + one.behind)
                    times[number, point.problem][one.config] = time
    return {problem: each for problem, each in times.items() if len(each) > 1}


def predicted(problem: Problem, kernels: Iterable[GemvConfig], numbers: Numbers, multiprocessors: int) -> list[float]:
    """Return the model's times."""
    found: list[float] = model_gemv.times(model_gemv.Blocks.of(tuple(kernels)), [problem], multiprocessors, of=numbers)[
        0
    ].tolist()
    return found


def loss(measured: Measured, numbers: Numbers, multiprocessors: int) -> float:
    """Return the mean absolute logarithm of predicted over measured, near each problem's best."""
    total = weights = 0.0
    for (_, problem), times in measured.items():
        best = min(times.values())
        for expected, time in zip(predicted(problem, times, numbers, multiprocessors), times.values(), strict=True):
            weight = math.exp(-math.log(time / best) / RELEVANT)
            total, weights = total + weight * abs(math.log(expected / time)), weights + weight
    return total / weights


def regret(measured: Measured, numbers: Numbers, multiprocessors: int, count: int) -> float:
    """Return the time of the best of the model's first `count` over the best of all: the geometric mean."""
    logarithms = []
    for (_, problem), times in measured.items():
        expected = predicted(problem, times, numbers, multiprocessors)
        first = sorted(zip(expected, times.values(), strict=True))[:count]
        logarithms.append(math.log(min(time for _, time in first) / min(times.values())))
    return math.exp(sum(logarithms) / len(logarithms))


def fit(measured: Measured, numbers: Numbers, multiprocessors: int, rounds: int) -> Numbers:
    """Improve the numbers by random steps along one or two of them."""
    rng, best, width = random.Random(0), loss(measured, numbers, multiprocessors), 0.2
    for _ in range(rounds):
        moved: Mapping[str, float] = {
            name: getattr(numbers, name) * math.exp(rng.gauss(0, width))
            for name in rng.sample(Numbers._fields, rng.choice((1, 2)))
        }
        tried = numbers._replace(**moved)
        value = loss(measured, tried, multiprocessors)
        if value < best:
            numbers, best = tried, value
        else:
            width = max(0.02, width * 0.997)
    return numbers


def main() -> None:
    """Fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--multiprocessors", type=int, default=132)
    args = parser.parse_args()
    measured = read(map(tables.load, args.tables))
    fitted = fit(measured, H100, args.multiprocessors, args.rounds)
    print(f"{len(measured)} problems, {sum(map(len, measured.values()))} times")
    for name, numbers in (("before", H100), ("fitted", fitted)):
        ranks = ", ".join(f"{regret(measured, numbers, args.multiprocessors, c):.4f}" for c in (1, 4))
        off = loss(measured, numbers, args.multiprocessors)
        print(f"{name}: off by {off:.3f}; the first one and the best of four over the fastest: {ranks}")
    print(*(f"    {name}: float = {value:.3g}" for name, value in fitted._asdict().items()), sep="\n")


if __name__ == "__main__":
    main()
