"""Gated activations: two products of the same rows, one kernel."""

from __future__ import annotations

import functools
import itertools
import reprlib
from typing import Any, Literal, overload

import torch
from torch import Tensor

from cutlass_ops.base.mma import Math
from cutlass_ops.epilogue import Epilogue, composed
from cutlass_ops.epilogue.graph import Graph, canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.operand.results import RowStatistic
from cutlass_ops.run import norms, scaled, traced, weights
from cutlass_ops.run.gemm import gemm
from cutlass_ops.run.ops import Instead, Op, graph_op
from cutlass_ops.run.requests import prepared_by
from cutlass_ops.run.values import OperandA, OperandB, OwnWeight, PreparedWeight, parts


def _prepare_swiglu(
    a: OperandA,
    b_gate: Any,
    b_up: Any,
    gamma: Tensor | None,
    eps: float | None,
    rstd: RowStatistic | Tensor | None,
    scale_out: Tensor | float | None,
    amax: bool,
    out: Any,
    out_dtype: torch.dtype | None,
) -> tuple[Op, tuple[Any, ...]]:
    for name, b in (("b_gate", b_gate), ("b_up", b_up)):
        if is_in_own_form(b):
            raise TypeError(
                f"{name} is a {type(b).__name__}, so each weight has a GEMM of its own: ask for each of them"
            )
    normed = eps is not None or rstd is not None
    folded = any(isinstance(b, PreparedWeight) and b.folded for b in (b_gate, b_up))
    if not normed and (gamma is not None or folded):
        raise TypeError("gamma or a prepared weight is given without a norm: pass eps= or rstd=")
    weights.require_alike(b_gate, "b_up", b_up, "b_gate")
    x, scale_a = parts(a)
    gate, scale_b = weights.matrix_of(b_gate, gamma, "b_gate")
    up, scale_up = weights.matrix_of(b_up, gamma, "b_up")
    quantise = norms.quantise_by(scale_out, amax, out, out_dtype)
    norm, values = norms.rms_values(x, eps, rstd, scale_a) if normed else (None, ())
    given = [scale is not None for scale in (scale_a, scale_b, scale_up)]
    # In the order in which Graph.then has them.
    after = () if scale_out is None else (scale_out,)
    if not any(given):
        return swiglu_op(norm, None, quantise, amax), (x, gate, *values, up, *after)
    if not all(given):
        name = ("a", "b_gate", "b_up")[given.index(False)]
        raise TypeError(
            f"{name} has no scale, and others have one: pass cutlass_ops.Scaled({name}, scale), or "
            f"cutlass_ops.Scaled({name}, 1.0) if it has no scale"
        )
    if isinstance(scale_a, Tensor) and scaled.has_blocks(x, scale_a):
        raise ValueError(
            f"scale_a has shape {tuple(scale_a.shape)}, as scales of blocks do, and gemm_swiglu takes only numbers or "
            "one for each row: call gemm for each weight, the second time with an epilogue that multiplies by the gate"
        )
    vectors = scaled.is_vector(scale_a), scaled.is_vector(scale_b), scaled.is_vector(scale_up)
    return swiglu_op(norm, vectors, quantise, amax), (x, gate, scale_a, scale_b, *values, scale_up, up, *after)


