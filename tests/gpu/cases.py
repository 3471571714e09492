"""A kernel's problem on a GPU: tensors placed as badly as it allows, results in float64, and ways to call it.

One class knows what a declaration of any form takes: one GEMM, batches, groups of rows with room or without, and groups
of K. It says which rows a group has: no code of the library does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import f64, i8, tf32
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import matrices, reference
from tests.gpu import oracle
from tests.gpu.memory import Placed, placed, torch_dtype, values, whole
from tests.gpu.warm import served_warm

# Inputs with a line for each row of A, and dimensions of an input of one GEMM.
_OF_ROWS = (Kind.COL, Kind.TILE, Kind.BLOCKS_A)
_RANKS = {Kind.ROW: 1, Kind.COL: 1, Kind.SCALAR: 0, Kind.INTEGER: 0}

Index = EllipsisType | int | slice | tuple[Any, ...]


@dataclass(frozen=True)
class Part:
    """One GEMM of a problem: where its A, B and results are, and its group's or its rows' part of inputs."""

    a: Index = ...
    b: Index = ...
    out: Index = ...
    rows: Index = ...


@dataclass
class Case:
    """A problem of a kernel, with its tensors.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    m, n, k : int
        Extents. Of groups of rows, M follows from the others; of groups of K, K does.
    lead : tuple of int
        Batches.
    sizes : sequence of int
        Rows of each group.
    room : int, optional
        Rows that each group has room for. Sizes may be false then: a kernel takes them to be within 0 and this.
    unused : int
        Rows of no group, which are NaN.
    shared : tuple of str
        Inputs of each group or batch that all have in common.
    exact : bool
        Whether values are whole numbers, which leave one right result.
    """

    spec: KernelSpec
    m: int
    n: int
    k: int
    lead: tuple[int, ...] = ()
    sizes: Sequence[int] = ()
    room: int | None = None
    unused: int = 0
    shared: tuple[str, ...] = ()
    exact: bool = False

    def __post_init__(self) -> None:
        form, groups = self.spec.form.name, len(self.sizes)
        self.used = [min(max(size, 0), self.room) if self.room is not None else size for size in self.sizes]
        of_groups = (groups,) if self.sizes else self.lead
        own = max(1, sum(self.used) + self.unused) if self.room is None else groups * self.room
        self.m, self.k = own if form == "grouped" else self.m, own if form == "ragged_k" else self.k
        of_a = () if form == "grouped" or form == "ragged_k" else self.lead
        self.a = self._drawn((*of_a, self.m, self.k), self.spec.a)
        of_b = () if form == "ragged_k" else of_groups
        self.b = self._drawn((*of_b, self.k, self.n), self.spec.b)
        of_d = () if form == "grouped" else of_groups
        shapes = {
            Kind.ROW: (*of_groups, self.n),
            Kind.COL: (*of_d, self.m),
            Kind.TILE: (*of_d, self.m, self.n),
            Kind.PRODUCT: (*of_groups, self.k, self.n),
            Kind.BLOCKS_A: (self.m, mma.blocks(self.k)),
        }
        if self.spec.b.scaling is not None:
            block = self.spec.b.transposed.scaling[0]
            shapes[Kind.BLOCKS_B] = (*of_groups, -(-self.n // block), mma.blocks(self.k))
        self.inputs: dict[str, Any] = {}
        for declared, operand in self.spec.typed_inputs:
            if declared.kind is Kind.SCALAR:
                self.inputs[declared.name] = 2.0 if self.exact else 0.75
            else:
                drawn = self._drawn(shapes[declared.kind], operand, of=declared.kind)
                for _ in (*self.lead, *self.sizes[:1]) if declared.name in self.shared else ():
                    drawn = drawn[0]
                self.inputs[declared.name] = drawn
        outputs = zip(self.spec.epilogue.outputs, (self.spec.d, *self.spec.outputs), strict=True)
        self.placed = {o.name: self._placed(shapes[o.kind], operand, o.kind) for o, operand in outputs}
        self.form: tuple[Tensor, ...] = ()
        if self.sizes:
            ends = self.sizes if self.room is not None else list(itertools.accumulate(self.sizes))
            self.form = (torch.tensor(ends, device="cuda", dtype=torch.int32),)
        if self.room is not None:
            self._make_room(groups, self.room)
        self._spoil_unused()

    def _placed(self, shape: tuple[int, ...], operand: Operand, of: Kind | None = None) -> Placed:
        if of in (Kind.ROW, Kind.COL):  # those of groups and batches follow each other
            flat = placed((math.prod(shape),), operand)
            return replace(flat, view=flat.view.view(shape))
        return placed(shape, operand, apart=0 if self.sizes else 2)

    def _drawn(self, shape: tuple[int, ...], operand: Operand, of: Kind | None = None) -> Tensor:
        dtype, multiplied = torch_dtype(operand), of in (None, Kind.PRODUCT)
        if self.exact:
            drawn = whole(*shape, largest=16 if multiplied else 200)
        else:
            drawn = values(shape, dtype, self.k**-0.25 if multiplied else 1.0)
        if of is Kind.COL and self.spec.a.dtype is i8 and not self.exact:
            drawn = drawn.abs() / (self.k**0.5 * 64)  # sums of INT8 are large
        return self._placed(shape, operand, of).set(drawn).view

    def _make_room(self, groups: int, room: int) -> None:
        """Give rows a dimension for their groups."""
        self.a = self.a.unflatten(0, (groups, room))
        kinds = {i.name: i.kind for i in self.spec.epilogue.inputs}
        for name, value in self.inputs.items():
            if kinds[name] in _OF_ROWS:
                self.inputs[name] = value.unflatten(0, (groups, room))
            if kinds[name] is Kind.BLOCKS_A:  # as DeepGEMM has them, by columns
                self.inputs[name] = self.inputs[name].mT.contiguous().mT

    def _spoil_unused(self) -> None:
        """Have NaN in rows of no group, which no result may depend on."""
        if self.room is not None:
            for group, size in enumerate(self.used):
                self.a[group, size:] = torch.nan
        elif self.spec.form.name == "ragged_k":
            self.a[:, sum(self.used) :], self.b[sum(self.used) :] = torch.nan, torch.nan
        elif self.sizes:
            self.a[sum(self.used) :] = torch.nan

    @property
    def out(self) -> dict[str, Tensor]:
        """The outputs, by name."""
        views = {name: each.view for name, each in self.placed.items()}
        if self.room is None:
            return views
        return {name: view.unflatten(0, (len(self.sizes), self.room)) for name, view in views.items()}

    @property
    def operands(self) -> tuple[Any, ...]:
        """The arguments of the kernel by position."""
        return self.a, self.b, *self.form, *self.inputs.values()

    def parts(self) -> Iterator[Part]:
        """Yield the GEMMs."""
        if not self.sizes:
            places = itertools.product(*map(range, self.lead)) if self.lead else [...]
            yield from (Part(at, at, at, at) for at in places)
            return
        begin = 0
        for group, size in enumerate(self.used):
            rows, begin = slice(begin, begin + size), begin + size
            if self.spec.form.name == "ragged_k":
                yield Part((slice(None), rows), rows, group, group)
            elif size:
                own = rows if self.room is None else (group, slice(size))
                yield Part(own, group, own, own)

    def _given(self, part: Part) -> dict[str, Any]:
        found = {}
        for declared in self.spec.epilogue.inputs:
            value = self.inputs[declared.name]
            if declared.kind in _OF_ROWS and self.spec.form.name == "grouped":
                value = value[part.rows]
            elif isinstance(value, Tensor) and value.ndim > _RANKS.get(declared.kind, 2):
                value = value[part.b if self.spec.form.name == "grouped" else part.rows]
            found[declared.name] = value
        return found

    def wanted(self) -> dict[str, list[Tensor]]:
        """Return every output in float64, of each GEMM that has one."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.placed}
        a, b = (x.expand(*self.lead, *x.shape[-2:]) if self.lead else x for x in (self.a, self.b))
        for part in self.parts():
            for name, value in exact(self.spec, a[part.a], b[part.b], self._given(part)).items():
                found[name].append(value)
        return found

    def refill(self) -> None:
        """Poison all outputs."""
        for each in self.placed.values():
            each.refill()

    def assert_right(self, wanted: dict[str, list[Tensor]], eager: Tensor | None = None, what: str = "") -> None:
        """Require that outputs are right and whole, and that nothing else was written."""
        parts, out = list(self.parts()), self.out
        # Sums of INT8 are exact, and rounded once if nothing follows.
        is_exact = self.exact or (self.spec.a.dtype is i8 and not self.inputs)
        sums = 0.0 if is_exact else oracle.SUMS[self.spec.a.dtype.name]
        self.assert_nothing_else_written()
        for name, exact_parts in wanted.items():
            if not exact_parts:
                continue
            found, right = (
                _joined([out[name][part.out] for part in parts]),
                torch.cat([x.flatten() for x in exact_parts]),
            )
            if eager is not None and name == "d":
                oracle.assert_close(found, right, eager.flatten())
            why = oracle.why_not(found, right, sums)
            assert why is None, f"{name} of {self.spec.slug} at {(self.m, self.n, self.k)}{what}: {why}"

    def assert_nothing_else_written(self, rows: int | None = None) -> None:
        """Require poison around all outputs and in rows of no group, which by default are those of the sizes."""
        own: list[Any] = [...]
        if self.spec.form.name == "grouped" and self.room is None:
            own = [slice(sum(self.used) if rows is None else rows)]
        elif self.room is not None:
            own = [slice(group * self.room, group * self.room + size) for group, size in enumerate(self.used)]
        for name, each in self.placed.items():
            each.assert_only(*own, what=f"{name} of {self.spec.slug} at {(self.m, self.n, self.k)}")


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the elements of tensors in a row, of FP8 by their bytes: not every version of PyTorch joins it."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat([x.flatten() for x in parts])
    return torch.cat([x.flatten().contiguous().view(torch.uint8) for x in parts]).view(parts[0].dtype)


