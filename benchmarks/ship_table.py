"""Makes the shipped table from the tables of tune_tables.py, oldest first.

    python benchmarks/ship_table.py TABLE... cutlass_ops/tuned --pool pool.json
    python benchmarks/ship_table.py SILU... cutlass_ops/tuned --pool pool.json --like RELU...

- At each shape, each kernel (of the pool, if given) keeps its best tile order.
- Shapes at which all kernels lost clearly to a peer are dropped, since the right kernel did not race there.
- --like: kernels that did not race at a shape count with their distance in tables of another epilogue or element type.
- The grid's shapes keep the measurements of only sixteen kernels, which then serve them. `evaluate_dispatch.py` prints
  the loss. All kernels may serve other shapes. With --whole, all may serve the grid as well.
- Kernels that a given table lists stay, since a table shipped before no longer has all races.
- A kernel without any time in the folder is dropped if the same kernel with another K extent has one. The model cannot
  distinguish them, and alone it chose kernels that take 1.4 times as long.
- If there are more kernels than a table may list, those that help most stay.
- --exchange: another kernel serves the grid, if `bench_gemm.py` at the power limit or other epilogues distinguish two
  kernels that short races do not.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import reduce
from pathlib import Path

import shapes

from cutlass_ops.choose import tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import Config, config_from_json
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.sm90.config import Sm90Config

# Number of kernels for the grid.
FEW = 16
# Shapes at which a peer's time over the winner's is below this are dropped.
WORTH = 0.85


def best_orders(point: Point, pool: Collection[Config]) -> Point:
    """Return a point with only a pool's kernels, each in its best tile order."""
    best: dict[Config, Measured] = {}
    for measured in point.measured:
        if not pool or measured.config in pool:
            best.setdefault(measured.config, measured)
    if not best:
        return replace(point, measured=())
    unit = next(iter(best.values()))
    scale = point.measured[0].microseconds
    return replace(
        point,
        measured=tuple(
            replace(m, microseconds=scale * (1 + m.behind), behind=(1 + m.behind) / (1 + unit.behind) - 1)
            for m in best.values()
        ),
    )


def completed(table: Table, other: Table) -> Table:
    """Return a table completed by another signature's table at the same problems."""
    points = ((point, other.at(point.problem)) for point in table.points)
    return replace(table, points=tuple(mine.joined(its) if its else mine for mine, its in points))


def _by_use(points: Iterable[Point]) -> list[Config]:
    """Return all kernels, that which was measured most often first."""
    uses = Counter(m.config for p in points for m in p.measured)
    return [config for config, _ in uses.most_common()]


def timed(folder: Path, like: Table) -> set[Config]:
    """Return the kernels with times in a folder's tables, for a table's device, majors and width of elements."""

    def of(table: Table) -> tuple[object, ...]:
        return table.device, table.signature.majors, table.signature.a.dtype.bits

    alike = (table for table in map(tables.load, folder.glob("*.json")) if of(table) == of(like))
    return {m.config for table in alike for p in table.points for m in p.measured}


def untold(config: Config, known: Collection[Config]) -> bool:
    """Whether a kernel has no time, but differs from a known kernel only in its tile's K."""
    if config in known or not isinstance(config, Sm90Config):
        return False
    tile = config.threadblock
    return any(replace(config, threadblock=replace(tile, k=k)) in known for k in (32, 64, 128, 256))


def exchanged(kernels: Iterable[Config], known: Iterable[Config], pairs: Iterable[str]) -> tuple[Config, ...]:
    """Return kernels with some of them exchanged for other known ones, given as "name=name".

    Raises
    ------
    SystemExit
        If a kernel to exchange is missing, or its replacement has no time.
    """
    mine, named = {c.slug: c for c in kernels}, {c.slug: c for c in known}
    instead = dict(pair.split("=") for pair in pairs)
    if missing := [*(instead.keys() - mine.keys()), *(set(instead.values()) - named.keys())]:
        raise SystemExit(f"--exchange: {', '.join(missing)} is none of the grid's kernels, or has no time")
    return tuple(dict.fromkeys(named[instead[name]] if name in instead else c for name, c in mine.items()))


def ratio(point: Point) -> float:
    """Return the best peer's time over the winner's."""
    return min(time for _, time in point.peers) / point.measured[0].microseconds


def main() -> None:
    """Choose, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, nargs="+")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pool", type=Path, help="the kernels to choose among, from choose_pool.py")
    parser.add_argument("--like", type=Path, nargs="+", default=[], help="another signature's tables, oldest first")
    parser.add_argument("--exchange", nargs="+", default=[], metavar="NAME=NAME", help="exchange kernels of the grid")
    parser.add_argument("--whole", action="store_true", help="keep all measurements of the grid")
    args = parser.parse_args()
    given = [tables.load(path) for path in args.tables]
    table = reduce(Table.merged, given)
    if args.like:
        table = completed(table, reduce(Table.merged, map(tables.load, args.like)))
    pool = set(map(config_from_json, json.loads(args.pool.read_text()))) if args.pool else set()
    points = tuple(best_orders(p, pool) for p in table.points)
    points = tuple(p for p in points if p.measured and ratio(p) >= WORTH)
    everything = {m.config for p in points for m in p.measured}
    grid = set() if args.whole else {Problem(*shape) for shape in shapes.GRID}
    chosen = replace(table, points=points).select(first=grid, few=FEW, most=len(everything))
    known = everything | timed(args.folder, table)
    listed = [c for each in given for c in each.kernels if not untold(c, known) and (not pool or c in pool)]
    few = exchanged(chosen.kernels[: FEW if grid else 0], everything, args.exchange)
    ordered = tuple(dict.fromkeys([*few, *chosen.kernels, *_by_use(points), *listed]))
    chosen = replace(chosen, kernels=ordered[: tables.MOST_KERNELS])
    before = chosen.points
    points = tuple(best_orders(p, set(few) if p.problem in grid else set(chosen.kernels)) for p in before)
    chosen = replace(chosen, points=tuple(p for p in points if p.measured))
    path = tables.path_of(args.folder, table.device, table.signature)
    path.unlink(missing_ok=True)
    known = timed(args.folder, table) | {m.config for p in chosen.points for m in p.measured}
    chosen = replace(chosen, kernels=tuple(c for c in chosen.kernels if not untold(c, known)))
    path.write_text(json.dumps(chosen.to_json()) + "\n")
    lost = [min(m.behind for m in p.measured if m.config in few) for p in before if p.problem in grid]
    print(f"{path}: {len(chosen.points)} shapes, {len(chosen.kernels)} kernels")
    if lost:
        mean, worst = sum(lost) / len(lost), max(lost)
        print(f"{len(few)} kernels lose {mean:.2%} on average and {worst:.1%} at worst at the grid")


if __name__ == "__main__":
    main()
