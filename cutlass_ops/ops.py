"""The public ops: a GEMM with an epilogue, as one kernel.

A warm call is one dictionary look-up, one allocation and one foreign call: the kernel itself checks every argument
against what it was compiled for, and a refusal leads here to the slow path, which finds another kernel or says what is
wrong in words.
"""

from __future__ import annotations

import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cutlass_ops import builtin, heuristics, operands, reference
from cutlass_ops.config import Sm90Config
from cutlass_ops.dtypes import f32
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph, Kind
from cutlass_ops.errors import LoadError, NoDeviceError, UnsupportedError
from cutlass_ops.heuristics import Device
from cutlass_ops.loader import LoadedKernel, Reason, refusal
from cutlass_ops.operands import Problem
from cutlass_ops.registry import REGISTRY, OpSignature
from cutlass_ops.spec import HasGraph, KernelSpec, Operand

_RASTER = {"heuristic": 0, "along_m": 1, "along_n": 2}
_MAX_PLANS = 1 << 16


@dataclass(frozen=True)
class Plan:
    """How to serve calls of one shape: a loaded kernel and its launch arguments."""

    spec: KernelSpec
    kernel: LoadedKernel
    launch: Callable[..., int]
    raster: int
    swizzle: int
    workspace: int
    shape: tuple[int, int]
    d_dtype: torch.dtype
    device: torch.device
    fold: bool


