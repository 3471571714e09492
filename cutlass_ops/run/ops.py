"""Ops: a GEMM with an epilogue, served by the best kernel there is for a call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.artifacts import loader
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.base.mma import ACCUMULATIONS, MATHS, Math
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue, Value, doubles
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Node, Output
from cutlass_ops.epilogue.trace import epilogue_given
from cutlass_ops.operand import watching
from cutlass_ops.operand.call import Call, check_call
from cutlass_ops.run import described, operators, portable, refusals, traced  # noqa: F401 - the second registers operators
from cutlass_ops.run.plan import Plan, make_plan
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.warm import Warm

if TYPE_CHECKING:
    from cutlass_ops.choose.dispatch import Decision
    from cutlass_ops.run.cold import Served
    from cutlass_ops.run.launch import Launch


class Instead(NamedTuple):
    """Other ops that compute a call that no single kernel serves."""

    why: str  # for users
    # Takes a function that calls an op, then the call's arguments with `out` and `out_dtype`; returns the outputs as
    # the op does. It may read only shapes and types of intermediate tensors: `explain` and `warm_up` run it without
    # values.
    compute: Callable[..., Any]


class Op(Warm):
    """One fused GEMM: D = epilogue(A @ B, inputs).

    `instead` serves calls that no single kernel serves. `made_by` is a key of ``portable.MAKERS`` and its argument,
    which make this op again in another process; by default the epilogue does. `math` says how FP32 operands are
    multiplied or how sums of FP8 products are added up; by default the op takes no FP32 operands, and K decides the
    latter.
    """

    form: Form = DENSE  # of calls whose B has two dimensions

    def __init__(
        self,
        name: str,
        epilogue: Epilogue,
        instead: Instead | None = None,
        made_by: tuple[str, Any] | None = None,
        math: Math | None = None,
    ) -> None:
        super().__init__(name, epilogue.graph, self.form)
        self.epilogue = epilogue
        self.math = math
        self.autocasts = math is None  # a call that names its arithmetic gets it
        self.products = self.graph.products
        self.__doc__ = described.docstring(epilogue)
        self._instead = instead
        how, plain = made_by or ("epilogue", self.graph.to_program())
        if math is not None:
            how, plain = "math", {"math": math, how: plain}
        self.about = portable.register(name, self.graph, self, how, plain, self.form)
        self.__signature__ = described.signature(self.names)

    def __repr__(self) -> str:
        return f"<op {self.name}({', '.join(('a', 'b', *self.names))})>"

    def of(self, graph: Graph) -> Op:
        """Return the op of another epilogue."""
        return op_of_graph(graph, self.math)

    def why_not(self, graph: Graph, dtype: torch.dtype) -> str | None:  # noqa: D102
        return doubles.why_not(graph) if dtype == torch.float64 else None

    def in_math(self, math: Math) -> Op:  # noqa: D102
        if not isinstance(math, str):
            raise TypeError(f"math must be a name such as 'tf32', not a {type(math).__name__}")
        return op_in_math(self.program_name, math)

    def made_in_math(self, math: Math, made_by: tuple[str, Any]) -> Op:
        """Return a new op like this one, in some math: see :func:`op_in_math`."""
        instead = None if self._instead is None else _instead_in_math(self._instead, math)
        return Op(self.name, self.epilogue, instead, made_by, math)

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device for checked arguments."""
        loader.prepare()
        call = self.checked_call(a, b, inputs, None, out_dtype)
        # The device of a tracer's tensor: within the operator, PyTorch says that it is on "meta".
        where = getattr(a, "fake_device", None)
        if where is not None and where.type == "cuda":
            from cutlass_ops.run import cold

            cold.announce(self, a, b, inputs, out_dtype, where)
        # A tracer's tensors have no addresses, and its errors would hide ours.
        if watching.only_shapes((a, b)) and not watching.needs_operator(a):
            call.check_layouts()
        return call.results()

    def plan(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: Math | None = None,
        **named: Any,
    ) -> Decision:
        """Return the decision for a call with these arguments, without compiling, loading or running anything.

        Raises the errors of the call itself, and UnsupportedError if no single kernel serves it.
        :func:`cutlass_ops.explain` says whether other ops do.
        """
        if math is not None:
            return self.in_math(math).plan(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        return self._decide(self.checked(a, b, inputs, named, out, out_dtype))

    def warm_up(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: Math | None = None,
        **named: Any,
    ) -> int:
        """Compile and load every kernel that calls with a weight may need; :func:`warm_up` adds a backward's."""
        if math is not None:
            return self.in_math(math).warm_up(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        call = self.checked(a, b, inputs, named, out, out_dtype)
        return Registry.current().ready(self._specs_for(call), call.arguments.a.device)

    def specs_of(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: Math | None = None,
        **named: Any,
    ) -> tuple[KernelSpec, ...]:
        """Return every kernel that calls of this op with a weight may need; none for tensors on the CPU."""
        if math is not None:
            return self.in_math(math).specs_of(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        return self._specs_for(self.checked(a, b, inputs, named, out, out_dtype))

    def prepare_launch(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: Math | None = None,
        **named: Any,
    ) -> Launch:
        """Prepare calls with these tensors: see :func:`prepare_launch`."""
        if math is not None:
            return self.in_math(math).prepare_launch(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        from cutlass_ops.run import launch  # late: few programs prepare launches

        values = self.positional(inputs, named)
        launch.check(self, a, b, values, out)
        call = self.checked_call(a, b, values, out, out_dtype)
        launch.require_given(self, call.tensors(), (a, b, values, call.outputs), launch.COPY)
        if call.is_reference:
            refusals.require(self.name, call, self.instead_of)
            refusals.say(self.name, call.problem, refusals.BY_PYTORCH)
            if call.why_apart is not None and 0 not in call.problem:
                raise UnsupportedError(_no_launch(self.name, call.why_apart))  # as on a device
        return launch.make(self, None if call.is_reference else self._best_plan(call), call, (a, b, *values))

    def _best_plan(self, call: Call) -> Plan:
        """Return the plan of the best kernel for a call, even if it has to be compiled."""
        try:
            decision = self._decide(call)
        except UnsupportedError as exc:
            why = self.why_instead(call)
            if not why:
                raise
            raise UnsupportedError(_no_launch(self.name, why)) from exc
        # A prepared launch keeps this kernel even for other tensors.
        plan = make_plan(self.name, decision.spec, decision.order, call)
        return replace(plan, misaligned=False)

    def instead_of(self, call: Call) -> list[tuple[Op, Call]]:
        """Return the fallback ops of a checked call, each with its own checked call; an empty list if there are none.

        Nothing is computed: intermediate tensors have no values. If each batch takes a call, the first batch's is
        returned.
        """
        if call.why_apart is not None:
            call.check_layouts()
            return [(self, part) for part in itertools.islice(call.parts(), 1)]
        found: list[tuple[Op, Call]] = []

        def noted(op: Op, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, out_dtype: Any = None) -> Any:
            part = op.checked_call(a, b, inputs, out, out_dtype)
            found.append((op, part))
            return op.wrap(part)

        if self._instead is not None:
            checked = call.arguments
            arguments = (checked.a, checked.b, *checked.inputs.values())
            d = call.outputs[0]
            out = None if call.given[0] is None else d
            self._instead.compute(noted, *arguments, out=out, out_dtype=d.dtype)
        return found

    def why_instead(self, call: Call) -> str:
        """Return the reason for a call's fallback ops, for users; empty if there are none."""
        return call.why_apart or ("" if self._instead is None else self._instead.why)

    def checked(
        self, a: Any, b: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], out: Any, out_dtype: torch.dtype | None
    ) -> Call:
        """Check a call's arguments as the call itself does. Raises TypeError or ValueError that names an argument."""
        return self.checked_call(a, b, self.positional(inputs, named), out, out_dtype)

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        named = dict(zip(self.names, inputs, strict=True))
        return check_call(self.graph, a, b, named, out, out_dtype, math=self.math)

    def _specs_for(self, call: Call) -> tuple[KernelSpec, ...]:
        """Return every kernel that a call's weight may need, each once, including those of fallback ops."""
        if call.is_reference:
            return ()
        try:
            decision = self._decide(call)
        except UnsupportedError:
            if not self.why_instead(call):
                raise
        else:
            return decision.specs
        parts = (op._specs_for(part) for op, part in self.instead_of(call))
        return tuple(dict.fromkeys(spec for specs in parts for spec in specs))

    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = self.checked_call(a, b, inputs, out, out_dtype)
        call.refuse_differentiated()
        self.copied_inputs += len(call.arguments.copied)
        if call.is_reference:
            refusals.require(self.name, call, self.instead_of)
            refusals.say(self.name, call.problem, refusals.BY_PYTORCH)
            call.run_reference()
            return self.wrap(call)
        if call.why_apart is not None or call.arguments.is_folded:
            return self._run_parts(call)
        results = self._run_spread(call, a, b, out, out_dtype)
        if results is not None:
            return results
        try:
            found = self._served(call)
        except UnsupportedError:
            if self._instead is None:
                raise
            what = f"no single kernel serves, so several ops do: {self._instead.why}"
            refusals.say(self.name, call.problem, what)
            compute = functools.partial(self._instead.compute, _call)
            from cutlass_ops.run import fallbacks  # late: few calls need several ops

            of_d = call.outputs[0].dtype
            self._remember(fallbacks.by_ops(compute, (a, b, *inputs), of_d, self.outputs), call, a, b, out_dtype)
            # Take the same path as later calls, so that each op remembers its part.
            return compute(a, b, *inputs, out=fallbacks.as_out(self.outputs, call.given), out_dtype=of_d)
        if found.plan is not None:
            found.plan.launch_call(call)
            self.copied_operands += found.plan.copies
            self._remember(found.plan, call, a, b, out_dtype, found.rows)
            return self.wrap(call)
        if found.awaited is not None:
            refusals.say(self.name, call.problem, "PyTorch serves until the kernel is there")
        from cutlass_ops.run import composition, fallbacks  # late: once all kernels are there, nobody needs these

        composition.run(call)
        self.served_by_pytorch += 1
        plan = fallbacks.by_pytorch(call, a, b, inputs, found.awaited, found.failed)
        if plan is not None:
            self._remember(plan, call, a, b, out_dtype, found.rows, found.awaited)
        return self.wrap(call)

    def _run_parts(self, call: Call) -> Any:
        """Run a call with batches as calls that kernels know: one GEMM each, or fewer dimensions of batches."""
        apart = call.why_apart
        if apart is not None:
            call.check_layouts()  # check all batches before some are computed
            refusals.say(self.name, call.problem, apart)
        for part in call.parts() if apart is not None else (call,):
            of_part = part.arguments
            out = part.outputs[0] if len(part.outputs) == 1 else dict(zip(self.outputs, part.outputs, strict=True))
            self.run_plain(of_part.a, of_part.b, tuple(of_part.inputs.values()), out, None)
        return self.wrap(call)

    def _served(self, call: Call) -> Served:
        """Return what serves a call."""
        from cutlass_ops.run import cold  # late: importing the library should not import the choice of kernels

        return cold.plan(self.name, call)

    def _decide(self, call: Call) -> Decision:
        """Decide what serves a call. Raises UnsupportedError if no single kernel does."""
        from cutlass_ops.run import cold

        return cold.decided(self.name, call)


def _no_launch(name: str, why: str) -> str:
    return f"{name}: {why}, and a prepared launch is one kernel: call the op itself"


def _call(op: Op, *arguments: Any, **named: Any) -> Any:
    return op(*arguments, **named)


# ---- Construction ------------------------------------------------------------------------------------------------


def graph_op(
    name: str,
    graph: Graph,
    doc: str = "",
    instead: Instead | None = None,
    made_by: tuple[str, Any] | None = None,
    math: Math | None = None,
) -> Op:
    """Return the op of a composed graph. Other parameters as for :class:`Op`."""
    return Op(name, Epilogue(name, doc, graph), instead, made_by, math)


def op(epilogue: Epilogue) -> Op:
    """Return the op of an epilogue. Equal epilogues with the same name and docstring give the same op."""
    return _op(epilogue.name, epilogue.doc, epilogue)


@traced.remembered
def _op(name: str, doc: str, epilogue: Epilogue) -> Op:
    return Op(name, epilogue)


@functools.lru_cache(maxsize=1024)
def op_of_graph(graph: Graph, math: Math | None = None) -> Op:
    """Return the op of a graph. Equal graphs give the same op."""
    return graph_op(graph.title or "gemm", graph, math=math)


@traced.remembered
def op_in_math(op: str, math: Math) -> Op:
    """Return the op that multiplies FP32 or FP8 operands in a given way, from the string that names another op.

    Raises TypeError if the way does not exist, or if the op has one already.
    """
    if math not in MATHS and math not in ACCUMULATIONS:
        raise TypeError(
            f"math is {math!r}: use {' or '.join(map(repr, MATHS))} for torch.float32 operands, "
            f"{' or '.join(map(repr, ACCUMULATIONS))} for FP8"
        )
    found = portable.find(op)
    assert isinstance(found, Op)
    if found.math is not None:
        raise TypeError(f"math is {math!r}, and {found.name} has math {found.math!r}: omit math")
    return found.made_in_math(math, portable.maker_of(op))


def _instead_in_math(instead: Instead, math: Math) -> Instead:
    """Return fallback ops that also multiply FP32 operands in a type."""

    def compute(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return instead.compute(lambda op, *given, **more: call(op.in_math(math), *given, **more), *arguments, **named)

    return Instead(instead.why, compute)


def in_math_again(name: str, plain: Any) -> Op:
    """Make an op again that multiplies FP32 operands in some type: see ``portable.MAKERS``."""
    math = plain["math"]
    return op_in_math(portable.named(name, {how: of for how, of in plain.items() if how != "math"}), math)


def op_of(epilogue: Epilogue | Callable[[Value], Any] | None) -> Op:
    """Return the op that :func:`gemm` runs for an epilogue. Raises TypeError if `epilogue` is not one."""
    if epilogue is None:
        return PLAIN
    if isinstance(epilogue, Graph):
        raise TypeError("epilogue is a graph: pass cutlass_ops.epilogue(graph)")
    if isinstance(epilogue, Op):
        raise TypeError(f"epilogue is the op {epilogue.name}: call that op itself, or pass its attribute epilogue")
    return op(epilogue_given(epilogue))


# The named ops (run/named.py) take tracing their epilogues. This one takes none.
PLAIN = Op("gemm", Epilogue("identity", "D = A @ B.", Graph((), (Node("acc"),), (Output("d", 0),))))
