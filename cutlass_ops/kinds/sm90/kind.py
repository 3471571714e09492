"""The Sm90 kind of kernels."""

from __future__ import annotations

from cutlass_ops.base import arch
from cutlass_ops.base.arch import WGMMA
from cutlass_ops.declare.config import MEANS
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K
from cutlass_ops.kinds.kind import Kind, late
from cutlass_ops.kinds.sm90 import footprint, rules, space
from cutlass_ops.kinds.sm90.config import Sm90Config

# Factor on predicted times of stream-K kernels. Where the model put stream-K first, it was that much slower than
# predicted (bias + ReLU, at weights left out of the fit). Other schedulers were not.
_STREAM_K = 1.03


def _handicap(config: Sm90Config) -> float:
    return _STREAM_K if config.scheduler == "stream_k" else 1.0


SM90 = Kind(
    config=Sm90Config,
    forms=(DENSE, BATCHED, GROUPED, RAGGED_K),
    multiplies=lambda mma: mma.by(WGMMA) is not None,
    stores_fp8=True,
    quantizes=True,
    scales_blocks=True,
    noun="an Sm90Config",
    template="sm90_gemm.cu.j2",
    values={"split_k": (1, 2, 4, 8), "resident": (1, 2)},
    rules=rules.SM90,
    shared_memory=footprint.shared_memory,
    context=late("sm90.lowering", "context"),
    proof=lambda _, unit: (unit.opcode, arch.TMA_LOAD_OPCODE),
    timer=late("sm90.timer", "Sm90Timer.of"),
    candidates=space.candidates,
    general=True,
    untuned=space.untuned,
    is_usual=space.is_usual,
    usual=space.usual,
    near=space.near,
    variants=space.variants,
    of_width=space.of_width,
    gathering=late("sm90.timer", "gathering"),
    orders=late("sm90.timer", "orders"),
    orders_by_gpc=late("sm90.timer", "orders_by_gpc"),
    copying=late("sm90.timer", "realigning"),
    handicap=_handicap,
    unit=lambda _: ("wgmma, operands loaded by TMA", None),
    means=lambda config: MEANS[config.means],
)
