"""A device as the choice of a kernel sees it, and decisions that need neither table nor model."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass_ops.base import arch
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec, Operand, copied


@dataclass(frozen=True)
class Device:
    """A device as the choice of a kernel sees it."""

    capability: tuple[int, int]  # compute capability
    multiprocessors: int  # number of multiprocessors
    name: str = ""  # the driver's name, under which measurements are kept

    @property
    def has_tma(self) -> bool:
        """Whether the device has TMA, and kernels that load by it."""
        target = arch.best_target(self.capability)
        return target is not None and target.family.tma

    def loads_by_tma(self, a: Operand, b: Operand) -> bool:
        """Whether TMA loads A and B without a copy."""
        mma = mma_of(a.dtype, b.dtype)
        return self.has_tma and mma is not None and mma.by_tma is not None and not any(copied(a, b))

    def spec(self, signature: OpSignature, config: Config) -> KernelSpec:
        """Return the specification of a signature's kernel with a configuration on this device."""
        return signature.spec(config, config.target_on(self.capability))
