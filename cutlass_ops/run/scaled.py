"""Scaled operands: a GEMM of quantised matrices. The epilogue or the main loop applies their scales to FP32 sums."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import mma
from cutlass_ops.base.mma import Math
from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.run import fp8, sizes, traced, weights
from cutlass_ops.run.ops import Op, graph_op, op_of
from cutlass_ops.run.requests import prepared_by
from cutlass_ops.run.results import PreparedWeight

# Keyword arguments of functions with scales: no input of an epilogue may have these names.
_OWN = frozenset(("scale_a", "scale_b"))


def _prepare_scaled(
    a: Tensor,
    b: Tensor | PreparedWeight,
    scale_a: Tensor | float,
    scale_b: Tensor | float | None,
    epilogue: Epilogue | None,
) -> tuple[Op, tuple[Any, ...]]:
    matrix, scale_b = weights.matrix_of(b, None, "b"), scale_of_weight(b, a, scale_a, scale_b)
    if scale_b is None:
        raise TypeError("scale_b is missing, and b has no scales of its own: pass scale_b=, or 1.0 for no scale")
    rows, columns, blocks = scaling(scale_a, scale_b, _are_of_blocks(a, matrix, scale_a, scale_b))
    return scaled_op(rows, columns, epilogue, blocks), (a, matrix, scale_a, scale_b)


@prepared_by(_prepare_scaled)
def scaled_gemm(
    a: Tensor,
    b: Tensor | PreparedWeight,
    scale_a: Tensor | float,
    scale_b: Tensor | float | None = None,
    *,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute epilogue(scale_a * scale_b * (a @ b), inputs) in one kernel.

    Scales are factors: a represents the matrix a * scale_a. They are applied to the FP32 sums, before the epilogue and
    before D is rounded, once. They have no unit and may have any sign; 0, infinities and NaN behave as in FP32.

    Blocks along K may have their own scales. Products of 128 elements along K are then added up; each such sum is
    multiplied by both scales, and these are added up in FP32.

    Parameters
    ----------
    a : Tensor
        (..., M, K), FP8 (``torch.float8_e4m3fn`` or ``torch.float8_e5m2``), row-major; or INT8, FP16, BF16, FP64, or
        FP32 with `math`.
    b : Tensor or PreparedWeight
        (K, N), either type of FP8, column-major: ``weight.t()`` of a weight (N, K), or the result of
        :func:`cutlass_ops.prepare`. Of a's dtype if that is not FP8. Or (..., K, N), a GEMM for each batch, as in
        :func:`cutlass_ops.gemm`.
    scale_a : Tensor or float
        Scales of a, in FP32, FP16 or BF16: a number, a tensor of one element, or (..., M), one for each row. Or block
        scales in FP32 with any strides, if b has no batches: (..., M, ceil(K / 128)), one for each 1x128. Leading
        dimensions may be folded into M.
    scale_b : Tensor or float, optional
        Scales of b, in FP32, FP16 or BF16: a number, a tensor of one element, or (N,), one for each column, or (..., N)
        with batches. A weight that was prepared in FP8 has its own scales. If a has block scales, b needs block scales
        too, in FP32 with any strides: (ceil(N / 128), ceil(K / 128)), one for each 128x128, or (N, ceil(K / 128)), one
        for each 128 elements along a column.
    epilogue : Epilogue, optional
        Applied to the scaled product. It cannot have a ``Product``, which needs its own scales, or use means of a's
        rows.
    out : Tensor or mapping of str to Tensor, optional
        Where to write the outputs.
    out_dtype : torch.dtype, optional
        D's dtype. Default: BF16 for FP8 and INT8, otherwise that of a. FP8 and INT8 results saturate; their scale is an
        input of `epilogue`.
    math : {"tf32", "3xtf32", "fast", "promoted"}, optional
        How FP32 or FP8 operands are multiplied, as for :func:`cutlass_ops.gemm`.
    **inputs
        The epilogue's inputs by name.

    Returns
    -------
    Tensor or named tuple
        D (..., M, N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. For example: a or b in FP8 is not contiguous along K, its lines do not begin at
        multiples of 16 bytes, or a scale has another shape. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device. FP8 needs Hopper (compute capability 9.0).
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x, weight = torch.randn(4, 32), torch.randn(8, 32)
    >>> (a, scale_a), (b, scale_b) = (co.quantize(t, "e4m3", block=None) for t in (x, weight))
    >>> d = co.scaled_gemm(a, b.t(), scale_a, scale_b)
    >>> d.dtype, d.shape
    (torch.bfloat16, torch.Size([4, 8]))
    >>> bool((d - x @ weight.t()).norm() < 0.1 * d.norm())
    True
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row):
    ...     return co.e.relu(acc + bias)
    >>> co.scaled_gemm(a, b.t(), scale_a, 1.0, epilogue=biased, bias=torch.zeros(8)).shape
    torch.Size([4, 8])

    Block scales, 1x128 for a and 128x128 for b:

    >>> a, b = torch.randn(4, 256).to(torch.float8_e4m3fn), torch.randn(384, 256).to(torch.float8_e4m3fn)
    >>> co.scaled_gemm(a, b.t(), torch.rand(4, 2), torch.rand(3, 2)).shape
    torch.Size([4, 384])
    """
    op, arguments = _prepare_scaled(a, b, scale_a, scale_b, epilogue)
    if inputs:
        _refuse_of_pytorch(inputs, op.names)
    return op(*arguments, out=out, out_dtype=out_dtype, math=math, **inputs)


