"""The cost model against measured sweeps, and what must hold of any prediction."""

import itertools
import json
import math
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from signatures import H100, H200, signature

import cutlass_ops as co
from cutlass_ops.base import resources
from cutlass_ops.choose import knowledge, policies, pool, space, tables
from cutlass_ops.choose.pool import Pool
from cutlass_ops.declare.config import GemvConfig, Means, Sm90Config, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import arithmetic, legality
from cutlass_ops.kinds.arrays import Extents
from cutlass_ops.kinds.sm90 import model, timer
from cutlass_ops.kinds.traits import Traits
from tests.scripts import BENCHMARKS, script
from tests.strategies import PATIENT

REACH = 150


fit_model = script("fit_model")
config = fit_model.parse


SWEEPS = [BENCHMARKS / "results" / f"sweep_{name}_h100.json" for name in ("decode", "short")]


def sweeps():
    """Return (shape, {config: microseconds}) of the committed sweeps."""
    return [
        (shape, {config: us for (config, _), us in times.items()})
        for path in SWEEPS
        for shape, times in fit_model.read(path).items()
    ]


@pytest.fixture(scope="module")
def measured():
    return sweeps()


@pytest.mark.parametrize(("count", "mean", "worst"), [(1, 1.03, 1.2), (8, 1.002, 1.05)])
def test_the_first_ones_hold_the_fastest(measured, count, mean, worst):
    assert len(measured) >= 30
    found_mean, found_worst = fit_model.regret(list(map(fit_model.Measured.of, SWEEPS)), model.H100, count)
    assert found_mean <= mean
    assert found_worst <= worst


def reduces(path):
    """Whether a table is about reductions of D, which take time that the model does not know of."""
    return any(o.reduce is not None for o in tables.load(path).signature.epilogue.outputs)


@pytest.fixture(scope="module")
def shipped():
    """What was measured of each table that ships: only kernels that raced together can be compared."""
    paths = [path for path in sorted(resources.tuned().glob("nvidia-h100*.json")) if not reduces(path)]
    return list(map(fit_model.Measured.of, paths))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mean"), [(1, 1.03), (8, 1.003)])
def test_so_they_do_in_the_tables_that_ship(shipped, count, mean):
    assert {each.lines for each in shipped} == {("k", "k"), ("k", "n"), ("m", "n"), ("m", "k")}
    assert sum(len(each.problems) for each in shipped) > 300
    assert fit_model.regret(shipped, model.H100, count)[0] <= mean


def test_a_predicted_time_is_near_the_measured_one_where_the_choice_is_made(measured):
    errors = [
        abs(math.log(model.predict(of, shape) / us))
        for shape, times in measured
        for of, us in times.items()
        if us <= 1.1 * min(times.values())
    ]
    assert sum(errors) / len(errors) < 0.06


@pytest.mark.parametrize(("multiprocessors", "in_fours"), [(132, None), (66, 0.5)])
def test_a_device_has_the_chip_of_an_h100_with_as_many_multiprocessors(multiprocessors, in_fours):
    chip = model.costs_of(replace(H100, multiprocessors=multiprocessors))
    assert chip.multiprocessors == multiprocessors
    if in_fours is None:
        assert chip == model.H100
    else:
        assert chip.multiprocessors_in_fours == round(in_fours * model.H100.multiprocessors_in_fours)
        assert chip != model.H100


def test_a_chip_with_faster_memory_is_known_by_its_name():
    tiles = config("sm90_128x128x64_1x2_pp")
    gemv = GemvConfig(rows=1, warps=8, pieces=8)
    for kernel in (tiles, gemv):
        read, long = Problem(1, 28672, 4096), Problem(1, 128256, 8192)
        there, here = (pool.predict(kernel, long, d) - pool.predict(kernel, read, d) for d in (H200, H100))
        assert 1.2 < here / there < 1.45
    many = Problem(8192, 8192, 8192)
    assert pool.predict(tiles, many, H200) == pytest.approx(pool.predict(tiles, many, H100), rel=0.02)
    assert model.costs_of(replace(H100, name="another")) == model.H100


def test_what_was_measured_on_one_chip_says_by_how_much_the_model_is_off_on_another():
    problem = Problem(24, 40960, 6144)  # not measured anywhere
    here, there = (policies.policy(signature(), d).choose(problem) for d in (H100, H200))
    assert there.source == "interpolated"
    assert 1.2 < here.microseconds / there.microseconds < 1.5


