"""Quantised tensors: a small kernel for tensors that no GEMM produces. On the CPU, PyTorch computes the same bits.

Under a tracer this is an operator, so that it does not break the graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.artifacts.loader import refusal
from cutlass_ops.base import arch, dtypes
from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.base.dtypes import READ
from cutlass_ops.base.errors import LoadError, UnsupportedError
from cutlass_ops.base.frozen import plain
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.quantizing import QuantizeSpec
from cutlass_ops.epilogue.values import TRACER
from cutlass_ops.operand import matrices, reference, watching
from cutlass_ops.operand.call import device_of
from cutlass_ops.operand.outputs import check_scales
from cutlass_ops.operand.results import FP8, contiguous, operand_strides, scale_strides
from cutlass_ops.operand.tensors import (
    element_type,
    fold,
    overlap,
    refuse_differentiated,
    require_memory,
    require_output,
    require_tensor,
    writing,
)
from cutlass_ops.run import refusals
from cutlass_ops.run.registry import Registry

_NAMES = ("values", "scale")


def quantize(x: Any, dtype: str | torch.dtype, block: int | None, out: Any = None) -> tuple[Tensor, Tensor]:
    """Return values and scales of a tensor: see ``cutlass_ops.Scaled.quantize``. `out` has both, or None for one."""
    if not isinstance(x, Tensor):
        inside = ". Inside of an epilogue, call cutlass_ops.e.quantize" if TRACER.get() is not None else ""
        raise TypeError(f"x must be a torch.Tensor, not {type(x).__name__}{inside}")
    element = dtypes.dtype(dtype, dtypes.FP8)
    block = None if block is None else plain(block)
    if block is not None and (type(block) is not int or block != BLOCK_K):
        raise ValueError(f"block is {block!r}: use {BLOCK_K}, or None for a scale of each row")
    given = dict(zip(_NAMES, (None, None) if out is None else out, strict=True))
    for name, each in given.items():
        if each is not None:
            refuse_differentiated(f"out.{name}", each)
    if watching.goes_by_operator(x=x, **{name: each for name, each in given.items() if each is not None}):
        return _by_operator(x, element.name, block, given)
    return _quantize(x, element, block, given)


def _by_operator(x: Tensor, dtype: str, block: int | None, given: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    if watching.is_differentiated(x):
        raise ValueError(_NO_GRADIENT)
    if not torch.compiler.is_dynamo_compiling():  # the compiler would wrap the error in its own
        _check(x)
        _check_given(x, dtype, block, given)
    if all(each is None for each in given.values()):
        d, scale = torch.ops.cutlass_ops.quantize(x, dtype, block)
        return d, scale
    d, scale = _results(x, dtype, block, given)
    torch.ops.cutlass_ops.quantize_out(x, dtype, block, d, scale)
    return d, scale


_NO_GRADIENT = (
    "x requires grad, and no gradient passes through a quantisation: call under torch.no_grad(), or pass x.detach()"
)


class _Layout(NamedTuple):
    """The layout of one result."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)


