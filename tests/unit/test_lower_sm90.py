import re

import pytest
from hypothesis import given

import cutlass_ops as co
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import serving
from cutlass_ops.kinds.sm90 import footprint
from cutlass_ops.run import norms
from tests.strategies import at_most, epilogues


@co.epilogue
def saved(acc, residual: co.Tile):
    return {"d": co.relu(acc) + residual, "pre": acc}


def rendered(*, schedule="pingpong", scheduler="persistent", **types):
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), schedule=schedule, scheduler=scheduler)
    operands = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"} | types
    return co.source(co.KernelSpec(**operands, epilogue=saved, config=config))


def whole_accesses(source, reader):
    """Return whether the binding asks that accesses divide the extent, for the one argument read so."""
    (found,) = re.findall(rf"call\.{reader}<[^>]*, (true|false)>", source)
    return found == "true"


def test_what_is_written_has_an_extent_of_whole_accesses_and_what_tma_reads_need_not():
    source = rendered()
    assert whole_accesses(source, "result")
    assert whole_accesses(source, "tile_output")
    assert not whole_accesses(source, "tile")


def test_misaligned_tiles_are_moved_in_whole_accesses():
    source = rendered(d="bf16.row.align2", inputs={"residual": "bf16.row.align2"}, outputs={"pre": "bf16.row.align2"})
    assert all(whole_accesses(source, reader) for reader in ("result", "tile_output", "tile"))
    assert "Sm90AuxLoad<0, void, Element_residual" in source
    assert "Sm90AuxStore<0, void, ElementD" in source


def test_stream_k_kernels_do_not_overlap_the_kernel_before():
    asks = "#define CUTLASS_ENABLE_GDC_FOR_SM90"
    source = rendered()
    # Before any include, or CUTLASS does not see it.
    assert source.index(asks) < source.index("#include")
    assert asks in rendered(schedule="cooperative")
    assert asks not in rendered(schedule="cooperative", scheduler="stream_k")


@co.epilogue
def plain(acc, bias: co.Row, scale: co.Col, factor: co.Scalar, residual: co.Tile):
    return co.relu(acc * scale + bias) * factor + residual


@co.epilogue
def two_tiles(acc, gate: co.Tile, residual: co.Tile):
    return acc * gate + residual


@co.epilogue
def reducing(acc, bias: co.Row):
    return {"d": acc + bias, "norm": co.sum_square(acc, dim=1), "most": co.max(acc, dim=0)}


@co.epilogue
def reducing_and_saving(acc, bias: co.Row):
    return {"d": acc + bias, "pre": acc, "norm": co.sum_square(acc, dim=1)}


def of(epilogue, *, swap_ab=False, d="bf16.row", split_k=1):
    schedule = "warp_specialized" if split_k > 1 else "pingpong"
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), schedule=schedule, swap_ab=swap_ab, split_k=split_k)
    return co.source(co.KernelSpec(a="bf16.row", b="bf16.col", d=d, epilogue=epilogue, config=config))


@pytest.mark.parametrize(("swap_ab", "bias", "scale"), [(False, "Row", "Col"), (True, "Col", "Row")])
def test_plain_epilogues_have_a_store_of_their_own(swap_ab, bias, scale):
    source = of(plain, swap_ab=swap_ab)
    assert '#include "cutlass_ops/epilogue.h"' in source
    assert "using CollectiveEpilogue = cutlass_ops::Epilogue<cutlass_ops::Collective<" in source
    inputs = "ThreadblockShape, EpilogueTile, Element"
    assert f"using Load_bias = cutlass_ops::{bias}Input<{inputs}_bias>;" in source
    assert f"using Load_scale = cutlass_ops::{scale}Input<{inputs}_scale>;" in source
    assert "using Load_residual = fusion::Sm90SrcFetch<Element_residual>;" in source
    assert "{o.bias},  // Load_bias" in source


@co.epilogue
def only_reducing(acc, bias: co.Row):
    return {"d": acc + bias, "norm": co.sum_square(acc, dim=1)}


@co.epilogue
def only_residual(acc, residual: co.Tile):
    return co.relu(acc) + residual


