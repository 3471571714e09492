"""Kernels of the other types through the real compiler: instructions in the machine code, spills and shared memory."""

import math
import re
import struct
import subprocess

import pytest

import cutlass_ops as co
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.derivatives import vjp
from cutlass_ops.kinds.proof import prove_tensor_cores
from cutlass_ops.kinds.table import shared_memory
from cutlass_ops.run.backward import as_epilogue
from cutlass_ops.tools.inspection import inspect
from tests.compile.test_fp8 import quantised
from tests.sampling import compiled

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def instructions(library):
    """Return the full names of the Tensor Core instructions, or None where the toolkit cannot disassemble."""
    text = disassembled(library)
    return None if text is None else set(re.findall(r"\b[HDI]G?MMA[.A-Z0-9x]+", text))


def disassembled(library):
    """Return a library's machine code as text, or None where the toolkit cannot disassemble."""
    known = find_toolchain()
    if known.cuobjdump is None or known.nvdisasm is None:
        return None
    path = {"PATH": f"{known.nvdisasm.parent}:/usr/bin:/bin"}
    command = [known.cuobjdump, "-sass", library]
    return subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout


# Of D = gelu(A @ B + bias) in FP64: that of A @ B.
GRADIENT = as_epilogue(vjp(builtin.bias_gelu.graph, [], in_fp64=True).expression)


def sm80(tile, warp, instruction, **more):
    shapes = co.ThreadblockShape(*tile), co.WarpShape(*warp), co.InstructionShape(*instruction)
    return co.Sm80Config(*shapes, **more)


def sm90(m, n, k, **more):
    return co.Sm90Config(co.ThreadblockShape(m, n, k), co.ClusterShape(2, 1), **more)


KERNELS = {
    # 64x128x8 each: a warpgroup's tile has two along M and four along K, once for the first step and once in the loop.
    "tf32 by wgmma": (
        {"a": "tf32.row", "b": "tf32.col"},
        sm90(128, 128, 32),
        ("HGMMA", 2 * 4 * 2),
        r"HGMMA\.64x128x8\.F32\.TF32",
    ),
    # As above, of operands that a kernel of its own copies before.
    "tf32 by wgmma, copied": (
        {"a": "tf32.col", "b": "tf32.row.align1"},
        sm90(128, 128, 32, realign=True),
        ("HGMMA", 2 * 4 * 2),
        r"HGMMA\.64x128x8\.F32\.TF32",
    ),
    # 16x8x8 each: a warp's tile has four along M, eight along N and four along K.
    "tf32 by mma.sync": (
        {"a": "tf32.col", "b": "tf32.row.align1"},
        sm80((128, 128, 32), (64, 64, 32), (16, 8, 8), stages=3),
        ("HMMA", 4 * 8 * 4),
        r"HMMA\.1688\.F32\.TF32",
    ),
    # As many, three times.
    "3xtf32 by mma.sync": (
        {"a": "tf32x3.row", "b": "tf32x3.col"},
        sm80((128, 128, 16), (64, 32, 16), (16, 8, 8), stages=3, stream_k=True),
        ("HMMA", 4 * 4 * 2 * 3),
        r"HMMA\.1688\.F32\.TF32",
    ),
    # 16x8x4 each: a warp's tile has two along M, eight along N and four along K.
    "fp64 by mma.sync of Hopper": (
        {"a": "f64.col", "b": "f64.row.align1", "d": "f64.row.align1"},
        sm80((128, 128, 16), (32, 64, 16), (16, 8, 4), stages=3),
        ("DMMA", 2 * 8 * 4),
        r"DMMA\.16x8x4",
    ),
    # As above, of tiles that several blocks share: two along M, four along N, four along K.
    "fp64 of few rows": (
        {"a": "f64.row", "b": "f64.col", "d": "f64.row"},
        sm80((32, 128, 16), (32, 32, 16), (16, 8, 4), stages=5, stream_k=True),
        ("DMMA", 2 * 4 * 4),
        r"DMMA\.16x8x4",
    ),
    # 16x8x16 each: two along M, four along N, two along K.
    "fp64 by the longest mma.sync of Hopper": (
        {"a": "f64.row", "b": "f64.row", "d": "f64.row.align1"},
        sm80((128, 64, 32), (32, 32, 32), (16, 8, 16), stages=3),
        ("DMMA", 2 * 4 * 2),
        r"DMMA\.16x8x16",
    ),
    "fp64 by another mma.sync of Hopper": (
        {"a": "f64.col", "b": "f64.col", "d": "f64.row"},
        sm80((64, 64, 16), (32, 32, 16), (16, 8, 8), stages=5, stream_k=True),
        ("DMMA", 2 * 4 * 2),
        r"DMMA\.16x8x8",
    ),
    # 8x8x4 each. The derivative has numbers that FP32 rounds.
    "fp64 by mma.sync": (
        {"a": "f64.row", "b": "f64.col", "d": "f64.row", "epilogue": GRADIENT},
        sm80((64, 128, 16), (32, 64, 16), (8, 8, 4), stages=4),
        ("DMMA", 4 * 8 * 4),
        r"DMMA\.884",
    ),
    # 64x128x32 each.
    "int8 by wgmma": (
        {"a": "i8.row", "b": "i8.col", "d": "bf16.row"},
        sm90(128, 128, 128),
        ("IGMMA", 2 * 4 * 2),
        r"IGMMA\.64x128x32\.S8\.S8",
    ),
    # As above, 64x64x32 each, and by CUTLASS's own epilogue, as TMA cannot store D. test_fp8.py looks at how it does.
    "int8 by wgmma, odd lines": (
        {"a": "i8.row", "b": "i8.col", "d": "e5m2.row.align8", "epilogue": quantised},
        co.Sm90Config(co.ThreadblockShape(128, 64, 128), schedule="pingpong"),
        ("IGMMA", 2 * 4 * 2),
        r"IGMMA\.64x64x32\.S8\.S8",
    ),
    "int8 to int8 by wgmma, copied": (
        {"a": "i8.row.align1", "b": "i8.row", "d": "i8.row"},
        sm90(128, 128, 128, realign=True),
        ("IGMMA", 2 * 4 * 2),
        r"IGMMA\.64x128x32\.S8\.S8",
    ),
    # Sums as they are, which nothing computes with.
    "int8 to int32 by wgmma": (
        {"a": "i8.row", "b": "i8.col", "d": "i32.row", "epilogue": builtin.identity},
        sm90(128, 128, 128),
        ("IGMMA", 2 * 4 * 2),
        r"IGMMA\.64x128x32\.S8\.S8",
    ),
    "int8 to int8 by mma.sync": (
        {"a": "i8.row", "b": "i8.col", "d": "i8.row"},
        sm80((128, 128, 64), (64, 64, 64), (16, 8, 32), stages=3),
        ("IMMA", 4 * 8 * 2),
        r"IMMA\.16832\.S8\.S8",
    ),
    # 16x8x32 each, two along K.
    "int8 by mma.sync": (
        {"a": "i8.row", "b": "i8.col", "d": "bf16.row.align1"},
        sm80((128, 128, 64), (64, 64, 64), (16, 8, 32), stages=3),
        ("IMMA", 4 * 8 * 2),
        r"IMMA\.16832\.S8\.S8",
    ),
}


