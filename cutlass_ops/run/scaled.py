"""Scales of operands: which of rows, columns or blocks a call has, and the epilogue that applies them."""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import mma
from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.operand import sizes
from cutlass_ops.operand.tensors import refuse_shapeless
from cutlass_ops.run import fp8
from cutlass_ops.run.ops import PLAIN
from cutlass_ops.run.values import OwnWeight, Scaled

# Names of scales: no input of an epilogue that follows them may have these.
_OWN = frozenset(("scale_a", "scale_b"))
# Whether each row of A, and each column of B, has a scale, or whether blocks have scales instead.
Scales = tuple[bool, bool, bool]


def require_both(scale_a: Any, scale_b: Any, a: Any, b: Any) -> None:
    """Raise TypeError if only one of a call's operands has a scale, or if what has one is no tensor."""
    for name, matrix, scale in (("a", a, scale_a), ("b", b, scale_b)):
        kind = type(matrix).__name__
        if isinstance(matrix, (Scaled, OwnWeight)) and scale is not None:
            raise TypeError(f"the values of {name} are a {kind}, which has scales of its own: pass it as {name} itself")
        if scale is not None and isinstance(scale, torch.fx.Proxy):
            raise TypeError(
                f"{name}'s scale is a value of torch.fx.symbolic_trace, which knows no shapes, and the shape says what "
                "it applies to: use torch.export or make_fx, or pass a number or tensor that is known"
            )
        if isinstance(matrix, (tuple, OwnWeight)):
            raise TypeError(f"{name} must be a tensor or a cutlass_ops.Scaled, not {kind}")
    if (scale_a is None) != (scale_b is None):
        scaled, other = ("b", "a") if scale_a is None else ("a", "b")
        raise TypeError(
            f"scale_{other} is missing: {scaled} has a scale, and {other} has none: pass cutlass_ops.Scaled({other}, "
            f"scale_{other}), or cutlass_ops.Scaled({other}, 1.0) if it has no scale"
        )


def is_vector(scale: object) -> bool:
    """Whether a scale is one for each row or column. As in PyTorch, a tensor of one element is a number."""
    return isinstance(scale, Tensor) and scale.ndim > 0 and not sizes.has_one_element(scale)


def of_prepared(a: Any, scale_a: Any, b: Any, scale: Any) -> Any:
    """Return a prepared weight's scale of each column, repeated for each block if a has scales of blocks."""
    if isinstance(scale, Tensor) and has_blocks(a, scale_a):
        k, n = b.shape
        return scale[:, None].expand(n, mma.blocks(k))
    return scale


def is_one(scale: object) -> bool:
    """Whether a scale is a tensor of one element that has dimensions, outside of programs."""
    if torch.compiler.is_dynamo_compiling() or type(scale) is not Tensor:
        return False
    return scale.ndim > 0 and sizes.has_one_element(scale)


def of_one(a: Any, scale_a: Any, b: Any, scale: Any) -> Any:
    """Return a scale of one element without dimensions."""
    return scale.squeeze()


def of_row(a: Any, scale_a: Any, b: Any, scale: Any) -> Any:
    """Return scales (1, N) of columns as (N,), as kernels read them."""
    return scale[0]


def of_columns(a: Any, scale_a: Any, b: Any, scale: Any) -> Any:
    """Return scales of columns of b (E, K, N) in the shape of a Row: (N,), or (E, N). Others are returned unchanged.

    Raises ValueError for shape (E,): only the caller knows whether it is one for each group or for each column.
    """
    if not (isinstance(scale, Tensor) and isinstance(b, Tensor) and b.ndim == 3 and is_vector(scale)):
        return scale
    (count, _, n), shape = b.shape, tuple(scale.shape)
    if shape == (count,):
        both = f", or scale_b[None] for one for each of {n} columns" if n == count else ""
        raise ValueError(
            f"scale_b has shape {shape}, and b has {count} groups: pass scale_b[:, None].repeat(1, {n}) for a scale "
            f"for each group{both}"
        )
    if shape == (1, n):
        return scale.squeeze(0)
    return scale.squeeze(1) if shape == (count, 1, n) else scale


