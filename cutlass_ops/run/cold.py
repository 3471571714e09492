"""What serves a call that no plan serves yet: the decision, the kernel, and plans for similar calls."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.compilation.background import Background, Wanted, is_missed
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import groups
from cutlass_ops.operand.call import Call, device_of, signature_of, without_modes
from cutlass_ops.operand.operands import shape_of
from cutlass_ops.operand.results import new_strides
from cutlass_ops.run import supply
from cutlass_ops.run.fallbacks import AtAnyRows
from cutlass_ops.run.gathering import is_gathering, note
from cutlass_ops.run.plan import AnyPlan, Plan, make_plan, plan_of
from cutlass_ops.run.registry import OpSignature, Registry

_log = logging.getLogger("cutlass_ops")

_MOST_AWAITED = 1 << 16  # numbers of rows


@dataclass(eq=False)
class Rows:
    """Plans calls of one op with one weight that differ from a checked one only in their number of rows.

    A server meets new numbers of rows all the time. Such a call needs a decision, which is arithmetic, and a loaded
    kernel, which checks every argument. Until the kernel is loaded, PyTorch serves. If anything else differs, the call
    is checked in Python.
    """

    name: str
    decision: Decision  # for the call that was checked
    device: torch.device  # where that call ran
    kinds: tuple[Kind, ...]  # of the outputs
    dtypes: tuple[torch.dtype, ...]  # of all outputs, for those that the caller does not give
    meanwhile: AtAnyRows | None  # how PyTorch serves
    awaited: dict[int, Wanted] = field(default_factory=dict)  # the kernels that are not loaded, by number of rows

    @classmethod
    def of(cls, name: str, decision: Decision, call: Call) -> Rows | None:
        """Return what plans other calls like a checked one; None if their operands may need other kernels.

        They may if a lower alignment can follow from the number of rows or from the address, if an input is copied, or
        if D has several matrices, whose number may differ as well.
        """
        signature, arguments = decision.signature, call.arguments
        kinds = tuple(o.kind for o in call.graph.outputs)
        matrices = [signature.a, signature.d]
        matrices += [x for i, x in zip(call.graph.inputs, signature.inputs, strict=True) if i.kind is Kind.TILE]
        matrices += [x for kind, x in zip(kinds[1:], signature.outputs, strict=True) if kind is Kind.TILE]
        several = arguments.form.stacked
        if several or arguments.copied or not signature.b.aligned or not all(map(_is_usual, matrices)):
            return None
        dtypes = tuple(t.dtype for t in call.outputs)
        return cls(name, decision, arguments.a.device, kinds, dtypes, AtAnyRows.of(call))

    def plan(self, shape: tuple[int, ...]) -> AnyPlan | None:
        """Return a plan for an A of this shape; None if the call needs checking."""
        batch, problem = tuple(shape[:-1]), self.decision.problem
        rows = math.prod(batch)
        if not batch or shape[-1] != problem.k or not rows:
            return None
        if self.decision.signature.form == GROUPED and len(batch) != 1:
            return None
        awaited = self.awaited.get(rows)
        if awaited is not None and is_missed(awaited) and supply.serves_again():
            note(awaited)
            return self.meanwhile
        if self.decision.signature.form == GROUPED:
            problem = groups.typical(rows, problem.n, problem.k, problem.count)
        else:
            problem = problem._replace(m=rows)
        try:
            found = dispatch.decide(self.decision.signature, self.decision.device, problem)
        except UnsupportedError:
            return None
        if found is None or found.peer is not None:
            return None
        spec = found.spec
        if not Registry.current().has(spec):
            if self.meanwhile is None or not supply.serves_again() or supply.waits(found):
                return None
            missed = supply.supply(found, self.device)
            if missed is not None:
                if len(self.awaited) >= _MOST_AWAITED:
                    self.awaited.clear()
                self.awaited[rows] = missed
                note(missed)
                return self.meanwhile
        self.awaited.pop(rows, None)
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s %s: %s serves", self.name, problem, spec.slug)
        shapes = [shape_of(kind, batch, problem.n) for kind in self.kinds]
        new = list(zip(shapes, map(new_strides, self.kinds, shapes), self.dtypes, strict=True))
        return plan_of(self.name, spec, found.order, problem, self.device, new)


def _is_usual(operand: Operand) -> bool:
    return operand.aligned and operand.major == "row"


class Served(NamedTuple):
    """How similar calls are served."""

    plan: Plan | None  # the kernel's, ready to run; None if PyTorch serves
    awaited: Future[Any] | None = None  # done when another plan may serve: the best kernel is there, or cannot be had
    rows: Rows | None = None  # plans calls with other numbers of rows
    failed: Wanted | None = None  # the best kernel, if it cannot be had


def plan(name: str, call: Call) -> Served:
    """Return what serves an op's call.

    Raises UnsupportedError if no single kernel serves the call; MissingKernelError, CompileError, ToolchainError,
    StoreError or LoadError if the call waits for a kernel, and it cannot be compiled, stored or loaded.
    """
    where = call.arguments.a.device
    device = device_of(where)
    if call.why_apart is not None:
        raise UnsupportedError(f"{name}: {call.why_apart}")
    signature = signature_of(call, device)
    if _may_be_decided_later(signature, device, call):
        decided = _decided_meanwhile(signature, device, call, where)
        if not supply.is_soon_done(decided):
            note(decided)
            return Served(None, decided)
    decision = _decided(name, signature, device, call)
    rows = Rows.of(name, decision, call)
    if decision.peer is not None:
        _log.info("%s %s: PyTorch (%s) serves, as tuning allowed", name, decision.problem, decision.peer)
        return Served(None, None, rows)
    awaited = supply.supply(decision, where)
    supply.supply_others(decision, where)
    if awaited is not None:
        note(awaited)
        return Served(None, None, rows, awaited) if awaited.done() else Served(None, awaited, rows)
    if _log.isEnabledFor(logging.DEBUG):  # making a slug takes longer than the choice
        _log.debug("%s %s: %s serves", name, decision.problem, decision.spec.slug)
    return Served(make_plan(name, decision.spec, decision.order, call), None, rows)


def _may_be_decided_later(signature: OpSignature, device: Device, call: Call) -> bool:
    """Whether PyTorch may serve while another thread decides: the weight is undecided, and nobody must wait."""
    if not supply.may_stand_in() or is_gathering() or supply.is_captured():
        return False
    if dispatch.is_decided(signature, device, call.chosen_for):
        return False
    return dispatch.is_served_by_package(signature, device)


def _decided_meanwhile(signature: OpSignature, device: Device, call: Call, where: torch.device) -> Future[Any]:
    """Decide in the background, and load or compile the best kernel. Return what is done then."""
    done: Future[Any] = Future()
    problem = call.chosen_for

    def decide() -> None:
        try:
            decision = dispatch.decide(signature, device, problem)
            if decision is None or decision.peer is not None or Registry.current().has(decision.spec):
                done.set_result(None)  # the next call has the decision, or the error
                return
            supply.need(decision.spec, where).add_done_callback(lambda _: done.set_result(None))
        except UnsupportedError:
            done.set_result(None)
            return
        except BaseException as exc:
            done.set_exception(exc)
            raise
        supply.supply_others(decision, where)

    Background.current().soon(decide)
    return done


def decided(name: str, call: Call) -> Decision:
    """Decide what serves an op's call. Raises UnsupportedError if no single kernel does."""
    if call.why_apart is not None:
        raise UnsupportedError(f"{name}: {call.why_apart}")
    if not call.problem.n or not call.problem.count:
        raise UnsupportedError(f"{name}: D has no elements, and no kernel runs")
    device = device_of(call.arguments.a.device)
    return _decided(name, signature_of(call, device), device, call)


