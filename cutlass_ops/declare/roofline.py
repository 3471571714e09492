"""What a problem takes at least on a chip: the roofline, by the peaks that the chip's data sheet promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Microseconds from one kernel to the next, as the fastest of ours reach.
_LAUNCH = 2.1


class Peaks(NamedTuple):
    """A chip's peaks.

    Attributes
    ----------
    tflops : float
        Dense TFLOP/s of the Tensor Cores for FP16 and BF16, accumulated in FP32, at their highest clock.
    gb_per_s : float
        GB/s of device memory.
    """

    tflops: float
    gb_per_s: float


# By the driver's names. Source: NVIDIA's data sheets.
PEAKS = {
    "NVIDIA H200": Peaks(989.4, 4800),
    "NVIDIA H100 80GB HBM3": Peaks(989.4, 3352),
    "NVIDIA H100 PCIe": Peaks(756, 2039),
    "NVIDIA A100-SXM4-80GB": Peaks(312, 2039),
    "NVIDIA A100-SXM4-40GB": Peaks(312, 1555),
    "NVIDIA A100 80GB PCIe": Peaks(312, 1935),
    "NVIDIA A100-PCIE-40GB": Peaks(312, 1555),
    "NVIDIA L40S": Peaks(362, 864),
    "NVIDIA L4": Peaks(121, 300),
    "NVIDIA RTX A6000": Peaks(154.8, 768),
    "NVIDIA A10": Peaks(125, 600),
}


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


def roofline(problem: tuple[int, int, int], moved_bytes: int, peaks: Peaks) -> Roofline:
    """Return what a problem takes at least.

    Parameters
    ----------
    problem : tuple of int
        M, N and K.
    moved_bytes : int
        Bytes of all operands, inputs and outputs.
    peaks : Peaks
        Of the chip.
    """
    m, n, k = problem
    return Roofline(2 * m * n * k / (peaks.tflops * 1e6), moved_bytes / (peaks.gb_per_s * 1e3))
