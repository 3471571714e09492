"""Measurements as points and as arrays: both say the same, and a choice makes no points of tables that ship."""

from dataclasses import replace

import pytest
from signatures import H100, H200, signature

from cutlass_ops.base import resources
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.points import Columns, Measured, Point, Recorded, columns_of
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.config import ClusterShape, GemvConfig, Sm90Config, ThreadblockShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import composed

pytestmark = pytest.mark.usefixtures("session")

WIDE, NARROW = (Sm90Config(ThreadblockShape(128, n, 64), ClusterShape(2, 1)) for n in (192, 128))
TURNED = TileOrder("along_n", 2)
FIRST = Point(Problem(1, 64, 64), "2026-11-20", (Measured(GemvConfig(1), 2.0, 0.0),), (("eager", 9.0),))
SECOND = Point(
    Problem(64, 64, 64),
    "2026-11-21",
    (Measured(WIDE, 10.0, 0.0, TURNED), Measured(NARROW, 12.5, 0.3), Measured(WIDE, 13.0, 0.25)),
)
PATHS = sorted(resources.tuned().glob("*.json"))


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
    assert hash(again) == hash((FIRST, SECOND))
    assert repr(again) == repr((FIRST, SECOND))
    assert Table(H100.name, 132, signature(), again) == Table(H100.name, 132, signature(), (FIRST, SECOND))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_arrays_of_a_table_that_ships_are_those_of_its_points(path):
    table = tables.load_ours(path)
    own, read = table.columns, Columns.of(table.points)
    for name in ("problems", "points", "microseconds", "behind", "raced"):
        assert (getattr(own, name) == getattr(read, name)).all()
    assert own.sessions == read.sessions
    for places, values in (("kernels", "configs"), ("places", "orders")):
        mine, theirs = ([getattr(x, values)[at] for at in getattr(x, places)] for x in (own, read))
        assert mine == theirs


def test_a_part_has_the_points_of_its_measurements():
    columns = columns_of((FIRST, SECOND))
    part = columns.part(columns.behind > 0.2)
    assert part.problems.tolist() == [list(SECOND.problem)]
    assert part.sessions == ((SECOND.date, ()),)
    assert part.starts.tolist() == [0, 2]
    assert Recorded(part, [()])[0].measured == SECOND.measured[1:]


def test_a_choice_makes_no_points_of_tables_that_ship(monkeypatch):
    monkeypatch.setattr(Recorded, "_all", property(lambda _: pytest.fail("points were made")))
    policies.forget(shipped=True)
    for of, device in ((signature(), H100), (signature(composed.rms_norm), H200)):
        policy = policies.policy(of, device)
        assert policy.tables
        assert policy.serves(Problem(100, 5000, 3000))


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


def test_a_declaration_of_another_configuration_is_that_which_is_written_out():
    of = signature()
    spec = of.spec(WIDE)
    assert hash(spec) != hash(spec.with_config(NARROW))
    assert spec.with_config(NARROW) == of.spec(NARROW)
    assert spec.with_config(NARROW).canonical() == of.spec(NARROW).canonical()
    assert (spec.with_config(GemvConfig(1)).target, spec.target) == ("sm_80", "sm_90a")
    assert spec.with_config(WIDE, order=TURNED).order == TURNED
    with pytest.raises(TypeError, match="config must be"):
        spec.with_config("large")
