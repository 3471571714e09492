import re

import cutlass_ops as co


@co.epilogue
def saved(acc, residual: co.Tile):
    return {"d": co.relu(acc) + residual, "pre": acc}


def rendered(**types):
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64))
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
