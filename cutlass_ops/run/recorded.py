"""Calls that autograd records, and their backward, which calls ops again: what an operator does (`operators.py`).

A call without gradients never comes here: :class:`cutlass_ops.run.traced.Traced` chooses the operator. A compiler that
traces through autograd sees only the calls of ops that forward and backward make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run import casting, grouped_backward, portable, traced, watching
from cutlass_ops.run.backward import Forward, Values, added, main_grad, refuse_main_grads, saved_of, step_of, wanted
from cutlass_ops.run.portable import Portable
from cutlass_ops.run.tensors import require_tensor


def plain(op, a, b, tensors, numbers, places, out_dtype, recompute=False) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return what the ops give without gradients."""
    return torch.ops.cutlass_ops.fused_gemm(op, a, b, tensors, numbers, places, out_dtype)


def shapes(*arguments) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN002
    """Return empty tensors like the results."""
    return traced.shapes(*arguments[:7])  # type: ignore[no-untyped-call]


def record(op, a, b, tensors, numbers, places, out_dtype, recompute=False) -> Any:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Return the results, with what their backward needs if there are gradients."""
    tensors = list(tensors or ())
    if not watching.is_differentiated(a, b, *tensors):
        return plain(op, a, b, tensors, numbers, places, out_dtype)
    called = portable.find(op)
    if called.graph.quantized is not None:
        raise ValueError(
            "the epilogue quantises D, and no gradient passes through that: call under torch.no_grad(), or take D in "
            "another dtype and quantise it by cutlass_ops.quantize"
        )
    names = tuple(name for at, name in enumerate(called.inputs) if at not in (places or ()))
    _refuse_fp8(called.graph, dict(zip(("a", "b", *names), (a, b, *tensors), strict=True)), out_dtype)
    for name, value in zip(("a", "b", *names), (a, b, *tensors), strict=True):
        require_tensor(name, value)
    why = called.why_no_gradient(a.dtype)
    if why is not None:
        raise ValueError(f"a is {a.dtype}, and {why}; or call under torch.no_grad()")
    if called.form == GROUPED:
        grouped_backward.require(called, b, wanted(names, tensors))
    called.of(builtin.identity.graph)  # an exact kernel has no backward, which is known before it runs
    settings = _Settings(called, names, numbers, places, out_dtype, recompute)
    return list(_Recorded.apply(settings, a, b, *tensors))  # type: ignore[no-untyped-call]


def _refuse_fp8(graph: Graph, given: Mapping[str, Any], out_dtype: torch.dtype | None) -> None:
    """Refuse gradients of what is in FP8: they would need copies of the operands, transposed, with scales of their own.

    Raises
    ------
    ValueError
        If an operand or a result is in FP8.
    """
    outside = "call under torch.no_grad()"
    if out_dtype is not None and out_dtype.itemsize == 1:
        raise ValueError(
            f"out_dtype is {out_dtype}, and no gradient passes through a result in FP8: {outside}, or take D in "
            "another dtype and quantise it"
        )
    copies = [o.name for o in graph.outputs if o.reduce is None and graph.stored_type(o)]
    if copies:
        raise ValueError(f"the output {copies[0]} is in FP8, and no gradient passes through it: {outside}")
    for name in ("a", "b"):
        if given[name].dtype.itemsize == 1:
            wrt = next(n for n, x in given.items() if watching.is_differentiated(x))
            raise ValueError(
                f"{wrt} requires grad and {name} is {given[name].dtype}, and products in 8 bits have no gradients. "
                f"{outside[0].upper()}{outside[1:]}, or pass {wrt}.detach()"
            )


class _Settings(NamedTuple):
    """What of a call is no tensor."""

    called: Portable
    names: tuple[str, ...]
    numbers: Any
    places: Any
    out_dtype: torch.dtype | None
    recompute: bool

    def values(self, tensors: Sequence[Tensor]) -> Values:
        """Return the epilogue's inputs by name."""
        inputs = traced.inputs_of(tensors, self.numbers, self.places)
        return dict(zip(self.called.inputs, inputs, strict=True))


