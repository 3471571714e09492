"""The cost model against measured sweeps, and what must hold of any prediction."""

import json
from dataclasses import replace

import pytest
from signatures import H100, H200, signature

from cutlass_ops.base import resources
from cutlass_ops.choose import policies, pool, space, tables
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.sm90 import model
from cutlass_ops.kinds.sm90.kind import SM90
from tests.scripts import BENCHMARKS, script

REACH = 150


fit_model, evaluate_grouped = script("fit_model"), script("evaluate_grouped")
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


@pytest.mark.sample(2)
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


def unseen(of):
    """Return the configurations that differ from one only in what the model is blind to."""

    def seen(c):
        return c.schedule, c.scheduler, c.split_k, c.along_problem

    return [c for c in space.legal(SM90, signature(), H100) if c != of and seen(c) == seen(of)]


@pytest.mark.slow
def test_what_won_a_sweep_is_within_reach(measured):
    """The first of thousands hold the measured best, or one that the model cannot tell from it."""
    for shape, times in measured:
        best = min(times, key=times.get)
        near = space.ranked(signature(), shape, REACH, H100)
        assert best in near or any(best in unseen(c) for c in near), shape


# ---- Operands' lines in memory -----------------------------------------------------------------------------------


# ---- Epilogues that compute long ---------------------------------------------------------------------------------


def test_the_model_knows_groups_of_several_sizes():
    result = json.loads((BENCHMARKS / "results" / "grouped_h100.json").read_text())
    device = Device((9, 0), result["multiprocessors"], result["chip"])
    kernels = policies.policy(evaluate_grouped.signature(device), device).kernels
    # Times below are those of the launch itself, and of one expert with everything no kernel is chosen for its time.
    rows = [r for r in result["rows"] if r["epilogue"] == "none" and r["groups"] != "one_hot" and r["ours_ms"] > 0.03]
    assert len(rows) >= 24
    for row in rows:
        times = evaluate_grouped.predicted(kernels, row, device)
        assert 0.85 < row["ours_ms"] / times[row["kernel"]] < 1.15, row
