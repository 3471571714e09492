"""Gated activations: two products of the same rows, one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cutlass_ops import builtin
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.errors import UnsupportedError
from cutlass_ops.norms import PreparedWeight, RowStatistic, rmsnorm_gemm
from cutlass_ops.ops import gemm


def gemm_swiglu(
    x: Tensor,
    w_gate: Tensor | PreparedWeight,
    w_up: Tensor | PreparedWeight,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute silu(x @ w_gate) * (x @ w_up), or the same of rmsnorm(x), in one kernel that reads x once.

    With `eps` or `rstd` an RMSNorm comes first, as in :func:`cutlass_ops.rmsnorm_gemm`. Another gate is one line: an
    epilogue with a ``Product``. Where no kernel takes both weights (on Hopper: operands that are not aligned to 16
    bytes), two GEMMs run, silu(x @ w_gate) first: that is slower by a tensor written and read, and rounds the gate to
    x's dtype.

    Parameters
    ----------
    x : Tensor
        (..., K), FP16 or BF16. Messages call it ``a``, w_gate ``b`` and w_up ``up``.
    w_gate, w_up : Tensor or PreparedWeight
        (K, N) each, of x's dtype and of one major; behind a norm both may be what :func:`cutlass_ops.prepare` made of
        them and gamma.
    gamma : Tensor, optional
        The norm's (K,), folded into both weights **at every call**; :func:`cutlass_ops.prepare` does it once.
    eps, rstd : optional
        The norm's, as for :func:`cutlass_ops.rmsnorm_gemm`; without either there is none.
    out : Tensor, optional
        Where to write the result.
    out_dtype : torch.dtype, optional
        The result's dtype; by default that of x.

    Returns
    -------
    Tensor
        (..., N).

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message says which, and what to do.
    UnsupportedError
        If no kernel serves the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If a kernel cannot be had.
    """
    normed = eps is not None or rstd is not None
    if not normed and (gamma is not None or isinstance(w_gate, PreparedWeight) or isinstance(w_up, PreparedWeight)):
        raise TypeError("gamma belongs to a norm, and there is none without eps or rstd: pass one of them")

    def run(w: Tensor | PreparedWeight, epilogue: Epilogue, **given: Any) -> Any:
        if normed:
            return rmsnorm_gemm(x, w, gamma, eps=eps, rstd=rstd, epilogue=epilogue, **given)
        return gemm(x, w, epilogue=epilogue, **given)  # type: ignore[arg-type]  # prepared weights were refused

    try:
        result: Tensor = run(w_gate, builtin.swiglu, up=w_up, out=out, out_dtype=out_dtype)
    except UnsupportedError:
        gate = run(w_gate, builtin.swiglu_gate)
        result = run(w_up, builtin.swiglu_up, gate=gate, out=out, out_dtype=out_dtype)
    return result
