"""The choice of a kernel that takes means of A's rows, or has a second weight."""

from dataclasses import replace
from typing import get_args

import pytest
from choosing import ODD, SLOW, chosen, rows_of_a, user_table
from signatures import A100, H100, signature

import cutlass_ops as co
from cutlass_ops.choose import dispatch, policies, pool
from cutlass_ops.choose.tables import Measured
from cutlass_ops.declare.config import Means, Sm90Config
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90 import model, timer
from cutlass_ops.tuner.tuning import signature_at

pytestmark = pytest.mark.usefixtures("session")


def signature_of_graph(graph, problem, **changes):
    found = signature_at(graph, problem, "bf16", "row", "col", None, H100)
    return replace(found, **changes)


@pytest.mark.parametrize(("m", "means"), [(96, "gathered"), (64, "beside"), (1024, "beside"), (4096, "beside")])
def test_kernels_with_a_norm_have_the_times_of_those_without_and_what_means_take(m, means):
    problem = Problem(m, 4096, 4096)
    usual = policies.policy(signature_of_graph(builtin.bias_relu.graph, problem), H100)
    norm = policies.policy(signature_of_graph(composed.layer_norm.graph, problem), H100)
    best = next(c for c in usual.ranked(problem) if isinstance(c.config, Sm90Config) and c.config.whole_k)
    again = next(c for c in norm.ranked(problem) if c.config == replace(best.config, means=means))
    assert again.source == best.source == "measured"
    batch = model.Batch.of([again.config])
    later = model.means(batch, [problem], model.times(batch, [problem]))
    assert again.microseconds == pytest.approx(best.microseconds + later.item())
    assert norm.own is None
    assert not norm.peers(problem)


def test_measured_kernels_take_means_in_the_way_that_costs_their_tile_least():
    signature = signature_of_graph(composed.layer_norm.graph, Problem(1024, 4096, 4096))
    borrowed = policies._as_if_about(policies.reference(), signature, H100)
    kernels = [c for c in borrowed.kernels if isinstance(c, Sm90Config)]
    assert {c.means for c in kernels} == {"gathered", "beside", "ahead"}
    for config in kernels:
        assert not legality.check(H100.spec(signature, config))
        assert config.means == (timer.usual_means(config) if config.whole_k else "ahead"), config.slug
    assert any(rows_of_a(c) > 16 for c in kernels if c.means == "gathered")
    assert any(rows_of_a(c) < 128 for c in kernels if c.means == "beside")


@pytest.mark.parametrize("means", get_args(Means))
def test_a_table_about_a_norm_itself_is_taken_at_its_word(means):
    """Any way that was the fastest serves, at the time that was measured and no other."""
    of = signature(composed.rms_norm)
    ways = [replace(SLOW, means=means), *(replace(SLOW, means=way) for way in get_args(Means) if way != means)]
    times = [Measured(config, 10.0 + i, i / 10) for i, config in enumerate(ways)]
    user_table(*times, of=of)
    assert chosen(ODD, of)[0].config == ways[0]
    best, *_ = policies.policy(of, H100).ranked(ODD, count=3)
    assert (best.config, best.microseconds, best.source) == (ways[0], 10.0, "measured")


def test_where_neither_main_loop_nor_idle_warps_can_a_kernel_before_does_and_counts():
    problem = Problem(1024, 4096, 4096)
    misaligned = signature_of_graph(composed.rms_norm.graph, problem, d=Operand.of("bf16.row.align1"))
    policy = policies.policy(misaligned, H100)
    assert policy.kernels
    assert {c.means for c in policy.kernels if isinstance(c, Sm90Config)} == {"ahead"}
    ahead = policy.ranked(problem, count=1)[0]
    usual = policies.policy(signature_of_graph(composed.rms_norm.graph, problem), H100).ranked(problem, count=1)[0]
    assert usual.config.means == "beside"
    assert ahead.microseconds > usual.microseconds + 1


@co.epilogue
def gated_by_relu(acc, up: co.Product):
    """Of which no table ships."""
    return co.relu(acc) * up


def test_two_weights_take_as_long_as_one_of_twice_the_columns():
    one, two = Problem(1024, 6144, 4096), Problem(1024, 3072, 4096)  # at which no table of gates was measured
    gate = policies.policy(signature_of_graph(gated_by_relu.graph, two), H100)
    usual = policies.policy(signature_of_graph(builtin.bias_relu.graph, one), H100)
    best = gate.ranked(two, count=1)[0]
    known = {c.config: c.microseconds for c in usual.ranked(one)}
    assert best.source == "measured"
    assert best.microseconds == known[best.config]
    assert not any(legality.check(H100.spec(gate.signature, c)) for c in gate.kernels)


def test_two_weights_between_measured_shapes_are_predicted_as_one_twice_as_wide():
    policy = policies.policy(signature_of_graph(composed.swiglu.graph, Problem(300, 5000, 4096)), H100)
    wide = policy.ranked(Problem(300, 5000, 4096), count=1)[0].microseconds
    half = policy.ranked(Problem(300, 2504, 4096), count=1)[0].microseconds
    assert 1.5 * half < wide < 2.6 * half


def test_a_pool_for_two_weights_counts_the_columns_of_both():
    one, two = Problem(1000, 5008, 4096), Problem(1000, 2504, 4096)
    gate = policies.policy(signature_of_graph(composed.swiglu.graph, two), H100)
    both = pool.Pool.of(gate.kernels, gate.signature)
    single = replace(both, traits=replace(both.traits, weights=1))
    assert both.traits.weights == 2
    assert (both.times([two], H100) == single.times([one], H100)).all()
    assert (both.tiles([two]) == single.tiles([one])).all()


def test_sm80_serves_norms_and_refuses_two_weights():
    problem = Problem(256, 1024, 1024)
    norm = signature_at(composed.rms_norm.graph, problem, "bf16", "row", "col", None, A100)
    assert dispatch.specs(norm, A100)
    gate = signature_at(composed.swiglu.graph, problem, "bf16", "row", "col", None, A100)
    assert not dispatch.specs(gate, A100)