# Arguments of torch._scaled_mm, and what stands for them here.
_OF_PYTORCH = {
    "bias": "pass an epilogue= that returns acc + bias, of an input bias: co.Row",
    "scale_result": "pass an epilogue= that multiplies by its reciprocal, and out_dtype=torch.float8_e4m3fn",
    "use_fast_accum": "pass math='fast' or math='promoted'",
}


def _refuse_of_pytorch(inputs: dict[str, Any], names: Sequence[str]) -> None:
    for name, instead in _OF_PYTORCH.items():
        if name in inputs and name not in names:
            raise TypeError(f"{name} is unknown to scaled_gemm, unlike to torch._scaled_mm: {instead}")


def is_vector(scale: object) -> bool:
    """Whether a scale is one for each row or column. A tensor of one element is a number, as PyTorch has it."""
    return isinstance(scale, Tensor) and scale.ndim > 0 and not sizes.has_one_element(scale)


def scale_of_weight(
    w: Tensor | PreparedWeight, a: Any, scale_a: Any, given: Tensor | float | None
) -> Tensor | float | None:
    """Return scale_b: the given one, or a prepared weight's. Of that, each block of a column has the column's.

    Raises
    ------
    TypeError
        If there are two.
    """
    found = weights.weight_scale(w, given, "scale_b")
    if given is None and isinstance(w, PreparedWeight) and isinstance(found, Tensor) and has_blocks(a, scale_a):
        k, n = w.matrix.shape
        return found[:, None].expand(n, mma.blocks(k))
    return found


def scaling(scale_a: object, scale_b: object, blocks: bool) -> tuple[bool, bool, bool]:
    """Return whether scales are those of rows, of columns, and of blocks."""
    return not blocks and is_vector(scale_a), not blocks and is_vector(scale_b), blocks