def _layouts(x: Tensor, dtype: str, block: int | None) -> tuple[_Layout, _Layout]:
    """Return the layouts of new results: D's, and its scales'."""
    *batch, n = x.shape
    shape = tuple(batch) if block is None else (*batch, -(-n // block))
    strides = contiguous(shape) if block is None else scale_strides(shape)
    return _Layout(tuple(x.shape), operand_strides(x.shape), FP8[dtype]), _Layout(shape, strides, torch.float32)


def _results(x: Tensor, dtype: str, block: int | None, given: Mapping[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return the caller's tensors, and new ones for those that are missing."""
    layouts = _layouts(x, dtype, block)
    d, scale = (o.empty(x.device) if each is None else each for each, o in zip(given.values(), layouts, strict=True))
    return d, scale


def _quantize(
    x: Tensor, dtype: dtypes.DType, block: int | None, given: Mapping[str, Tensor | None]
) -> tuple[Tensor, Tensor]:
    """Quantise a tensor with memory of its own."""
    _check(x)
    require_memory("x", x)
    _check_given(x, dtype.name, block, given)
    for name, each in given.items():
        if each is not None:
            require_memory(f"out.{name}", each)
    d, scale = _results(x, dtype.name, block, given)
    for name, each, others in ((_NAMES[0], d, (x,)), (_NAMES[1], scale, (x, d))):
        if given[name] is not None and any(overlap(each, other) for other in others):
            raise ValueError(f"out.{name} shares memory with another argument: pass a separate tensor")
    if x.device.type == "cpu" or x.numel() == 0:
        refusals.say("quantize", tuple(x.shape), refusals.BY_PYTORCH)
        _by_pytorch(x, dtype.name, block, d, scale)
    else:
        _by_kernel(x, dtype, block, d, scale)
    return d, scale


def _check(x: Tensor) -> None:
    require_tensor("x", x)
    if watching.is_differentiated(x):
        raise ValueError(_NO_GRADIENT)
    element_type("x", x, READ)
    if x.ndim < 1:
        raise ValueError("x has no dimensions: pass a tensor (..., M, N), whose rows are quantised")
    if x.is_neg():
        raise ValueError("x is a lazy negation: pass x.resolve_neg()")
    flat = fold("x", x, (math.prod(x.shape[:-1]), x.shape[-1]))
    if not matrices.has_lines_along(flat, 1):
        raise ValueError(
            f"x has shape {tuple(x.shape)} and strides {x.stride()}, and rows are read along the last dimension: call "
            "x.contiguous() first"
        )


def _check_given(x: Tensor, dtype: str, block: int | None, given: Mapping[str, Tensor | None]) -> None:
    for (name, each), wanted in zip(given.items(), _layouts(x, dtype, block), strict=True):
        if each is not None:
            _check_out(name, each, wanted, x)


def _check_out(name: str, given: Any, wanted: _Layout, x: Tensor) -> None:
    name = f"out.{name}"
    require_output(name, given)
    if given.dtype != wanted.dtype:
        raise TypeError(f"{name} is {given.dtype}: it must be {wanted.dtype}")
    if given.shape != wanted.shape or given.device != x.device:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)} on {given.device}: it must have shape {wanted.shape} on {x.device}"
        )
    if given.dtype != torch.float32:
        flat = fold(name, given, (math.prod(x.shape[:-1]), x.shape[-1]))
        if not matrices.has_lines_along(flat, 1):
            raise ValueError(f"{name} has strides {given.stride()}: it must be contiguous along the last dimension")
    elif given.ndim == x.ndim:
        check_scales(name, given)
    elif not given.is_contiguous():
        raise ValueError(f"{name} has strides {given.stride()}: scales of rows must be contiguous")


def _by_pytorch(x: Tensor, dtype: str, block: int | None, d: Tensor, scale: Tensor) -> None:
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
    quotient, scales = reference.quantized(flat, FP8[dtype], block)
    with writing(d, scale):
        d.copy_(reference.rounded(quotient, FP8[dtype]).view(d.shape))
        scale.copy_(scales.reshape(scale.shape))


def _by_kernel(x: Tensor, dtype: dtypes.DType, block: int | None, d: Tensor, scale: Tensor) -> None:
    spec = _spec(element_type("x", x), dtype, block, device_of(x.device).capability)
    if not Registry.current().has(spec) and _is_pytorch_s(spec, x.device):
        _by_pytorch(x, dtype.name, block, d, scale)
        return
    status = Registry.current().kernel(spec).launch(x, d, scale)
    if status != 0:
        position, reason = refusal(status)
        raise LoadError(f"{spec.slug} refused argument {position} ({reason.name}): a defect of this library")


def _is_pytorch_s(spec: QuantizeSpec, device: torch.device) -> bool:
    """Whether PyTorch serves a call whose kernel is not loaded. If not, the call compiles it, and raises the errors."""
    from cutlass_ops.run import supply  # late: once the kernel is there, nothing needs it

    what = f"quantize of {spec.x} to {spec.d}"
    return supply.supply_kernel(spec, device, what, waits=not supply.may_stand_in()) is not None


@functools.lru_cache(maxsize=64)
def _spec(x: dtypes.DType, d: dtypes.DType, block: int | None, capability: tuple[int, int]) -> QuantizeSpec:
    target = arch.target_for(capability, MMA_SYNC)
    if target is None or capability < arch.STORES_FP8:
        advice = "FP8 is stored on sm_90 alone: quantise by operations of PyTorch"
        raise UnsupportedError(arch.unserved(f"quantize to {d}", capability, advice=advice))
    return QuantizeSpec(x, d, block, target.name)


# ---- What the operators do (operators.py) ---------------------------------------------------------------------------


def shapes(x: Tensor, dtype: str, block: int | None) -> tuple[Tensor, Tensor]:
    """Return new results, without values."""
    return _results(x, dtype, block, dict.fromkeys(_NAMES))


def run(x: Tensor, dtype: str, block: int | None) -> tuple[Tensor, Tensor]:
    """Return the quantised tensor and its scales."""
    return _quantize(x, dtypes.dtype(dtype, dtypes.FP8), block, dict.fromkeys(_NAMES))


def run_out(x: Tensor, dtype: str, block: int | None, d: Tensor, scale: Tensor) -> None:
    """Write the quantised tensor and its scales into given tensors."""
    _quantize(x, dtypes.dtype(dtype, dtypes.FP8), block, {"values": d, "scale": scale})
