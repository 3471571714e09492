"""One checked call: the problem, its outputs, and the signature of kernels that can serve it.

This is the slow path, taken once for each combination of shapes. A warm call goes straight to its plan.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cutlass_ops.base import arch, mma
from cutlass_ops.base.dtypes import FP8, f32, f64, i32, i64
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.errors import NoDeviceError
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, MASKED, RAGGED_K, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec, Major, Operand
from cutlass_ops.epilogue import integers
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import batches, groups, matrices, operands, reference, sizes
from cutlass_ops.run.operands import Arguments
from cutlass_ops.run.outputs import check_out, check_overlap, check_quantized, output_name
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.run.results import new_strides, quantized_dtype, usual_dtype
from cutlass_ops.run.tensors import element_type, refuse_differentiated, require_memory, writing


class Call(NamedTuple):
    """A checked call.

    Attributes
    ----------
    graph : Graph
        The epilogue.
    arguments : Arguments
        Operands and inputs as the kernel sees them.
    outputs : tuple of Tensor
        The outputs as the kernel sees them, D first: the caller's or new ones.
    given : tuple of Tensor or None
        The caller's tensor for each output.
    """

    graph: Graph
    arguments: Arguments
    outputs: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]

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
        """The problem for which a kernel is chosen: that of groups is made up, as the host does not know them."""
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
        yield from zip(groups.matrix_names(self.arguments.form), (self.arguments.a, self.arguments.b), strict=True)
        yield from ((name, value) for name, value in self.arguments.inputs.items() if isinstance(value, Tensor))
        yield from zip(map(output_name, self.graph.outputs), self.outputs, strict=True)

    def results(self) -> list[Tensor]:
        """Return the outputs as the caller sees them."""
        return [
            given if given is not None else _shaped(flat, self.arguments.output_shape(output))
            for output, given, flat in zip(self.graph.outputs, self.given, self.outputs, strict=True)
        ]

    def refuse_differentiated(self) -> None:
        """Refuse what autograd should record: an op's calls do not come here then.

        Raises
        ------
        ValueError
            If a tensor requires grad. The message names it.
        """
        for name, tensor in self.tensors():
            refuse_differentiated(name, tensor)

    def check_layouts(self) -> None:
        """Refuse layouts that a kernel cannot address, so that code that runs on the CPU also runs on a GPU.

        Raises
        ------
        ValueError
            If one is such. The message says what to pass.
        """
        name_a, _ = groups.matrix_names(self.arguments.form)
        checked = {name_a, *(i.name for i in self.graph.inputs if i.kind is Kind.TILE)}
        checked |= {output_name(o) for o in self.graph.outputs if o.kind is Kind.TILE}
        for name, tensor in self.tensors():
            if name in checked:
                matrices.matrix(name, tensor, element_type(name, tensor))
        _check_lines(self)  # first, for the advice about what is read along K only
        matrices.weights(self.arguments.b, _products(self), self.arguments.types[1])

    def run_reference(self) -> None:
        """Compute the outputs in PyTorch, for operands that a kernel could also address."""
        self.check_layouts()
        several = self.why_apart is not None or bool(self.arguments.form.operands)
        for part in self.parts() if several else [self]:
            a, b, inputs = _as_multiplied(part)
            values = reference.gemm_reference(
                a,
                b,
                self.graph,
                inputs,
                d_dtype=self.outputs[0].dtype,
                compute_dtype=torch.float64 if a.dtype == torch.float64 else torch.float32,
                output_dtypes={o.name: t.dtype for o, t in zip(self.graph.outputs[1:], self.outputs[1:], strict=True)},
            )
            with writing(*part.outputs):
                for output, tensor in zip(self.graph.outputs, part.outputs, strict=True):
                    tensor.copy_(values[output.name])

    def parts(self) -> Iterator[Call]:
        """Yield a dense call for each GEMM, whose outputs are views of this call's."""
        arguments = self.arguments
        if arguments.form == DENSE:
            yield self
            return
        if arguments.form in (GROUPED, MASKED):
            yield from self._groups()
            return
        if arguments.form == RAGGED_K:
            yield from self._groups_of_k()
            return
        problem = arguments.problem._replace(count=1)
        own = {i.name: 1 if i.kind in (Kind.ROW, Kind.COL) else 2 for i in self.graph.inputs}

        def at(name: str, value: Tensor | float, place: tuple[int, ...]) -> Tensor | float:
            return value[place] if isinstance(value, Tensor) and value.ndim > own[name] else value

        for place in itertools.product(*map(range, arguments.a.shape[:-2])):
            inputs = {name: at(name, value, place) for name, value in arguments.inputs.items()}
            outputs = tuple(x[place] for x in self.outputs)
            of_one = Arguments(
                problem, (problem.m,), arguments.a[place], arguments.b[place], inputs, math=arguments.math
            )
            yield Call(self.graph, of_one, outputs, outputs)

    def _groups(self) -> Iterator[Call]:
        """Yield a dense call for each group that has rows: it reads where they end."""
        arguments = self.arguments
        # On a GPU, nobody waits to be told where nothing ends.
        if 0 in self.problem and arguments.a.device.type != "cpu":
            return
        inputs = {i.name: (i.kind, arguments.inputs[i.name]) for i in self.graph.inputs}
        for expert, (rows, size) in enumerate(groups.rows_of_each(arguments)):

            def of_group(
                kind: Kind, value: Tensor | float, expert: int = expert, rows: groups.Place = rows
            ) -> Tensor | float:
                if not isinstance(value, Tensor) or kind is Kind.SCALAR or kind is Kind.INTEGER:
                    return value
                if kind in (Kind.ROW, Kind.PRODUCT, Kind.BLOCKS_B):
                    return value[expert] if value.ndim > 1 else value
                return value[rows]

            if not size or 0 in self.problem:
                continue
            own = {name: of_group(kind, value) for name, (kind, value) in inputs.items()}
            problem = self.problem._replace(m=size, count=1)
            outputs = tuple(x[rows] for x in self.outputs)
            of_one = Arguments(problem, (size,), arguments.a[rows], arguments.b[expert], own)
            yield Call(self.graph, of_one, outputs, outputs)

    def _groups_of_k(self) -> Iterator[Call]:
        """Yield a dense call for each group of K, those included that have none: it reads where they end."""
        arguments, problem = self.arguments, self.problem
        offsets = arguments.inputs["offsets"]
        assert isinstance(offsets, Tensor)
        if 0 in (problem.m, problem.n):
            return
        own = {i.name: 1 if i.kind in (Kind.ROW, Kind.COL) else 2 for i in self.graph.inputs}
        # Without any K, nobody has to wait on a GPU to be told where it ends.
        asks = problem.k or offsets.device.type == "cpu"
        every = groups.ends(offsets, problem.k) if asks else itertools.repeat(slice(0, 0), problem.count)
        for at, rows in enumerate(every):
            inputs = {
                name: value[at] if isinstance(value, Tensor) and value.ndim > own[name] else value
                for name, value in arguments.inputs.items()
                if name in own
            }
            of_one = problem._replace(k=rows.stop - rows.start, count=1)
            outputs = tuple(x[at] for x in self.outputs)
            part = Arguments(of_one, (problem.m,), arguments.a[:, rows], arguments.b[rows], inputs)
            yield Call(self.graph, part, outputs, outputs)

    @property
    def why_apart(self) -> str | None:
        """Why the call's GEMMs take a launch each, in words; None if one kernel computes them all."""
        return batches.why_apart(self.graph) if self.arguments.form == BATCHED else None


