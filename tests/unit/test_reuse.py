"""Operand reuse flags whose register is written before it is read again."""

import contextlib
import re
import struct
import subprocess

import pytest
from fake_toolkit import HGMMA, HMMA, UTMALDG, elf, library, sm90_spec

from cutlass_ops.base import arch, reuse
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.kinds.proof import prove_tensor_cores

# From a kernel by ptxas 13.0.88 whose D was zero wherever the last instruction packed R23: it got the former value.
STALE = (
    (0x00000017FF0F7210, 0x080FE200007FE4FF),  # IADD3.X R15, RZ, R23.reuse, RZ, P0, !PT
    (0x0000000622227220, 0x000FE20000400000),  # FMUL R34, R34, R6
    (0x0000001600037202, 0x000FE20000000F00),  # MOV R3, R22
    (0x0000000684167220, 0x080FE20000400000),  # FMUL R22, R132, R6.reuse
    (0x0000000686177220, 0x000FE20000400000),  # FMUL R23, R134, R6
    (0x000000808114723E, 0x000FE200000010FF),  # F2FP.BF16.F32.PACK_AB R20, R129, R128
    (0x0000001002007844, 0x0003E20000000200),  # STSM.16.M88.4 [R2], R16
    (0x0000000712127899, 0x000FE2000800063F),  # USHF.L.U32 UR18, UR18, 0x7, URZ
    (0x000000177817723E, 0x000FE200000010FF),  # F2FP.BF16.F32.PACK_AB R23, R120, R23
)
READ_R23 = (0x0000001786177220, 0x000FE20000400000)  # FMUL R23, R134, R23
ADDED = (
    (0x0000000331317221, 0x100FE20000000000),
    (0x0000000331317221, 0x000FE20000000000),
)  # FADD R49, R49, R3[.reuse]
UNIFORM_23 = (0x0000000712177899, 0x000FE2000800063F)  # USHF.L.U32 UR23, UR18, 0x7, URZ
LOADED_20 = (0x0000000002147984, 0x000E220000000C00)  # LDS.128 R20, [R2], which writes R20 to R23


def code(*instructions):
    return b"".join(struct.pack("<QQ", *each) for each in instructions)


def wrapped(machine_code):
    image = elf(190, {".text.kernel": machine_code})
    return elf(62, {".text": b""}, image)


def test_a_register_written_before_its_slot_reads_it_again():
    assert list(reuse.stale(code(*STALE))) == [(0, 1)]


@pytest.mark.parametrize(
    "instructions",
    [
        STALE[1:],  # R6, which the next instruction reads
        (STALE[0], READ_R23, *STALE[4:]),  # read before it is written, by the instruction that writes it
        (STALE[0], UNIFORM_23, STALE[-2]),  # a uniform register of the same number
        (STALE[0], *STALE[1:4]),  # never written
        ADDED,  # the second operand of an addition is at the third slot
    ],
    ids=["read next", "read by the writer", "uniform", "never written", "added"],
)
def test_flags_that_may_stay(instructions):
    assert not list(reuse.stale(code(*instructions)))


def test_a_load_writes_as_many_registers_as_it_may():
    assert list(reuse.stale(code(STALE[0], LOADED_20))) == [(0, 1)]


def test_a_flag_is_cleared_and_nothing_else():
    before = wrapped(code(*STALE))
    after = reuse.mended(before)
    assert len(after) == len(before)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [before.index(code(*STALE)) + 15]
    assert before[changed[0]] ^ after[changed[0]] == 1 << (59 - 56)
    reuse.require_none_stale(after, "it")
    assert reuse.mended(after) == after


def test_a_kernel_with_one_is_refused(write):
    spec = sm90_spec()
    assert prove_tensor_cores(write(library(HGMMA, UTMALDG, HMMA)), spec)
    path = write(wrapped(code(*STALE)))
    with pytest.raises(CompileError, match=r"at 0x0, operand 2.*compile the kernel again"):
        prove_tensor_cores(path, spec)


def test_truncated_machine_code_is_an_error():
    whole = wrapped(code(*STALE))
    for size in range(65, len(whole) - 4):
        with contextlib.suppress(CompileError):  # and nothing else
            reuse.require_none_stale(whole[:size], "it")


# Sums of products in registers, of several types and with immediates, so that most operands are kept somewhere.
PROBE = r"""
#if defined(__CUDACC__)
#include <cuda_fp16.h>
#include <cstdint>
template <class T>
__device__ T both(T x, T y) { return x > y ? x * y : x + y; }
template <class T>
__device__ void outer(T* o, T const* a, int n) {
  T x[6], y[6], sums[6][6] = {};
  for (int k = 0; k < n; ++k) {
    for (int i = 0; i < 6; ++i) x[i] = a[k * 12 + i], y[i] = a[k * 12 + 6 + i];
    for (int i = 0; i < 6; ++i)
      for (int j = 0; j < 6; ++j) sums[i][j] += x[i] * y[j];
  }
  for (int i = 0; i < 6; ++i)
    for (int j = 0; j < 6; ++j) o[i * 6 + j] = both<T>(sums[i][j], x[i]) + (sums[i][j] + y[j]) * (x[j] - y[i]);
}
__global__ void probe(float* f, double* d, int* i, uint32_t* u, __half2* h, int n) {
  outer(f, f + 99, n);
  outer(d, d + 99, n);
  outer(i, i + 99, n);
  for (int k = 0; k < 16; ++k) u[k] = (u[k + 16] ^ u[17]) + (u[k + 16] & u[18]) * 5u + (u[k + 16] >> 3 | u[17] << 2);
  for (int k = 0; k < 8; ++k) h[k] = __hfma2(h[k + 8], h[20], h[k + 9]) + h[20] * h[k + 8];
  for (int k = 0; k < 8; ++k) f[k] += __half2float(h[k].x) + fmaxf(f[k + 8], f[20]) * 1.5f + f[20];
}
#endif
"""


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90a"])
def test_registers_are_where_the_disassembler_names_them(tmp_path, target):
    try:
        toolchain = find_toolchain()
    except ToolchainError as exc:
        pytest.skip(str(exc))
    if toolchain.cuobjdump is None or toolchain.nvdisasm is None:
        pytest.skip("no cuobjdump and nvdisasm")
    (tmp_path / "kernel.cu").write_text(PROBE)
    compile_kernel(tmp_path, "kernel.cu", "kernel.so", arch.target(target), toolchain)
    command = [toolchain.cuobjdump, "-sass", tmp_path / "kernel.so"]
    path = {"PATH": f"{toolchain.nvdisasm.parent}:/usr/bin:/bin"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=path).stdout
    flags = 0
    for said, low, high in re.findall(r"\*/\s+(.*?);\s+/\* 0x(\w{16}) \*/\s+/\* 0x(\w{16}) \*/", text):
        named = sorted(map(int, re.findall(r"\bR(\d+)\|?\.reuse", said)))
        words = int(low, 16), int(high, 16)
        assert sorted(reuse.flagged(*words).values()) == named, said
        flags += len(named)
    assert flags > 100
