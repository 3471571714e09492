"""The properties of a signature that affect its kernels' times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.form import GROUPED, RAGGED_K
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Major, copied
from cutlass_ops.kinds import arithmetic
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places, Problems

# Clocks of the longest epilogues that the tables' times stand for (arithmetic.py).
_SHORT_CLOCKS = 24.0

Extent = Literal["m", "n", "k"]
_Extents = TypeVar("_Extents", Problem, Extents)


@dataclass(frozen=True)
class Traits:
    """The properties of a signature that affect its kernels' times.

    Attributes
    ----------
    element_bytes, d_bytes : int
        Bytes of an element of A and of B, and of D.
    majors : tuple of {"row", "col"}
        Majors of A and B.
    alignments : tuple of int
        Alignments of A and B, in elements.
    weights : int
        Number of matrices that A is multiplied by. N of a problem is that of one of them.
    scatters : bool
        Whether D is aligned to one element only, so that each element is stored by itself.
    gathers : bool
        Whether the epilogue uses means of A's rows.
    promotes : bool
        Whether sums of products are added up in FP32 every 128 of K.
    grouped : bool
        Whether rows belong to groups, whose tiles have one order.
    rate : float
        Peak throughput of products relative to BF16.
    ragged_k : bool
        Whether K belongs to groups, whose tiles are not ordered by GPC.
    along_k : bool
        Whether kernels of ``wgmma`` read A and B along K only, or copies of them that lie so.
    copied : tuple of bool
        Whether these kernels copy A, and whether they copy B.
    clocks : float
        How long an epilogue computes an element of D, where that is longer than in those that were measured
        (:mod:`cutlass_ops.kinds.arithmetic`).
    """

    element_bytes: int
    d_bytes: int
    majors: tuple[Major, Major] = ("row", "col")
    alignments: tuple[int, int] = (8, 8)
    weights: int = 1
    scatters: bool = False
    gathers: bool = False
    promotes: bool = False
    grouped: bool = False
    rate: float = 1.0
    ragged_k: bool = False
    along_k: bool = False
    copied: tuple[bool, bool] = (False, False)
    clocks: float = 0.0

    @classmethod
    def of(cls, signature: OpSignature) -> Traits:
        """Return the traits of a signature."""
        mma = mma_of(signature.a.dtype, signature.b.dtype)
        return cls(
            element_bytes=signature.a.dtype.bytes,
            d_bytes=signature.d.dtype.bytes,
            majors=signature.majors,
            alignments=signature.alignments,
            weights=1 + len(signature.epilogue.products),
            scatters=signature.d.alignment == 1,
            gathers=bool(signature.epilogue.gathered),
            promotes=signature.promoted,
            grouped=signature.form == GROUPED,
            rate=1.0 if mma is None else mma.rate,
            ragged_k=signature.form == RAGGED_K,
            along_k=mma is not None and mma.wgmma_k_major_only,
            copied=copied(signature.a, signature.b),
            clocks=max(0.0, arithmetic.clocks(signature.epilogue) - _SHORT_CLOCKS),
        )

    @property
    def lines(self) -> tuple[Extent, Extent]:
        """The extents that are contiguous in A and in B, as kernels of ``wgmma`` load them."""
        a, b = ("row", "col") if self.along_k else self.majors
        return ("k" if a == "row" else "m"), ("k" if b == "col" else "n")

    def whole(self, problem: _Extents) -> _Extents:
        """Return a problem, or extents of several, with N of all weights together."""
        return problem if self.weights == 1 else problem._replace(n=problem.n * self.weights)

    def odd(self, problems: Problems) -> Places:
        """Return how many operands have :func:`odd` lines, with shape (problems,)."""
        extents = Extents.of(problems)
        found = np.zeros(extents.size, np.int64)
        for line in self.lines:
            found += odd(getattr(extents, line).reshape(-1), self.element_bytes)
        return found


def odd(line: Floats, element_bytes: int) -> Flags:
    """Return whether the length of a line, in elements, is not a multiple of the L2 cache's lines."""
    return np.asarray(line * element_bytes % arch.CACHE_LINE_BYTES != 0)
