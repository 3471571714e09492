"""Ops: a GEMM with an epilogue, served by the best kernel there is for a call."""

from __future__ import annotations

import functools
import itertools
import logging
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
from cutlass_ops.epilogue import Epilogue, doubles
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Node, Output
from cutlass_ops.run import described, operators, portable, served, traced, watching  # noqa: F401 - the second registers operators
from cutlass_ops.run.call import Call, check_call
from cutlass_ops.run.plan import Plan, make_plan
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.warm import Warm

if TYPE_CHECKING:
    from cutlass_ops.choose.dispatch import Decision
    from cutlass_ops.run.fallbacks import PeerPlan
    from cutlass_ops.run.launch import Launch
    from cutlass_ops.run.rows import Rows
    from cutlass_ops.run.supply import Supply

_log = logging.getLogger("cutlass_ops")


class Instead(NamedTuple):
    """Other ops that compute a call that no single kernel serves.

    Attributes
    ----------
    why : str
        The reason, for users.
    compute : callable
        Takes a function that calls an op, then the call's arguments with `out` and `out_dtype`; returns the outputs as
        the op does. It may read only shapes and types of intermediate tensors: `explain` and `warm_up` run it without
        computing values.
    """

    why: str
    compute: Callable[..., Any]


class Op(Warm):
    """One fused GEMM: D = epilogue(A @ B, inputs).

    Parameters
    ----------
    name : str
        Name in messages.
    epilogue : Epilogue
        Function of the FP32 accumulator and the inputs.
    instead : Instead, optional
        Fallback for calls that no single kernel serves.
    made_by : pair of str and plain value, optional
        What makes this op again in another process, a key of ``portable.MAKERS``, and its argument. The default
        rebuilds an op from its epilogue.
    math : str, optional
        What the Tensor Cores make of FP32 operands, or how sums of FP8 products are added up. The default takes no FP32
        operands, and chooses the latter by K.
    called : mapping of str to str, optional
        What a function that calls this op calls its arguments, for messages.
    """

    form: Form = DENSE  # of calls whose B has two dimensions

    def __init__(
        self,
        name: str,
        epilogue: Epilogue,
        instead: Instead | None = None,
        made_by: tuple[str, Any] | None = None,
        math: Math | None = None,
        called: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, epilogue.graph, self.form)
        self.epilogue = epilogue
        self.math = math
        self.autocasts = math is None  # a call that names its arithmetic is served in it
        self.products = self.graph.products
        self.__doc__ = described.docstring(epilogue)
        self._instead, self._called = instead, called or {}
        if self._called:
            self.whose = f" ({name}: {', '.join(f'{ours} is {theirs}' for ours, theirs in self._called.items())})"
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

    def why_no_gradient(self, dtype: torch.dtype) -> str | None:  # noqa: D102
        return doubles.why_no_gradient(self.graph) if dtype == torch.float64 else None

    def why_not(self, graph: Graph, dtype: torch.dtype) -> str | None:  # noqa: D102
        return doubles.why_not(graph) if dtype == torch.float64 else None

    def in_math(self, math: Math) -> Op:  # noqa: D102
        if not isinstance(math, str):
            raise TypeError(f"math must be a name such as 'tf32', not a {type(math).__name__}")
        return op_in_math(self.about.split(";", 4)[4], math)

    def made_in_math(self, math: Math, made_by: tuple[str, Any]) -> Op:
        """Return a new op like this one, in some math: see :func:`op_in_math`."""
        instead = None if self._instead is None else _instead_in_math(self._instead, math)
        return Op(self.name, self.epilogue, instead, made_by, math, self._called)

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device for checked arguments."""
        loader.prepare()
        call = self.checked_call(a, b, inputs, None, out_dtype)
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

        Raises
        ------
        TypeError, ValueError
            As the call itself.
        UnsupportedError
            If no single kernel serves the call. :func:`cutlass_ops.explain` says whether other ops do.
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
        """Compile and load every kernel that calls of this op with a weight may need: see :func:`warm_up`.

        Those of a backward are left out, which that function adds.
        """
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
            served.require(self.name, call, self.instead_of)
            if call.why_apart is not None and 0 not in call.problem:
                raise UnsupportedError(_no_launch(self.name, call.why_apart))  # as on a device
        return launch.make(self, None if call.is_reference else self._best_plan(call), call, (a, b, *values))

    def _best_plan(self, call: Call) -> Plan:
        """Return the plan of the best kernel for a call, whatever has to be compiled for it."""
        try:
            decision = self._decide(call)
        except UnsupportedError as exc:
            why = self.why_instead(call)
            if not why:
                raise
            raise UnsupportedError(_no_launch(self.name, why)) from exc
        decision.finish()  # as `warm_up` does
        # Of other tensors, no other kernel serves.
        plan = make_plan(self.name, decision.spec, decision.order, call)
        return replace(plan, way=replace(plan.way, misaligned=False))

    def instead_of(self, call: Call) -> list[tuple[Op, Call]]:
        """Return the fallback ops of a checked call, each with its own checked call; an empty list if there are none.

        Nothing is computed: intermediate tensors have no values. Of batches that take a call each, it is the first
        one's.
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
        """Check a call's arguments as the call itself does.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message names it.
        """
        return self.checked_call(a, b, self.positional(inputs, named), out, out_dtype)

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        named = dict(zip(self.names, inputs, strict=True))
        try:
            return check_call(self.graph, a, b, named, out, out_dtype, math=self.math)
        except (TypeError, ValueError) as exc:
            if not self.whose or type(exc) not in (TypeError, ValueError):
                raise
            raise type(exc)(f"{exc}{self.whose}") from None

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
            decision.finish()
            return decision.specs
        parts = (op._specs_for(part) for op, part in self.instead_of(call))
        return tuple(dict.fromkeys(spec for specs in parts for spec in specs))

    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = self.checked_call(a, b, inputs, out, out_dtype)
        call.refuse_differentiated()
        self.copied_inputs += len(call.arguments.copied)
        if call.is_reference:
            served.require(self.name, call, self.instead_of)
            call.run_reference()
            return self.wrap(call)
        if call.why_apart is not None or call.arguments.is_folded:
            return self._run_parts(call)
        results = self._run_spread(call, a, b, out, out_dtype)
        if results is not None:
            return results
        try:
            plan, supplied, rows = self._plan(call)
        except UnsupportedError:
            if self._instead is None:
                raise
            _log.info("%s: no single kernel serves, so several ops do: %s", self.name, self._instead.why)
            compute = functools.partial(self._instead.compute, _call)
            from cutlass_ops.run import fallbacks  # late: few calls need several ops

            ops = fallbacks.make_ops_plan(compute, (a, b, *inputs), call.outputs[0].dtype, self.outputs)
            self._remember(ops, call, a, b, out_dtype)
            # The same path as later calls take, so that each op remembers its part.
            return compute(a, b, *inputs, out=fallbacks.as_out(self.outputs, call.given), out_dtype=ops.out_dtype)
        plan.launch_call(call)
        self.copied_operands += plan.copies
        self._remember(plan, call, a, b, out_dtype, rows)
        if supplied is not None:
            supplied.until_it_is_there(call.arguments.a.device, functools.partial(self._forget, plan))
        return self.wrap(call)

    def _run_parts(self, call: Call) -> Any:
        """Run a call with batches as calls of what kernels know: one GEMM each, or fewer dimensions of batches."""
        apart = call.why_apart
        if apart is not None:
            call.check_layouts()  # before some batches are computed, of all of them
            _log.info("%s: %s", self.name, apart)
        for part in call.parts() if apart is not None else (call,):
            of_part = part.arguments
            out = part.outputs[0] if len(part.outputs) == 1 else dict(zip(self.outputs, part.outputs, strict=True))
            self.run_plain(of_part.a, of_part.b, tuple(of_part.inputs.values()), out, None)
        return self.wrap(call)

    def _plan(self, call: Call) -> tuple[Plan | PeerPlan, Supply | None, Rows | None]:
        """Return a plan for a call, ready to run, and what plans others like it. A missing kernel is built."""
        from cutlass_ops.run import serving  # late: the import of the library should not wait for what chooses

        return serving.plan(self.name, call)

    def _decide(self, call: Call) -> Decision:
        """Decide what serves a call.

        Raises
        ------
        UnsupportedError
            If no single kernel does.
        """
        from cutlass_ops.run import serving

        return serving.decided(self.name, call)


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
    called: Mapping[str, str] | None = None,
) -> Op:
    """Return the op of a composed graph. Other parameters as for :class:`Op`."""
    return Op(name, Epilogue.of(name, doc, graph), instead, made_by, math, called)


