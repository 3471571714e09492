"""Calls that autograd records, and their backward, which calls ops again: what an operator does (`operators.py`).

A call without gradients never comes here: :class:`cutlass_ops.run.traced.Traced` chooses the operator. A compiler that
traces through autograd sees only the calls of ops that forward and backward make.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cutlass_ops.declare.form import GROUPED
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.operand import watching
from cutlass_ops.operand.matrices import operand
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run import casting, gathering, grouped_backward, little, portable, traced
from cutlass_ops.run.backward import (
    Forward,
    added,
    asked_of,
    is_spent,
    main_grad,
    refuse_main_grads,
    saved_of,
    step_of,
    wanted,
)
from cutlass_ops.run.little import Plain, has_saving_hooks, is_recorded_by_pytorch
from cutlass_ops.run.portable import Portable
from cutlass_ops.run.tape import Tapes


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
    called, _ = traced.called_with(op, tensors, numbers, places)
    names = tuple(name for at, name in enumerate(called.inputs) if at not in (places or ()))
    for name, value in zip(("a", "b", *names), (a, b, *tensors), strict=True):
        require_tensor(name, value)
    recorder = _recorder_of(called, names, places or (), a, b, tensors, out_dtype, recompute)
    found = _Recorded.apply(recorder, tuple(numbers or ()), a, b, *tensors)  # type: ignore[no-untyped-call]
    return [found] if isinstance(found, Tensor) else list(found)


def record_directly(
    called: Portable, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None, recompute: bool
) -> tuple[OpRecorder, tuple[Tensor, ...]]:
    """Return how to record a call that can bypass PyTorch's dispatcher, and its results: see ``traced.detour``."""
    places = tuple(at for at, x in enumerate(inputs) if type(x) is float)
    names = tuple(name for name, x in zip(called.inputs, inputs, strict=True) if type(x) is not float)
    tensors = [x for x in inputs if type(x) is not float]
    for name, value in zip(("a", "b", *names), (a, b, *tensors), strict=True):
        watching.refuse_tangent(name, value)
    recorder = _recorder_of(called, names, places, a, b, tensors, out_dtype, recompute)
    return recorder, recorder(a, b, inputs)


def _recorder_of(
    called: Portable,
    names: tuple[str, ...],
    places: Sequence[int],
    a: Tensor,
    b: Tensor,
    tensors: Sequence[Tensor],
    out_dtype: torch.dtype | None,
    recompute: bool,
) -> OpRecorder:
    """Return how to record a call without tangents. Raises ValueError or NotImplementedError if it cannot."""
    if called.graph.quantized is not None:
        raise ValueError(
            "the epilogue quantises D, and no gradient passes through that: call under torch.no_grad(), or take D in "
            "another dtype and quantise it by cutlass_ops.quantize"
        )
    given = dict(zip(("a", "b", *names), (a, b, *tensors), strict=True))
    _refuse_fp8(called.graph, given, out_dtype)
    _refuse_frozen(called.graph, given)
    wrt = wanted(names, tensors)
    if called.form == GROUPED:
        grouped_backward.require(called, wrt)
    called.of(builtin.identity.graph)  # an exact kernel has no backward, which is known before it runs
    places = tuple(places)
    kind = places, wrt, a.dtype, out_dtype, recompute
    found: OpRecorder | None = called.recorders.get(kind)
    if found is None:
        forward = Forward.of(called, wrt, a.dtype, store=not recompute)
        by_pytorch = little.plain(called, out_dtype, a)
        found = called.recorders[kind] = OpRecorder(called, names, places, wrt, forward, out_dtype, by_pytorch)
    return found