@pytest.mark.parametrize(
    ("epilogue", "pre", "without", "by_threads"),
    [
        (reducing_and_saving, "e4m3", only_reducing, True),
        (reducing_and_saving, "bf16", only_reducing, False),
        (saved, "e4m3", only_residual, False),
    ],
)
@pytest.mark.parametrize("swap_ab", [False, True])
def test_threads_store_a_further_tile_in_fp8_beside_a_reduction(epilogue, pre, without, by_threads, swap_ab):
    def spec(epilogue, **outputs):
        config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), swap_ab=swap_ab)
        return co.KernelSpec(
            a="bf16.row", b="bf16.col", d="bf16.row", epilogue=epilogue, outputs=outputs, config=config
        )

    made = spec(epilogue, pre=f"{pre}.row")
    source = co.source(made)
    assert ('#include "cutlass_ops/tile_output.h"' in source) == by_threads
    stored = f"cutlass_ops::TileOutput<ThreadblockShape, EpilogueTile, Element_pre, {str(swap_ab).lower()}, 1>;"
    assert (f"using Store_pre = {stored}" in source) == by_threads
    assert ("fusion::Sm90AuxStore<Descriptor_pre" in source) != by_threads
    # Shared memory has nothing of it then.
    assert (footprint.epilogue_smem(made) == footprint.epilogue_smem(spec(without))) == by_threads


@co.epilogue
def turned(acc, bias: co.Row, residual: co.Tile):
    z = acc + bias
    return co.swap_pairs(z) * z + co.swap_pairs(residual)


@co.epilogue
def only_turned(acc):
    return co.swap_pairs(acc)


def visitors(source):
    """Return each visitor's name with those whose values it takes."""
    lists, names = re.search(r"cute::tuple<(.*)>,\n\s*(.*)>;", source).groups()
    known = names.split(", ")
    edges = [[int(e) for e in found.split(", ") if e] for found in re.findall(r"seq<([^>]*)>", lists)]
    return {name: [known[e] for e in each] for name, each in zip(known, edges, strict=True)}


@pytest.mark.parametrize("swap_ab", [False, True])
def test_pairs_are_swapped_by_visitors_between_functions(swap_ab):
    source = of(turned, swap_ab=swap_ab)
    assert '#include "cutlass_ops/sm90_pairs.h"' in source
    assert source.count(f"cutlass_ops::SwapPairs<{str(swap_ab).lower()}>") == 2
    found = visitors(source)
    swaps = {name: taken for name, taken in found.items() if name.startswith("Swap_")}
    # One of what was computed, which D's function takes as it is as well, and one of what was loaded.
    (computed,) = (name for name, (taken,) in swaps.items() if taken.startswith("Compute_"))
    (loaded,) = (name for name, (taken,) in swaps.items() if taken == "Load_residual")
    assert {computed, loaded, *swaps[computed]} == set(found["Compute_d"])


def test_d_that_lies_beside_is_rounded_by_a_visitor_of_its_own():
    found = visitors(of(only_turned))
    assert found == {"Accumulator": [], "Swap_d": ["Accumulator"], "Result": ["Swap_d"]}


def test_headers_that_few_need_are_included_where_they_are():
    assert "trigonometry.h" not in of(plain)
    assert "pairs.h" not in of(plain)

    @co.epilogue
    def wave(acc):
        return co.sin(acc)

    assert '#include "cutlass_ops/trigonometry.h"' in of(wave)
    assert "pairs.h" not in of(wave)


@co.epilogue
def placed(acc, seed: co.Integer):
    causal = co.where(co.column_index() <= co.row_index(), acc, 0.0)
    return {"d": causal + co.uniform(seed) + co.uniform(seed, 5), "at": co.argmax(causal, dim=1)}


