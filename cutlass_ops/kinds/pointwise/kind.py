"""The kind of pointwise kernels."""

from __future__ import annotations

from cutlass_ops.declare.config import PointwiseConfig
from cutlass_ops.declare.form import DENSE
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.pointwise import footprint, lowering, space
from cutlass_ops.kinds.pointwise.model import PointwiseTimer
from cutlass_ops.kinds.serving import in_16_bits

POINTWISE = Kind(
    config=PointwiseConfig,
    forms=(DENSE,),
    multiplies=in_16_bits,
    pointwise=True,
    noun="a PointwiseConfig",
    template="pointwise.cu.j2",
    values={"rows": space.ROWS},
    rules=(),
    shared_memory=footprint.shared_memory,
    context=lowering.context,
    proof=lambda *_: (),
    timer=PointwiseTimer.of,
    candidates=space.candidates,
    near=space.near,
    unit=lambda _: ("FP32 arithmetic on tiles: the epilogue reads no product", "eight columns at a time"),
    means=lambda _: "by no pointwise kernel",
    compile_seconds=2.0,
)
