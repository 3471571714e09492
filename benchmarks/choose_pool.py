"""Chooses the few kernels that serve any problem nearly as well as the whole space would, by the cost model.

    python benchmarks/choose_pool.py cutlass_ops/tuned/TABLE.json pool.json --count 96

The table's own kernels come first; the others follow in the order in which they help, over the shapes that are tuned
and many more. What they are worth is for `tune_tables.py --pool` to measure.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import shapes
import torch

from cutlass_ops import space, tables
from cutlass_ops.config import config_to_json
from cutlass_ops.heuristics import Device, Pool

# A kernel that is nearly as fast as the best counts as well, as the model errs by so much.
NEARLY = 0.05


def main() -> None:
    """Choose, and say what is lost against the whole space."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("pool", type=Path)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--drawn", type=int, default=700)
    args = parser.parse_args()
    table = tables.load(args.table)
    device = Device((9, 0), table.multiprocessors, table.device)
    configs = tuple(dict.fromkeys([*table.kernels, *space.usual(table.signature).configs]))
    problems = [*shapes.TUNING, *shapes.drawn(seed=3, count=args.drawn)]
    times = Pool(configs).times(problems, device)
    losses = (times / times.min(1, keepdim=True).values).log()
    nearly = (NEARLY - losses).clamp(min=0).sum(0)
    chosen: list[int] = []
    reached = torch.full((len(problems),), math.log(2.0), dtype=torch.float64)
    for place in range(args.count):
        gains = (reached[:, None] - losses).clamp(min=0).sum(0) + NEARLY * nearly
        gains[chosen] = -1
        chosen.append(place if place < len(table.kernels) else int(gains.argmax()))
        reached = torch.minimum(reached, losses[:, chosen[-1]])
        if len(chosen) % 16 == 0 or len(chosen) == len(table.kernels):
            print(
                f"{len(chosen)} kernels: {reached.mean():.2%} on average, {reached.quantile(0.95):.1%} in the worst 5%"
            )
    args.pool.write_text(json.dumps([config_to_json(configs[at]) for at in chosen]) + "\n")


if __name__ == "__main__":
    main()
