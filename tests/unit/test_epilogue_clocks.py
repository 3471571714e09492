"""What machine code says of an epilogue's time, of instructions that are made up."""

import struct

import pytest

from cutlass_ops.kinds import legality
from tests.scripts import script

CLOCKS = script("epilogue_clocks")
ADD, SPECIAL, PRODUCTS = 0x021, 0x108, 0x1F0
NONE = 7  # no barrier


def instruction(op, stall=1, writes=NONE, waits=0):
    control = stall | writes << 5 | NONE << 8 | waits << 11
    return struct.pack("<QQ", op, control << 41)


def test_a_warp_waits_for_what_it_names():
    code = b"".join([instruction(SPECIAL, writes=2), instruction(ADD, stall=4), instruction(SPECIAL, waits=1 << 2)])
    ((count, found),) = CLOCKS.stretches(code)
    assert count == 2
    assert found == (22 + 1, 3)  # until the first result is there, and then one clock


def test_results_that_nobody_waits_for_cost_nothing():
    code = b"".join([instruction(SPECIAL, writes=at) for at in range(6)])
    ((_, found),) = CLOCKS.stretches(code)
    assert found == (6, 6)


def test_products_end_a_stretch():
    code = instruction(SPECIAL) + instruction(PRODUCTS) + instruction(ADD) + instruction(SPECIAL) * 3
    assert [count for count, _ in CLOCKS.stretches(code)] == [1, 3]


@pytest.mark.parametrize("name", CLOCKS.EPILOGUES)
def test_its_kernels_are_legal(name):
    found = CLOCKS.specs([name])
    assert len(found) == len(CLOCKS.TILES)
    for spec in found.values():
        assert legality.check(spec) == ()
