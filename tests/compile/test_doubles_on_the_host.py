"""Tiles of FP64 from shared memory to the operands of instructions, by the host's compiler: whole products, exactly."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.compile import host

pytestmark = [pytest.mark.compile, pytest.mark.slow]

TILES = (
    *("64x128x16_32x64_4", "32x128x16_32x32_4", "128x128x32_32x64_4", "64x64x16_32x32_8", "128x64x32_32x32_8"),
    *("128x64x32_32x32_16", "64x128x32_32x32_16", "32x128x32_32x32_16", "64x64x32_32x32_16"),
)
MAJORS = ("row-col", "row-row", "col-col", "col-row")


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    source = Path(__file__).with_name("doubles_on_the_host.cpp")
    program = host.program(tmp_path_factory.mktemp("host"), source, *host.UNRESOLVED)
    text = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: dict(re.findall(r"([a-z]+-[a-z]+) (\d+)", line)) for line in text.splitlines()}


@pytest.mark.parametrize("tile", TILES)
def test_a_tile_is_multiplied_whole_in_every_major(said, tile):
    assert said[tile] == dict.fromkeys(MAJORS, "0")


def test_an_operand_of_another_place_is_found(said):
    assert set(said) == {*TILES, "wrong"}
    assert all(int(count) > 1000 for count in said["wrong"].values())
