"""The GEMM of the ladder: D = A B^T, with A (M, K), B (N, K) and D (M, N), all FP16 and row-major, and FP32 sums."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Product = Callable[[Tensor, Tensor, Tensor], object]


class Shape(NamedTuple):
    """M, N and K of a GEMM."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return "x".join(map(str, self))

    @property
    def flops(self) -> int:
        """Operations: a multiplication and an addition for each product."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Bytes of A, B and D."""
        return 2 * (self.m * self.k + self.n * self.k + self.m * self.n)


# Square; a wave of tiles and no more; few rows and a long K; and sides that no instruction and no copy engine likes.
SHAPES = (Shape(4096, 4096, 4096), Shape(1024, 1024, 1024), Shape(512, 4096, 14336), Shape(4095, 4095, 4095))

# Where kernels break: one element, sides below a tile, odd sides, one more than a tile, a K that ends within a step.
EDGES = tuple(
    Shape(*sides)
    for sides in (
        (1, 1, 1),
        (1, 300, 8),
        (300, 1, 24),
        (16, 16, 16),
        (17, 33, 7),
        (64, 64, 64),
        (127, 255, 129),
        (128, 256, 64),
        (129, 257, 65),
        (130, 258, 1000),
        (383, 514, 192),
        (1000, 1, 3001),
        (2049, 1153, 321),
    )
)


def parse_shape(text: str) -> Shape:
    """Read a shape such as 4096x4096x1024.

    Raises
    ------
    ValueError
        If it is anything else than three positive integers. The message has an example.
    """
    sides = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)[x×]([1-9]\d*)", text)
    if sides is None:
        raise ValueError(f"{text!r} is not a shape: write M, N and K as 4096x4096x1024")
    return Shape(*map(int, sides.groups()))


def up(extent: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-extent // multiple) * multiple


def padded(product: Product, multiple: Shape, pads_d: bool = False) -> Product:
    """Have a product see operands whose sides are multiples of some numbers: of copies with zeros, if they are not.

    Parameters
    ----------
    product : callable
        Takes A, B and D.
    multiple : Shape
        What M, N and K must be multiples of.
    pads_d : bool
        Whether the rows and columns of D must be multiples too. It is copied back then.
    """

    def run(a: Tensor, b: Tensor, d: Tensor) -> object:
        (m, k), n = a.shape, b.shape[0]
        to = Shape(*(up(side, of) for side, of in zip((m, n, k), multiple, strict=True)))
        if to == (m, n, k):
            return product(a, b, d)
        a = F.pad(a, (0, to.k - k, 0, to.m - m))
        b = F.pad(b, (0, to.k - k, 0, to.n - n))
        if not pads_d or (to.m, to.n) == (m, n):
            return product(a, b, d)
        larger = d.new_empty(to.m, to.n)
        product(a, b, larger)
        return d.copy_(larger[:m, :n])

    return run
