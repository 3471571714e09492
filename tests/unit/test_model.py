"""The cost model against measured sweeps, and what must hold of any prediction."""

import importlib.util
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from signatures import H100, signature

from cutlass_ops import heuristics, model, space
from tests.strategies import PATIENT

REACH = 150
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _script(name):
    """Return a benchmark's script as a module: it reads the sweeps as the fit does."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fit_model = _script("fit_model")
config = fit_model.parse


def sweeps():
    """Return {shape: {config: microseconds}} of the committed sweeps."""
    return fit_model.read([BENCHMARKS / "results" / f"sweep_{name}_h100.json" for name in ("decode", "short")])


@pytest.fixture(scope="module")
def measured():
    return sweeps()


@pytest.mark.parametrize(("count", "mean", "worst"), [(1, 1.03, 1.16), (8, 1.002, 1.02)])
def test_the_first_ones_hold_the_fastest(measured, count, mean, worst):
    assert len(measured) >= 30
    found_mean, found_worst = fit_model.regret(measured, model.H100, count)
    assert found_mean <= mean
    assert found_worst <= worst


def test_a_predicted_time_is_near_the_measured_one_where_the_choice_is_made(measured):
    errors = [
        abs(math.log(model.predict(of, shape) / us))
        for shape, times in measured.items()
        for of, us in times.items()
        if us <= 1.1 * min(times.values())
    ]
    assert sum(errors) / len(errors) < 0.06


@PATIENT
@given(m=st.integers(1, 1 << 16), n=st.integers(1, 1 << 16), k=st.integers(1, 1 << 16))
def test_no_time_is_below_what_memory_and_tensor_cores_allow(m, n, k):
    for of in (
        config("sm90_64x16x256_1x1_ws_swap"),
        config("sm90_128x192x64_2x1_pp"),
        config("sm90_256x128x64_1x2_coop"),
    ):
        time = model.predict(of, (m, n, k))
        assert time >= 2 * (m * k + k * n + m * n) / (model.H100.dram * 1e3)
        assert time >= 2 * m * n * k / 989e6  # peak of an H100, in FLOP a microsecond


def test_more_work_is_not_predicted_to_be_faster():
    of = config("sm90_128x128x64_2x1_pp")
    for side in range(3):
        shapes = [tuple(e if i == side else 4096 for i in range(3)) for e in (512, 1024, 4096, 16384)]
        times = [model.predict(of, s) for s in shapes]
        assert all(b >= a for a, b in itertools.pairwise(times))


def unseen(of):
    """Return the configurations that differ from one only in what the model is blind to."""

    def seen(c):
        return c.schedule, c.scheduler, c.split_k, model.along_problem(c)

    return [c for c in space.configurations(signature()) if c != of and seen(c) == seen(of)]


def test_the_space_is_legal_and_large_and_its_parts_are_whole():
    everything = space.configurations(signature())
    assert len(everything) == len(set(everything)) > 2000
    shape = (512, 4096, 4096)
    first = space.ranked(signature(), shape, 40, H100)
    assert len(first) == 40
    assert set(first) <= set(everything)
    times = [
        min(heuristics.predict(order, shape, H100) for order in [c, *heuristics.orders(c, shape, H100)]) for c in first
    ]
    assert times == sorted(times)
    # No two of them differ only in what the model cannot see, and what it cannot see is reachable.
    for of in first:
        others = unseen(of)
        assert not set(others) & set(first)
        assert {model.grid(o, shape, model.H100).rows for o in others} <= {model.grid(of, shape, model.H100).rows}
    assert any(o.threadblock.k != of.threadblock.k for of in first for o in unseen(of))


def test_what_won_a_sweep_is_within_reach(measured):
    """The first of thousands hold the measured best, or one that the model cannot tell from it."""
    for shape, times in measured.items():
        best = min(times, key=times.get)
        near = space.ranked(signature(), shape, REACH, H100)
        assert best in near or any(best in unseen(c) for c in near), shape


@pytest.mark.parametrize("shape", [(64, 16_800_000, 64), (16_800_000, 16, 64)])
def test_no_ranked_grid_is_larger_than_the_hardware_allows(shape):
    for of in space.ranked(signature(), shape, 400, H100):
        cover = model.grid(of, shape, model.H100)
        second = cover.rows if of.swap_ab else cover.columns
        assert of.schedule != "warp_specialized" or second <= 65535
