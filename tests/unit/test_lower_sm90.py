import re

import pytest

import cutlass_ops as co


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
    return {"d": acc + bias, "norm": co.sum_square(acc, dim=1)}


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


def test_blocks_that_split_k_read_their_part_of_a_row():
    inputs = "PartShape, EpilogueTile, Element_bias"
    assert f"cutlass_ops::RowInput<{inputs}>" in of(co.gemm_bias_relu.epilogue, split_k=4)


@pytest.mark.parametrize("epilogue", [two_tiles, reducing, saved])
def test_other_epilogues_have_cutlass_s(epilogue):
    source = of(epilogue)
    assert "epilogue.h" not in source
    assert "using CollectiveEpilogue = typename cutlass::" in source
    assert "Input<" not in source


def test_what_tma_cannot_store_has_cutlass_s():
    assert "cutlass_ops::Epilogue" not in of(plain, d="bf16.row.align2")
    assert "cutlass_ops::Epilogue" in of(plain, d="f32.row")
