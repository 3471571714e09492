"""Two GEMMs in a row that autograd records as one: the derivative between them is the epilogue of a GEMM.

The backward of D = second(first(A @ B1) @ B2) multiplies the gradient of D by B2 transposed. That GEMM's epilogue
multiplies by the first op's derivative, so no other kernel reads the gradient between the two. If columns are added up
as well, for a bias, a separate kernel does that. The chain needs what the first op's forward stores, and a linear
second op.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from cutlass_ops.epilogue.derivatives import ACC
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import watching
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run import casting, portable, recorded, traced
from cutlass_ops.run.backward import Forward, Step, as_epilogue, wanted
from cutlass_ops.run.portable import Portable


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
    """Return second(first(a, b1, *inputs1), b2, *inputs2), for ops whose only output is D.

    The ops are called one after the other with batches, without gradients, or if the backward cannot be one chain. D
    has by default A's dtype.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and not casting.any_autocast() and not watching.is_watched():
        found = _directly(first, second, a, b1, b2, inputs1, inputs2, out_dtype)
        if found is not None:
            return found
    of_first, of_second = _traced(first), _traced(second)
    dtype = casting.autocast_dtype(a)
    a, b1, b2 = (casting.autocast_to(dtype, x) for x in (a, b1, b2))
    inputs1 = [
        casting.autocast_to(dtype, x) if name in of_first.products else x
        for name, x in zip(of_first.names, inputs1, strict=True)
    ]
    every = (a, b1, b2, *inputs1, *inputs2)
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


def _directly(
    first: Portable,
    second: Portable,
    a: Tensor,
    b1: Tensor,
    b2: Tensor,
    inputs1: Sequence[Tensor],
    inputs2: Sequence[Tensor],
    out_dtype: torch.dtype | None,
) -> Tensor | None:
    """Return the result of a call that nothing watches and whose arguments are plain; None for other calls."""
    if traced.is_recomputing() or watching.is_transformed():
        return None
    every = (a, b1, b2, *inputs1, *inputs2)
    if not watching.is_differentiated(*every):
        between = first(a, b1, *inputs1)
        return cast("Tensor", second(between, b2, *inputs2, out_dtype=out_dtype))
    kind = traced.kind_of_recorded(a, b1, every[2:], out_dtype)
    if kind is None or b1.ndim > 2 or b2.ndim > 2:
        return None
    recorder = _Chain.of(first, second, kind, a, inputs1, inputs2, out_dtype)
    return None if recorder is None else cast("Tensor", recorded.apply(recorder, (), *every))


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
    first, second = portable.find(first), portable.find(second)
    every = (a, b1, b2, *inputs1, *inputs2)
    for name, x in zip(("a", "b1", "b2", *first.inputs, *second.inputs), every, strict=True):
        require_tensor(name, x)
    kind = traced.kind_of_recorded(a, b1, every[2:], out_dtype)
    recorder = _Chain.of(first, second, kind, a, inputs1, inputs2, out_dtype)
    if recorder is None:
        between = first.as_list(a, b1, *inputs1)[0]
        return second.as_list(between, b2, *inputs2, out_dtype=out_dtype)[0]
    return recorded.apply(recorder, (), *every)