@overload
def gemm_swiglu(
    a: OperandA,
    b_gate: OperandB,
    b_up: OperandB,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    scale_out: Tensor | float | None = None,
    amax: Literal[False] = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Tensor: ...


@overload
def gemm_swiglu(
    a: OperandA,
    b_gate: OperandB,
    b_up: OperandB,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    scale_out: Tensor | float | None = None,
    amax: bool = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Any: ...


@prepared_by(_prepare_swiglu)
def gemm_swiglu(
    a: OperandA,
    b_gate: OperandB,
    b_up: OperandB,
    gamma: Tensor | None = None,
    *,
    eps: float | None = None,
    rstd: RowStatistic | Tensor | None = None,
    scale_out: Tensor | float | None = None,
    amax: bool = False,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
) -> Any:
    """Compute silu(a @ b_gate) * (a @ b_up), or the same with rmsnorm(a), in one kernel that reads a once.

    With `eps` or `rstd`, an RMSNorm is applied to a first, as in :func:`cutlass_ops.rmsnorm_gemm`. For another gate,
    write an epilogue with a ``Product``. Two GEMMs run instead of one if the weights are contiguous along N, if lines
    of the result are not aligned to 16 bytes, with `amax`, with FP64 or 3xTF32, before Hopper, or if a weight is a
    :class:`cutlass_ops.Packed` or a :class:`cutlass_ops.Sparse`, which take no norm. They write and read one more
    tensor, silu(a @ b_gate), rounded to a's dtype, or to BF16 if that is FP8.

    Parameters
    ----------
    a : Tensor or Scaled
        (..., K), FP16, BF16, INT8, FP64, FP32 with `math`, or on Hopper FP8. A scale is a number, or one for each row.
    b_gate, b_up : Tensor, Scaled, PreparedWeight, Packed or Sparse
        (K, N) each, of a's dtype and the same major. Both may be results of :func:`cutlass_ops.prepare`. If a is
        scaled, both are: by a number, or one for each column. Once checked, messages call them ``b`` and ``up``.
    gamma : Tensor, optional
        (K,), gamma of the norm. **Every call** folds it into both weights; :func:`cutlass_ops.prepare` folds it once.
    eps, rstd : optional
        As for :func:`cutlass_ops.rmsnorm_gemm`. Without either, there is no norm.
    scale_out, amax
        As for :func:`cutlass_ops.rmsnorm_gemm`, for a result in FP8.
    out : Tensor or mapping of str to Tensor, optional
        Where to write the result, or the results by name.
    out_dtype : torch.dtype, optional
        The result's dtype. Default: that of a, or BF16 for FP8 and INT8.
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
        If the call waits for its kernel, and that cannot be compiled, stored or loaded. Otherwise, PyTorch serves.

    Examples
    --------
    >>> a = torch.ones(1, 8).bfloat16()
    >>> b_gate, b_up = torch.randn(4, 8).bfloat16().t(), torch.randn(4, 8).bfloat16().t()
    >>> co.gemm_swiglu(a, b_gate, b_up).shape
    torch.Size([1, 4])

    With an RMSNorm, fold gamma into both weights once:

    >>> gamma = torch.ones(8).bfloat16()
    >>> co.gemm_swiglu(a, co.prepare(b_gate, gamma), co.prepare(b_up, gamma), eps=1e-6).shape
    torch.Size([1, 4])
    """
    if is_in_own_form(b_gate) or is_in_own_form(b_up):
        others = {"gamma": gamma, "eps": eps, "rstd": rstd, "scale_out": scale_out, "amax": amax or None}
        taken = next((name for name, value in others.items() if value is not None), None)
        if taken is not None:
            which = b_gate if is_in_own_form(b_gate) else b_up
            raise TypeError(
                f"{taken} is given, and a weight is a {type(which).__name__}, beside which it is not fused: leave "
                f"{taken} out, and compute it before or after"
            )
        gate = gemm(a, b_gate, epilogue=composed.swiglu_gate, math=math)
        return gemm(a, b_up, epilogue=composed.swiglu_up, out=out, out_dtype=out_dtype, math=math, gate=gate)
    op, arguments = _prepare_swiglu(a, b_gate, b_up, gamma, eps, rstd, scale_out, amax, out, out_dtype)
    return op(*arguments, out=out, out_dtype=out_dtype, math=math)


def is_in_own_form(b: object) -> bool:
    """Whether a weight is in a form of its own, such as packed, whose kernels have one product."""
    return isinstance(b, OwnWeight) and not isinstance(b, PreparedWeight)


@traced.remembered
def swiglu_op(
    norm: Epilogue | None,
    scales: tuple[bool, bool, bool] | None = None,
    quantise: Literal["tensor", "rows"] | None = None,
    amax: bool = False,
) -> Op:
    """Return the op behind :func:`gemm_swiglu`, for ``tune`` and ``plan``.

    `norm` normalises a's rows. `scales` says whether each row of a and each column of b_gate and b_up has a scale;
    None if nothing has one. `quantise` says whether the result is divided by one scale or by a scale of each
    row, and `amax` whether its greatest absolute values are an output.
    """

    def before(weight: int, name: str) -> Graph | None:
        """Return what is applied to a product before the gate."""
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
    made_by = "gemm_swiglu", {"norm": plain, **more}
    return graph_op("gemm_swiglu", both, composed.swiglu.doc, instead, made_by)


def swiglu_again(name: str, plain: Any) -> Op:
    """Return the op that a program names, by :func:`cutlass_ops.run.portable.find`."""
    norm, scales, quantise, amax = (plain[field] for field in ("norm", "scales", "quantise", "amax"))
    if scales not in [None, *map(list, itertools.product((False, True), repeat=3))]:
        raise ValueError(f"scales are three truth values, not {reprlib.repr(scales)}")
    if quantise not in (None, "tensor", "rows") or not isinstance(amax, bool):
        raise ValueError(f"quantise and amax are {reprlib.repr(quantise)} and {reprlib.repr(amax)}")
    norm = None if norm is None else Epilogue(name, "", Graph.from_json(norm))
    return swiglu_op(norm, scales and tuple(scales), quantise, amax)


@functools.lru_cache(maxsize=64)
def gated_op(activation: str | Graph, *, biased: bool = False) -> Op:
    """Return the op of activation(a @ b + gate_bias) * (a @ up + up_bias).

    It takes (a, b, up), and with biases (a, b, up, gate_bias, up_bias). `activation` is an operation of one argument,
    the graph of several, or an empty string for none. If no kernel multiplies by both weights, two GEMMs serve, as for
    :func:`gemm_swiglu`.
    """
    if activation == "silu" and not biased:
        return swiglu_op(None)
    of_gate, of_up = [Node("acc")], [Node("input", (), "up")]
    rows: list[Input] = []
    rounded = activation.rounded if isinstance(activation, Graph) else ()
    if biased:
        rows = [Input("gate_bias", Kind.ROW), Input("up_bias", Kind.ROW)]
        of_gate += [Node("input", (), "gate_bias"), Node("add", (0, 1))]
        of_up += [Node("input", (), "up_bias"), Node("add", (0, 1))]
    if isinstance(activation, Graph):
        at = len(of_gate) - 1  # of what its accumulator stands for
        of_gate += [Node(n.op, tuple(a + at for a in n.args), n.attr) for n in activation.nodes[1:]]
    elif activation:
        of_gate.append(Node(activation, (len(of_gate) - 1,)))
    count = len(of_gate)
    moved = [Node(n.op, tuple(a + count for a in n.args), n.attr) for n in of_up]
    product = [*of_gate, *moved, Node("mul", (count - 1, count + len(of_up) - 1))]
    whole = canonical((Input("up", Kind.PRODUCT), *rows), product, (Output("d", len(product) - 1),), rounded)
    gate = graph_op("gated", canonical(rows[:1], of_gate, (Output("d", count - 1),), rounded))
    nodes = [*(Node("acc") if n == Node("input", (), "up") else n for n in of_up), Node("input", (), "gate")]
    nodes.append(Node("mul", (len(of_up) - 1, len(of_up))))
    inputs = (*rows[1:], Input("gate", Kind.TILE))
    up = graph_op("gated", canonical(inputs, nodes, (Output("d", len(nodes) - 1),)))

    def two_gemms(call: Any, a: Tensor, b: Tensor, *inputs: Any, out: Any, out_dtype: torch.dtype | None) -> Any:
        other, *biases = inputs
        return call(up, a, other, *biases[1:], call(gate, a, b, *biases[:1]), out=out, out_dtype=out_dtype)

    instead = Instead("no kernel takes both weights, so each has a GEMM of its own", two_gemms)
    by = activation.to_json() if isinstance(activation, Graph) else activation
    return graph_op("gated", whole, "", instead, ("gated", [by, biased]))


def gated_again(name: str, plain: Any) -> Op:
    """Return the op that a program names, by :func:`cutlass_ops.run.portable.find`."""
    activation, biased = plain
    if not isinstance(activation, str | dict) or not isinstance(biased, bool):
        raise TypeError(f"{name} has an activation and whether there are biases, not {reprlib.repr(plain)}")
    return gated_op(activation if isinstance(activation, str) else Graph.from_json(activation), biased=biased)
