"""One checked call: the problem, its outputs, and the signature that a kernel must have to serve it.

This is the slow path, taken once for a combination of shapes; a warm call goes straight to its plan.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cutlass_ops.base import arch, mma
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.dtypes import f32, i32, i64
from cutlass_ops.base.errors import NoDeviceError
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.spec import KernelSpec, Major, Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import operands, reference
from cutlass_ops.run.operands import Problem
from cutlass_ops.run.registry import OpSignature

_OUT_DTYPES = tuple(getattr(torch, t.torch_name) for t in mma.RESULTS)


class Call(NamedTuple):
    """A checked call.

    Attributes
    ----------
    graph : Graph
        The epilogue.
    problem : Problem
        Operands and inputs, brought to two dimensions.
    outputs : tuple of Tensor
        The outputs as the kernel sees them, D first: given by the caller or freshly allocated.
    given : tuple of Tensor or None
        What the caller gave for each.
    """

    graph: Graph
    problem: Problem
    outputs: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]

    @property
    def is_reference(self) -> bool:
        """Whether PyTorch serves the call: tensors on the CPU, or an extent of 0, which no kernel takes."""
        problem = self.problem
        return problem.a.device.type == "cpu" or 0 in (problem.m, problem.n, problem.k)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the call, and what messages call it."""
        yield from (("a", self.problem.a), ("b", self.problem.b))
        yield from ((name, value) for name, value in self.problem.inputs.items() if isinstance(value, Tensor))
        yield from zip(map(operands.output_name, self.graph.outputs), self.outputs, strict=True)

    def results(self) -> list[Tensor]:
        """Return the outputs as the caller sees them."""
        return [
            given if given is not None else flat.view(self.problem.output_shape(output))
            for output, given, flat in zip(self.graph.outputs, self.given, self.outputs, strict=True)
        ]

    def run_reference(self) -> None:
        """Compute the outputs in PyTorch, of operands that a kernel could address as well."""
        _check_layouts(self)
        values = reference.gemm_reference(
            self.problem.a,
            self.problem.b,
            self.graph,
            self.problem.inputs,
            d_dtype=self.outputs[0].dtype,
            output_dtypes={o.name: t.dtype for o, t in zip(self.graph.outputs[1:], self.outputs[1:], strict=True)},
        )
        for output, tensor in zip(self.graph.outputs, self.outputs, strict=True):
            tensor.copy_(values[output.name])


def check_call(
    graph: Graph,
    a: Any,
    b: Any,
    inputs: Mapping[str, Any],
    out: Any,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | None = None,
) -> Call:
    """Check a call's arguments and allocate the outputs that were not given.

    Parameters
    ----------
    graph, a, b, inputs, out, out_dtype
        The call.
    spec : KernelSpec, optional
        The kernel that is to serve it, if that is fixed; it decides the outputs' types.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message says which and why.
    """
    problem = operands.check_problem(graph, a, b, inputs)
    if out_dtype is not None and out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}: use {', '.join(map(str, _OUT_DTYPES[:-1]))} or {_OUT_DTYPES[-1]}")
    given = given_outputs(graph, out)
    outputs = []
    for position, (output, tensor) in enumerate(zip(graph.outputs, given, strict=True)):
        if tensor is not None:
            outputs.append(operands.check_out(problem, output, tensor, out_dtype if position == 0 else None))
            continue
        wanted = None if spec is None else (spec.d, *spec.outputs)[position]
        d_dtype = outputs[0].dtype if outputs else (out_dtype or problem.a.dtype)
        default = reference.result_dtype(output) or d_dtype
        dtype = default if wanted is None else getattr(torch, wanted.dtype.torch_name)
        col_major = wanted is not None and output.kind is Kind.TILE and wanted.major == "col"
        outputs.append(_allocate(problem.flat_shape(output), dtype, problem.a.device, col_major))
    if any(t is not None for t in given):
        operands.check_overlap(graph, problem, outputs)
    return Call(graph, problem, tuple(outputs), given)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Have tensors that only stand for a call made and looked at as if no mode of PyTorch's were on.

    They have no data and are no work of the caller's: what counts, traces or fakes that has no part in them.
    """
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@without_modes()
def call_at(
    graph: Graph,
    problem: tuple[int, int, int],
    dtype: str,
    a: Major,
    b: Major,
    out_dtype: torch.dtype | None = None,
    input_dtypes: Mapping[str, str] | None = None,
) -> Call:
    """Return a call with contiguous tensors of these extents, which have no data.

    Parameters
    ----------
    graph : Graph
        The epilogue.
    problem : tuple of int
        M, N and K.
    dtype : str
        Of A, B and the epilogue's inputs: ``"bf16"`` or ``"f16"``.
    a, b : {"row", "col"}
        Majors of A and B; a product's matrix has B's.
    out_dtype : torch.dtype, optional
        D's dtype; by default that of A.
    input_dtypes : mapping of str to str, optional
        Dtypes of some of the epilogue's inputs by name, where they are not A's.

    Raises
    ------
    ValueError
        If `input_dtypes` names an input that there is not, or no dtype.
    """
    m, n, k = problem
    others = dict(input_dtypes or {})
    unknown = sorted(set(others) - {i.name for i in graph.inputs})
    if unknown:
        raise ValueError(f"input_dtypes names {', '.join(unknown)}, which the epilogue does not have")

    def empty(rows: int, columns: int, major: Major, name: str = "") -> Tensor:
        shape = (rows, columns) if major == "row" else (columns, rows)
        element = getattr(torch, element_named(others.get(name, dtype)).torch_name)
        tensor = torch.empty(shape, dtype=element, device="meta")
        return tensor if major == "row" else tensor.t()

    drawn: dict[Kind, Callable[[str], Tensor | float]] = {
        Kind.ROW: lambda name: empty(1, n, "row", name)[0],
        Kind.COL: lambda name: empty(1, m, "row", name)[0],
        Kind.TILE: lambda name: empty(m, n, "row", name),
        Kind.SCALAR: lambda name: 1.0,
        Kind.INTEGER: lambda name: 0,
        Kind.PRODUCT: lambda name: empty(k, n, b, name),
    }
    inputs = {i.name: drawn[i.kind](i.name) for i in graph.inputs}
    return check_call(graph, empty(m, k, a), empty(k, n, b), inputs, None, out_dtype)


def given_outputs(graph: Graph, out: Any) -> tuple[Any, ...]:
    """Return what the caller gave for each output: one tensor is D, a mapping names them.

    Raises
    ------
    TypeError, ValueError
        If it is neither, or names an output that there is not.
    """
    names = [o.name for o in graph.outputs]
    if out is None:
        return (None,) * len(names)
    if isinstance(out, Tensor):
        return (out, *(None for _ in names[1:]))
    if isinstance(out, Mapping):
        unknown = sorted(set(out) - set(names))
        if unknown:
            raise ValueError(f"out names {', '.join(unknown)}: the outputs are {', '.join(names)}")
        return tuple(out.get(name) for name in names)
    raise TypeError(f"out must be a tensor or a mapping of output names to tensors, not {type(out).__name__}")


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, col_major: bool) -> Tensor:
    if col_major:
        return torch.empty(shape[::-1], dtype=dtype, device=device).t()
    return torch.empty(shape, dtype=dtype, device=device)


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Return what the choice of a kernel needs to know of a CUDA device.

    Raises
    ------
    NoDeviceError
        If the device is no CUDA device.
    """
    if device.type != "cuda":
        raise NoDeviceError(arch.no_device(device))
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count, properties.name)


