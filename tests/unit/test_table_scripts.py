"""The scripts that choose kernels and shapes for the tables that ship."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from signatures import signature

from cutlass_ops.choose import points
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import GemvConfig, Sm90Config, ThreadblockShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from tests.scripts import script

choose_pool = script("choose_pool")
evaluate_dispatch = script("evaluate_dispatch")
ship_table = script("ship_table")


def losses(*rows):
    return np.log(np.array(rows))


def test_the_next_kernel_is_the_one_that_helps_most():
    # Kernel 0 is good at the first problem, 1 at the second, 2 nearly as good at both.
    times = losses((1.0, 1.9, 1.1), (1.9, 1.0, 1.1), (1.9, 1.0, 1.1))
    assert choose_pool.choose(times, 0, 1) == [2]
    assert choose_pool.choose(times, 0, 2) == [2, 1]
    assert choose_pool.choose(times, 0, 9) == [2, 1, 0]


def test_the_first_kernels_stay_whatever_they_lose():
    times = losses((2.0, 1.0, 1.5), (2.0, 1.5, 1.0))
    assert choose_pool.choose(times, 1, 2) in ([0, 1], [0, 2])
    assert choose_pool.choose(times, 2, 1) == [0]


def test_what_is_lost_is_what_the_best_of_those_chosen_loses():
    times = losses((1.0, 1.2), (1.5, 1.1), (9.0, 9.0))
    assert np.allclose(choose_pool.reached(times, [0]), losses((1.0, 1.5, 2.0))[0])
    assert np.allclose(choose_pool.reached(times, [0, 1]), losses((1.0, 1.1, 2.0))[0])
    assert choose_pool.reached(times, []).tolist() == [math.log(2.0)] * 3


A, B = (Sm90Config(ThreadblockShape(128, n, 64)) for n in (64, 128))
TURNED = TileOrder("along_m", swizzle=4)


def point(*measured, peers=(("eager", 30.0), ("cublaslt", 12.0))):
    return Point(Problem(64, 4096, 4096), "2026-11-21", tuple(measured), peers)


def test_of_each_kernel_the_best_order_stays():
    best = ship_table.best_orders(
        point(Measured(A, 10.0, 0.0, TURNED), Measured(A, 11.0, 0.1), Measured(B, 12.0, 0.2)), ()
    )
    assert [(m.config, m.order) for m in best.measured] == [(A, TURNED), (B, TileOrder())]


def test_without_the_fastest_the_others_are_told_from_the_best_of_them():
    kept = ship_table.best_orders(point(Measured(A, 10.0, 0.0), Measured(B, 12.0, 0.2)), {B})
    (only,) = kept.measured
    assert (only.config, only.behind) == (B, 0.0)
    assert only.microseconds == 12.0
    assert ship_table.best_orders(point(Measured(A, 10.0, 0.0)), {B}).measured == ()


def test_a_kernel_is_untold_beside_one_with_a_time_that_has_another_k_extent(tmp_path):
    deep = replace(A, threadblock=ThreadblockShape(128, 64, 128))
    table = Table("H100", 132, signature(), (point(Measured(A, 10.0, 0.0)),), (A, B, deep))
    others = [
        table,
        replace(table, device="H200", points=(point(Measured(deep, 9.0, 0.0)),)),
        replace(table, signature=signature(majors=("col", "row")), points=(point(Measured(deep, 9.0, 0.0)),)),
    ]
    for at, other in enumerate(others):
        (tmp_path / f"{at}.json").write_text(json.dumps(other.to_json()))
    known = ship_table.timed(tmp_path, table)
    assert known == {A}
    assert [ship_table.untold(c, known) for c in (A, B, deep)] == [False, False, True]
    assert not ship_table.untold(deep, {A, deep})
    assert not ship_table.untold(GemvConfig(rows=1, warps=8, pieces=8), known)


def test_a_point_is_worth_what_the_best_peer_took_for_what_we_did():
    assert ship_table.ratio(point(Measured(A, 10.0, 0.0))) == 1.2


def test_what_did_not_race_counts_as_far_behind_as_with_another_epilogue():
    mine = Table("H100", 132, signature(builtin.bias_silu), (point(Measured(A, 10.0, 0.0)),))
    other = Table("H100", 132, signature(), (point(Measured(B, 7.0, 0.0), Measured(A, 8.4, 0.2)),))
    (whole,) = ship_table.completed(mine, other).points
    # By the other epilogue it would be ahead: an estimate never is, nor as good.
    assert [(m.config, m.behind) for m in whole.measured] == [(A, 0.0), (B, points.ESTIMATED)]
    slower = Table("H100", 132, signature(), (point(Measured(A, 8.0, 0.0), Measured(B, 12.0, 0.5)),))
    (whole,) = ship_table.completed(mine, slower).points
    assert [(m.config, m.behind) for m in whole.measured] == [(A, 0.0), (B, 0.5)]
    assert whole.measured[1].microseconds == 15.0
    elsewhere = Table("H100", 132, signature())
    assert ship_table.completed(mine, elsewhere) == mine


def test_a_kernel_that_was_chosen_is_exchanged_for_another_in_its_place():
    pairs = [f"{A.slug}={B.slug}"]
    few = GemvConfig(rows=1, warps=8, pieces=8)
    assert ship_table.exchanged([few, A], [A, B, few], pairs) == (few, B)
    assert ship_table.exchanged([B, A], [A, B], pairs) == (B,)
    assert ship_table.exchanged([few], [A, B, few], []) == (few,)
    for kernels, known in (([few], [A, B, few]), ([A], [A])):
        with pytest.raises(SystemExit, match=f"--exchange: {(A if known[1:] else B).slug} is none of"):
            ship_table.exchanged(kernels, known, pairs)


def test_where_weights_are_left_out_a_choice_that_never_raced_is_told():
    """B is known to be fast at one weight; at the other, which comes first, only A raced."""
    whole = point(Measured(B, 10.0, 0.0), Measured(A, 20.0, 1.0))
    alone = replace(point(Measured(A, 20.0, 0.0)), problem=Problem(64, 4096, 2048))
    device = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")

    def found(*points):
        table = Table(device.name, 132, signature(), points, (A, B))
        return list(evaluate_dispatch.left_out(table, device, lambda p: p[1:]))

    # Of A alone, what is known of B at the other weight says nothing; there both raced.
    assert found(alone, whole) == [(0.0, False), (1.0, True)]
    assert found(replace(alone, measured=whole.measured), whole) == [(0.0, True)] * 2
    summary = evaluate_dispatch.chosen([(0.0, True), (0.5, False)])
    assert summary.endswith("2 shapes; the first of all kernels had raced at 1")
