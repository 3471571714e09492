import re
import subprocess
from collections import Counter

import pytest
from fake_toolkit import FFMA, HGMMA, HMMA, UTMALDG, library, sm80_spec, sm90_spec

from cutlass_ops.base import arch
from cutlass_ops.base.arch import OPCODES
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.base.sass import count_opcodes
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


@pytest.mark.compile
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90a"])
def test_the_opcode_table_agrees_with_the_disassembler(tmp_path, target):
    try:
        toolchain = find_toolchain()
    except ToolchainError as exc:
        pytest.skip(str(exc))
    if toolchain.cuobjdump is None or toolchain.nvdisasm is None:
        pytest.skip("no cuobjdump and nvdisasm")
    (tmp_path / "kernel.cu").write_text(("#define SM90A\n" if target == "sm_90a" else "") + PROBE)
    compile_kernel(tmp_path, "kernel.cu", "kernel.so", arch.target(target), toolchain)
    command = [toolchain.cuobjdump, "-sass", tmp_path / "kernel.so"]
    path = {"PATH": f"{toolchain.nvdisasm.parent}:/usr/bin:/bin"}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=path).stdout
    mnemonics = Counter(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)", text, re.MULTILINE))
    counted = count_opcodes(tmp_path / "kernel.so")
    assert counted == {op: n for op, n in sorted(mnemonics.items()) if op in OPCODES.values()}
    expected = {"HMMA", "IMMA", "DMMA", "LDGSTS", "LDL", "STL"}
    assert set(counted) == (set(OPCODES.values()) if target == "sm_90a" else expected)
