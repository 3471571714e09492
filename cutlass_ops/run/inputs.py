"""Checks of what an epilogue reads besides A @ B: numbers, vectors, tiles, further weights, scales of blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import READ, f64
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import BLOCKS, Input, Kind
from cutlass_ops.run import batches, scalars, watching
from cutlass_ops.run.sizes import agree, copied, repeats, same, surely
from cutlass_ops.run.tensors import as_stored, element_type, fold, is_read, require_same_device, require_tensor

# Inputs that may come in other shapes than a kernel takes.
VECTORS = (Kind.ROW, Kind.COL, Kind.TILE)


def own_shapes(m: int, n: int, k: int) -> dict[Kind, tuple[int, ...]]:
    """Return the shape of each kind of tensor for one GEMM."""
    return {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n), Kind.PRODUCT: (k, n)}


def check_inputs(
    graph: Graph,
    inputs: Mapping[str, Any],
    a: Tensor,
    b: Tensor,
    leading: tuple[int, ...],
    checked: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor | float]:
    """Check all inputs of an epilogue against A and B, whose leading dimensions are `leading`; return them by name.

    Those in `checked` are returned as they are there.

    Raises
    ------
    TypeError, ValueError
        If one is missing, unknown, or does not fit. The message names it.
    """
    declared = {i.name: i for i in graph.inputs}
    missing = [name for name in declared if name not in inputs]
    unknown = [name for name in inputs if name not in declared]
    if missing or unknown:
        wrong = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in unknown]
        raise TypeError(f"the epilogue takes ({', '.join(declared)}): {', '.join(wrong)}")
    known = checked or {}
    return {
        name: known[name] if name in known else _check_input(i, inputs[name], a, b, leading)
        for name, i in declared.items()
    }


def _check_input(declared: Input, value: Any, a: Tensor, b: Tensor, leading: tuple[int, ...]) -> Tensor | float:
    if declared.kind is Kind.SCALAR:
        found = _scalar_tensor(declared.name, value) if isinstance(value, Tensor) else value
        if isinstance(found, Tensor):
            _refuse_rounded(declared.name, a)
            require_same_device(declared.name, found, a)
            return found
        number = scalars.number(declared.name, found)
        if a.dtype != torch.float64:
            scalars.require_fp32(declared.name, number)
        return number
    if declared.kind is Kind.INTEGER:
        whole = _integer_tensor(declared.name, value) if isinstance(value, Tensor) else value
        if isinstance(whole, Tensor):
            require_same_device(declared.name, whole, a)
            return whole
        return scalars.integer(declared.name, whole)
    require_tensor(declared.name, value)
    if declared.kind in BLOCKS:
        return check_blocks(declared, value, a, b)
    if declared.kind is Kind.PRODUCT:
        return _check_product(declared.name, value, b)
    return _check_input_tensor(declared, value, a, leading, b.shape[-1], b_batches=b.ndim > 2)


def scalar(name: str, value: Any) -> Any:
    """Convert a scalar for a kernel: a float, or a 0-d FP32, FP16 or BF16 tensor on a GPU.

    Eager, warm and compiled calls accept a real number of Python or NumPy, or a tensor of one element of any real
    dtype. Values that only PyTorch's dispatcher can read are returned unchanged.

    Raises
    ------
    TypeError
        If the value is not a real number, or a bool or complex tensor.
    ValueError
        If it is beyond the range of a double, or a tensor of several elements.
    """
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
    # A number on the host needs no copy at launch.
    if value.device.type == "cpu":
        return float(value.item())
    one = value.reshape(())
    return one if is_read(one) else one.float()


def _refuse_rounded(name: str, a: Tensor) -> None:
    """Refuse a scalar on a GPU for FP64 operands: it was rounded to FP32, as kernels of other types take it."""
    if a.dtype == torch.float64:
        raise TypeError(
            f"{name} is a tensor on a GPU and a is {a.dtype}: pass a number, or make {name} a Row or a Col of the "
            "epilogue"
        )


def integer(name: str, value: Any) -> Any:
    """Return a whole number of 64 bits as kernels take it: an int, or an INT64 tensor without dimensions on a GPU.

    What only PyTorch's dispatcher can read is returned as it is.

    Raises
    ------
    TypeError
        If it is no int and no tensor of an integer dtype.
    ValueError
        If it has more bits, or is a tensor of several elements.
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
    return int(value.item()) if value.device.type == "cpu" else value.reshape(()).long()


def _check_product(name: str, value: Tensor, b: Tensor) -> Tensor:
    if value.dtype != b.dtype:
        raise TypeError(f"{name} is {value.dtype} and b is {b.dtype}: a Product must have b's dtype")
    k, n = b.shape[-2:]
    if tuple(value.shape) not in ((k, n), tuple(b.shape)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a Product it must have b's shape (K, N), {(k, n)}"
            + (f". It looks like a weight of shape (N, K): pass {name}.t()" if tuple(value.shape) == (n, k) else "")
        )
    require_same_device(name, value, b)
    return as_stored(value)


