"""The kind of small kernels."""

from __future__ import annotations

from cutlass_ops.declare.config import SmallConfig
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.serving import in_16_bits
from cutlass_ops.kinds.small import footprint, lowering, rules, space
from cutlass_ops.kinds.small.model import SmallTimer

SMALL = Kind(
    config=SmallConfig,
    forms=(BATCHED,),
    multiplies=in_16_bits,
    noun="a SmallConfig",
    template="small.cu.j2",
    values={"warps": (1, 2, 4, 8)},
    rules=rules.SMALL,
    shared_memory=footprint.shared_memory,
    context=lowering.context,
    proof=lambda _, mma: (mma.opcode,),
    timer=SmallTimer.of,
    candidates=space.candidates,
    near=space.near,
    unit=lambda _: ("mma.sync, a warp for each tile, operands loaded ahead by cp.async or registers", None),
    means=lambda _: "by no small kernel",
    compile_seconds=3.0,
)
