"""Weights prepared once for kernels: a norm's vectors folded in, quantised to FP8, lines along K."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from cutlass_ops.base.dtypes import bf16, f16
from cutlass_ops.operand import watching
from cutlass_ops.operand.tensors import element_type, refuse_differentiated, require_tensor
from cutlass_ops.run import casting, folding, fp8
from cutlass_ops.run.values import OwnWeight, PreparedWeight, Scaled

# Types that kernels of wgmma read along K only. Of FP32 that is TF32.
_READ_ALONG_K = (*fp8.DTYPES, torch.int8, torch.float32)


def prepare(
    w: Tensor,
    gamma: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    norm: Literal["rms", "layer"] = "rms",
    dtype: torch.dtype | None = None,
) -> PreparedWeight:
    """Convert a weight once: fold in a norm's gamma and beta, quantise to FP8, or copy it to lines along K.

    With gamma and a 16-bit w, the result is diag(gamma) @ w, each value rounded once to w's dtype. It takes 2·K·N
    bytes; w itself is no longer needed. The call reads w three times, writes the result once, uses some tens of MiB of
    temporary memory and waits for the device.

    With `dtype`, w or diag(gamma) @ w is quantised, with one scale for each column: the column's largest absolute value
    becomes the type's largest. Each value is rounded once, so gamma can only be folded into a 16-bit weight.

    A w in FP8, INT8 or FP32 is copied to lines along K that begin at multiples of 16 bytes, since ``wgmma`` reads FP8,
    INT8 and TF32 only in this layout. INT8 and TF32 weights in other layouts may be copied at each call.

    For a LayerNorm, gamma and beta are folded, and the columns of the stored (rounded) weight are summed in FP64. This
    reads w once more for the sums, and once for beta. Without gamma and beta, w may also be FP8 or INT8.

    Parameters
    ----------
    w : Tensor
        (K, N), FP16, BF16, FP8, INT8 or FP32, either major: ``weight.t()`` of a linear layer.
    gamma, beta : Tensor, optional
        (K,), FP16, BF16 or FP32. Only for a 16-bit w; beta only for a LayerNorm.
    norm : {"rms", "layer"}
        The norm that the next call applies, of which gamma and beta are: RMSNorm or LayerNorm.
    dtype : torch.dtype, optional
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, for a 16-bit w. Not for a LayerNorm.

    Returns
    -------
    PreparedWeight
        Pass it as b to :func:`cutlass_ops.rmsnorm_gemm`, :func:`cutlass_ops.gemm_swiglu` or
        :func:`cutlass_ops.layernorm_gemm` instead of w, gamma and beta, or to :func:`cutlass_ops.gemm` and
        :func:`cutlass_ops.gemm_residual_rms`.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. Also if w's dtype cannot represent gamma · w: it overflows, or a column has values
        that are denormal (in FP16, below 6e-5) and loses more than one rounding. With `dtype`, if values are infinite
        or NaN.

    Examples
    --------
    >>> x = torch.tensor([[2.0, -2.0, 2.0, -2.0]]).bfloat16()
    >>> w, gamma = torch.eye(4).bfloat16(), torch.full((4,), 0.5).bfloat16()
    >>> prepared = co.prepare(w, gamma)  # once
    >>> co.rmsnorm_gemm(x, prepared, eps=0.0).tolist()
    [[0.5, -0.5, 0.5, -0.5]]

    In FP8, with the scale of each column:

    >>> prepared = co.prepare(torch.randn(64, 16).bfloat16(), dtype=torch.float8_e4m3fn)
    >>> prepared.matrix.dtype, prepared.matrix.stride(), prepared.scale.shape
    (torch.float8_e4m3fn, (1, 64), torch.Size([16]))

    In INT8, contiguous along K, with lines of a multiple of 16 bytes:

    >>> co.prepare(torch.ones(40, 16, dtype=torch.int8)).matrix.stride()
    (1, 48)

    For a LayerNorm:

    >>> x = torch.tensor([[3.0, 1.0, 3.0, 1.0]]).bfloat16()
    >>> prepared = co.prepare(w, gamma, torch.ones(4).bfloat16(), norm="layer")
    >>> co.layernorm_gemm(x, prepared, eps=0.0).tolist()
    [[1.5, 0.5, 1.5, 0.5]]
    """
    if norm not in ("rms", "layer"):
        raise ValueError(f"norm is {norm!r}: use 'rms' or 'layer'")
    if isinstance(w, Scaled):
        raise TypeError("w is a Scaled: pass w.values, and cutlass_ops.Scaled(prepared.matrix, w.scale) to the call")
    _require_plain(w=w, gamma=gamma, beta=beta)
    if norm == "layer":
        if dtype is not None:
            raise TypeError("dtype quantises w, and a LayerNorm's kernel takes no scales: leave out dtype")
        prepared = fold_layernorm(w, gamma, beta)
        if gamma is not None:
            folding.check_folded(w, gamma, prepared.matrix)
        return prepared
    if beta is not None:
        raise TypeError("beta is given, and an RMSNorm has none: leave it out, or pass norm='layer'")
    if w.dtype in _READ_ALONG_K:
        if gamma is not None or dtype not in (None, w.dtype):
            what = "gamma" if gamma is not None else "another dtype"
            again = "would round it again" if w.dtype in fp8.DTYPES else "is of weights of 16 bits"
            how = "" if dtype is None and w.dtype not in fp8.DTYPES else ", with dtype="
            raise TypeError(f"w is {w.dtype}, and {what} {again}: pass the weight in FP16 or BF16{how}")
        return PreparedWeight(folding.along_k(w))
    if dtype is not None:
        fp8.require_dtype("dtype", dtype)
        return PreparedWeight(*folding.quantize(w, gamma, dtype), gamma is not None)
    if gamma is None:
        element_type("w", w, (f16, bf16))  # an FP64 weight, say, has nothing to prepare
        raise TypeError(f"gamma is missing, and w is {w.dtype}: pass gamma, or dtype=torch.float8_e4m3fn to quantise w")
    folded = folding.fold(w, gamma)
    folding.check_folded(w, gamma, folded)
    return PreparedWeight(folded, folded=True)


def _require_plain(**given: Tensor | None) -> None:
    """Require a weight (K, N) and vectors that can be prepared: without gradients, and not under vmap.

    Raises TypeError, ValueError or NotImplementedError that says what to do.
    """
    for name, value in given.items():
        refuse_differentiated(name, value)
        if not torch.compiler.is_dynamo_compiling() and isinstance(value, Tensor) and watching.is_batched(value):
            raise NotImplementedError(
                f"{name} is a tensor of torch.vmap, and values are checked when a weight is prepared: prepare weights "
                "one by one, outside of it"
            )
    w = given["w"]
    require_tensor("w", w)
    if isinstance(w, Tensor) and w.ndim != 2:
        batches = ", so prepare weights of batches one by one" if w.ndim > 2 else ""
        raise ValueError(f"w has shape {tuple(w.shape)}: it must be (K, N){batches}")


def is_in_own_form(b: object) -> bool:
    """Whether a weight is packed or sparse, whose kernels have one product and no norm."""
    return isinstance(b, OwnWeight) and not isinstance(b, PreparedWeight)


def matrix_of(b: Tensor | Scaled | PreparedWeight, gamma: Tensor | None, name: str) -> tuple[Tensor, Any]:
    """Return b with gamma folded in, and its scale, if it has one.

    Raises TypeError or ValueError if gamma is given twice or does not fit.
    """
    if isinstance(b, PreparedWeight):
        if b.column_sum is not None:
            raise TypeError(f"{name} is prepared for a LayerNorm: pass prepare(w, gamma), or call layernorm_gemm")
        if gamma is not None:
            already = "already contains gamma: leave gamma out" if b.folded else "without gamma: pass gamma to prepare"
            raise TypeError(f"{name} is prepared {'and ' if b.folded else ''}{already}")
        return b.matrix, b.scale
    if is_in_own_form(b):
        raise TypeError(
            f"{name} is a {type(b).__name__}, whose kernels have one product and no norm: compute a norm first, and "
            "call gemm for each weight"
        )
    w, scale = b if isinstance(b, Scaled) else (b, None)
    if gamma is None:
        return w, scale
    if isinstance(w, Tensor) and (w.dtype in fp8.DTYPES or scale is not None):
        raise TypeError(
            f"{name} is {w.dtype}, and gamma would round it again: have gemm_residual_rms multiply a by gamma, or pass "
            "prepare(w, gamma, dtype=...) of the weight in 16 bits"
        )
    dtype = casting.autocast_dtype(w)
    return folding.fold(w if dtype is None else casting.autocast_to(dtype, w), gamma, name), scale


def require_alike(b: Any, other_name: str, other: Any, name: str = "b") -> None:
    """Raise TypeError if only one of two weights is prepared."""
    prepared = isinstance(b, PreparedWeight)
    if prepared != isinstance(other, PreparedWeight):
        which, left = (name, other_name) if prepared else (other_name, name)
        raise TypeError(f"{which} is prepared and {left} is not: pass prepare({left}, gamma), or two plain weights")


def fold_layernorm(w: Tensor, gamma: Tensor | None, beta: Tensor | None, name: str = "w") -> PreparedWeight:
    """Return w with a LayerNorm's gamma and beta folded in, without a check of what its dtype holds.

    Messages call w by its `name`.
    """
    w = casting.autocast_to(casting.autocast_dtype(w), w)
    matrix = w if gamma is None else folding.fold(w, gamma, name)
    shift = None if beta is None else folding.row_times("beta", beta, w, name)
    # Sum the rounded weight, so that its rounding errors are multiplied by x - mean(x) and not by x.
    folded = gamma is not None or beta is not None
    return PreparedWeight(matrix, None, folded, folding.column_sums(matrix, name), shift)
