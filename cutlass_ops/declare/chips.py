"""A table of GPUs by the driver's names.

Sources: NVIDIA's data sheets (peaks) and architecture whitepapers (multiprocessors, L2 caches). Constants fitted to
measurements are beside the cost models, in ``kinds``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass_ops.declare.device import Device

MB = 1_000_000


@dataclass(frozen=True)
class Chip:
    """One GPU."""

    name: str  # the driver's name
    capability: tuple[int, int]  # compute capability. :data:`cutlass_ops.base.arch.TARGETS` has its common properties.
    multiprocessors: int  # number of enabled multiprocessors
    tflops: float  # dense TFLOP/s of the Tensor Cores for FP16 and BF16, accumulated in FP32, at the highest clock
    gb_per_s: float  # GB/s of device memory
    l2_bytes: int  # bytes of the L2 cache

    @property
    def device(self) -> Device:
        """The device, for the choice of a kernel."""
        return Device(self.capability, self.multiprocessors, self.name)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 989.4, 3352, 50 * MB),
        Chip("NVIDIA H100 PCIe", (9, 0), 114, 756, 2039, 50 * MB),
        Chip("NVIDIA H200", (9, 0), 132, 989.4, 4800, 50 * MB),
        Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 312, 2039, 40 * MB),
        Chip("NVIDIA A100-SXM4-40GB", (8, 0), 108, 312, 1555, 40 * MB),
        Chip("NVIDIA A100 80GB PCIe", (8, 0), 108, 312, 1935, 40 * MB),
        Chip("NVIDIA A100-PCIE-40GB", (8, 0), 108, 312, 1555, 40 * MB),
        Chip("NVIDIA RTX A6000", (8, 6), 84, 154.8, 768, 6 * MB),
        Chip("NVIDIA A10", (8, 6), 72, 125, 600, 6 * MB),
        Chip("NVIDIA L40S", (8, 9), 142, 362, 864, 96 * MB),
        Chip("NVIDIA L4", (8, 9), 58, 121, 300, 48 * MB),
    )
}
# The chip of the tables that others borrow from. It stands in for unknown chips.
USUAL = CHIPS["NVIDIA H100 80GB HBM3"]
# The chip of FP8's table.
OF_FP8 = CHIPS["NVIDIA H200"]


class Peaks(NamedTuple):
    """A chip's peaks relative to those of the usual one."""

    products: float  # of the Tensor Cores of one multiprocessor
    memory: float  # of device memory


def peaks_of(name: str) -> Peaks:
    """Return the peaks of the chip of this name, by which constants fitted to the usual one scale; 1 if unknown."""
    chip = CHIPS.get(name, USUAL)
    each, usual = chip.tflops / chip.multiprocessors, USUAL.tflops / USUAL.multiprocessors
    return Peaks(each / usual, chip.gb_per_s / USUAL.gb_per_s)