class _Recorded(torch.autograd.Function):
    """A call of an op, as a node of autograd's graph."""

    @staticmethod
    def forward(ctx, call, a, b, *tensors):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        ctx.call, ctx.wrt = call, wanted(call.names, tensors)
        ctx.forward = Forward.of(call.called, ctx.wrt, a.dtype, store=not call.recompute)
        with casting.without_autocast(a.device):
            results, kept = ctx.forward.run(a, b, call.values(tensors), call.out_dtype)
        weights = {
            "b": b,
            **{n: x for n, x in zip(call.names, tensors, strict=True) if n in call.called.graph.products},
        }
        ctx.into = {name: main_grad(name, x) for name, x in weights.items() if x.requires_grad}
        ctx.save_for_backward(a, b, *tensors, *kept)
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        if any(isinstance(g, Tensor) and watching.is_batched(g) for g in grads):
            raise NotImplementedError(watching.NO_TRANSFORM)
        a, b, *tensors = saved_of(ctx)
        call, count = ctx.call, len(ctx.call.names)
        graph = call.called.graph
        kept = dict(zip(ctx.forward.saving.kept, tensors[count:], strict=True))
        del tensors[count:]
        into = added(ctx.into)
        if torch.is_grad_enabled():
            # The gradients are differentiated again: what only this node knows is no function of A and B to autograd.
            kept = {o.name: kept[o.name] for o in ctx.forward.saving.placed.outputs if o.name in kept}
            refuse_main_grads(into)
        # Kernels read no repeated values, such as those of the gradient of a sum.
        of = {o.name: g.contiguous() for o, g in zip(graph.outputs, grads, strict=True) if g is not None}
        if not of:
            return (None,) * (3 + count)
        named = dict(zip(call.names, tensors, strict=True))
        found = ctx.forward.vjp_asked(ctx.wrt, named, of, kept)
        with casting.without_autocast(a.device):
            of_call = grouped_backward.GroupedStep if call.called.form == GROUPED else step_of
            step = of_call(call.called, a, b, call.values(tensors))
            del a  # the step has it, and lets it go
            step.spent = ctx.forward.spent(kept)
            leaves = step.gradients(found, of, kept)
            of.clear()
            kept.clear()
            step.spent = ()  # another tensor may lie at their addresses from here on
            needs_a, needs_b = ctx.needs_input_grad[1:3]
            return None, *step.of_operands(leaves, named, ctx.wrt, into, a=needs_a, b=needs_b)


# ---- Kernels of a backward -----------------------------------------------------------------------------------------


def calls_of_a_step(op: Portable, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[PlainCall]:
    """Run a call and its backward, and return the calls of ops that both made.

    Parameters
    ----------
    op : Op
        The op.
    arguments, named
        Its arguments. They keep their gradients, and main_grad.
    """
    given = [_apart(x) for x in arguments], {name: _apart(x) for name, x in named.items()}

    def step() -> None:
        results = op.as_list(*given[0], **given[1])
        leaves = [x for x in (*given[0], *given[1].values()) if isinstance(x, Tensor) and x.requires_grad]
        results = [x for x in results if x.requires_grad]
        if results:
            torch.autograd.grad(results, leaves, [torch.ones_like(x) for x in results], allow_unused=True)

    with torch.enable_grad():
        return calls_of(step)


def calls_of(run: Callable[[], object]) -> list[PlainCall]:
    """Run something, and return the calls of ops that it makes. Tensors may be on "meta": then nothing is computed."""
    with _Noting() as noting:
        run()
    calls: list[PlainCall] = noting.calls
    return calls


def _apart(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


class PlainCall(NamedTuple):
    """A call of an op that no gradient concerns."""

    called: Portable
    a: Tensor
    b: Tensor
    inputs: tuple[Tensor | float, ...]
    out_dtype: torch.dtype | None


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes calls of ops, and lets them run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[PlainCall] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        if function is torch.ops.cutlass_ops.fused_gemm.default:
            op, a, b, tensors, numbers, places, *rest = args
            inputs = traced.inputs_of(tensors, numbers, places)
            self.calls.append(PlainCall(portable.find(op), a, b, inputs, rest[0] if rest else None))
        return function(*args, **(kwargs or {}))
