"""Tables of measurements: whole after any number of writers, and believed only where they are legal."""

import contextlib
import copy
import errno
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
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import Sm80Config, Sm90Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
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


def test_what_was_measured_to_be_the_fastest_stays_so():
    old = Point(Problem(1, 64, 64), "2026-11-20", (Measured(OLD, 8.0, 0.0), Measured(SMALL, 10.0, 0.25)))
    new = Point(Problem(1, 64, 64), "2026-11-21", (Measured(SMALL, 10.0, 0.0), Measured(LARGE, 11.0, 0.1)))
    (found,) = table(old).merged(table(new)).points
    assert [m.config for m in found.measured] == [SMALL, OLD, LARGE]
    # By the older race it would be 20% ahead; it is not even as good, since few kernels are chosen among the best.
    assert (found.measured[1].behind, found.measured[1].microseconds) == (0.005, pytest.approx(10.05))
    assert found.measured[1].behind > policies._SLACK["measured"]


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


def test_the_first_kernels_are_for_the_problems_that_matter_most():
    whole = swept()
    first = [p.problem for p in whole.points if p.problem[0] <= 64]
    kept = whole.select(first, few=3, most=8).kernels
    alone = replace(whole, points=tuple(p for p in whole.points if p.problem in first))
    assert kept[:3] == alone.select(few=3, most=3).kernels
    assert len(kept) == 8
    assert sum(losses(whole, kept)) < sum(losses(whole, kept[:3]))


def test_the_order_of_tiles_makes_no_further_kernel():
    again = Measured(SMALL, 10.5, 0.05, TileOrder("along_m"))
    twice = replace(point(1), measured=(*point(1).measured, again))
    assert table(twice, point(2)).select().kernels == (SMALL,)
    both = table(point(1), point(2, first=LARGE, second=SMALL)).select().kernels
    assert set(both) == {SMALL, LARGE}


def test_an_empty_table_has_no_kernels():
    assert table().select().kernels == ()


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


# A table as format 2 has it: every field is written out, and an order of tiles is a part of its configuration.
OLD_CONFIG = {
    "arch": "sm90", "threadblock": {"m": 128, "n": 192, "k": 64}, "cluster": {"m": 1, "n": 1}, "schedule": "pingpong",
    "scheduler": "persistent", "stages": None, "swap_ab": False, "raster": "heuristic", "swizzle": 1, "by_gpc": False,
}  # fmt: skip


def of_format_2():
    ordered = [OLD_CONFIG | change for change in ({}, {"raster": "along_n", "swizzle": 2}, {"by_gpc": True})]
    data = {k: v for k, v in table().to_json().items() if k != "orders"}
    rows = [[2, 10.0, 0.0], [1, 11.0, 0.1], [0, 12.0, 0.2]]
    problem = {"problem": [512, 4096, 4096], "date": "2026-11-21", "measured": rows, "peers": {"cublaslt": 10.5}}
    return data | {"format": 2, "configs": ordered, "kernels": [1, 0], "points": [problem]}


def test_a_table_of_format_2_is_read_with_every_measurement(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(of_format_2()))
    found = tables.load(path)
    assert found.kernels == (LARGE,)
    (only,) = found.points
    assert only.measured == (
        Measured(LARGE, 10.0, 0.0, TileOrder(by_gpc=True)),
        Measured(LARGE, 11.0, 0.1, ORDER),
        Measured(LARGE, 12.0, 0.2),
    )
    assert only.peers == (("cublaslt", 10.5),)
    # What is added to it is written in today's format.
    tables.update(path, table(point(64)))
    assert json.loads(path.read_text())["format"] == tables.FORMAT
    assert set(tables.load(path).points) == {only, point(64)}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kernels": [3]}, "configuration 3 of 3"),
        ({"kernels": ["a"]}, "place"),
        ({"configs": ["sm90"]}, "a configuration"),
        ({"points": [{}]}, "a point"),
        ({"orders": []}, "a tuning table"),
        ({"points": 3}, "points"),
    ],
)
def test_a_wrong_table_of_format_2_is_refused(change, why):
    with pytest.raises(ConfigError, match=why):
        tables.parse(json.dumps(of_format_2() | change).encode(), "it")


@pytest.mark.parametrize("row", [[], [0], [9, 1.0, 0.0], [0, 1.0], [0, 1.0, 0.0, 0.0], 3, None])
def test_a_wrong_row_of_format_2_is_refused(row):
    data = of_format_2()
    data["points"][0]["measured"] = [row]
    with pytest.raises(ConfigError):
        tables.parse(json.dumps(data).encode(), "it")


def test_kernels_are_kept_with_the_table(tmp_path):
    path = tmp_path / "table.json"
    tables.update(path, table(point(1), point(2, first=LARGE, second=SMALL)).select())
    assert set(tables.load(path).kernels) == {SMALL, LARGE}
    tables.update(path, table(point(3)))
    assert len(tables.load(path).kernels) == 2


def test_each_device_and_signature_has_a_file_of_its_own(tmp_path):
    names = {
        tables.path_of(tmp_path, device, of).name
        for device in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")
        for of in (signature(), signature(builtin.bias_gelu), signature(dtype="f16"))
    }
    assert len(names) == 6
    assert all(name.startswith("nvidia-h") and name.endswith(".json") for name in names)


def add(path, m):
    tables.update(path, table(point(m)))


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


def test_a_file_system_without_locks_is_one_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match=r"has no file locks.*name a folder on a local disk for the tables"):
        tables.update(tmp_path / "table.json", table(point(1)))


def test_a_file_that_is_no_table_is_named_and_kept(tmp_path):
    path = tmp_path / "table.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"table\.json is not a tuning table"):
        tables.update(path, table(point(1)))
    assert path.read_text() == "{"


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


def test_an_illegal_configuration_is_refused():
    data = copy.deepcopy(WHOLE)
    data["configs"][0]["threadblock"]["n"] = 12
    with pytest.raises(ConfigError, match="illegal"):
        Table.from_json(data)


def test_another_format_is_refused():
    with pytest.raises(ConfigError, match="tune again"):
        Table.from_json({**WHOLE, "format": 1})


def test_where_a_peer_is_close_the_fastest_kernel_is_kept():
    """Elsewhere a kernel that is nearly as fast will do."""
    other = replace(SMALL, threadblock=replace(SMALL.threadblock, n=96))

    def near(m, peer):
        measured = (Measured(SMALL, 10.0, 0.0), Measured(other, 10.2, 0.02))
        return Point(Problem(m, 64, 64), "2026-11-21", measured, (("eager", peer),))

    elsewhere = [
        Point(Problem(m, 64, 64), "2026-11-21", (Measured(other, 10.0, 0.0), Measured(SMALL, 10.3, 0.03)))
        for m in (7, 8)
    ]
    assert table(near(1, 20.0), *elsewhere).select(few=1, most=1).kernels == (other,)
    assert table(near(1, 10.0), *elsewhere).select(few=1, most=1).kernels == (SMALL,)


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