@traced.remembered
def op(epilogue: Epilogue) -> Op:
    """Return the op of an epilogue. Equal epilogues give the same op."""
    return Op(epilogue.name, epilogue)


@functools.lru_cache(maxsize=1024)
def op_of_graph(graph: Graph, math: Math | None = None) -> Op:
    """Return the op of a graph. Equal graphs give the same op."""
    return graph_op(graph.title or "gemm", graph, math=math)


@traced.remembered
def op_in_math(op: str, math: Math) -> Op:
    """Return the op that multiplies FP32 or FP8 operands in a way, for the string that names another in programs.

    Raises
    ------
    TypeError
        If there is no such way, or the op has one already.
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
    """Return other ops that multiply FP32 operands in a type as well."""

    def compute(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return instead.compute(lambda op, *given, **more: call(op.in_math(math), *given, **more), *arguments, **named)

    return Instead(instead.why, compute)


def in_math_again(name: str, plain: Any) -> Op:
    """Make an op again that multiplies FP32 operands in some type: see ``portable.MAKERS``."""
    math = plain["math"]
    return op_in_math(portable.named(name, {how: of for how, of in plain.items() if how != "math"}), math)


def op_of(epilogue: Epilogue | None) -> Op:
    """Return the op that :func:`gemm` runs for an epilogue.

    Raises
    ------
    TypeError
        If `epilogue` is not one.
    """
    if epilogue is None:
        return PLAIN
    if isinstance(epilogue, Graph):
        raise TypeError("epilogue is a graph: pass cutlass_ops.epilogue(graph)")
    if isinstance(epilogue, Op):
        raise TypeError(f"epilogue is the op {epilogue.name}: call that op itself, or pass its attribute epilogue")
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"epilogue must be a function decorated with @cutlass_ops.epilogue, not {type(epilogue).__name__}"
        )
    return op(epilogue)


# ---- A GEMM with any epilogue ------------------------------------------------------------------------------------

# The named ops (run/named.py) take tracing their epilogues. This one takes none.
PLAIN = Op("gemm", Epilogue.of("identity", "D = A @ B.", Graph((), (Node("acc"),), (Output("d", 0),))))


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    epilogue: Epilogue | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    math: Math | None = None,
    **inputs: Any,
) -> Any:
    """Compute D = epilogue(A @ B, inputs) in one kernel.

    Parameters
    ----------
    a : Tensor
        (..., M, K), FP16, BF16, INT8, FP64, FP8, or FP32 with `math`. FP8 is row-major; other types have either major
        and any stride between lines. If b has two dimensions, leading dimensions are folded into M. The epilogue
        computes in FP32, or in FP64 for FP64. On Hopper, INT8 that is not contiguous along K is copied at each call,
        and so is TF32 if that is faster. In batches, and on Ampere and Ada, INT8 must be contiguous along K.
    b : Tensor
        (K, N), the same dtype, or either type of FP8, column-major, if a is FP8. Pass a weight (N, K) as
        ``weight.t()``. With leading dimensions, (..., K, N), there is one GEMM for each batch: leading dimensions of a
        and b broadcast as in ``torch.matmul``. They must fold into two dimensions.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`. Default: D = A @ B.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name.
    out_dtype : torch.dtype, optional
        D's dtype: FP16, BF16 or FP32, and on Hopper FP8, which saturates. Default: that of ``a``, or BF16 for FP8 and
        INT8. With FP64 operands, D is FP64. With INT8 operands, D may also be INT8, which saturates, rounds to nearest
        even and turns NaN into 0. It may be INT32, the sums themselves, if the `epilogue` returns only ``acc``.
    math : {"tf32", "3xtf32", "fast", "promoted"}, optional
        For FP32 operands, which Tensor Cores cannot multiply directly: ``"tf32"`` rounds them to 10 bits of fraction;
        ``"3xtf32"`` splits each into two such numbers and adds up three products, at a third of the speed or less. For
        FP8 operands, how products are added up: ``"fast"`` by the Tensor Cores alone; ``"promoted"`` also in FP32,
        after every 128 elements along K. Default for FP8: ``"promoted"`` for K above 128, or above 512 if all results
        are FP8. Other operands take no `math`.
    **inputs
        The epilogue's inputs by name: Row (N,), Col (M,), Tile (M, N), Scalar a number or a tensor of one element,
        Product (K, N) of ``b``'s dtype and major, Integer an int or an integer tensor of one element. With batches, an
        input may have batch dimensions before its own; they broadcast. A row may have leading dimensions of 1, a column
        a last dimension of 1, and a tile 1 for M or N. Inputs with a stride of 0 are copied at each call.

    Returns
    -------
    Tensor or named tuple
        D (..., M, N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> a = torch.ones(2, 8).bfloat16()  # (M, K)
    >>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)
    >>> co.gemm(a, b).tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    >>> @co.epilogue
    ... def scaled(acc, bias: co.Row, scale: co.Scalar):
    ...     return (acc + bias) * scale
    >>> bias = torch.tensor([0.0, 1.0, 2.0]).bfloat16()
    >>> co.gemm(a, b, epilogue=scaled, bias=bias, scale=0.5, out_dtype=torch.float32).tolist()
    [[4.0, 4.5, 5.0], [4.0, 4.5, 5.0]]

    Batches, each with its own bias:

    >>> q, k = torch.ones(2, 4, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16()
    >>> co.gemm(q, k.mT, epilogue=scaled, bias=torch.zeros(2, 3).bfloat16(), scale=0.5).shape
    torch.Size([2, 4, 3])

    Exact sums of INT8 products, and their quantisation:

    >>> x, w = torch.full((1, 16), 127, dtype=torch.int8), torch.full((2, 16), 2, dtype=torch.int8)
    >>> co.gemm(x, w.t(), out_dtype=torch.int32).tolist()
    [[4064, 4064]]
    >>> co.gemm(x, w.t(), epilogue=scaled, bias=torch.tensor([-4000.0, 0.0]), scale=0.1, out_dtype=torch.int8).tolist()
    [[6, 127]]

    An epilogue with further outputs gives a named tuple:

    >>> @co.epilogue
    ... def with_sums(acc):
    ...     return {"d": co.e.relu(acc), "row_sum": co.e.sum(acc, dim=1)}
    >>> d, row_sum = co.gemm(a, b, epilogue=with_sums)
    >>> row_sum.tolist()
    [24.0, 24.0]
    """
    return op_of(epilogue)(a, b, out=out, out_dtype=out_dtype, math=math, **inputs)
