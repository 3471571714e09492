"""What an Sm80 spec renders to, without a compiler."""

import json
import re

import pytest

import cutlass_ops as co
from cutlass_ops.declare.config import InstructionShape, Sm80Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds.render import render
from cutlass_ops.kinds.sm80.lowering import context

CONFIG = Sm80Config(ThreadblockShape(128, 64, 32), WarpShape(64, 32, 32), InstructionShape(16, 8, 16), stages=4)
STREAM_K = Sm80Config(ThreadblockShape(128, 64, 32), WarpShape(64, 32, 32), stages=4, stream_k=True)


@co.epilogue
def fused(acc, bias: co.Row, rstd: co.Col, residual: co.Tile, scale: co.Scalar):
    pre = acc * rstd + bias
    return {"d": co.relu(pre) * scale + residual, "pre": pre}


@co.epilogue
def reduced(acc, bias: co.Row):
    y = acc + bias
    return {"d": y, "row_squares": co.sum_square(y, dim=1), "column_max": co.max(y, dim=0)}


@co.epilogue
def row_sum(acc):
    return {"d": acc, "total": co.sum(acc, dim=1)}


def spec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=fused, config=CONFIG, **types):
    return KernelSpec(a=a, b=b, d=d, epilogue=epilogue, config=config, **types)


def nodes(s):
    return {n["name"]: n for n in context(s)["nodes"]}


def test_context_holds_plain_values_only():
    for s in (spec(), spec(epilogue=reduced, config=STREAM_K), spec(d="f32.col")):
        values = context(s)
        assert json.loads(json.dumps(values)) == {k: _lists(v) for k, v in values.items()}


def _lists(value):
    if isinstance(value, dict):
        return {k: _lists(v) for k, v in value.items()}
    return [_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def test_rendering_is_deterministic_and_names_the_declaration():
    source = render(spec())
    assert source == render(spec())
    for line in (
        "using ThreadblockShape = cutlass::gemm::GemmShape<128, 64, 32>;",
        "using WarpShape = cutlass::gemm::GemmShape<64, 32, 32>;",
        "using InstructionShape = cutlass::gemm::GemmShape<16, 8, 16>;",
        "constexpr int Stages = 4;",
        "using ElementA = cutlass::bfloat16_t;",
        "using LayoutB = cutlass::layout::ColumnMajor;",
        "using Load_bias = sm80::RowBroadcast<ThreadMap, Element_bias>;",
        "using Load_rstd = sm80::ColBroadcast<ThreadMap, Element_rstd>;",
        "using Load_residual = sm80::AuxLoad<ThreadMap, Element_residual, RowMajor, 8>;",
        "using Load_scale = sm80::ScalarBroadcast<Element_scale>;",
        "using Element_scale = float;",
    ):
        assert line in source.splitlines(), line
    assert "{{" not in re.sub(r'"[^"]*"', "", source)
    assert max(map(len, source.splitlines()[20:])) < 200


def test_nodes_are_in_topological_order_with_d_last():
    found = context(spec())["nodes"]
    assert found[-1]["name"] == "Store_d"
    for position, node in enumerate(found):
        assert all(edge < position for edge in node["edges"])
    order = [n["name"] for n in found]
    (pre,) = nodes(spec())["Store_pre"]["edges"]
    (d,) = nodes(spec())["Store_d"]["edges"]
    assert (order[pre], order[d]) == ("Compute_pre", "Compute_d")
    # The parameters of a compute are the values of its edges, in that order.
    params = next(c["params"] for c in context(spec())["computes"] if c["struct"] == "Function_d")
    sources = [order[e] for e in nodes(spec())["Compute_d"]["edges"]]
    assert [p.rstrip("_") for p in params] == [s.partition("_")[2] for s in sources]


def test_pairs_are_swapped_by_a_visitor():
    @co.epilogue
    def turned(acc, scale: co.Col):
        return co.swap_pairs(acc * scale) + co.sin(acc)

    config = co.Sm80Config(
        co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32), co.InstructionShape(16, 8, 16), stages=3
    )
    spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row.align2", epilogue=turned, config=config)
    found = context(spec)["nodes"]
    names = [n["name"] for n in found]
    at = {name: n["edges"] for name, n in zip(names, found, strict=True)}
    (swap,) = (n for n in found if n["type"] == "sm80::SwapPairs")
    assert [names[e] for e in swap["edges"]] == ["Compute_shared0"]
    assert swap["name"] in [names[e] for e in at["Compute_d"]]
    source = render(spec)
    assert '#include "cutlass_ops/sm80_pairs.h"' in source
    assert '#include "cutlass_ops/trigonometry.h"' in source


def test_arguments_are_one_a_node_in_order():
    source = render(spec())
    block = source.split("Arguments const epilogue{")[1].split("};")[0]
    assert re.findall(r"// (\w+)", block) == [n["name"] for n in context(spec())["nodes"]]


def test_column_major_d_swaps_operands_and_sides():
    s = spec("bf16.row", "bf16.row", "bf16.col", inputs={"residual": "bf16.row"})
    found = nodes(s)
    assert found["Load_bias"]["type"] == "sm80::ColBroadcast<ThreadMap, Element_bias>"
    assert found["Load_rstd"]["type"] == "sm80::RowBroadcast<ThreadMap, Element_rstd>"
    assert found["Load_residual"]["type"] == "sm80::AuxLoad<ThreadMap, Element_residual, ColumnMajor, 8>"
    assert found["Store_d"]["type"] == "sm80::AuxStore<ThreadMap, ElementD, RowMajor, 8>"
    source = render(s)
    assert "return {o.problem.n, o.problem.m, o.problem.k};" in source
    assert "sm80::arguments<GemmKernel>(problem(o), o.b, o.a, epilogue)" in source
    # The caller's side stays as declared.
    assert "o.bias = call.row<Element_bias>(o.problem);" in source
    assert "o.residual = call.tile<Element_residual, cutlass_ops::Major::kRow, 8, false>(o.problem);" in source


