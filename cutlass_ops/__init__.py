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
from cutlass_ops.base.errors import CutlassOpsError
from cutlass_ops.declare.config import ClusterShape, InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue import Col, Epilogue, Integer, Product, Row, Scalar, Tile, epilogue
from cutlass_ops.epilogue.functions import *  # noqa: F403
from cutlass_ops.epilogue.unknown import unknown_name

# Each configuration registers itself, for those who read a kernel's declaration.
from cutlass_ops.kinds.gemv import config as _gemv  # noqa: F401
from cutlass_ops.kinds.pointwise import config as _pointwise  # noqa: F401
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.small import config as _small  # noqa: F401


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
    from cutlass_ops import errors, nn, types
    from cutlass_ops.artifacts.bundles import load_bundle
    from cutlass_ops.kinds.legality import check
    from cutlass_ops.kinds.render import source
    from cutlass_ops.nn.patching import patch, unpatch
    from cutlass_ops.run.fp8 import Fp8State
    from cutlass_ops.run.gated import gemm_swiglu
    from cutlass_ops.run.kernels import build
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
    from cutlass_ops.run.registry import Registry
    from cutlass_ops.run.weights import prepare
    from cutlass_ops.tools.bench.benching import bench
    from cutlass_ops.tools.contract.predicting import contract
    from cutlass_ops.tools.explaining import explain
    from cutlass_ops.tuner.tuning import tune

    registry: Registry
    """The kernels that this process has loaded. ``registry.entries()`` lists them, with its ``spec`` and ``kernel``."""

# The command line starts without PyTorch, which takes a second to import. Elsewhere these come at once: programs saved
# by torch.export call our operators and have our classes in them.
if TYPE_CHECKING or not _is_command():
    from cutlass_ops.operand.results import RowStatistic
    from cutlass_ops.run.gemm import gemm
    from cutlass_ops.run.packed import Packed
    from cutlass_ops.run.sparse import Sparse, sparsify
    from cutlass_ops.run.traced import recompute
    from cutlass_ops.run.values import Groups, Scaled

# What is public of other modules. It is imported when it is first asked for, since no program needs all of it.
_MODULES = {
    "artifacts.bundles": ("load_bundle",),
    "kinds.legality": ("check",),
    "kinds.render": ("source",),
    "nn.patching": ("patch", "unpatch"),
    "run.fp8": ("Fp8State",),
    "run.gated": ("gemm_swiglu",),
    "run.gemm": ("gemm",),
    "run.kernels": ("build",),
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
    "run.packed": ("Packed",),
    "run.preparing": ("prepare_launch", "warm_up"),
    "run.sparse": ("Sparse", "sparsify"),
    "operand.results": ("RowStatistic",),
    "run.traced": ("recompute",),
    "run.values": ("Groups", "Scaled"),
    "run.weights": ("prepare",),
    "tools.bench.benching": ("bench",),
    "tools.contract.predicting": ("contract",),
    "tools.explaining": ("explain",),
    "tuner.tuning": ("tune",),
}
# By the public name: the module.
_LATER = {name: module for module, names in _MODULES.items() for name in names}
# Modules, imported when they are first asked for. The last two are for arrays of other packages, and not in __all__:
# `import *` must not replace the packages of these names.
_NAMESPACES = ("errors", "nn", "types", "cupy", "jax")

__all__ = [
    "ClusterShape",
    "Col",
    "CutlassOpsError",
    "Epilogue",
    "Fp8State",
    "Groups",
    "InstructionShape",
    "Integer",
    "KernelSpec",
    "Operand",
    "Packed",
    "Product",
    "Row",
    "RowStatistic",
    "Scalar",
    "Scaled",
    "Sm80Config",
    "Sm90Config",
    "Sparse",
    "ThreadblockShape",
    "Tile",
    "TileOrder",
    "WarpShape",
    "__version__",
    "bench",
    "build",
    "check",
    "contract",
    "e",
    "epilogue",
    "errors",
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
    "layernorm_gemm",
    "load_bundle",
    "nn",
    "patch",
    "prepare",
    "prepare_launch",
    "recompute",
    "registry",
    "rmsnorm_gemm",
    "source",
    "sparsify",
    "tune",
    "types",
    "unpatch",
    "warm_up",
]


# Type checkers would take any name to be there.
if not TYPE_CHECKING:
    del quantize  # noqa: F821 - co.e.quantize is the epilogue's, and co.Scaled.quantize that of tensors

    def __getattr__(name: str) -> Any:
        from importlib import import_module

        if name in _NAMESPACES:
            return import_module(f"cutlass_ops.{name}")
        if name not in __all__:
            classes = [
                f"co.{module}.{each}"
                for module in ("errors", "types", "nn")
                if name[:1].isupper()
                for each in import_module(f"cutlass_ops.{module}").__all__
            ]
            raise unknown_name(__name__, name, (*__all__, *e.__all__, *classes))
        if name == "registry":
            return import_module("cutlass_ops.run.registry").Registry.current()
        globals()[name] = found = getattr(import_module(f"cutlass_ops.{_LATER[name]}"), name)
        return found


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
