"""The Sm90 kind of kernels."""

from __future__ import annotations

from dataclasses import replace

from cutlass_ops.base import arch
from cutlass_ops.declare.config import MEANS, Sm90Config
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.serving import by_wgmma
from cutlass_ops.kinds.sm90 import footprint, lowering, order, rules, space
from cutlass_ops.kinds.sm90.timer import Sm90Timer, usual_means

# Factor on predicted times of stream-K kernels. Where the model put stream-K first, it was that much slower than
# predicted (bias + ReLU, at weights left out of the fit). Other schedulers were not.
_STREAM_K = 1.03


def _handicap(config: Sm90Config) -> float:
    return _STREAM_K if config.scheduler == "stream_k" else 1.0


def _gathering(config: Sm90Config) -> Sm90Config:
    means = usual_means(config)
    return config if config.means == means else replace(config, means=means)


SM90 = Kind(
    config=Sm90Config,
    forms=(DENSE, BATCHED, GROUPED, RAGGED_K),
    multiplies=by_wgmma,
    stores_fp8=True,
    noun="an Sm90Config",
    template="sm90_gemm.cu.j2",
    values={"split_k": (1, 2, 4, 8), "resident": (1, 2)},
    rules=rules.SM90,
    shared_memory=footprint.shared_memory,
    context=lowering.context,
    proof=lambda _, mma: (mma.wgmma_opcode, arch.TMA_LOAD_OPCODE),
    timer=Sm90Timer.of,
    candidates=space.candidates,
    near=space.near,
    variants=space.variants,
    of_width=space.of_width,
    gathering=_gathering,
    orders=order.orders,
    orders_by_gpc=order.orders_by_gpc,
    handicap=_handicap,
    unit=lambda _: ("wgmma, operands loaded by TMA", None),
    means=lambda config: MEANS[config.means],
    compile_seconds=19.0,
)
