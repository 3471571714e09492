"""Layers of a network by ops and by PyTorch, for tests of gradients on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.epilogue import Row, Scalar, epilogue, functions


def rms(x: Tensor, gamma: Tensor | None = None) -> Tensor:
    """Return the norm of x's rows."""
    return F.rms_norm(x, x.shape[-1:], gamma, 1e-5)


def stream(x: Tensor, w: Tensor, residual: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """A residual stream, its statistic, and the GEMM after it."""
    y, rstd = co.gemm_residual_rms(x, w.t(), residual, eps=1e-5)
    return y, co.rmsnorm_gemm(y, following.t(), rstd=rstd)


def stream_in_pytorch(x: Tensor, w: Tensor, residual: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
    """The same in PyTorch."""
    y = x @ w.t() + residual
    return y, rms(y) @ following.t()


@epilogue
def activated(acc, bias: Row, scale: Scalar):  # type: ignore[no-untyped-def]
    """GELU, what it takes, and a reduction of that."""
    z = acc * scale + bias
    return {"d": functions.gelu(z), "pre": z, "logs": functions.logsumexp(z, dim=1)}


def several(x: Tensor, w: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Three outputs, each with a gradient."""
    return tuple(co.gemm(x, w.t(), epilogue=activated, bias=bias, scale=scale))


def several_in_pytorch(x: Tensor, w: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """The same in PyTorch."""
    z = x @ w.t() * scale + bias
    return F.gelu(z), z, torch.logsumexp(z, 1)


# An op, the same in PyTorch, and the shapes of what is differentiated.
LAYERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "gemm": (lambda x, w: co.gemm(x, w.t()), lambda x, w: x @ w.t(), [(7, 16), (8, 16)]),
    "batch": (lambda x, w: co.gemm(x, w.t()), lambda x, w: x @ w.t(), [(2, 7, 16), (8, 16)]),
    "relu": (
        lambda x, w, bias: co.gemm_bias_relu(x, w.t(), bias),
        lambda x, w, bias: torch.relu(x @ w.t() + bias),
        [(7, 16), (8, 16), (8,)],
    ),
    "gelu": (
        lambda x, w, bias: co.gemm_bias_gelu(x, w.t(), bias),
        lambda x, w, bias: F.gelu(x @ w.t() + bias),
        [(7, 16), (8, 16), (8,)],
    ),
    "broadcast": (
        lambda x, w, bias, residual: co.gemm_bias_residual(x, w.t(), bias, residual),
        lambda x, w, bias, residual: x @ w.t() + bias + residual,
        [(2, 7, 16), (8, 16), (1, 8), (1, 1, 8)],
    ),
    "several": (several, several_in_pytorch, [(7, 16), (8, 16), (8,), ()]),
    "swiglu": (
        lambda x, w, up: co.gemm_swiglu(x, w.t(), up.t()),
        lambda x, w, up: F.silu(x @ w.t()) * (x @ up.t()),
        [(7, 16), (8, 16), (8, 16)],
    ),
    "rmsnorm": (
        lambda x, w, gamma: co.rmsnorm_gemm(x, w.t(), gamma, eps=1e-5),
        lambda x, w, gamma: rms(x, gamma) @ w.t(),
        [(7, 16), (8, 16), (16,)],
    ),
    "layernorm": (
        lambda x, w, gamma, beta: co.layernorm_gemm(x, w.t(), gamma, beta, eps=1e-5),
        lambda x, w, gamma, beta: F.layer_norm(x, gamma.shape, gamma, beta, 1e-5) @ w.t(),
        [(7, 16), (8, 16), (16,), (16,)],
    ),
    "normed_swiglu": (
        lambda x, w, up, gamma: co.gemm_swiglu(x, w.t(), up.t(), gamma, eps=1e-5),
        lambda x, w, up, gamma: F.silu(rms(x, gamma) @ w.t()) * (rms(x, gamma) @ up.t()),
        [(7, 16), (8, 16), (8, 16), (16,)],
    ),
    "stream": (stream, stream_in_pytorch, [(7, 16), (8, 16), (7, 8), (4, 8)]),
}


def tuple_of(found: Any) -> tuple[Tensor, ...]:
    """Return a layer's results as a tuple."""
    return found if isinstance(found, tuple) else (found,)