@pytest.mark.slow
def test_many_at_once_are_predicted_as_one_by_one():
    configs = space.configurations(signature())[::293]
    shapes = [Problem(1, 4096, 4096), Problem(333, 12288, 4096), Problem(4096, 4096, 14336), Problem(200, 3584, 18944)]
    together = model.times(model.Batch.of(configs), shapes)
    assert together.shape == (len(shapes), len(configs))
    for i, shape in enumerate(shapes):
        for j, of in enumerate(configs):
            assert together[i, j].item() == pytest.approx(model.predict(of, shape), rel=1e-12)


@PATIENT
@given(m=st.integers(1, 1 << 16), n=st.integers(1, 1 << 16), k=st.integers(1, 1 << 16))
def test_no_time_is_below_what_memory_and_tensor_cores_allow(m, n, k):
    for of in (
        config("sm90_64x16x256_1x1_ws_swap"),
        config("sm90_128x192x64_2x1_pp"),
        config("sm90_256x128x64_1x2_coop"),
    ):
        time = model.predict(of, Problem(m, n, k))
        assert time >= 2 * (m * k + k * n + m * n) / (model.H100.dram * 1e3)
        assert time >= 2 * m * n * k / 989e6  # peak of an H100, in FLOP a microsecond


def test_two_blocks_on_a_multiprocessor_take_turns_in_one_wave():
    alone = Sm90Config(ThreadblockShape(128, 16, 128), schedule="warp_specialized", swap_ab=True)
    problems = [Problem(16, 28672, 4096), Problem(16, 4096, 4096)]
    waves, beside = (
        getattr(model.grid(model.Batch.of([alone, replace(alone, resident=2)]), problems, model.H100), name).tolist()
        for name in ("waves", "beside")
    )
    assert waves == [[2, 1], [1, 1]]  # 224 tiles, and 32, on 132 multiprocessors
    assert beside == [[1, 2], [1, 1]]
    few, many = (times.tolist() for times in model.times(model.Batch.of([alone, replace(alone, resident=2)]), problems))
    # Only the epilogue between the waves is saved: what multiplies and loads is the same.
    assert 0.95 * few[0] < few[1] < few[0]
    assert many[0] == many[1]


def taken(configs, problems):
    """Return by how much the model has kernels later for means of A's rows."""
    batch = model.Batch.of(configs)
    return model.means(batch, problems, model.times(batch, problems))


def test_means_gathered_cost_by_the_rows_of_a_tile():
    problems = [Problem(16, 4096, 4096), Problem(4096, 4096, 4096), Problem(4096, 512, 8192)]
    few, many = (config(f"sm90_{name}") for name in ("64x16x64_1x1_pp_swap", "64x64x64_1x1_pp"))
    later = taken([few, many], problems)
    assert (later > 0).all()
    assert (later == later[:1]).all()  # the problem does not matter
    assert (later[:, 1] > 1.5 * later[:, 0]).all()


def test_means_ahead_cost_reading_a():
    ahead = Sm90Config(ThreadblockShape(128, 128, 64), means="ahead")
    problems = [Problem(16, 4096, 4096), Problem(4096, 4096, 4096), Problem(4096, 512, 8192), Problem(1, 1, 1)]
    *later, start = taken([ahead], problems).flatten().tolist()
    read = [one - start for one in later]
    assert read == pytest.approx([read[0] * p.m * p.k / (16 * 4096) for p in problems[:3]], rel=1e-3)


def test_means_beside_cost_more_where_epilogues_wait_for_them():
    beside = Sm90Config(ThreadblockShape(128, 128, 64), means="beside")
    # In one short wave all of 8192 rows; in many long ones a few of many rows at a time.
    hidden, waited = taken([beside], [Problem(4096, 16384, 4096), Problem(8192, 128, 4096)]).flatten().tolist()
    assert hidden == pytest.approx(model.TAKING.beside.pingpong)
    assert waited > hidden + 1


def test_a_pool_counts_what_means_take():
    ways = [
        config("sm90_64x64x64_1x1_pp"),
        *(Sm90Config(ThreadblockShape(64, 64, 64), means=w) for w in ("beside", "ahead")),
    ]
    norm, plain = signature(composed.rms_norm), signature()
    problems = [Problem(64, 4096, 4096), Problem(4096, 4096, 4096)]
    norms = Pool.of(ways, norm)
    alone = Pool.of([replace(c, means="gathered") for c in ways], plain).times(problems, H100)
    later = model.means(model.Batch.of(ways), problems, alone)
    assert np.allclose(norms.times(problems, H100) - alone, later)
    assert np.allclose(norms.besides(problems, H100), later)