# What is left to the machines that run the GPU tests.
ELSEWHERE = {"int8 by wgmma", "tf32 by wgmma, copied", "fp64 by mma.sync of Hopper"}
# Kernels that convert sums to INT8, and that do not convert them.
CONVERTED = ("int8 to int8 by wgmma, copied", "int8 to int32 by wgmma")


def declared(case):
    types, config, *_ = KERNELS[case]
    fp64_of_hopper = types["a"].startswith("f64") and config.instruction.m == 16
    target = "sm_90" if fp64_of_hopper else None
    named = {"d": "f32.row", "epilogue": builtin.bias_relu, **types}
    return co.KernelSpec(**named, config=config, target=target)


@pytest.mark.parametrize("case", compiled({name: (name,) for name in KERNELS}, beside_gpu_tests=ELSEWHERE))
def test_a_kernel_has_its_instruction(case):
    wanted, (_, _, (opcode, count), name) = declared(case), KERNELS[case]
    assert co.check(wanted) == ()
    artifact = build_artifact(wanted)
    assert prove_tensor_cores(artifact.library, wanted)[opcode] == count
    named = instructions(artifact.library)
    assert named is None or (named and all(re.match(name, each) for each in named))
    report = inspect(artifact)
    assert report.spill_stores == report.spill_loads == 0
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)


def test_numbers_of_derivatives_are_doubles_in_the_machine_code():
    """The compiler adds up the constants that FP32 has."""
    library = build_artifact(declared("fp64 by mma.sync")).library
    assert struct.pack("<d", 1 / math.sqrt(2 * math.pi)) in library.read_bytes()


def test_parts_of_sums_in_fp64_are_added_up_in_fp64():
    """In turn, to memory, or by blocks of their own. Nothing is converted, and no FP32 value is computed with."""
    text = disassembled(build_artifact(declared("fp64 of few rows")).library)
    if text is None:
        pytest.skip("the toolkit cannot disassemble")
    assert re.search(r"\b(RED|ATOM)G?\.E\.ADD\.F64", text)
    assert re.search(r"\bDADD\b", text)
    assert not re.search(r"\b(FADD|FMUL|FFMA|F2F\.\S*F32)\b", text)


def test_results_in_int8_are_rounded_by_one_instruction_and_sums_by_none():
    """INT8 saturates as it is rounded. Sums in INT32 never were FP32: nothing makes that of an integer with a sign."""
    to_int8, sums = (disassembled(build_artifact(declared(case)).library) for case in CONVERTED)
    if to_int8 is None or sums is None:
        pytest.skip("the toolkit cannot disassemble")
    signed = r"\bI2FP?\.(F32\.)?S32"
    assert re.search(r"\bF2IP?\.S8\.F32", to_int8)
    assert re.search(signed, to_int8)
    assert not re.search(signed, sums)
