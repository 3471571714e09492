"""Weights written into a 2:4 sparse form that is there already: by a small kernel, or on the CPU by PyTorch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from cutlass_ops.artifacts.loader import refusal
from cutlass_ops.base import arch, dtypes
from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.base.dtypes import DType
from cutlass_ops.base.errors import LoadError, UnsupportedError
from cutlass_ops.declare.compressing import CompressSpec
from cutlass_ops.operand import sparsity
from cutlass_ops.operand.call import device_of
from cutlass_ops.operand.tensors import require_memory, writing
from cutlass_ops.run.registry import Registry


def compress(w: Tensor, values: Tensor, meta: Tensor, *, prune: bool) -> None:
    """Write a weight (N, K) into stored elements (N, K / 2), at the places that metadata name; or prune it anew."""
    for name, each in (("w", w), ("values", values), ("meta", meta)):
        require_memory(name, each)
    increment_version((values, meta) if prune else values)
    if w.device.type == "cuda":
        spec = _spec(dtypes.dtype(str(w.dtype), dtypes.DECLARED), prune, device_of(w.device).capability)
        if Registry.current().has(spec) or not _is_pytorch_s(spec, w.device):
            status = Registry.current().kernel(spec).launch(w, values, meta)
            if status != 0:
                position, reason = refusal(status)
                raise LoadError(f"{spec.slug} refused argument {position} ({reason.name}): a defect of this library")
            return
    stored, places = sparsity.compressed(w, sparsity.kept(w)) if prune else (sparsity.updated(w, meta), meta)
    with writing(values, meta):
        values.copy_(stored)
        meta.copy_(places)


def _is_pytorch_s(spec: CompressSpec, device: torch.device) -> bool:
    """Whether PyTorch serves a call whose kernel is not loaded. If not, the call compiles it, and raises the errors."""
    from cutlass_ops.run import supply  # late: once the kernel is there, nothing needs it

    what = f"a 2:4 sparse form of {spec.w}"
    return supply.supply_kernel(spec, device, what, waits=not supply.may_stand_in()) is not None


@functools.lru_cache(maxsize=64)
def _spec(w: DType, prune: bool, capability: tuple[int, int]) -> CompressSpec:
    target = arch.target_for(capability, MMA_SYNC)
    if target is None:
        raise UnsupportedError(arch.unserved("compression of 2:4 sparse weights", capability))
    return CompressSpec(w, prune, target.name)
