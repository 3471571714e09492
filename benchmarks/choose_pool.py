"""Chooses a few kernels that serve any problem nearly as well as the whole space, from tables.

    python benchmarks/choose_pool.py cutlass_ops/tuned/TABLE.json pool.json --count 96 --first 16

Times are measured, else the cost model's, corrected by nearby measurements. Other tables, such as another device's,
fill gaps of the first. The first table's first kernels are always chosen; the others follow in the order in which they
help, over the tuned shapes and many more. `tune_tables.py --pool` then measures them. With fewer kernels than won
before, a problem may lose its winner.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import shapes

from cutlass_ops.choose import policies, space, tables
from cutlass_ops.declare.config import config_to_json
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90.model import Floats

# The model's error: kernels within it of the best count as well.
NEARLY = 0.05


def choose(losses: Floats, first: int, count: int) -> list[int]:
    """Return the kernels that together lose least, each the one that helps most beside those before it.

    Parameters
    ----------
    losses : array
        (problems, kernels): logarithms of times over the fastest's.
    first : int
        Number of first kernels that are always chosen, in their order.
    count : int
        Most kernels to choose in all.
    """
    nearly = np.maximum(NEARLY - losses, 0).sum(0)
    chosen = list(range(min(first, count)))
    while len(chosen) < min(count, losses.shape[1]):
        gains = np.maximum(reached(losses, chosen)[:, None] - losses, 0).sum(0) + NEARLY * nearly
        gains[chosen] = -1
        chosen.append(int(gains.argmax()))
    return chosen


def reached(losses: Floats, chosen: list[int]) -> Floats:
    """Return the loss at each problem with only some kernels; with none, half of the speed."""
    return losses[:, chosen].min(1, initial=math.log(2.0))


def main() -> None:
    """Choose, and print the loss against the whole space."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("pool", type=Path)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--first", type=int, help="first kernels of the first table to always choose; default: all")
    parser.add_argument("--drawn", type=int, default=700)
    args = parser.parse_args()
    given = [tables.load(path) for path in args.tables]
    table = given[0]
    device = Device((9, 0), table.multiprocessors, table.device)
    listed = [c for each in given for c in each.kernels]
    policy = policies.Policy.of(
        given, table.signature, device, [*listed, *space.usual(table.signature, device).configs]
    )
    problems = [Problem(*s) for s in (*shapes.TUNING, *shapes.drawn(seed=3, count=args.drawn))]
    times = policy.expected(problems).times
    losses = np.log(times / times.min(1, keepdims=True))
    first = len(table.kernels) if args.first is None else args.first
    chosen = choose(losses, first, args.count)
    for count in sorted({*range(16, len(chosen) + 1, 16), min(first, len(chosen)), len(chosen)}):
        lost = reached(losses, chosen[:count])
        print(f"{count} kernels: {lost.mean():.2%} on average, {np.quantile(lost, 0.95):.1%} in the worst 5%")
    args.pool.write_text(json.dumps([config_to_json(policy.kernels[at]) for at in chosen]) + "\n")


if __name__ == "__main__":
    main()
