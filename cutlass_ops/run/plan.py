"""Plans: a loaded kernel with its launch arguments, ready for all calls of one shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

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
from cutlass_ops.operand import watching
from cutlass_ops.operand.call import Call
from cutlass_ops.operand.outputs import output_name
from cutlass_ops.operand.results import contiguous, new_strides
from cutlass_ops.run.registry import Registry

_Result = TypeVar("_Result")
_Make: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]

_LINE = arch.TMA_ALIGNMENT_BYTES  # bound here for warm calls
_ANY = 1 << 20  # an alignment above every kernel's

# How compiled programs of PyTorch allocate their buffers; a later version may not have these. They take no torch.Size.
_programs: Any = getattr(torch._C._dynamo, "guards", None)
_on_cuda: _Make | None = getattr(_programs, "_empty_strided_cuda", None)
_on_cpu: _Make | None = getattr(_programs, "_empty_strided_cpu", None)
_current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)


def new_tensor(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return ``like.new_empty_strided(shape, strides, dtype=dtype)`` in a third of the time: the dispatcher is skipped.

    Callers must use that call instead if something watches this thread's operators.
    """
    if like.is_cuda:
        # The quick function knows no device but the current one.
        if _on_cuda is not None and _current_device is not None and like.get_device() == _current_device():
            return _on_cuda(shape, strides, dtype)
    elif _on_cpu is not None and like.is_cpu:
        return _on_cpu(shape, strides, dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


# The caller's tensor for each output, D first; None if no output is given.
Given: TypeAlias = tuple[Tensor | None, ...] | None
# Shape for the caller, strides and dtype of a new output.
New: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class AnyPlan(ABC):
    """What serves calls of one shape: a kernel (:class:`Plan`), or PyTorch or other ops (run/fallbacks.py).

    `copies` is how many matrices it copies at each call. `by_pytorch` is 1 if PyTorch's own operators serve, else 0.
    """

    __slots__ = ()
    copies: int
    by_pytorch: int

    @property
    def alignment(self) -> int:
        """The alignment that it needs of its matrices, in elements: plans with a larger one are asked first."""
        return _ANY

    @property
    @abstractmethod
    def takes(self) -> object:
        """What decides which calls of its shape it serves."""

    @abstractmethod
    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Serve a warm call; None if it does not take the arguments. If `low`, A or B has a misaligned address."""

    def same_as(self, other: AnyPlan) -> bool:
        """Whether another plan for the same shape would serve the same calls."""
        return type(other) is type(self) and other.takes == self.takes


# A warm call reads these: slots take less than half the time of a named tuple's fields.
@dataclass(frozen=True, slots=True)
class Plan(AnyPlan):
    """How to serve calls of one shape with a kernel."""

    spec: KernelSpec
    kernel: LoadedKernel
    launch: Callable[..., int]  # the kernel's entry function
    raster: int  # with `swizzle`, the order in which tiles are visited: :attr:`TileOrder.numbers`
    swizzle: int
    workspace: int  # bytes for a launch
    d: New  # the kernel folds leading dimensions
    others: tuple[New, ...]  # the other outputs
    # Whether A or B was misaligned though its shape does not make it so. Aligned operands of this shape then have a
    # faster kernel, and this one would take them.
    misaligned: bool = False
    copies: int = 0  # matrices that the kernel copies at each call before it multiplies them
    by_pytorch: int = 0

    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: Given, low: bool = False
    ) -> tuple[Tensor, ...] | None:
        """Launch on a warm call's unchecked arguments, and return the outputs.

        Returns None if the kernel refuses the arguments, which then need checking, or is not for them.
        """
        if self.misaligned and not low and _are_aligned(a, b):
            return None
        workspace = new_tensor(a, (self.workspace,), (1,), torch.uint8) if self.workspace else None
        try:
            if not self.others:
                if given is None or (d := given[0]) is None:
                    d = new_tensor(a, *self.d)
                return (d,) if self.launch(a, b, d, *inputs, self.raster, self.swizzle, workspace) == 0 else None
            if given is None:
                d, *others = self.new_outputs(a)
            else:
                missing = zip(given, (self.d, *self.others), strict=True)
                d, *others = [new_tensor(a, *of) if x is None else x for x, of in missing]
            status = self.launch(a, b, d, *inputs, *others, self.raster, self.swizzle, workspace)
            return (d, *others) if status == 0 else None
        except RuntimeError:
            # Sparse and similar tensors have no memory that a kernel could refuse.
            if all(watching.is_memory(x) for x in (a, b, *inputs, *(given or ())) if isinstance(x, Tensor)):
                raise
            return None

    def new_outputs(self, a: Tensor) -> tuple[Tensor, ...]:
        """Return an empty tensor for each output, on the device of a."""
        return tuple([new_tensor(a, *of) for of in (self.d, *self.others)])

    @property
    def takes(self) -> object:  # noqa: D102
        return self.spec

    @property
    def alignment(self) -> int:  # noqa: D102
        spec = self.spec
        return sum(x.alignment for x in (spec.a, spec.b, spec.d, *spec.inputs, *spec.outputs))

    def launch_call(self, call: Call) -> None:
        """Launch on a checked call's arguments. Raises TypeError or ValueError if the kernel refuses one."""
        self._require(self.launch(*self._every(call)), call)

    def prepared(self, call: Call) -> tuple[Callable[[], object], Tensor | None]:
        """Return a function that launches on exactly a checked call's tensors, and other memory that it uses, if any.

        Raises TypeError or ValueError if the kernel refuses an argument. The message names it and says why.
        """
        kernel, every = self.kernel, self._every(call)
        found = kernel.prepare(*every, loader.stream_api())
        if isinstance(found, int):
            self._require(found, call)
        elif found is not None:
            return found, every[-1]

        # The kernel clears memory ahead of each launch, or shares it with the other launches of its stream.
        def launch() -> None:
            status = kernel.launch(*every)
            if status != 0:
                self._require(status, call)

        return launch, every[-1]

    def _every(self, call: Call) -> tuple[Any, ...]:
        """Return all arguments of the kernel for a checked call: the workspace is the last."""
        workspace = new_tensor(call.arguments.a, (self.workspace,), (1,), torch.uint8) if self.workspace else None
        return *_of_kernel(call), self.raster, self.swizzle, workspace

    def _require(self, status: int, call: Call) -> None:
        if status != 0:
            raise _explain(status, self.spec, _of_kernel(call), call.arguments.form)


def _of_kernel(call: Call) -> tuple[Any, ...]:
    """Return a checked call's tensors and numbers in the kernel's order."""
    checked = call.arguments
    return checked.a, checked.b, call.outputs[0], *checked.inputs.values(), *call.outputs[1:]


def make_plan(name: str, spec: KernelSpec, order: TileOrder, call: Call, *, exact: bool = False) -> Plan:
    """Plan calls like this one with a kernel, which is built if nothing has it.

    `name` is for profilers. If `exact`, new outputs have the declared majors; otherwise they are row-major.
    """
    arguments, outputs = call.arguments, (spec.d, *spec.outputs)
    read = ((spec.a, arguments.a), (spec.b, arguments.b))
    new: list[New] = []
    for o, t, of in zip(call.graph.outputs, call.outputs, outputs, strict=True):
        shape = tuple(arguments.output_shape(o))  # no torch.Size: see new_tensor
        by_columns = exact and of.major == "col"
        new.append((shape, _by_columns(shape, call) if by_columns else new_strides(o.kind, shape), t.dtype))
    misaligned = not exact and any(not of.aligned and _may_have_aligned_lines(of, x) for of, x in read)
    return plan_of(name, spec, order, call.problem, arguments.a.device, new, misaligned)


def _copies_of(spec: KernelSpec) -> int:
    """Return how many matrices a kernel copies at each call before it multiplies them."""
    if not spec.config.copies:
        return 0
    of_a, of_b = copied(spec.a, spec.b)
    return of_a + of_b * (1 + len(spec.epilogue.products))


def plan_of(
    name: str,
    spec: KernelSpec,
    order: TileOrder,
    problem: Problem,
    device: torch.device,
    new: Sequence[New],
    misaligned: bool = False,
) -> Plan:
    """Plan calls of a problem with a kernel, from what makes each output if it is missing: see :class:`Plan`."""
    kernel, (raster, swizzle) = Registry.current().kernel(spec), order.numbers
    with torch.cuda.device(device):
        workspace = int(kernel.workspace_size(*problem, raster, swizzle))
    launch = in_range(name, kernel.launch) if env.nvtx_enabled() else kernel.launch
    d, *others = new
    return Plan(spec, kernel, launch, raster, swizzle, workspace, d, tuple(others), misaligned, _copies_of(spec))


def _may_have_aligned_lines(operand: Operand, matrix: Tensor) -> bool:
    """Whether the lines of a contiguous matrix of this shape begin at multiples of 16 bytes."""
    length = matrix.shape[-1 if operand.major == "row" else -2]
    return operand.dtype.bytes_of(length) % arch.TMA_ALIGNMENT_BYTES == 0


def _are_aligned(a: Tensor, b: Tensor) -> bool:
    """Whether the lines of both matrices begin at multiples of 16 bytes."""
    if (a.data_ptr() | b.data_ptr()) % _LINE:
        return False
    return all(stride == 1 or stride * x.element_size() % _LINE == 0 for x in (a, b) for stride in x.stride())


def _by_columns(shape: tuple[int, ...], call: Call) -> tuple[int, ...]:
    """Return the strides of a new tensor (..., N) whose columns are contiguous across all dimensions folded into M."""
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
        Reason.ALIGNMENT: f"must be aligned to {wanted.dtype.bytes_of(wanted.alignment)} bytes in address, leading "
        "dimension and extent; declare a lower alignment, as in 'bf16.row.align2'",
        Reason.OVERLAP: "shares memory with another argument",
        Reason.NULL: "has no memory (its address is null): pass the plain tensor it wraps, e.g. to_local() of a "
        "DTensor",
    }.get(reason, reason.name.lower())
    error = TypeError if reason in (Reason.KIND, Reason.DTYPE) else ValueError
    return error(f"{name} {what}; it is {found}. The kernel is {spec.slug}")
