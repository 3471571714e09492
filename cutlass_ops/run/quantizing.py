"""Quantised tensors: a small kernel for what no GEMM produces. On the CPU, PyTorch does the same, bit for bit.

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
from cutlass_ops.base.dtypes import READ
from cutlass_ops.base.errors import LoadError, UnsupportedError
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.base.whole import plain
from cutlass_ops.declare.quantizing import QuantizeSpec
from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.nodes import D_SCALE
from cutlass_ops.epilogue.values import TRACER
from cutlass_ops.run import matrices, reference, watching
from cutlass_ops.run.call import device_of
from cutlass_ops.run.outputs import check_scales
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.results import FP8, Outputs, contiguous, operand_strides, scale_strides
from cutlass_ops.run.tensors import (
    element_type,
    fold,
    overlap,
    refuse_differentiated,
    require_memory,
    require_tensor,
    writing,
)

_NAMES = ("d", D_SCALE)


def quantize(
    x: Any, dtype: str | torch.dtype, block: int | None = BLOCK_K, *, out: Mapping[str, Tensor] | None = None
) -> Any:
    """Quantise a tensor to FP8, with a scale for each 128 values of a row, or for each row.

    Inside an epilogue, `x` is a traced value, and the result is D: see :func:`cutlass_ops.e.quantize`. Both follow the
    same rule. Let m be the largest absolute value of a block, and at least 2⁻¹¹⁰. For e4m3, the scale is m / 448 and D
    is x · (448 / m); for e5m2 with 57344 in place of 448. D is rounded to nearest even. A NaN makes the scale of its
    block NaN, and an infinity makes it infinite: then all values of the block are NaN once the scale is applied.

    The kernel is compiled at the first call, and kept in the store. It reads each value from global memory once.

    Parameters
    ----------
    x : Tensor
        (..., M, N) in FP16, BF16 or FP32. The last dimension is contiguous, and the others can be folded into one.
    dtype : str or torch.dtype
        ``"e4m3"`` or ``"e5m2"``, or PyTorch's dtypes of these.
    block : int, optional
        Number of values in a row that share a scale: 128. None for one scale per row.
    out : mapping of str to Tensor, optional
        Where to write ``"d"``, ``"d_scale"`` or both.

    Returns
    -------
    named tuple of Tensor
        ``d`` (..., M, N) in FP8, with lines padded to 16 bytes. ``d_scale`` in FP32: (..., M, ceil(N / 128)), M-major,
        with lines padded too, or (..., M) if `block` is None. :func:`cutlass_ops.scaled_gemm` takes both as `a` and
        `scale_a`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If the GPU is not Hopper (compute capability 9.0).
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x = torch.tensor([[-3.0, 1.5] + [0.0] * 126, [7.0] * 128])
    >>> d, d_scale = co.quantize(x, "e4m3")
    >>> d.dtype, d[0, :2].tolist(), (d_scale * 448).tolist()
    (torch.float8_e4m3fn, [-448.0, 224.0], [[3.0], [7.0]])
    >>> co.quantize(x, "e5m2", block=None).d_scale.shape
    torch.Size([2])
    """
    if not isinstance(x, Tensor):
        if TRACER.get() is None:
            raise TypeError(f"x is {type(x).__name__}: pass a tensor, or a traced value inside of an epilogue")
        if out is not None:
            raise TypeError("out is for tensors: a quantised D goes where a call's own out says")
        return functions.quantize(x, dtype, block)  # type: ignore[arg-type]
    element = dtypes.dtype(dtype, dtypes.FP8)
    block = None if block is None else plain(block)
    if block is not None and (type(block) is not int or block != BLOCK_K):
        raise ValueError(f"block is {block!r}: use {BLOCK_K}, or None for a scale of each row")
    given = _given(out)
    if watching.goes_by_operator(x=x, **{name: each for name, each in given.items() if each is not None}):
        return _by_operator(x, element.name, block, given)
    return Outputs(_NAMES, _quantize(x, element, block, given))


def _given(out: object) -> dict[str, Tensor | None]:
    if out is None:
        return dict.fromkeys(_NAMES)
    if not isinstance(out, Mapping):
        raise TypeError(f"out must be a mapping of {' and '.join(_NAMES)} to tensors, not {type(out).__name__}")
    unknown = sorted(set(out) - set(_NAMES))
    if unknown:
        raise ValueError(f"out names {', '.join(map(str, unknown))}: the outputs are {', '.join(_NAMES)}")
    for name, given in out.items():
        refuse_differentiated(f"out[{name!r}]", given)
    return {name: out.get(name) for name in _NAMES}


def _by_operator(x: Tensor, dtype: str, block: int | None, given: Mapping[str, Tensor | None]) -> Outputs:
    if watching.is_differentiated(x):
        raise ValueError(_NO_GRADIENT)
    if not torch.compiler.is_dynamo_compiling():  # it would wrap the error in one of its own
        _check(x)
        _check_given(x, dtype, block, given)
    if all(each is None for each in given.values()):
        return Outputs(_NAMES, torch.ops.cutlass_ops.quantize(x, dtype, block))
    d, scale = _results(x, dtype, block, given)
    torch.ops.cutlass_ops.quantize_out(x, dtype, block, d, scale)
    return Outputs(_NAMES, (d, scale))


_NO_GRADIENT = (
    "x requires grad, and no gradient passes through a quantisation: call under torch.no_grad(), or pass x.detach()"
)


class _Layout(NamedTuple):
    """Of one result."""

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
            require_memory(f"out[{name!r}]", each)
    d, scale = _results(x, dtype.name, block, given)
    for name, each, others in ((_NAMES[0], d, (x,)), (_NAMES[1], scale, (x, d))):
        if given[name] is not None and any(overlap(each, other) for other in others):
            raise ValueError(f"out[{name!r}] shares memory with another argument: pass a separate tensor")
    if x.device.type == "cpu" or x.numel() == 0:
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
    name = f"out[{name!r}]"
    require_tensor(name, given)
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
    status = Registry.current().kernel(spec).launch(x, d, scale)
    if status != 0:
        position, reason = refusal(status)
        raise LoadError(f"{spec.slug} refused argument {position} ({reason.name}): a defect of this library")


@functools.lru_cache(maxsize=64)
def _spec(x: dtypes.DType, d: dtypes.DType, block: int | None, capability: tuple[int, int]) -> QuantizeSpec:
    target = arch.target_for(capability, wgmma=False)
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
    """Write them."""
    _quantize(x, dtypes.dtype(dtype, dtypes.FP8), block, {"d": d, D_SCALE: scale})
