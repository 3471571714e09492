"""Warm calls: calls at shapes seen before reuse a plan without checking arguments in Python.

A warm call is one dictionary look-up, an allocation for each missing output, and one foreign call. The kernel itself
checks every argument. If it refuses, the slow path finds another kernel or raises an error.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cutlass_ops.base import arch, session
from cutlass_ops.base.mma import Math
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import casting, portable, traced, watching
from cutlass_ops.run.call import Call
from cutlass_ops.run.inputs import integer, scalar
from cutlass_ops.run.plan import AnyPlan, Given, Plan
from cutlass_ops.run.results import Outputs
from cutlass_ops.run.scalars import BEYOND_FP32

if TYPE_CHECKING:
    from cutlass_ops.run.rows import Rows

# Bound here for warm calls: looking them up in their modules takes as long as calling them.
_is_traced = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _jit_tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state

_autocast_enabled = torch._C._is_any_autocast_enabled

_LINE = arch.TMA_ALIGNMENT_BYTES

# Shapes that an op remembers: enough for every M up to 8192 at a few weights.
_MAX_PLANS = 1 << 16
# Plans for one shape: calls may differ in majors, alignments or dtypes of inputs.
_PLANS_A_SHAPE = 8

_ALL: weakref.WeakSet[Warm] = weakref.WeakSet()


class Warm(portable.Portable):
    """Base of ops and exact kernels: remembers how a call was served and serves like calls the same way.

    Parameters
    ----------
    name : str
        Name in messages.
    graph : Graph
        The epilogue.
    form : Form
        How the GEMMs of a call belong together. Its operands are taken as inputs before the epilogue's.

    Attributes
    ----------
    served_warm : int
        Calls that a remembered plan served. Both counts are approximate if threads call at the same time.
    refused_warm : int
        Calls at known shapes that no remembered plan took, since an alignment, a major or a dtype differs. Each took
        the slow path.
    copied_inputs : int
        Inputs that were copied because they repeat values, as broadcast ones do. No kernel reads them so.
    copied_operands : int
        Matrices that kernels copied ahead of multiplying them, since TMA or ``wgmma`` cannot read them as they lie.
        Launches that were prepared, or captured in a CUDA graph, are not counted again.
    """

    # Whether torch.autocast decides the operands' dtype.
    autocasts = True
    # What a function that calls this op calls a, b and inputs, in parentheses, for messages.
    whose = ""

    def __init__(self, name: str, graph: Graph, form: Form = DENSE) -> None:
        self.name = self.__name__ = name
        self.graph = graph
        self.names = (*form.operands, *(i.name for i in graph.inputs))
        self.outputs = tuple(o.name for o in graph.outputs)
        self.served_warm = self.refused_warm = self.copied_inputs = self.copied_operands = 0
        readers = {Kind.SCALAR: scalar, Kind.INTEGER: integer}
        # Of inputs that are numbers: the name, and what looks at one.
        self._scalars = (None,) * len(form.operands) + tuple(
            (i.name, readers[i.kind]) if i.kind in readers else None for i in graph.inputs
        )
        # Where they are, and the type that needs no look.
        self._numbers = tuple(
            (at, float if of[1] is scalar else None) for at, of in enumerate(self._scalars) if of is not None
        )
        self._columns = tuple(len(form.operands) + at for at, i in enumerate(graph.inputs) if i.kind is Kind.COL)
        self._has_one_output = len(self.outputs) == 1
        self._count, self._input_names = len(self.names), frozenset(self.names)
        self._output_names = frozenset(self.outputs)
        self._others_not_given = (None,) * (len(self.outputs) - 1)
        self._plans: dict[tuple[Any, ...], _Weight] = {}
        self._remembered = 0  # shapes, those included that have been replaced
        _ALL.add(self)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: Math | None = None,
        **named: Any,
    ) -> Any:
        """Run it. Its own documentation has shapes and errors."""
        if math is not None:
            return self.in_math(math)(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        if _is_traced():
            return traced.Traced(self.about)(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        if named or len(inputs) != self._count:
            if inputs or named.keys() != self._input_names:
                inputs = self.positional(inputs, named)
            else:
                inputs = tuple(map(named.__getitem__, self.names))
        for at, plain in self._numbers:
            if type(inputs[at]) is not plain:
                inputs = self.numbers(inputs)
                break
        if _autocast_enabled() and self.autocasts:
            a, b, inputs = casting.autocast(a, b, inputs, self.names, self.graph.products)
        # watching.is_watched(), inlined for speed.
        watched = _dispatch_modes() or _transforms() is not None or _jit_tracer() is not None
        if not watched and not (_function_modes() and watching.is_watched()):
            results = self._run_warm(a, b, inputs, out, out_dtype)
            if results is not None:
                return results
        if traced.is_elsewhere(a, b, inputs, out):
            return traced.detour(self, a, b, inputs, out, out_dtype)
        return self._run_cold(a, b, inputs, out, out_dtype)

    def run_plain(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it on tensors with memory of their own, even if something watches this thread's operators."""
        results = self.run_warm(a, b, inputs, out, out_dtype)
        return self.run_new(a, b, inputs, out, out_dtype) if results is None else results

    def run_warm(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it by a remembered plan; None if there is none, or if its arguments need checking."""
        return self._run_warm(a, b, self.numbers(inputs), out, out_dtype)

    def run_new(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Check a call's arguments, serve it, and remember how."""
        return self._run_cold(a, b, self.numbers(inputs), out, out_dtype)

    def numbers(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return inputs with those that are numbers as a kernel takes them."""
        if not self._numbers:
            return inputs
        return tuple(x if of is None else of[1](of[0], x) for of, x in zip(self._scalars, inputs, strict=True))

    def in_math(self, math: Math) -> Any:
        """Return what multiplies FP32 operands in another type: see ``math`` of :func:`cutlass_ops.gemm`.

        Raises
        ------
        TypeError
            If nothing does.
        """
        raise TypeError(f"{self.name} takes no math: omit it. Ops such as cutlass_ops.gemm take math")

    @abstractmethod
    def checked_call(
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        """Check a call's arguments, the inputs by position, and allocate missing outputs.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message names it.
        """

    @abstractmethod
    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Check a call, serve it, and remember how."""

    def positional(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return inputs given by position and by name in the epilogue's order.

        Raises
        ------
        TypeError
            If one is missing, unknown or given twice.
        """
        try:
            return portable.bind(self.name, self.names, inputs, named)
        except TypeError as exc:
            raise TypeError(f"{exc}{self.whose}") from None

    def wrap(self, call: Call) -> Any:
        """Return a call's results to the caller: D, or a named tuple with D first."""
        results = call.results()
        return results[0] if len(results) == 1 else Outputs(self.outputs, results)

    def _run_warm(self, a: Any, b: Any, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run a call by a remembered plan; None if there is none, or if its arguments need checking."""
        # Inlined: a function call for each argument would cost as much as the rest.
        grad = _grad_enabled()
        for x in (a, b, *inputs):
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                if (grad and x.requires_grad) or x.is_neg():
                    return None
            elif kind is float:
                if (x >= BEYOND_FP32 or x <= -BEYOND_FP32) and not isinf(x):
                    return None
            elif kind is not int:
                return None
        given: Given = None
        dtypes: Any = out_dtype
        if type(out) is Tensor:
            dtypes = out.dtype
            if out_dtype is not None and dtypes != out_dtype:
                return None
            given = (out,) if self._has_one_output else (out, *self._others_not_given)
        elif out is not None:
            given = self._given_by_name(out, out_dtype)
            if given is None:
                return None
            dtypes = _dtypes(given, out_dtype)
        try:
            # A kernel counts a column's elements, however they lie: (1, M) may be meant as a row.
            for at in self._columns:
                x = inputs[at]
                if x.ndim > 1 and x.shape[-1] != 1 and x.shape != a.shape[:-1]:
                    return None
            key = b.shape, a.dtype, dtypes, a.get_device()
            weight = self._plans.get(key)
            plan = None if weight is None else weight.plans.get(a.shape)
            # Where several plans are, the kernels that ask least come last, and the others may refuse.
            low = isinstance(plan, tuple) and (a.data_ptr() | b.data_ptr()) % _LINE
        # Not a tensor, or one without shape or memory; or something else than a dtype.
        except (AttributeError, RuntimeError, TypeError):
            return None
        if weight is None:
            return None
        if plan is None:
            return self._run_at_other_rows(key, weight.rows, a, b, inputs, given)
        if isinstance(plan, tuple):
            results, copies = _run_one_of(plan[::-1] if low else plan, a, b, inputs, given, bool(low))
        else:
            results, copies = plan.run(a, b, inputs, given), plan.copies
        if results is None:
            self.refused_warm += 1
            return None
        self.served_warm += 1
        self.copied_operands += copies
        return results[0] if self._has_one_output else Outputs(self.outputs, results)

    def _run_at_other_rows(
        self, key: tuple[Any, ...], rows: Rows | None, a: Any, b: Any, inputs: tuple[Any, ...], given: Given
    ) -> Any:
        """Run a call whose number of rows is new, and remember how; None if it needs checking."""
        plan = None if rows is None else rows.plan(a.shape)
        results = None if plan is None else plan.run(a, b, inputs, given)
        if rows is None or plan is None or results is None:
            return None
        self.copied_operands += plan.copies
        shape = (*plan.shape[:-1], rows.decision.problem.k)  # a.shape, of numbers that are kept already
        self._weight(key, rows).plans[shape] = plan
        return results[0] if self._has_one_output else Outputs(self.outputs, results)

    def _given_by_name(self, out: Any, out_dtype: torch.dtype | None) -> Given:
        """Return a mapping's tensor for each output; None if it needs checking."""
        # Other mappings take the slow path: telling them apart costs as much.
        if type(out) is not dict or not out.keys() <= self._output_names:
            return None
        given = tuple(map(out.get, self.outputs))
        grad = _grad_enabled()
        for x in given:
            if x is not None and (type(x) is not Tensor or (grad and x.requires_grad) or x.is_neg()):
                return None
        d = given[0]
        return given if d is None or out_dtype is None or d.dtype == out_dtype else None

    def _run_spread(self, call: Call, a: Tensor, b: Tensor, out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run a checked call with broadcast inputs as one like it ran before; None if there was none."""
        arguments = call.arguments
        if not arguments.spread and not arguments.copied:
            return None
        return self._run_warm(a, b, tuple(arguments.inputs.values()), out, out_dtype)

    def _remember(
        self,
        plan: AnyPlan,
        call: Call,
        a: Tensor,
        b: Tensor,
        out_dtype: torch.dtype | None,
        rows: Rows | None = None,
    ) -> None:
        """Remember a plan for calls like this one, and what plans those with other numbers of rows."""
        # The cheap part of what decides the kernel. The kernel checks the rest.
        weight = self._weight((b.shape, a.dtype, _dtypes(call.given, out_dtype), a.get_device()), rows)
        others = [p for p in _each(weight.plans.get(a.shape)) if not p.same_as(plan)]
        # Kernels of low alignment also take aligned operands, and are slower: they come last.
        found = sorted((plan, *others[: _PLANS_A_SHAPE - 1]), key=lambda p: p.alignment, reverse=True)
        weight.plans[a.shape] = tuple(found) if others else plan

    def _weight(self, key: tuple[Any, ...], rows: Rows | None) -> _Weight:
        """Return what is known of a weight, with room for one more plan."""
        self._remembered += 1
        if self._remembered > _MAX_PLANS:
            self._plans, self._remembered = {}, 1
        weight = self._plans.setdefault(key, _Weight())
        weight.rows = rows or weight.rows
        return weight

    def _forget(self, plan: AnyPlan) -> None:
        """Have a plan serve no further call. Another thread may call meanwhile."""
        for weight in list(self._plans.values()):
            for shape, plans in list(weight.plans.items()):
                if plans is plan:
                    weight.plans.pop(shape, None)
                elif type(plans) is tuple and plan in plans:
                    weight.plans[shape] = tuple(p for p in plans if p is not plan)


class _Weight:
    """How calls with one weight are served: a plan for each shape of A, or several where calls differ in more."""

    __slots__ = ("plans", "rows")

    def __init__(self) -> None:
        self.plans: dict[tuple[int, ...], AnyPlan | tuple[AnyPlan, ...]] = {}
        self.rows: Rows | None = None


def _each(plans: AnyPlan | tuple[AnyPlan, ...] | None) -> tuple[AnyPlan, ...]:
    if plans is None:
        return ()
    return plans if isinstance(plans, tuple) else (plans,)


def _run_one_of(
    plans: tuple[AnyPlan, ...], a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool
) -> tuple[tuple[Tensor, ...] | None, int]:
    """Run a call by the first plan that takes it. Return the results, and how many matrices it copies."""
    first = plans[0]
    if given is None and type(first) is Plan:
        given = first.new_outputs(a)  # of every plan here, so that a refusal costs no allocation
    for plan in plans:
        results = plan.run(a, b, inputs, given, low)
        if results is not None:
            return results, plan.copies
    return None, 0


def _dtypes(given: Sequence[Tensor | None], out_dtype: torch.dtype | None) -> Any:
    """Return the requested dtypes of outputs: D's, and the others' if any is given.

    They decide the dtypes of allocated outputs.
    """
    d, *others = given
    of_d = out_dtype if d is None else d.dtype
    of_others = tuple(None if x is None else x.dtype for x in others)
    return (of_d, *of_others) if any(of_others) else of_d


def _forget() -> None:
    # Another session has other kernels. A warm call does not ask for the session.
    for each in list(_ALL):
        each._plans, each._remembered = {}, 0


session.forget_at_change(_forget)
