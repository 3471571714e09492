"""A device as the choice of a kernel sees it, and decisions that need neither table nor model."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec, Operand, copied


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
        """Whether TMA loads A and B without a copy, for a kernel of wgmma."""
        mma = mma_of(a.dtype, b.dtype)
        return self.has_wgmma and mma is not None and bool(mma.wgmma_opcode) and not any(copied(a, b))

    def spec(self, signature: OpSignature, config: Config) -> KernelSpec:
        """Return the specification of a signature's kernel with a configuration on this device."""
        return signature.spec(config, config.target_on(self.capability))
