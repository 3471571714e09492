"""Ops with groups of rows, as in mixtures of experts: each group is multiplied by its own weight or by a gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from cutlass_ops.base.mma import ACCUMULATIONS, Math
from cutlass_ops.declare.form import GROUPED, MASKED, RAGGED_K, Form
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.operand import groups
from cutlass_ops.operand.call import Call, check_call
from cutlass_ops.run import traced
from cutlass_ops.run.ops import Op

FORMS = {form.name: form for form in (GROUPED, MASKED, RAGGED_K)}
# Why no op computes a gradient, and what to do.
_NO_GRADIENT = {
    MASKED.name: "groups with counts have no gradient: call gemm under torch.no_grad(), or sort rows by group and pass "
    "groups=cutlass_ops.Groups(offsets), which has one",
    RAGGED_K.name: traced.NO_SECOND_GRADIENT.format("an argument"),
}


class GroupsOp(Op):
    """An epilogue of a GEMM with groups: called as ``op(a, b, offsets, *inputs)``, with counts if it is masked.

    Kernels for masked groups are chosen for `expected` rows; 0 if unknown.
    """

    def __init__(self, epilogue: Epilogue, form: Form, expected: int = 0, math: Math | None = None) -> None:
        groups.require(epilogue.graph, form)
        self.form, self.expected = form, expected
        made_by = ("groups", [form.name, expected, epilogue.graph.to_json()])
        super().__init__(epilogue.name, epilogue, made_by=made_by, math=math)

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        ends, *others = inputs
        named = dict(zip(self.names[1:], others, strict=True))
        call = check_call(self.graph, a, b, named, out, out_dtype, offsets=ends, math=self.math, form=self.form)
        if self.expected:
            call = call._replace(arguments=call.arguments._replace(expected=self.expected))
        return call

    def made_in_math(self, math: Math, made_by: tuple[str, Any]) -> GroupsOp:
        """Return a new op that adds up FP8 products in a given way. Raises TypeError if it cannot."""
        if self.form == RAGGED_K:
            raise TypeError(f"math is {math!r}, and a sum over each group's rows takes none: a and b have 16 bits")
        if math not in ACCUMULATIONS:
            raise TypeError(f"math is {math!r}, and groups take {' or '.join(map(repr, ACCUMULATIONS))}, for FP8")
        return GroupsOp(self.epilogue, self.form, self.expected, math)

    def of(self, graph: Graph) -> GroupsOp:
        """Return the op of a gradient. Raises NotImplementedError if there is none."""
        if self.form != GROUPED:
            raise NotImplementedError(_NO_GRADIENT[self.form.name])
        return _op_of(graph, GROUPED)

    def of_weights(self, graph: Graph) -> GroupsOp:  # noqa: D102
        return _op_of(graph, RAGGED_K)


@functools.lru_cache(maxsize=1024)
def _op_of(graph: Graph, form: Form) -> GroupsOp:
    """Return the op of a graph. Equal graphs give the same op."""
    return GroupsOp(Epilogue(graph.title or "gemm", "", graph), form)


def again(name: str, plain: Any) -> GroupsOp:
    """Make an op again from what it registered: see ``portable.MAKERS``."""
    form, expected, graph = plain
    return GroupsOp(Epilogue(name, "", Graph.from_json(graph)), FORMS[form], expected)
