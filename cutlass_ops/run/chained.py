"""Two GEMMs in a row that autograd records as one: the derivative between them is the epilogue of a GEMM.

The backward of D = second(first(A @ B1) @ B2) multiplies the gradient of D by B2 transposed. That GEMM's epilogue
multiplies by the first op's derivative, so that no other kernel reads the gradient between the two. Where columns are
added up as well, for a bias, that is a kernel of its own. The chain needs what the first op's forward stores, and a
second op that is linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cutlass_ops.epilogue.derivatives import ACC
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import casting, portable, traced, watching
from cutlass_ops.run.backward import (
    Forward,
    Step,
    added,
    as_epilogue,
    is_asked,
    main_grad,
    refuse_main_grads,
    saved_of,
    wanted,
)
from cutlass_ops.run.portable import Portable
from cutlass_ops.run.tensors import require_tensor


def chain(
    first: Portable,
    second: Portable,
    a: Tensor,
    b1: Tensor,
    b2: Tensor,
    inputs1: Sequence[Tensor],
    inputs2: Sequence[Tensor],
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return second(first(a, b1, *inputs1), b2, *inputs2), where each op has D as its only output.

    Parameters
    ----------
    first, second : Op
        The ops. Without gradients, or where the backward cannot be one chain, they are called one after the other.
    a : Tensor
        A of the first op (..., M, K).
    b1, b2 : Tensor
        B of each. With batches, the ops are called one after the other.
    inputs1, inputs2 : sequence of Tensor
        The inputs of each, by position.
    out_dtype : torch.dtype, optional
        D's dtype; by default A's.

    Returns
    -------
    Tensor
        D of the second op.
    """
    of_first, of_second = _traced(first), _traced(second)
    dtype = casting.autocast_dtype(a)
    a, b1, b2 = (casting.autocast_to(dtype, x) for x in (a, b1, b2))
    inputs1 = [
        casting.autocast_to(dtype, x) if name in of_first.products else x
        for name, x in zip(of_first.names, inputs1, strict=True)
    ]
    every = (a, b1, b2, *inputs1, *inputs2)
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling:
        for name, x in zip(("a", "b1", "b2", *of_first.names, *of_second.names), every, strict=True):
            watching.refuse_others(name, x)
    batches = b1.ndim > 2 or b2.ndim > 2
    # A program may be traced without gradients and run with them.
    later = (compiling or watching.is_watched()) and any(x.requires_grad for x in every)
    if batches or not (later or watching.is_differentiated(*every)) or traced.is_recomputing():
        return cast("Tensor", second(first(a, b1, *inputs1), b2, *inputs2, out_dtype=out_dtype))
    arguments = of_first.op, of_second.op, a, b1, b2, list(inputs1), list(inputs2), out_dtype
    return cast("Tensor", torch.ops.cutlass_ops.fused_chain_grad(*arguments))


def _traced(op: Any) -> traced.Traced:
    return op if isinstance(op, traced.Traced) else traced.Traced(op.about)


def plain(first, second, a, b1, b2, inputs1, inputs2, out_dtype) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return what the ops give without gradients."""
    between = torch.ops.cutlass_ops.fused_gemm(first, a, b1, inputs1, [], [], None)[0]
    return torch.ops.cutlass_ops.fused_gemm(second, between, b2, inputs2, [], [], out_dtype)[0]


def shapes(first, second, a, b1, b2, inputs1, inputs2, out_dtype) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return empty tensors like the results."""
    (between,) = traced.shapes(first, a, b1, inputs1, [], [], None)  # type: ignore[no-untyped-call]
    return traced.shapes(second, between, b2, inputs2, [], [], out_dtype)[0]  # type: ignore[no-untyped-call]


