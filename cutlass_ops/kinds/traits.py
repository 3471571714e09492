"""What of a signature decides how long its kernels take, besides their configurations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Major
from cutlass_ops.kinds.arrays import Extents, Flags, Floats, Places

Extent = Literal["m", "n", "k"]


@dataclass(frozen=True)
class Traits:
    """What of a signature decides how long its kernels take.

    Attributes
    ----------
    majors : tuple of {"row", "col"}
        Those of A and B.
    alignments : tuple of int
        Elements to which the lines of A and B are aligned.
    weights : int
        How many matrices are multiplied by A. Problems count the columns of one of them.
    scatters : bool
        Whether lines of D are aligned to no more than one element, so that each is stored by itself.
    gathers : bool
        Whether the epilogue takes means of A's rows.
    """

    majors: tuple[Major, Major] = ("row", "col")
    alignments: tuple[int, int] = (8, 8)
    weights: int = 1
    scatters: bool = False
    gathers: bool = False

    @classmethod
    def of(cls, signature: OpSignature) -> Traits:
        """Return those of a signature."""
        return cls(
            majors=signature.majors,
            alignments=signature.alignments,
            weights=1 + len(signature.epilogue.products),
            scatters=signature.d.alignment == 1,
            gathers=bool(signature.epilogue.gathered),
        )

    @property
    def lines(self) -> tuple[Extent, Extent]:
        """Along which extents the lines of A and of B lie in memory."""
        a, b = self.majors
        return ("k" if a == "row" else "m"), ("k" if b == "col" else "n")

    def whole(self, problem: Problem) -> Problem:
        """Return a problem with the columns of all weights."""
        return problem._replace(n=problem.n * self.weights)

    def odd(self, problems: Sequence[Problem]) -> Places:
        """Return of how many operands the lines are :func:`odd`, of shape (problems,)."""
        extents = Extents.of(problems)
        return np.asarray(sum(odd(getattr(extents, line)[:, 0]).astype(np.int64) for line in self.lines))


def odd(line: Floats, element_bytes: int = 2) -> Flags:
    """Return whether lines of so many elements, one after the other in memory, begin between the L2 cache's."""
    return np.asarray(line * element_bytes % arch.CACHE_LINE_BYTES != 0)
