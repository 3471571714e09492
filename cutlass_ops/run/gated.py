"""Gated activations: two products of the same rows, one kernel."""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue, builtin
from cutlass_ops.epilogue.graph import Graph, canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
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


@functools.lru_cache(maxsize=64)
def gated_op(activation: str, *, biased: bool = False) -> Op:
    """Return the op of activation(a @ b + gate_bias) * (a @ up + up_bias).

    It takes (a, b, up), and with biases (a, b, up, gate_bias, up_bias). Where no kernel multiplies by both weights, two
    GEMMs serve, as for :func:`gemm_swiglu`.

    Parameters
    ----------
    activation : str
        An operation of one argument; an empty string for none.
    biased : bool
        Whether there are biases.
    """
    if activation == "silu" and not biased:
        return swiglu_op(None)
    of_gate, of_up = [Node("acc")], [Node("input", (), "up")]
    rows: list[Input] = []
    if biased:
        rows = [Input("gate_bias", Kind.ROW), Input("up_bias", Kind.ROW)]
        of_gate += [Node("input", (), "gate_bias"), Node("add", (0, 1))]
        of_up += [Node("input", (), "up_bias"), Node("add", (0, 1))]
    if activation:
        of_gate.append(Node(activation, (len(of_gate) - 1,)))
    count = len(of_gate)
    moved = [Node(n.op, tuple(a + count for a in n.args), n.attr) for n in of_up]
    product = [*of_gate, *moved, Node("mul", (count - 1, count + len(of_up) - 1))]
    whole = canonical((Input("up", Kind.PRODUCT), *rows), product, (Output("d", len(product) - 1),))
    gate = graph_op("gated", canonical(rows[:1], of_gate, (Output("d", count - 1),)))
    scaled = [*(Node("acc") if n == Node("input", (), "up") else n for n in of_up), Node("input", (), "gate")]
    scaled.append(Node("mul", (len(of_up) - 1, len(of_up))))
    inputs = (*rows[1:], Input("gate", Kind.TILE))
    up = graph_op("gated", canonical(inputs, scaled, (Output("d", len(scaled) - 1),)))

    def two_gemms(call: Any, a: Tensor, b: Tensor, *inputs: Any, out: Any, out_dtype: torch.dtype | None) -> Any:
        other, *biases = inputs
        return call(up, a, other, *biases[1:], call(gate, a, b, *biases[:1]), out=out, out_dtype=out_dtype)

    instead = Instead("no kernel takes both weights, so each has a GEMM of its own", two_gemms)
    return graph_op("gated", whole, "", instead, ("gated", [activation, biased]))


@traced.maker("gated")
def _gated_again(name: str, plain: Any) -> Op:
    activation, biased = plain
    return gated_op(activation, biased=biased)
