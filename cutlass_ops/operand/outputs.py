"""Checks of the output tensors that a caller gives."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import DType, i32
from cutlass_ops.declare.form import DENSE, GROUPED, MASKED
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind, Output
from cutlass_ops.epilogue.operations import REDUCTIONS
from cutlass_ops.operand import batches, sizes
from cutlass_ops.operand.matrices import Matrix, has_lines_along
from cutlass_ops.operand.operands import Arguments
from cutlass_ops.operand.tensors import (
    element_type,
    fold,
    overlap,
    refuse_differentiated,
    require_output,
    require_same_device,
)


def output_name(output: Output) -> str:
    """Return the name of a caller's output in messages."""
    return "out" if output.name == "d" else f"out[{output.name!r}]"


def check_out(
    arguments: Arguments, output: Output, out: Any, allowed: Sequence[DType], dtype: torch.dtype | None = None
) -> Tensor:
    """Check a caller's output tensor, of one of the allowed types, and return its flat view."""
    name = output_name(output)
    require_output(name, out)
    refuse_differentiated(name, out)
    if output.reduction is not None and REDUCTIONS[output.reduction].result == i32.name:
        if out.dtype != torch.int32:
            raise TypeError(f"{name} is {out.dtype}: indices are {torch.int32}")
    else:
        element_type(name, out, allowed)
    if output.kind is Kind.BLOCKS_D:
        check_scales(name, out)
    if dtype is not None and out.dtype != dtype:
        raise TypeError(f"{name} is {out.dtype}, and out_dtype asks for {dtype}")
    wanted, flat = arguments.output_shape(output), arguments.flat_shape(output)
    if tuple(out.shape) not in (wanted, flat):
        raise ValueError(f"{name} has shape {tuple(out.shape)}: it must have shape {wanted}")
    require_same_device(name, out, arguments.a)
    if arguments.form != DENSE and not batches.is_nested(out):
        raise ValueError(
            f"{name} has strides {out.stride()}, with which elements share memory: pass a tensor from torch.empty, for "
            "example"
        )
    if arguments.form.of_kernels == GROUPED and not has_lines_along(out, 1):
        raise ValueError(f"{name} has strides {out.stride()}, and groups are rows in memory: pass a row-major tensor")
    if arguments.form == MASKED:
        fold(name, out, (prod(flat[:-1]), flat[-1]))  # the rows of all groups have one stride
    found = fold(name, out, flat)
    if output.kind in (Kind.ROW, Kind.COL) and found.stride(-1) != 1 and not sizes.surely(found.shape[-1] <= 1):
        raise ValueError(
            f"{name} has stride {found.stride(-1)}, and must be contiguous: pass a tensor from torch.empty, for example"
        )
    return found


def check_scales(name: str, out: Tensor) -> None:
    """Raise TypeError or ValueError for scales of blocks that are not FP32 or share memory."""
    if out.dtype != torch.float32:
        raise TypeError(f"{name} is {out.dtype}: scales of blocks are torch.float32")
    strides = sorted((stride, extent) for stride, extent in zip(out.stride(), out.shape, strict=True) if extent > 1)
    reached = 0  # by the dimensions with smaller strides
    for stride, extent in strides:
        if stride <= reached:
            raise ValueError(
                f"{name} has shape {tuple(out.shape)} and strides {out.stride()}, with which scales share memory: pass "
                "a tensor from torch.empty, for example"
            )
        reached += stride * (extent - 1)


def check_quantized(n: int, dtype: torch.dtype, d: Tensor | None) -> None:
    """Refuse a D that an epilogue cannot quantise. It has `n` columns; `d` is the caller's, in two dimensions, or None.

    Raises TypeError or ValueError if D has another type than `dtype`, is not row-major, or its lines are not multiples
    of 16 bytes.
    """
    if d is not None and d.dtype != dtype:
        raise TypeError(f"out is {d.dtype}, and the epilogue quantises D to {dtype}")
    step = arch.TMA_ALIGNMENT_BYTES
    if n % step:
        raise ValueError(
            f"b has {n} columns, and the epilogue quantises D, whose lines are then multiples of {step} elements: pad "
            f"b by columns of zeros to {-(-n // step) * step}"
        )
    lines = None if d is None else Matrix("out", d, element_type("out", d)).layouts.get("row")
    if d is not None and (lines is None or not lines.operand.aligned):
        raise ValueError(
            f"out has strides {d.stride()}, and the epilogue quantises D: pass a row-major tensor whose lines begin at "
            f"multiples of {step} bytes"
        )


def check_overlap(graph: Graph, arguments: Arguments, outputs: Sequence[Tensor]) -> None:
    """Refuse outputs that share memory with an operand or with each other.

    An (M, N) input of the same layout may be overwritten in place.
    """
    names = list(map(output_name, graph.outputs))
    tiles = {i.name for i in graph.inputs if i.kind is Kind.TILE}
    inputs = {"a": arguments.a, "b": arguments.b}
    inputs |= {k: v for k, v in arguments.inputs.items() if isinstance(v, Tensor)}
    for position, (name, out) in enumerate(zip(names, outputs, strict=True)):
        others = inputs | dict(zip(names[:position], outputs, strict=False))
        for other_name, other in others.items():
            in_place = other_name in tiles and _same_layout(out, other)
            if not in_place and overlap(out, other):
                raise ValueError(
                    f"{name} shares memory with {other_name}: pass a separate tensor"
                    + (" (in place needs the same strides and dtype)" if other_name in tiles else "")
                )


def _same_layout(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)
