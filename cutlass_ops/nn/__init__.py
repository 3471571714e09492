"""Modules whose forward and backward are fused GEMMs, and :func:`patch`, which fuses the layers of an existing model.

Parameters have the names and shapes of PyTorch's and Hugging Face's modules, so their state_dicts can be loaded.
"""

from __future__ import annotations

from cutlass_ops.nn.block import DecoderBlock
from cutlass_ops.nn.linear import Linear
from cutlass_ops.nn.mlp import MLP, GatedMLP
from cutlass_ops.nn.norms import LayerNormLinear, RMSNormLinear
from cutlass_ops.nn.patching import Patched, fold_norms, patch, unpatch

__all__ = [
    "MLP",
    "DecoderBlock",
    "GatedMLP",
    "LayerNormLinear",
    "Linear",
    "Patched",
    "RMSNormLinear",
    "fold_norms",
    "patch",
    "unpatch",
]
