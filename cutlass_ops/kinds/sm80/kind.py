"""The Sm80 kind of kernels."""

from __future__ import annotations

from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.declare.config import MEANS
from cutlass_ops.declare.form import BATCHED, DENSE
from cutlass_ops.kinds.kind import Kind, late
from cutlass_ops.kinds.sm80 import footprint, rules, space
from cutlass_ops.kinds.sm80.config import Sm80Config

SM80 = Kind(
    config=Sm80Config,
    forms=(DENSE, BATCHED),
    multiplies=lambda mma: mma.by(MMA_SYNC) is not None and not mma.own,
    noun="an Sm80Config",
    template="sm80_gemm.cu.j2",
    rules=rules.SM80,
    shared_memory=footprint.shared_memory,
    context=late("sm80.lowering", "context"),
    proof=lambda _, unit: (unit.opcode,),
    timer=late("sm80.model", "Sm80Timer.of"),
    candidates=space.candidates,
    general=True,
    untuned=space.untuned,
    variants=space.variants,
    usual=space.usual,
    near=space.near,
    orders=space.orders,
    unit=lambda _: ("mma.sync, operands loaded by cp.async or registers", None),
    means=lambda _: MEANS["ahead"],
)
