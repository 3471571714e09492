"""The choice of a kernel: by measurement where there is one, few and legal kernels, the right kind for the shape."""

import json
import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from choosing import ODD, SLOW, chosen, rows_of_a, user_table
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100, H200, signature, statistics

import cutlass_ops as co
from cutlass_ops.base import resources
from cutlass_ops.base.dtypes import FP8
from cutlass_ops.choose import dispatch, policies, pool, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import ClusterShape, GemvConfig, Sm80Config, Sm90Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80 import space as space_sm80
from cutlass_ops.kinds.sm90 import model, timer
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.kinds.traits import Traits
from cutlass_ops.run import norms, ops
from cutlass_ops.run.named import gemm_residual
from cutlass_ops.tuner.tuning import signature_at
from tests.sampling import sampled
from tests.scripts import script
from tests.strategies import PATIENT

SHAPES = script("shapes")
GRID = [Problem(*shape) for shape in SHAPES.GRID]
ship_table = script("ship_table")
MAJORS = [(a, b) for a in ("row", "col") for b in ("row", "col")]
MOST = tables.MOST_KERNELS


pytestmark = pytest.mark.usefixtures("session")


def named(value):
    """A part of a test's name."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else getattr(value, "name", value)


def shipped():
    return tables.load(tables.path_of(resources.tuned(), H100.name, signature()))


# ---- What ships --------------------------------------------------------------------------------------------------


def test_every_table_that_ships_is_whole_and_where_it_is_looked_for(monkeypatch):
    # Each is compared with all the others.
    monkeypatch.setattr(tables, "load", lru_cache(maxsize=None)(tables.load))
    found = sorted(resources.tuned().glob("*.json"))
    assert found
    for path in found:
        table = tables.load(path)
        assert path == tables.path_of(path.parent, table.device, table.signature)
        assert 0 < len(table.kernels) <= MOST
        epilogue = table.signature.epilogue
        of_rows = epilogue.gathered or epilogue == norms.rmsnorm_op(given="sums").graph
        wanted = SHAPES.GATES if epilogue.products else SHAPES.NORMS if of_rows else SHAPES.GRID
        if epilogue in (gemm_residual.graph, norms.residual_rms_op(torch.bfloat16).graph):
            wanted = SHAPES.RESIDUALS
        if table.signature.a.dtype in FP8:
            gates = [shape for shape in SHAPES.FP8_GATES if shape[0] > 64 and shape[2] == 4096]
            wanted = gates if epilogue.products else SHAPES.FP8
            if "row_sum_square" in (*(i.name for i in epilogue.inputs), *(o.name for o in epilogue.outputs)):
                of_pairs = SHAPES.FP8_QKV if epilogue.swaps_pairs else SHAPES.FP8_ADDED
                wanted = SHAPES.FP8_UP if epilogue.products else of_pairs
        if table.signature.a.major == "col":
            wanted = sorted({*SHAPES.GRID} & {*SHAPES.MAJORS})
        assert set(wanted) <= {p.problem.extents for p in table.points}
        known = ship_table.timed(resources.tuned(), table)
        assert not [c.slug for c in table.kernels if ship_table.untold(c, known)]


def loss(table, problem, config):
    point = next(p for p in table.points if p.problem == problem)
    return next(m.behind for m in point.measured if m.config == config)


def test_the_grid_needs_few_kernels_and_loses_little():
    table = shipped()
    picked = {p: chosen(p)[0].config for p in GRID}
    assert len(set(picked.values())) <= tables.MAX_KERNELS
    losses = [loss(table, p, c) for p, c in picked.items()]
    assert math.prod(1 + x for x in losses) ** (1 / len(losses)) < 1.01
    assert max(losses) < 0.05


def without(table, problems):
    return replace(table, points=tuple(p for p in table.points if p.problem not in problems))


def test_problems_that_were_not_measured_lose_little_either(tmp_path):
    """Half of the problems decide for the other half, and the other way round."""
    table, losses = shipped(), []
    problems = [p.problem for p in table.points]
    for parity in (0, 1):
        left_out = set(problems[parity::2])
        policy = policies.Policy.of([without(table, left_out)], signature(), H100, table.kernels)
        for point in table.points:
            measured = {m.config: m.behind for m in point.measured}
            if point.problem in left_out and measured.keys() & set(policy.kernels):
                best = policy.ranked(point.problem, measured.keys() & set(policy.kernels))[0].config
                losses.append(measured[best])
    assert len(losses) > 250
    assert math.prod(1 + x for x in losses) ** (1 / len(losses)) < 1.04


def test_an_h200_has_its_own_grid_and_an_h100s_kernels_elsewhere():
    policy = policies.policy(signature(), H200)
    assert {p.problem for p in policy.own.points} >= set(GRID)
    grid = {policy.choose(p).config for p in GRID}
    assert all(policy.choose(p).source == "measured" for p in GRID[::7])
    assert len(set(grid)) <= tables.MAX_KERNELS
    assert set(policy.kernels) >= set(shipped().kernels)
    other = policies.policy(signature(builtin.bias_gelu, "f16"), H200)
    assert [t.device for t in other.tables] == [H200.name, H100.name]
    best = next(p for p in policy.own.points if p.problem == GRID[0]).measured[0]
    assert other.choose(GRID[0]).microseconds == pytest.approx(best.microseconds)


@co.epilogue
def shifted(acc, bias: co.Row):
    return acc - bias


def test_signatures_of_the_same_traits_and_kernels_share_what_is_known_and_each_has_its_own_kernels():
    policies.forget(shipped=True)  # a policy is kept longer than what is known
    first, other = (policies.policy(signature(of), H100) for of in (shifted, builtin.bias))
    assert first.knowledge is other.knowledge
    assert first.weight_of(4096, 4096, 1).steps is other.weight_of(4096, 4096, 1).steps
    for policy in (first, other):
        (spec,) = {s.epilogue for s in policy.weight_of(4096, 4096, 1).specs.values()}
        assert spec == policy.signature.epilogue
    # A wider D takes longer, as do a smaller chip and an epilogue that computes longer.
    wide = policies.policy(signature(builtin.bias, d_dtype="f32"), H100)
    small = policies.policy(signature(builtin.bias), replace(H100, multiprocessors=114))
    longer = policies.policy(signature(builtin.bias_gelu), H100)
    assert len({id(p.knowledge) for p in (first, wide, small, longer)}) == 4
    policies.forget(shipped=True)
    assert policies.policy(signature(builtin.bias), H100).knowledge is not first.knowledge


# ---- What is measured decides ------------------------------------------------------------------------------------

FAST = Sm90Config(ThreadblockShape(128, 192, 64), ClusterShape(2, 1))


def test_what_the_user_measured_is_taken_with_its_order_of_tiles():
    for fast, slow in ((FAST, SLOW), (SLOW, FAST)):
        order = TileOrder("along_m", swizzle=4)
        user_table(Measured(fast, 10.0, 0.0, order), Measured(slow, 20.0, 1.0))
        spec, taken = chosen(ODD)
        assert (spec.config, taken) == (fast, order)
        found = policies.policy(signature(), H100).choose(ODD)
        assert (found.source, found.microseconds) == ("measured", 10.0)


@pytest.mark.parametrize(
    ("microseconds", "behind", "first"), [(200.0, 0.004, FAST), (200.0, 0.006, SLOW), (20.0, 0.004, SLOW)]
)
def test_of_long_kernels_that_are_equally_fast_the_one_with_the_largest_tile_is_taken(microseconds, behind, first):
    user_table(Measured(SLOW, microseconds, 0.0), Measured(FAST, microseconds * (1 + behind), behind))
    (best,) = policies.policy(signature(), H100).ranked(ODD, count=1)
    assert best.config == first


@pytest.mark.parametrize(
    ("allowed", "peer", "expected"), [(True, 9.0, "eager"), (True, 9.95, None), (True, 11.0, None), (False, 5.0, None)]
)
def test_a_peer_is_taken_only_where_it_was_clearly_faster_and_that_is_allowed(allowed, peer, expected):
    point = Point(ODD, "2026-11-21", (Measured(FAST, 10.0, 0.0),), (("cublaslt", 20.0), ("eager", peer)))
    table = Table(H100.name, 132, signature(), (point,), fallback=allowed).select()
    tables.update(tables.path_of(policies.env.tuning_dir(), H100.name, signature()), table)
    policies.forget()
    policy = policies.policy(signature(), H100)
    assert policy.fallback(ODD) == expected
    assert policy.fallback(ODD._replace(m=641)) is None
    # For another epilogue the same peer says nothing.
    assert policies.Policy.of([table], signature(builtin.bias_gelu), H100, table.kernels).fallback(ODD) is None


def test_after_deterministic_tuning_no_kernel_splits_k_at_any_shape():
    of, other = signature(), signature(builtin.bias_gelu)
    split = Sm90Config(ThreadblockShape(64, 64, 64), schedule="warp_specialized", split_k=8)
    points = (Point(ODD, "2026-11-21", (Measured(split, 10.0, 0.0), Measured(SLOW, 20.0, 1.0))),)
    table = Table(H100.name, 132, of, points, deterministic=True).select()
    assert table.kernels == (SLOW,)
    tables.update(tables.path_of(policies.env.tuning_dir(), H100.name, of), table)
    policies.forget()
    assert policies.policy(of, H100).choose(ODD).config == SLOW
    assert all(c.whole_k for c in policies.policy(of, H100).kernels)
    assert len(policies.policy(of, H100).kernels) > 40
    assert not all(c.whole_k for c in policies.policy(other, H100).kernels)


@pytest.mark.parametrize("alignment", [1, 2])
def test_after_deterministic_tuning_no_sm80_kernel_splits_k_either(alignment):
    of = signature(a=alignment, b=alignment, d=alignment)
    assert not all(c.whole_k for c in policies.policy(of, H100).kernels)
    table = Table(H100.name, 132, of, deterministic=True)
    tables.update(tables.path_of(policies.env.tuning_dir(), H100.name, of), table)
    policies.forget()
    assert policies.policy(of, H100).kernels
    assert all(c.whole_k for c in policies.policy(of, H100).kernels)


def test_what_was_measured_speaks_for_its_neighbours():
    for rows in (624, 632, 640):  # one measurement does not outweigh the model
        user_table(Measured(SLOW, 1.0, 0.0), Measured(FAST, 10.0, 9.0), problem=ODD._replace(m=rows))
    policy = policies.policy(signature(), H100)
    (near,), (far,) = policy.ranked(Problem(648, 4224, 4032), [SLOW]), policy.ranked(Problem(8192, 8192, 8192), [SLOW])
    assert near.source == "interpolated"
    model = pool.predict(SLOW, Problem(648, 4224, 4032), H100)
    assert near.microseconds < model / 4
    assert far.source == "model"
    assert far.microseconds == pytest.approx(pool.predict(SLOW, Problem(8192, 8192, 8192), H100), rel=0.1)


def test_where_the_model_promises_too_much_a_kernel_of_which_nothing_is_known_is_not_believed():
    known = Sm90Config(ThreadblockShape(128, 96, 64), ClusterShape(2, 1), schedule="pingpong")
    unknown = replace(known, threadblock=ThreadblockShape(128, 128, 64))
    fast, slower = (pool.predict(c, ODD, H100) for c in (known, unknown))
    assert 1.2 * fast < slower < 1.3 * fast
    problems = [ODD._replace(m=rows) for rows in (616, 624, 632, 648, 656, 664)]
    # Half as fast again as foretold, near by: more than the other is foretold to take there.
    points = tuple(
        Point(p, "2026-11-24", (Measured(known, 1.5 * pool.predict(known, p, H100), 0.0),)) for p in problems
    )
    policy = policies.Policy.of([Table(H100.name, 132, signature(), points)], signature(), H100, (known, unknown))
    first, second = policy.ranked(ODD)
    assert (first.config, first.source, second.source) == (known, "interpolated", "model")
    assert second.microseconds > 1.3 * slower
    # Far away, the model's word stands.
    far = Problem(32, 1024, 512)
    expected = {c.config: c.microseconds for c in policy.ranked(far)}
    assert expected[unknown] == pytest.approx(pool.predict(unknown, far, H100), rel=0.01)


def test_another_device_or_signature_has_its_own_measurements():
    user_table(Measured(SLOW, 10.0, 0.0), device="NVIDIA H200")
    assert chosen(ODD)[0].config != SLOW
    assert chosen(ODD, device=replace(H100, name="NVIDIA H200"))[0].config == SLOW


def test_a_users_table_that_is_none_is_left_out_and_said_to_be():
    user_table(Measured(SLOW, 10.0, 0.0))
    tables.path_of(policies.env.tuning_dir(), H100.name, signature()).write_text("{")
    policies.forget()
    with pytest.warns(RuntimeWarning, match=r"ignored: .*is not a tuning table.* tune again"):
        assert chosen(ODD)[0].config != SLOW


def test_an_epilogue_that_was_not_measured_borrows():
    policy = policies.policy(signature(builtin.bias_gelu, "f16"), H100)
    assert policy.own is None
    assert policies.policy(signature(), H100).own
    assert policy.choose(Problem(4096, 4096, 4096)).source == "measured"


@co.epilogue
def geglu(acc, up: co.Product):
    return co.gelu(acc) * up


@pytest.mark.parametrize(
    ("case", "dtype"),
    sampled(
        3,
        (
            (norms.rmsnorm_op(builtin.bias_silu), norms.rmsnorm_op(), Problem(4096, 6144, 4096)),
            (norms.layernorm_op(), norms.rmsnorm_op(), Problem(4096, 6144, 4096)),
            (ops.op(geglu), ops.op(composed.swiglu), Problem(4096, 14336, 4096)),
            (norms.rmsnorm_op(geglu), norms.rmsnorm_op(composed.swiglu), Problem(4096, 14336, 4096)),
        ),
        ("bf16", "f16"),
    ),
)
def test_what_follows_a_norm_or_gates_borrows_from_what_was_measured_of_these(case, dtype):
    op, like, problem = case
    measured = policies.policy(signature_at(like.graph, problem, "bf16", "row", "col", None, H100), H100)
    policy = policies.policy(signature_at(op.graph, problem, dtype, "row", "col", None, H100), H100)
    assert measured.own
    assert policy.own is None
    found, theirs = policy.choose(problem), measured.choose(problem)
    assert (found.config, found.order, found.source) == (theirs.config, theirs.order, theirs.source)
    assert found.microseconds == pytest.approx(theirs.microseconds, rel=0.005)  # GELU computes longer than SiLU


@pytest.mark.parametrize(
    ("epilogue", "dtype", "majors"),
    sampled(
        5,
        (builtin.bias_relu, builtin.bias_gelu, composed.rms_norm),
        ("bf16", "f16"),
        [m for m in MAJORS if m != ("row", "col")],
    ),
    ids=named,
)
def test_epilogues_of_other_majors_borrow_from_plain_gemm_of_these_and_no_other(epilogue, dtype, majors):
    problem = Problem(512, 4096, 4096)
    plain = policies.policy(signature(builtin.identity, majors=majors), H100)
    policy = policies.policy(signature(epilogue, dtype, majors=majors), H100)
    assert plain.own
    assert policy.own is None
    best = plain.choose(problem)
    found = policy.choose(problem)
    assert (best.source, found.source) == ("measured", "measured")
    assert found.config.threadblock == best.config.threadblock
    tiles = {c.threadblock for c in plain.own.kernels}
    assert tiles == {c.threadblock for c in plain.kernels} >= {c.threadblock for c in policy.kernels}


@pytest.mark.parametrize(
    ("of", "near"),
    [
        (signature(builtin.bias_gelu, majors=("col", "row")), signature(builtin.identity, majors=("col", "row"))),
        (
            signature_at(norms.layernorm_op().graph, Problem(512, 4096, 4096), "bf16", "row", "col", None, H100),
            signature_at(norms.rmsnorm_op().graph, Problem(512, 4096, 4096), "bf16", "row", "col", None, H100),
        ),
    ],
    ids=["col-row", "norm"],
)
def test_what_is_borrowed_is_the_devices_own_first(of, near, tmp_path, monkeypatch):
    here = [t.device for t in policies.policy(of, H200).tables]
    assert here == [H100.name, H200.name, H100.name]
    for path in resources.tuned().glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    of_h100 = tables.load(tables.path_of(resources.tuned(), H100.name, near))
    of_h200 = replace(of_h100, device=H200.name)
    tables.path_of(tmp_path, H200.name, near).write_text(json.dumps(of_h200.to_json()))
    monkeypatch.setattr(resources, "tuned", lambda: tmp_path)
    forget()
    try:
        assert [t.device for t in policies.policy(of, H200).tables] == [H200.name, H100.name, H200.name, H100.name]
    finally:
        forget()


def forget():
    policies.forget(shipped=True)
    policies._shipped.cache_clear()


def test_stream_k_has_to_be_ahead_to_be_chosen_unless_it_was_measured():
    of, problem = signature(builtin.bias_relu), Problem(1300, 3584, 18944)
    whole = Sm90Config(ThreadblockShape(128, 192, 64), schedule="cooperative")
    configs = (whole, replace(whole, scheduler="stream_k"))
    foretold = pool.Pool.of(configs, of).times([problem], H100)
    expected = policies.Policy.of((), of, H100, configs).expected([problem]).times
    assert (expected / foretold).tolist()[0] == pytest.approx([1.0, 1.03])
    times = tuple(Measured(c, 10.0 + at, at / 10) for at, c in enumerate(configs))
    table = Table(H100.name, H100.multiprocessors, of, (Point(problem, "2026-11-23", times),), configs)
    measured = policies.Policy.of([table], of, H100, configs).expected([problem]).times
    assert measured.tolist()[0] == pytest.approx([10.0, 11.0])


def test_an_extent_of_more_than_32_bits_is_refused_in_words():
    assert dispatch.decide(signature(), H100, Problem(2**31 - 1, 16, 16)) is not None
    for extents in ((2**31, 16, 16), (16, 2**31, 16), (16, 16, 2**31)):
        with pytest.raises(co.UnsupportedError, match=r"is too large to launch: .* Split the call"):
            dispatch.decide(signature(), H100, Problem(*extents))


def test_a_problem_at_which_no_kernel_can_be_launched_is_refused_in_words():
    """A kernel that is not persistent has a thread block for each tile, and a grid only so many along N."""
    kernel = Sm90Config(ThreadblockShape(64, 64, 64), schedule="warp_specialized")
    policy = policies.Policy.of((), signature(), H100, [kernel])
    assert policy.choose(Problem(64, 4096, 4096)).config == kernel
    with pytest.raises(co.UnsupportedError, match=r"can be launched at M=64 N=4480000 K=4096: .* Split the call"):
        policy.choose(Problem(64, 4480000, 4096))
    nothing = policies.Policy.of((), signature(), H100, [])
    with pytest.raises(co.UnsupportedError, match=r"can be launched at M=64 N=64 K=64"):
        nothing.choose(Problem(64, 64, 64))


def test_what_an_epilogue_was_tuned_for_takes_nothing_from_what_it_borrows_elsewhere():
    of, problem = signature(builtin.bias_gelu), Problem(4096, 4096, 4096)
    elsewhere = [*GRID, Problem(640, 5120, 4096)]
    before = {p: chosen(p, of) for p in elsewhere if p != problem}
    assert chosen(problem, of)[0].config != SLOW
    user_table(Measured(SLOW, 10.0, 0.0), problem=problem, of=of)
    assert chosen(problem, of)[0].config == SLOW
    assert {p: chosen(p, of) for p in before} == before
    assert policies.policy(of, H100).peers(problem) == {}
    assert chosen(problem)[0].config != SLOW


def test_a_user_table_of_sm80_kernels():
    of = signature(a=1, b=1, d=1)
    problem = Problem(4096, 4097, 4097)
    large = space_sm80.UNTUNED_UNALIGNED[1]
    small = Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 64, 32), stages=2)
    assert small not in space_sm80.UNTUNED_UNALIGNED
    user_table(Measured(small, 10.0, 0.0), Measured(large, 11.0, 0.1), problem=problem, of=of)
    assert chosen(problem, of)[0].config == small


@pytest.mark.parametrize(("a", "b"), [(1, 8), (8, 1), (1, 1), (2, 8), (8, 4)])
def test_what_reads_operands_that_tma_cannot(a, b):
    specs = [s for s in dispatch.specs(signature(a=a, b=b, d=1), H100) if s.sm80]
    assert specs
    # sm_80 machine code does not run on Hopper.
    assert {s.target for s in specs} == {"sm_90"}
    for spec in specs:
        # cp.async copies 4 bytes and more; narrower loads leave two stages.
        assert spec.config.stages == 2 if min(a, b) == 1 else spec.config.stages > 2
        assert not legality.check(spec)


@pytest.mark.parametrize(
    ("epilogue", "alignments"),
    sampled(2, (builtin.identity, builtin.bias_relu, composed.swiglu, composed.rms_norm), ((1, 1), (8, 1), (2, 8))),
    ids=named,
)
def test_operands_that_tma_cannot_read_are_copied_where_that_is_little(epilogue, alignments):
    a, b = alignments
    of = signature(epilogue, a=a, b=b, d=8)
    assert isinstance(chosen(Problem(4096, 4096, 4097), of)[0].config, Sm90Config)
    policy = policies.policy(of, H100)
    for config in policy.kernels:
        assert isinstance(config, Sm80Config) or config.realign
    # What aligned operands took is no measurement of these, not even at the same extents.
    assert policy.choose(Problem(4096, 4096, 4096)).source != "measured"
    aligned = policies.policy(signature(epilogue, d=8), H100).choose(Problem(4096, 4096, 4096))
    weights = 1 + len(of.epilogue.products)
    copies = timer.realigning(Traits.of(of), [Problem(4096, weights * 4096, 4096)]).item()
    expected = policy.choose(Problem(4096, 4096, 4096)).microseconds
    assert 0.9 * aligned.microseconds + copies < expected < 1.1 * aligned.microseconds + copies


def test_copies_leave_the_columns_of_a_table_as_they_are():
    aligned, odd = (policies.policy(signature(composed.swiglu, b=b), H100).tables[0] for b in (8, 1))
    assert {p.problem for p in odd.points} == {p.problem for p in aligned.points}
    assert len(odd.points) > 10


@pytest.mark.parametrize(
    ("epilogue", "problem", "majors"),
    sampled(
        5,
        (builtin.identity, builtin.bias_relu),
        (Problem(1024, 50257, 4096), Problem(4096, 50257, 768), Problem(4096, 4097, 4096)),
        MAJORS,
    ),
    ids=named,
)
def test_a_d_with_odd_lines_is_computed_transposed(epilogue, problem, majors):
    """4096x50257x768 took 1377 us with 128x208 tiles and 623 us with 192x128 ones, swapped (benchmarks/NOTES.md)."""
    config = chosen(problem, signature(epilogue, majors=majors, b=8 if majors[1] == "col" else 1, d=1))[0].config
    assert config.swap_ab


def test_scattered_stores_of_d_count_beside_what_was_measured_without():
    problem = Problem(4096, 4096, 4096)
    aligned, odd = (policies.policy(signature(d=d), H100) for d in (8, 1))
    assert aligned.choose(problem).source == "measured"
    assert odd.own is None
    # What an aligned D took is no measurement of this one, not even at the same extents.
    assert odd.choose(problem).source == "interpolated"
    assert odd.choose(problem).config.swap_ab
    before, after = ({c: us for us, c in _times(policy, problem)} for policy in (aligned, odd))
    assert before.keys() == after.keys()
    assert any(c.swap_ab for c in before)
    stored = model.scattering([problem]).item()
    assert 40 < stored < 80
    for config, us in before.items():
        assert after[config] == pytest.approx(us if config.swap_ab else us + stored, rel=1e-3)


def _times(policy, problem):
    """Return what a policy's first table says of kernels at a problem: microseconds and kernels."""
    measured = policy.tables[0].at(problem).measured
    best = measured[0].microseconds
    return [(best * (1 + m.behind), m.config) for m in measured]


