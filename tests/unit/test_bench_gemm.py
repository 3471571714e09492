"""The benchmark's held-out mode: what it measures was not tuned, whatever ships."""

import pytest
from signatures import H100, signature

from cutlass_ops.choose import policies
from cutlass_ops.declare.problem import Problem
from tests.scripts import script

BENCH, SHAPES = script("bench_gemm"), script("shapes")
CASES = [BENCH.Case("grid", "bias_relu", "bf16", "row-col", *problem) for problem in SHAPES.GRID]


pytestmark = pytest.mark.usefixtures("session")


def tuned(problems):
    policy = policies.policy(signature(), H100)
    return [policy.choose(Problem(*problem)).source == "measured" for problem in problems]


def test_each_half_is_chosen_for_as_if_tuned_on_the_other_alone():
    first, second = BENCH.halves(CASES)
    problems = [[(c.m, c.n, c.k) for c in part.cases] for part in (first, second)]
    assert sorted(problems[0] + problems[1]) == sorted(SHAPES.GRID)
    between = [(m, n, k) for m, n, k in SHAPES.TUNING if (n, k) in SHAPES.WEIGHTS and (m, n, k) not in SHAPES.GRID]
    for part, mine, others in ((first, *problems), (second, *problems[::-1])):
        with part.known():
            assert not any(tuned([*mine, *between]))
            assert all(tuned(others))
        assert all(tuned([*mine, *between]))


def test_all_that_ships_counts_otherwise():
    with BENCH.Part(CASES).known():
        assert all(tuned(SHAPES.GRID))
