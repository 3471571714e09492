"""The shared memory of a pointwise kernel (``templates/include/cutlass_ops/pointwise.h``)."""

from __future__ import annotations

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.config import PointwiseConfig
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.operations import REDUCTIONS


def state_bytes(spec: KernelSpec) -> int:
    """Return the bytes of what a reduction of columns keeps, at most; 0 if there is none."""
    reductions = [REDUCTIONS[o.reduction] for o in spec.epilogue.outputs if o.reduction and o.kind is Kind.ROW]
    return max((f32.bytes * (1 + r.paired) for r in reductions), default=0)


def shared_memory(spec: KernelSpec, config: PointwiseConfig, stages: int | None = None) -> int:
    """Return the bytes in which warps join their parts of one reduction of columns at a time. ``stages`` is ignored."""
    return config.warps * config.threadblock.n * state_bytes(spec)
