"""Tables of measurements: whole after any number of writers, and believed only where they are legal."""

import contextlib
import copy
import json
import math
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signatures import signature

from cutlass_ops.base.errors import ConfigError, StoreError
from cutlass_ops.choose import tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from tests.strategies import PATIENT
from tests.unit.test_model import sweeps

SMALL = Sm90Config(ThreadblockShape(64, 128, 64), schedule="warp_specialized")
LARGE = Sm90Config(ThreadblockShape(128, 192, 64))
ORDER = TileOrder("along_n", swizzle=2)
OLD = Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32), stages=4)


def point(m, date="2026-11-21", first=SMALL, second=LARGE):
    return Point(
        Problem(m, 4096, 4096),
        date,
        (Measured(first, 10.0, 0.0), Measured(second, 11.0, 0.1, ORDER)),
        (("cublaslt", 10.5),),
    )


def table(*points, **changes):
    return replace(Table("NVIDIA H100 80GB HBM3", 132, signature(), tuple(points)), **changes)


def test_a_table_reads_back_as_it_was_written():
    whole = table(point(512), point(1), point(64, first=OLD))
    text = json.dumps(whole.to_json())
    assert Table.from_json(json.loads(text)) == whole
    assert [p.problem[0] for p in whole.points] == [1, 64, 512]
    assert len(whole.to_json()["configs"]) == 3


def test_the_later_day_wins_where_both_have_a_problem():
    old, new = point(1, "2026-11-20", SMALL, LARGE), point(1, "2026-11-22", LARGE, SMALL)
    for merged in (table(old, point(2)).merged(table(new)), table(new).merged(table(old, point(2)))):
        assert merged == table(new, point(2))
    same_day = point(1, "2026-11-22", SMALL, LARGE)
    assert table(new).merged(table(same_day)).points == (same_day,)


def test_what_only_the_older_measurement_knows_is_restated_by_what_both_know():
    old = Point(
        Problem(1, 64, 64), "2026-11-20", (Measured(SMALL, 10.0, 0.0), Measured(OLD, 12.0, 0.2)), (("eager", 9.0),)
    )
    new = Point(Problem(1, 64, 64), "2026-11-21", (Measured(LARGE, 20.0, 0.0), Measured(SMALL, 25.0, 0.25)))
    (found,) = table(old).merged(table(new)).points
    assert [m.config for m in found.measured] == [LARGE, SMALL, OLD]
    assert found.measured[2].behind == pytest.approx(1.25 * 1.2 - 1)
    assert found.measured[2].microseconds == pytest.approx(20 * 1.25 * 1.2)
    assert (found.date, found.peers) == ("2026-11-21", (("eager", 9.0),))
    # Nothing that both have: nothing can be said about the older one's.
    alone = Point(Problem(1, 64, 64), "2026-11-21", (Measured(LARGE, 20.0, 0.0),))
    assert table(old).merged(table(alone)).points == (alone,)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "NVIDIA H200"}, "device"),
        ({"multiprocessors": 114}, "multiprocessors"),
        ({"signature": signature(builtin.bias_gelu)}, "signature"),
    ],
)
def test_tables_about_different_things_are_not_merged(change, named):
    with pytest.raises(ConfigError, match=f"different {named}"):
        table(point(1)).merged(table(point(2), **change))


def swept():
    """Return the committed sweeps as a table."""
    points = []
    for problem, times in sweeps():
        best = min(times.values())
        measured = tuple(Measured(c, us, us / best - 1) for c, us in sorted(times.items(), key=lambda x: x[1]))
        points.append(Point(problem, "2026-11-21", measured))
    return table(*points)


def losses(whole, kept):
    return [min((m.behind for m in p.measured if m.config in kept), default=1.0) for p in whole.points]


def test_sixteen_kernels_of_a_hundred_lose_almost_nothing():
    whole = swept()
    assert len({m.config for p in whole.points for m in p.measured}) > 90
    kept = whole.select().kernels
    assert 16 < len(kept) <= 32
    found = losses(whole, kept[:16])
    assert math.prod(1 + loss for loss in found) ** (1 / len(found)) < 1.005
    assert max(found) < 0.03
    assert sum(losses(whole, kept)) < sum(found)
    assert sum(losses(whole, whole.select(few=4, most=4).kernels)) > sum(found)


def test_an_illegal_kernel_is_refused():
    illegal = replace(LARGE, threadblock=ThreadblockShape(128, 204, 64))
    with pytest.raises(ConfigError, match=r"configuration sm90_128x.* is illegal"):
        Table.from_json(table(point(1, second=illegal)).to_json())


