"""Kernels of ordinary loads for few rows: what they render to, and when they are chosen."""

import pytest
from signatures import A100, H100, signature

from cutlass_ops.choose import policies, space
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds.gemv import model as model_gemv
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.gemv.kind import GEMV
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.tuner import tuning

pytestmark = pytest.mark.usefixtures("session")


# ---- Choice --------------------------------------------------------------------------------------------------------


def test_it_takes_as_long_as_reading_b():
    weight = 2 * 28672 * 4096 / 3.1e6
    assert model_gemv.predict(GemvConfig(), Problem(1, 28672, 4096), 132) == pytest.approx(weight, rel=0.03)
    # Every further pass over B costs as much again, and so does much arithmetic.
    assert model_gemv.predict(GemvConfig(1), Problem(2, 28672, 4096), 132) > 1.9 * weight
    assert model_gemv.predict(GemvConfig(4), Problem(8, 28672, 4096), 132) > 1.9 * weight
    assert model_gemv.predict(GemvConfig(8, 8, 4), Problem(8, 28672, 4096), 132) == pytest.approx(weight, rel=0.1)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 16])
def test_few_rows_have_kernels_that_read_b_once(rows):
    found = space.fitting(signature(), Problem(rows, 6144, 4096), H100)
    assert len(found) >= 6
    assert all(c.rows >= rows and (c.rows < 2 * rows or c.rows == 8) for c in found)
    assert any(c.by_tile for c in found)
    assert set(found) <= set(space.legal(GEMV, signature(), H100))


@pytest.mark.slow
def test_many_rows_have_none():
    assert space.fitting(signature(), Problem(17, 6144, 4096), H100) == []
    assert all(isinstance(c, Sm90Config) for c in space.ranked(signature(), Problem(64, 6144, 4096), 40, H100))


@pytest.mark.parametrize(("device", "kind"), [(H100, Sm90Config), (A100, Sm80Config)])
def test_one_row_is_raced_with_both_kinds(device, kind):
    problem = Problem(1, 6144, 4096)
    (task,) = tuning.plan({signature(): [problem]}, device, tuning.Effort(kernels=24, candidates=24))
    assert {type(e.config) for e in task.entrants} == {GemvConfig, kind}
    assert next(e.config for e in task.entrants if isinstance(e.config, GemvConfig)).rows == 1


def test_a_refinement_looks_at_them_although_none_was_measured():
    problem = Problem(2, 6144, 4096)
    best = space.ranked(signature(), Problem(64, 6144, 4096), 1, H100)[0]
    table = Table(H100.name, 132, signature(), points=(Point(problem, "2026-11-22", (Measured(best, 20.0, 0.0),), ()),))
    effort = tuning.Effort(kernels=96, candidates=16, refine=True)
    (task,) = tuning.plan({signature(): [problem]}, H100, effort, {signature(): table})
    assert any(isinstance(e.config, GemvConfig) for e in task.entrants)


def test_deterministic_tuning_leaves_them_out():
    (task,) = tuning.plan({signature(): [Problem(1, 6144, 4096)]}, H100, tuning.Effort(), deterministic=True)
    assert not any(isinstance(e.config, GemvConfig) for e in task.entrants)


def test_without_any_table_an_ampere_takes_one_for_a_row():
    chosen = policies.policy(signature(), A100).choose(Problem(1, 8192, 8192))
    assert isinstance(chosen.config, GemvConfig)
    assert isinstance(policies.policy(signature(), A100).choose(Problem(512, 8192, 8192)).config, Sm80Config)
    assert not any(isinstance(c, GemvConfig) for c in policies.policy(signature(a=4, b=4), A100).kernels)


def test_they_serve_nothing_alone():
    """A second weight is legal for them, and not for kernels of Sm80: any number of rows would come to them."""
    gate = signature(composed.swiglu)
    assert space.legal(GEMV, gate, A100)
    assert policies.policy(gate, A100).kernels == ()