def _decided(name: str, signature: OpSignature, device: Device, call: Call) -> Decision:
    decision = dispatch.decide(signature, device, call.chosen_for)
    if decision is None:
        what = f"{name} with a {signature.a}, b {signature.b} and d {signature.d}"
        raise UnsupportedError(dispatch.unserved(what, signature, device))
    return decision


def announce(
    op: Any, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None, where: torch.device
) -> None:
    """Find or compile the kernel of a call while the program that will make the call is compiled.

    The arguments have no data. Unknown extents count as those that were traced. The call will run on device `where`.
    """
    try:
        with without_modes():
            a, b, *values = (_without_data(x) for x in (a, b, *inputs))
            call = op.checked_call(a, b, values, None, out_dtype)
            if 0 in call.problem or call.why_apart is not None:
                return
            device = device_of(where)
            _decided_meanwhile(signature_of(call, device), device, call, where)
    except Exception as exc:  # the program is compiled without it, too
        _log.debug("%s: its kernel is not looked for ahead of the call: %s", op.name, exc)


def _without_data(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    shape, strides = ([_known(extent) for extent in each] for each in (x.shape, x.stride()))
    return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")


def _known(extent: Any) -> int:
    """Return an extent, or that of the traced call. Asking a symbol itself would fix its value."""
    return extent if isinstance(extent, int) else int(extent.node.hint)
