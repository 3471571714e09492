"""Kernels of ordinary loads for few rows: what they render to, and when they are chosen."""

import json
import re

import pytest
from signatures import A100, H100, signature

import cutlass_ops as co
from cutlass_ops.base import arch, resources
from cutlass_ops.choose import policies, pool, space, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import GemvConfig, Sm80Config, Sm90Config, config_from_json, config_to_json
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds.gemv import model as model_gemv
from cutlass_ops.kinds.gemv import space as space_gemv
from cutlass_ops.kinds.gemv.lowering import context
from cutlass_ops.kinds.render import render
from cutlass_ops.tuner import tuning
from tests.scripts import script

pytestmark = pytest.mark.usefixtures("session")


@co.epilogue
def fused(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    pre = acc * scale + bias
    return {"d": co.relu(pre) * alpha + residual, "pre": pre}


@co.epilogue
def turned(acc, bias: co.Row):
    return co.swap_pairs(acc + bias) * 2 + acc


@co.epilogue
def normed_gate(acc, up: co.Product, eps: co.Scalar):
    r = co.rsqrt(co.mean_square_of_a() - co.mean_of_a() * co.mean_of_a() + eps)
    return co.silu(acc * r) * (up * r)


def spec(epilogue=fused, d="bf16.row.align1", **types):
    return KernelSpec(a="bf16.row", b="bf16.col", d=d, epilogue=epilogue, config=GemvConfig(4, 8, 8), **types)


# ---- Rendering -----------------------------------------------------------------------------------------------------


def test_context_holds_plain_values_only():
    for s in (spec(), spec(normed_gate)):
        assert json.loads(json.dumps(context(s))) == context(s)


def test_each_element_of_d_is_computed_in_a_straight_line():
    text = render(spec(inputs={"residual": "f32.col.align1"}))
    for line in (
        "using Shape = cutlass_ops::gemv::Shape<4, 8, 8>;",
        "float(o.bias[column]),",
        "float(o.scale[row]),",
        "float(element<Element_residual, cutlass_ops::Major::kCol>(o.residual, row, column)),",
        "value(o.alpha),",
        "float const pre_[kSides] = {Function_pre::apply(products[0][0], in[0].bias, in[0].scale)};",
        "float const d_[kSides] = {Function_d::apply(in[0].residual, in[0].alpha, pre_[0])};",
        "element<ElementD, cutlass_ops::Major::kRow>(o.d, row, column) = ElementD(d_[0]);",
        "element<Element_pre, cutlass_ops::Major::kRow>(o.pre, row, column) = Element_pre(pre_[0]);",
    ):
        assert line in text
    assert "CUTLASS_OPS_EXPORT(" + spec(inputs={"residual": "f32.col.align1"}).slug in text
    assert render(spec()) == render(spec())


def test_places_are_read_where_other_inputs_are():
    @co.epilogue
    def placed(acc, n: co.Row, seed: co.Integer):
        return co.where(co.column_index() < co.row_index() + 2, acc * n, co.uniform(seed, -1))

    source = render(spec(placed))
    for line in (
        "cutlass_ops::PlaceArguments<cutlass_ops::RowOfPlace>{}.functor()(row, column),",
        "cutlass_ops::PlaceArguments<cutlass_ops::ColumnOfPlace>{}.functor()(row, column),",
        "cutlass_ops::PlaceArguments<cutlass_ops::Uniform>{o.seed, {INT64_C(-1), nullptr}}.functor()(row, column),",
        "float(o.IN0[column]),",
        "in[0].row_index, in[0].column_index, in[0].uniform0_, in[0].IN0",
        '#include "cutlass_ops/places.h"',
        '#include "cutlass_ops/random.h"',
    ):
        assert line in source
    assert not re.search("functions.h|places.h|random.h", render(spec()))


def test_two_weights_and_means_have_their_places():
    text = render(spec(normed_gate))
    assert "using WhichMeans = cutlass_ops::WhichMeans<true, true>;" in text
    assert "static constexpr int kWeights = 2, kSides = 1;" in text
    assert "return which == 0 ? o.b : o.up;" in text
    (line,) = (x for x in text.splitlines() if "Function_d::apply(" in x and "=" in x)
    assert sorted(line[line.index("(") + 1 : line.index(")")].split(", ")) == sorted(
        ["products[0][0]", "means[0]", "means[1]", "in[0].eps", "products[0][1]"]
    )


def test_a_thread_computes_both_columns_of_a_pair():
    text = " ".join(render(spec(turned)).split())
    assert "kWeights = 1, kSides = 2;" in text
    before, swapped = "Function_shared0::apply", "float const shared1_[kSides] = { shared0_[1], shared0_[0], };"
    assert f"{{ {before}(products[0][0], in[0].bias), {before}(products[1][0], in[1].bias), }};" in text
    assert swapped in text
    assert "= ElementD(d_[0]);" in text


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
def test_a_kernel_may_start_early_where_the_machine_can(target):
    overlaps = arch.target(target).capability >= (9, 0)
    assert f"kOverlaps = {str(overlaps).lower()};" in render(spec(target=target))


def test_its_json_says_all():
    for config in (GemvConfig(), GemvConfig(8, 16, 4)):
        assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config
        assert config == config
    assert len({GemvConfig(r, w, p).slug for r in (1, 2) for w in (4, 8) for p in (4, 8)}) == 8


# ---- Choice --------------------------------------------------------------------------------------------------------


def test_it_takes_as_long_as_reading_b():
    weight = 2 * 28672 * 4096 / 3.1e6
    assert model_gemv.predict(GemvConfig(), Problem(1, 28672, 4096), 132) == pytest.approx(weight, rel=0.03)
    # Every further pass over B costs as much again, and so does much arithmetic.
    assert model_gemv.predict(GemvConfig(1), Problem(2, 28672, 4096), 132) > 1.9 * weight
    assert model_gemv.predict(GemvConfig(4), Problem(8, 28672, 4096), 132) > 1.9 * weight
    assert model_gemv.predict(GemvConfig(8, 8, 4), Problem(8, 28672, 4096), 132) == pytest.approx(weight, rel=0.1)


@pytest.mark.parametrize(("count", "most"), [(1, 1.02), (4, 1.002)])
def test_the_models_first_kernels_hold_the_fastest_of_the_tables_that_ship(count, most):
    fit = script("fit_gemv")
    measured = fit.read(tables.load(path) for path in sorted(resources.tuned().glob("nvidia-h100*.json")))
    assert len(measured) > 100
    assert fit.regret(measured, fit.H100, 132, count) <= most


def test_fitting_finds_the_numbers_again():
    fit = script("fit_gemv")
    true = fit.H100._replace(bandwidth=2.0, start=3.0)
    problems = [Problem(m, n, k) for m in (1, 2, 8) for n, k in ((1024, 1024), (4096, 4096), (28672, 4096))]
    kernels = [c for c in space_gemv.candidates() if c.warps == 8]
    measured = {(0, p): dict(zip(kernels, fit.predicted(p, kernels, true, 132), strict=True)) for p in problems}
    fitted = fit.fit(measured, fit.H100, 132, 300)
    assert fit.loss(measured, fitted, 132) < 0.2 * fit.loss(measured, fit.H100, 132)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, 16])
