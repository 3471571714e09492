"""What declarations are rendered to, where the kept kernels of ``tests/golden`` do not show it."""

import re

import pytest
from hypothesis import given

import cutlass_ops as co
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds.sm90 import footprint
from tests.strategies import at_most, epilogues


@co.epilogue
def saved(acc, residual: co.Tile):
    return {"d": co.relu(acc) + residual, "pre": acc}


@co.epilogue
def only_residual(acc, residual: co.Tile):
    return co.relu(acc) + residual


@co.epilogue
def reducing_and_saving(acc, bias: co.Row):
    return {"d": acc + bias, "pre": acc, "norm": co.sum_square(acc, dim=1)}


@co.epilogue
def only_reducing(acc, bias: co.Row):
    return {"d": acc + bias, "norm": co.sum_square(acc, dim=1)}


@co.epilogue
def both_ways(acc, bias: co.Row):
    y = acc + bias
    return {"d": y, "row_squares": co.sum_square(y, dim=1), "column_max": co.max(y, dim=0)}


def spec(epilogue, config=None, *, a="bf16", d="bf16.row", tile=(128, 128, 64), outputs=None, **options):
    config = config or co.Sm90Config(co.ThreadblockShape(*tile), **options)
    return co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, outputs=outputs, config=config)


# ---- Sm80 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("epilogue", "d", "separate"),
    [
        (saved, "bf16.row", "true"),
        (only_reducing, "bf16.row", "true"),
        (only_reducing, "bf16.col", "false"),
        (both_ways, "bf16.row", "false"),
    ],
)
def test_stream_k_keeps_tiles_whole_for_reductions_along_m(epilogue, d, separate):
    config = co.Sm80Config(co.ThreadblockShape(128, 64, 32), co.WarpShape(64, 32, 32), stages=4, stream_k=True)
    assert f"sm80::StreamKSwizzle<{separate}>" in co.source(spec(epilogue, config, d=d))


# ---- Sm90 ----------------------------------------------------------------------------------------------------------


def test_stream_k_kernels_do_not_overlap_the_kernel_before():
    asks = "#define CUTLASS_ENABLE_GDC_FOR_SM90"
    overlapping = co.source(spec(saved, schedule="cooperative"))
    # Before any include, or CUTLASS does not see it.
    assert overlapping.index(asks) < overlapping.index("#include")
    assert asks not in co.source(spec(saved, schedule="cooperative", scheduler="stream_k"))


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
    made = spec(epilogue, outputs={"pre": f"{pre}.row"}, swap_ab=swap_ab)
    stored = f"cutlass_ops::TileOutput<ThreadblockShape, EpilogueTile, Element_pre, {str(swap_ab).lower()}, 1>;"
    assert (f"using Store_pre = {stored}" in co.source(made)) == by_threads
    # Shared memory has nothing of it then.
    plain = spec(without, swap_ab=swap_ab)
    assert (footprint.epilogue_smem(made) == footprint.epilogue_smem(plain)) == by_threads


@at_most(60)
@given(epilogues(max_outputs=1))
def test_a_functions_parameters_are_the_visitors_whose_values_it_is_passed(drawn):
    """A tree of visitors passes values by position: in another order than the function's, the result is wrong."""
    _parameters_are_visitors(drawn)


@pytest.mark.parametrize("epilogue", [composed.layer_norm, composed.swiglu], ids=str)
def test_gathered_means_and_products_are_passed_in_order(epilogue):
    _parameters_are_visitors(epilogue)


def _parameters_are_visitors(epilogue):
    source = co.source(spec(epilogue, tile=(64, 128, 64)))
    tree = re.search(r"using EpilogueVisitor = fusion::Sm90EVT<Compute_d, (.*)>;", source)
    if tree is None:  # nothing is computed
        assert "Function_" not in source
        return
    (parameters,) = re.findall(r"struct Function_d \{\s*CUTLASS_DEVICE static float apply\((.*)\) \{", source)
    visitors = [name.removeprefix("Load_").replace("Accumulator", "acc") for name in tree[1].split(", ")]
    assert [parameter.removeprefix("float ") for parameter in parameters.split(", ")] == visitors