def scales_of(a: Any, b: Any, scale_a: Any, scale_b: Any, *, groups: bool = False) -> Scales:
    """Return which scales a call has. Raises ValueError if only one operand has scales of blocks."""
    refuse_shapeless(a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    blocks = (_groups_have_blocks if groups else _have_blocks)(a, b, scale_a, scale_b)
    if blocks:
        return False, False, True
    of_columns = is_vector(scale_b)
    # A single row's scale beside those of columns is a row's: the kernels of other numbers of rows serve it.
    return is_vector(scale_a) or (of_columns and _is_of_one_row(a, scale_a)), of_columns, False


def _is_of_one_row(a: Any, scale: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(scale, Tensor) and scale.ndim > 0 and sizes.has_one_element(scale)):
        return False
    return all(extent == 1 for extent in a.shape[:-1])


def _have_blocks(a: Any, b: Any, scale_a: Any, scale_b: Any) -> bool:
    """Whether the scales are those of blocks: one of the two has a shape that no scales of rows or columns have.

    As in PyTorch, (..., M, 1) are scales of rows, and (1, N) of columns. With batches, scales of blocks have all
    dimensions of an operand; a call with them is refused later.
    """
    if not any(isinstance(scale, Tensor) and scale.ndim > 1 and is_vector(scale) for scale in (scale_a, scale_b)):
        return False
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim > 1 and b.ndim > 1):
        return False  # refused later
    if b.ndim > 2:
        rank = max(a.ndim, b.ndim)
        pairs = ((scale_a, -1), (scale_b, -2))
        return any(is_vector(x) and x.ndim == rank and x.shape[dim] != 1 for x, dim in pairs)
    (k, n), batch = b.shape, tuple(a.shape[:-1])
    fits_b = isinstance(scale_b, Tensor) and scale_b.ndim == 2
    steps = mma.blocks(k)
    # FP8 of one block has one scale, too. With it, scales of rows may have any strides.
    is_fp8 = a.dtype in fp8.DTYPES and b.dtype in fp8.DTYPES
    of_one = is_fp8 and fits_b and steps == mma.blocks(n) == 1 and isinstance(scale_a, Tensor) and scale_a.ndim > 1
    of_a, of_b = has_blocks(a, scale_a), fits_b and (is_vector(scale_b) or of_one) and tuple(scale_b.shape) != (1, n)
    if of_a and len(batch) == 1 and sizes.same(scale_a.shape, (1, *batch)):
        raise ValueError(
            f"scale_a has shape {(1, *batch)}: scales of rows are {batch} or {(*batch, 1)}, so pass scale_a.t()"
        )
    if of_b and not of_a and steps > 1 and tuple(scale_b.shape) == (n, 1):
        raise ValueError(f"scale_b has shape {(n, 1)}: scales of columns are {(n,)} or {(1, n)}, so pass scale_b.t()")
    _require_blocks_of_both(
        of_a, of_b, fits_a=_fits_blocks(a, scale_a), fits_b=fits_b, scales=(scale_a, scale_b),
        of_rows=((*batch, steps),), of_columns=((mma.blocks(n), steps), (n, steps)),
    )  # fmt: skip
    # For extents that a program leaves open, the answers above are no bools, and they are keys of a cache.
    return True if of_a or of_b else False  # noqa: SIM210