@pytest.mark.parametrize(
    ("order", "why"),
    [({"swizzle": 3}, "swizzle must be one of"), ({"stages": 3}, "has no 'stages'"), ({"by_gpc": True}, "no order")],
)
def test_an_order_that_there_is_not_is_refused(order, why):
    data = table(point(1)).to_json()
    data["orders"] = [order] * len(data["orders"])
    with pytest.raises(ConfigError, match=why):
        Table.from_json(data)


def add(path, m):
    tables.update(path, table(point(m)))


@pytest.mark.slow
def test_writers_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "tuning" / "table.json"
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(add, [path] * 24, range(1, 25)))
    assert [p.problem[0] for p in tables.load(path).points] == list(range(1, 25))
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == ["table.json"]


def test_no_file_is_written_through_a_link_that_somebody_planted(tmp_path):
    path, victim, others = tmp_path / "table.json", tmp_path / "victim", tmp_path / "others"
    victim.write_text("precious")
    lock = tmp_path / ".table.json.lock"
    lock.symlink_to(victim)
    with pytest.raises(StoreError, match="symbolic links"):
        tables.update(path, table(point(1)))
    assert victim.read_text() == "precious"
    lock.unlink()
    tables.update(others, table(point(2)))
    before = others.read_bytes()
    path.symlink_to(others)
    tables.update(path, table(point(1)))
    assert others.read_bytes() == before
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == ["others", "table.json", "victim"]


def test_a_file_that_is_no_table_is_named_and_kept(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"table\.json is not a tuning table"):
        tables.update(path, table(point(1)))
    assert path.read_text() == "{"


def test_a_table_whose_bytes_changed_since_it_was_written_is_refused(tmp_path):
    path = tmp_path / "table.json"
    tables.update(path, table(point(1), point(2, first=OLD)))
    good, wanted = path.read_bytes(), tables.load(path)
    for at in range(0, len(good), 7):
        for new in {ord("7"), good[at] ^ 1} - {good[at]}:
            path.write_bytes(good[:at] + bytes([new]) + good[at + 1 :])
            with pytest.raises(ConfigError, match="is not a tuning table"):
                tables.load(path)
    path.write_bytes(good)
    assert tables.load(path) == wanted
    path.write_text(json.dumps(wanted.to_json()))  # as users write it, and older versions did
    assert tables.load(path) == wanted


WHOLE = table(point(1), point(2, first=OLD)).to_json()


def places(value, path=()):
    """Yield the path of every value inside a JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


ODD = st.sampled_from(
    [None, True, -1, 0, 1 << 70, 1e308, float("nan"), "", "x" * 200, "\n#include", [], {}, [[]], {"a": 1}]
)


@PATIENT
@given(
    st.sampled_from(sorted(filter(None, places(WHOLE)), key=str)), ODD, st.sampled_from(["replace", "remove", "repeat"])
)
def test_whatever_is_wrong_with_a_table_gets_an_error_that_says_so(path, odd, how):
    data = copy.deepcopy(WHOLE)
    parent = data
    for key in path[:-1]:
        parent = parent[key]
    if how == "replace":
        parent[path[-1]] = odd
    elif how == "remove":
        del parent[path[-1]]
    elif isinstance(parent, list):
        parent.append(parent[path[-1]])
    try:
        read = Table.from_json(data)
    except ConfigError:
        return
    # What is still a table is one through and through.
    assert Table.from_json(read.to_json()) == read


def test_another_format_is_refused():
    with pytest.raises(ConfigError, match="tune again"):
        Table.from_json({**WHOLE, "format": 1})


@pytest.mark.parametrize("at", ["before the lock", "before the file"])
@pytest.mark.parametrize("times", [3, 4])
def test_a_folder_that_is_deleted_while_a_table_is_written(tmp_path, monkeypatch, at, times):
    path, deleted = tmp_path / "tables" / "table.json", []
    where, name = (tables.locks, "held") if at == "before the lock" else (tables.os, "fsync")
    does = getattr(where, name)

    @contextlib.contextmanager
    def held(*given):
        if len(deleted) < times:
            deleted.append(shutil.rmtree(path.parent))
        with does(*given):
            yield

    def fsync(descriptor):
        if len(deleted) < times:
            deleted.append(shutil.rmtree(path.parent))
        does(descriptor)

    monkeypatch.setattr(where, name, {"held": held, "fsync": fsync}[name])
    if times == 4:
        with pytest.raises(StoreError, match=r"tuning tables cannot be kept in .*No such file"):
            tables.update(path, table(point(1)))
        return
    tables.update(path, table(point(1)))
    assert tables.load(path) == table(point(1))