def test_each_tensor_keeps_its_own_alignment():
    s = spec("bf16.row.align1", "bf16.col", "bf16.row.align2", inputs={"residual": "f32.row"})
    values = context(s)
    assert [values[x]["alignment"] for x in "abd"] == [1, 8, 2]
    assert nodes(s)["Load_residual"]["type"].endswith("RowMajor, 4>")
    assert nodes(s)["Store_d"]["type"].endswith("RowMajor, 2>")


def test_reductions_have_partial_values_and_a_second_step():
    s = spec(epilogue=reduced)
    found = nodes(s)
    assert found["Reduce_row_squares"]["type"] == "sm80::ColReduction<cutlass_ops::reduce::SumSquare, ThreadMap>"
    assert found["Reduce_column_max"]["type"] == "sm80::RowReduction<cutlass_ops::reduce::Max, ThreadMap>"
    assert found["Reduce_row_squares"]["arguments"] == "o.partial_row_squares_"
    source = render(s)
    assert f"void const* const kernel = cutlass_ops::handle(&{s.slug}_row_squares);" in source
    assert "finish<Reduce_row_squares>(kernel, o.partial_row_squares_, o.row_squares, problem(o), queue)" in source
    finish = "cutlass_ops::sm80::Finish<Reduce_column_max::Reduce, Element_column_max>"
    assert f"CUTLASS_OPS_KERNEL({s.slug}_column_max, {finish})" in source
    assert "workspace.partial<Reduce_column_max>(problem(o))" in source
    assert "o.row_squares = call.col_output<Element_row_squares>(o.problem);" in source


@co.epilogue
def placed(acc, seed: co.Integer):
    x = co.where(co.column_index() < 3 * co.row_index(), acc, co.uniform(seed))
    return {"d": x, "at": co.argmin(x, dim=1), "lse": co.logsumexp(x, dim=0), "low": co.min(x, dim=0)}


@pytest.mark.parametrize(("d", "swapped"), [("f32.row", "false"), ("f32.col", "true")])
def test_places_are_leaves_and_some_reductions_keep_two_numbers(d, swapped):
    s = spec(d=d, epilogue=placed)
    found = nodes(s)
    for leaf, functor in (("row_index", "RowOfPlace"), ("column_index", "ColumnOfPlace"), ("uniform0_", "Uniform")):
        visitor = f"sm80::PlaceInput<ThreadMap, cutlass_ops::{functor}, {swapped}>"
        assert found[f"Load_{leaf}"]["type"] == visitor
    assert found["Load_row_index"]["arguments"] == "{}"
    assert found["Load_uniform0_"]["arguments"] == "{o.seed, {INT64_C(0), nullptr}}"
    source = render(s)
    for line in (
        "Reduce_at::State* partial_at_;",
        "Reduce_lse::State* partial_lse_;",
        "float* partial_low_;",
        "using Element_at = int32_t;",
        '#include "cutlass_ops/sm80_places.h"',
        '#include "cutlass_ops/reductions.h"',
    ):
        assert line in source
    assert "Load_seed" not in source


def test_what_needs_nothing_new_includes_nothing_new():
    for epilogue in (fused, reduced, row_sum):
        source = render(spec(epilogue=epilogue))
        assert not re.search("functions.h|places.h|random.h|reductions.h|index_of|State", source)


def test_without_reductions_there_is_no_second_step():
    source = render(spec())
    assert "partial" not in source
    assert "finish(Operands const&, cutlass_ops::Queue const&) { return cudaSuccess; }" in source


@pytest.mark.parametrize(
    ("epilogue", "d", "separate"),
    [
        (fused, "bf16.row", "true"),
        (row_sum, "bf16.row", "true"),
        (row_sum, "bf16.col", "false"),
        (reduced, "bf16.row", "false"),
        (reduced, "bf16.col", "false"),
    ],
)
def test_stream_k_keeps_tiles_whole_for_reductions_along_m(epilogue, d, separate):
    s = spec(d=d, epilogue=epilogue, config=STREAM_K)
    assert context(s)["swizzle"] == f"sm80::StreamKSwizzle<{separate}>"


def test_targets_differ_only_in_their_limit():
    first, second = (context(spec(target=t)) for t in ("sm_80", "sm_90"))
    assert first.pop("shared_memory_limit") < second.pop("shared_memory_limit")
    assert first == second


@pytest.mark.parametrize(("d", "side"), [("bf16.row", "Col"), ("bf16.col", "Row")])
def test_means_of_rows_are_vectors_that_a_kernel_before_writes(d, side):
    s = spec(d=d, epilogue=composed.layer_norm)
    found = nodes(s)
    assert found["Load_mean_of_a"]["type"] == f"sm80::{side}Broadcast<ThreadMap, float>"
    assert found["Load_mean_of_a"]["arguments"] == "o.rows.means"
    assert found["Load_mean_square_of_a"]["arguments"] == "o.rows.means + 1 * int64_t(o.problem.m)"
    text = render(s)
    assert "WhichMeans<true, true>" in text
    assert "_means, MeansAhead)" in text
    taken = "workspace.take(cutlass_ops::means_bytes<WhichMeans>(o.problem))"
    assert text.index("launch_means_ahead") > text.index(taken)