def test_a_reduction_copies_its_operands_too():
    assert chosen(Problem(4096, 4096, 4097), signature(statistics, a=1))[0].config.realign


def test_of_few_rows_a_weight_is_not_copied():
    assert isinstance(chosen(Problem(1, 4096, 4097), signature(a=1, b=1, d=8))[0].config, Sm80Config)
    assert isinstance(chosen(Problem(1, 4096, 4097), signature(a=1, b=8, d=8))[0].config, Sm90Config)


def test_an_a100_copies_nothing():
    policy = policies.policy(signature(a=1, b=1, d=1), A100)
    assert {type(c) for c in policy.kernels} == {Sm80Config}


# ---- Any shape ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [(3417, 1024, 8448), *SHAPES.LAST[::4]])
def test_between_the_rows_for_which_a_weight_keeps_kernels_one_of_them_is_as_good(problem):
    """A tile may be one wave for a hundred numbers of rows and two beyond: 256x104 at 3417 rows of 1024 columns."""
    policy, problem = policies.policy(signature(), H100), Problem(*problem)
    serves, best = policy.choose(problem), policy.ranked(problem, count=1)[0]
    assert serves.microseconds <= 1.02 * best.microseconds


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 8192), (4096, 14336), (136, 72), (50257, 768)])
def test_every_number_of_rows_is_served_by_the_kernels_of_its_weight(n, k):
    of = signature(d=8 if n % 8 == 0 else 1)
    built = dispatch.specs_for(of, H100, n, k)
    rows = sorted({*range(1, 257, 5), *range(257, 8193, 127), 16384, 1 << 20})
    used = {dispatch.choose(of, H100, Problem(m, n, k))[0] for m in rows}
    assert used <= set(built)
    assert len(built) <= 48
    assert set(built) <= set(dispatch.specs(of, H100))