def test_few_rows_are_gathered_and_others_read_beside():
    assert timer.usual_means(config("sm90_64x16x256_1x1_ws_swap")) == "gathered"
    assert timer.usual_means(config("sm90_64x64x128_1x1_ws")) == "beside"
    assert timer.usual_means(config("sm90_128x128x64_2x1_pp")) == "beside"


@pytest.fixture(scope="module")
def sweep_of_means():
    """Return what was measured of kernels that read A's rows as they do today: others had none in shared memory."""
    found = json.loads((BENCHMARKS / "results" / "sweep_means_h100.json").read_text())["rows"]
    for row in found:
        if row["config"]["schedule"] != "warp_specialized":
            row["us"].pop("beside", None)
    return found


@pytest.mark.parametrize(
    ("way", "error", "count"), [("gathered", 0.05, 40), ("beside", 0.042, 30), ("ahead", 0.042, 40)]
)
def test_what_means_take_is_close_to_what_was_measured(way, error, count, sweep_of_means):
    fit = script("fit_means")
    measured = fit.Measured.of(sweep_of_means, way)
    assert len(measured.problems) >= count
    found = math.sqrt(fit.loss([measured], model.TAKING))
    assert found < error
    nothing = replace(
        model.TAKING, gathered=0.0, gathered_row=0.0, beside=model.PerSchedule(0.0, 0.0, 0.0), ahead=0.0,
        ahead_rate=math.inf, beside_rate=model.PerSchedule(math.inf, math.inf, math.inf), beside_after=0.0,
    )  # fmt: skip
    assert math.sqrt(fit.loss([measured], nothing)) > 1.3 * found


def test_what_a_later_sweep_says_of_a_way_counts(tmp_path, sweep_of_means):
    fit = script("fit_means")
    later = [row | {"us": {"given": 1.0, "ahead": 3.0}} for row in sweep_of_means[:3]]
    files = [tmp_path / "first.json", tmp_path / "later.json"]
    for file, rows in zip(files, (sweep_of_means, later), strict=True):
        file.write_text(json.dumps({"rows": rows}))
    found = fit.latest(files)
    assert found["ahead"].later.tolist() == [2.0] * 3
    assert len(found["gathered"].problems) == len(fit.Measured.of(sweep_of_means, "gathered").problems)


def test_a_fit_of_means_improves_on_where_it_began(sweep_of_means):
    fit = script("fit_means")
    measured = [fit.Measured.of(sweep_of_means, way) for way in model.WAYS]
    begin = replace(model.TAKING, gathered_row=0.1, ahead=5.0, beside=model.PerSchedule(4.0, 4.0, 4.0))
    assert fit.loss(measured, fit.fit(measured, begin, 150)) < 0.8 * fit.loss(measured, begin)


def test_more_work_is_not_predicted_to_be_faster():
    of = config("sm90_128x128x64_2x1_pp")
    for side in range(3):
        shapes = [Problem(*(e if i == side else 4096 for i in range(3))) for e in (512, 1024, 4096, 16384)]
        times = [model.predict(of, s) for s in shapes]
        assert all(b >= a for a, b in itertools.pairwise(times))


def unseen(of):
    """Return the configurations that differ from one only in what the model is blind to."""

    def seen(c):
        return c.schedule, c.scheduler, c.split_k, c.along_problem

    return [c for c in space.configurations(signature()) if c != of and seen(c) == seen(of)]


def rows(of, shape):
    return model.grid(model.Batch.of([of]), [shape], model.H100).rows.item()


def test_the_space_is_legal_and_large_and_its_parts_are_whole():
    everything = space.configurations(signature())
    assert len(everything) == len(set(everything)) > 2000
    shape = Problem(512, 4096, 4096)
    first = space.ranked(signature(), shape, 40, H100)
    assert len(first) == 40
    assert set(first) <= set(everything)
    times = [pool.predict(c, shape, H100) for c in first]
    assert times == sorted(times)
    # No two of them differ only in what the model cannot see, and what it cannot see is reachable.
    for of in first:
        others = unseen(of)
        assert not set(others) & set(first)
        assert {rows(o, shape) for o in others} <= {rows(of, shape)}
    assert any(o.threadblock.k != of.threadblock.k for of in first for o in unseen(of))


