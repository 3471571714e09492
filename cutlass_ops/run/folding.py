"""Folding a norm's vectors into the next weight: diag(gamma) @ w, its column sums, and beta @ w.

Under a tracer these are operators, so that they do not break the graph. They then check their arguments when the graph
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import READ, bf16, f16
from cutlass_ops.operand import matrices, reference, watching
from cutlass_ops.operand.tensors import element_type, require_tensor
from cutlass_ops.run import fp8

# Columns converted to FP64 at a time, to save memory.
_COLUMNS = 256

# The result's strides for arguments that were checked before, by what decides whether they fit. () where PyTorch's own
# product lies so, which needs no tensor to write to.
_Layout = tuple[Any, ...]
_KNOWN: dict[_Layout, tuple[int, ...]] = {}
_MOST_KNOWN = 4096
_PLAIN = (Tensor, Parameter)

# Programs do not depend on whether values fit.
_in_no_program = watching.in_no_program(
    "cutlass_ops.prepare checks the values of a weight: call it outside of the function that torch.compile traces, and "
    "pass the prepared weight"
)


def fold(w: Tensor, gamma: Tensor, name: str = "w") -> Tensor:
    """Return diag(gamma) @ w, each value rounded once to w's dtype, by one elementwise kernel.

    w is (K, N), FP16 or BF16, and gamma is (K,), FP16, BF16 or FP32. The result has w's major, and lines aligned to 16
    bytes. `name` is w's.
    """
    layout = _layout(w, gamma)
    if layout is not None and (strides := _KNOWN.get(layout)) is not None:
        # Called for each norm of a model: the checks would take several times as long as PyTorch's part.
        column = gamma.unsqueeze(1)
        return torch.mul(w, column, out=w.new_empty_strided(w.shape, strides)) if strides else torch.mul(w, column)
    if watching.goes_by_operator(**{name: w, "gamma": gamma}):
        return cast("Tensor", torch.ops.cutlass_ops.fold(w, gamma, name))
    if watching.is_differentiated(w, gamma):
        return fold_recorded(w, gamma, name)
    found = fold_checked(w, gamma, name)
    if layout is not None:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        _KNOWN[layout] = () if _lies_as_product(found, w, gamma) else found.stride()
    return found


def _layout(w: Tensor, gamma: Tensor) -> _Layout | None:
    """Return what decides whether arguments fit; None if more than that decides, or while PyTorch traces."""
    if torch.compiler.is_dynamo_compiling() or type(w) not in _PLAIN or type(gamma) not in _PLAIN:
        return None
    if (w.requires_grad or gamma.requires_grad) and watching.is_differentiated(w, gamma):
        return None
    if watching.is_watched() or forward_ad._current_level >= 0:
        return None
    if w.layout is not torch.strided or gamma.layout is not torch.strided:
        return None
    try:
        return w.shape, w.stride(), w.dtype, w.device, gamma.shape, gamma.stride(), gamma.dtype, gamma.device
    except RuntimeError:  # nested
        return None


def _lies_as_product(folded: Tensor, w: Tensor, gamma: Tensor) -> bool:
    """Whether a new product of such arguments has the dtype and the strides of a folded weight."""
    of_w, of_gamma = (torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (w, gamma))
    product = torch.mul(of_w, of_gamma.unsqueeze(1))
    return product.dtype == folded.dtype and product.stride() == folded.stride()


def fold_checked(w: Tensor, gamma: Tensor, name: str) -> Tensor:
    """Check the arguments of :func:`fold`, and compute its result."""
    _check(name, w, "gamma", gamma)
    matrices.Matrix(name, w, element_type(name, w)).layout()
    return torch.mul(w, gamma[:, None], out=_empty_like(w))


def fold_recorded(w: Tensor, gamma: Tensor, name: str) -> Tensor:
    """Compute :func:`fold_checked` by operations that autograd records."""
    _check(name, w, "gamma", gamma)
    return (w * gamma[:, None]).to(w.dtype)


def quantize(w: Tensor, gamma: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return w, or diag(gamma) @ w, in FP8 along K, and the scale of each column. Waits for the device.

    Parameters
    ----------
    w : Tensor
        (K, N), FP16 or BF16, either major.
    gamma : Tensor or None
        (K,), FP16, BF16 or FP32.
    dtype : torch.dtype
        A type of FP8.

    Returns
    -------
    tuple of Tensor
        (K, N) in FP8, and (N,) in FP32. Each value is rounded once: gamma · w is computed in FP64.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit, or values are infinite or NaN.
    """
    gamma = torch.ones(w.shape[:1], device=w.device) if gamma is None else gamma
    _check("w", w, "gamma", gamma)
    found = _along_k(w, dtype)
    rows, exact = gamma.double()[:, None], torch.float64

    def fill(columns: slice) -> Tensor:
        values = w[:, columns].to(exact) * rows
        amax = values.abs().amax(0) if len(w) else values.new_zeros(values.shape[1])
        scale = fp8.scale_of(amax, dtype)
        found[:, columns].copy_(reference.rounded(values / scale, dtype))
        return torch.stack([scale, (~amax.isfinite()).float()])

    scale, unknown = _by_columns(w, fill)
    _check_known(w, unknown)
    return found, scale.contiguous()


@_in_no_program
def _check_known(w: Tensor, unknown: Tensor) -> None:
    if watching.has_values(w) and (bad := int(unknown.sum().item())):
        raise ValueError(f"w or gamma is infinite or NaN in {bad} of {w.shape[1]} columns: FP8 has no scale for these")


def along_k(w: Tensor) -> Tensor:
    """Return a copy of a weight (K, N) whose lines lie along K and begin at multiples of 16 bytes."""
    return _along_k(w, w.dtype).copy_(w)


