"""Rung 9: Triton. One kernel, well configured, and with the configurations that cost Hopper's instruction.

`wgmma` belongs to four warps and 64 rows: a tile of 32 rows, or two warps, get `mma.sync`. No warning says so. A
BLOCK_K below 16 is less than any instruction of FP16 multiplies: Triton refuses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for the CPU comes without
    triton = None


@dataclass(frozen=True)
class Blocks:
    """A configuration of the kernel."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int
    band: int = 8

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's compile-time arguments."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "BLOCK_K": self.k, "BAND": self.band}


WELL = Blocks(128, 256, 64, num_warps=8, num_stages=4)
FEW_ROWS = Blocks(32, 128, 64, num_warps=2, num_stages=4)
SHORT_K = Blocks(128, 128, 8, num_warps=4, num_stages=4)


if triton is not None:

    @triton.jit
    def _gemm(  # noqa: ANN202
        a,  # noqa: ANN001
        b,  # noqa: ANN001
        d,  # noqa: ANN001
        m,  # noqa: ANN001
        n,  # noqa: ANN001
        k,  # noqa: ANN001
        BLOCK_M: tl.constexpr,  # noqa: N803
        BLOCK_N: tl.constexpr,  # noqa: N803
        BLOCK_K: tl.constexpr,  # noqa: N803
        BAND: tl.constexpr,  # noqa: N803
    ):
        # Tiles in bands, column by column, as the rungs in CUDA visit them.
        index = tl.program_id(0)
        tiles_n = tl.cdiv(n, BLOCK_N)
        first = index // (BAND * tiles_n) * BAND
        band = min(tl.cdiv(m, BLOCK_M) - first, BAND)
        rest = index % (BAND * tiles_n)
        rows = (first + rest % band) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = rest // band * BLOCK_N + tl.arange(0, BLOCK_N)
        steps = tl.arange(0, BLOCK_K)
        # Rows beyond the matrix read others again, which are not written: one mask less in the loop.
        from_a = a + (rows % m).to(tl.int64)[:, None] * k + steps[None, :]
        from_b = b + (columns % n).to(tl.int64)[None, :] * k + steps[:, None]
        sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            left = steps < k - start
            of_a = tl.load(from_a, mask=left[None, :], other=0.0)
            of_b = tl.load(from_b, mask=left[:, None], other=0.0)
            sums = tl.dot(of_a, of_b, sums)
            from_a += BLOCK_K
            from_b += BLOCK_K
        to = d + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(to, sums.to(tl.float16), mask=(rows < m)[:, None] & (columns < n)[None, :])


def compile_ahead(blocks: Blocks) -> bytes:
    """Compile the kernel for sm_90, without a GPU, for sides that are multiples of 16; return the cubin.

    Raises
    ------
    Exception
        Whatever Triton raises for a configuration that it refuses.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = dict.fromkeys("abd", "*fp16") | dict.fromkeys("mnk", "i32")
    signature = types | dict.fromkeys(blocks.constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    source = ASTSource(_gemm, signature, blocks.constants, aligned)
    options = {"num_warps": blocks.num_warps, "num_stages": blocks.num_stages}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


def run(blocks: Blocks, a: Tensor, b: Tensor, d: Tensor) -> Any:
    """Launch the kernel."""
    (m, n), k = d.shape, a.shape[1]
    grid = (triton.cdiv(m, blocks.m) * triton.cdiv(n, blocks.n),)
    return _gemm[grid](a, b, d, m, n, k, **blocks.constants, num_warps=blocks.num_warps, num_stages=blocks.num_stages)
