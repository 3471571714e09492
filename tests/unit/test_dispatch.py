"""The choice of a kernel: by measurement where there is one, few and legal kernels, the right kind for the shape."""

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from choosing import ODD, SLOW, chosen, user_table
from hypothesis import given
from hypothesis import strategies as st
from signatures import A100, H100, signature, statistics

import cutlass_ops as co
from cutlass_ops.base import resources
from cutlass_ops.base.dtypes import FP8
from cutlass_ops.choose import dispatch, policies, pool, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.run import norms
from cutlass_ops.run.named import gemm_residual
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


@pytest.mark.slow
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


def without(table, problems):
    return replace(table, points=tuple(p for p in table.points if p.problem not in problems))


@pytest.mark.slow
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


def test_an_extent_of_more_than_32_bits_is_refused_in_words():
    assert dispatch.decide(signature(), H100, Problem(2**31 - 1, 16, 16)) is not None
    for extents in ((2**31, 16, 16), (16, 2**31, 16), (16, 16, 2**31)):
        with pytest.raises(co.errors.UnsupportedError, match=r"is too large to launch: .* Split the call"):
            dispatch.decide(signature(), H100, Problem(*extents))


def test_a_problem_at_which_no_kernel_can_be_launched_is_refused_in_words():
    """A kernel that is not persistent has a thread block for each tile, and a grid only so many along N."""
    kernel = Sm90Config(ThreadblockShape(64, 64, 64), schedule="warp_specialized")
    policy = policies.Policy.of((), signature(), H100, [kernel])
    assert policy.choose(Problem(64, 4096, 4096)).config == kernel
    with pytest.raises(
        co.errors.UnsupportedError, match=r"can be launched at M=64 N=4480000 K=4096: .* Split the call"
    ):
        policy.choose(Problem(64, 4480000, 4096))
    nothing = policies.Policy.of((), signature(), H100, [])
    with pytest.raises(co.errors.UnsupportedError, match=r"can be launched at M=64 N=64 K=64"):
        nothing.choose(Problem(64, 64, 64))


# ---- Any shape ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@PATIENT
@given(m=st.integers(1, 1 << 26), n=st.integers(1, 1 << 20), k=st.integers(1, 1 << 16))
@pytest.mark.parametrize("device", [H100, A100, Device((8, 9), 142)])
def test_any_shape_gets_a_legal_kernel_of_its_signature(device, m, n, k):
    of = signature()
    spec, order = chosen(Problem(m, n, k), of, device)
    assert spec in dispatch.specs(of, device)
    assert not legality.check(spec)
    assert spec.config.refuses(order) is None


@pytest.mark.sample(13)
@pytest.mark.parametrize(
    ("epilogue", "dtype", "majors"),
    sampled(1, (*builtin.BY_OP.values(), statistics), ("bf16", "f16"), MAJORS)[::3],
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


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9)])
def test_older_devices_get_kernels_for_their_own_target(capability):
    specs = dispatch.specs(signature(), Device(capability, 100))
    assert {s.target for s in specs} == {f"sm_{capability[0]}{capability[1]}"}
    assert {type(s.config) for s in specs} == {Sm80Config, GemvConfig}


def test_a_choice_is_the_decisions_kernel():
    for problem in (Problem(1, 4096, 4096), ODD):
        decision = dispatch.decide(signature(), H100, problem)
        assert chosen(problem) == (decision.spec, decision.order)
    with pytest.raises(
        co.errors.UnsupportedError, match=r"no kernel supports a GEMM of a bf16\.row, .* capability 10\.0"
    ):
        chosen(ODD, device=Device((10, 0), 148, "NVIDIA B200"))


@pytest.mark.parametrize("capability", [(7, 5), (10, 0), (12, 0)])
def test_a_device_without_a_target_has_no_candidates(capability):
    assert dispatch.specs(signature(), Device(capability, 100)) == ()