def record(first, second, a, b1, b2, inputs1, inputs2, out_dtype) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return the results, with what their backward needs if there are gradients."""
    inputs1, inputs2 = list(inputs1 or ()), list(inputs2 or ())
    ops = portable.find(first), portable.find(second)
    names = [i.name for op in ops for i in op.graph.inputs]
    for name, x in zip(("a", "b1", "b2", *names), (a, b1, b2, *inputs1, *inputs2), strict=True):
        require_tensor(name, x)
    pair = _Pair.of(*ops, a.dtype, inputs1, inputs2)
    if pair is None:
        between = ops[0].as_list(a, b1, *inputs1)[0]
        return ops[1].as_list(between, b2, *inputs2, out_dtype=out_dtype)[0]
    return _Chained.apply(pair, out_dtype, a, b1, b2, *inputs1, *inputs2)  # type: ignore[no-untyped-call]


class _Pair(NamedTuple):
    """Two ops whose backward is one chain.

    Attributes
    ----------
    first, second : Forward
        How each runs, and what it stores.
    wrt1, wrt2 : frozenset of str
        The inputs of each whose gradients are wanted.
    """

    first: Forward
    second: Forward
    wrt1: frozenset[str]
    wrt2: frozenset[str]

    @classmethod
    def of(
        cls, first: Portable, second: Portable, dtype: torch.dtype, inputs1: Sequence[Tensor], inputs2: Sequence[Tensor]
    ) -> _Pair | None:
        """Return how two ops run; None if their backward is no chain."""
        names = [[i.name for i in op.graph.inputs] for op in (first, second)]
        wrt1, wrt2 = wanted(names[0], inputs1), wanted(names[1], inputs2)
        forward, after = (Forward.of(o, w, dtype, store=True) for o, w in ((first, wrt1), (second, wrt2)))
        kept1 = dict.fromkeys(forward.saving.kept, inputs1)
        kept2 = dict.fromkeys(after.saving.kept, inputs2)
        if len(first.graph.outputs) > 1 or len(second.graph.outputs) > 1 or kept2:
            return None
        if first.graph.gathered or second.graph.gathered or second.graph.products:
            return None
        found = forward.vjp(wrt1, {"d": None}, kept1)  # type: ignore[dict-item, arg-type]
        passed = after.vjp(wrt2, {"d": None}, {})  # type: ignore[dict-item]
        linear = not passed.again and passed.same.get(ACC) == "d"
        behind = as_epilogue(found.expression)
        if found.again or found.same or not linear or behind is None or first.why_not(behind, dtype) is not None:
            return None
        return cls(forward, after, wrt1, wrt2)


class _Chained(torch.autograd.Function):
    """A call of two ops, as a node of autograd's graph."""

    @staticmethod
    def forward(ctx, pair, out_dtype, a, b1, b2, *inputs):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        first, second = pair.first.called.graph, pair.second.called.graph
        count = len(first.inputs)
        values = _named(first, inputs[:count]), _named(second, inputs[count:])
        with casting.without_autocast(a.device):
            (between,), kept = pair.first.run(a, b1, values[0], None)
            (d,), _ = pair.second.run(between, b2, values[1], out_dtype)
        ctx.pair, ctx.count, ctx.out_dtype = pair, count, out_dtype
        weights = {"b1": b1, "b2": b2, **{name: values[0][name] for name in first.products}}
        ctx.into = {name: main_grad(name, x) for name, x in weights.items() if x.requires_grad}
        ctx.save_for_backward(a, b1, b2, between, *inputs, *kept)
        return d

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        if watching.is_batched(grad):
            raise NotImplementedError(watching.NO_TRANSFORM)
        pair, count = ctx.pair, ctx.count
        a, b1, b2, between, *others = saved_of(ctx)
        total = count + len(pair.second.called.graph.inputs)
        inputs, kept = others[:total], dict(zip(pair.first.saving.kept, others[total:], strict=True))
        del others
        into = added(ctx.into)
        every = a, b1, b2, *inputs
        asked = [need and is_asked(x) for need, x in zip(ctx.needs_input_grad[2:], every, strict=True)]
        asks_first = any((*asked[:2], *asked[3 : 3 + count]))
        del every
        if torch.is_grad_enabled():
            refuse_main_grads(into)
            again = _again(pair, a, b1, b2, inputs, grad, asked, ctx)  # type: ignore[no-untyped-call]
            return None, None, *again
        first, second = (
            _named(pair.first.called.graph, inputs[:count]),
            _named(pair.second.called.graph, inputs[count:]),
        )
        with casting.without_autocast(a.device):
            grad = grad.contiguous()
            needs_a, needs_b1, needs_b2 = asked[:3]
            after = Step(pair.second.called, between, b2, second)
            passed = pair.second.vjp_asked(pair.wrt2, second, {"d": grad}, {})
            leaves = after.gradients(passed, {"d": grad}, {})
            of_d = leaves[ACC]
            # What only the second op's gradients read, D of the first, is let go before the first one's are there.
            of_b2 = {"b": into["b2"]} if "b2" in into else {}
            _, *of_second = after.of_operands(leaves, second, pair.wrt2, of_b2, a=False, b=needs_b2)
            del after, between, leaves
            if not asks_first:
                return None, None, None, None, of_second[0], *[None] * count, *of_second[1:]
            before = Step(pair.first.called, a, b1, first)
            del a  # the step has it, and lets it go
            before.spent = pair.first.spent(kept)
            found = pair.first.vjp(pair.wrt1, {"d": grad}, kept)
            if _adds_columns(pair.first.called.graph):
                leaves = before.gradients(found, {"d": before.product(of_d, b2.t())}, kept)
            else:
                leaves = before.gradients_behind(found, of_d, b2.t(), kept)
            kept.clear()
            before.spent = ()  # another tensor may lie at their addresses from here on
            into = into | ({"b": into["b1"]} if "b1" in into else {})
            of_a, of_b1, *of_first = before.of_operands(leaves, first, pair.wrt1, into, a=needs_a, b=needs_b1)
            return None, None, of_a, of_b1, of_second[0], *of_first, *of_second[1:]


def _adds_columns(graph: Graph) -> bool:
    """Whether the backward of an epilogue may add columns up, as for a bias.

    In the epilogue of a GEMM, GELU's derivative with such sums took longer than the products (benchmarks/NOTES.md,
    "Training, measured again"). Whether the sums are wanted makes no difference, so that bits do not depend on it.
    """
    return any(i.kind is Kind.ROW for i in graph.inputs)


def _again(pair, a, b1, b2, inputs, grad, asked, ctx):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """Return gradients that can be differentiated again: those of the two ops one after the other."""
    count = ctx.count
    # Views, each a node of its own: a residual may be A itself, or depend on it, and its path would count twice.
    every = a, b1, b2, *inputs = [x.view_as(x) for x in (a, b1, b2, *inputs)]
    with traced.recompute():
        between = pair.first.called.as_list(a, b1, *inputs[:count])[0]
        d = pair.second.called.as_list(between, b2, *inputs[count:], out_dtype=ctx.out_dtype)[0]
    wanted_ones = [x for x, need in zip(every, asked, strict=True) if need]
    found = iter(torch.autograd.grad(d, wanted_ones, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in asked]


def _named(graph: Graph, values: Sequence[Tensor]) -> dict[str, Any]:
    return dict(zip((i.name for i in graph.inputs), values, strict=True))