class Op:
    """One fused GEMM: D = epilogue(A @ B, inputs).

    Parameters
    ----------
    name : str
        Name in messages.
    epilogue : Epilogue
        What happens to the FP32 accumulator.
    """

    def __init__(self, name: str, epilogue: Epilogue) -> None:
        self.name = self.__name__ = name
        self.epilogue = epilogue
        self.graph: Graph = epilogue.graph
        self.__doc__ = _docstring(epilogue)
        self._names = tuple(i.name for i in self.graph.inputs)
        self._plans: dict[tuple[Any, ...], tuple[Plan, ...]] = {}
        self._simple = len(self.graph.outputs) == 1 and all(i.kind is not Kind.SCALAR for i in self.graph.inputs)
        self._result = _result_type(self.graph)
        self.__signature__ = _signature(self._names)

    def __repr__(self) -> str:
        return f"<op {self.name}({', '.join(('a', 'b', *self._names))})>"

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        **named: Any,
    ) -> Any:
        """Run the op; see the op's own documentation for shapes and errors."""
        if named or len(inputs) != len(self._names):
            inputs = self._positional(inputs, named)
        if self._simple and isinstance(a, Tensor) and isinstance(b, Tensor):
            dtype = out_dtype if out is None else out.dtype if isinstance(out, Tensor) else None
            plans = self._plans.get((a.shape, b.shape, a.dtype, dtype, a.get_device()))
            if plans is not None and not _needs_grad(a, b, inputs):
                for plan in plans:
                    result = _run_warm(plan, a, b, inputs, out)
                    if result is not None:
                        return result
        return self._call_cold(a, b, inputs, out, out_dtype)

    def _positional(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Bring keyword inputs into the epilogue's order."""
        values = dict(zip(self._names, inputs, strict=False))
        if len(inputs) > len(self._names):
            raise TypeError(f"{self.name} takes ({', '.join(('a', 'b', *self._names))}): {len(inputs) + 2} were given")
        twice = sorted(set(values) & set(named))
        if twice:
            raise TypeError(f"{self.name} got {', '.join(twice)} twice")
        values |= named
        missing = [name for name in self._names if name not in values]
        unknown = [name for name in named if name not in self._names]
        if missing or unknown:
            wrong = [f"{n} is missing" for n in missing] + [f"{n} is unknown" for n in unknown]
            raise TypeError(f"{self.name} takes ({', '.join(('a', 'b', *self._names))}): {', '.join(wrong)}")
        return tuple(values[name] for name in self._names)

    def _call_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = _check_call(self.graph, a, b, dict(zip(self._names, inputs, strict=True)), out, out_dtype)
        if call.problem.a.device.type == "cpu" or 0 in (call.problem.m, call.problem.n, call.problem.k):
            _run_reference(self.graph, call)
        else:
            plan = self._plan(call)
            _launch(plan, call)
            self._remember(plan, a, b, call, out)
        return self._wrap(call)

    def plan(self, a: Tensor, b: Tensor, *inputs: Any, out_dtype: torch.dtype | None = None, **named: Any) -> Plan:
        """Return how a call with these arguments would be served, without running it."""
        values = self._positional(inputs, named)
        call = _check_call(self.graph, a, b, dict(zip(self._names, values, strict=True)), None, out_dtype)
        return self._plan(call)

    def _plan(self, call: _Call) -> Plan:
        device = device_of(call.problem.a.device)
        problem = call.problem
        signature = _signature_of(self.graph, call, device)
        if not heuristics.candidates(signature, device):
            raise UnsupportedError(
                f"no kernel serves {self.name} with a {signature.a}, b {signature.b} and d {signature.d} on compute "
                f"capability {device.capability[0]}.{device.capability[1]}"
            )
        # All kernels of the signature at once: no later shape compiles anything.
        REGISTRY.kernels(heuristics.specs(signature, device))
        spec, config = heuristics.choose(signature, device, (problem.m, problem.n, problem.k))
        return _make_plan(spec, config, call)

    def _remember(self, plan: Plan, a: Tensor, b: Tensor, call: _Call, out: Any) -> None:
        if not self._simple:
            return
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        key = (a.shape, b.shape, a.dtype, out.dtype if out is not None else call.asked_dtype, a.get_device())
        known = self._plans.get(key, ())
        self._plans[key] = (plan, *(p for p in known if p.spec != plan.spec))[:4]

    def _wrap(self, call: _Call) -> Any:
        results = [
            given if given is not None else flat.view(call.problem.output_shape(o))
            for o, given, flat in zip(self.graph.outputs, call.given, call.outputs, strict=True)
        ]
        return results[0] if self._result is None else self._result(*results)


class Kernel:
    """One exact kernel, as its specification declares it: no choice, no conversion.

    Attributes
    ----------
    spec : KernelSpec
        The declaration.
    loaded : LoadedKernel
        The compiled kernel.
    """

    def __init__(self, spec: KernelSpec, loaded: LoadedKernel, config: Any) -> None:
        self.spec = spec
        self.loaded = loaded
        self._config = config
        self._op = Op(spec.slug, Epilogue(spec.slug, "", spec.epilogue, _no_function))

    def __repr__(self) -> str:
        return f"<kernel {self.spec.slug}>"

    def __call__(self, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        a, b : Tensor
            A (..., M, K) and B (K, N) of the declared types.
        *inputs, **named
            The epilogue's inputs, by position or by name.
        out : Tensor or mapping of str to Tensor, optional
            Where to write the outputs.

        Returns
        -------
        Tensor or named tuple
            D, or all outputs with D first.

        Raises
        ------
        TypeError, ValueError
            If an argument is not what the spec declares.
        NoDeviceError
            If the operands are not on a CUDA device.
        """
        values = self._op._positional(inputs, named)
        dtype = getattr(torch, self.spec.d.dtype.torch_name)
        given = dict(zip(self._op._names, values, strict=True))
        call = _check_call(self.spec.epilogue, a, b, given, out, dtype, self.spec)
        if call.problem.a.device.type != "cuda":
            raise NoDeviceError(f"{self!r} runs on a CUDA device, and a is on {call.problem.a.device}")
        if 0 in (call.problem.m, call.problem.n, call.problem.k):
            _run_reference(self.spec.epilogue, call)
        else:
            _launch(_make_plan(self.spec, self._config, call), call)
        return self._op._wrap(call)


def build(spec: KernelSpec) -> Kernel:
    """Build and load exactly the kernel that a specification declares.

    Parameters
    ----------
    spec : KernelSpec
        The declaration.

    Returns
    -------
    Kernel
        Callable as ``kernel(a, b, *inputs, out=None)``.

    Raises
    ------
    ConfigError
        If the declaration is illegal; the message lists every reason.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be had.
    """
    return Kernel(spec, REGISTRY.kernel(spec), spec.config)


# ---- One call ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A checked call: the problem, the flat outputs, and those of them that the caller gave."""

    problem: Problem
    outputs: tuple[Tensor, ...]
    given: tuple[Tensor | None, ...]
    asked_dtype: torch.dtype | None


def _check_call(
    graph: Graph,
    a: Any,
    b: Any,
    inputs: Mapping[str, Any],
    out: Any,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | None = None,
) -> _Call:
    problem = operands.check_problem(graph, a, b, inputs)
    if out_dtype is not None and out_dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"out_dtype is {out_dtype}: use torch.float16, torch.bfloat16 or torch.float32")
    given = _given_outputs(graph, out)
    outputs = []
    for position, (output, tensor) in enumerate(zip(graph.outputs, given, strict=True)):
        if tensor is not None:
            outputs.append(operands.check_out(problem, output, tensor, out_dtype if position == 0 else None))
            continue
        if spec is not None and position > 0:
            dtype = getattr(torch, spec.outputs[position - 1].dtype.torch_name)
        else:
            dtype = torch.float32 if output.reduce else (out_dtype or problem.a.dtype)
        outputs.append(_allocate(problem.flat_shape(output), dtype, problem.a.device, spec))
    if any(t is not None for t in given):
        operands.check_overlap(graph, problem, outputs)
    return _Call(problem, tuple(outputs), given, out_dtype)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, spec: KernelSpec | None) -> Tensor:
    if spec is not None and spec.d.major == "col" and len(shape) == 2:
        return torch.empty(shape[::-1], dtype=dtype, device=device).t()
    return torch.empty(shape, dtype=dtype, device=device)


