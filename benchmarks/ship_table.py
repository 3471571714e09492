"""Makes the table that ships with the library out of one that tune_tables.py filled.

    python benchmarks/ship_table.py TABLE cutlass_ops/tuned

At each shape the best order of tiles of each kernel stays; a shape at which all kernels lost clearly to a peer goes, as
the right one did not race there. Kernels are chosen so that the grid's shapes are served by at most sixteen
(`evaluate_dispatch.py` says what that loses).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import shapes

from cutlass_ops import tables
from cutlass_ops.tables import Measured, Point

# How many kernels are chosen for the grid, and how many there are in all.
FEW, MOST = 14, 38
# A peer's time over the winner's, below which a shape says nothing.
WORTH = 0.85


def best_orders(point: Point) -> Point:
    """Return a point without the orders of tiles that were not a kernel's best."""
    best: dict[object, Measured] = {}
    for measured in point.measured:
        best.setdefault(measured.config.binary(), measured)
    return replace(point, measured=tuple(best.values()))


def ratio(point: Point) -> float:
    """Return the best peer's time over the winner's."""
    return min(time for _, time in point.peers) / point.measured[0].microseconds


def main() -> None:
    """Choose, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    table = tables.load(args.table)
    points = tuple(best_orders(p) for p in table.points if ratio(p) >= WORTH)
    chosen = replace(table, points=points).select(first=shapes.GRID, few=FEW, most=MOST)
    path = tables.path_of(args.folder, table.device, table.signature)
    path.write_text(json.dumps(chosen.to_json()) + "\n")
    print(f"{path}: {len(chosen.points)} shapes, {len(chosen.kernels)} kernels")


if __name__ == "__main__":
    main()