@PATIENT
@given(m=st.integers(1, 1 << 26), n=st.integers(1, 1 << 20), k=st.integers(1, 1 << 16))
@pytest.mark.parametrize("device", [H100, A100, Device((8, 9), 142)])
def test_any_shape_gets_a_legal_kernel_of_its_signature(device, m, n, k):
    of = signature()
    spec, order = chosen(Problem(m, n, k), of, device)
    assert spec in dispatch.specs(of, device)
    assert not legality.check(spec)
    assert spec.config.refuses(order) is None


@pytest.mark.parametrize(
    ("epilogue", "dtype", "majors"),
    sampled(5, (*builtin.BY_OP.values(), statistics), ("bf16", "f16"), MAJORS),
    ids=named,
)
def test_every_signature_has_kernels_for_few_rows_and_for_many(epilogue, dtype, majors):
    of = signature(epilogue, dtype, majors)
    for capability in [(9, 0), (8, 0), (8, 6), (8, 9)]:
        specs = dispatch.specs(of, Device(capability, 100))
        assert len(set(specs)) == len(specs)
        assert 2 <= len(specs) <= MOST
        assert not any(legality.check(s) for s in specs)
    kinds = {type(s.config) for s in dispatch.specs(of, H100)}
    # Ordinary loads are for what was measured to gain by them: columns of B along K, and one product.
    assert Sm90Config in kinds
    assert kinds <= {Sm90Config, GemvConfig}
    assert Sm80Config not in kinds


