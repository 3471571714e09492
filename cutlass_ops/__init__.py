"""GEMMs with epilogues written in Python, as compiled CUTLASS kernels for sm_80 to sm_90a.

>>> import torch
>>> import cutlass_ops as co
>>> a, b, bias = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16(), torch.ones(3).bfloat16()
>>> co.gemm_bias_relu(a, b, bias).tolist()
[[9.0, 9.0, 9.0], [9.0, 9.0, 9.0]]

Importing creates no file, touches no device and searches for no compiler.
"""

from __future__ import annotations

from sys import platform as _platform
from typing import TYPE_CHECKING, Any

if _platform == "win32":
    raise ImportError("cutlass_ops runs on Linux on x86-64, and this is Windows: use it in WSL 2")

from cutlass_ops import e
from cutlass_ops._version import __version__
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
    PointwiseConfig,
    Sm80Config,
    Sm90Config,
    SmallConfig,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue import Col, Epilogue, Integer, Product, Reduction, Row, Scalar, Tile, Value, epilogue
from cutlass_ops.epilogue.functions import *  # noqa: F403
from cutlass_ops.epilogue.unknown import unknown_name


def _is_command() -> bool:
    """Whether this process is the command line, as a script or by ``python -m cutlass_ops``."""
    import os
    import sys

    script = os.path.basename(sys.argv[0]) if sys.argv else ""
    if script != "-m":
        return script == "cutlass-ops"
    # sys.orig_argv ends with `-m module` or `-mmodule`, and then the module's arguments.
    module = sys.orig_argv[-len(sys.argv)]
    return (module.partition("m")[2] if module.startswith("-") else module) in ("cutlass_ops", "cutlass_ops.__main__")


if TYPE_CHECKING:
    from cutlass_ops import nn
    from cutlass_ops.artifacts.bundle import Bundle
    from cutlass_ops.artifacts.bundles import load_bundle
    from cutlass_ops.kinds.legality import Violation, check
    from cutlass_ops.kinds.render import source
    from cutlass_ops.nn.patching import patch, unpatch
    from cutlass_ops.run.fp8 import Fp8State
    from cutlass_ops.run.gated import gemm_swiglu
    from cutlass_ops.run.grouped import grouped_gemm, grouped_gemm_masked, grouped_gemm_wgrad
    from cutlass_ops.run.grouped_scaled import scaled_grouped_gemm, scaled_grouped_gemm_masked
    from cutlass_ops.run.kernels import Kernel, build
    from cutlass_ops.run.launch import Launch
    from cutlass_ops.run.named import (
        gemm_bias,
        gemm_bias_gelu,
        gemm_bias_relu,
        gemm_bias_relu_residual,
        gemm_bias_residual,
        gemm_bias_silu,
        gemm_residual,
    )
    from cutlass_ops.run.norms import gemm_residual_rms, layernorm_gemm, rmsnorm_gemm
    from cutlass_ops.run.preparing import prepare_launch, warm_up
    from cutlass_ops.run.quantizing import quantize  # type: ignore[assignment]
    from cutlass_ops.run.registry import Registry
    from cutlass_ops.run.scaled import scaled_gemm
    from cutlass_ops.run.weights import prepare, prepare_layernorm
    from cutlass_ops.tools.bench.benching import bench
    from cutlass_ops.tools.bench.result import Benchmark
    from cutlass_ops.tools.contract.predicting import contract
    from cutlass_ops.tools.contract.result import Contract
    from cutlass_ops.tools.explaining import Explanation, explain
    from cutlass_ops.tuner.tuning import Effort, tune

    registry: Registry
    """The kernels that this process has loaded. ``registry.entries()`` lists them, with its ``spec`` and ``kernel``."""

# The command line starts without PyTorch, which takes a second to import. Elsewhere these come at once: programs saved
# by torch.export call our operators and have our classes in them.
if TYPE_CHECKING or not _is_command():
    from cutlass_ops.run.ops import gemm
    from cutlass_ops.run.results import (
        PreparedLayerNormWeight,
        PreparedWeight,
        QuantizedResidualRms,
        ResidualRms,
        RowStatistic,
    )
    from cutlass_ops.run.traced import recompute

if not TYPE_CHECKING:
    del quantize  # the language's alone: the other one, which takes tensors too, comes when it is asked for

