"""Calls that differ from one that was checked in their number of rows alone: planned without checks in Python.

A server meets new numbers of rows all the time. What such a call needs is a decision, which is arithmetic, and a kernel
that is loaded. The kernel checks every argument, as for a warm call. Whatever is not as before takes the slow path.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import torch

from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.declare.form import GROUPED
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import groups
from cutlass_ops.run.call import Call
from cutlass_ops.run.operands import shape_of
from cutlass_ops.run.plan import Plan, Way, copies_of, make_way
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.results import new_strides

_log = logging.getLogger("cutlass_ops")


@dataclass(frozen=True, eq=False)
class Rows:
    """Plans calls of one op with one weight.

    Attributes
    ----------
    name : str
        The op's name.
    decision : Decision
        What was decided for the call that was checked.
    device : torch.device
        Where it ran.
    kinds : tuple of Kind
        The kind of each output.
    dtypes : tuple of torch.dtype
        The dtype of each output, if it is not given.
    """

    name: str
    decision: Decision
    device: torch.device
    kinds: tuple[Kind, ...]
    dtypes: tuple[torch.dtype, ...]
    _ways: dict[tuple[object, ...], Way] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, name: str, decision: Decision, call: Call) -> Rows | None:
        """Return what plans other calls like a checked one; None if their operands may need other kernels.

        That is where a lower alignment may follow from the number of rows or from the address, where an input is
        copied, and where D has several matrices, whose number may differ as well.
        """
        signature, arguments = decision.signature, call.arguments
        kinds = tuple(o.kind for o in call.graph.outputs)
        matrices = [signature.a, signature.d]
        matrices += [x for i, x in zip(call.graph.inputs, signature.inputs, strict=True) if i.kind is Kind.TILE]
        matrices += [x for kind, x in zip(kinds[1:], signature.outputs, strict=True) if kind is Kind.TILE]
        several = arguments.form.stacked
        if several or arguments.copied or not signature.b.aligned or not all(map(_is_usual, matrices)):
            return None
        return cls(name, decision, arguments.a.device, kinds, tuple(t.dtype for t in call.outputs))

    def plan(self, shape: tuple[int, ...]) -> Plan | None:
        """Return a plan for an A of this shape; None if its best kernel is not loaded, or is none of this library."""
        batch, problem = tuple(shape[:-1]), self.decision.problem
        rows = math.prod(batch)
        if not batch or shape[-1] != problem.k or not rows:
            return None
        if self.decision.signature.form == GROUPED:
            if len(batch) != 1:
                return None
            problem = groups.typical(rows, problem.n, problem.k, problem.count)
        else:
            problem = problem._replace(m=rows)
        try:
            found = dispatch.decide(self.decision.signature, self.decision.device, problem)
        except UnsupportedError:
            return None
        if found is None or found.peer is not None:
            return None
        spec, registry = found.spec, Registry.current()
        if not registry.has(spec):
            return None
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("%s %s: %s serves", self.name, problem, spec.slug)
        n = problem.n
        shapes = [shape_of(kind, batch, n) for kind in self.kinds]
        outputs = tuple(zip(map(new_strides, self.kinds, shapes), self.dtypes, strict=True))
        way = make_way(self.name, spec, found.order, problem, self.device, outputs)
        # One for all numbers of rows, if it is the same.
        key = id(way.kernel), way.raster, way.swizzle, way.workspace, way.d, way.others
        return Plan(self._ways.setdefault(key, way), shapes[0], tuple(shapes[1:]), copies_of(spec))


def _is_usual(operand: Operand) -> bool:
    return operand.aligned and operand.major == "row"