def _along_k(w: Tensor, dtype: torch.dtype) -> Tensor:
    k, n = w.shape
    unit = arch.TMA_ALIGNMENT_BYTES // dtype.itemsize
    return w.new_empty(n, -(-k // unit) * unit, dtype=dtype)[:, :k].t()


@_in_no_program
def check_folded(w: Tensor, gamma: Tensor, folded: Tensor) -> None:
    """Check that the dtype can hold a folded weight. Waits for the device."""
    if not watching.has_values(w):
        return
    limits = torch.finfo(w.dtype)

    def count(columns: slice) -> Tensor:
        exact, found = w[:, columns].double() * gamma.double()[:, None], folded[:, columns].double()
        overflown = (found.isinf() & exact.isfinite()).any(0)
        # Twice the largest rounding error of normal values.
        lost = (found - exact).norm(dim=0) > limits.eps * exact.norm(dim=0)
        return torch.stack([overflown, lost & ~overflown])

    overflown, lost = _by_columns(w, count).sum(1).tolist()
    wider = "" if w.dtype == torch.bfloat16 else "use BF16, or "
    if overflown:
        raise ValueError(
            f"gamma times w exceeds the largest value of {w.dtype}, {limits.max:g}, in {overflown} of {w.shape[1]} "
            f"columns: {wider}divide gamma by a number and multiply by it in the epilogue"
        )
    if lost:
        raise ValueError(
            f"gamma times w is too small for {w.dtype}, denormal below {limits.tiny:.1g}, in {lost} of {w.shape[1]} "
            f"columns: {wider}multiply gamma by a number and divide by it in the epilogue"
        )


def column_sums(matrix: Tensor, name: str = "w") -> Tensor:
    """Return the sum of each column of a matrix, (N,), added in FP64 and rounded to FP32."""
    if not isinstance(matrix, Tensor):
        require_tensor(name, matrix)
    if watching.goes_by_operator(**{name: matrix}):
        return cast("Tensor", torch.ops.cutlass_ops.column_sums(matrix))
    return column_sums_checked(matrix, name)


def column_sums_checked(matrix: Tensor, name: str = "w") -> Tensor:
    """Check the argument of :func:`column_sums`, and compute its result."""
    require_tensor(name, matrix)
    element_type(name, matrix)
    if matrix.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(matrix.shape)}: it must be (K, N)")
    return matrix.sum(0, dtype=torch.float64).float()


def row_times(name: str, row: Tensor, w: Tensor, name_w: str = "w") -> Tensor:
    """Return row @ w, (N,), for a row (K,), computed in FP64 and rounded to FP32."""
    if watching.goes_by_operator(**{name: row, name_w: w}):
        return cast("Tensor", torch.ops.cutlass_ops.row_times(name, row, w))
    return row_times_checked(name, row, w, name_w)


def row_times_checked(name: str, row: Tensor, w: Tensor, name_w: str = "w") -> Tensor:
    """Check the arguments of :func:`row_times`, and compute its result."""
    _check(name_w, w, name, row)
    exact = row.double()
    return _by_columns(w, lambda columns: exact @ w[:, columns].double()).float()


def _by_columns(w: Tensor, function: Callable[[slice], Tensor]) -> Tensor:
    """Apply a function to a few of w's columns at a time, and concatenate the results along the last dimension."""
    starts = range(0, max(w.shape[1], 1), _COLUMNS)
    return torch.cat([function(slice(start, start + _COLUMNS)) for start in starts], dim=-1)


def _empty_like(w: Tensor) -> Tensor:
    # Uses only shape and strides, which a compiler knows before there is a tensor.
    by_rows = matrices.has_lines_along(w, 1)
    lines, length = w.shape if by_rows else w.shape[::-1]
    unit = arch.TMA_ALIGNMENT_BYTES // w.element_size()
    found = w.new_empty(lines, -(-length // unit) * unit)[:, :length]
    return found if by_rows else found.t()


def _check(name: str, w: Tensor, vector_name: str, vector: Tensor) -> None:
    require_tensor(name, w)
    require_tensor(vector_name, vector)
    element_type(name, w, (f16, bf16))
    element_type(vector_name, vector, READ)
    if w.ndim != 2 or tuple(vector.shape) != (w.shape[0],):
        transposed = w.ndim == 2 and tuple(vector.shape) == (w.shape[1],)
        raise ValueError(
            f"{name} {tuple(w.shape)} and {vector_name} {tuple(vector.shape)}: they must be (K, N) and (K,) with the "
            f"same K" + (f". {name} looks like a weight of shape (N, K): pass {name}.t()" if transposed else "")
        )
    _require_one_device(name, w, vector_name, vector)


def _require_one_device(name: str, w: Tensor, vector_name: str, vector: Tensor) -> None:
    if vector.device != w.device:
        raise ValueError(f"{vector_name} is on {vector.device} and {name} is on {w.device}: move them to one device")


# ---- What the operators of run/operators.py return, without data ----------------------------------------------------
#
# Wrong shapes pass here, and are refused when the program runs: a compiler would wrap the error in its own.


def a_value_a_column(w: Tensor) -> Tensor:
    """Return the result of :func:`column_sums`."""
    return w.new_empty(w.shape[1:], dtype=torch.float32)


def folded_shape(w: Tensor, gamma: Tensor, name: str) -> Tensor:
    """Return the result of :func:`fold`."""
    _require_one_device(name, w, "gamma", gamma)
    return _empty_like(w) if w.ndim == 2 else w


def row_times_shape(name: str, row: Tensor, w: Tensor) -> Tensor:
    """Return the result of :func:`row_times`."""
    _require_one_device("w", w, name, row)
    return a_value_a_column(w)
