"""What a problem takes at least on a chip: the roofline, by the peaks that the chip's data sheet promises."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.declare.chips import Chip
from cutlass_ops.declare.problem import Problem

# Microseconds from one kernel to the next, as the fastest of ours reach.
_LAUNCH = 2.1


@dataclass(frozen=True)
class Roofline:
    """What a problem takes at least, whatever the kernel, in microseconds.

    Attributes
    ----------
    compute : float
        Its products at the Tensor Cores' peak.
    memory : float
        Its operands and D once through device memory, at the memory's peak.
    launch : float
        From one kernel to the next.
    """

    compute: float
    memory: float
    launch: float = _LAUNCH

    @property
    def bound(self) -> str:
        """What weighs most: ``"compute"``, ``"memory"`` or ``"launch"``."""
        return max(("compute", "memory", "launch"), key=lambda name: float(getattr(self, name)))


def roofline(problem: Problem, moved_bytes: int, chip: Chip) -> Roofline:
    """Return what a problem takes at least.

    Parameters
    ----------
    problem : Problem
        With the columns of all weights.
    moved_bytes : int
        Bytes of all operands, inputs and outputs.
    chip : Chip
        Whose peaks they are.
    """
    return Roofline(problem.flops / (chip.tflops * 1e6), moved_bytes / (chip.gb_per_s * 1e3))
