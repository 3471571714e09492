"""The kind of pointwise kernels (``templates/include/cutlass_ops/pointwise.h``)."""

from __future__ import annotations

from collections.abc import Iterator

from cutlass_ops.base.dtypes import f32
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.nodes import Kind as Role
from cutlass_ops.epilogue.operations import REDUCTIONS
from cutlass_ops.kinds.kind import Kind, late
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.serving import in_16_bits


def state_bytes(spec: KernelSpec) -> int:
    """Return the bytes of what a reduction of columns keeps, at most; 0 if there is none."""
    reductions = [REDUCTIONS[o.reduction] for o in spec.epilogue.outputs if o.reduction and o.kind is Role.ROW]
    return max((f32.bytes_of(1 + r.paired) for r in reductions), default=0)


def shared_memory(spec: KernelSpec, config: PointwiseConfig, stages: int | None = None) -> int:
    """Return the bytes in which warps join their parts of one reduction of columns at a time. ``stages`` is ignored."""
    return config.warps * config.threadblock.n * state_bytes(spec)


ROWS = (1, 2, 4, 8, 16, 32)

# Many rows a warp where there are many, so that reductions of columns have few parts.
UNTUNED = (PointwiseConfig(16), PointwiseConfig(2))


def candidates(_: OpSignature | None = None) -> Iterator[PointwiseConfig]:
    """Yield all numbers of rows."""
    return map(PointwiseConfig, ROWS)


def _near(one: PointwiseConfig, other: PointwiseConfig) -> bool:
    """Return whether one has twice as many rows as the other."""
    return one.rows in (2 * other.rows, other.rows / 2)


POINTWISE = Kind(
    config=PointwiseConfig,
    forms=(DENSE,),
    multiplies=in_16_bits,
    pointwise=True,
    noun="a PointwiseConfig",
    template="pointwise.cu.j2",
    values={"rows": ROWS},
    rules=(),
    shared_memory=shared_memory,
    context=late("pointwise.lowering", "context"),
    proof=lambda *_: (),
    timer=late("pointwise.model", "PointwiseTimer.of"),
    candidates=candidates,
    in_tables=False,
    untuned=lambda _: UNTUNED,
    usual=candidates,
    near=_near,
    unit=lambda _: ("FP32 arithmetic on tiles: the epilogue reads no product", "eight columns at a time"),
    means=lambda _: "by no pointwise kernel",
)