@pytest.mark.slow
def test_the_space_has_every_way_to_means_for_norms_and_the_usual_one_else():
    """Each kernel of a norm can take means ahead, and beside its main loop if that sees all of K and there is room."""
    assert {c.means for c in space.configurations(signature())} == {"gathered"}
    gate, norm = (space.configurations(signature(e)) for e in (composed.swiglu, composed.rms_norm))
    assert min(len(gate), len(norm)) > 2000
    assert {c.means for c in gate} == {"gathered"}
    found = {way: {replace(c, means="gathered") for c in norm if c.means == way} for way in get_args(Means)}
    assert set() < found["gathered"] < found["ahead"]
    assert set() < found["beside"] < found["ahead"]
    assert any(c.swap_ab for c in found["gathered"])
    assert all(c.whole_k for c in found["beside"])
    full = [c for c in found["ahead"] - found["beside"] if c.whole_k]
    assert found["gathered"] - found["beside"] <= set(full)
    assert len(full) < 200
    for config in full:
        broken = legality.check(H100.spec(signature(composed.rms_norm), replace(config, means="beside")))
        assert [v.rule for v in broken] == ["shared_memory"], config.slug


def test_the_space_has_every_schedule_with_every_tile_that_it_can_have():
    """192 rows are two warpgroups side by side, each with half of the columns, or one after the other."""
    found = {(c.schedule, c.threadblock.m) for c in space.configurations(signature())}
    assert found == {
        *(("warp_specialized", m) for m in (64, 128)),
        *(("pingpong", m) for m in (64, 128, 192)),
        *(("cooperative", m) for m in (128, 192, 256)),
    }


def test_what_won_a_sweep_is_within_reach(measured):
    """The first of thousands hold the measured best, or one that the model cannot tell from it."""
    for shape, times in measured:
        best = min(times, key=times.get)
        near = space.ranked(signature(), shape, REACH, H100)
        assert best in near or any(best in unseen(c) for c in near), shape


