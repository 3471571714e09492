"""What a call's way to its kernel needs to know of a device, and what follows from that without any table or model."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.declare.config import Config
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec, Operand


@dataclass(frozen=True)
class Device:
    """What the choice of a kernel needs to know of a device.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    multiprocessors : int
        How many there are.
    name : str
        The driver's name for it, under which measurements are kept.
    """

    capability: tuple[int, int]
    multiprocessors: int
    name: str = ""

    @property
    def has_wgmma(self) -> bool:
        """Whether there are TMA and wgmma."""
        return self.capability == (9, 0)

    def loads_by_tma(self, a: Operand, b: Operand) -> bool:
        """Whether A and B may go through TMA to wgmma as they are: their addresses and lines are aligned."""
        return self.has_wgmma and a.aligned and b.aligned

    def spec(self, signature: OpSignature, config: Config) -> KernelSpec:
        """Return the kernel that serves a signature here with a configuration."""
        return signature.spec(config, config.target_on(self.capability))