def _given_outputs(graph: Graph, out: Any) -> tuple[Any, ...]:
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


def _run_reference(graph: Graph, call: _Call) -> None:
    problem = call.problem
    values = reference.gemm_reference(
        problem.a, problem.b, graph, problem.inputs, d_dtype=call.outputs[0].dtype,
        output_dtypes={o.name: t.dtype for o, t in zip(graph.outputs[1:], call.outputs[1:], strict=True)},
    )  # fmt: skip
    for output, tensor in zip(graph.outputs, call.outputs, strict=True):
        tensor.copy_(values[output.name])


# ---- Signature and plan ------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    """Return what the choice of a kernel needs to know of a CUDA device.

    Raises
    ------
    NoDeviceError
        If the device is neither CUDA nor CPU.
    """
    if device.type != "cuda":
        raise NoDeviceError(f"tensors are on {device}: kernels run on CUDA devices, the reference on the CPU")
    properties = torch.cuda.get_device_properties(device)
    return Device((properties.major, properties.minor), properties.multi_processor_count)


def _signature_of(graph: Graph, call: _Call, device: Device) -> OpSignature:
    problem = call.problem
    dtype = operands.element_type("a", problem.a)
    a, b = operands.matrix("a", problem.a, dtype), operands.matrix("b", problem.b, dtype)
    by_tma = device.capability == (9, 0) and a.operand.aligned and b.operand.aligned

    def of(name: str, tensor: Tensor) -> Operand:
        found = operands.matrix(name, tensor, operands.element_type(name, tensor))
        return found.operand if by_tma and found.operand.aligned else found.for_vector_access()

    def typed(name: str, kind: Kind, value: Tensor | float) -> Operand:
        if not isinstance(value, Tensor):
            return Operand(f32, "row", 1)
        if kind is Kind.TILE:
            return of(name, value)
        return Operand(operands.element_type(name, value), "row", 1)

    return OpSignature(
        epilogue=graph,
        a=a.operand if by_tma else a.for_vector_access(),
        b=b.operand if by_tma else b.for_vector_access(),
        d=of("out", call.outputs[0]),
        inputs=tuple(typed(i.name, i.kind, problem.inputs[i.name]) for i in graph.inputs),
        outputs=tuple(typed(o.name, o.kind, t) for o, t in zip(graph.outputs[1:], call.outputs[1:], strict=True)),
    )


def _make_plan(spec: KernelSpec, config: Any, call: _Call) -> Plan:
    kernel = REGISTRY.kernel(spec)
    problem = call.problem
    raster = _RASTER[config.raster] if isinstance(config, Sm90Config) else 0
    with torch.cuda.device(problem.a.device):
        workspace = int(kernel.workspace_size(problem.m, problem.n, problem.k, raster, config.swizzle))
    return Plan(
        spec=spec,
        kernel=kernel,
        launch=kernel.launch,
        raster=raster,
        swizzle=config.swizzle,
        workspace=workspace,
        shape=(problem.m, problem.n),
        d_dtype=call.outputs[0].dtype,
        device=problem.a.device,
        fold=len(problem.batch) != 1,
    )


# ---- Launch ------------------------------------------------------------------------------------------------------


def _run_warm(plan: Plan, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Tensor | None) -> Tensor | None:
    """Launch a remembered plan; None if the kernel refuses the arguments."""
    if plan.fold:
        return None
    d = torch.empty(plan.shape, dtype=plan.d_dtype, device=plan.device) if out is None else out
    workspace = None if plan.workspace == 0 else _workspace(plan.workspace, plan.device)
    return d if plan.launch(a, b, d, *inputs, plan.raster, plan.swizzle, workspace) == 0 else None


def _launch(plan: Plan, call: _Call) -> None:
    problem = call.problem
    workspace = None if plan.workspace == 0 else _workspace(plan.workspace, plan.device)
    arguments = (
        problem.a, problem.b, call.outputs[0], *problem.inputs.values(), *call.outputs[1:],
        plan.raster, plan.swizzle, workspace,
    )  # fmt: skip
    status = plan.launch(*arguments)
    if status != 0:
        raise _explain(status, plan.spec, arguments)


def _workspace(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def _explain(status: int, spec: KernelSpec, arguments: Sequence[Any]) -> Exception:
    """Put a kernel's refusal into words."""
    position, reason = refusal(status)
    inputs, outputs = spec.epilogue.inputs, spec.epilogue.outputs[1:]
    names = ["a", "b", "out", *(i.name for i in inputs), *(f"out[{o.name!r}]" for o in outputs)]
    types = [spec.a, spec.b, spec.d, *spec.inputs, *spec.outputs]
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
    }.get(reason, reason.name.lower())
    error = TypeError if reason in (Reason.KIND, Reason.DTYPE) else ValueError
    return error(f"{name} {what}; it is {found}. The kernel is {spec.slug}")