@pytest.mark.parametrize("shape", [(64, 16_800_000, 64), (16_800_000, 16, 64)])
def test_no_ranked_grid_is_larger_than_the_hardware_allows(shape):
    found = space.ranked(signature(), Problem(*shape), 400, H100)
    assert found
    for of in found:
        tile, cluster = of.along_problem
        extents = [-(-extent // (t * c)) * c for extent, t, c in zip(shape, tile, cluster, strict=False)]
        assert of.schedule != "warp_specialized" or extents[not of.swap_ab] <= 65535


# ---- Operands' lines in memory -----------------------------------------------------------------------------------


def time_of(slug, problem, a="k", b="k"):
    return model.times(model.Batch.of([config(slug)]), [problem], lines=(a, b)).item()


@pytest.mark.parametrize(("columns", "times"), [(192, 1.0), (160, 1.0), (176, 1.3), (200, 1.5)])
def test_a_tile_is_copied_in_rows_as_wide_as_divide_it_where_its_columns_are_adjacent(columns, times):
    """Measured: 128x176 takes 1.45 times as long with a row-major B, and 128x200 2.2 times (benchmarks/NOTES.md)."""
    slug, problem = f"sm90_128x{columns}x64_2x1_pp", Problem(4096, 28672, 4096)
    ratio = time_of(slug, problem, b="n") / time_of(slug, problem)
    assert ratio == pytest.approx(1.0, abs=0.07) if times == 1.0 else ratio > times
    # Swapped, it is the rows of A that lie there.
    assert time_of(f"{slug}_swap", problem, a="m") / time_of(f"{slug}_swap", problem) == pytest.approx(ratio, rel=0.1)


def test_lines_that_begin_between_the_caches_lines_cost_most_where_least_is_read_twice():
    narrow, wide = "sm90_64x256x64_1x1_pp", "sm90_256x128x64_1x2_coop_swap"
    between, aligned = Problem(1024, 4096, 1000), Problem(1024, 4096, 1024)
    losses = [time_of(s, between) / time_of(s, aligned) for s in (narrow, wide)]
    assert losses[0] > 1.3 > 1.2 > losses[1]
    # Lines along N: it is N that counts.
    assert time_of(narrow, between, "m", "n") < 1.05 * time_of(narrow, aligned, "m", "n")


def test_of_lines_between_the_caches_lines_it_is_the_requests_of_the_cache_that_cost():
    """Profiled: clusters that share A make half as many, and cuBLAS takes 25.6 us with them for 34.0 without."""
    shares_a, shares_b = "sm90_128x128x64_1x2_coop", "sm90_128x128x64_2x1_coop"
    aligned, odd = ([time_of(s, Problem(m, 8192, 3072), "m", "n") for s in (shares_a, shares_b)] for m in (256, 200))
    assert aligned[1] < aligned[0]
    assert odd[1] > 1.05 * odd[0]


def test_what_was_measured_with_such_lines_says_little_of_others():
    column_major = signature(majors=("col", "row"))
    found = Pool.of(policies.policy(column_major, H100).kernels[:8], column_major)
    problems = [Problem(256, 4096, 1000), Problem(200, 4096, 4096), Problem(256, 4104, 4096), Problem(200, 4104, 4096)]
    assert found.traits.odd(problems).tolist() == [0, 1, 1, 2]
    where = knowledge.Where.of([Problem(m, 4096, 4096) for m in (256, 256, 248)], found)
    places = np.arange(8)
    notes = knowledge.Notes(where.problems, np.zeros(8, np.int64), places, where.tiles[0], np.ones(8))
    _, near, far = notes.near(where)[0]
    assert (near > 0.99).all()
    assert (far < 0.2).all()


def test_what_is_compared_in_parts_is_compared_alike(monkeypatch):
    policy = policies.policy(signature(), H100)
    problems = [Problem(m, 6144, 4096) for m in (1, 100, 512, 3000)]
    together = policy.expected(problems)
    besides = Pool.of(policy.kernels, signature(composed.rms_norm)).besides(problems, H100)
    monkeypatch.setattr(pool, "AT_ONCE", 1)
    apart = policy.expected(problems)
    parts = list(Pool.of(policy.kernels, signature())._parts(Extents.of(problems)))
    assert {part.stop - part.start for part, *_ in parts} == {1}
    assert np.allclose(apart.times, together.times, rtol=1e-12, atol=0)
    assert (apart.sources == together.sources).all()
    assert (apart.by_gpc == together.by_gpc).all()
    again = Pool.of(policy.kernels, signature(composed.rms_norm)).besides(problems, H100)
    assert np.allclose(again, besides, rtol=1e-12, atol=0)


# ---- Epilogues that compute long ---------------------------------------------------------------------------------


def longer_by(n, k, schedule="pingpong", clocks=30.0):
    config = co.Sm90Config(co.ThreadblockShape(128, n, 64), schedule=schedule)
    return float(model.computing(model.Batch.of([config]), [Problem(8192, 8192, k)], clocks)[0, 0])


def test_a_pingpong_kernel_hides_an_epilogue_behind_products_that_take_longer():
    last = 128 * 30.0 / (model.H100.clock * 1e3)  # microseconds, of the last tile
    assert longer_by(128, 8192) == pytest.approx(last)
    assert longer_by(128, 128) > 10 * last
    assert longer_by(128, 8192, "cooperative") > 10 * last


def test_narrow_parts_of_a_tile_compute_longer_for_each_element():
    wide, sixteen, eight = (longer_by(n, 128, "cooperative") / n for n in (192, 208, 200))
    assert wide < sixteen < eight


def test_clocks_are_those_of_what_differs_from_element_to_element():
    @co.epilogue
    def of_rows(acc, x: co.Col):
        return acc * co.e.rsqrt(co.e.exp(x) + 1.0)

    @co.epilogue
    def of_elements(acc, x: co.Col):
        return co.e.rsqrt(co.e.exp(acc) + 1.0) * x

    assert arithmetic.clocks(of_rows.graph) < arithmetic.clocks(of_elements.graph)
    assert arithmetic.clocks(builtin.bias_relu.graph) < arithmetic.clocks(builtin.bias_gelu.graph)
    for light in (builtin.bias_relu, builtin.residual, builtin.bias_silu, composed.swiglu, composed.rms_norm):
        operand = Operand.of("bf16.row")
        inputs = tuple(operand for _ in light.graph.inputs)
        assert Traits.of(OpSignature(light.graph, operand, operand.transposed, operand, inputs, ())).clocks == 0
