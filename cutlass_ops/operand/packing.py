"""The packed form of weights in 4 bits: in which order kernels read numbers and scales. This is version 1 of it.

A weight is seen as (N, K), as a linear layer has it. Sixteen rows are a line. A line has K / 64 pieces, one after the
other. A piece is 512 bytes: 16 for each of 32 threads. Thread ``4 r + c`` has numbers of the rows r and r + 8. Its 16
bytes are four words of 32 bits, each for 16 numbers along K: what a thread gives to one instruction of the Tensor
Cores, whether that is ``wgmma`` or ``mma.sync`` (PTX ISA, register fragments of A). Bits 4 p to 4 p + 3 of a word have
the first number of the p-th register, and those 16 bits further on have the second:

    p    row      K, of 16
    0    r        2 c, 2 c + 1
    1    r + 8    2 c, 2 c + 1
    2    r        2 c + 8, 2 c + 9
    3    r + 8    2 c + 8, 2 c + 9

Scales (N, K / group) are in lines too. Each group of a line has its scales of rows 0, 8, 1, 9, 2, 10 and so on. If
there are zero points, they follow, in the same order. A zero point is stored as the number that a kernel adds: what
takes it and what the conversion has added, 128 in BF16 and 1024 in FP16, from a number.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import DType, e2m1, u4

VERSION = 1
GROUPS = mma.GROUPS[:-1]  # besides all of K
LINE, PIECE = 16, 64  # rows of a line, and numbers along K of a piece
BIAS = 8  # a number from -8 to 7 is stored as one from 0 to 15
MOST_ZERO = 16  # zero points of GPTQ's first version go up to this
# What the conversion adds to a number.
_ADDED = {torch.bfloat16: 128, torch.float16: 1024}
_DEVIATION = 5.0  # of random numbers, about


def require_extents(n: int, k: int) -> None:
    """Raise ValueError if no packed weight has these extents."""
    for name, extent, step in (("N", n, LINE), ("K", k, PIECE)):
        if extent % step or not extent:
            raise ValueError(f"{name} is {extent}: a packed weight's must be a multiple of {step}, so pad with zeros")


def packed(codes: Tensor) -> Tensor:
    """Return numbers (N, K) of 4 bits, in bytes, as (N, K / 2) in the packed order."""
    n, k = codes.shape
    require_extents(n, k)
    of = codes.view(n // LINE, 2, 8, k // PIECE, 4, 2, 4, 2).permute(0, 3, 2, 6, 4, 7, 5, 1)
    return (of[..., 0] | of[..., 1] << 4).reshape(n, k // 2)


def packed_scales(scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Return scales (N, groups), and zero points from 0 to 16, as (N, groups) or (N, 2 groups) in the packed order."""
    parts = [scale] if zero is None else [scale, -_ADDED[scale.dtype] - zero.to(scale.dtype)]
    n, groups = scale.shape
    of = torch.stack(parts).view(len(parts), n // LINE, 2, 8, groups)
    return of.permute(1, 4, 0, 3, 2).reshape(n, groups * len(parts))


def unpacked_scales(scale: Tensor, parts: int) -> tuple[Tensor, Tensor | None]:
    """Return the scales and zero points that :func:`packed_scales` took; None if there is one part."""
    n, groups = scale.shape[0], scale.shape[1] // parts
    of = scale.reshape(n // LINE, groups, parts, 8, 2).permute(2, 0, 4, 3, 1).reshape(parts, n, groups)
    return of[0], -_ADDED[scale.dtype] - of[1] if parts == 2 else None


def drawn(
    n: int, k: int, group: int, element: DType, dtype: torch.dtype, deviation: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return random packed numbers (N, K / 2) and scales whose weight has about a standard deviation."""
    require_extents(n, k)
    device, groups = generator.device, k // min(group, k)
    values = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=generator, device=device)
    scale = torch.rand(n, groups, generator=generator, device=device).add_(0.5).mul_(deviation / _DEVIATION).to(dtype)
    if element is not u4:
        return values, packed_scales(scale)
    return values, packed_scales(scale, torch.randint(0, MOST_ZERO, (n, groups), generator=generator, device=device))


def dequantized(values: Tensor, scale: Tensor, element: DType, dtype: torch.dtype | None = None) -> Tensor:
    """Return the weight (N, K) that packed numbers and scales represent.

    In the scales' type, as by default, each number times its scale is rounded once. FP32 and FP64 are exact.
    """
    dtype = scale.dtype if dtype is None else dtype
    of, zero = unpacked_scales(scale, 2 if element is u4 else 1)
    n, groups = of.shape
    numbers = _of_bytes(element, dtype, values.device)[values.reshape(-1).int()]
    found = numbers.view(n // LINE, -1, 8, 4, 4, 2, 2, 2).permute(0, 7, 2, 1, 4, 6, 3, 5).reshape(n, groups, -1)
    if zero is not None:
        found = found - zero.to(dtype)[..., None]
    return (found * of.to(dtype)[..., None]).flatten(1)


def _of_bytes(element: DType, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return both numbers of each byte, (256, 2). It is computed where it is needed: CUDA graphs allow no copies."""
    codes = torch.arange(16, device=device)
    if element is e2m1:
        size, exponent = codes & 7, (codes >> 1 & 3).to(dtype)
        size = torch.where(size < 2, size * 0.5, (1 + (codes & 1) * 0.5) * torch.exp2(exponent - 1)).to(dtype)
        numbers = torch.where(codes < 8, size, -size)
    else:
        numbers = (codes - (0 if element is u4 else BIAS)).to(dtype)
    return torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), -1)