@pytest.mark.parametrize("swap_ab", [False, True])
def test_places_are_leaves_that_read_nothing(swap_ab):
    source = of(placed, swap_ab=swap_ab)
    for header in ("functions", "random", "reductions", "sm90_places"):
        assert f'#include "cutlass_ops/{header}.h"' in source
    swapped = str(swap_ab).lower()
    assert f"using Load_row_index = cutlass_ops::PlaceInput<cutlass_ops::RowOfPlace, {swapped}>;" in source
    assert f"using Load_column_index = cutlass_ops::PlaceInput<cutlass_ops::ColumnOfPlace, {swapped}>;" in source
    assert source.count(f"PlaceInput<cutlass_ops::Uniform, {swapped}>;") == 2
    assert "{o.seed, {INT64_C(0), nullptr}},  // Load_uniform0_" in source
    assert "{o.seed, {INT64_C(5), nullptr}},  // Load_uniform1_" in source
    assert "o.seed = call.scalar<Element_seed>();" in source
    assert "using Element_seed = int64_t;" in source
    assert "using Element_at = int32_t;" in source
    side = "Row" if swap_ab else "Col"
    assert f"using Reduce_at = cutlass_ops::{side}Reduction<cutlass_ops::reduce::ArgMax," in source


@co.epilogue
def scaled(acc, alpha: co.Scalar, bias: co.Row):
    return alpha * acc + bias


@pytest.mark.parametrize("d", ["bf16.row", "bf16.row.align1"])
def test_a_scalar_is_read_after_the_products(d):
    """CUTLASS's visitor reads it when the kernel starts, where what wrote it may still run."""
    source = of(scaled, d=d)
    assert '#include "cutlass_ops/scalar_input.h"' in source
    assert "using Load_alpha = cutlass_ops::ScalarInput<Element_alpha>;" in source
    assert "ScalarBroadcast" not in source


def test_conditions_and_indices_are_computed_where_they_are_needed():
    """Between functions values are FP32: a condition of two functions is in both, and its operands are shared."""

    @co.epilogue
    def both(acc, bias: co.Row):
        x = co.exp(acc + bias)
        keep = (x > 1.0) & (co.row_index() + 3 > 7)
        return {"d": co.where(keep, x, 0.0), "kept": co.where(keep, 1.0, x), "total": co.sum(x, dim=1)}

    source = of(both)
    assert source.count("bool const v0_ = (total_ > 1.0f);") == 2
    assert source.count("int const v1_ = int(unsigned(cutlass_ops::index_of(row_index)) + unsigned(3));") == 2
    assert source.count("cutlass_ops::exp(") == 1
    assert "float apply(float row_index, float total_)" in source


def test_names_that_are_in_the_way_are_others_in_cpp():
    @co.epilogue
    def taken(acc, c: co.Row, d: co.Col, float_: co.Scalar, fine: co.Row):
        return {"d": acc * c + d * float_ + fine, "stream": co.sum(acc, dim=1)}

    source = of(taken)
    assert "float apply(float IN0, float IN1, float IN2, float fine, float OUT0_)" in source
    for line in (
        "o.IN0 = call.row<Element_IN0>(o.problem);",
        "o.IN1 = call.col<Element_IN1>(o.problem);",
        "o.IN2 = call.scalar<Element_IN2>();",
        "o.fine = call.row<Element_fine>(o.problem);",
        "o.OUT0 = call.col_output<Element_OUT0>(o.problem);",
    ):
        assert line in source
    assert source.count("o.d = ") == 1
    # The declaration, in the comment above, names what the user named.
    assert '["c", "row"]' in source.replace("\n//  ", "")


def test_what_needs_nothing_new_includes_nothing_new():
    for epilogue in (plain, two_tiles, reducing, reducing_and_saving, saved):
        assert not re.search("functions.h|places.h|random.h|reductions.h|index_of|State", of(epilogue))


def test_blocks_that_split_k_read_their_part_of_a_row():
    inputs = "PartShape, EpilogueTile, Element_bias"
    assert f"cutlass_ops::RowInput<{inputs}>" in of(co.gemm_bias_relu.epilogue, split_k=4)


@pytest.mark.parametrize("epilogue", [two_tiles, reducing_and_saving, saved])
def test_other_epilogues_have_cutlass_s(epilogue):
    source = of(epilogue)
    assert "epilogue.h" not in source
    assert "using CollectiveEpilogue = typename cutlass::" in source
    assert "Input<" not in source


