"""Kernels of sparse weights, without a GPU: the order of metadata, and the names of sparse instructions.

CuTe's traits of sparse ``wgmma`` say what each thread gives to the instruction.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from cutlass_ops.base import arch
from cutlass_ops.base.sass import count_opcodes
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.operand import sparsity
from tests.compile import host

pytestmark = pytest.mark.compile

# Each line: bits of an element, thread, index of the thread's element, and its place, row + 64 k.
_LISTING = """
#include <cstdio>
#include "cute/atom/mma_traits_sm90_gmma_sparse.hpp"
template <class Layout>
void list(int bits, Layout layout) {
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < cute::size<1>(layout); ++i) printf("%d %d %d %d\\n", bits, thread, i, int(layout(thread, i)));
}
int main() {
  list(16, cute::SM90::GMMA::ELayout_64x32{});
  list(8, cute::SM90::GMMA::ELayout_64x64{});
}
"""


def test_each_thread_has_the_metadata_that_the_instruction_takes_from_it(tmp_path: Path) -> None:
    found = subprocess.run([host.program(tmp_path, _LISTING, "-w")], capture_output=True, text=True, check=True)
    meta = torch.randint(0, 16, (64, 32), dtype=torch.uint8)  # of 128 along K
    bits = {size: sparsity.packed(meta, size).view(2, 128, 4).int() for size in (1, 2)}
    seen = {1: 0, 2: 0}
    for line in found.stdout.splitlines():
        of, thread, index, place = map(int, line.split())
        row, k = place % 64, place // 64
        # In 16 bits, either pair of four threads may give the metadata: the selector says which.
        instructions = 2 if of == 16 else 1
        if of == 16 and thread % 4 >= 2:
            continue
        for block in range(2):
            for i in range(instructions):
                word = bits[of // 8][block, thread + 2 * i]
                nibble = int(word[index // 8]) >> (4 * (index // 4 % 2)) & 15
                assert nibble == meta[row, (block * 64 + i * 32 + k) // 4], (of, thread, index, block, i)
                seen[of // 8] += 1
    assert seen == {1: 2 * 64 * 64, 2: 2 * 64 * 64}


_PROBE = """
#if defined(__CUDACC__)
#include <cstdint>
__global__ void probe(float* x, int* y, uint64_t a, uint64_t b, uint32_t meta) {
  float f[4] = {x[0], x[1], x[2], x[3]};
  int i[4] = {y[0], y[1], y[2], y[3]};
  asm volatile("wgmma.fence.sync.aligned;");
#define WGMMA(types, d, r, rest)                                                                              \
  asm volatile("wgmma.mma_async.sync.aligned." types " {%0,%1,%2,%3},%4,%5,1" rest ";"                        \
               : r(d[0]), r(d[1]), r(d[2]), r(d[3]) : "l"(a), "l"(b))
#define SPARSE(types, d, r, rest)                                                                             \
  asm volatile("wgmma.mma_async.sp.sync.aligned." types " {%0,%1,%2,%3},%4,%5,%6,0,1" rest ";"                \
               : r(d[0]), r(d[1]), r(d[2]), r(d[3]) : "l"(a), "l"(b), "r"(meta))
  WGMMA("m64n8k16.f32.bf16.bf16", f, "+f", ",1,1,0,0");
  SPARSE("m64n8k32.f32.bf16.bf16", f, "+f", ",1,1,0,0");
  WGMMA("m64n8k32.f32.e4m3.e4m3", f, "+f", ",1,1");
  SPARSE("m64n8k64.f32.e4m3.e4m3", f, "+f", ",1,1");
  WGMMA("m64n8k32.s32.s8.s8", i, "+r", "");
  SPARSE("m64n8k64.s32.s8.s8", i, "+r", "");
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;");
  for (int j = 0; j < 4; ++j) x[j] = f[j], y[j] = i[j];
}
#endif
"""


def test_sparse_instructions_are_counted_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "kernel.cu").write_text(_PROBE)
    compile_kernel(tmp_path, "kernel.cu", "kernel.so", arch.target("sm_90a"), find_toolchain())
    assert count_opcodes(tmp_path / "kernel.so") == {
        **dict.fromkeys(("HGMMA", "IGMMA", "QGMMA"), 1),
        **dict.fromkeys(("HGMMA.SP", "IGMMA.SP", "QGMMA.SP"), 1),
    }
