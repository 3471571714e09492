"""The GEMV kind of kernels."""

from __future__ import annotations

from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.declare.form import DENSE
from cutlass_ops.kinds.gemv import footprint, lowering, rules, space
from cutlass_ops.kinds.gemv.model import GemvTimer
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.serving import in_16_bits


def _unit(config: GemvConfig) -> tuple[str, str]:
    unit = "mma.sync" if config.by_tile else "FP32 arithmetic"
    says = f"{unit}, operands loaded into registers: for so few rows, reading B is all that takes time"
    return says, "element by element"


GEMV = Kind(
    config=GemvConfig,
    forms=(DENSE,),
    multiplies=in_16_bits,
    stores_fp8=True,
    noun="a GemvConfig",
    template="gemv.cu.j2",
    values={"rows": (1, 2, 4, 8, 16), "warps": (1, 2, 4, 8, 16, 32), "pieces": (1, 2, 4, 8, 16)},
    rules=rules.GEMV,
    shared_memory=footprint.shared_memory,
    context=lowering.context,
    proof=lambda config, mma: (mma.opcode,) if config.by_tile else (),
    timer=GemvTimer.of,
    candidates=space.candidates,
    near=space.near,
    unit=_unit,
    means=lambda _: "added up by the warps of each thread block together, beside the product",
    compile_seconds=2.0,
)
