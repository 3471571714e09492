"""Evaluates how much dispatch loses to the best measured kernel, at shapes of its table and at others.

    python benchmarks/evaluate_dispatch.py cutlass_ops/tuned/*.json

Needs no GPU: the table's own measurements are the truth. A kernel that was not measured at a shape counts as twice as
slow and is not chosen there. The output says at how many shapes such a kernel would have been chosen.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import shapes

from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Point, Table
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem


def chosen(found: Iterable[tuple[float, bool]]) -> str:
    """Return the summary of losses, and how often the choice had raced."""
    losses, raced = zip(*found, strict=True)
    return f"{summary(losses)}; the first of all kernels had raced at {sum(raced)}"


def summary(losses: Iterable[float]) -> str:
    """Return the geometric mean, the worst and the number of losses."""
    each = list(losses)
    mean = math.prod(1 + x for x in each) ** (1 / len(each)) - 1
    return f"{mean:.2%} on average, {max(each):.1%} at worst, {len(each)} shapes"


def loss(point: Point, kernels: Iterable[Config]) -> float:
    """Return the loss of the best of some kernels; 1 if none of them was measured."""
    kept = set(kernels)
    return min((m.behind for m in point.measured if m.config in kept), default=1.0)


def left_out(table: Table, device: Device, group: Callable[[Problem], object]) -> Iterable[tuple[float, bool]]:
    """Decide the problems of each group by the measurements of the other groups.

    Yield the loss of the choice among kernels that raced there, and whether the choice among all kernels raced too. If
    not, its loss is unknown; if that is frequent, the model is too optimistic about kernels that did not race.
    """
    for name in dict.fromkeys(group(p.problem) for p in table.points):
        others = tuple(p for p in table.points if group(p.problem) != name)
        policy = policies.Policy.of([replace(table, points=others)], table.signature, device, table.kernels)
        for point in table.points:
            known = {m.config for m in point.measured} & set(policy.kernels)
            if group(point.problem) == name and known:
                best = policy.ranked(point.problem)
                raced = next(c.config for c in best if c.config in known)
                yield loss(point, [raced]), best[0].config == raced


def keeping(table: Table, device: Device, weights: Iterable[tuple[int, int]]) -> tuple[list[int], list[float]]:
    """Return how many kernels weights keep, and the predicted loss by that at other numbers of rows."""
    policy = policies.Policy.of([table], table.signature, device, table.kernels)
    rows = sorted({m for m, _, _ in shapes.drawn(seed=5, count=400)})
    counts, losses = [], []
    for n, k in weights:
        kept = policies.kept(policy, n, k, 1)
        times = policy.expected([Problem(m, n, k) for m in rows]).decisive()
        few = times[:, [policy.kernels.index(c) for c in kept]]
        counts.append(len(kept))
        losses += (few.min(1) / times.min(1) - 1).tolist()
    return counts, losses


def main() -> None:
    """Print the losses of each table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+", type=Path)
    for path in parser.parse_args().tables:
        table = tables.load(path)
        device = Device((9, 0), table.multiprocessors, table.device)
        grid = [p for p in table.points if p.problem.extents in set(shapes.GRID)]
        print(f"{table.device}, {len(table.points)} shapes, {len(table.kernels)} kernels")
        print(f"  best of all at the grid: {summary(loss(p, table.kernels) for p in grid)}")
        print(f"  best of all: {summary(loss(p, table.kernels) for p in table.points)}")
        print(f"  chosen, weights left out: {chosen(left_out(table, device, lambda p: (p.n, p.k)))}")
        print(f"  chosen, every other shape left out: {chosen(left_out(table, device, _parity(table)))}")
        counts, losses = keeping(table, device, sorted({p[1:] for p in shapes.UNSEEN}))
        print(f"  a weight keeps {min(counts)} to {max(counts)} kernels, which loses by prediction: {summary(losses)}")


def _parity(table: Table) -> Callable[[Problem], object]:
    places = {p.problem: at % 2 for at, p in enumerate(table.points)}
    return places.__getitem__


if __name__ == "__main__":
    main()
