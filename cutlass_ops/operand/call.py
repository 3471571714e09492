"""One checked call: the problem, its outputs, and the signature of kernels that can serve it.

This is the slow path, taken once for each combination of shapes. A warm call goes straight to its plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cutlass_ops.base import arch, mma
from cutlass_ops.base.dtypes import FP8, f32, f64, i32, i64, u8
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.errors import NoDeviceError
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, MASKED, RAGGED_K, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec, Major, Operand
from cutlass_ops.epilogue import integers
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.operand import batches, groups, matrices, operands, reference, sizes
from cutlass_ops.operand.matrices import OPERANDS, Matrix
from cutlass_ops.operand.operands import Arguments
from cutlass_ops.operand.outputs import check_out, check_overlap, check_quantized, output_name
from cutlass_ops.operand.results import new_strides, quantized_dtype, usual_dtype
from cutlass_ops.operand.tensors import as_stored, element_type, refuse_differentiated, require_memory, writing


class Call(NamedTuple):
    """A checked call."""

    graph: Graph
    arguments: Arguments  # operands and inputs as the kernel sees them
    outputs: tuple[Tensor, ...]  # as the kernel sees them, D first: the caller's or new ones
    given: tuple[Tensor | None, ...]  # the caller's tensor for each output

    @property
    def is_reference(self) -> bool:
        """Whether PyTorch serves the call: for tensors on the CPU, or an extent of 0."""
        return self.arguments.a.device.type == "cpu" or 0 in self.problem

    @property
    def problem(self) -> Problem:
        """The extents of the product."""
        return self.arguments.problem

    @property
    def chosen_for(self) -> Problem:
        """The problem for which a kernel is chosen. For groups it is an estimate, as the host does not know them."""
        (m, n, k, count), form = self.problem, self.arguments.form
        if not form.operands or 0 in self.problem:
            return self.problem
        if form == RAGGED_K:
            return groups.typical_of_k(m, n, k, count)
        if form == MASKED:
            m = min(self.arguments.expected or m, m) * count
        return groups.typical(m, n, k, count)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the call with its name in messages."""
        yield from (("a", self.arguments.a), ("b", self.arguments.b))
        yield from ((name, value) for name, value in self.arguments.inputs.items() if isinstance(value, Tensor))
        yield from zip(map(output_name, self.graph.outputs), self.outputs, strict=True)

    def results(self) -> list[Tensor]:
        """Return the outputs as the caller sees them."""
        return [
            given if given is not None else shaped(flat, self.arguments.output_shape(output))
            for output, given, flat in zip(self.graph.outputs, self.given, self.outputs, strict=True)
        ]

    def refuse_differentiated(self) -> None:
        """Raise ValueError if a tensor requires grad: calls that autograd records do not come here."""
        for name, tensor in self.tensors():
            refuse_differentiated(name, tensor)

    def check_layouts(self) -> None:
        """Raise ValueError for layouts that a kernel cannot address, so that code for the CPU also runs on a GPU."""
        tiles = {i.name for i in self.graph.inputs if i.kind is Kind.TILE}
        tiles |= {output_name(o) for o in self.graph.outputs if o.kind is Kind.TILE}
        for matrix in (self.arguments.operand_a, *(_matrix(n, x) for n, x in self.tensors() if n in tiles)):
            matrix.layout()
        _check_lines(self)  # first, for the advice about what is read along K only
        matrices.alike([self.arguments.operand_b, *_products(self)])

    def run_reference(self) -> None:
        """Compute the outputs in PyTorch, for operands that a kernel could also address."""
        self.check_layouts()
        several = self.why_apart is not None or bool(self.arguments.form.operands)
        for part in self.parts() if several else [self]:
            a, b = part.arguments.operand_a, part.arguments.operand_b
            exact = a.tensor.dtype == torch.float64
            inputs = {**part.arguments.inputs, **{x.name: x.values() for x in _products(part)}}
            if exact:  # the reference rounds Python numbers to FP32
                inputs = {
                    n: x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.float64) for n, x in inputs.items()
                }
            values = reference.gemm_reference(
                a,
                b,
                self.graph,
                inputs,
                d_dtype=self.outputs[0].dtype,
                compute_dtype=torch.float64 if exact else torch.float32,
                output_dtypes={o.name: t.dtype for o, t in zip(self.graph.outputs[1:], self.outputs[1:], strict=True)},
            )
            with writing(*part.outputs):
                for output, tensor in zip(self.graph.outputs, part.outputs, strict=True):
                    tensor.copy_(values[output.name])

    def parts(self) -> Iterator[Call]:
        """Yield a dense call for each GEMM, whose outputs are views of this call's.

        Groups without rows are left out, and those without K are not. It reads from the device where groups end.
        """
        arguments = self.arguments
        if arguments.form == DENSE:
            yield self
            return
        of_rows = arguments.form in (GROUPED, MASKED)
        dimensions = {Kind.ROW: 1, Kind.COL: 1, Kind.TILE: 2, Kind.PRODUCT: 2}
        for at_a, at_b, each, rows, problem in self._places():
            a, b = arguments.operand_a.at(at_a), arguments.operand_b.at(at_b)
            inputs: dict[str, Tensor | float] = {}
            for name, kind in self.graph.inputs:
                value = arguments.inputs[name]
                if isinstance(value, Tensor) and kind in dimensions:
                    if of_rows and kind in (Kind.COL, Kind.TILE):
                        value = value[rows]
                    elif value.ndim > dimensions[kind]:
                        value = value[each]
                inputs[name] = value
            inputs |= {**a.further, **b.further}
            outputs = tuple(x[rows] for x in self.outputs)
            part = Arguments(problem, (problem.m,), a, b, inputs, math=arguments.math)
            yield Call(self.graph, part, outputs, outputs)

    def _places(self) -> Iterator[tuple[Any, Any, Any, Any, Problem]]:
        """Yield what each GEMM reads of A and of B, its batch or group, its rows of D, and its problem."""
        arguments, of_one = self.arguments, self.problem._replace(count=1)
        if arguments.form == BATCHED:
            for at in itertools.product(*map(range, arguments.a.shape[:-2])):
                yield at, at, at, at, of_one
            return
        (given,) = (arguments.inputs[name] for name in arguments.form.operands)
        assert isinstance(given, Tensor)
        m, n, k, count = self.problem
        # If there is nothing to compute, do not wait for a GPU to read where groups end.
        reads = given.device.type == "cpu"
        if arguments.form == RAGGED_K:
            if 0 not in (m, n):
                every = groups.ends(given, k) if k or reads else itertools.repeat(slice(0, 0), count)
                for group, part in enumerate(every):
                    yield (slice(None), part), part, group, group, of_one._replace(k=part.stop - part.start)
        elif reads or 0 not in self.problem:
            for group, (rows, size) in enumerate(groups.rows_of_each(arguments.form, given, m)):
                if size and 0 not in self.problem:
                    yield rows, group, group, rows, of_one._replace(m=size)

    @property
    def why_apart(self) -> str | None:
        """Why each GEMM of the call takes its own launch, in words; None if one kernel computes them all."""
        return batches.why_apart(self.graph) if self.arguments.form == BATCHED else None


def shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new tensor in another shape, but not a view: autograd lets nobody change a view in place."""
    return flat if sizes.same(flat.shape, shape) else torch.ops.aten._unsafe_view(flat, shape)


def check_call(
    graph: Graph,
    a: Any,
    b: Any,
    inputs: Mapping[str, Any],
    out: Any,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | None = None,
    offsets: Any = None,
    math: mma.Math | None = None,
    form: Form = DENSE,
) -> Call:
    """Check a call's arguments and allocate missing outputs.

    If `spec` is given, the kernel is fixed and decides the outputs' types. `offsets` says where groups end, or how many
    rows each has. `math` is a key of :data:`cutlass_ops.base.mma.MATHS` for FP32 operands, or one of
    :data:`cutlass_ops.base.mma.ACCUMULATIONS` for FP8.
    """
    a, b, offsets = map(as_stored, (a, b, offsets))
    inputs = {name: as_stored(x) for name, x in inputs.items()}
    arguments = operands.check_arguments(graph, a, b, inputs, math, form, offsets)
    if spec is not None and spec.form != arguments.form.of_kernels:
        instead = "b (K, N)" if spec.form == DENSE else "b (..., K, N) with dimensions of batches: b[None] has one"
        raise ValueError(f"b has shape {tuple(b.shape)}, and {spec.slug} is {spec.form}: pass {instead}")
    multiplied = mma.mma_of(*arguments.types)
    assert multiplied is not None  # the check of A and B found it
    known = [getattr(torch, t.torch_name) for t in multiplied.results]
    if out_dtype is not None and out_dtype not in known:
        *others, last = map(str, known)
        raise TypeError(f"out_dtype is {out_dtype}: use {', '.join(others)}{' or ' if others else ''}{last}")
    quantized = quantized_dtype(graph)
    if quantized is not None and out_dtype not in (None, quantized):
        raise TypeError(f"out_dtype is {out_dtype}, and the epilogue quantises D to {quantized}: omit out_dtype")
    given = given_outputs(graph, out)
    outputs: list[Tensor] = []
    for position, (output, tensor) in enumerate(zip(graph.outputs, given, strict=True)):
        if tensor is not None:
            stored = multiplied.results if position == 0 else multiplied.stored
            allowed = stored if output.reduce is None else multiplied.read
            outputs.append(check_out(arguments, output, tensor, allowed, out_dtype if position == 0 else None))
            continue
        wanted = None if spec is None else (spec.d, *spec.outputs)[position]
        d_dtype = outputs[0].dtype if outputs else (out_dtype or usual_dtype(arguments.a.dtype, arguments.b.dtype))
        default = reference.result_dtype(graph, output) or d_dtype
        dtype = default if wanted is None else getattr(torch, wanted.dtype.torch_name)
        col_major = wanted is not None and output.kind is Kind.TILE and wanted.major == "col"
        outputs.append(_allocate(output.kind, arguments.flat_shape(output), dtype, arguments.a.device, col_major))
    why = integers.why_not(graph) if outputs[0].dtype is torch.int32 else None
    if why is not None:
        raise TypeError(f"{'out_dtype' if given[0] is None else 'out'} is {outputs[0].dtype}, and {why}")
    if quantized is not None:
        check_quantized(arguments.problem.n, quantized, None if given[0] is None else outputs[0])
    if any(t is not None for t in given):
        check_overlap(graph, arguments, outputs)
    return Call(graph, arguments, tuple(outputs), given)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Turn PyTorch's modes off while the library handles tensors without data.

    These tensors are not the caller's work, so modes that count, trace or fake operations must not see them.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@without_modes()
def call_at(
    graph: Graph,
    problem: Problem,
    dtype: str,
    a: Major,
    b: Major,
    out_dtype: torch.dtype | None = None,
    input_dtypes: Mapping[str, str] | None = None,
    form: Form = DENSE,
    math: mma.Math | None = None,
) -> Call:
    """Return a call with contiguous tensors of these extents, without data.

    The epilogue's inputs have `dtype`, or D's usual dtype if `dtype` is FP8, unless `input_dtypes` names others. D's
    dtype is by default that of A, and BF16 for FP8. A product's matrix has B's major. Batched tensors have all batches
    in one dimension, and vectors are shared. Each group has M rows, or all of K.
    """
    refusal = form.refuses(problem)
    if refusal:
        raise ValueError(refusal)
    m, n, k = problem.extents
    others = dict(input_dtypes or {})
    unknown = sorted(set(others) - {i.name for i in graph.inputs})
    if unknown:
        names = ", ".join(i.name for i in graph.inputs) or "none"
        raise ValueError(f"input_dtypes names {', '.join(unknown)}: the epilogue's inputs are {names}")

    element = element_named(dtype, (*mma.OPERANDS, f32))
    of_a: torch.dtype = getattr(torch, element.torch_name)
    lead = (problem.count,) if form == BATCHED else ()
    of_b = (problem.count,) if form in (BATCHED, GROUPED) else ()
    m *= problem.count if form == GROUPED else 1
    k *= problem.count if form == RAGGED_K else 1
    frame = batches.Frame(form, (m,), of_b, m, n, k)

    def empty(*shape: int, major: Major = "row", dtype: torch.dtype = of_a) -> Tensor:
        tensor = torch.empty(
            shape if major == "row" else (*shape[:-2], shape[-1], shape[-2]), dtype=dtype, device="meta"
        )
        return tensor if major == "row" else tensor.mT

    def drawn(name: str, kind: Kind) -> Tensor | float:
        if kind in (Kind.SCALAR, Kind.INTEGER):
            return 0 if kind is Kind.INTEGER else 1.0
        if kind in OPERANDS:
            return empty(*OPERANDS[kind].shapes(kind, frame)[0], dtype=OPERANDS[kind].of_further(of_a))
        if kind is Kind.PRODUCT:
            return empty(*of_b, k, n, major=b)
        read = getattr(torch, element_named(others[name]).torch_name) if name in others else usual_dtype(of_a, of_a)
        return empty(*(lead if kind is Kind.TILE else ()), *frame.own(kind), dtype=read)

    inputs = {i.name: drawn(*i) for i in graph.inputs}
    offsets = empty(problem.count, dtype=torch.int32) if form.operands else None
    x, y = empty(*lead, m, k, major=a), empty(*of_b, k, n, major=b)
    held = next((OPERANDS[i.kind].held for i in graph.inputs if i.kind in OPERANDS), None)
    if held is not None:
        y = empty(k // held.along_k, n, major="col", dtype=held.dtype or of_a)
    math = math or mma.math_of(element)
    return check_call(graph, x, y, inputs, None, out_dtype, offsets=offsets, math=math, form=form)


def given_outputs(graph: Graph, out: Any) -> tuple[Any, ...]:
    """Return the caller's tensor or None for each output. A single tensor is D; a mapping names outputs."""
    names = [o.name for o in graph.outputs]
    if out is None:
        return (None,) * len(names)
    if isinstance(out, Tensor):
        return (out, *(None for _ in names[1:]))
    if isinstance(out, Mapping):
        unknown = sorted(str(name) for name in out if name not in names)
        if unknown:
            raise ValueError(f"out names {', '.join(unknown)}: the outputs are {', '.join(names)}")
        return tuple(out.get(name) for name in names)
    raise TypeError(f"out must be a tensor or a mapping of output names to tensors, not {type(out).__name__}")


