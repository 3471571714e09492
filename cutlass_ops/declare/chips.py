"""What is known of GPUs by the driver's names for them, in one table.

Sources: NVIDIA's data sheets (peaks) and architecture whitepapers (multiprocessors, L2 caches). What the models of how
long kernels take were fitted to lies with them, in ``kinds``.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.declare.device import Device

MB = 1_000_000


@dataclass(frozen=True)
class Chip:
    """One GPU.

    Attributes
    ----------
    name : str
        The driver's.
    capability : tuple of int
        Compute capability; what every device of one has lies in :data:`cutlass_ops.base.arch.TARGETS`.
    multiprocessors : int
        How many are enabled.
    tflops : float
        Dense TFLOP/s of the Tensor Cores for FP16 and BF16, accumulated in FP32, at their highest clock.
    gb_per_s : float
        GB/s of device memory.
    l2_bytes : int
        Of the L2 cache.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    tflops: float
    gb_per_s: float
    l2_bytes: int

    @property
    def device(self) -> Device:
        """What the choice of a kernel needs to know of it."""
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
# What tables that others borrow from were measured on, and what stands for a chip of which nothing is known.
USUAL = CHIPS["NVIDIA H100 80GB HBM3"]