@pytest.mark.parametrize(
    ("swap_ab", "tile", "schedule", "norm", "most", "sides"),
    [
        (False, (128, 128, 64), "pingpong", "Col", "Row", 1),
        (True, (128, 128, 64), "pingpong", "Row", "Col", 1),
        (False, (128, 96, 64), "warp_specialized", "Col", "Row", 1),
        (False, (192, 128, 64), "cooperative", "Col", "Row", 2),
    ],
)
def test_reductions_are_joined_by_whichever_tile_comes_last(swap_ab, tile, schedule, norm, most, sides):
    text = source(reducing, tile=tile, schedule=schedule, swap_ab=swap_ab)
    assert '#include "cutlass_ops/sm90_reduction.h"' in text
    shape = f"ThreadblockShape, EpilogueTile, Element_{{}}, {sides}>;"
    assert f"Reduce_norm = cutlass_ops::{norm}Reduction<cutlass_ops::reduce::SumSquare, {shape.format('norm')}" in text
    assert f"Reduce_most = cutlass_ops::{most}Reduction<cutlass_ops::reduce::Max, {shape.format('most')}" in text
    assert "{o.norm, o.norm_parts_},  // Reduce_norm" in text
    # A result for each row has a part for each tile of columns, in the problem's own orientation.
    norms, mosts = "<Reduce_norm>({}problem.m, {}problem.n)", "<Reduce_most>({}problem.n, {}problem.m)"
    wanted = f"cutlass_ops::parts_bytes{norms} + cutlass_ops::parts_bytes{mosts}".format(*[""] * 4)
    assert prepares(text) == (True, wanted)
    # Each counts its own parts, even where two are of one type.
    for which, (name, extents) in enumerate(
        (("norm", "o.problem.m, o.problem.n"), ("most", "o.problem.n, o.problem.m"))
    ):
        assert f"share_parts<Reduce_{name}, {which}>(o.{name}_parts_, {extents}, preparing)" in text
    # Nothing has to be cleared before, so the kernel may start while the one before it ends.
    assert "#define CUTLASS_ENABLE_GDC_FOR_SM90" in text
    assert "Sm90RowReduction" not in text
    assert "Sm90ColReduction" not in text


def test_what_is_taken_and_what_is_reduced_have_memory_of_their_own():
    text = source(normed_and_reduced, means="ahead")
    parts, means = "cutlass_ops::parts_bytes<Reduce_norm>(problem.m, problem.n)", "cutlass_ops::means_bytes<WhichMeans>"
    assert prepares(text) == (True, f"{parts} + {means}(problem)")
    assert text.index("share_parts<Reduce_norm, 0>") < text.index("preparing.take(") < text.index("launch_means_ahead")


def test_what_tma_cannot_store_has_cutlass_s():
    assert "cutlass_ops::Epilogue" not in of(plain, d="bf16.row.align2")
    assert "cutlass_ops::Epilogue" in of(plain, d="f32.row")


# ---- Values of A's rows, and a second weight ----------------------------------------------------------------------


def source(epilogue, *, d="bf16.row", tile=(128, 128, 64), **config):
    operands = {"a": "bf16.row", "b": "bf16.col", "d": d}
    return co.source(
        co.KernelSpec(**operands, epilogue=epilogue, config=co.Sm90Config(co.ThreadblockShape(*tile), **config))
    )


@co.epilogue
def both_means(acc, bias: co.Row):
    return (acc - co.mean_of_a()) * co.rsqrt(co.mean_square_of_a()) + bias


@co.epilogue
def normed_and_reduced(acc):
    d = acc * co.rsqrt(co.mean_square_of_a())
    return {"d": d, "norm": co.sum_square(d, dim=1)}


normed_gate = norms.rmsnorm_op(composed.swiglu).epilogue


