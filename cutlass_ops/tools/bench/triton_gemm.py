"""A GEMM in Triton as its tutorial has it, tuned over a few configurations. Only this module imports triton.

The configurations meet the contract of ``co.contract`` on every architecture: wgmma on Hopper, tcgen05 on Blackwell.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages.
CONFIGS = (
    (128, 256, 64, 8, 3),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (64, 128, 64, 4, 4),
    (64, 64, 64, 4, 5),
    (64, 256, 64, 8, 3),
)
_GROUP = 8  # rows of tiles that share columns of B in the L2 cache


@triton.autotune(  # type: ignore[untyped-decorator]
    [
        triton.Config({"BM": m, "BN": n, "BK": k}, num_warps=warps, num_stages=stages)
        for m, n, k, warps, stages in CONFIGS
    ],
    key=["M", "N", "K"],
)
@triton.jit  # type: ignore[untyped-decorator]
def _kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202
    A, B, BIAS, C, M, N, K, sam, sak, sbk, sbn, scm, scn,  # noqa: ANN001, N803
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr, RELU: tl.constexpr,  # noqa: N803
):  # fmt: skip
    pid = tl.program_id(0)
    rows, columns = tl.cdiv(M, BM), tl.cdiv(N, BN)
    group = pid // (GROUP * columns)
    first = group * GROUP
    size = min(rows - first, GROUP)
    rm = (first + pid % (GROUP * columns) % size) * BM + tl.arange(0, BM)
    rn = (pid % (GROUP * columns) // size) * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    # Beyond the edges, rows and columns are read again: they are not stored, and masks would cost time.
    a = A + (rm % M)[:, None] * sam + rk[None, :] * sak
    b = B + rk[:, None] * sbk + (rn % N)[None, :] * sbn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left = K - k * BK
        x = tl.load(a, mask=rk[None, :] < left, other=0.0)
        y = tl.load(b, mask=rk[:, None] < left, other=0.0)
        acc = tl.dot(x, y, acc)
        a += BK * sak
        b += BK * sbk
    if HAS_BIAS:
        acc += tl.load(BIAS + rn, mask=rn < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        acc = tl.maximum(acc, 0.0)
    c = C + rm[:, None] * scm + rn[None, :] * scn
    tl.store(c, acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


def gemm(a: Tensor, b: Tensor, bias: Tensor | None, *, relu: bool) -> Tensor:
    """Return A @ B with a bias and ReLU, in A's dtype. The first call at a problem tries every configuration."""
    (m, k), n = a.shape, b.shape[1]
    d = torch.empty(m, n, dtype=a.dtype, device=a.device)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(m, meta["BM"]) * triton.cdiv(n, meta["BN"]),)

    _kernel[grid](
        a, b, d if bias is None else bias, d, m, n, k, *a.stride(), *b.stride(), *d.stride(),
        GROUP=_GROUP, HAS_BIAS=bias is not None, RELU=relu,
    )  # fmt: skip
    return d