class _Chain(recorded.Recorder):
    """How two ops are recorded whose backward is one chain.

    The tensors of a call are A, B1, B2 and the ops' inputs. `wrt1` and `wrt2` are the inputs of each op whose gradients
    are wanted. `out_dtype` is D's.
    """

    __slots__ = ("first", "out_dtype", "second", "wrt1", "wrt2")

    def __init__(
        self, first: Forward, second: Forward, wrt1: frozenset[str], wrt2: frozenset[str], out_dtype: torch.dtype | None
    ) -> None:
        products = [(at, i.name) for at, i in enumerate(first.called.graph.inputs, 3) if i.kind is Kind.PRODUCT]
        super().__init__([(1, "b1"), (2, "b2"), *products])
        self.first, self.second, self.wrt1, self.wrt2, self.out_dtype = first, second, wrt1, wrt2, out_dtype

    @classmethod
    def of(
        cls,
        first: Portable,
        second: Portable,
        kind: Any,
        a: Tensor,
        inputs1: Sequence[Tensor],
        inputs2: Sequence[Tensor],
        out_dtype: torch.dtype | None,
    ) -> _Chain | None:
        """Return how calls of a kind (:func:`traced.kind_of_recorded`) run; None if their backward is no chain."""
        key = second, kind
        found: _Chain | None = first.recorders.get(key, _MISSING)
        if kind is None or found is _MISSING:
            wrt = wanted(first.inputs, inputs1), wanted(second.inputs, inputs2)
            found = first.recorders[key] = cls._made(first, second, a.dtype, *wrt, out_dtype)
        return found

    @classmethod
    def _made(
        cls,
        first: Portable,
        second: Portable,
        dtype: torch.dtype,
        wrt1: frozenset[str],
        wrt2: frozenset[str],
        out_dtype: torch.dtype | None,
    ) -> _Chain | None:
        forward, after = (Forward.of(o, w, dtype, store=True) for o, w in ((first, wrt1), (second, wrt2)))
        kept1, kept2 = dict.fromkeys(forward.saving.kept), dict.fromkeys(after.saving.kept)
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
        return cls(forward, after, wrt1, wrt2, out_dtype)

    def run(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> tuple[Sequence[Tensor], list[Tensor]]:
        a, b1, b2 = tensors[:3]
        of_second = 3 + len(self.first.called.graph.inputs)
        (between,), kept = self.first.run(a, b1, tensors[3:of_second], None)
        results, _ = self.second.run(between, b2, tensors[of_second:], self.out_dtype)
        return results, [between, *kept]

    def backward(self, asked: recorded.Asked, tensors: list[Tensor]) -> Sequence[Tensor | None]:
        if asked.again:
            return self._again(asked, tensors)
        into = dict(zip(asked.into, tensors[len(tensors) - len(asked.into) :], strict=True))
        a, b1, b2, *others, grad = tensors[: len(tensors) - len(asked.into)]
        tensors.clear()
        graphs = self.first.called.graph, self.second.called.graph
        count, total = len(graphs[0].inputs), len(graphs[0].inputs) + len(graphs[1].inputs)
        first, second = _named(graphs[0], others[:count]), _named(graphs[1], others[count:total])
        between, kept = others[total], dict(zip(self.first.saving.kept, others[total + 1 :], strict=True))
        del others
        needs_a, needs_b1, needs_b2, *needs = asked.needs
        of_first = _needed((needs_a, needs_b1), first, needs[:count])
        of_second = _needed((False, needs_b2), second, needs[count:])
        grad = grad.contiguous()
        after = Step(self.second.called, between, b2, second)
        passed = self.second.vjp_asked(self.wrt2, of_second, {"d": grad}, {})
        leaves = after.gradients(passed, {"d": grad}, {})
        of_d = leaves[ACC]
        # Only the second op's gradients read D of the first op: it is freed before the first op's gradients exist.
        of_b2 = {"b": into["b2"]} if "b2" in into else {}
        _, grad_b2, *grads2 = after.of_operands(leaves, second, self.wrt2, of_b2, of_second)
        del after, between, leaves
        if not of_first:
            return [None, None, grad_b2, *[None] * count, *grads2]
        before = Step(self.first.called, a, b1, first)
        del a  # the step holds it, and frees it
        before.spent = self.first.spent(kept) if asked.spends else ()
        found = self.first.vjp(self.wrt1, {"d": grad}, kept)
        if _adds_columns(graphs[0]):
            leaves = before.gradients(found, {"d": before.product(of_d, b2.t())}, kept)
        else:
            leaves = before.gradients_behind(found, of_d, b2.t(), kept)
        kept.clear()
        before.spent = ()  # another tensor may lie at their addresses from here on
        into |= {"b": into["b1"]} if "b1" in into else {}
        grad_a, grad_b1, *grads1 = before.of_operands(leaves, first, self.wrt1, into, of_first)
        return [grad_a, grad_b1, grad_b2, *grads1, *grads2]

    def _again(self, asked: recorded.Asked, tensors: list[Tensor]) -> list[Tensor | None]:
        """Return gradients that can be differentiated again, from the two ops one after the other."""
        count, grad = len(self.first.called.graph.inputs), tensors[-1]
        # Each view is its own node: a residual may be A itself, or depend on it, and its path would count twice.
        every = a, b1, b2, *inputs = [x.view_as(x) for x in tensors[: len(asked.needs)]]
        with traced.recompute():
            between = self.first.called.as_list(a, b1, *inputs[:count])[0]
            d = self.second.called.as_list(between, b2, *inputs[count:], out_dtype=self.out_dtype)[0]
        wrt = list(itertools.compress(every, asked.needs))
        found = iter(torch.autograd.grad(d, wrt, grad, create_graph=True, allow_unused=True))
        return [next(found) if need else None for need in asked.needs]


_MISSING: Any = object()


def _needed(operands: tuple[bool, bool], inputs: dict[str, Any], needs: Sequence[bool]) -> frozenset[str]:
    """Return the names of the operands and inputs of one op whose gradients are asked for."""
    pairs = zip(("a", "b", *inputs), (*operands, *needs), strict=True)
    return frozenset(name for name, need in pairs if need)


def _adds_columns(graph: Graph) -> bool:
    """Whether the backward of an epilogue may add columns up, as for a bias.

    In the epilogue of a GEMM, GELU's derivative with such sums took longer than the products (benchmarks/NOTES.md,
    "Training, measured again"). The answer ignores whether the sums are wanted, so bits do not depend on it.
    """
    return any(i.kind is Kind.ROW for i in graph.inputs)


def _named(graph: Graph, values: Sequence[Tensor]) -> dict[str, Any]:
    return dict(zip((i.name for i in graph.inputs), values, strict=True))
