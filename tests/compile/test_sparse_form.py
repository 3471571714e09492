"""Kernels of sparse weights, without a GPU: the order of metadata, and sparse instructions, which overlap.

CuTe's traits of sparse ``wgmma`` say what each thread gives to the instruction.
"""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base import arch, dtypes, elf, sass
from cutlass_ops.base.sass import count_opcodes
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.legality import is_legal
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.operand import sparsity
from cutlass_ops.run import sparse as of_sparse
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


def _sparse(m: int, n: int, k: int, schedule: Any, a: str) -> KernelSpec:
    config = Sm90Config(ThreadblockShape(m, n, k), schedule=schedule, swap_ab=True)
    b = f"{a}s.col.blocks64x64"
    return KernelSpec(a=f"{a}.row", b=b, d="bf16.row", epilogue=of_sparse._SPARSE, config=config, target="sm_90a")


@pytest.mark.parametrize(
    "spec",
    [_sparse(192, 128, 64, "pingpong", "bf16"), _sparse(256, 184, 128, "cooperative", "e4m3")],
    ids=lambda spec: spec.config.slug,
)
def test_instructions_of_the_largest_tiles_overlap(spec: KernelSpec) -> None:
    """Where registers are short, ptxas has each instruction wait for the one before, and does not say so.

    Then each is a group of its own, which its bits 84 to 86 say. Otherwise only the last one of a step names a group.
    """
    assert is_legal(spec)
    artifact = build_artifact(spec)
    groups = [
        (high >> 20) & 7
        for code in elf.gpu_code(artifact.read_library())
        for low, high in struct.iter_unpack("<QQ", code)
        if low & 0x1FF in sass.SPARSE
    ]
    ends, steps = sum(group == 0 for group in groups), 4  # the loop's two, and one before it and one after it
    assert ends == steps < len(groups)


# Reads the rows and columns of a weight, its elements and metadata; writes stored elements and metadata.
_COMPRESSION = """
#include <cstdio>
#include <vector>
#include "cutlass_ops/quantize_tensor.h"
static uint3 thread_at{}, block_at{};
#define threadIdx thread_at
#define blockIdx block_at
#include "cutlass_ops/compress.h"
CUTLASS_OPS_TYPE(ELEMENT, kDLFloat)
CUTLASS_OPS_TYPE(uint8_t, kDLUInt)
using Kernel = cutlass_ops::Compress<ELEMENT, PRUNE>;
using Bits = Kernel::Bits;
int main() {
  int shape[2];
  if (fread(shape, 4, 2, stdin) != 2) return 1;
  int const rows = shape[0], columns = shape[1];
  int const row_blocks = (rows + 63) / 64, k_blocks = (columns + 127) / 128 * 2;
  size_t const count = size_t(rows) * columns, words = size_t(row_blocks) * k_blocks * 128;
  Bits* const from = new (std::align_val_t(16)) Bits[count];
  Bits* const to = new (std::align_val_t(16)) Bits[count / 2];
  std::vector<uint32_t> meta(words);
  if (fread(from, sizeof(Bits), count, stdin) != count || fread(meta.data(), 4, words, stdin) != words) return 2;
  Kernel::Params const params{from, to, meta.data(), columns, columns / 2, rows, columns, row_blocks, k_blocks};
  for (block_at.x = 0; block_at.x * Kernel::kThreads < words; ++block_at.x)
    for (thread_at.x = 0; thread_at.x < Kernel::kThreads; ++thread_at.x) Kernel::run(params);
  fwrite(to, sizeof(Bits), count / 2, stdout);
  fwrite(meta.data(), 4, words, stdout);
}
"""


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("element", [dtypes.bf16, dtypes.f16, dtypes.e4m3, dtypes.e5m2, dtypes.i8], ids=str)
def test_a_kernel_compresses_as_pytorch_does(element: dtypes.DType, prune: bool, tmp_path: Path) -> None:
    """On the host, to the last bit. The weight has every bit pattern: also NaN, infinities, equal values and -0."""
    source = _COMPRESSION.replace("ELEMENT", element.cpp).replace("PRUNE", str(prune).lower())
    program = host.program(tmp_path, source, *host.UNLINKED)
    dtype: torch.dtype = getattr(torch, element.torch_name)
    generator = torch.Generator().manual_seed(0)
    for n, k in ((130, 224), (64, 128), (1, 32)):
        bits = torch.randint(0, 256, (n, k * dtype.itemsize), dtype=torch.uint8, generator=generator)
        if dtype.itemsize == 2:
            bits[:, ::2] &= 0x83  # so that many are equal, and infinities beside NaN
        w, before = bits.view(dtype), co.sparsify(torch.randn(k, n, generator=generator).to(dtype))
        wanted = co.sparsify(w.t()) if prune else before.to("cpu")
        if not prune:
            wanted.update_(w.t())
        given = b"".join((struct.pack("ii", n, k), *(bytes(x.flatten().tolist()) for x in (bits, before.meta))))
        found = subprocess.run([program], input=given, capture_output=True, check=True).stdout
        values, meta = found[: n * k // 2 * dtype.itemsize], found[n * k // 2 * dtype.itemsize :]
        assert values == bytes(wanted.values.t().contiguous().view(torch.uint8).flatten().tolist())
        assert meta == bytes(wanted.meta.flatten().tolist())