def test_few_rows_have_kernels_that_read_b_once(rows):
    found = space.few_rows(signature(), Problem(rows, 6144, 4096), H100)
    assert len(found) >= 6
    assert all(c.rows >= rows and (c.rows < 2 * rows or c.rows == 8) for c in found)
    assert any(c.by_tile for c in found)
    assert set(found) <= set(space.gemv_configurations(signature(), H100))


def test_many_rows_have_none():
    assert space.few_rows(signature(), Problem(17, 6144, 4096), H100) == []
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


def test_neighbours_differ_in_one_thing():
    near = space.neighbours(signature(), GemvConfig(2, 8, 8), H100)
    assert GemvConfig(2, 16, 8) in near
    assert GemvConfig(4, 8, 8) in near
    assert GemvConfig(4, 16, 8) not in near
    assert GemvConfig(2, 8, 8) not in near


def test_a_pool_of_all_kinds_has_each_one_s_time():
    usual = space.usual(signature()).configs[:5]
    mixed = pool.Pool.of((usual[0], GemvConfig(1), *usual[1:], GemvConfig(4)), signature())
    problems = [Problem(1, 6144, 4096), Problem(64, 6144, 4096), Problem(1000, 512, 512)]
    times, by_gpc = mixed.times_and_order(problems, H100)
    alone, order = pool.Pool.of(usual, signature()).times_and_order(problems, H100)
    places = [0, 2, 3, 4, 5]
    assert (times[:, places] == alone).all()
    assert (by_gpc[:, places] == order).all()
    for at, config in ((1, GemvConfig(1)), (6, GemvConfig(4))):
        assert times[:, at].tolist() == [model_gemv.predict(config, p, 132) for p in problems]
    tiles = mixed.tiles(problems)
    assert (tiles[:, places] == pool.Pool.of(usual, signature()).tiles(problems)).all()
    assert tiles[:, 1].tolist() == [768.0, 64 * 768.0, 1000 * 64.0]


def test_without_any_table_an_ampere_takes_one_for_a_row():
    chosen = policies.policy(signature(), A100).choose(Problem(1, 8192, 8192))
    assert isinstance(chosen.config, GemvConfig)
    assert isinstance(policies.policy(signature(), A100).choose(Problem(512, 8192, 8192)).config, Sm80Config)
    assert not any(isinstance(c, GemvConfig) for c in policies.policy(signature(a=4, b=4), A100).kernels)


def test_what_was_measured_for_it_serves_another_epilogue():
    # A table of another epilogue says as much of it as of the others; a reduction it cannot have.
    kernels = (GemvConfig(1), *space.usual(signature()).configs[:1])
    measured = (Measured(kernels[0], 10.0, 0.0), Measured(kernels[1], 12.0, 0.2))
    points = (Point(Problem(1, 8192, 4096), "", measured, ()),)
    table = Table(H100.name, 132, signature(), kernels=kernels, points=points)
    gated = policies._as_if_about(table, signature(composed.swiglu), H100)
    assert gated.kernels[0] == GemvConfig(1)
    (point,) = gated.points
    assert (point.problem, point.measured[0].config) == (Problem(1, 4096, 4096), GemvConfig(1))
    reduction = signature(composed.residual_rms_bf16)
    assert policies._legal(reduction, GemvConfig(1), H100) is None


def test_they_serve_nothing_alone():
    """A second weight is legal for them, and not for kernels of Sm80: any number of rows would come to them."""
    gate = signature(composed.swiglu)
    assert space.gemv_configurations(gate, A100)
    assert policies.policy(gate, A100).kernels == ()
