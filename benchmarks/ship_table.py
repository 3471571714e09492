"""Makes the table that ships with the library out of those that tune_tables.py filled, the oldest first.

    python benchmarks/ship_table.py TABLE... cutlass_ops/tuned --pool pool.json
    python benchmarks/ship_table.py SILU... cutlass_ops/tuned --pool pool.json --like RELU...

At each shape the best order of tiles of each kernel stays, of the kernels of a pool if one is given; a shape at which
all kernels lost clearly to a peer goes, as the right one did not race there. Kernels that did not race at a shape may
have done so with another epilogue or element type: the tables given by --like say how far behind they were there of one
that did, and so far behind they count. The grid's shapes have the measurements of
sixteen kernels only, which therefore serve them (`evaluate_dispatch.py` says what that loses). All kernels are for
other shapes, where one may win that never did where it was measured. What a given table lists stays, as a table that
was shipped before no longer says of all its kernels where they raced. But a kernel goes that no table of the folder has
a time of, if one of them has a time of the same kernel with another K extent, which the model cannot tell from it: its
word alone had kernels chosen that take 1.4 times as long. Of more than a table may list, those stay that help most.
Races are short: where `bench_gemm.py`, with the chip at its limit of power, or other epilogues tell two kernels apart
that races do not, --exchange has the one serve the grid that was not chosen.
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
from cutlass_ops.declare.config import Config, Sm90Config, config_from_json
from cutlass_ops.declare.problem import Problem

# How many kernels are chosen for the grid.
FEW = 16
# A peer's time over the winner's, below which a shape says nothing.
WORTH = 0.85


def best_orders(point: Point, pool: Collection[Config]) -> Point:
    """Return a point with a pool's kernels only, each in its best order of tiles."""
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
    """Return a table with what another signature's knows besides at the same problems."""
    points = ((point, other.at(point.problem)) for point in table.points)
    return replace(table, points=tuple(mine.joined(its) if its else mine for mine, its in points))


def _by_use(points: Iterable[Point]) -> list[Config]:
    """Return all kernels, that which was measured most often first."""
    uses = Counter(m.config for p in points for m in p.measured)
    return [config for config, _ in uses.most_common()]


def timed(folder: Path, like: Table) -> set[Config]:
    """Return the kernels that a folder's tables have times of, for a table's device and majors."""
    there = (table for table in map(tables.load, folder.glob("*.json")) if table.device == like.device)
    alike = (table for table in there if table.signature.majors == like.signature.majors)
    return {m.config for table in alike for p in table.points for m in p.measured}


def untold(config: Config, known: Collection[Config]) -> bool:
    """Whether nothing tells how fast a kernel is beside a known one, from which it differs in its tile's K alone."""
    if config in known or not isinstance(config, Sm90Config):
        return False
    tile = config.threadblock
    return any(replace(config, threadblock=replace(tile, k=k)) in known for k in (32, 64, 128, 256))


def exchanged(kernels: Iterable[Config], known: Iterable[Config], pairs: Iterable[str]) -> tuple[Config, ...]:
    """Return kernels with some of them exchanged for other known ones, given as "name=name".

    Raises
    ------
    SystemExit
        If one is not there to be exchanged, or what it is exchanged for has no time.
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
    parser.add_argument("--like", type=Path, nargs="+", default=[], help="another signature's tables, the oldest first")
    parser.add_argument("--exchange", nargs="+", default=[], metavar="NAME=NAME", help="of the grid's kernels, these")
    args = parser.parse_args()
    given = [tables.load(path) for path in args.tables]
    table = reduce(Table.merged, given)
    if args.like:
        table = completed(table, reduce(Table.merged, map(tables.load, args.like)))
    pool = set(map(config_from_json, json.loads(args.pool.read_text()))) if args.pool else set()
    points = tuple(best_orders(p, pool) for p in table.points)
    points = tuple(p for p in points if p.measured and ratio(p) >= WORTH)
    everything = {m.config for p in points for m in p.measured}
    grid = {Problem(*shape) for shape in shapes.GRID}
    chosen = replace(table, points=points).select(first=grid, few=FEW, most=len(everything))
    known = everything | timed(args.folder, table)
    listed = [c for each in given for c in each.kernels if not untold(c, known) and (not pool or c in pool)]
    few = exchanged(chosen.kernels[:FEW], everything, args.exchange)
    ordered = tuple(dict.fromkeys([*few, *chosen.kernels, *_by_use(points), *listed]))
    chosen = replace(chosen, kernels=ordered[: tables.MOST_KERNELS])
    before = chosen.points
    points = tuple(best_orders(p, set(few) if p.problem in grid else set(chosen.kernels)) for p in before)
    chosen = replace(chosen, points=tuple(p for p in points if p.measured))
    path = tables.path_of(args.folder, table.device, table.signature)
    path.write_text(json.dumps(chosen.to_json()) + "\n")
    lost = [min(m.behind for m in p.measured if m.config in few) for p in before if p.problem in grid]
    print(f"{path}: {len(chosen.points)} shapes, {len(chosen.kernels)} kernels")
    print(f"{len(few)} kernels lose {sum(lost) / len(lost):.2%} on average and {max(lost):.1%} at worst at the grid")


if __name__ == "__main__":
    main()
