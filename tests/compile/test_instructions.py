"""The loops and GEMMs of benchmarks/bench_instructions.py: which instructions their machine code has."""

import re
import subprocess

import pytest

from cutlass_ops.compilation.toolchain import find_toolchain
from tests.sampling import compiled
from tests.scripts import script

pytestmark = [pytest.mark.compile, pytest.mark.slow]

BENCH = script("bench_instructions")
LOOPS = [
    *("HGMMA.64x256x16.F32", "HGMMA.64x256x16.F16", "HMMA.16816.F32", "HMMA.16816.F16"),
    *("DMMA.8x8x4", "DMMA.16x8x4", "DMMA.16x8x8", "DMMA.16x8x16"),
]


@pytest.mark.parametrize(
    ("name", "wanted"),
    compiled(
        {"loops": (BENCH.LOOPS, LOOPS), "gemms": (BENCH.GEMMS, ["HGMMA.64x256x16.F32", "HGMMA.64x256x16.F16"])},
        beside_gpu_tests={"gemms"},
    ),
)
def test_each_function_has_one_instruction(tmp_path, name, wanted):
    library = BENCH.compile_library(name, tmp_path)
    known = find_toolchain()
    if known.cuobjdump is None or known.nvdisasm is None:
        pytest.skip("the toolkit cannot disassemble")
    path = {"PATH": f"{known.nvdisasm.parent}:/usr/bin:/bin"}
    command = [known.cuobjdump, "-sass", library]
    text = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout
    functions = [set(re.findall(r"\b[HD]G?MMA[.A-Z0-9x]+", part)) for part in text.split("Function : ")[1:]]
    assert all(len(found) == 1 for found in functions)
    assert sorted(name for found in functions for name in found) == sorted(wanted)
    assert not re.search(r"\b(STL|LDL)\b", text)
    if name == BENCH.LOOPS:
        loops = BENCH.loops(library)
        assert [loop.name.split(".")[0] for loop in loops] == ["wgmma"] * 2 + ["mma"] * 6
        assert {half for _, half, _ in BENCH.PAIRS} | {single for *_, single in BENCH.PAIRS} == {
            x.name for x in loops[:4]
        }
        assert all(loop.products > 0 for loop in loops)
