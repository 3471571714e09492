"""GEMMs with the epilogue you write in Python, as compiled CUTLASS kernels for Sm80 and Sm90.

>>> import cutlass_ops as co
>>> d = co.gemm_bias_relu(a, b, bias)                                     # doctest: +SKIP

Importing does no work: no file or folder is made, no device touched, no compiler looked for.
"""

from __future__ import annotations

from sys import platform as _platform
from typing import TYPE_CHECKING, Any

if _platform == "win32":
    raise ImportError("cutlass_ops runs on Linux on x86-64, and this is Windows: use it in WSL 2")

from cutlass_ops._version import __version__
from cutlass_ops.artifacts.bundle import Bundle
from cutlass_ops.artifacts.bundles import load_bundle
from cutlass_ops.base.errors import (
    BundleError,
    CompileError,
    ConfigError,
    CutlassOpsError,
    EpilogueError,
    LoadError,
    MeasuringError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
    UnsupportedError,
)
from cutlass_ops.declare.config import (
    ClusterShape,
    GemvConfig,
    InstructionShape,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue import (
    Col,
    Epilogue,
    Product,
    Reduction,
    Row,
    Scalar,
    Tile,
    Value,
    abs,
    add,
    cast,
    clamp,
    cos,
    div,
    epilogue,
    exp,
    gelu,
    hardswish,
    leaky_relu,
    max,
    maximum,
    mean_of_a,
    mean_square_of_a,
    minimum,
    mul,
    neg,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sin,
    sqrt,
    square,
    sub,
    sum,
    sum_square,
    swap_pairs,
    tanh,
)
from cutlass_ops.epilogue.unknown import unknown_name
from cutlass_ops.run.registry import REGISTRY as registry  # noqa: N811

if TYPE_CHECKING:
    from cutlass_ops.kinds.legality import Violation, check
    from cutlass_ops.kinds.render import render as source
    from cutlass_ops.run.gated import gemm_swiglu
    from cutlass_ops.run.norms import (
        PreparedLayerNormWeight,
        PreparedWeight,
        ResidualRms,
        RowStatistic,
        gemm_residual_rms,
        layernorm_gemm,
        prepare,
        prepare_layernorm,
        rmsnorm_gemm,
    )
    from cutlass_ops.run.ops import (
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
        warm_up,
    )
    from cutlass_ops.tools.explaining import Explanation, explain
    from cutlass_ops.tuner.tuning import Effort, tune

# What of further modules is public. They are imported when it is first asked for: a GEMM with an epilogue does not need
# all, and the command line answers without PyTorch, which takes a second to import.
_MODULES = {
    "tools.explaining": ("Explanation", "explain"),
    "run.gated": ("gemm_swiglu",),
    "kinds.legality": ("Violation", "check"),
    "run.norms": (
        "PreparedLayerNormWeight",
        "PreparedWeight",
        "ResidualRms",
        "RowStatistic",
        "gemm_residual_rms",
        "layernorm_gemm",
        "prepare",
        "prepare_layernorm",
        "rmsnorm_gemm",
    ),
    "run.ops": (
        "Kernel",
        "build",
        "gemm",
        "gemm_bias",
        "gemm_bias_gelu",
        "gemm_bias_relu",
        "gemm_bias_relu_residual",
        "gemm_bias_residual",
        "gemm_bias_silu",
        "gemm_residual",
        "warm_up",
    ),
    "tuner.tuning": ("Effort", "tune"),
}
_LATER = {name: (module, name) for module, names in _MODULES.items() for name in names} | {
    "source": ("kinds.render", "render")
}

__all__ = [
    "Bundle",
    "BundleError",
    "ClusterShape",
    "Col",
    "CompileError",
    "ConfigError",
    "CutlassOpsError",
    "Effort",
    "Epilogue",
    "EpilogueError",
    "Explanation",
    "GemvConfig",
    "InstructionShape",
    "Kernel",
    "KernelSpec",
    "LoadError",
    "MeasuringError",
    "MissingKernelError",
    "NoDeviceError",
    "Operand",
    "PreparedLayerNormWeight",
    "PreparedWeight",
    "Product",
    "Reduction",
    "ResidualRms",
    "Row",
    "RowStatistic",
    "Scalar",
    "Sm80Config",
    "Sm90Config",
    "StoreError",
    "ThreadblockShape",
    "Tile",
    "ToolchainError",
    "UnsupportedError",
    "Value",
    "Violation",
    "WarpShape",
    "__version__",
    "abs",
    "add",
    "build",
    "cast",
    "check",
    "clamp",
    "cos",
    "div",
    "epilogue",
    "exp",
    "explain",
    "gelu",
    "gemm",
    "gemm_bias",
    "gemm_bias_gelu",
    "gemm_bias_relu",
    "gemm_bias_relu_residual",
    "gemm_bias_residual",
    "gemm_bias_silu",
    "gemm_residual",
    "gemm_residual_rms",
    "gemm_swiglu",
    "hardswish",
    "layernorm_gemm",
    "leaky_relu",
    "load_bundle",
    "max",
    "maximum",
    "mean_of_a",
    "mean_square_of_a",
    "minimum",
    "mul",
    "neg",
    "prepare",
    "prepare_layernorm",
    "registry",
    "relu",
    "rmsnorm_gemm",
    "rsqrt",
    "sigmoid",
    "silu",
    "sin",
    "source",
    "sqrt",
    "square",
    "sub",
    "sum",
    "sum_square",
    "swap_pairs",
    "tanh",
    "tune",
    "warm_up",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _LATER:
        raise unknown_name(name, __all__)
    module, attribute = _LATER[name]
    globals()[name] = found = getattr(import_module(f"cutlass_ops.{module}"), attribute)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _is_command() -> bool:
    """Whether this process is the command line, as a script or by ``python -m cutlass_ops``."""
    import os
    import sys

    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    return script == "cutlass-ops" or (script == "-m" and "cutlass_ops" in sys.orig_argv)


# Programs that torch.export saved call operators, which are there as soon as this is imported.
if not _is_command():
    for _name in (*_MODULES["run.ops"], *_MODULES["run.norms"], *_MODULES["run.gated"]):
        __getattr__(_name)
