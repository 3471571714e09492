"""Checks of a call's A and B against each other, which return its arguments in the dimensions that kernels know.

This runs once for each new combination of shapes. A warm call goes straight to its kernel, which checks its arguments
itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from cutlass_ops.base import dtypes, mma
from cutlass_ops.base.dtypes import FP8, DType, bf16, f16, f64
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, MASKED, RAGGED_K, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.epilogue import doubles
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind, Output
from cutlass_ops.operand import batches, groups
from cutlass_ops.operand.batches import WITH_BATCHES, Frame
from cutlass_ops.operand.inputs import check_inputs
from cutlass_ops.operand.matrices import MAJORS, MULTIPLIED, Matrix, operand
from cutlass_ops.operand.sizes import agree, surely
from cutlass_ops.operand.tensors import fold, require_same_device, require_tensor


class Arguments(NamedTuple):
    """One call's checked arguments, in two dimensions; batched ones with one or two leading dimensions of batches.

    Grouped calls have A in two dimensions, B in three, and the ends of groups as the first input. Groups of K have A
    and B in two dimensions, and the rest like batched calls. Masked calls are like batched ones, with the number of
    rows of each group as the first input; columns and tiles have all groups.
    """

    problem: Problem
    leading: tuple[int, ...]  # the dimensions of D before N: those of A, folded into M, or batches and M
    operand_a: Matrix  # (M, K). Batched, A and B have all batches; the stride of shared ones is 0.
    operand_b: Matrix  # (K, N)
    # (N,), (M,), (M, N), a product's (K, N), or a scalar. Batched, a tensor is shared by all batches, or has all of
    # them. In the kernel's order.
    inputs: Mapping[str, Tensor | float]
    spread: tuple[str, ...] = ()  # inputs that the caller gave in another shape
    copied: tuple[str, ...] = ()  # inputs that were copied since they repeat values
    form: Form = DENSE
    math: mma.Math | None = None  # how FP32 operands are multiplied, or FP8 products added up
    expected: int = 0  # rows of a masked group, for which a kernel is chosen; 0 if unknown

    @property
    def a(self) -> Tensor:
        """A's matrix."""
        return self.operand_a.tensor

    @property
    def b(self) -> Tensor:
        """B's matrix."""
        return self.operand_b.tensor

    @property
    def types(self) -> tuple[DType, DType]:
        """What the Tensor Cores multiply: the types of A and B."""
        return self.operand_a.element, self.operand_b.element

    def output_shape(self, output: Output) -> tuple[int, ...]:
        """Return an output's shape for the caller."""
        return shape_of(output.kind, self.leading, self.problem.n, self._batches)

    def flat_shape(self, output: Output) -> tuple[int, ...]:
        """Return an output's shape for the kernel."""
        each = (self.problem.count,) if self.form == RAGGED_K else tuple(self.a.shape[:-2])
        return shape_of(output.kind, (*each, self.problem.m), self.problem.n, each)

    @property
    def is_folded(self) -> bool:
        """Whether there are more dimensions of batches than kernels know, so that some were folded into one."""
        return self.form == BATCHED and len(self._batches) > self.a.ndim - 2

    @property
    def _batches(self) -> tuple[int, ...]:
        return self.leading[:-1] if self.form.stacked else ()


def shape_of(kind: Kind, leading: tuple[int, ...], n: int, each: tuple[int, ...] = ()) -> tuple[int, ...]:
    """Return the shape of an output of a kind. `leading` has D's dimensions before N, and `each` those of batches."""
    if kind is Kind.TILE:
        return (*leading, n)
    if kind is Kind.COL:
        return leading
    return (*each, n) if kind is Kind.ROW else (*leading, mma.blocks(n))


class _Rule(NamedTuple):
    """What a form of calls takes."""

    a: str
    b: str
    rank_a: Sequence[int]
    rank_b: Sequence[int]
    transposed: str = ""  # what a B looks like whose transpose fits, and what to pass
    types: tuple[DType, ...] = MULTIPLIED
    same: str = "K"


_ANY = range(2, 1 << 10)
_EXPERTS = "weights of shape (E, N, K): pass b.mT"
_RULES = {
    DENSE.name: _Rule("(..., M, K)", "(K, N)", range(1, 1 << 10), (2,), "a weight of shape (N, K): pass b.t()"),
    BATCHED.name: _Rule("(..., M, K)", "(..., K, N)", _ANY, _ANY, "weights of shape (..., N, K): pass b.mT"),
    GROUPED.name: _Rule("(T, K)", "(E, K, N)", (2,), (3,), _EXPERTS, dtypes.GROUPED),
    MASKED.name: _Rule("(E, M, K)", "(E, K, N)", (3,), (3,), _EXPERTS, dtypes.GROUPED, "E and K"),
    RAGGED_K.name: _Rule("(M, T)", "(T, N)", (2,), (2,), types=(f16, bf16), same="T"),
}