def _check_layouts(call: Call) -> None:
    """Refuse what a kernel could not address, so that what runs on the CPU runs on a GPU."""
    tiles = {i.name for i in call.graph.inputs if i.kind is Kind.TILE}
    tiles |= {operands.output_name(o) for o in call.graph.outputs if o.kind is Kind.TILE}
    for name, tensor in call.tensors():
        if name == "a" or name in tiles:
            operands.matrix(name, tensor, operands.element_type(name, tensor))
    operands.weights(call.problem.b, _products(call), operands.element_type("b", call.problem.b))


def _products(call: Call) -> dict[str, Tensor]:
    return {n: t for n in call.graph.products if isinstance(t := call.problem.inputs[n], Tensor)}


@without_modes()
def signature_of(call: Call, device: Device) -> OpSignature:
    """Return the operand types that a kernel must have to serve a call.

    Raises
    ------
    ValueError
        If a matrix has no major that a kernel can address, or B and a product's matrix have none in common.
    """
    graph, problem = call.graph, call.problem
    for name, tensor in call.tensors():
        operands.require_memory(name, tensor)
    dtype = operands.element_type("a", problem.a)
    a = operands.matrix("a", problem.a, dtype)
    b, *_ = operands.weights(problem.b, _products(call), dtype)
    by_tma = device.loads_by_tma(a.operand, b.operand)

    def tile(name: str, tensor: Tensor, *, is_output: bool) -> Operand:
        found = operands.matrix(name, tensor, operands.element_type(name, tensor))
        # The bulk copy engine fills what it reads beyond an extent with zeros. Its stores were seen to reach beyond one
        # that 16 bytes do not divide (benchmarks/NOTES.md).
        if by_tma and found.operand.aligned and not is_output:
            return found.operand
        return found.for_vector_access()

    def typed(name: str, kind: Kind, value: Tensor | float, *, is_output: bool = False) -> Operand:
        if kind is Kind.INTEGER or not isinstance(value, Tensor):
            return Operand(i64 if kind is Kind.INTEGER else f32, "row", 1)
        if value.dtype is torch.int32:
            return Operand(i32, "row", 1)
        if kind is Kind.TILE:
            return tile(name, value, is_output=is_output)
        if kind is Kind.PRODUCT:
            return load_b
        return Operand(operands.element_type(name, value), "row", 1)

    load_a, load_b = (a.operand, b.operand) if by_tma else _alike((a.for_vector_access(), b.for_vector_access()))
    d, *others = _alike(
        (
            tile("out", call.outputs[0], is_output=True),
            *(typed(i.name, i.kind, problem.inputs[i.name]) for i in graph.inputs),
            *(
                typed(o.name, o.kind, t, is_output=True)
                for o, t in zip(graph.outputs[1:], call.outputs[1:], strict=True)
            ),
        ),
        [True, *(i.kind is Kind.TILE for i in graph.inputs), *(o.kind is Kind.TILE for o in graph.outputs[1:])],
    )
    count = len(graph.inputs)
    return OpSignature(graph, load_a, load_b, d, tuple(others[:count]), tuple(others[count:]))


def _alike(found: tuple[Operand, ...], is_tile: list[bool] | None = None) -> tuple[Operand, ...]:
    """Give all misaligned matrices the lowest alignment among them: fewer kernels, and hardly a slower one."""
    tiles = is_tile or [True] * len(found)
    lowest = min((t.alignment for t, tile in zip(found, tiles, strict=True) if tile and not t.aligned), default=0)
    return tuple(
        Operand(t.dtype, t.major, lowest) if tile and not t.aligned else t for t, tile in zip(found, tiles, strict=True)
    )
