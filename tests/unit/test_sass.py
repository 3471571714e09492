"""Machine code: the instructions that are counted, and the reuse flags that are cleared."""

import contextlib
import re
import struct
import subprocess
from collections import Counter

import pytest
from fake_toolkit import FFMA, HGMMA, HMMA, UTMALDG, elf, library, sm80_spec, sm90_spec

from cutlass_ops.base import arch, sass
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.base.sass import OPCODES, count_opcodes
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.kinds.proof import prove_tensor_cores


def test_counts_every_operand_form_and_nothing_else(write):
    assert count_opcodes(write(library(HMMA, FFMA, HMMA, 0x7DF0, HGMMA))) == {"HGMMA": 2, "HMMA": 2}


@pytest.mark.parametrize(
    ("spec", "code", "missing"),
    [
        (sm80_spec(), (HMMA,), None),
        (sm80_spec(), (FFMA,), "HMMA"),
        (sm80_spec(), (HGMMA,), "HMMA"),
        (sm90_spec(), (HGMMA, UTMALDG), None),
        (sm90_spec(), (HMMA, UTMALDG), "HGMMA"),
        (sm90_spec(), (HGMMA,), "UTMALDG"),
        (sm90_spec(), (), "HGMMA and no UTMALDG"),
    ],
)
def test_proof(write, spec, code, missing):
    path = write(library(*code))
    if missing is None:
        assert prove_tensor_cores(path, spec) == count_opcodes(path)
    else:
        with pytest.raises(CompileError, match=f"no {missing} instruction.*{spec.config.arch}"):
            prove_tensor_cores(path, spec)


def test_no_machine_code(write):
    with pytest.raises(CompileError, match="no uncompressed GPU machine code"):
        count_opcodes(write(b"\x7fELF" + bytes(100)))


@pytest.mark.slow
def test_truncated_machine_code_is_an_error_and_no_crash(write):
    whole = library(HMMA)
    for size in range(65, len(whole) - 4):
        path = write(whole[:size])
        with pytest.raises(CompileError):
            count_opcodes(path)


PROBE = r"""
#if defined(__CUDACC__)
#include <cstdint>
__global__ void probe(uint32_t* o, const void* g, int n) {
  uint32_t d[4] = {o[0], o[1], o[2], o[3]}, a[4] = {o[4], o[5], o[6], o[7]}, b[2] = {o[8], o[9]};
#define MMA(types)                                                                                       \
  asm volatile("mma.sync.aligned." types " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"           \
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
  MMA("m16n8k16.row.col.f32.f16.f16.f32");
  MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  MMA("m16n8k32.row.col.s32.s8.s8.s32");
  double x = o[0], y = o[1], z = o[2];
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%2},{%0,%1};"
               : "+d"(x), "+d"(y) : "d"(z));
  __shared__ alignas(128) uint4 s[512];
  uint32_t sa = __cvta_generic_to_shared(s);
  asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(sa), "l"(g));
  asm volatile("cp.async.wait_all;");
  volatile uint32_t local[64];
  local[n] = d[0];
#ifdef SM90A
  uint64_t da = o[8], db = o[9];
#define WGMMA(types, tail)                                                                               \
  asm volatile("wgmma.mma_async.sync.aligned." types " {%0,%1,%2,%3},%4,%5," tail ";"                    \
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "l"(da), "l"(db))
  asm volatile("wgmma.fence.sync.aligned;");
  WGMMA("m64n8k16.f32.bf16.bf16", "1,1,1,0,0");
  WGMMA("m64n8k32.f32.e4m3.e4m3", "1,1,1");
  WGMMA("m64n8k32.s32.s8.s8", "1");
  asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0,%1,%2,%3},{%4,%5,%6,%7},%8,1,1,1,0;"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(db));
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
#define TENSOR "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
  asm volatile(TENSOR " [%0],[%1,{%2,%2}],[%3];" ::"r"(sa), "l"(g), "r"(n), "r"(sa + 4096));
  asm volatile(TENSOR ".multicast::cluster [%0],[%1,{%2,%2}],[%3],%4;"
               ::"r"(sa), "l"(g), "r"(n), "r"(sa + 4096), "h"(short(n)));
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0,{%1,%1}],[%2];" ::"l"(g), "r"(n), "r"(sa));
  asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0,{%1,%1}],[%2];"
               ::"l"(g), "r"(n), "r"(sa));
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0],[%1],%2;" ::"l"(g), "r"(sa), "r"(1024));
#endif
  for (int i = 0; i < 4; ++i) o[i] = d[i] + uint32_t(x) + uint32_t(y) + s[n].x + local[n + i];
}
#endif
"""


def disassembled(folder, source, target):
    """A kernel's machine code in words."""
    try:
        toolchain = find_toolchain()
    except ToolchainError as exc:
        pytest.skip(str(exc))
    if toolchain.cuobjdump is None or toolchain.nvdisasm is None:
        pytest.skip("no cuobjdump and nvdisasm")
    (folder / "kernel.cu").write_text(source)
    compile_kernel(folder, "kernel.cu", "kernel.so", arch.target(target), toolchain)
    command = [toolchain.cuobjdump, "-sass", folder / "kernel.so"]
    path = {"PATH": f"{toolchain.nvdisasm.parent}:/usr/bin:/bin"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=path).stdout


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90a"])
def test_the_opcode_table_agrees_with_the_disassembler(tmp_path, target):
    text = disassembled(tmp_path, ("#define SM90A\n" if target == "sm_90a" else "") + PROBE, target)
    mnemonics = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", text, re.MULTILINE))
    counted = count_opcodes(tmp_path / "kernel.so")
    assert counted == {op: n for op, n in sorted(mnemonics.items()) if op in OPCODES.values()}
    expected = {"HMMA", "IMMA", "DMMA", "LDGSTS", "LDL", "STL"}
    assert set(counted) == (set(OPCODES.values()) if target == "sm_90a" else expected)


# ---- Operand reuse flags whose register is written before it is read again -------------------------------------------

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
    assert list(sass.stale(code(*STALE))) == [(0, 1)]


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
    assert not list(sass.stale(code(*instructions)))


def test_a_load_writes_as_many_registers_as_it_may():
    assert list(sass.stale(code(STALE[0], LOADED_20))) == [(0, 1)]


def test_a_flag_is_cleared_and_nothing_else():
    before = wrapped(code(*STALE))
    after = sass.mended(before)
    assert len(after) == len(before)
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [before.index(code(*STALE)) + 15]
    assert before[changed[0]] ^ after[changed[0]] == 1 << (59 - 56)
    sass.require_none_stale(after, "it")
    assert sass.mended(after) == after


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
            sass.require_none_stale(whole[:size], "it")


# Sums of products in registers, of several types and with immediates, so that most operands are kept somewhere.
SUMS = r"""
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
    flags = 0
    text = disassembled(tmp_path, SUMS, target)
    for said, low, high in re.findall(r"\*/\s+(.*?);\s+/\* 0x(\w{16}) \*/\s+/\* 0x(\w{16}) \*/", text):
        named = sorted(map(int, re.findall(r"\bR(\d+)\|?\.reuse", said)))
        words = int(low, 16), int(high, 16)
        assert sorted(sass.flagged(*words).values()) == named, said
        flags += len(named)
    assert flags > 100
