import re

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
