"""Types of results, of annotations, and of kernels' less usual configurations."""

from __future__ import annotations

from cutlass_ops.artifacts.bundle import Bundle
from cutlass_ops.epilogue import Reduction, Value
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.legality import Violation
from cutlass_ops.kinds.packed.config import PackedRowsConfig
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.operand.results import Outputs, QuantizedResidualRms, ResidualRms
from cutlass_ops.run.kernels import Kernel
from cutlass_ops.run.launch import Launch
from cutlass_ops.run.values import PreparedWeight
from cutlass_ops.tools.bench.result import Benchmark
from cutlass_ops.tools.contract.result import Contract
from cutlass_ops.tools.explaining import Explanation
from cutlass_ops.tuner.tuning import Effort

__all__ = [
    "Benchmark",
    "Bundle",
    "Contract",
    "Effort",
    "Explanation",
    "GemvConfig",
    "Kernel",
    "Launch",
    "Outputs",
    "PackedRowsConfig",
    "PointwiseConfig",
    "PreparedWeight",
    "QuantizedResidualRms",
    "Reduction",
    "ResidualRms",
    "SmallConfig",
    "Value",
    "Violation",
]