def check_blocks(declared: Input, value: Any, a: Tensor, b: Tensor) -> Tensor:
    """Return scales of blocks with any strides: in two dimensions, or with those of A and B if B has three.

    Raises
    ------
    TypeError, ValueError
        If they do not fit. The message names them.
    """
    name = declared.name
    require_tensor(name, value)
    if value.dtype != torch.float32:
        raise TypeError(f"{name} is {value.dtype}: scales of blocks are torch.float32, so pass {name}.float()")
    *each, k, n = b.shape
    batch, steps = tuple(a.shape[:-1]), mma.blocks(k)
    of_a, of_b = ("x", "w") if each else ("a", "b")
    if declared.kind is Kind.BLOCKS_A:
        shapes = [(*batch, steps), *([] if each else [(math.prod(batch), steps)])]
        what = f"{shapes[0]}, a scale for each 1x{mma.BLOCK_K} of {of_a}"
    else:
        shapes = [(*each, mma.blocks(n), steps), (*each, n, steps)]
        what = (
            f"{shapes[0]}, a scale for each {mma.BLOCK_K}x{mma.BLOCK_K} of {of_b}, or {shapes[1]}, one for each "
            f"{mma.BLOCK_K} of a column"
        )
    if tuple(value.shape) not in shapes:
        transposed = value.ndim > 1 and tuple(value.mT.shape) in shapes
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: with M={math.prod(batch)}, N={n} and K={k} it must have shape "
            + what
            + (f". It looks transposed: pass {name}.{'mT' if each else 't()'}" if transposed else "")
        )
    require_same_device(name, value, a)
    value = as_stored(value)
    return value if each or declared.kind is Kind.BLOCKS_B else fold(name, value, shapes[1])


def _check_input_tensor(
    declared: Input, value: Tensor, a: Tensor, batch: tuple[int, ...], n: int, *, b_batches: bool
) -> Tensor:
    name = declared.name
    element_type(name, value, (f64,) if a.dtype == torch.float64 else READ)
    if b_batches:
        return _check_batched_input(declared, value, a, batch, n)
    m = math.prod(batch)
    shapes = {Kind.ROW: (n,), Kind.COL: batch, Kind.TILE: (*batch, n)}
    flat = {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n)}[declared.kind]
    value = _spread(declared.kind, value, shapes[declared.kind], flat)
    if not same(value.shape, flat) and not agree(value.shape, shapes[declared.kind]):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a {declared.kind.name.capitalize()} it must have shape "
            f"{shapes[declared.kind]} for a result of shape {(*batch, n)}"
        )
    require_same_device(name, value, a)
    folded = fold(name, as_stored(value), flat)
    if folded.ndim == 1 and folded.stride(0) != 1 and not surely(folded.shape[0] <= 1):
        raise ValueError(f"{name} has stride {folded.stride(0)}: call {name}.contiguous() first")
    return folded


def _check_batched_input(declared: Input, value: Tensor, a: Tensor, leading: tuple[int, ...], n: int) -> Tensor:
    """Return an input that all batches share without their dimensions, or one with all of them."""
    name, (*shape, m) = declared.name, leading
    require_same_device(name, value, a)
    own = own_shapes(m, n, a.shape[-1])[declared.kind]
    if batches.is_ambiguous(declared.kind, value, tuple(shape), own):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, and with M = 1 it could be of two dimensions of the batches "
            f"{tuple(shape)}: pass it with all of them, as {(*(1,) * (len(shape) - value.ndim + 1), *value.shape)}, or "
            f"with an extent of 1 after M, as {(*(1,) * (len(shape) - value.ndim + 2), *value.shape)}"
        )
    found = batches.spread(declared.kind, as_stored(value), tuple(shape), own)
    if found is None:
        is_broadcast = declared.kind is Kind.ROW and value.ndim > 2 and value.shape[-2] == 1
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}: as a {declared.kind.name.capitalize()} it must have shape {own}, "
            f"or {(*shape, *own)} for a result of shape {(*leading, n)}"
            + (". With a 1 before N it is what PyTorch would broadcast" if is_broadcast else "")
        )
    if len(own) == 1 and found.stride(-1) != 1 and not surely(found.shape[-1] <= 1):
        raise ValueError(f"{name} has stride {found.stride(-1)}: call {name}.contiguous() first")
    return found


def _spread(kind: Kind, value: Tensor, wanted: tuple[int, ...], flat: tuple[int, ...]) -> Tensor:
    """Return an input that PyTorch would broadcast in its full shape, and any other as it is.

    That is a row with leading dimensions of 1, a column with a last one of 1, and a tile with any of 1. What has a
    stride of 0 is copied.
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
