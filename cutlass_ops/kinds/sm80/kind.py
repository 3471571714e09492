"""The Sm80 kind of kernels."""

from __future__ import annotations

from cutlass_ops.declare.config import MEANS, Sm80Config
from cutlass_ops.declare.form import BATCHED, DENSE
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.serving import by_mma_sync
from cutlass_ops.kinds.sm80 import footprint, lowering, rules, space
from cutlass_ops.kinds.sm80.model import Sm80Timer

SM80 = Kind(
    config=Sm80Config,
    forms=(DENSE, BATCHED),
    multiplies=by_mma_sync,
    noun="an Sm80Config",
    template="sm80_gemm.cu.j2",
    rules=rules.SM80,
    shared_memory=footprint.shared_memory,
    context=lowering.context,
    proof=lambda _, mma: (mma.opcode,),
    timer=Sm80Timer.of,
    candidates=space.candidates,
    variants=space.variants,
    near=space.near,
    orders=space.orders,
    unit=lambda _: ("mma.sync, operands loaded by cp.async or registers", None),
    means=lambda _: MEANS["ahead"],
    compile_seconds=5.0,
)
