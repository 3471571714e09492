"""The cost model against measured sweeps, and what must hold of any prediction."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutlass_ops import model, space
from cutlass_ops.config import ClusterShape, Sm90Config, ThreadblockShape
from tests.strategies import PATIENT
from tests.unit.test_heuristics import signature

REACH = 80
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SLUG = re.compile(r"sm90_(\d+)x(\d+)x(\d+)_(\d+)x(\d+)_(ws|pp|coop)(_swap)?")
SCHEDULES = {"ws": "warp_specialized", "pp": "pingpong", "coop": "cooperative"}


def config(slug):
    m, n, k, along_m, along_n, schedule, swap = SLUG.fullmatch(slug).groups()
    tile, cluster = ThreadblockShape(int(m), int(n), int(k)), ClusterShape(int(along_m), int(along_n))
    return Sm90Config(tile, cluster, schedule=SCHEDULES[schedule], swap_ab=bool(swap))


def sweeps():
    """Return {shape: {config: ms}}, the best over the orders of tiles, of the committed sweeps."""
    found = {}
    for name in ("sweep_decode_h100.json", "sweep_short_h100.json"):
        for row in json.loads((RESULTS / name).read_text())["rows"]:
            times = found.setdefault((row["m"], row["n"], row["k"]), {})
            for key, ms in row["times"].items():
                of = config(key.split("|")[0])
                times[of] = min(times.get(of, math.inf), ms)
    return found


@pytest.fixture(scope="module")
def measured():
    return sweeps()


def regrets(measured, count):
    for shape, times in measured.items():
        first = sorted(times, key=lambda c: model.predict(c, shape))[:count]
        yield min(times[c] for c in first) / min(times.values())


@pytest.mark.parametrize(("count", "mean", "worst"), [(1, 1.03, 1.16), (8, 1.002, 1.02)])
def test_the_first_ones_hold_the_fastest(measured, count, mean, worst):
    found = list(regrets(measured, count))
    assert len(found) >= 30
    assert math.exp(sum(map(math.log, found)) / len(found)) <= mean
    assert max(found) <= worst


def test_a_predicted_time_is_near_the_measured_one_where_the_choice_is_made(measured):
    errors = [
        abs(math.log(model.predict(of, shape) / (ms * 1e3)))
        for shape, times in measured.items()
        for of, ms in times.items()
        if ms <= 1.1 * min(times.values())
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


def test_the_space_is_legal_and_large_and_its_parts_are_whole():
    everything = space.configurations(signature())
    assert len(everything) == len(set(everything)) > 2000
    shape = (512, 4096, 4096)
    first = space.ranked(signature(), shape, 40)
    assert len(first) == 40
    assert set(first) <= set(everything)
    times = [model.predict(c, shape) for c in first]
    assert times == sorted(times)
    # No two of them differ only in what the model cannot see, and what it cannot see is reachable.
    for of in first:
        others = space.variants(signature(), of)
        assert not set(others) & set(first)
        assert all(
            math.isclose(model.grid(o, shape, model.H100).rows, model.grid(of, shape, model.H100).rows) for o in others
        )
    assert any(o.threadblock.k != of.threadblock.k for of in first for o in space.variants(signature(), of))


def test_what_won_a_sweep_is_within_reach(measured):
    """Of thousands of configurations the first 80 hold the measured best, or one that the model cannot tell from it."""
    for shape, times in measured.items():
        best = min(times, key=times.get)
        near = space.ranked(signature(), shape, REACH)
        assert best in near or any(best in space.variants(signature(), c) for c in near), shape
