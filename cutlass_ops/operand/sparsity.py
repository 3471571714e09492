"""The form of 2:4 sparse weights: which elements are stored, and in which order kernels read where they are.

This is version 1 of it. A weight is seen as (N, K), as a linear layer has it. Of each four elements along K, a group,
two are stored, in their order. The others are 0. A group's metadata is four bits: the place of the first stored element
in the lower two, and that of the second, which is greater, in the upper two.

Metadata of 64 rows and 64 of K are a block of 512 bytes. N is filled up to whole blocks, and K to pairs of them, with
groups of zeros. Blocks of the same rows follow each other, and so do rows of blocks. A block has a word of 32 bits for
each of 128 threads: what a thread gives to ``wgmma.mma_async.sp`` (PTX ISA). Thread ``32 w + 4 r + c`` has, from the
lowest bits on,

    types      bits       rows                   K, of 64
    16 bits    0 to 15    16 w + r               16 c to 16 c + 15
               16 to 31   16 w + r + 8           the same
    8 bits     0 to 31    16 w + r + 8 (c % 2)   32 (c / 2) to 32 (c / 2) + 31

In 16 bits, that is metadata for two instructions: threads 0 and 1 of each four have those of the first one, and threads
2 and 3 those of the second. The instruction's selector says which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cutlass_ops.base import mma

VERSION = 1
GROUP, STORED = 4, 2  # elements along K of a group, and how many of them are stored
BLOCK, PAIR = mma.META_BLOCK, 2 * mma.META_BLOCK
BLOCK_BYTES = 512
STEP = 32  # K is a multiple of this: lines of stored elements are then whole pieces of 16 bytes
# The places of the stored elements, by the bits of a group's elements that are not 0. Those of three or four do not
# matter. A group with fewer than two stores zeros as well.
_FIRST = (0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 2, 0, 0, 0)
_SECOND = (1, 1, 1, 1, 2, 2, 2, 1, 3, 3, 3, 1, 3, 1, 1, 1)


def _grouped(x: Tensor, size: int = GROUP) -> Tensor:
    """View (N, K) as (N, K / size, size)."""
    return x.reshape(x.shape[0], -1, size)


def meta_shape(n: int, k: int) -> tuple[int, int]:
    """Return the shape of the metadata of a weight (N, K), in bytes."""
    return -(-n // BLOCK), -(-k // PAIR) * 2 * BLOCK_BYTES


def require_extents(n: int, k: int) -> None:
    """Raise ValueError if no sparse weight has these extents."""
    if k % STEP or not k or not n:
        raise ValueError(f"N is {n} and K is {k}: a sparse weight's K must be a multiple of {STEP}, so pad with zeros")


def kept(w: Tensor) -> Tensor:
    """Return which elements of (N, K) are kept: the two largest of each group by magnitude, earlier ones if equal."""
    of = _grouped(w.float().abs().nan_to_num(torch.inf, torch.inf)).unbind(-1)
    found = []
    for i, mine in enumerate(of):
        ahead = torch.stack([other >= mine if j < i else other > mine for j, other in enumerate(of) if j != i])
        found.append(ahead.sum(0) < STORED)
    return torch.stack(found, -1).flatten(1)


def too_many(chosen: Tensor) -> tuple[int, int] | None:
    """Return the row and the first column of a group of (N, K) with more than two chosen elements; None without one."""
    many = _grouped(chosen).sum(-1) > STORED
    if not bool(many.any()):
        return None
    row, group = (int(x) for x in many.nonzero()[0])
    return row, group * GROUP


def compressed(w: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stored elements (N, K / 2), and their metadata, of a weight (N, K) with two chosen of each group.

    Chosen elements that are 0 keep their place, and become +0.
    """
    groups, bits = _grouped(w), _grouped(chosen)
    weights = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=w.device)
    codes = (bits.to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    first, second = (torch.tensor(table, device=w.device)[codes.int()] for table in (_FIRST, _SECOND))
    places = torch.stack((first, second), -1)
    # As whole numbers, which every device gathers. What is not chosen becomes 0.
    as_bits = groups.view(torch.int16 if w.itemsize == 2 else torch.uint8)
    values = torch.where(bits & (groups.float() != 0), as_bits, 0).gather(-1, places).flatten(1).view(w.dtype)
    return values, packed((first | second << 2).to(torch.uint8), w.itemsize)


def packed(meta: Tensor, itemsize: int) -> Tensor:
    """Return four bits for each group (N, K / 4) in the order of kernels, for elements of 1 or 2 bytes."""
    n, groups = meta.shape
    rows, size = meta_shape(n, groups * GROUP)
    whole = meta.new_full((rows * BLOCK, size // BLOCK_BYTES * (BLOCK // GROUP)), _FIRST[0] | _SECOND[0] << 2)
    whole[:n, :groups] = meta
    if itemsize == 2:  # blocks, w, rows by 8, r | blocks along K, c, groups
        of = whole.view(rows, 4, 2, 8, -1, 4, 4).permute(0, 4, 1, 3, 5, 2, 6)
    else:  # blocks, w, c % 2, r | blocks along K, c / 2, groups
        of = whole.view(rows, 4, 2, 8, -1, 2, 8).permute(0, 4, 1, 3, 5, 2, 6)
    nibbles = of.reshape(rows, size, 2)
    return nibbles[..., 0] | nibbles[..., 1] << 4


def unpacked(meta: Tensor, n: int, k: int, itemsize: int) -> Tensor:
    """Return the four bits for each group (N, K / 4) that :func:`packed` took."""
    rows = meta.shape[0]
    nibbles = torch.stack((meta & 15, meta >> 4), -1)
    inner = (4, 2, 4) if itemsize == 2 else (2, 2, 8)
    of = nibbles.reshape(rows, -1, 4, 8, *inner).permute(0, 2, 5, 3, 1, 4, 6)
    return of.reshape(rows * BLOCK, -1)[:n, : k // GROUP]


def stored(w: Tensor, meta: Tensor, itemsize: int) -> Tensor:
    """Return the elements (N, K / 2) of a matrix (N, K) at the places that metadata of `itemsize` bytes name."""
    bits = unpacked(meta, w.shape[0], w.shape[1], itemsize).long()
    return _grouped(w).gather(-1, torch.stack((bits & 3, bits >> 2), -1)).flatten(1)


def updated(w: Tensor, meta: Tensor) -> Tensor:
    """Return the stored elements (N, K / 2) of a weight (N, K) at the places that metadata name. -0 becomes +0."""
    as_bits = w.contiguous().view(torch.int16 if w.itemsize == 2 else torch.uint8)
    return stored(torch.where(w.float() != 0, as_bits, 0), meta, w.itemsize).view(w.dtype)


def dense(values: Tensor, meta: Tensor) -> Tensor:
    """Return the weight (N, K) of stored elements (N, K / 2) and their metadata."""
    n, k = values.shape[0], 2 * values.shape[1]
    bits = unpacked(meta, n, k, values.itemsize).long()
    places = torch.stack((bits & 3, bits >> 2), -1)
    stored = _grouped(values.contiguous().view(torch.int16 if values.itemsize == 2 else torch.uint8), STORED)
    whole = stored.new_zeros(n, k // GROUP, GROUP).scatter_(2, places, stored)
    found: Tensor = whole.view(n, k).view(values.dtype)
    return found