def _groups_have_blocks(a: Any, b: Any, scale_a: Any, scale_b: Any) -> bool:
    """Whether the scales are those of blocks: of a with its dimensions, of b with its three.

    As in PyTorch, (T, 1) and (E, 1, N) may be scales of rows and of columns: the other operand's scales then decide.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and b.ndim == 3):
        return False  # refused later
    fits_a = isinstance(scale_a, Tensor) and scale_a.ndim == a.ndim
    fits_b = isinstance(scale_b, Tensor) and scale_b.ndim == 3
    count, k, n = b.shape
    steps = mma.blocks(k)
    of_a = fits_a and scale_a.shape[-1] != 1
    of_b = fits_b and is_vector(scale_b) and tuple(scale_b.shape) != (count, 1, n)
    if of_b and not of_a and steps > 1 and tuple(scale_b.shape) == (count, n, 1):
        raise ValueError(
            f"scale_b has shape {(count, n, 1)}: scales of columns are {(count, n)} or {(count, 1, n)}, so pass "
            "scale_b.mT"
        )
    _require_blocks_of_both(
        of_a, of_b, fits_a=fits_a, fits_b=fits_b, scales=(scale_a, scale_b),
        of_rows=((*a.shape[:-1], steps),), of_columns=((count, mma.blocks(n), steps), (count, n, steps)),
    )  # fmt: skip
    return True if of_a or of_b else False  # noqa: SIM210


def _require_blocks_of_both(
    of_a: bool, of_b: bool, *, fits_a: bool, fits_b: bool, scales: tuple[Any, Any], of_rows: Any, of_columns: Any
) -> None:
    """Raise ValueError if only one operand has scales of blocks: the last shape of each list has one for each line."""
    for own, fits, name, other, wanted in (
        (of_a, fits_b, "scale_a", "b", of_columns),
        (of_b, fits_a, "scale_b", "a", of_rows),
    ):
        if own and not fits:
            has, lacks = scales if other == "b" else scales[::-1]
            raise ValueError(
                f"{name} has shape {tuple(has.shape)}, as scales of blocks do, and scale_{other} has none for blocks "
                f"of {other}: pass {' or '.join(map(str, wanted))} as well. The same scale along K is "
                + _same_along_k(f"scale_{other}", lacks, wanted[-1], other)
            )


def _same_along_k(name: str, scale: object, shape: tuple[int, ...], operand: str) -> str:
    """Return how a user writes scales of blocks of an operand that are the same along K, for messages."""
    if not isinstance(scale, Tensor):
        return f"torch.full({shape}, {name}, device={operand}.device)"
    return f"{name}{'[..., None]' if is_vector(scale) else ''}.expand{shape}, which takes no copy"


def _fits_blocks(a: Tensor, scale: Any) -> bool:
    """Whether a scale has as many dimensions as scales of a's blocks have, or as a has if folded to two dimensions."""
    if not isinstance(scale, Tensor):
        return False
    batch, shape = tuple(a.shape[:-1]), tuple(scale.shape)
    if len(shape) == 2 and shape == batch and shape[1] != 1:
        return False  # a scale for each row of a batch
    return len(shape) == a.ndim or (len(shape) == 2 and shape[0] == prod(batch))


def has_blocks(a: Any, scale: Any) -> bool:
    """Whether each row of a has several scales along K."""
    return isinstance(a, Tensor) and a.ndim > 1 and _fits_blocks(a, scale) and scale.shape[-1] != 1


def scaling(scales: Scales | Epilogue) -> Epilogue:
    """Return the epilogue of two scales, which come in this order."""
    if isinstance(scales, Epilogue):
        return scales
    rows, columns, blocks = scales
    return composed.scaled_blocks if blocks else composed.SCALED[rows, columns]


@functools.lru_cache(maxsize=1024)
def after(before: Epilogue, scales: Scales) -> Epilogue:
    """Return the epilogue of two scales after another one, which takes what a weight in a form of its own needs."""
    scaled = scaling(scales)
    return Epilogue(before.name, f"{before.doc} Then scales.", before.graph.then(scaled.graph))


@functools.lru_cache(maxsize=1024)
def followed(scales: Scales | Epilogue, epilogue: Epilogue) -> Epilogue:
    """Return the epilogue of scales, with another one after it. Raises ValueError if that cannot follow."""
    scaled, name, graph = scaling(scales), epilogue.name, epilogue.graph
    if epilogue == PLAIN.epilogue:
        return scaled
    if graph.gathered:
        raise ValueError(
            f"{name} takes {', '.join(graph.gathered)}, which would be means of a without its scales: write all scales "
            "into the epilogue, and pass the values alone"
        )
    taken = sorted(_OWN & {i.name for i in graph.inputs})
    if taken:
        raise ValueError(f"{name} has an input {', '.join(taken)}, as scaled operands have: rename the input")
    if graph.products and isinstance(scales, Epilogue):
        raise ValueError(
            f"{name} has the product {graph.products[0]}, and b is {scales.name}, whose kernels have one product: call "
            "gemm for each weight, the second time with an epilogue that takes the first result as a Tile; gemm_swiglu "
            "does that"
        )
    if graph.products:
        raise ValueError(
            f"{name} has the product {graph.products[0]}, which has scales of its own: write all scales into the "
            "epilogue, and pass the values alone"
        )
    return Epilogue(name, f"{scaled.doc} Then {name}: {epilogue.doc}", scaled.graph.then(graph))