@pytest.mark.parametrize(
    ("changes", "rows", "tiles", "visitor"),
    [
        ({"tile": (64, 128, 64)}, 64, 2, "ColGathered"),
        ({"tile": (256, 64, 64), "schedule": "cooperative", "swap_ab": True}, 64, 1, "RowGathered"),
        ({"tile": (64, 56, 64), "swap_ab": True}, 56, 2, "RowGathered"),
    ],
)
def test_the_main_loop_leaves_means_where_the_epilogue_reads_them(changes, rows, tiles, visitor):
    text = source(both_means, **changes)
    assert f"TileMeans<WhichMeans, {rows}, {tiles}>" in text
    assert "WhichMeans<true, true>" in text
    assert re.search(
        rf"Load_mean_of_a = cutlass_ops::{visitor}<ThreadblockShape, EpilogueTile, \S*MeanOfRows<Means>", text
    )
    assert re.search(rf"Load_mean_square_of_a = cutlass_ops::{visitor}<.*MeanSquareOfRows<Means>", text)
    swapped = str(changes.get("swap_ab", False)).lower()
    assert f"MainloopSchedule, {swapped}, 1, Means>" in text
    assert "// Means of A's rows, for the epilogue: gathered by the main loop from the tiles" in text
    assert not re.search("MeansAhead|RowReader|Awaited|o.rows", text)
    assert prepares(text) == (False, None)


def prepares(text):
    """Return whether anything is done before a launch, and how many bytes of workspace that takes, if any."""
    (prepares,) = re.findall(r"constexpr bool kPrepares = (true|false);", text)
    (size,) = re.findall(r"int64_t scratch_bytes\(cutlass_ops::Problem(?: problem)?\) { return (.*); }", text)
    assert text.count("cudaError_t prepare(") == (prepares == "true")
    return prepares == "true", None if size == "0" else size


@pytest.mark.parametrize(
    ("swap", "epilogue", "input_visitor", "options", "arguments"),
    [
        (False, both_means, "ColInput", "false, 1, void, Rows", ",\n         nullptr, {}, o.rows}"),
        (True, both_means, "RowInput", "true, 1, void, Rows", ",\n         nullptr, {}, o.rows}"),
        (False, normed_gate, "ColInput", "false, 2, void, Rows", "StrideB>(o.up),\n         o.rows}"),
        (True, normed_gate, "RowInput", "true, 2, void, Rows", "StrideA>(o.up),\n         o.rows}"),
    ],
)
def test_means_taken_beside_are_awaited_and_need_neither_a_kernel_nor_workspace(
    swap, epilogue, input_visitor, options, arguments
):
    text = source(epilogue, means="beside", swap_ab=swap)
    assert text.count("CUTLASS_OPS_KERNEL(") == 1
    assert "MeansAhead" not in text
    assert prepares(text) == (True, None)
    assert "cutlass_ops::share_rows<GemmKernel, Rows>(o.rows, arguments, preparing)" in text
    shape = "OutputShape" if epilogue is normed_gate else "ThreadblockShape"
    for index, name in enumerate(epilogue.graph.gathered):
        assert f"Load_{name} = cutlass_ops::{input_visitor}<{shape}, EpilogueTile, cutlass_ops::Awaited>;" in text
        assert f"{{cutlass_ops::awaited(o.rows, {index})}},  // Load_{name}" in text
    assert "// Means of A's rows, for the epilogue: taken by idle warps beside the main loop, each row once." in text
    reader = "cutlass_ops::RowReader<WhichMeans, ElementA, MajorA, AlignmentA>"
    assert f"using Rows = cutlass_ops::SharedRows<{reader}>;" in text
    assert "o.rows = {cutlass_ops::rows_of<Rows::Reader>(o.a, o.problem), {}};" in text
    assert '#include "cutlass_ops/means_beside.h"' in text
    assert "TileMeans" not in text
    assert f"MainloopSchedule, {options}>" in text
    assert arguments in text
    # The whole kernel waits for the one before, idle warps included.
    assert "#define CUTLASS_ENABLE_GDC_FOR_SM90" in text
    assert "WAITS_LATE" not in text


def test_the_two_means_are_numbered_as_they_are_stored():
    """Means first, then means of squares, of those that there are (row_means.h)."""
    assert both_means.graph.gathered == ("mean_of_a", "mean_square_of_a")
    text = source(composed.rms_norm, means="beside")
    assert "WhichMeans<false, true>" in text
    assert "awaited(o.rows, 0)},  // Load_mean_square_of_a" in text
    assert "awaited(o.rows, 1)" not in text