def check_arguments(
    graph: Graph,
    a: Any,
    b: Any,
    inputs: Mapping[str, Any],
    math: mma.Math | None = None,
    form: Form = DENSE,
    ends: Any = None,
) -> Arguments:
    """Check a call's operands and inputs against each other.

    `ends` says where groups end or, masked, how many rows each has.
    """
    named_ends = dict.fromkeys(form.operands, ends)
    for name, value in {"a": a, "b": b, **named_ends}.items():
        require_tensor(name, value)
    if not form.operands:
        form = BATCHED if b.ndim > 2 else DENSE
    types = _RULES[form.name].types
    left, right = operand("a", a, graph, inputs, math, types), operand("b", b, graph, inputs, math, types)
    found = _instructions(graph, left, right, math)
    frame = _frame(form, left, right, named_ends)
    if form == BATCHED:
        batches.require(graph)
    elif form.operands:
        groups.require(graph, form)
    for name, value in {"b": b, **named_ends}.items():
        require_same_device(name, value, a)
    m, n, k, each = frame.m, frame.n, frame.k, frame.each
    if graph.swaps_pairs and n % 2:
        raise ValueError(f"b has {n} columns, and the epilogue swaps pairs of them: N must be even, so pad b by one")
    # The rows of all groups have one stride, too.
    flat = a if form == BATCHED else fold("a", a, (prod(a.shape[:-1]), a.shape[-1]))
    checked, spread, copied = check_inputs(graph, inputs, a, b, frame)
    tensors = {"a": flat if form == DENSE else a, "b": b}
    if form == BATCHED:
        own = {"a": 2, "b": 2} | {i.name: len(frame.own(i.kind)) for i in graph.inputs if i.kind in WITH_BATCHES}
        vectors = {name: x for name, x in checked.items() if name in own and isinstance(x, Tensor)}
        folded = batches.folded(tensors | vectors, own, each)
        tensors = {name: folded.pop(name) for name in tensors}
        checked |= folded
    _require_no_overflow(found, a, k)
    left, right = _with(left, tensors["a"], checked), _with(right, tensors["b"], checked)
    problem = Problem(m, n, k, prod(each))
    return Arguments(problem, frame.leading, left, right, named_ends | checked, spread, copied, form, math)


def _with(matrix: Matrix, tensor: Tensor, inputs: Mapping[str, Any]) -> Matrix:
    if tensor is matrix.tensor and not matrix.further:
        return matrix
    return replace(matrix, tensor=tensor, further={name: inputs[name] for name in matrix.further})


def _instructions(graph: Graph, left: Matrix, right: Matrix, math: mma.Math | None) -> mma.MmaSpec:
    """Return the instructions that multiply A and B. Raises TypeError if there are none for this epilogue."""
    of_a, of_b = left.tensor.dtype, right.tensor.dtype
    found = mma.mma_of(left.element, right.element)
    if found is None:
        raise TypeError(f"b is {of_b} and a is {of_a}: a and b must have the same dtype, or both FP8")
    why = doubles.why_not(graph) if found.compute is f64 else None
    if why is not None:
        raise TypeError(f"a is {of_a}, so the epilogue computes in FP64, and {why}")
    if graph.gathered and found.bits != 16:
        raise TypeError(
            f"a is {of_a}, and the epilogue takes {', '.join(graph.gathered)} of its rows, as of 16 bits only: compute "
            "it before, and pass it as a Col, or as rstd= where a function takes that"
        )
    left.require_multiplied(found, math)
    right.require_multiplied(found, math)
    return found


def _require_no_overflow(found: mma.MmaSpec, a: Tensor, k: int) -> None:
    """Refuse a K at which sums may overflow: the Tensor Cores do not report overflow."""
    if found.longest_k is not None and surely(k > found.longest_k):
        raise ValueError(
            f"a is {a.dtype} and K is {k}, whose sums may overflow the {found.accumulator.bits} bits in which they are "
            f"added up: up to K={found.longest_k} none does, whatever the values. Add the results of slices of K, "
            "a[..., :k] @ b[:k] and so on, in a wider type"
        )


