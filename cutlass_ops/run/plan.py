"""Plans: a loaded kernel with its launch arguments, ready for all calls of one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.loader import LoadedKernel, Reason, refusal
from cutlass_ops.base import arch, env
from cutlass_ops.base.dtypes import i32
from cutlass_ops.base.errors import LoadError
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec, Operand, copied
from cutlass_ops.run.call import Call
from cutlass_ops.run.memory import new_tensor
from cutlass_ops.run.outputs import output_name
from cutlass_ops.run.registry import Registry
from cutlass_ops.run.results import contiguous, new_strides

_Result = TypeVar("_Result")

_LINE = arch.TMA_ALIGNMENT_BYTES  # bound here for warm calls

# What the caller gave for each output, D first; None where that is nothing at all.
Given: TypeAlias = tuple[Tensor | None, ...] | None


class AnyPlan(Protocol):
    """What serves calls of one shape: a kernel (:class:`Plan`), or PyTorch or other ops (run/fallbacks.py)."""

    @property
    def alignment(self) -> int:
        """What it asks of the matrices' addresses and lines, in elements."""

    @property
    def copies(self) -> int:
        """How many matrices it copies at each call."""

    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Serve a warm call; None if it does not take its arguments.

        `low` says that the address of A or B is known to be misaligned.
        """

    def same_as(self, other: AnyPlan) -> bool:
        """Whether another plan for the same shape would serve the same calls."""


# A warm call reads these: slots take less than half the time of a named tuple's fields.
@dataclass(frozen=True, slots=True)
class Way:
    """How a kernel is launched for calls of some shapes, which share it: an op remembers many thousand shapes.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    kernel : LoadedKernel
        The loaded kernel.
    launch : callable
        The kernel's entry function.
    raster, swizzle : int
        Order in which tiles are visited, as :attr:`TileOrder.numbers` has it.
    workspace : int
        Bytes of workspace for a launch.
    d, others : tuple
        Strides and dtype of D and of the other outputs, to allocate those that are missing.
    misaligned : bool
        Whether A or B was misaligned though its shape does not make it so. Aligned operands of this shape then have a
        faster kernel, and this one would take them.
    """

    spec: KernelSpec
    kernel: LoadedKernel
    launch: Callable[..., int]
    raster: int
    swizzle: int
    workspace: int
    d: tuple[tuple[int, ...], torch.dtype]
    others: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    misaligned: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How to serve calls of one shape with a kernel.

    Attributes
    ----------
    way : Way
        How the kernel is launched.
    shape, others : tuple
        The caller's shape of D and of the other outputs. The kernel folds leading dimensions.
    copies : int
        How many matrices the kernel copies at each call, ahead of multiplying them.
    """

    way: Way
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()
    copies: int = 0

    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Launch on a warm call's unchecked arguments.

        Returns
        -------
        tuple of Tensor, or None
            The outputs; None if the kernel refuses the arguments, which then need checking, or is not for them.
        """
        way = self.way
        if way.misaligned and not low and _are_aligned(a, b):
            return None
        workspace = new_tensor(a, (way.workspace,), (1,), torch.uint8) if way.workspace else None
        try:
            if not way.others:
                if given is None or (d := given[0]) is None:
                    d = new_tensor(a, self.shape, *way.d)
                return (d,) if way.launch(a, b, d, *inputs, way.raster, way.swizzle, workspace) == 0 else None
            if given is None:
                d, *others = self.new_outputs(a)
            else:
                missing = zip(given, self._missing(), strict=True)
                d, *others = [new_tensor(a, *of) if x is None else x for x, of in missing]
            status = way.launch(a, b, d, *inputs, *others, way.raster, way.swizzle, workspace)
            return (d, *others) if status == 0 else None
        except RuntimeError:
            # Sparse tensors and the like have no memory that a kernel could refuse.
            if all(x.layout is torch.strided for x in (a, b, *inputs, *(given or ())) if isinstance(x, Tensor)):
                raise
            return None

    def new_outputs(self, a: Tensor) -> tuple[Tensor, ...]:
        """Return an empty tensor for each output, on the device of a."""
        if not self.way.others:
            return (new_tensor(a, self.shape, *self.way.d),)
        return tuple([new_tensor(a, *of) for of in self._missing()])

    def _missing(self) -> list[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]:
        way = self.way
        others = [(shape, *of) for shape, of in zip(self.others, way.others, strict=True)]
        return [(self.shape, *way.d), *others]

    @property
    def spec(self) -> KernelSpec:
        """The kernel."""
        return self.way.spec

    @property
    def alignment(self) -> int:
        """What the kernel asks of its matrices, in elements: the more, the fewer calls it serves."""
        spec = self.spec
        return sum(x.alignment for x in (spec.a, spec.b, spec.d, *spec.inputs, *spec.outputs))

    def launch_call(self, call: Call) -> None:
        """Launch on a checked call's arguments.

        Raises
        ------
        TypeError, ValueError
            If the kernel refuses an argument. The message names it and says why.
        """
        arguments, way = _of_kernel(call), self.way
        workspace = self._workspace(call.arguments.a) if way.workspace else None
        status = way.launch(*arguments, way.raster, way.swizzle, workspace)
        if status != 0:
            raise _explain(status, self.spec, arguments, call.arguments.form)

    def prepared(self, call: Call) -> tuple[Callable[[], object], Tensor | None]:
        """Return a function that launches on exactly a checked call's tensors, and the memory that it uses besides.

        Raises
        ------
        TypeError, ValueError
            If the kernel refuses an argument. The message names it and says why.
        """
        arguments, way = _of_kernel(call), self.way
        workspace = self._workspace(call.arguments.a) if way.workspace else None
        every = (*arguments, way.raster, way.swizzle, workspace)
        found = way.kernel.prepare(*every, loader.stream_api())
        if isinstance(found, int):
            raise _explain(found, self.spec, arguments, call.arguments.form)
        if found is not None:
            return found, workspace

        # The kernel clears memory ahead of each launch, or shares it with the other launches of its stream.
        def launch() -> None:
            status = way.kernel.launch(*every)
            if status != 0:
                raise _explain(status, self.spec, arguments, call.arguments.form)

        return launch, workspace

    def same_as(self, other: AnyPlan) -> bool:
        """Whether another plan for the same shape would serve the same calls."""
        return isinstance(other, Plan) and other.spec == self.spec

    def _workspace(self, a: Tensor) -> Tensor:
        return new_tensor(a, (self.way.workspace,), (1,), torch.uint8)


def _of_kernel(call: Call) -> tuple[Any, ...]:
    """Return a checked call's tensors and numbers in the kernel's order."""
    checked = call.arguments
    return checked.a, checked.b, call.outputs[0], *checked.inputs.values(), *call.outputs[1:]


def make_plan(name: str, spec: KernelSpec, order: TileOrder, call: Call, *, exact: bool = False) -> Plan:
    """Plan calls like this one with a kernel.

    Parameters
    ----------
    name : str
        The op's name, for profilers.
    spec : KernelSpec
        The kernel; it is built if nothing has it.
    order : TileOrder
        In which its tiles are visited.
    call : Call
        The call.
    exact : bool
        Whether new outputs have the declared majors, as for an exact kernel; otherwise they are row-major.
    """
    arguments, outputs = call.arguments, (spec.d, *spec.outputs)
    read = ((spec.a, arguments.a), (spec.b, arguments.b))
    shapes = tuple(tuple(arguments.output_shape(o)) for o in call.graph.outputs)  # no torch.Size: see new_tensor
    made = tuple(
        (_by_columns(shape, call) if exact and of.major == "col" else new_strides(o.kind, shape), t.dtype)
        for o, shape, t, of in zip(call.graph.outputs, shapes, call.outputs, outputs, strict=True)
    )
    misaligned = not exact and any(not of.aligned and _may_have_aligned_lines(of, x) for of, x in read)
    way = make_way(name, spec, order, call.problem, arguments.a.device, made, misaligned)
    return Plan(way, shapes[0], shapes[1:], copies_of(spec))


def copies_of(spec: KernelSpec) -> int:
    """Return how many matrices a kernel copies at each call, ahead of multiplying them."""
    if not spec.config.copies:
        return 0
    of_a, of_b = copied(spec.a, spec.b)
    return of_a + of_b * (1 + len(spec.epilogue.products))


def make_way(
    name: str,
    spec: KernelSpec,
    order: TileOrder,
    problem: Problem,
    device: torch.device,
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...],
    misaligned: bool = False,
) -> Way:
    """Return how a kernel is launched at a problem, with strides and dtype of each output: see :class:`Way`."""
    kernel, (raster, swizzle) = Registry.current().kernel(spec), order.numbers
    with torch.cuda.device(device):
        workspace = int(kernel.workspace_size(*problem, raster, swizzle))
    launch = in_range(name, kernel.launch) if env.nvtx_enabled() else kernel.launch
    return Way(spec, kernel, launch, raster, swizzle, workspace, outputs[0], outputs[1:], misaligned)


def _may_have_aligned_lines(operand: Operand, matrix: Tensor) -> bool:
    """Whether the lines of a contiguous matrix of this shape begin at multiples of 16 bytes."""
    length = matrix.shape[-1 if operand.major == "row" else -2]
    return length * operand.dtype.bytes % arch.TMA_ALIGNMENT_BYTES == 0


def _are_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether the lines of both matrices begin at multiples of 16 bytes."""
    if (a.data_ptr() | b.data_ptr()) % _LINE:
        return False
    return all(stride == 1 or stride * x.element_size() % _LINE == 0 for x in (a, b) for stride in x.stride())


