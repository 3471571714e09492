"""Edits of real kernels' machine code: they are what was meant, nothing else changes, and the library loads them."""

import re

import pytest

from cutlass_ops.artifacts import loader
from cutlass_ops.compilation.builder import build_artifact
from tests.compile.test_types import disassembled
from tests.gpu import edits, kernels, multiplied

pytestmark = [pytest.mark.compile, pytest.mark.slow]

SPECS = {
    "pingpong": kernels.configurations()["sm90_128x128x64_1x1_pp"],
    "cooperative": kernels.reductions()["summed-sm90_256x64x64_2x2_coop"],
    "INT8": multiplied.specs()["i8-f32-wgmma-plain"],
}
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/ +(.*?) ;")


def instructions(library, folder):
    """Return a kernel's instructions by their places."""
    path = folder / "kernel.so"
    path.write_bytes(library)
    text = disassembled(path)
    if text is None:
        pytest.skip("no cuobjdump and nvdisasm")
    # Of the longest function: others are the small kernels beside it.
    functions = [dict(LINE.findall(each)) for each in text.split("Function : ")[1:]]
    return {int(at, 16): said for at, said in max(functions, key=len).items()}


@pytest.fixture(params=SPECS, scope="module")
def artifact(request):
    return build_artifact(SPECS[request.param])


def test_edits_are_what_was_meant(artifact, tmp_path):
    library = artifact.read_library()
    before, start = (
        instructions(library, tmp_path),
        max(edits.sites(library), key=lambda site: site.room - site.start).start,
    )
    every = [site for site in edits.sites(library) if site.start == start]
    assert {"SYNCS", "UTMALDG", "BAR", "FENCE", "UTMASTG", "branch"} <= {site.name for site in every}
    assert {"HGMMA", "IGMMA"} & {site.name for site in every}
    assert not any("UR60" in said for said in before.values())
    for name in dict.fromkeys(site.name for site in every):
        site = next(site for site in every if site.name == name)
        at, room = site.at - site.start, site.room - site.start
        if name == "branch":
            assert "TRYWAIT" in before[at - 16]
            after = instructions(edits.without(library, site), tmp_path)
            assert after == before | {at: "NOP"}
            continue
        assert name in before[at]
        after = instructions(edits.delayed(library, site, 0xFFF), tmp_path)
        assert after == before | {
            at: f"BRA {room:#x}",
            room: "S2UR UR60, SR_CLOCKLO",
            room + 16: "ULOP3.LUT UR60, UR60, 0xfff, URZ, 0xc0, !UPT",
            room + 32: "NANOSLEEP UR60",
            room + 48: before[at],
            room + 64: f"BRA {at + 16:#x}",
        } | {place: before[place].replace(".reuse", "") for place in range(max(0, at - 128), at, 16)}


def test_the_library_loads_what_is_edited(artifact, tmp_path):
    library = artifact.read_library()
    site = next(edits.sites(library))
    changed = edits.written(artifact, edits.delayed(library, site, 0xFFF), tmp_path)
    loaded, usual = loader.load(changed), loader.load(artifact)
    assert loaded is not usual
    assert loaded.describe() == usual.describe()
    assert elsewhere(library, changed.read_library(), site) == set()


def elsewhere(before, after, site):
    """Return which instructions differ besides the edited one, its room, and reuse flags before it."""
    assert len(before) == len(after)
    mine = {site.at, *range(site.room, site.room + 80, 16)}
    differ = {at for at in range(site.start % 16, len(before), 16) if before[at : at + 16] != after[at : at + 16]}
    return {at for at in differ - mine if not site.at - 128 <= at < site.at}