def _shaped(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a new tensor in another shape, but no view of it, which autograd would let nobody change in place."""
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

    Parameters
    ----------
    graph, a, b, inputs, out, out_dtype
        The call.
    spec : KernelSpec, optional
        The kernel, if it is fixed. It then decides the outputs' types.
    offsets : Tensor, optional
        Where groups end, or how many rows each has, if there are any.
    math : str, optional
        What the Tensor Cores make of FP32 operands: a key of :data:`cutlass_ops.base.mma.MATHS`. Or how sums of FP8
        products are added up: one of :data:`cutlass_ops.base.mma.ACCUMULATIONS`.
    form : Form
        Of what they are groups, if there are any: see ``declare/form.py``.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it.
    """
    if not form.operands:
        arguments = operands.check_arguments(graph, a, b, inputs, math)
    elif form == RAGGED_K:
        arguments = groups.check_arguments_of_k(graph, a, b, offsets, inputs)
    else:
        arguments = groups.check_arguments(graph, a, b, offsets, inputs, form, math)
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

    Parameters
    ----------
    graph : Graph
        The epilogue.
    problem : Problem
        The extents of each GEMM, and how many there are.
    dtype : str
        Dtype of A and B, which the epilogue's inputs have as well, unless it is FP8: these have D's usual dtype then.
    a, b : {"row", "col"}
        Majors of A and B. A product's matrix has B's.
    out_dtype : torch.dtype, optional
        D's dtype; by default that of A, and BF16 for FP8.
    input_dtypes : mapping of str to str, optional
        Dtypes of inputs by name, if they are others.
    form : Form
        How the GEMMs belong together. Batched tensors have all batches in one dimension, and vectors are shared. Of
        groups, each has M rows, or all of K.
    math : str, optional
        How it multiplies, if `dtype` does not say it: how sums of FP8 products are added up.

    Raises
    ------
    ValueError
        If `input_dtypes` contains an unknown input or dtype, or the problem has several GEMMs and the form has one.
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
    usual = usual_dtype(of_a, of_a)

    lead = (problem.count,) if form == BATCHED else ()
    of_b = (problem.count,) if form in (BATCHED, GROUPED) else ()
    m *= problem.count if form == GROUPED else 1
    k *= problem.count if form == RAGGED_K else 1

    def empty(
        rows: int, columns: int, major: Major, element: torch.dtype = of_a, lead: tuple[int, ...] = lead
    ) -> Tensor:
        shape = (rows, columns) if major == "row" else (columns, rows)
        tensor = torch.empty((*lead, *shape), dtype=element, device="meta")
        return tensor if major == "row" else tensor.mT

    def vector(length: int, name: str) -> Tensor:
        return torch.empty((length,), dtype=read(name), device="meta")

    def read(name: str) -> torch.dtype:
        return getattr(torch, element_named(others[name]).torch_name) if name in others else usual

    drawn: dict[Kind, Callable[[str], Tensor | float]] = {
        Kind.ROW: lambda name: vector(n, name),
        Kind.COL: lambda name: vector(m, name),
        Kind.TILE: lambda name: empty(m, n, "row", read(name)),
        Kind.SCALAR: lambda name: 1.0,
        Kind.INTEGER: lambda name: 0,
        Kind.PRODUCT: lambda name: empty(k, n, b, lead=of_b),
        Kind.BLOCKS_A: lambda name: empty(m, mma.blocks(k), "row", torch.float32),
        Kind.BLOCKS_B: lambda name: empty(mma.blocks(n), mma.blocks(k), "row", torch.float32, of_b),
    }
    inputs = {i.name: drawn[i.kind](i.name) for i in graph.inputs}
    offsets = torch.empty((problem.count,), dtype=torch.int32, device="meta") if form.operands else None
    operands_of_call = empty(m, k, a), empty(k, n, b, lead=of_b)
    math = math or mma.math_of(element)
    return check_call(graph, *operands_of_call, inputs, None, out_dtype, offsets=offsets, math=math, form=form)


def given_outputs(graph: Graph, out: Any) -> tuple[Any, ...]:
    """Return the caller's tensor or None for each output. A single tensor is D; a mapping names outputs.

    Raises
    ------
    TypeError, ValueError
        If `out` is neither, or names an unknown output.
    """
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
    """Describe a CUDA device for the choice of a kernel.

    Raises
    ------
    NoDeviceError
        If it is not a CUDA device.
    """
    if device.type != "cuda":
        raise NoDeviceError(arch.no_device(device))
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count, properties.name)