def _refuse_fp8(graph: Graph, given: Mapping[str, Any], out_dtype: torch.dtype | None) -> None:
    """Raise ValueError if a call that needs gradients has an operand or result in FP8.

    Gradients would need transposed copies of the operands, with other scales.
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
        # Bytes hold a weight's packed numbers.
        if given[name].dtype.itemsize == 1 and given[name].dtype != torch.uint8:
            wrt = next(n for n, x in given.items() if watching.is_differentiated(x))
            raise ValueError(
                f"{wrt} requires grad and {name} is {given[name].dtype}, and products in 8 bits have no gradients. "
                f"{outside[0].upper()}{outside[1:]}, or pass {wrt}.detach()"
            )


def _refuse_frozen(graph: Graph, given: Mapping[str, Any]) -> None:
    """Raise ValueError if a call needs the gradient of a weight in a form of its own."""
    of_b = operand("b", given["b"], graph, given)
    if of_b.held is None:
        return
    for name in (*(() if of_b.trains else ("b",)), *graph.parts):
        if watching.is_differentiated(given[name]):
            raise ValueError(
                f"{name} requires grad, and a weight in a form of its own is frozen: pass {name}.detach(), or train an "
                "adapter beside it"
            )


class Asked(NamedTuple):
    """What a backward is asked for."""

    needs: tuple[bool, ...]  # whether the engine takes the gradient of each tensor of the call
    given: tuple[bool, ...]  # whether each result has a gradient
    into: tuple[str, ...]  # matrices whose gradients are added to main_grad
    numbers: tuple[float, ...]  # the call's
    spends: bool  # whether the step may overwrite what was saved
    again: bool  # whether its results are to be differentiated


class Recorder(ABC):
    """How calls of one kind are recorded: what runs, what is saved, and the steps of their backward."""

    __slots__ = ("matrices", "tapes")

    def __init__(self, matrices: Sequence[tuple[int, str]]) -> None:
        # Matrices whose gradients may be added to a main_grad: their places among the call's tensors, and their names.
        self.matrices, self.tapes = tuple(matrices), Tapes()

    @abstractmethod
    def run(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Compute a call; return the user's results, and what its backward reads besides the call's tensors."""

    @abstractmethod
    def backward(self, asked: Asked, tensors: list[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradients of a call's tensors.

        `tensors` are those of the call, what :meth:`run` kept, the results' gradients, and main_grads. They are taken
        out of the list, so that memory is freed early.
        """


class OpRecorder(Recorder):
    """How calls of one op are recorded.

    `names` are the op's inputs that are tensors, `places` the positions of those that are numbers, and `wrt` the inputs
    whose gradients are wanted. `out_dtype` is D's. `plain` serves calls that PyTorch records.
    """

    __slots__ = ("called", "forward", "names", "out_dtype", "places", "plain", "wrt")

    def __init__(
        self,
        called: Portable,
        names: tuple[str, ...],
        places: tuple[int, ...],
        wrt: frozenset[str],
        forward: Forward,
        out_dtype: torch.dtype | None,
        plain: Plain | None,
    ) -> None:
        products = called.graph.products
        # A weight in a form of its own has a gradient of that form, to which no kernel adds.
        of_b = [] if called.graph.parts else [(1, "b")]
        super().__init__([*of_b, *((at, name) for at, name in enumerate(names, 2) if name in products)])
        self.called, self.names, self.places, self.wrt, self.forward = called, names, places, wrt, forward
        self.out_dtype, self.plain = out_dtype, plain

    def __call__(self, a: Tensor, b: Tensor, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Return the results of a call of this kind, as autograd records them."""
        if self.plain is not None and is_recorded_by_pytorch(a, b, of=self):
            gathering.took()  # a layer that asked has no other call
            return self.plain(a, b, inputs)
        numbers: tuple[float, ...] = ()
        if self.places:
            numbers = tuple([inputs[at] for at in self.places])
            inputs = [x for x in inputs if type(x) is not float]
        found: Tensor | tuple[Tensor, ...] = apply(self, numbers, a, b, *inputs)
        return (found,) if isinstance(found, Tensor) else found

    def run(self, tensors: tuple[Tensor, ...], numbers: tuple[float, ...]) -> tuple[Sequence[Tensor], list[Tensor]]:  # noqa: D102
        if self.called.form is GROUPED:
            grouped_backward.require_lines(tensors[1])
        inputs = traced.inputs_of(tensors[2:], numbers, self.places) if self.places else tensors[2:]
        return self.forward.run(tensors[0], tensors[1], inputs, self.out_dtype)

    def backward(self, asked: Asked, tensors: list[Tensor]) -> Sequence[Tensor | None]:  # noqa: D102
        forward, count = self.forward, len(self.names)
        of_results = [o.name for o, is_given in zip(self.called.graph.outputs, asked.given, strict=True) if is_given]
        names = frozenset(itertools.compress(("a", "b", *self.names), asked.needs))
        into = dict(zip(asked.into, tensors[len(tensors) - len(asked.into) :], strict=True))
        a, b, *others = tensors[: len(tensors) - len(asked.into)]
        tensors.clear()
        named = dict(zip(self.names, others, strict=False))
        # Kernels read no repeated values in memory, such as the gradient of a sum.
        of = {name: g.contiguous() for name, g in zip(of_results, others[len(others) - len(of_results) :], strict=True)}
        kept = dict(zip(forward.saving.kept, others[count : len(others) - len(of_results)], strict=True))
        del others
        if asked.again:
            # To autograd, values that only this node knows are no functions of A and B.
            kept = {o.name: kept[o.name] for o in forward.saving.placed.outputs if o.name in kept}
        found = forward.vjp_asked(self.wrt, names, of, kept)
        inputs = traced.inputs_of(list(named.values()), asked.numbers, self.places)
        make = grouped_backward.GroupedStep if self.called.form == GROUPED else step_of
        values = dict(zip(self.called.inputs, inputs, strict=True))
        of_b = operand("b", b, self.called.graph, values)
        # Only forwards have kernels that read it. A bias alone needs no product.
        if of_b.held is not None and (found.again or not names.isdisjoint(("a", "b"))):
            b = of_b.values(a.dtype)
        step = make(self.called, a, b, values)
        del a  # the step holds it, and frees it
        step.spent = forward.spent(kept) if asked.spends else ()
        leaves = step.gradients(found, of, kept)
        of.clear()
        kept.clear()
        step.spent = ()  # another tensor may lie at their addresses from here on
        gradients = step.of_operands(leaves, named, self.wrt, into, names)
        if of_b.held is not None and gradients[1] is not None:
            gradients[1] = of_b.held_of(gradients[1])
        return gradients


class _Recorded(torch.autograd.Function):
    """A call, as a node of autograd's graph."""

    @staticmethod
    def forward(ctx, recorder, numbers, *tensors):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        ctx.recorder, ctx.numbers, ctx.hooked = recorder, numbers, has_saving_hooks()
        ctx.steps = gathering.took()
        with gathering.steps(ctx.steps):
            # An empty context takes as long as the rest.
            if casting.any_autocast():
                with casting.without_autocast(tensors[0].device):
                    results, kept = recorder.run(tensors, numbers)
            else:
                results, kept = recorder.run(tensors, numbers)
        ctx.into = {}
        for at, name in recorder.matrices:
            if tensors[at].requires_grad and (into := main_grad(name, tensors[at])) is not None:
                ctx.into[name] = into
        ctx.save_for_backward(*tensors, *kept)
        ctx.set_materialize_grads(False)
        whole = [x for x in results if not x.is_floating_point()]
        if whole:
            ctx.mark_non_differentiable(*whole)
        return results[0] if len(results) == 1 else tuple(results)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        given = [g for g in grads if g is not None]
        for g in given:
            if watching.is_batched(g):
                raise NotImplementedError(watching.NO_TRANSFORM)
        tensors, recorder = saved_of(ctx), ctx.recorder
        if not given:
            return (None,) * len(ctx.needs_input_grad)
        again = torch.is_grad_enabled()
        into = added(ctx.into) if ctx.into else ctx.into
        if again:
            refuse_main_grads(into)
        asked = Asked(
            asked_of(ctx, ctx.needs_input_grad[2:]),
            tuple([g is not None for g in grads]),
            tuple(into),
            ctx.numbers,
            not ctx.hooked and is_spent(),
            again,
        )
        tensors += given
        tensors += into.values()
        del grads, given
        compute = functools.partial(recorder.backward, asked)
        with gathering.steps(ctx.steps):
            if casting.any_autocast():
                with casting.without_autocast(tensors[0].device):
                    return None, None, *recorder.tapes.run(asked, compute, tensors)
            return None, None, *recorder.tapes.run(asked, compute, tensors)


# As Function.apply, which first looks for what transforms of torch.func left over. Kernels refuse that.
apply: Callable[..., Any] = super(torch.autograd.Function, _Recorded).apply


# ---- Kernels of a backward -----------------------------------------------------------------------------------------


def calls_of_a_step(op: Portable, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[PlainCall]:
    """Run a call and its backward, and return the calls of ops that both made. Arguments keep grad and main_grad."""
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
    """Run a function, and return the calls of ops that it makes. With "meta" tensors, nothing is computed."""
    with _Noting() as noting:
        run()
    calls: list[PlainCall] = noting.calls
    return calls


def _apart(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


class PlainCall(NamedTuple):
    """A call of an op without gradients."""

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
