"""Forms of problems: how the GEMMs of one launch belong together."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import Any

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue.graph import Expression
from cutlass_ops.epilogue.operations import UNIFORM


@dataclass(frozen=True, repr=False, eq=False)  # one object of each, so that comparisons are quick
class Form:
    """One form: it decides the code of a kernel, and what a problem's count means.

    Attributes
    ----------
    name : str
        Name in JSON.
    count : str
        What a problem's count means, in words.
    several : bool
        Whether a problem may have a count above 1.
    operands : tuple of str
        Tensors of a call between A and B and the epilogue's inputs.
    stacked : bool
        Whether each GEMM has a D of its own, in dimensions before M.
    served_as : str
        The name of the form of its kernels, if these are another form's. No kernel is declared with it.
    """

    name: str
    count: str
    several: bool = True
    operands: tuple[str, ...] = ()
    stacked: bool = False
    served_as: str = ""

    @property
    def of_kernels(self) -> Form:
        """The form of the kernels that serve calls of this one."""
        return FORMS[self.served_as] if self.served_as else self

    @classmethod
    def of(cls, given: object) -> Form:
        """Return a form of :data:`FORMS`, given itself or by name.

        Raises TypeError if it is neither a form nor a text. Raises ConfigError if there is no such form.
        """
        name = given.name if isinstance(given, Form) else given
        if not isinstance(name, str):
            raise TypeError(f"form must be the name of a form, not {reprlib.repr(given)}: use {' or '.join(FORMS)}")
        found = FORMS.get(name)
        if found is None or (isinstance(given, Form) and given != found):
            raise ConfigError(f"form is {checked_json.shown(name)}, which is not a form: use {' or '.join(FORMS)}")
        return found

    def refuses(self, problem: Problem) -> str | None:
        """Say why a problem cannot have this form; None if it can."""
        if self.several or problem.count == 1:
            return None
        return f"problem {problem} has {problem.count} GEMMs, and the form {self.name} has one: {self.count}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _named, (self.name,)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"Form.of({self.name!r})"


DENSE = Form("dense", "the count is 1", several=False)
BATCHED = Form("batched", "the number of batches, each with an A, a B and a D", stacked=True)
GROUPED = Form(
    "grouped",
    "the number of groups of A's rows, each with a B of its own; M is the rows that a group is taken to have",
    operands=("offsets",),
)
RAGGED_K = Form(
    "ragged_k",
    "the number of groups of A's columns and B's rows, each with a D of its own; K is what a group is taken to have",
    operands=("offsets",),
    stacked=True,
)
# Only calls have it: a kernel finds groups with room as it finds those that follow each other.
MASKED = Form(
    "masked",
    "the number of groups, each with room for M rows of A, and a B of its own",
    operands=("counts",),
    stacked=True,
    served_as="grouped",
)
# Every form of kernels is a row here. The kinds of kernels say which of them they serve.
FORMS: dict[str, Form] = {form.name: form for form in (DENSE, BATCHED, GROUPED, RAGGED_K)}


def _named(name: str) -> Form:
    return MASKED if name == MASKED.name else FORMS[name]


def why_one_gemm(graph: Expression, form: Form = BATCHED) -> str | None:
    """Say why a kernel computes an epilogue for one GEMM only; None if also for several of a form."""
    if graph.quantized is not None:
        return "the epilogue quantises D, and a kernel writes the scales of one GEMM"
    if any(output.reduce is not None for output in graph.outputs):
        return "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"
    if graph.products and form.of_kernels != GROUPED:
        return "the epilogue has a further product, and a kernel multiplies the A of one GEMM by several matrices"
    if graph.gathered:
        return "the epilogue takes statistics of A's rows, and a kernel takes those of one GEMM"
    if graph.parts and form.of_kernels != GROUPED:
        return f"{graph.parts_are}, and a kernel reads those of one GEMM"
    if any(node.op == UNIFORM for node in graph.nodes):
        return "the epilogue draws random numbers by row and column, the same for every batch"
    return None