def _allocate(kind: Kind, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, col_major: bool) -> Tensor:
    if col_major:
        *batch, rows, columns = shape
        return torch.empty((*batch, columns, rows), dtype=dtype, device=device).mT
    if kind is Kind.BLOCKS_D:
        return torch.empty_strided(shape, new_strides(kind, shape), dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Describe a CUDA device for the choice of a kernel. Raises NoDeviceError for other devices."""
    if device.type != "cuda":
        raise NoDeviceError(arch.no_device(device))
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count, properties.name)


def _check_lines(call: Call) -> Sequence[Major]:
    """Return the majors that B may have; refuse operands that no kernel for their types or form reads."""
    # Separate batches are launches of one GEMM each, on a device and in the reference.
    one = call.arguments.form == DENSE or call.why_apart is not None
    return operands.check_lines(call.arguments, _products(call), one=one)


def _products(call: Call) -> list[Matrix]:
    """Return the matrices of further products, which have B's type."""
    named = ((n, call.arguments.inputs[n]) for n in call.graph.products)
    return [Matrix(n, x, call.arguments.operand_b.element) for n, x in named if isinstance(x, Tensor)]


def _matrix(name: str, tensor: Tensor) -> Matrix:
    return Matrix(name, tensor, element_type(name, tensor))


# The greatest K of which sums are `fast` by default: up to there they have at most 1.1 times the error of promoted
# ones, also where no products cancel (docs/fp8.md). Rounding to FP8 hides more of it than other types.
_FAST_K_TO_FP8, _FAST_K = 512, 128


def accumulation(call: Call) -> tuple[mma.Math | None, str]:
    """Return how a call's sums of FP8 products are added up, and why. None for other operands."""
    of_a, of_b = call.arguments.types
    if not (of_a in FP8 and of_b in FP8):
        return None, ""
    if call.graph.block_scales:
        return "promoted", "scales of blocks are applied as sums are added up"
    if call.arguments.math is not None:
        return call.arguments.math, f"math={call.arguments.math!r}"
    tiles = (t for o, t in zip(call.graph.outputs, call.outputs, strict=True) if o.kind is Kind.TILE)
    rounded = {element_type("out", tile) for tile in tiles}.difference(FP8)
    longest = _FAST_K if rounded else _FAST_K_TO_FP8
    if call.problem.k <= longest:
        return "fast", f"K is at most {longest}"
    return "promoted", f"K is more than {longest}, of which math='fast' would add more than a tenth to the error"


@without_modes()
def signature_of(call: Call, device: Device) -> OpSignature:
    """Return the operand types of kernels that can serve a call."""
    graph, arguments = call.graph, call.arguments
    for name, tensor in call.tensors():
        require_memory(name, tensor)
    majors = _check_lines(call)
    type_a, _ = arguments.types
    left, right = arguments.operand_a, arguments.operand_b
    of_rows = arguments.form in (GROUPED, MASKED)
    a = left.layouts.get("col") if arguments.form == RAGGED_K else None
    a = a or left.layout(of_rows=of_rows)
    b = matrices.alike([right, *_products(call)], majors)
    by_tma = device.loads_by_tma(a.operand, b.operand)
    scalar = f64 if type_a is f64 else f32
    promoted = not graph.block_scales and accumulation(call)[0] == "promoted"

    load_a, load_b = (a.operand, b.operand) if by_tma else _alike((a.for_vector_access(), b.for_vector_access()))
    load_a = replace(load_a, promoted=promoted, scaling=left.block)
    load_b = replace(load_b, promoted=promoted, scaling=right.block)

    def typed(name: str, kind: Kind, value: Tensor | float, *, is_output: bool) -> Operand:
        if kind is Kind.INTEGER or not isinstance(value, Tensor):
            return Operand(i64 if kind is Kind.INTEGER else scalar, "row", 1)
        if value.dtype is torch.int32 and kind is not Kind.TILE:
            return Operand(i32, "row", 1)
        if kind is Kind.META_B:
            return Operand(u8, "row", 1)
        if kind is Kind.PRODUCT:
            return load_b
        if kind is not Kind.TILE:
            return Operand(element_type(name, value), "row", 1)
        found = _matrix(name, value).layout(of_rows=of_rows)
        # TMA reads zeros beyond an extent. Its stores were seen to write beyond extents that are not a multiple of
        # 16 bytes (benchmarks/NOTES.md).
        reads_by_tma = by_tma and found.operand.aligned and not is_output
        return found.operand if reads_by_tma else found.for_vector_access()

    outputs = [("out", graph.outputs[0].kind, call.outputs[0])]
    outputs += [(o.name, o.kind, t) for o, t in zip(graph.outputs[1:], call.outputs[1:], strict=True)]
    inputs = [(i.name, i.kind, arguments.inputs[i.name]) for i in graph.inputs]
    types = [typed(*x, is_output=False) for x in inputs] + [typed(*x, is_output=True) for x in outputs]
    found = _alike(types, [kind is Kind.TILE for _, kind, _ in (*inputs, *outputs)])
    count, form = len(inputs), arguments.form.of_kernels
    read, (d, *others) = found[:count], found[count:]
    signature = OpSignature(graph.of_kernels(), load_a, load_b, d, read, tuple(others), form)
    return groups.read_by_registers(signature) if form == GROUPED else signature


def _alike(found: Sequence[Operand], is_tile: Sequence[bool] = (True, True)) -> tuple[Operand, ...]:
    """Give all misaligned matrices their lowest common alignment: this needs fewer kernels at nearly the same speed."""
    named = list(zip(found, is_tile, strict=True))
    lowest = min((t.alignment for t, tile in named if tile and not t.aligned), default=0)
    return tuple(replace(t, alignment=lowest) if tile and not t.aligned else t for t, tile in named)