def test_means_taken_ahead_are_vectors_of_the_workspace_and_waited_for_late():
    text = source(both_means, means="ahead")
    assert prepares(text) == (True, "cutlass_ops::means_bytes<WhichMeans>(problem)")
    assert text.count("CUTLASS_OPS_KERNEL(") == 2
    assert text.index("#define CUTLASS_OPS_WAITS_LATE") < text.index("#include")
    assert "CUTLASS_ENABLE_GDC_FOR_SM90" not in text
    assert "Load_mean_of_a = cutlass_ops::ColInput<ThreadblockShape, EpilogueTile, float>" in text
    assert "{o.rows.means},  // Load_mean_of_a" in text
    assert "{o.rows.means + 1 * int64_t(o.problem.m)},  // Load_mean_square_of_a" in text
    assert "_means, MeansAhead)" in text
    assert "TileMeans" not in text
    # CUTLASS's own epilogue waits for nothing: there the whole kernel waits, as usual.
    text = source(both_means, means="ahead", d="bf16.row.align2")
    assert "CUTLASS_ENABLE_GDC_FOR_SM90" in text
    assert "WAITS_LATE" not in text


@pytest.mark.parametrize(
    ("swap", "shape", "stride"), [(False, "128, cute::Int<64>", "B"), (True, "64, cute::Int<128>", "A")]
)
def test_a_second_weight_has_half_of_the_tile(swap, shape, stride):
    text = source(composed.swiglu, swap_ab=swap)
    assert f"using OutputShape = cute::Shape<cute::_{shape}, cute::Int<64>>;" in text
    assert "Collective<\n    OutputShape," in text
    assert f"EpilogueCallbacks>, 2, {str(swap).lower()}>;" in text
    assert f"MainloopSchedule, {str(swap).lower()}, 2>" in text
    assert f"o.up.ptr<ElementB>(), cutlass_ops::stride<typename GemmKernel::Stride{stride}>(o.up)" in text
    assert text.count("2 * o.problem.n") == 1
    assert "o.up = call.second<ElementB, MajorB, AlignmentB>(o.problem);" in text


def test_a_kernel_without_either_is_as_it_was():
    text = source(builtin.bias_relu)
    assert not re.search("Means<|WhichMeans|OutputShape|, 2>|o.rows", text)
    assert prepares(text) == (False, None)


@at_most(60)
@given(epilogues(max_outputs=1))
def test_a_functions_parameters_are_the_visitors_whose_values_it_is_passed(drawn):
    """A tree of visitors passes values by position: in another order than the function's, the result is wrong."""
    _parameters_are_visitors(drawn)


@pytest.mark.parametrize("epilogue", [composed.layer_norm, composed.swiglu], ids=str)
def test_gathered_means_and_products_are_passed_in_order(epilogue):
    _parameters_are_visitors(epilogue)


def _parameters_are_visitors(epilogue):
    config = co.Sm90Config(co.ThreadblockShape(64, 128, 64), schedule="pingpong")
    source = co.source(co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=epilogue, config=config))
    tree = re.search(r"using EpilogueVisitor = fusion::Sm90EVT<Compute_d, (.*)>;", source)
    if tree is None:  # nothing is computed
        assert "Function_" not in source
        return
    (parameters,) = re.findall(r"struct Function_d \{\s*CUTLASS_DEVICE static float apply\((.*)\) \{", source)
    visitors = [name.removeprefix("Load_").replace("Accumulator", "acc") for name in tree[1].split(", ")]
    assert [parameter.removeprefix("float ") for parameter in parameters.split(", ")] == visitors


@co.epilogue
def statistics(acc, bias: co.Row):
    x = acc + bias
    by_row = {"most": co.max(x, dim=1), "at": co.argmax(x, dim=1), "lse": co.logsumexp(x, dim=1)}
    return {"d": x, **by_row, "least": co.min(x, dim=0), "raw": co.sum(acc, dim=1)}


