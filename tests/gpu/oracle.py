"""What a result is measured against: float64, and the error that PyTorch makes itself in the operands' dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.operand import reference

# The named ops as PyTorch composes them, each step rounded to the operands' dtype.
EAGER: dict[str, Callable[..., Tensor]] = {
    "gemm": lambda a, b: a @ b,
    "gemm_bias": lambda a, b, bias: F.linear(a, b.t(), bias),
    "gemm_bias_relu": lambda a, b, bias: F.relu(F.linear(a, b.t(), bias)),
    "gemm_bias_gelu": lambda a, b, bias: F.gelu(F.linear(a, b.t(), bias)),
    "gemm_bias_silu": lambda a, b, bias: F.silu(F.linear(a, b.t(), bias)),
    "gemm_residual": lambda a, b, residual: a @ b + residual,
    "gemm_bias_residual": lambda a, b, bias, residual: F.linear(a, b.t(), bias) + residual,
    "gemm_bias_relu_residual": lambda a, b, bias, residual: F.relu(F.linear(a, b.t(), bias)) + residual,
}


def exact(graph: Graph, a: Tensor, b: Tensor, inputs: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Return every output in float64."""
    acc = a.double() @ b.double()
    return reference.evaluate(graph, acc, inputs, torch.float64, a=a)


def error(x: Tensor, wanted: Tensor) -> float:
    """Return the relative error in the Frobenius norm; NaN anywhere gives NaN."""
    scale = wanted.norm().item()
    return (x.double() - wanted).norm().item() / (scale or 1.0)


# What the Tensor Cores' sums may be off by, relative to the norm of a result. Of FP8: docs/fp8.md. Of TF32, also what
# operands halfway between two of its numbers are rounded to. Sums of INT8 are exact, but the epilogue is in FP32.
_SIXTEEN_BITS, _FP8 = 2e-5, 2.0**-9
SUMS = {"bf16": _SIXTEEN_BITS, "f16": _SIXTEEN_BITS, "e4m3": _FP8, "e5m2": _FP8}
SUMS |= {"tf32": 5e-5, "i8": 5e-5, "tf32x3": 2e-6, "f64": 1e-14}
# How much farther off than the norm allows on average may a single element be?
WORST = 8


def why_not(found: Tensor, wanted: Tensor, sums: float = _SIXTEEN_BITS, moved: Tensor | None = None) -> str | None:
    """Say why a result is not within its bound: one rounding to its dtype, and sums that are not exact.

    NaN and infinities must be where the exact result, rounded to the dtype, has them.

    Parameters
    ----------
    found : Tensor
        The result.
    wanted : Tensor
        The exact one in float64, of the same shape.
    sums : float
        What sums may be off by, relative to the norm of the result: see :data:`SUMS`. With 0, each element must be the
        exact one, rounded once.
    moved : Tensor, optional
        How far each element moves if its sum is off by that much, where sums may be much larger than results.

    Returns
    -------
    str or None
        None if it is within the bound.
    """
    if found.shape != wanted.shape:
        return f"the shape is {tuple(found.shape)} and not {tuple(wanted.shape)}"
    if not found.dtype.is_floating_point:
        return _why_not_whole(found, wanted)
    about = torch.finfo(found.dtype)
    x = found.double()
    # To FP8 by way of FP32, since not every version of PyTorch converts FP64 to it on a GPU.
    stored = reference.rounded(wanted if about.bits > 8 else wanted.float(), found.dtype).double()
    finite = stored.isfinite() & x.isfinite()
    # What rounds to the largest number or to infinity may do the other. FP8 has no infinities here: it saturates.
    near_the_end = (wanted.abs() / about.max - 1).abs() < (WORST * (about.eps + sums) if about.bits > 8 else 0.0)
    if moved is not None:  # a sum near 0 times a great scale
        near_the_end |= (wanted.abs() - moved.abs() <= about.max) & (wanted.abs() + moved.abs() >= about.max)
    alike = (x == stored) | (x.isnan() & stored.isnan()) | ((finite | near_the_end) & bool(sums))
    saturated = stored.where(wanted.abs() > about.max, wanted)
    difference, size = ((y.where(finite, 0.0)) for y in (x - saturated, saturated))
    slack = torch.zeros_like(size) if moved is None else moved.abs().where(finite, 0.0)
    parts = [each for y in (difference, size, slack) for each in (y.norm(), y.abs().amax() if y.numel() else y.sum())]
    wrong, *numbers = torch.stack([(~alike).sum().double(), *parts]).tolist()
    if wrong:
        what = "are NaN or infinite, or should be" if sums else "are not the exact ones"
        return f"{int(wrong)} of {found.numel()} elements {what}"
    off, worst, norm, largest, slack_norm, most_slack = numbers
    step = about.smallest_normal * about.eps  # below the normal numbers
    allowed = (about.eps + sums) * norm + slack_norm + step * found.numel() ** 0.5
    if not off <= allowed:
        return f"error {off:.3e}, allowed {allowed:.3e}, of {norm:.3e}"
    # A few wrong elements hardly move the norm: none may be far off.
    allowed = WORST * ((about.eps + sums) * largest + most_slack + step)
    if not worst <= allowed:
        return f"an element is off by {worst:.3e}, allowed {allowed:.3e}, of {largest:.3e}"
    return None


def _why_not_whole(found: Tensor, wanted: Tensor) -> str | None:
    """Say why integers are not the exact ones; those of INT8 may differ by 1 where the result lies between two."""
    off = (found.long() - reference.rounded(wanted, found.dtype).long()).abs()
    differ = int((off > 0).sum())
    allowed = 0 if found.dtype is torch.int32 else found.numel() // 1000 + 1
    if differ > allowed or bool((off > 1).any()):
        return f"{differ} of {found.numel()} integers are wrong, by up to {int(off.max())}"
    return None


def assert_within(found: Tensor, wanted: Tensor, sums: float = _SIXTEEN_BITS) -> None:
    """Require a result within its bound: see :func:`why_not`."""
    why = why_not(found, wanted, sums)
    assert why is None, why


def assert_close(x: Tensor, wanted: Tensor, eager: Tensor | None = None) -> None:
    """Require at most twice the error of PyTorch's own result; without one, the bound of :func:`why_not`.

    PyTorch's result may be exact by luck on tiny problems, so its error counts as at least a quarter of one rounding.
    """
    if eager is None:
        assert_within(x, wanted)
        return
    unit = torch.finfo(x.dtype).eps
    found, allowed = error(x, wanted), 2 * max(error(eager, wanted), unit / 4)
    assert found <= allowed, f"error {found:.3e}, allowed {allowed:.3e}"
    scale = max(wanted.abs().max().item(), 1e-30)
    worst = (x.double() - wanted).abs().max().item()
    assert worst <= max(WORST * unit, 1e-4) * scale, f"an element is off by {worst:.3e} of {scale:.3e}"
