"""Gated activations: two products of the same rows, one kernel."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue, builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run import norms, traced
from cutlass_ops.run.norms import PreparedWeight, RowStatistic
from cutlass_ops.run.ops import Instead, Op, graph_op, prepared_by


def _prepare_swiglu(
    x: Tensor,
    w_gate: Tensor | PreparedWeight,
    w_up: Tensor | PreparedWeight,
    gamma: Tensor | None,
    eps: float | None,
    rstd: RowStatistic | Tensor | None,
) -> tuple[Op, tuple[Any, ...]]:
    normed = eps is not None or rstd is not None
    if not normed and (gamma is not None or isinstance(w_gate, PreparedWeight) or isinstance(w_up, PreparedWeight)):
        raise TypeError("gamma, or a prepared weight, needs a norm: pass eps= or rstd=")
    if not normed:
        return swiglu_op(None), (x, w_gate, w_up)
    norm, values = norms.rms_values(x, eps, rstd)
    norms.require_alike(w_gate, "up", w_up)
    gate, up = norms.matrix_of(w_gate, gamma, "w"), norms.matrix_of(w_up, gamma, "up")
    return swiglu_op(norm), (x, gate, *values, up)


@prepared_by(_prepare_swiglu)
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

    With `eps` or `rstd`, an RMSNorm comes first, as in :func:`cutlass_ops.rmsnorm_gemm`. For another gate, write an
    epilogue with a ``Product``. Two GEMMs run instead, silu(x @ w_gate) first, if the weights are contiguous along N,
    if lines of the result are not aligned to 16 bytes, or before Hopper. They write and read one more tensor and round
    the gate to x's dtype.

    Parameters
    ----------
    x : Tensor
        (..., K), FP16 or BF16. Messages call it ``a``, w_gate ``b`` and w_up ``up``.
    w_gate, w_up : Tensor or PreparedWeight
        (K, N) each, of x's dtype and one major. With a norm, both may be results of :func:`cutlass_ops.prepare`.
    gamma : Tensor, optional
        The norm's (K,). **Every call** folds it into both weights; :func:`cutlass_ops.prepare` folds once.
    eps, rstd : optional
        As for :func:`cutlass_ops.rmsnorm_gemm`. Without both there is no norm.
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
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If a kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x = torch.ones(1, 8).bfloat16()
    >>> w_gate, w_up = torch.randn(4, 8).bfloat16().t(), torch.randn(4, 8).bfloat16().t()
    >>> co.gemm_swiglu(x, w_gate, w_up).shape
    torch.Size([1, 4])

    With an RMSNorm, fold gamma into both weights once:

    >>> gamma = torch.ones(8).bfloat16()
    >>> co.gemm_swiglu(x, co.prepare(w_gate, gamma), co.prepare(w_up, gamma), eps=1e-6).shape
    torch.Size([1, 4])
    """
    op, arguments = _prepare_swiglu(x, w_gate, w_up, gamma, eps, rstd)
    return cast("Tensor", op(*arguments, out=out, out_dtype=out_dtype))


@traced.remembered
def swiglu_op(norm: Epilogue | None) -> Op:
    """Return the op behind :func:`gemm_swiglu`, which takes (a, b, *the norm's inputs, up)."""

    def behind(epilogue: Epilogue) -> Graph:
        return epilogue.graph if norm is None else norm.graph.then(epilogue.graph, products=True)

    gate_op, up_op = (graph_op("gemm_swiglu", behind(e)) for e in (builtin.swiglu_gate, builtin.swiglu_up))

    def two_gemms(call: Any, a: Tensor, b: Tensor, *inputs: Any, out: Any, out_dtype: torch.dtype | None) -> Any:
        *values, up = inputs
        return call(up_op, a, up, *values, call(gate_op, a, b, *values), out=out, out_dtype=out_dtype)

    instead = Instead("no kernel takes both weights, so each has a GEMM of its own", two_gemms)
    made_by = "gemm_swiglu", None if norm is None else norm.graph.to_json()
    return graph_op("gemm_swiglu", behind(builtin.swiglu), builtin.swiglu.doc, instead, made_by)


@traced.maker("gemm_swiglu")
def _swiglu_again(name: str, plain: Any) -> Op:
    return swiglu_op(None if plain is None else Epilogue.of(name, "", Graph.from_json(plain)))
