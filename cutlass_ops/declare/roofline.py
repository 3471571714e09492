"""The roofline: the least time of a problem on a chip, by the peaks of its data sheet."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.declare.chips import Chip
from cutlass_ops.declare.problem import Problem

# Microseconds from one kernel to the next, reached by our fastest.
_LAUNCH = 2.1


@dataclass(frozen=True)
class Roofline:
    """Lower bounds of a problem's time for any kernel, in microseconds."""

    compute: float  # the products at the Tensor Cores' peak
    memory: float  # all operands and D once through device memory, at its peak
    launch: float = _LAUNCH  # the time from one kernel to the next

    @property
    def bound(self) -> str:
        """The largest bound: ``"compute"``, ``"memory"`` or ``"launch"``."""
        return max(("compute", "memory", "launch"), key=lambda name: float(getattr(self, name)))


def roofline(problem: Problem, moved_bytes: float, chip: Chip, rate: float = 1.0) -> Roofline:
    """Return the lower bounds of a problem's time."""
    return Roofline(problem.flops / (rate * chip.tflops * 1e6), moved_bytes / (chip.gb_per_s * 1e3))