def _check_lines(call: Call) -> Sequence[Major]:
    """Return the majors that B may have; refuse operands that no kernel for their types or form reads."""
    if call.arguments.form in (GROUPED, MASKED):
        groups.check_lines(call.arguments, _products(call))
    if call.arguments.form == RAGGED_K:
        groups.check_lines_of_k(call.arguments)
        return ("row",)
    # Batches apart are launches of one GEMM, on a device as for the reference.
    one = call.arguments.form == DENSE or call.why_apart is not None
    return operands.check_lines(call.arguments, _products(call), one=one)


def _as_multiplied(call: Call) -> tuple[Tensor, Tensor, dict[str, Tensor | float]]:
    """Return A, B and the inputs with what is multiplied as the Tensor Cores round it."""
    arguments = call.arguments
    type_a, type_b = arguments.types
    products = {name: reference.as_multiplied(x, type_b) for name, x in _products(call).items()}
    a, b = reference.as_multiplied(arguments.a, type_a), reference.as_multiplied(arguments.b, type_b)
    inputs = {**arguments.inputs, **products}
    if type_a is f64:  # of numbers, the reference takes those of FP32
        inputs = {n: x if isinstance(x, Tensor) else torch.tensor(x, dtype=a.dtype) for n, x in inputs.items()}
    return a, b, inputs