def scales_of(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Epilogue | None:
    """Return the epilogue of two scales, which come in this order; None if there is none.

    Raises
    ------
    TypeError, ValueError
        If one of them is missing, or blocks of one operand alone have scales.
    """
    if scale_a is None and scale_b is None:
        return None
    if scale_a is None or scale_b is None:
        given, missing = ("scale_b", "scale_a") if scale_a is None else ("scale_a", "scale_b")
        raise TypeError(f"{missing} is missing, and {given} is given: pass {missing}=, or 1.0 if there is no scale")
    if _are_of_blocks(a, b, scale_a, scale_b):
        return composed.scaled_blocks
    return composed.SCALED[is_vector(scale_a), is_vector(scale_b)]


def _are_of_blocks(a: Any, b: Any, scale_a: Any, scale_b: Any) -> bool:
    """Whether the scales are those of blocks: one of the two has a shape that no scales of rows or columns have.

    (..., M, 1) are scales of rows, and (1, N) of columns, as PyTorch has them. With batches, scales of blocks are those
    that have all dimensions of an operand; a call with them is refused later.

    Raises
    ------
    ValueError
        If blocks of one operand have scales and blocks of the other have none.
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
    # FP8 of one block has one scale as well, and beside it those of rows may have any strides.
    is_fp8 = a.dtype in fp8.DTYPES and b.dtype in fp8.DTYPES
    of_one = is_fp8 and fits_b and steps == mma.blocks(n) == 1 and isinstance(scale_a, Tensor) and scale_a.ndim > 1
    of_a, of_b = has_blocks(a, scale_a), fits_b and (is_vector(scale_b) or of_one) and tuple(scale_b.shape) != (1, n)
    if of_a and len(batch) == 1 and sizes.same(scale_a.shape, (1, *batch)):
        raise ValueError(
            f"scale_a has shape {(1, *batch)}: scales of rows are {batch} or {(*batch, 1)}, so pass scale_a.t()"
        )
    if of_a and not fits_b:
        raise ValueError(
            f"scale_a has shape {tuple(scale_a.shape)}, as scales of blocks do, and scale_b has none for blocks of b: "
            f"pass ({mma.blocks(n)}, {steps}) or ({n}, {steps}) as well. The same scale along K is "
            + same_along_k("scale_b", scale_b, (n, steps), "b")
        )
    if of_b and not of_a and steps > 1 and tuple(scale_b.shape) == (n, 1):
        raise ValueError(f"scale_b has shape {(n, 1)}: scales of columns are {(n,)} or {(1, n)}, so pass scale_b.t()")
    if of_b and not _fits_blocks(a, scale_a):
        raise ValueError(
            f"scale_b has shape {tuple(scale_b.shape)}, as scales of blocks do, and scale_a has none for blocks of a: "
            f"pass {(*batch, steps)} as well. The same scale along K is "
            + same_along_k("scale_a", scale_a, (*batch, steps), "a")
        )
    # Of extents that a program leaves open, the answers above are no bools, and `scaled_op` remembers by these.
    if of_a or of_b:  # noqa: SIM103
        return True
    return False


def _fits_blocks(a: Tensor, scale: Any) -> bool:
    """Whether a scale has as many dimensions as those of blocks of a have, or as those of a in two dimensions."""
    if not isinstance(scale, Tensor):
        return False
    batch, shape = tuple(a.shape[:-1]), tuple(scale.shape)
    if len(shape) == 2 and shape == batch and shape[1] != 1:
        return False  # a scale for each row of a batch
    return len(shape) == a.ndim or (len(shape) == 2 and shape[0] == prod(batch))


def has_blocks(a: Any, scale: Any) -> bool:
    """Whether each row of a has several scales along K."""
    return isinstance(a, Tensor) and a.ndim > 1 and _fits_blocks(a, scale) and scale.shape[-1] != 1


def same_along_k(name: str, scale: object, shape: tuple[int, ...], operand: str) -> str:
    """Return how a user writes scales of blocks of an operand that are the same along K, for messages."""
    if not isinstance(scale, Tensor):
        return f"torch.full({shape}, {name}, device={operand}.device)"
    return f"{name}{'[..., None]' if is_vector(scale) else ''}.expand{shape}, which takes no copy"


@traced.remembered
def scaled_op(rows: bool = False, columns: bool = False, epilogue: Epilogue | None = None, blocks: bool = False) -> Op:
    """Return the op behind :func:`scaled_gemm`, for ``tune`` and ``plan``. It takes (a, b, scale_a, scale_b, *inputs).

    Parameters
    ----------
    rows, columns : bool
        Whether each row of A, and each column of B, has a scale of its own.
    epilogue : Epilogue, optional
        What follows.
    blocks : bool
        Whether blocks of A and of B have scales instead.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue or cannot follow.
    """
    gathered = () if epilogue is None else op_of(epilogue).graph.gathered
    if epilogue is not None and gathered:
        raise ValueError(
            f"{epilogue.name} takes {', '.join(gathered)}, which would be means of a without its scales: write all "
            "scales into the epilogue, and call gemm"
        )
    found = followed("gemm", rows, columns, blocks, epilogue)
    return graph_op("scaled_gemm", found.graph, found.doc)


@functools.lru_cache(maxsize=1024)
def followed(function: str, rows: bool, columns: bool, blocks: bool, epilogue: Epilogue | None) -> Epilogue:
    """Return the epilogue of scales, before the one that follows if there is any.

    Parameters
    ----------
    function : str
        What computes the same without scales.
    rows, columns, blocks : bool
        What has scales: see :func:`scaled_op`.
    epilogue : Epilogue, optional
        What follows.

    Raises
    ------
    TypeError, ValueError
        If `epilogue` is not an epilogue, or cannot follow.
    """
    scaled = composed.scaled_blocks if blocks else composed.SCALED[rows, columns]
    if epilogue is None:
        return scaled
    after = op_of(epilogue).graph
    taken = sorted(_OWN & {i.name for i in after.inputs})
    if taken:
        raise ValueError(
            f"{epilogue.name} has an input {', '.join(taken)}, and so has scaled_{function}: rename the input"
        )
    if after.products:
        raise ValueError(
            f"{epilogue.name} has the product {after.products[0]}, which has scales of its own: write all scales into "
            f"the epilogue, and call {function}"
        )
    return Epilogue.of(
        f"scaled_{function}", f"{scaled.doc} Then {epilogue.name}: {epilogue.doc}", scaled.graph.then(after)
    )
