"""Checks of what an epilogue reads besides A @ B: numbers, vectors, tiles, further weights, scales of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base.dtypes import READ, f64
from cutlass_ops.declare.form import BATCHED, RAGGED_K
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind
from cutlass_ops.operand import batches, scalars, watching
from cutlass_ops.operand.batches import Frame
from cutlass_ops.operand.matrices import OPERANDS, has_lines_along
from cutlass_ops.operand.sizes import agree, copied, repeats, same, surely
from cutlass_ops.operand.tensors import as_stored, element_type, fold, is_read, require_same_device, require_tensor

# Inputs that may come in other shapes than a kernel takes.
_VECTORS = (Kind.ROW, Kind.COL, Kind.TILE)


def check_inputs(
    graph: Graph, inputs: Mapping[str, Any], a: Tensor, b: Tensor, frame: Frame
) -> tuple[dict[str, Tensor | float], tuple[str, ...], tuple[str, ...]]:
    """Check all inputs of an epilogue against A and B.

    Returns them by name, the names of those that the caller gave in another shape, and of those that were copied.
    """
    declared = {i.name: i for i in graph.inputs}
    missing = [name for name in declared if name not in inputs]
    unknown = [name for name in inputs if name not in declared]
    if missing or unknown:
        wrong = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
        raise TypeError(f"the epilogue takes ({', '.join(declared)}): {', '.join(wrong)}")
    found = {name: _check_input(i, inputs[name], a, b, frame) for name, i in declared.items()}
    vectors: list[tuple[Input, Any]] = [(i, found[i.name]) for i in graph.inputs if i.kind in _VECTORS]
    spread = tuple(i.name for i, x in vectors if not same(x.shape, inputs[i.name].shape))
    return found, spread, tuple(i.name for i, x in vectors if _is_copied(i.kind, x, inputs[i.name], frame))


def _is_copied(kind: Kind, found: Tensor, given: Tensor, frame: Frame) -> bool:
    if frame.form in (BATCHED, RAGGED_K):
        return batches.is_copied(kind, given, frame.each, frame.own(kind))
    of_groups = kind is Kind.ROW and found.ndim > 1
    return not of_groups and (repeats(given) or surely(found.numel() > given.numel()))


def _check_input(declared: Input, value: Any, a: Tensor, b: Tensor, frame: Frame) -> Tensor | float:
    name, kind = declared
    if kind is Kind.SCALAR:
        value = _scalar_tensor(name, value) if isinstance(value, Tensor) else value
        if not isinstance(value, Tensor):
            number = scalars.number(name, value)
            if a.dtype != torch.float64:
                scalars.require_fp32(name, number)
            return number
        if a.dtype == torch.float64:  # other kernels take it in FP32, to which it was rounded
            raise TypeError(
                f"{name} is a tensor on a GPU and a is {a.dtype}: pass a number, or make {name} a Row or a Col of the "
                "epilogue"
            )
    elif kind is Kind.INTEGER:
        value = _integer_tensor(name, value) if isinstance(value, Tensor) else value
        if not isinstance(value, Tensor):
            return scalars.integer(name, value)
    else:
        require_tensor(name, value)
    tensor: Tensor = value
    require_same_device(name, tensor, a)
    if kind in _VECTORS:
        element_type(name, tensor, (f64,) if a.dtype == torch.float64 else READ)
        of_batches = frame.form in (BATCHED, RAGGED_K)
        return _check_batched(declared, tensor, frame) if of_batches else _check_dense(declared, tensor, frame)
    if kind is Kind.PRODUCT:
        return _check_product(name, tensor, b, frame)
    return OPERANDS[kind].check_further(name, kind, tensor, frame) if kind in OPERANDS else tensor


def scalar(name: str, value: Any) -> Any:
    """Convert a scalar for a kernel: a float, or a 0-d FP32, FP16 or BF16 tensor on a GPU.

    Eager, warm and compiled calls accept a real number of Python or NumPy, or a tensor of one element of any real
    dtype. Values that only PyTorch's dispatcher can read are returned unchanged.
    """
    if type(value) is Tensor and value.is_cuda and value.dtype is torch.float32 and not value.requires_grad:
        # As in warm calls: the kernel checks the rest, and a call checks each tensor for a lazy negation.
        if value.ndim == 0:
            return value
        if value.numel() == 1 and not value.is_neg() and not watching.is_watched() and watching.is_memory(value):
            return value.squeeze()
    if isinstance(value, (torch.SymInt, torch.SymFloat)) or watching.is_special(value):
        return value
    if not isinstance(value, Tensor):
        return scalars.number(name, value)
    return value if watching.is_watched() else _scalar_tensor(name, value)


def _scalar_tensor(name: str, value: Tensor) -> Tensor | float:
    require_tensor(name, value)
    if value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{name} is {value.dtype}: a Scalar must be a real number")
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: a Scalar must have one element")
    value = as_stored(value)  # also for the host: below the dispatcher, item() is blind to a lazy negation
    # A number on the host needs no copy at launch.
    if value.device.type == "cpu":
        return float(value.item())
    one = value.reshape(())
    return one if is_read(one) else one.float()


def integer(name: str, value: Any) -> Any:
    """Return a 64-bit integer as kernels take it: an int, or an INT64 tensor without dimensions on a GPU.

    Values that only PyTorch's dispatcher can read are returned unchanged.
    """
    if isinstance(value, torch.SymInt) or watching.is_special(value):
        return value
    if not isinstance(value, Tensor):
        return scalars.integer(name, value)
    return value if watching.is_watched() else _integer_tensor(name, value)


def _integer_tensor(name: str, value: Tensor) -> Tensor | int:
    require_tensor(name, value)
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise TypeError(f"{name} is {value.dtype}: an Integer is a whole number")
    if value.numel() != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}: an Integer has one element")
    value = as_stored(value)
    return int(value.item()) if value.device.type == "cpu" else value.reshape(()).long()


def _check_product(name: str, value: Tensor, b: Tensor, frame: Frame) -> Tensor:
    if value.dtype != b.dtype:
        raise TypeError(f"{name} is {value.dtype} and b is {b.dtype}: a Product must have b's dtype")
    if tuple(value.shape) not in (tuple(b.shape), *([] if frame.form.operands else [tuple(b.shape[-2:])])):
        shapes = "(E, K, N)" if frame.form.operands else "(K, N)"
        wanted = tuple(b.shape) if frame.form.operands else tuple(b.shape[-2:])
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a Product it must have b's shape {shapes}, {wanted}"
            + (
                f". It looks like a weight of shape (N, K): pass {name}.t()"
                if tuple(value.shape) == wanted[::-1]
                else ""
            )
        )
    return value


def _check_dense(declared: Input, value: Tensor, frame: Frame) -> Tensor:
    """Return an input of one GEMM or of groups, whose rows follow each other."""
    (name, kind), n, batch = declared, frame.n, frame.leading
    if frame.form.operands and kind is Kind.ROW and value.ndim > 1:
        if tuple(value.shape) == (*frame.each, n):
            return _contiguous(name, value)
        if not surely(value.shape[0] == 1):  # one row for all, as PyTorch would broadcast it
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}: as a Row it must have shape {(*frame.each, n)}, a row for "
                f"each expert, or {(n,)} for all"
            )
    wanted: tuple[int, ...] = (n,)
    flat = wanted
    if kind is not Kind.ROW:
        m = math.prod(batch)
        wanted, flat = (batch, (m,)) if kind is Kind.COL else ((*batch, n), (m, n))
    value = _spread(kind, value, wanted, flat)
    if not same(value.shape, flat) and not agree(value.shape, wanted):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a {kind.name.capitalize()} it must have shape {wanted} for a "
            f"result of shape {(*batch, n)}"
        )
    folded = fold(name, value, flat)
    folded = folded if kind is Kind.TILE else _contiguous(name, folded)
    if not frame.form.operands or kind is Kind.ROW:
        return folded
    if kind is Kind.TILE and not has_lines_along(folded, 1):
        raise ValueError(
            f"{name} has strides {folded.stride()}, and groups are rows in memory: pass {name}.contiguous()"
        )
    return folded.view(*batch, *folded.shape[1:])  # as a has its rows


def _contiguous(name: str, vector: Tensor) -> Tensor:
    """Refuse a row or a column with gaps, or one for each batch or expert."""
    if vector.stride(-1) != 1 and not surely(vector.shape[-1] <= 1):
        raise ValueError(f"{name} has stride {vector.stride(-1)}: call {name}.contiguous() first")
    return vector


def _check_batched(declared: Input, value: Tensor, frame: Frame) -> Tensor:
    """Return an input that all batches share without the dimensions of batches, or one with all of them."""
    (name, kind), each, own = declared, frame.each, frame.own(declared.kind)
    if batches.is_ambiguous(kind, value, each, own):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, and with M = 1 it could be of two dimensions of the batches "
            f"{each}: pass it with all of them, as {(*(1,) * (len(each) - value.ndim + 1), *value.shape)}, or with an "
            f"extent of 1 after M, as {(*(1,) * (len(each) - value.ndim + 2), *value.shape)}"
        )
    found = batches.spread(kind, value, each, own)
    if found is None:
        is_broadcast = kind is Kind.ROW and value.ndim > 2 and value.shape[-2] == 1
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a {kind.name.capitalize()} it must have shape {own}, or "
            f"{(*each, *own)} for a result of shape {(*frame.leading, frame.n)}"
            + (". With a 1 before N it is what PyTorch would broadcast" if is_broadcast else "")
        )
    return found if kind is Kind.TILE else _contiguous(name, found)


def _spread(kind: Kind, value: Tensor, wanted: tuple[int, ...], flat: tuple[int, ...]) -> Tensor:
    """Return an input that PyTorch would broadcast in its full shape, and any other unchanged.

    PyTorch broadcasts a row with leading dimensions of 1, a column with a last one of 1, and a tile with any of 1. An
    input with a stride of 0 is copied.
    """
    shape = tuple(value.shape)
    if kind is Kind.ROW and value.ndim > 1 and shape[-1:] == wanted and value.numel() == wanted[0]:
        value = value.reshape(wanted)
    elif kind is Kind.COL and (same(shape, (*wanted, 1)) or same(shape, (*flat, 1))):
        value = value.squeeze(-1)
    elif kind is Kind.TILE:
        for full in (wanted, flat):
            if len(shape) == len(full) and batches.broadcast(shape, full) == full:
                value = value.expand(full)
                break
    return copied(value) if repeats(value) else value
