"""Gated activations: two products of the same rows, one kernel."""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch import Tensor

from cutlass_ops.base.mma import Math
from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.epilogue.graph import Graph, canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.run import norms, scaled, traced, weights
from cutlass_ops.run.ops import Instead, Op, graph_op
from cutlass_ops.run.requests import prepared_by
from cutlass_ops.run.results import PreparedWeight, RowStatistic


def _prepare_swiglu(
    x: Tensor,
    w_gate: Tensor | PreparedWeight,
    w_up: Tensor | PreparedWeight,
    gamma: Tensor | None,
    eps: float | None,
    rstd: RowStatistic | Tensor | None,
    scale_a: Tensor | float | None,
    scale_b: Tensor | float | None,
    scale_up: Tensor | float | None,
    scale_out: Tensor | float | None,
    amax: bool,
    out: Any,
    out_dtype: torch.dtype | None,
) -> tuple[Op, tuple[Any, ...]]:
    normed = eps is not None or rstd is not None
    folded = any(isinstance(w, PreparedWeight) and w.folded for w in (w_gate, w_up))
    if not normed and (gamma is not None or folded):
        raise TypeError("gamma or a prepared weight is given without a norm: pass eps= or rstd=")
    weights.require_alike(w_gate, "up", w_up)
    gate, up = weights.matrix_of(w_gate, gamma, "w"), weights.matrix_of(w_up, gamma, "up")
    scale_b = weights.weight_scale(w_gate, scale_b, "scale_b")
    scale_up = weights.weight_scale(w_up, scale_up, "scale_up")
    quantise = norms.quantise_by(scale_out, amax, out, out_dtype)
    norm, values = norms.rms_values(x, eps, rstd, scale_a) if normed else (None, ())
    given = [scale is not None for scale in (scale_a, scale_b, scale_up)]
    if any(given) and not all(given):
        missing = next(n for n, g in zip(("scale_a", "scale_b", "scale_up"), given, strict=True) if not g)
        raise TypeError(
            f"{missing} is missing: pass all of scale_a=, scale_b= and scale_up=, with 1.0 if there is no scale"
        )
    # In the order in which Graph.then has them.
    after = () if scale_out is None else (scale_out,)
    if not any(given):
        return swiglu_op(norm, None, quantise, amax), (x, gate, *values, up, *after)
    if isinstance(scale_a, Tensor) and scaled.has_blocks(x, scale_a):
        raise ValueError(
            f"scale_a has shape {tuple(scale_a.shape)}, as scales of blocks do, and gemm_swiglu takes only numbers or "
            "one for each row: call scaled_gemm for each weight, the second time with an epilogue that multiplies by "
            "the gate"
        )
    vectors = scaled.is_vector(scale_a), scaled.is_vector(scale_b), scaled.is_vector(scale_up)
    return swiglu_op(norm, vectors, quantise, amax), (x, gate, scale_a, scale_b, *values, scale_up, up, *after)


