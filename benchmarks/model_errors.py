"""Prints how far the cost model of Sm90 kernels is off at the measurements of tuning tables, tile by tile.

    python benchmarks/model_errors.py cutlass_ops/tuned/nvidia-h200_d5cf068e1200e506.json
    python benchmarks/model_errors.py --rows 1024 cutlass_ops/tuned/nvidia-h200*.json

Needs no GPU. For each tile: the geometric mean of measured over predicted time, its standard deviation, and the clocks
that each step of the main loop takes longer than predicted. What a kind of tile has in common is missing in the model.
"""

from __future__ import annotations

import argparse
import collections
import json
from pathlib import Path

import numpy as np

from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.kinds.arrays import Extents
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.sm90.timer import Sm90Timer
from cutlass_ops.kinds.traits import Traits


def errors(table: Table, rows: int) -> dict[str, list[tuple[float, float]]]:
    """Return the ratio and the clocks of each measurement at problems with at least so many rows, by the tile."""
    device, found = gpu_named(table.device), collections.defaultdict[str, list[tuple[float, float]]](list)
    chip = model.costs_of(device)
    for point in table.points:
        measured = [m for m in point.measured if isinstance(m.config, Sm90Config)]
        if point.problem.m < rows or not measured:
            continue
        timer = Sm90Timer.of(
            [m.config for m in measured if isinstance(m.config, Sm90Config)], Traits.of(table.signature)
        )
        predicted, _ = timer.times([point.problem], device)
        cover = model.grid(timer.batch, Extents.of([point.problem]), chip)
        steps = np.broadcast_to(cover.waves * cover.steps, predicted.shape)
        for m, us, count in zip(measured, predicted[0].tolist(), steps[0].tolist(), strict=True):
            clocks = (m.microseconds - us) * chip.clock * 1e3 / count
            found[m.config.slug].append((m.microseconds / us, clocks))
    return found


def main() -> None:
    """Print the errors of tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    parser.add_argument("--rows", type=int, default=1, help="least number of rows of a problem")
    args = parser.parse_args()
    for path in args.tables:
        found = errors(Table.from_json(json.loads(path.read_text())), args.rows)
        print(path.name)
        for slug, each in sorted(found.items(), key=lambda item: np.log([r for r, _ in item[1]]).mean()):
            logs = np.log([ratio for ratio, _ in each])
            clocks = np.median([c for _, c in each])
            print(f"  {slug:48} {np.exp(logs.mean()):.3f} ±{logs.std():.3f} {clocks:7.1f} clocks, {len(each)} measured")


if __name__ == "__main__":
    main()
