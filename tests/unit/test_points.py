"""Measurements as points and as arrays: both say the same, and a choice makes no points of tables that ship."""

from dataclasses import replace

import pytest
from signatures import H100, signature

from cutlass_ops.choose import policies
from cutlass_ops.choose.tables import Columns, Measured, Point, Recorded, Table
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.sm90.config import Sm90Config

pytestmark = pytest.mark.usefixtures("session")

WIDE, NARROW = (Sm90Config(ThreadblockShape(128, n, 64), ClusterShape(2, 1)) for n in (192, 128))
TURNED = TileOrder("along_n", 2)
FIRST = Point(Problem(1, 64, 64), "2026-11-20", (Measured(GemvConfig(1), 2.0, 0.0),), (("eager", 9.0),))
SECOND = Point(
    Problem(64, 64, 64),
    "2026-11-21",
    (Measured(WIDE, 10.0, 0.0, TURNED), Measured(NARROW, 12.5, 0.3), Measured(WIDE, 13.0, 0.25)),
)


def recorded(*points):
    return Recorded(Columns.of(points), [point.peers for point in points])


def test_points_and_arrays_say_the_same():
    again = recorded(FIRST, SECOND)
    assert (len(again), again[0], again[1], again[:1]) == (2, FIRST, SECOND, (FIRST,))
    assert list(again) == [FIRST, SECOND]
    assert again == (FIRST, SECOND) == again
    assert again != (FIRST,)
    groups = replace(FIRST, spreads=("even",))
    assert recorded(groups) == (groups,) != (FIRST,)
    assert Table(H100.name, 132, signature(), again) == Table(H100.name, 132, signature(), (FIRST, SECOND))


def test_the_best_order_of_a_kernel_counts_and_the_first_table_that_has_a_problem():
    other = Point(SECOND.problem, "2026-11-21", (Measured(NARROW, 1.0, 0.0),))
    found = [Table(H100.name, 132, signature(), points) for points in ((FIRST, SECOND), (other,))]
    known = policies.Policy.of(found, signature(), H100, (WIDE, NARROW)).knowledge.measured
    assert list(known) == [FIRST.problem, SECOND.problem]
    assert len(known) == 2
    # GEMV kernels are not among these, but that table has the problem.
    assert known[FIRST.problem] == {}
    times = {c.config: (c.microseconds, c.order) for c in known[SECOND.problem].values()}
    assert times == {WIDE: (10.0, TURNED), NARROW: (10.0 * (1 + 0.3), TileOrder())}
    places, microseconds = known.times(SECOND.problem)
    assert (places.tolist(), microseconds.tolist()) == ([0, 1], [10.0, 13.0])
    with pytest.raises(KeyError):
        known[Problem(2, 64, 64)]
    assert Problem(2, 64, 64) not in known