@pytest.mark.parametrize("d_dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("d", [1, 2, 4, 8])
def test_any_alignment_and_dtype_of_d_can_be_served_by_tma(d, d_dtype):
    of = signature(builtin.bias_relu_residual, d=d, d_dtype=d_dtype)
    assert {type(s.config) for s in dispatch.specs(of, H100)} == {Sm90Config, GemvConfig}


@pytest.mark.parametrize("m", [1, 2, 8, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (6144, 4096)])
def test_few_rows_fill_what_is_multiplied_at_a_time(m, n, k):
    config = chosen(Problem(m, n, k))[0].config
    assert m > 8 or isinstance(config, GemvConfig)
    # More would multiply rows that are not there.
    assert m <= rows_of_a(config) <= max(8, 2 * m)


@pytest.mark.parametrize(("a", "b"), MAJORS)
@pytest.mark.parametrize("shape", [(8192, 4096, 4096), (4096, 28672, 4096), (256, 4096, 14336), (64, 4096, 14336)])
def test_tiles_whose_adjacent_elements_are_many_are_copied_in_wide_rows(a, b, shape):
    """Even where they were measured for other majors, tiles of 144, 176 or 200 would be copied in rows of 16 or 8."""
    tile, _ = chosen(Problem(*shape), signature(majors=(a, b)))[0].config.along_problem
    if a == "col" and shape[0] > 64:
        assert tile[0] % 32 == 0
    if b == "row":
        assert tile[1] % 32 == 0


@pytest.mark.parametrize("m", [512, 4096, 8192])
def test_many_rows_use_large_tiles(m):
    tile = chosen(Problem(m, 8192, 8192))[0].config.threadblock
    assert tile.m * tile.n >= 128 * 96


@pytest.mark.parametrize("side", ["m", "n", "k"])
def test_more_work_is_never_predicted_to_be_much_faster(side):
    configs = (*space_sm80.UNTUNED, *space_sm80.UNTUNED_UNALIGNED, *shipped().kernels)
    problems = [Problem(4096, 4096, 4096)._replace(**{side: extent}) for extent in (512, 1024, 4096, 16384)]
    times = pool.Pool(configs).times(problems, H100)
    slower = (times[1:] >= 0.9 * times[:-1]).all(0)
    assert [c for c, fine in zip(configs, slower, strict=True) if not fine] == []


@pytest.mark.parametrize("shape", [(64, 8_400_000, 64), (1, 16_800_000, 8), (8_388_608, 16, 1024)])
def test_no_grid_is_larger_than_the_hardware_allows(shape):
    config = chosen(Problem(*shape))[1]
    if isinstance(config, Sm90Config):
        columns = shape[0] if config.swap_ab else shape[1]
        assert config.schedule != "warp_specialized" or columns / config.threadblock.n <= 65535


@pytest.mark.parametrize(
    ("capability", "a", "b", "expected"),
    [((9, 0), 8, 8, True), ((9, 0), 4, 8, False), ((9, 0), 8, 4, False), ((8, 0), 8, 8, False), ((10, 0), 8, 8, False)],
)
def test_tma_takes_both_operands_aligned_and_a_hopper(capability, a, b, expected):
    of = signature(a=a, b=b)
    assert Device(capability, 100).loads_by_tma(of.a, of.b) is expected


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_older_devices_get_kernels_for_their_own_target(capability):
    specs = dispatch.specs(signature(), Device(capability, 100))
    assert {s.target for s in specs} == {f"sm_{capability[0]}{capability[1]}"}
    assert {type(s.config) for s in specs} == {Sm80Config, GemvConfig}


def test_a_choice_is_the_decisions_kernel():
    for problem in (Problem(1, 4096, 4096), ODD):
        decision = dispatch.decide(signature(), H100, problem)
        assert chosen(problem) == (decision.spec, decision.order)
    with pytest.raises(co.UnsupportedError, match=r"no kernel supports a GEMM of a bf16\.row, .* capability 10\.0"):
        chosen(ODD, device=Device((10, 0), 148, "NVIDIA B200"))


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_a_device_without_a_target_has_no_candidates(capability):
    assert dispatch.specs(signature(), Device(capability, 100)) == ()


CLUSTERED = Sm90Config(ThreadblockShape(128, 192, 64), ClusterShape(2, 1))


@pytest.mark.parametrize(
    ("cluster", "rasters"),
    [((2, 1), {"along_n"}), ((1, 2), {"along_m"}), ((1, 1), {"along_m", "along_n"}), ((2, 2), {"along_m", "along_n"})],
)
def test_runs_of_tiles_of_a_gpc_share_the_operand_that_is_not_multicast(cluster, rasters):
    config = replace(CLUSTERED, cluster=ClusterShape(*cluster))
    one_wave = kind_of(config).orders(config, Problem(1024, 1024, 4096), H100)
    assert {c.raster for c in one_wave if c.by_gpc} == rasters
    assert {c.raster for c in one_wave if not c.by_gpc} == {"along_m", "along_n"}
    assert len(set(one_wave)) == len(one_wave)


def test_long_problems_are_not_tried_by_gpc():
    assert not any(c.by_gpc for c in kind_of(CLUSTERED).orders(CLUSTERED, Problem(8192, 8192, 8192), H100))


def test_a_kernel_without_an_order_of_tiles_is_tried_in_none():
    single = replace(CLUSTERED, threadblock=ThreadblockShape(64, 128, 64), schedule="warp_specialized")
    assert kind_of(single).orders(single, Problem(1024, 1024, 4096), H100) == []


def test_a_weight_beyond_the_cache_is_read_once_where_the_rows_stay_in_it():
    assert CLUSTERED.usual_order(Problem(768, 28672, 4096)).raster == "along_m"
    assert CLUSTERED.usual_order(Problem(8192, 28672, 4096)).raster == "along_n"


def test_new_rows_come_last_where_idle_warps_have_yet_to_read_them():
    for swapped, raster in ((False, "along_n"), (True, "along_m")):
        for along_m, along_n in ((1, 2), (2, 1)):
            cluster = ClusterShape(along_m, along_n)
            beside = replace(CLUSTERED, cluster=cluster, swap_ab=swapped, means="beside")
            assert beside.usual_order(Problem(3072, 2560, 2560)).raster == raster
    # But no operand is read again from memory for it.
    without, beside = (replace(CLUSTERED, means=means) for means in ("gathered", "beside"))
    for problem in (Problem(768, 28672, 4096), Problem(8192, 28672, 4096)):
        assert beside.usual_order(problem).raster == without.usual_order(problem).raster


def test_the_order_of_tiles_is_no_part_of_the_kernel():
    shapes = [Problem(m, n, 4096) for m in range(64, 8192, 191) for n in (4096, 8192, 28672)]
    found = [chosen(shape) for shape in shapes]
    assert len(set(found)) > len({spec for spec, _ in found})