@pytest.mark.parametrize("swap_ab", [False, True])
def test_reductions_of_one_value_in_one_direction_share_a_visitor(swap_ab):
    source = of(statistics, swap_ab=swap_ab)
    rows, columns = ("Row", "Col") if swap_ab else ("Col", "Row")
    reduce = "cutlass_ops::reduce::"
    together = f"{reduce}Together<{reduce}Max, {reduce}ArgMax, {reduce}LogSumExp>"
    assert f"using Reduce_most = cutlass_ops::{rows}Reduction<{together}," in source
    assert "cutlass_ops::Elements<Element_most, Element_at, Element_lse>" in source
    assert "{{o.most, {o.at, {o.lse}}}, o.most_parts_},  // Reduce_most" in source
    # Another direction, and another value.
    assert f"using Reduce_least = cutlass_ops::{columns}Reduction<{reduce}Min," in source
    assert f"using Reduce_raw = cutlass_ops::{rows}Reduction<{reduce}Sum," in source
    assert "{o.least, o.least_parts_},  // Reduce_least" in source
    found = visitors(source)
    assert [name for name in found if name.startswith("Reduce_")] == ["Reduce_most", "Reduce_least", "Reduce_raw"]
    assert source.count("share_parts<") == 3


@pytest.mark.parametrize(
    ("ways", "size"), [("max", 4), ("max sum", 8), ("argmax", 8), ("max argmax logsumexp", 24), ("argmax max", 16)]
)
def test_shared_memory_holds_what_reductions_keep_together(ways, size):
    @co.epilogue
    def reduced(acc):
        return {"d": acc, **{f"{way}_": getattr(co.e, way)(acc, dim=1) for way in ways.split()}}

    names = [f"{way}_" for way in ways.split()]
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64), schedule="pingpong", swap_ab=True)
    spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=reduced, config=config)
    (group,) = serving.reduced_together(spec)
    assert [o.name for o in group] == names
    assert footprint._kept(group).size == size


@co.epilogue
def quantised_gate(acc, up: co.Product, scale: co.Col, by: co.Row):
    return co.e.quantize(co.e.silu(acc * scale) * up * by, "e4m3")


@co.epilogue
def quantised_and_read(acc, residual: co.Tile):
    return co.e.quantize(co.e.silu(acc) + residual, "e4m3")


@co.epilogue
def quantised_and_reduced(acc):
    y = co.e.gelu(acc, approximate="tanh")
    return {"d": co.e.quantize(y, "e4m3"), "amax": co.e.amax(y, dim=1)}


@co.epilogue
def quantised_alone(acc):
    return co.e.quantize(co.e.relu(acc), "e4m3")


@pytest.mark.parametrize(
    ("epilogue", "a", "tile", "schedule", "by_warps"),
    [
        (quantised_gate, "e4m3", (128, 256, 128), "cooperative", True),
        (quantised_gate, "e4m3", (64, 256, 128), "pingpong", True),
        (quantised_gate, "bf16", (128, 256, 64), "cooperative", True),
        (quantised_and_read, "e4m3", (128, 128, 128), "cooperative", False),
        (quantised_and_reduced, "e4m3", (128, 128, 128), "cooperative", False),
        (quantised_alone, "e4m3", (192, 256, 128), "cooperative", False),  # warpgroups side by side
    ],
)
def test_warps_that_quantise_wait_for_no_others(epilogue, a, tile, schedule, by_warps):
    config = co.Sm90Config(co.ThreadblockShape(*tile), schedule=schedule)
    source = co.source(co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d="e4m3.row", epilogue=epilogue, config=config))
    assert ("cutlass_ops::QuantizedByWarps<128>>" in source) == by_warps
    assert ("cutlass_ops::Quantized>" in source) != by_warps
    if epilogue is quantised_gate:  # each of two warpgroups has its own copy
        copies = ", 2" if schedule == "cooperative" else ""
        assert f"cutlass_ops::RowInput<OutputShape, EpilogueTile, Element_by{copies}>" in source


@pytest.mark.parametrize(("rows", "schedule"), [(192, "pingpong"), (128, "cooperative")])
def test_two_thread_blocks_share_scales_where_each_has_half_of_their_columns(rows, schedule):
    config = co.Sm90Config(co.ThreadblockShape(rows, 128, 128), co.ClusterShape(1, 2), schedule=schedule)
    spec = co.KernelSpec(a="e4m3.row", b="e4m3.col", d="e4m3.row", epilogue=quantised_gate, config=config)
    assert "cutlass_ops::QuantizedByTwo>" in co.source(spec)
    assert footprint.epilogue_stages(spec)[1] == 2  # of 32 columns