def _frame(form: Form, left: Matrix, right: Matrix, ends: Mapping[str, Tensor]) -> Frame:
    """Return a call's extents. Raises ValueError if those of its operands and groups disagree."""
    a, b, rule = left.shape, right.shape, _RULES[form.name]
    fits = len(a) in rule.rank_a and len(b) in rule.rank_b and agree(a[-1:], b[-2:-1])
    if not fits or (form == MASKED and not agree(a[:1], b[:1])):
        transposed = rule.transposed and len(a) in rule.rank_a and len(b) in rule.rank_b and a[-1] == b[-1]
        raise ValueError(
            f"a {a} and b {b}: a must be {rule.a} and b {rule.b} with the same {rule.same}"
            + (f". b looks like {rule.transposed}" if transposed else "")
        )
    k, n = b[-2:]
    if form == DENSE:
        return Frame(form, a[:-1], (), prod(a[:-1]), n, k)
    if form == BATCHED:
        each = batches.broadcast(a[:-2], b[:-2])
        if each is None:
            raise ValueError(
                f"a {a} and b {b}: the dimensions before the last two are batches, which must be equal or 1"
            )
        return Frame(form, (*each, a[-2]), each, a[-2], n, k)
    ((name, of_groups),) = ends.items()
    groups.check_ends(form, name, of_groups, b)
    experts = tuple(of_groups.shape)
    return Frame(form, (*experts, a[0]) if form == RAGGED_K else a[:-1], experts, a[-2], n, k)


def check_lines(arguments: Arguments, products: Sequence[Matrix], *, one: bool) -> Sequence[Major]:
    """Return the majors that B may have. Refuse operands that no kernel for their types and form reads.

    Some types are read along K only, and groups by TMA only. If a launch is `one` GEMM, kernels copy other operands
    than those of FP8. For types that ``wgmma`` reads along K only, lines along K come first, in case B has both majors.
    """
    form, left, right = arguments.form, arguments.operand_a, arguments.operand_b
    found = mma.mma_of(*arguments.types)
    unit = None if found is None else found.by_tma
    reads_along_k = found is not None and unit is not None and unit.k_major_only
    only_k = reads_along_k and found is not None and found.along_k_only and not (unit and unit.copyable and one)
    is_empty = 0 in arguments.problem
    if not only_k and not form.operands:
        return MAJORS[::-1] if reads_along_k else MAJORS
    majors_a: Sequence[Major] = ("col",) if form == RAGGED_K else ("row",)
    majors_b: Sequence[Major] = ("row",) if form == RAGGED_K else ("col",) if only_k else MAJORS
    if is_empty and form.operands:
        return majors_b
    for matrix, majors in ((left, majors_a), *((x, majors_b) for x in (right, *products))):
        fitting = [matrix.layouts[major].operand for major in majors if major in matrix.layouts]
        if not fitting and len(majors) == 1:
            raise ValueError(_other_major(matrix, majors[0], form, only_k=only_k))
        best = max(fitting, key=lambda x: x.alignment) if fitting else matrix.layout().operand
        if not best.aligned and not is_empty:
            raise matrix.misaligned(best.major, _what_to_pad(matrix, best.major, form), _or_prepare(matrix, form))
    return majors_b


def _other_major(matrix: Matrix, major: Major, form: Form, *, only_k: bool) -> str:
    """Return the message about a matrix that is not contiguous along the dimension that kernels read."""
    name, strides = matrix.name, matrix.tensor.stride()
    if not only_k:
        copy = f"{name}.contiguous()" if major == "row" else f"{name}.mT.contiguous().mT"
        summed = ". b has two dimensions, so groups are summed: b (E, K, N) has a matrix for each group"
        return (
            f"{name} has strides {strides}, and groups are rows in memory: pass {copy}"
            f"{summed if form == RAGGED_K and name == 'a' else ''}"
        )
    instead = {
        DENSE: "pass weight.t() of a contiguous weight (N, K)",
        BATCHED: "pass weights.mT of contiguous weights (..., N, K)",
    }.get(form, f"pass weights (E, N, K) as {name}.mT")
    if name == "a":
        instead = "pass a row-major matrix"
    return (
        f"{name} is {matrix.tensor.dtype} and has strides {strides}, and Tensor Cores read this type along K only: "
        + instead
        + _or_prepare(matrix, form)
    )


def _or_prepare(matrix: Matrix, form: Form) -> str:
    if matrix.name == "a" or matrix.element not in FP8 or form != DENSE:
        return ""
    return f", or pass prepare({matrix.name}).matrix, a copy made once"


def _what_to_pad(matrix: Matrix, major: Major, form: Form) -> str:
    if form == RAGGED_K:
        return "pad M" if matrix.name == "a" else "pad N"
    if (matrix.name == "a") == (major == "row"):
        return "pad K of a and b"
    return f"pass weights (E, N, K) as {matrix.name}.mT, or pad N"
