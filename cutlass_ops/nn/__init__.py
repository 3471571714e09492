"""Modules whose forward and backward are fused GEMMs, and :func:`patch`, which fuses the layers of an existing model.

Parameters have the names and shapes of PyTorch's and Hugging Face's modules, so their state_dicts can be loaded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass_ops.epilogue.unknown import unknown_name
from cutlass_ops.nn.block import DecoderBlock
from cutlass_ops.nn.launching import ModuleLaunch
from cutlass_ops.nn.linear import Linear
from cutlass_ops.nn.mlp import MLP, GatedMLP
from cutlass_ops.nn.norms import LayerNormLinear, RMSNormLinear
from cutlass_ops.nn.packed import PackedLinear
from cutlass_ops.nn.patching import Patched, fold_norms, patch, unpatch
from cutlass_ops.nn.sparse import SparseLinear
from cutlass_ops.run.fp8 import Fp8State

__all__ = [
    "MLP",
    "DecoderBlock",
    "Fp8State",
    "GatedMLP",
    "LayerNormLinear",
    "Linear",
    "ModuleLaunch",
    "PackedLinear",
    "Patched",
    "RMSNormLinear",
    "SparseLinear",
    "fold_norms",
    "patch",
    "unpatch",
]


# Type checkers would take any name to be there.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        raise unknown_name(__name__, name, __all__)
