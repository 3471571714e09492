"""What a result is measured against: float64, and the error that PyTorch makes itself in the operands' dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run import reference

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


def assert_close(x: Tensor, wanted: Tensor, eager: Tensor | None = None) -> None:
    """Require at most twice the error of PyTorch's own result.

    Without one, the bound is that of a single rounding to the dtype, with room for FP32 sums. PyTorch's result may be
    exact by luck on tiny problems, so its error counts as at least a quarter of one rounding.
    """
    unit = torch.finfo(x.dtype).eps
    found = error(x, wanted)
    allowed = 2 * max(error(eager, wanted), unit / 4) if eager is not None else max(unit, 2e-5)
    assert found <= allowed, f"error {found:.3e}, allowed {allowed:.3e}"
    # A few wrong elements hardly move the norm: none may be far off.
    scale = max(wanted.abs().max().item(), 1e-30)
    worst = (x.double() - wanted).abs().max().item()
    assert worst <= max(8 * unit, 1e-4) * scale, f"an element is off by {worst:.3e} of {scale:.3e}"