def _needs_grad(a: Tensor, b: Tensor, inputs: tuple[Any, ...]) -> bool:
    if not torch.is_grad_enabled():
        return False
    if a.requires_grad or b.requires_grad:
        return True
    return any(getattr(x, "requires_grad", False) for x in inputs)


# ---- Construction ------------------------------------------------------------------------------------------------


def _no_function(*_: Any) -> None:
    raise TypeError("a kernel's epilogue is its graph")


def _result_type(graph: Graph) -> Any:
    if len(graph.outputs) == 1:
        return None
    return namedtuple("Outputs", [o.name for o in graph.outputs])


def _signature(names: Sequence[str]) -> inspect.Signature:
    positional = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("a", "b", *names)]
    keyword = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("out", "out_dtype")]
    return inspect.Signature([*positional, *keyword])


_SHAPES = {Kind.ROW: "(N,)", Kind.COL: "(M,)", Kind.TILE: "(M, N)", Kind.SCALAR: "number or 0-d"}


def _docstring(epilogue: Epilogue) -> str:
    inputs = "".join(f"{i.name} : {_SHAPES[i.kind]}\n" for i in epilogue.graph.inputs)
    outputs = ", ".join(f"{o.name} {_SHAPES[o.kind]}" for o in epilogue.graph.outputs)
    return (
        f"{epilogue.doc}\n\nParameters\n----------\na : (..., M, K), FP16 or BF16, either major\n"
        f"b : (K, N), the same dtype, either major\n{inputs}"
        "out : Tensor or mapping, optional\n    Where to write the outputs.\n"
        "out_dtype : torch.dtype, optional\n    D's dtype; by default that of a.\n\n"
        f"Returns\n-------\n{outputs}\n\n"
        "Raises\n------\nTypeError, ValueError\n    If an argument does not fit; the message says which and why.\n"
        "UnsupportedError\n    If no kernel serves the device.\n"
    )


# ---- The ops -----------------------------------------------------------------------------------------------------


gemm_bias = Op("gemm_bias", builtin.bias)
gemm_bias_relu = Op("gemm_bias_relu", builtin.bias_relu)
gemm_bias_gelu = Op("gemm_bias_gelu", builtin.bias_gelu)
gemm_bias_silu = Op("gemm_bias_silu", builtin.bias_silu)
gemm_residual = Op("gemm_residual", builtin.residual)
gemm_bias_residual = Op("gemm_bias_residual", builtin.bias_residual)
gemm_bias_relu_residual = Op("gemm_bias_relu_residual", builtin.bias_relu_residual)

_plain = Op("gemm", builtin.identity)

NAMED: tuple[Op, ...] = (
    _plain,
    gemm_bias,
    gemm_bias_relu,
    gemm_bias_gelu,
    gemm_bias_silu,
    gemm_residual,
    gemm_bias_residual,
    gemm_bias_relu_residual,
)


@lru_cache(maxsize=1024)
def op(epilogue: Epilogue) -> Op:
    """Return the op of an epilogue; equal epilogues give the same op."""
    return Op(epilogue.name, epilogue)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    epilogue: Epilogue | HasGraph | None = None,
    out: Any = None,
    out_dtype: torch.dtype | None = None,
    **inputs: Any,
) -> Any:
    """Compute D = epilogue(A @ B, inputs) in one kernel.

    Parameters
    ----------
    a : Tensor
        (..., M, K), FP16 or BF16, either major, any leading dimension; leading dimensions are folded into M.
    b : Tensor
        (K, N), the same dtype. A weight of shape (N, K) is passed as ``weight.t()``.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`; by default D = A @ B.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or all outputs by name.
    out_dtype : torch.dtype, optional
        D's dtype, FP16, BF16 or FP32; by default that of ``a``.
    **inputs
        The epilogue's inputs by name: Row (N,), Col (M,), Tile (M, N), Scalar a number or 0-d tensor.

    Returns
    -------
    Tensor or named tuple
        D (..., M, N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit; the message says which, and what to do.
    UnsupportedError
        If no kernel serves the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be had.
    """
    if epilogue is None:
        return _plain(a, b, out=out, out_dtype=out_dtype, **inputs)
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"epilogue must be a function decorated with @cutlass_ops.epilogue, not {type(epilogue).__name__}"
        )
    return op(epilogue)(a, b, out=out, out_dtype=out_dtype, **inputs)