def _by_columns(shape: tuple[int, ...], call: Call) -> tuple[int, ...]:
    """Return the strides of a new tensor (..., N) whose columns are contiguous, across all that is folded into M."""
    if call.arguments.form == DENSE:
        return *contiguous(shape[:-1]), call.problem.m
    *batches, rows, columns = shape
    *strides, _, rows_apart = contiguous((*batches, columns, rows))
    return *strides, rows_apart, rows


def in_range(name: str, launch: Callable[..., _Result]) -> Callable[..., _Result]:
    """Show launches in profilers as named ranges."""

    def launch_in_range(*arguments: Any) -> _Result:
        with torch.cuda.nvtx.range(name):
            return launch(*arguments)

    return launch_in_range


def _explain(status: int, spec: KernelSpec, arguments: Sequence[Any], form: Form) -> Exception:
    """Return a readable error for a kernel's refusal."""
    position, reason = refusal(status)
    inputs, outputs = spec.epilogue.inputs, spec.epilogue.outputs[1:]
    of_form = form.operands
    names = ["a", "b", "out", *of_form, *(i.name for i in inputs), *map(output_name, outputs)]
    types = [spec.a, spec.b, spec.d, *(Operand(i32, "row", 1) for _ in of_form), *spec.inputs, *spec.outputs]
    if position >= len(names):
        return LoadError(f"{spec.slug} refused argument {position} ({reason.name}): a defect of this library")
    name, wanted, value = names[position], types[position], arguments[position]
    is_tensor = isinstance(value, Tensor)
    found = f"{value.dtype}, shape {tuple(value.shape)}, strides {value.stride()}" if is_tensor else f"{value!r}"
    what = {
        Reason.KIND: f"must be a tensor of {wanted.dtype}",
        Reason.SHAPE: "has a shape that disagrees with the other arguments",
        Reason.DTYPE: f"must have dtype {wanted.dtype}",
        Reason.DEVICE: "must be on the same CUDA device as a",
        Reason.MAJOR: f"must be {wanted.major}-major: contiguous along "
        f"{'the last' if wanted.major == 'row' else 'the first'} dimension",
        Reason.ALIGNMENT: f"must be aligned to {wanted.alignment * wanted.dtype.bytes} bytes in address, leading "
        "dimension and extent; declare a lower alignment, as in 'bf16.row.align2'",
        Reason.OVERLAP: "shares memory with another argument",
        Reason.NULL: "has no memory (its address is null): pass the plain tensor it wraps, e.g. to_local() of a "
        "DTensor",
    }.get(reason, reason.name.lower())
    error = TypeError if reason in (Reason.KIND, Reason.DTYPE) else ValueError
    return error(f"{name} {what}; it is {found}. The kernel is {spec.slug}")