@prepared_by(_prepare_swiglu)
def gemm_swiglu(
    x: Tensor,
    w_gate: Tensor | PreparedWeight,
    w_up: Tensor | PreparedWeight,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    scale_a: Tensor | float | None = None,
    scale_b: Tensor | float | None = None,
    scale_up: Tensor | float | None = None,
    scale_out: Tensor | float | None = None,
    amax: bool = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Any:
    """Compute silu(x @ w_gate) * (x @ w_up), or the same with rmsnorm(x), in one kernel that reads x once.

    With `eps` or `rstd`, an RMSNorm is applied to x first, as in :func:`cutlass_ops.rmsnorm_gemm`. For another gate,
    write an epilogue with a ``Product``. Two GEMMs run instead of one if the weights are contiguous along N, if lines
    of the result are not aligned to 16 bytes, with `amax`, with FP64 or 3xTF32, or before Hopper. They write and read
    one more tensor, silu(x @ w_gate), rounded to x's dtype, or to BF16 if that is FP8.

    Parameters
    ----------
    x : Tensor
        (..., K), FP16, BF16, INT8, FP64, FP32 with `math`, or on Hopper FP8. Messages call it ``a``, w_gate ``b`` and
        w_up ``up``.
    w_gate, w_up : Tensor or PreparedWeight
        (K, N) each, of x's dtype and the same major. Both may be results of :func:`cutlass_ops.prepare`.
    gamma : Tensor, optional
        (K,), gamma of the norm. **Every call** folds it into both weights; :func:`cutlass_ops.prepare` folds it once.
    eps, rstd : optional
        As for :func:`cutlass_ops.rmsnorm_gemm`. Without either, there is no norm.
    scale_a, scale_b, scale_up : Tensor or float, optional
        The scales of x, w_gate and w_up, as for :func:`cutlass_ops.scaled_gemm`: numbers, or one for each row of x and
        each column of a weight. Pass all or none. A weight that was prepared in FP8 has its own scale.
    scale_out, amax
        As for :func:`cutlass_ops.rmsnorm_gemm`, for a result in FP8.
    out : Tensor or mapping of str to Tensor, optional
        Where to write the result, or the results by name.
    out_dtype : torch.dtype, optional
        The result's dtype. Default: that of x, or BF16 for FP8 and INT8.
    math : {"tf32", "3xtf32", "fast", "promoted"}, optional
        How FP32 or FP8 operands are multiplied, as for :func:`cutlass_ops.gemm`. With FP32, a norm needs `rstd`.

    Returns
    -------
    Tensor or named tuple
        The result (..., N). With `amax`, a named tuple of ``d`` (..., N) and ``amax`` (...).

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
    op, arguments = _prepare_swiglu(
        x, w_gate, w_up, gamma, eps, rstd, scale_a, scale_b, scale_up, scale_out, amax, out, out_dtype
    )
    return op(*arguments, out=out, out_dtype=out_dtype, math=math)


@traced.remembered
def swiglu_op(
    norm: Epilogue | None,
    scales: tuple[bool, bool, bool] | None = None,
    quantise: Literal["tensor", "rows"] | None = None,
    amax: bool = False,
) -> Op:
    """Return the op behind :func:`gemm_swiglu`, for ``tune`` and ``plan``.

    Parameters
    ----------
    norm : Epilogue, optional
        What x's rows are normalised by.
    scales : tuple of bool, optional
        Whether each row of x, each column of w_gate and each column of w_up has a scale; None if nothing has one.
    quantise : {"tensor", "rows"}, optional
        Whether the result is divided by a scale of it all, or of each row.
    amax : bool
        Whether its greatest absolute values are an output.
    """

    def before(weight: int, name: str) -> Graph | None:
        """Return what a product goes through ahead of the gate."""
        steps = [] if scales is None else [composed.SCALED[scales[0], scales[weight]].graph.renamed({"scale_b": name})]
        steps += [] if norm is None else [norm.graph]
        return functools.reduce(Graph.then, steps) if steps else None

    gate, up = before(1, "scale_b"), before(2, "scale_up")
    after = None if quantise is None else composed.quantised(quantise == "rows", amax).graph

    def whole(first: Graph | None, middle: Epilogue, last: Graph | None, products: Graph | None = None) -> Graph:
        graph = middle.graph if first is None else first.then(middle.graph, products=products or False)
        return graph if last is None else graph.then(last)

    both = whole(gate, composed.swiglu, after, up)
    gate_op = graph_op("gemm_swiglu", whole(gate, composed.swiglu_gate, None))
    up_op = graph_op("gemm_swiglu", whole(up, composed.swiglu_up, after))

    def two_gemms(call: Any, a: Tensor, b: Tensor, *inputs: Any, out: Any, out_dtype: torch.dtype | None) -> Any:
        values = dict(zip((i.name for i in both.inputs), inputs, strict=True))
        values["gate"] = call(gate_op, a, b, *(values[name] for name in gate_op.names))
        return call(up_op, a, values["up"], *(values[name] for name in up_op.names), out=out, out_dtype=out_dtype)

    why = "no kernel takes both weights" + (" and reduces what it stores" if amax else "")
    instead = Instead(f"{why}, so each has a GEMM of its own", two_gemms)
    plain = None if norm is None else norm.graph.to_json()
    more = {"scales": scales and list(scales), "quantise": quantise, "amax": amax}
    # What older programs have stays as it was.
    made_by = "gemm_swiglu", {"norm": plain, **more} if any(more.values()) else plain
    called = {"a": "x", "b": "w_gate", "up": "w_up"}
    return graph_op("gemm_swiglu", both, composed.swiglu.doc, instead, made_by, called=called)


def swiglu_again(name: str, plain: Any) -> Op:
    """Return the op that a program names, by :func:`cutlass_ops.run.portable.find`."""
    given = plain if plain is not None and "norm" in plain else {"norm": plain}
    norm, scales = given["norm"], given.get("scales")
    return swiglu_op(
        None if norm is None else Epilogue.of(name, "", Graph.from_json(norm)),
        tuple(scales) if scales else None,
        given.get("quantise"),
        given.get("amax", False),
    )


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
    nodes = [*(Node("acc") if n == Node("input", (), "up") else n for n in of_up), Node("input", (), "gate")]
    nodes.append(Node("mul", (len(of_up) - 1, len(of_up))))
    inputs = (*rows[1:], Input("gate", Kind.TILE))
    up = graph_op("gated", canonical(inputs, nodes, (Output("d", len(nodes) - 1),)))

    def two_gemms(call: Any, a: Tensor, b: Tensor, *inputs: Any, out: Any, out_dtype: torch.dtype | None) -> Any:
        other, *biases = inputs
        return call(up, a, other, *biases[1:], call(gate, a, b, *biases[:1]), out=out, out_dtype=out_dtype)

    instead = Instead("no kernel takes both weights, so each has a GEMM of its own", two_gemms)
    return graph_op("gated", whole, "", instead, ("gated", [activation, biased]))


def gated_again(name: str, plain: Any) -> Op:
    """Return the op that a program names, by :func:`cutlass_ops.run.portable.find`."""
    activation, biased = plain
    return gated_op(activation, biased=biased)