def exact(spec: KernelSpec, a: Tensor, b: Tensor, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return every output of one GEMM in float64."""
    graph = spec.epilogue
    if graph.block_scales:
        a, b = reference.dequantised(a, b, *(inputs[name].double() for name in graph.block_scales))
    elif spec.a.dtype is tf32:
        a, b = (matrices.as_multiplied(x, tf32) for x in (a, b))
        inputs = inputs | {name: matrices.as_multiplied(inputs[name], tf32) for name in graph.products}
    if spec.a.dtype is not f64:
        return oracle.exact(graph, a, b, inputs)
    # The CPU evaluates functions of FP64: on a GPU, PyTorch's hardswish divides in FP32.
    given = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in inputs.items()}
    found = reference.evaluate(graph, (a @ b).cpu(), given, torch.float64, a=a.cpu())
    return {name: x.to(a.device) for name, x in found.items()}


# ---- Ways to call a kernel -------------------------------------------------------------------------------------------


def _out(kernel: Any, case: Case) -> None:
    kernel(*case.operands, out=case.out)


def _new(kernel: Any, case: Case) -> None:
    found = kernel(*case.operands)
    for name, x in zip(case.placed, [found] if isinstance(found, Tensor) else found, strict=True):
        for part in case.parts():
            case.out[name][part.out].copy_(x[part.out])


def _warm(kernel: Any, case: Case) -> None:
    served_warm(kernel, lambda: _out(kernel, case))


def _prepared(kernel: Any, case: Case) -> None:
    with _other_values(case):
        launch = kernel.prepare_launch(*case.operands, out=case.out)
    case.refill()
    launch()


def _captured(kernel: Any, case: Case) -> None:
    with _other_values(case):
        graph, _ = captured(lambda: _out(kernel, case))
    case.refill()
    graph.replay()


@contextmanager
def _other_values(case: Case) -> Iterator[None]:
    """Have A be zero: what is launched later reads what is there then."""
    before = case.a.clone()
    case.a.zero_()
    yield
    case.a.copy_(before)


def _stream(kernel: Any, case: Case) -> None:
    with other_stream():
        _out(kernel, case)


WAYS: dict[str, Callable[[Any, Case], None]] = {
    "out": _out, "new": _new, "warm": _warm, "prepared": _prepared, "captured": _captured, "stream": _stream,
}  # fmt: skip


def captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """Capture a call into a graph; return the graph and the result."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


@contextmanager
def other_stream() -> Iterator[None]:
    """Run on a stream of its own, which the current one waits for and follows."""
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def check(spec: KernelSpec, shape: tuple[int, int, int], *, ways: Iterable[str] = ("out",), **more: Any) -> Case:
    """Run a kernel in some ways, and compare all outputs with float64; `eager` computes what PyTorch has for D."""
    eager = more.pop("eager", None)
    case, kernel = Case(spec, *fit(spec, shape), **more), co.build(spec)
    tensors = [x for x in case.operands if isinstance(x, Tensor)]
    before = [x.clone() for x in tensors]
    wanted, composed = case.wanted(), None if eager is None else eager(case.a, case.b, **case.inputs)
    for way in ways:
        case.refill()
        WAYS[way](kernel, case)
        case.assert_right(wanted, composed, f", {way}")
    same = (torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(before, tensors, strict=True) if x.itemsize > 1)
    assert all(same), "an argument was changed"
    return case


def fit(spec: KernelSpec, shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """Round a shape up to what the kernel's accesses and pairs must divide: what TMA loads may end anywhere."""
    step = {"m": 1, "n": 1, "k": 1}

    def whole_accesses(operand: Operand, rows: str, columns: str) -> None:
        inner = columns if operand.major == "row" else rows
        step[inner] = max(step[inner], operand.alignment)

    if spec.config.arch in ("sm80", "small") or spec.config.copies or spec.a.dtype.bits < 16 or spec.a.dtype is tf32:
        whole_accesses(spec.a, "m", "k")
        whole_accesses(spec.b, "k", "n")
    whole_accesses(spec.d, "m", "n")
    if spec.epilogue.swaps_pairs:
        step["n"] = max(step["n"], 2)
    for declared, operand in (*spec.typed_inputs, *spec.typed_outputs):
        if declared.kind is Kind.TILE and not (operand.aligned and declared in spec.epilogue.inputs):
            whole_accesses(operand, "m", "n")
    m, n, k = (-(-extent // step[side]) * step[side] for extent, side in zip(shape, "mnk", strict=True))
    return m, n, k + (2 * mma.BLOCK_K if spec.epilogue.block_scales else 0)


def check_written_just_before(case: Case, factors: Sequence[float], steps: int = 20) -> None:
    """Require that overlapping launches see what was written to A just before, and spoil nothing that is still read."""
    kernel, found = co.build(case.spec), []
    source, x = case.a.clone(), case.a
    for step in range(steps):
        torch.mul(source, factors[step % len(factors)], out=x)
        found.append(kernel(*case.operands))
    for step, d in enumerate(found):
        torch.mul(source, factors[step % len(factors)], out=x)
        torch.cuda.synchronize()
        assert torch.equal(d, kernel(*case.operands)), f"launch {step} differs"
