"""GEMMs with the epilogue you write in Python, as compiled CUTLASS kernels for Sm80 and Sm90.

>>> import cutlass_ops as co
>>> d = co.gemm_bias_relu(a, b, bias)                                     # doctest: +SKIP

Importing does no work: no file or folder is made, no device touched, no compiler looked for.
"""

from __future__ import annotations

from cutlass_ops.config import (
    ClusterShape,
    InstructionShape,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.epilogue import (
    Col,
    Epilogue,
    Row,
    Scalar,
    Tile,
    abs,
    cast,
    clamp,
    epilogue,
    exp,
    gelu,
    hardswish,
    leaky_relu,
    max,
    maximum,
    minimum,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    square,
    sum,
    sum_square,
    tanh,
)
from cutlass_ops.errors import (
    CompileError,
    ConfigError,
    CutlassOpsError,
    EpilogueError,
    LoadError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
    UnsupportedError,
)
from cutlass_ops.legality import Violation, check
from cutlass_ops.ops import (
    Kernel,
    build,
    gemm,
    gemm_bias,
    gemm_bias_gelu,
    gemm_bias_relu,
    gemm_bias_relu_residual,
    gemm_bias_residual,
    gemm_bias_silu,
    gemm_residual,
)
from cutlass_ops.registry import REGISTRY as registry
from cutlass_ops.spec import KernelSpec, Operand

__version__ = "0.1.0"

__all__ = [
    "ClusterShape",
    "Col",
    "CompileError",
    "ConfigError",
    "CutlassOpsError",
    "Epilogue",
    "EpilogueError",
    "InstructionShape",
    "Kernel",
    "KernelSpec",
    "LoadError",
    "MissingKernelError",
    "NoDeviceError",
    "Operand",
    "Row",
    "Scalar",
    "Sm80Config",
    "Sm90Config",
    "StoreError",
    "ThreadblockShape",
    "Tile",
    "ToolchainError",
    "UnsupportedError",
    "Violation",
    "WarpShape",
    "abs",
    "build",
    "cast",
    "check",
    "clamp",
    "epilogue",
    "exp",
    "gelu",
    "gemm",
    "gemm_bias",
    "gemm_bias_gelu",
    "gemm_bias_relu",
    "gemm_bias_relu_residual",
    "gemm_bias_residual",
    "gemm_bias_silu",
    "gemm_residual",
    "hardswish",
    "leaky_relu",
    "max",
    "maximum",
    "minimum",
    "registry",
    "relu",
    "rsqrt",
    "sigmoid",
    "silu",
    "sqrt",
    "square",
    "sum",
    "sum_square",
    "tanh",
]
