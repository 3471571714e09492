"""A device as the choice of a kernel sees it, and decisions that need neither table nor model."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec, Operand


@dataclass(frozen=True)
class Device:
    """A device as the choice of a kernel sees it.

    Attributes
    ----------
    capability : tuple of int
        Compute capability.
    multiprocessors : int
        Number of multiprocessors.
    name : str
        The driver's name, under which measurements are kept.
    """

    capability: tuple[int, int]
    multiprocessors: int
    name: str = ""

    @property
    def has_wgmma(self) -> bool:
        """Whether the device has TMA and wgmma."""
        return self.capability == (9, 0)

    def loads_by_tma(self, a: Operand, b: Operand) -> bool:
        """Whether TMA loads A and B without a copy: addresses and lines are aligned, and wgmma reads their majors."""
        mma = mma_of(a.dtype, b.dtype)
        reads = mma is not None and bool(mma.wgmma_opcode) and mma.takes_majors(a.major, b.major, wgmma=True)
        return self.has_wgmma and reads and a.aligned and b.aligned

    def spec(self, signature: OpSignature, config: Config) -> KernelSpec:
        """Return the specification of a signature's kernel with a configuration on this device."""
        return signature.spec(config, config.target_on(self.capability))