# What is public of other modules. It is imported when it is first asked for, since no program needs all of it.
_MODULES = {
    "artifacts.bundle": ("Bundle",),
    "artifacts.bundles": ("load_bundle",),
    "kinds.legality": ("Violation", "check"),
    "kinds.render": ("source",),
    "nn.patching": ("patch", "unpatch"),
    "run.fp8": ("Fp8State",),
    "run.gated": ("gemm_swiglu",),
    "run.grouped": ("grouped_gemm", "grouped_gemm_masked", "grouped_gemm_wgrad"),
    "run.grouped_scaled": ("scaled_grouped_gemm", "scaled_grouped_gemm_masked"),
    "run.kernels": ("Kernel", "build"),
    "run.launch": ("Launch",),
    "run.named": (
        "gemm_bias",
        "gemm_bias_gelu",
        "gemm_bias_relu",
        "gemm_bias_relu_residual",
        "gemm_bias_residual",
        "gemm_bias_silu",
        "gemm_residual",
    ),
    "run.norms": ("gemm_residual_rms", "layernorm_gemm", "rmsnorm_gemm"),
    "run.ops": ("gemm",),
    "run.preparing": ("prepare_launch", "warm_up"),
    "run.quantizing": ("quantize",),
    "run.results": (
        "PreparedLayerNormWeight",
        "PreparedWeight",
        "QuantizedResidualRms",
        "ResidualRms",
        "RowStatistic",
    ),
    "run.scaled": ("scaled_gemm",),
    "run.traced": ("recompute",),
    "run.weights": ("prepare", "prepare_layernorm"),
    "tools.bench.benching": ("bench",),
    "tools.bench.result": ("Benchmark",),
    "tools.contract.predicting": ("contract",),
    "tools.contract.result": ("Contract",),
    "tools.explaining": ("Explanation", "explain"),
    "tuner.tuning": ("Effort", "tune"),
}
# By the public name: the module, and the name there.
_LATER = {name: (module, name) for module, names in _MODULES.items() for name in names}
# Ops for arrays of other packages. Not in __all__: `import *` must not replace the packages of these names.
_FOR_OTHERS = ("cupy", "jax")

__all__ = [
    "Benchmark",
    "Bundle",
    "BundleError",
    "ClusterShape",
    "Col",
    "CompileError",
    "ConfigError",
    "Contract",
    "CutlassOpsError",
    "Effort",
    "Epilogue",
    "EpilogueError",
    "Explanation",
    "Fp8State",
    "GemvConfig",
    "InstructionShape",
    "Integer",
    "Kernel",
    "KernelSpec",
    "Launch",
    "LoadError",
    "MeasuringError",
    "MissingKernelError",
    "NoDeviceError",
    "Operand",
    "PointwiseConfig",
    "PreparedLayerNormWeight",
    "PreparedWeight",
    "Product",
    "QuantizedResidualRms",
    "Reduction",
    "ResidualRms",
    "Row",
    "RowStatistic",
    "Scalar",
    "Sm80Config",
    "Sm90Config",
    "SmallConfig",
    "StoreError",
    "ThreadblockShape",
    "Tile",
    "TileOrder",
    "ToolchainError",
    "UnsupportedError",
    "Value",
    "Violation",
    "WarpShape",
    "__version__",
    "bench",
    "build",
    "check",
    "contract",
    "e",
    "epilogue",
    "explain",
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
    "grouped_gemm",
    "grouped_gemm_masked",
    "grouped_gemm_wgrad",
    "layernorm_gemm",
    "load_bundle",
    "nn",
    "patch",
    "prepare",
    "prepare_launch",
    "prepare_layernorm",
    "quantize",
    "recompute",
    "registry",
    "rmsnorm_gemm",
    "scaled_gemm",
    "scaled_grouped_gemm",
    "scaled_grouped_gemm_masked",
    "source",
    "tune",
    "unpatch",
    "warm_up",
]


# Type checkers would take any name to be there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _FOR_OTHERS:
            return import_module(f"cutlass_ops.{name}")
        if name not in __all__:
            raise unknown_name(__name__, name, (*__all__, *e.__all__))
        if name == "registry":
            return import_module("cutlass_ops.run.registry").Registry.current()
        if name == "nn":
            return import_module("cutlass_ops.nn")
        module, attribute = _LATER[name]
        globals()[name] = found = getattr(import_module(f"cutlass_ops.{module}"), attribute)
        return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