def _products(call: Call) -> dict[str, Tensor]:
    return {n: t for n in call.graph.products if isinstance(t := call.arguments.inputs[n], Tensor)}


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
    """Return the operand types of kernels that can serve a call.

    Raises
    ------
    ValueError
        If a kernel cannot address a matrix, or B and a product's matrix have different majors.
    """
    graph, arguments = call.graph, call.arguments
    for name, tensor in call.tensors():
        require_memory(name, tensor)
    majors = _check_lines(call)
    type_a, type_b = arguments.types
    of_rows = arguments.form in (GROUPED, MASKED)
    name_a, _ = groups.matrix_names(arguments.form)
    a = matrices.matrix(name_a, arguments.a, type_a, of_rows=of_rows)
    if arguments.form == RAGGED_K:
        a = matrices.as_major(arguments.a, 0, type_a) or a
    b, *_ = matrices.weights(arguments.b, _products(call), type_b, majors)
    by_tma = device.loads_by_tma(a.operand, b.operand)
    scalar = f64 if type_a is f64 else f32
    promoted = not graph.block_scales and accumulation(call)[0] == "promoted"

    def tile(name: str, tensor: Tensor, *, is_output: bool) -> Operand:
        found = matrices.matrix(name, tensor, element_type(name, tensor), of_rows=of_rows)
        # TMA reads zeros beyond an extent. Its stores were seen to write beyond extents that are not a multiple of
        # 16 bytes (benchmarks/NOTES.md).
        if by_tma and found.operand.aligned and not is_output:
            return found.operand
        return found.for_vector_access()

    def typed(name: str, kind: Kind, value: Tensor | float, *, is_output: bool = False) -> Operand:
        if kind is Kind.INTEGER or not isinstance(value, Tensor):
            return Operand(i64 if kind is Kind.INTEGER else scalar, "row", 1)
        if value.dtype is torch.int32:
            return Operand(i32, "row", 1)
        if kind is Kind.TILE:
            return tile(name, value, is_output=is_output)
        if kind is Kind.PRODUCT:
            return load_b
        return Operand(element_type(name, value), "row", 1)

    load_a, load_b = (a.operand, b.operand) if by_tma else _alike((a.for_vector_access(), b.for_vector_access()))
    load_a, load_b = replace(load_a, promoted=promoted), replace(load_b, promoted=promoted)
    d, *others = _alike(
        (
            tile("out", call.outputs[0], is_output=True),
            *(typed(i.name, i.kind, arguments.inputs[i.name]) for i in graph.inputs),
            *(
                typed(o.name, o.kind, t, is_output=True)
                for o, t in zip(graph.outputs[1:], call.outputs[1:], strict=True)
            ),
        ),
        [True, *(i.kind is Kind.TILE for i in graph.inputs), *(o.kind is Kind.TILE for o in graph.outputs[1:])],
    )
    count = len(graph.inputs)
    if graph.block_scales:
        of_a, of_b = operands.scaling(graph, arguments)
        load_a, load_b = replace(load_a, scaling=of_a), replace(load_b, scaling=of_b)
    form = arguments.form.of_kernels
    found = OpSignature(graph.of_kernels(), load_a, load_b, d, tuple(others[:count]), tuple(others[count:]), form)
    return groups.read_by_registers(found) if form == GROUPED else found


def _alike(found: tuple[Operand, ...], is_tile: list[bool] | None = None) -> tuple[Operand, ...]:
    """Give all misaligned matrices their lowest common alignment: this needs fewer kernels at nearly the same speed."""
    tiles = is_tile or [True] * len(found)
    lowest = min((t.alignment for t, tile in zip(found, tiles, strict=True) if tile and not t.aligned), default=0)
    return tuple(
        replace(t, alignment=lowest) if tile and not t.aligned else t for t, tile in zip(found, tiles, strict=True)
    )
