"""A norm's vectors folded into the weight that follows it: diag(gamma) @ w, and what else has to be known of it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cutlass_ops import operands

# Columns of a weight that are looked at in FP64 at a time: a copy of a whole one would be large.
_COLUMNS = 256


def fold(w: Tensor, gamma: Tensor, name: str = "w") -> Tensor:
    """Return diag(gamma) @ w, each value rounded once to w's dtype, by one elementwise kernel.

    Parameters
    ----------
    w : Tensor
        (K, N), FP16 or BF16, either major, which the result has too; its lines begin at multiples of 16 bytes.
    gamma : Tensor
        (K,), FP16, BF16 or FP32.
    name : str
        What messages call w.

    Raises
    ------
    TypeError, ValueError
        If they do not fit.
    """
    _check(name, w, "gamma", gamma)
    return torch.mul(w, gamma[:, None], out=_empty_like(name, w))


def check_folded(w: Tensor, gamma: Tensor, folded: Tensor) -> None:
    """Refuse a folded weight that its dtype cannot hold. It waits for the device.

    Raises
    ------
    ValueError
        If values overflowed, or a column lost more than roundings because its values are too small.
    """
    limits = torch.finfo(w.dtype)

    def count(columns: slice) -> Tensor:
        exact, found = w[:, columns].double() * gamma.double()[:, None], folded[:, columns].double()
        overflown = (found.isinf() & exact.isfinite()).any(0)
        # Twice what rounding to nearest can lose of values that the dtype holds with all of their digits.
        lost = (found - exact).norm(dim=0) > limits.eps * exact.norm(dim=0)
        return torch.stack([overflown, lost & ~overflown])

    overflown, lost = _by_columns(w, count).sum(1).tolist()
    if overflown:
        raise ValueError(
            f"gamma times w is beyond the largest value of {w.dtype}, {limits.max:g}, in {overflown} of {w.shape[1]} "
            "columns: use BF16, or divide gamma by a number and multiply by it in the epilogue"
        )
    if lost:
        raise ValueError(
            f"gamma times w is too small for {w.dtype}, which has fewer digits below {limits.tiny:.1g}, in {lost} of "
            f"{w.shape[1]} columns: use BF16, or multiply gamma by a number and divide by it in the epilogue"
        )


def column_sums(matrix: Tensor) -> Tensor:
    """Return the sum of each column, (N,), added up in FP64 and rounded to FP32.

    Raises
    ------
    TypeError, ValueError
        If it is no matrix.
    """
    operands.require_tensor("w", matrix)
    if matrix.ndim != 2:
        raise ValueError(f"w has shape {tuple(matrix.shape)}: it must be (K, N)")
    return matrix.sum(0, dtype=torch.float64).float()


def row_times(name: str, row: Tensor, w: Tensor) -> Tensor:
    """Return row @ w, (N,), computed in FP64 and rounded to FP32, for a row (K,).

    Raises
    ------
    TypeError, ValueError
        If they do not fit.
    """
    _check("w", w, name, row)
    exact = row.double()
    return _by_columns(w, lambda columns: exact @ w[:, columns].double()).float()


def _by_columns(w: Tensor, function: Callable[[slice], Tensor]) -> Tensor:
    """Apply a function to some of w's columns at a time, and join what it returns along its last dimension."""
    starts = range(0, max(w.shape[1], 1), _COLUMNS)
    return torch.cat([function(slice(start, start + _COLUMNS)) for start in starts], dim=-1)


def _empty_like(name: str, w: Tensor) -> Tensor:
    operand = operands.matrix(name, w, operands.element_type(name, w)).operand
    rows, columns = w.shape if operand.major == "row" else w.shape[::-1]
    unit = operand.dtype.tma_alignment
    lines = w.new_empty(rows, -(-columns // unit) * unit)[:, :columns]
    return lines if operand.major == "row" else lines.t()


def _check(name: str, w: Tensor, vector_name: str, vector: Tensor) -> None:
    operands.require_tensor(name, w)
    operands.require_tensor(vector_name, vector)
    operands.element_type(name, w, ("f16", "bf16"))
    operands.element_type(vector_name, vector)
    if w.ndim != 2 or tuple(vector.shape) != (w.shape[0],):
        transposed = w.ndim == 2 and tuple(vector.shape) == (w.shape[1],)
        raise ValueError(
            f"{name} {tuple(w.shape)} and {vector_name} {tuple(vector.shape)}: they must be (K, N) and (K,) with the "
            f"same K" + (f". {name} looks like a weight of shape (N, K): pass {name}.t()" if transposed else "")
        )
    if vector.device != w.device:
        raise ValueError(f"{vector_name} is on {vector.device} and {name} is on {w.device}: move them to one device")
