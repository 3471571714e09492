"""Kernels of the other types through the real compiler: instructions in the machine code, spills and shared memory."""

import re
import subprocess

import pytest

import cutlass_ops as co
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds.proof import prove_tensor_cores
from cutlass_ops.kinds.table import shared_memory
from cutlass_ops.tools.inspection import inspect

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def instructions(library):
    """Return the full names of the Tensor Core instructions, or None where the toolkit cannot disassemble."""
    known = find_toolchain()
    if known.cuobjdump is None or known.nvdisasm is None:
        return None
    path = {"PATH": f"{known.nvdisasm.parent}:/usr/bin:/bin"}
    text = subprocess.run([known.cuobjdump, "-sass", library], env=path, capture_output=True, text=True, check=True)
    return set(re.findall(r"\b[HDI]G?MMA[.A-Z0-9x]+", text.stdout))


KERNELS = {
    # 64x128x8 each: a warpgroup's tile has two along M and four along K, once for the first step and once in the loop.
    "tf32 by wgmma": (
        {"a": "tf32.row", "b": "tf32.col"},
        co.Sm90Config(co.ThreadblockShape(128, 128, 32), co.ClusterShape(2, 1)),
        ("HGMMA", 2 * 4 * 2),
        r"HGMMA\.64x128x8\.F32\.TF32",
    ),
    # 16x8x8 each: a warp's tile has four along M, eight along N and four along K.
    "tf32 by mma.sync": (
        {"a": "tf32.col", "b": "tf32.row.align1"},
        co.Sm80Config(
            co.ThreadblockShape(128, 128, 32), co.WarpShape(64, 64, 32), co.InstructionShape(16, 8, 8), stages=3
        ),
        ("HMMA", 4 * 8 * 4),
        r"HMMA\.1688\.F32\.TF32",
    ),
    # As many, three times.
    "3xtf32 by mma.sync": (
        {"a": "tf32x3.row", "b": "tf32x3.col"},
        co.Sm80Config(
            co.ThreadblockShape(128, 128, 16),
            co.WarpShape(64, 32, 16),
            co.InstructionShape(16, 8, 8),
            stages=3,
            stream_k=True,
        ),
        ("HMMA", 4 * 4 * 2 * 3),
        r"HMMA\.1688\.F32\.TF32",
    ),
    # 16x8x4 each: a warp's tile has two along M, eight along N and four along K.
    "fp64 by mma.sync of Hopper": (
        {"a": "f64.col", "b": "f64.row.align1", "d": "f64.row.align1"},
        co.Sm80Config(
            co.ThreadblockShape(128, 128, 16), co.WarpShape(32, 64, 16), co.InstructionShape(16, 8, 4), stages=3
        ),
        ("DMMA", 2 * 8 * 4),
        r"DMMA\.16x8x4",
    ),
    # 8x8x4 each.
    "fp64 by mma.sync": (
        {"a": "f64.row", "b": "f64.col", "d": "f64.row"},
        co.Sm80Config(
            co.ThreadblockShape(64, 128, 16), co.WarpShape(32, 64, 16), co.InstructionShape(8, 8, 4), stages=4
        ),
        ("DMMA", 4 * 8 * 4),
        r"DMMA\.884",
    ),
    # 64x128x32 each.
    "int8 by wgmma": (
        {"a": "i8.row", "b": "i8.col", "d": "bf16.row"},
        co.Sm90Config(co.ThreadblockShape(128, 128, 128), co.ClusterShape(2, 1)),
        ("IGMMA", 2 * 4 * 2),
        r"IGMMA\.64x128x32\.S8\.S8",
    ),
    # As above, 64x64x32 each, and by CUTLASS's own epilogue, as TMA cannot store D.
    "int8 by wgmma, odd lines": (
        {"a": "i8.row", "b": "i8.col", "d": "f16.row.align1"},
        co.Sm90Config(co.ThreadblockShape(64, 64, 128), schedule="warp_specialized"),
        ("IGMMA", 4 * 2),
        r"IGMMA\.64x64x32\.S8\.S8",
    ),
    # 16x8x32 each, two along K.
    "int8 by mma.sync": (
        {"a": "i8.row", "b": "i8.col", "d": "bf16.row.align1"},
        co.Sm80Config(
            co.ThreadblockShape(128, 128, 64), co.WarpShape(64, 64, 64), co.InstructionShape(16, 8, 32), stages=3
        ),
        ("IMMA", 4 * 8 * 2),
        r"IMMA\.16832\.S8\.S8",
    ),
}


@pytest.mark.parametrize(("types", "config", "counted", "name"), KERNELS.values(), ids=KERNELS)
def test_a_kernel_has_its_instruction(types, config, counted, name):
    target = "sm_90" if config.arch == "sm80" and config.instruction.m * config.instruction.k == 64 else None
    wanted = co.KernelSpec(**{"d": "f32.row", **types}, epilogue=builtin.bias_relu, config=config, target=target)
    assert co.check(wanted) == ()
    artifact = build_artifact(wanted)
    opcode, count = counted
    assert prove_tensor_cores(artifact.library, wanted)[opcode] == count
    named = instructions(artifact.library)
    assert named is None or (named and all(re.match(name, each) for each in named))
    report = inspect(artifact)
    assert report.spill_stores == report.spill_loads == 0
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)
