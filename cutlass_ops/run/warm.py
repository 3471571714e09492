"""Warm calls: calls at shapes seen before reuse a plan without checking arguments in Python.

A warm call is one dictionary look-up, an allocation for each missing output, and one foreign call. The kernel itself
checks every argument. If it refuses, the slow path finds another kernel or raises an error.
"""

from __future__ import annotations

import operator
import weakref
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from math import isinf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from cutlass_ops.base import arch, session
from cutlass_ops.base.mma import Math
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import watching
from cutlass_ops.operand.call import Call
from cutlass_ops.operand.inputs import integer, scalar
from cutlass_ops.operand.results import Outputs
from cutlass_ops.operand.scalars import BEYOND_FP32
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run import casting, portable, traced
from cutlass_ops.run.plan import AnyPlan, Given, Plan
from cutlass_ops.run.values import VALUES, Groups

if TYPE_CHECKING:
    from cutlass_ops.run.cold import Rows

# Bound here for warm calls: a look-up in their modules takes as long as a call.
_is_traced = torch.compiler.is_dynamo_compiling
_grad_enabled, _inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled
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
    """Base of ops and exact kernels: remembers how a call was served and serves similar calls in the same way.

    Five counters are approximate if threads call at the same time. `served_warm` counts calls that a remembered plan
    served. `refused_warm` counts calls at known shapes that took the slow path, since an alignment, a major or a dtype
    differs from each plan. `served_by_pytorch` counts calls whose kernel was not there yet, or cannot be had.
    `copied_inputs` counts inputs copied because they repeat values, as broadcast ones do. `copied_operands` counts
    matrices that kernels copied first, since TMA or ``wgmma`` cannot read their layout; replays of prepared launches
    and CUDA graphs are not counted.
    """

    # Whether torch.autocast decides the operands' dtype.
    autocasts = True

    def __init__(self, name: str, graph: Graph, form: Form = DENSE) -> None:
        self.name = self.__name__ = name
        self.graph = graph
        self.names = (*form.operands, *(i.name for i in graph.inputs))
        self.outputs = tuple(o.name for o in graph.outputs)
        self.served_warm = self.served_by_pytorch = self.refused_warm = self.copied_inputs = self.copied_operands = 0
        readers = {Kind.SCALAR: scalar, Kind.INTEGER: integer}
        # For each input that is a number: its name, and the function that reads it.
        self._scalars = (None,) * len(form.operands) + tuple(
            (i.name, readers[i.kind]) if i.kind in readers else None for i in graph.inputs
        )
        # Their positions, and the type that needs no reader.
        self._numbers = tuple(
            (at, float if of[1] is scalar else None) for at, of in enumerate(self._scalars) if of is not None
        )
        self._columns = tuple(len(form.operands) + at for at, i in enumerate(graph.inputs) if i.kind is Kind.COL)
        self._rows = tuple(len(form.operands) + at for at, i in enumerate(graph.inputs) if i.kind is Kind.ROW)
        self._has_one_output = len(self.outputs) == 1
        self._count, self._input_names = len(self.names), frozenset(self.names)
        self._output_names = frozenset(self.outputs)
        self._others_not_given = (None,) * (len(self.outputs) - 1)
        self._plans: dict[tuple[Any, ...], _Weight] = {}
        self._remembered = 0  # shapes, including those that have been replaced
        _ALL.add(self)

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        groups: Groups | None = None,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: Math | None = None,
        **named: Any,
    ) -> Any:
        """Run it. Its own documentation has shapes and errors."""
        if groups is not None or isinstance(a, VALUES) or isinstance(b, VALUES):
            op, tensors = self.flattened(a, b, groups)
            return op(*tensors, *inputs, out=out, out_dtype=out_dtype, math=math, **named)
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
            if self.recorders and out is None and _grad_enabled():
                results = self._run_recorded(a, b, inputs, out_dtype)
                if results is not None:
                    return results
        if any(x is None for x in inputs):
            self.positional(inputs, {})  # the error says what to call
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

    def plans_like(  # noqa: D102
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None
    ) -> Sequence[Plan]:
        given: Given = () if out is None else (out,) if type(out) is Tensor else self._given_by_name(out, out_dtype)
        if self.numbers(inputs) is not inputs or given is None:
            return ()
        weight = self._plans.get((b.shape, a.dtype, _dtypes(given, out_dtype) if given else out_dtype, a.get_device()))
        found = () if weight is None else _each(weight.plans.get(a.shape))
        return found if all(type(plan) is Plan and not plan.misaligned for plan in found) else ()  # type: ignore[return-value]

    def run_new(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Check a call's arguments, serve it, and remember how."""
        return self._run_cold(a, b, self.numbers(inputs), out, out_dtype)

    def numbers(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return inputs with those that are numbers as a kernel takes them."""
        found: list[Any] | None = None
        for at, plain in self._numbers:
            if type(inputs[at]) is not plain:
                name, read = self._scalars[at]  # type: ignore[misc]
                found = list(inputs) if found is None else found
                found[at] = read(name, inputs[at])
        return inputs if found is None else tuple(found)

    def in_math(self, math: Math) -> Any:
        """Return this op with another ``math`` (see :func:`cutlass_ops.gemm`). Raises TypeError if there is none."""
        raise TypeError(f"{self.name} takes no math: omit it. Ops such as cutlass_ops.gemm take math")

    def flattened(self, a: Any, b: Any, groups: Any) -> tuple[Warm, tuple[Any, ...]]:
        """Return the op of a call with operand values, and its tensors. Raises TypeError if there is none."""
        require_tensor("a", a)
        require_tensor("b", b)
        raise TypeError(f"{self.name} takes no groups: pass them to cutlass_ops.gemm")

    @abstractmethod
    def checked_call(
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        """Check arguments, with inputs by position, and allocate outputs. Raises TypeError or ValueError."""

    @abstractmethod
    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Check a call, serve it, and remember how."""

    def positional(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return all inputs in order. Raises TypeError if one is missing, unknown or given twice."""
        return portable.bind(self.name, self.names, inputs, named)

    def wrap(self, call: Call) -> Any:
        """Return a call's results to the caller: D, or a named tuple with D first."""
        results = call.results()
        return results[0] if len(results) == 1 else Outputs(self.outputs, results)

    def _run_warm(self, a: Any, b: Any, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run a call by a remembered plan; None if there is none, or if its arguments need checking."""
        if forward_ad._current_level >= 0:  # an argument may have a tangent
            return None
        # Inlined: a function call for each argument would cost as much as the rest. See watching.is_memory.
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
            if out.is_neg() or (grad and out.requires_grad) or (out_dtype is not None and dtypes != out_dtype):
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
            # If there are several plans, the kernels with the lowest alignment come last, and the others may refuse.
            low = isinstance(plan, tuple) and (a.data_ptr() | b.data_ptr()) % _LINE
        # Not a tensor, or one without shape or memory; or not a dtype.
        except (AttributeError, RuntimeError, TypeError):
            return None
        if weight is None:
            return None
        if plan is None:
            return self._run_at_other_rows(key, weight.rows, a, b, inputs, given)
        if isinstance(plan, tuple):
            results, plan = _run_one_of(plan[::-1] if low else plan, a, b, inputs, given, bool(low))
        else:
            results = plan.run(a, b, inputs, given)
        if results is None:
            flat = self._without_ones(b, inputs)
            if flat is not None:
                return self._run_warm(a, b, flat, out, out_dtype)
            self.refused_warm += 1
            return None
        self.served_warm += 1
        self.served_by_pytorch += plan.by_pytorch
        self.copied_operands += plan.copies
        return results[0] if self._has_one_output else Outputs(self.outputs, results)

    def _without_ones(self, b: Tensor, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return inputs whose rows (1, N) are (N,), as kernels read them; None if there are none."""
        found = list(inputs)
        for at in self._rows:
            x = inputs[at]
            if isinstance(x, Tensor) and watching.is_memory(x) and x.ndim == b.ndim == 2 and len(x) == 1:
                found[at] = x[0]
        return None if all(map(operator.is_, found, inputs)) else tuple(found)

    def _run_recorded(self, a: Any, b: Any, inputs: tuple[Any, ...], out_dtype: torch.dtype | None) -> Any:
        """Run a call that autograd records as a similar call was recorded; None if there was none."""
        if _inference_mode() or forward_ad._current_level >= 0:
            return None
        recorder = self.recorders.get(traced.kind_of_recorded(a, b, inputs, out_dtype))
        if recorder is None:
            return None
        results = recorder(a, b, inputs)
        return results[0] if self._has_one_output else Outputs(self.outputs, results)

    def _run_at_other_rows(
        self, key: tuple[Any, ...], rows: Rows | None, a: Any, b: Any, inputs: tuple[Any, ...], given: Given
    ) -> Any:
        """Run a call whose number of rows is new, and remember how; None if it needs checking."""
        if rows is None:
            return None
        plan = rows.plan(a.shape)
        results = None if plan is None else plan.run(a, b, inputs, given)
        if plan is None or results is None:
            return None
        self.copied_operands += plan.copies
        self.served_by_pytorch += plan.by_pytorch
        if type(plan) is Plan:
            shape = (*plan.d[0][:-1], rows.decision.problem.k)  # a.shape, with numbers that exist already
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
        """Run a checked call with broadcast inputs as a similar call ran before; None if there was none."""
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
        until: Future[Any] | None = None,
    ) -> None:
        """Remember a plan for similar calls until a future is done, and what plans other numbers of rows."""
        # The key is the cheap part of what decides the kernel. The kernel checks the rest.
        weight = self._weight(_key(call, a, b, out_dtype), rows)
        others = [p for p in _each(weight.plans.get(a.shape)) if not p.same_as(plan)]
        # Kernels of low alignment also take aligned operands, and are slower: they come last.
        found = sorted((plan, *others[: _PLANS_A_SHAPE - 1]), key=lambda p: p.alignment, reverse=True)
        weight.plans[a.shape] = tuple(found) if others else plan
        if until is not None:
            shape = a.shape  # not the tensor
            until.add_done_callback(lambda _: weight.forget(shape, plan))

    def _weight(self, key: tuple[Any, ...], rows: Rows | None) -> _Weight:
        """Return what is known about a weight, with room for one more plan."""
        self._remembered += 1
        if self._remembered > _MAX_PLANS:
            self._plans, self._remembered = {}, 1
        weight = self._plans.setdefault(key, _Weight())
        weight.rows = rows or weight.rows
        return weight


class _Weight:
    """How calls with one weight are served: a plan for each shape of A, or several if calls differ in more."""

    __slots__ = ("plans", "rows")

    def __init__(self) -> None:
        self.plans: dict[tuple[int, ...], AnyPlan | tuple[AnyPlan, ...]] = {}
        self.rows: Rows | None = None

    def forget(self, shape: tuple[int, ...], plan: AnyPlan) -> None:
        """Make a plan serve no further call. Another thread may call meanwhile."""
        left = tuple(each for each in _each(self.plans.get(shape)) if each is not plan)
        if left:
            self.plans[shape] = left
        else:
            self.plans.pop(shape, None)


def _each(plans: AnyPlan | tuple[AnyPlan, ...] | None) -> tuple[AnyPlan, ...]:
    if plans is None:
        return ()
    return plans if isinstance(plans, tuple) else (plans,)


def _run_one_of(
    plans: tuple[AnyPlan, ...], a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool
) -> tuple[tuple[Tensor, ...] | None, AnyPlan]:
    """Run a call by the first plan that takes it. Return the results, and the plan; None and any plan if none does."""
    first = plans[0]
    if given is None and type(first) is Plan:
        given = first.new_outputs(a)  # for every plan here, so that a refusal costs no allocation
    for plan in plans:
        results = plan.run(a, b, inputs, given, low)
        if results is not None:
            return results, plan
    return None, first


def _key(call: Call, a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Return what calls with one weight have in common."""
    return b.shape, a.dtype, _dtypes(call.given, out_dtype), a.get_device()


def _dtypes(given: Sequence[Tensor | None], out_dtype: torch.dtype | None) -> Any:
    """Return the requested dtypes of outputs, which allocated outputs get: D's, and the others' if any is given."""
    d, *others = given
    of_d = out_dtype if d is None else d.dtype
    of_others = tuple(None if x is None else x.dtype for x in others)
    return (of_d, *of_others) if any(of_others) else of_d


def _forget() -> None:
    # Another session has other kernels. A warm call does not ask for the session.
    for each in list(_ALL):
        each._plans, each._remembered, each.recorders = {}, 0, {}


session.forget_at_change(_forget)
