"""The public ops: a GEMM with an epilogue, as one kernel.

A warm call is one dictionary look-up, one allocation and one foreign call: the kernel itself checks every argument
against what it was compiled for, and a refusal leads to the slow path, which finds another kernel or says what is wrong
in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.loader import LoadedKernel
from cutlass_ops.base import arch, env
from cutlass_ops.base.errors import NoDeviceError, UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.compilation.background import BACKGROUND
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue, builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import operands, traced
from cutlass_ops.run.call import Call, check_call, device_of, signature_of
from cutlass_ops.run.plan import AnyPlan, PeerPlan, Plan, can_fall_back, make_ops_plan, make_peer_plan, make_plan
from cutlass_ops.run.registry import REGISTRY, OpSignature
from cutlass_ops.run.results import Outputs

# A warm call asks these: to look each of them up in its module would take as long as the answer.
_is_traced = torch.compiler.is_dynamo_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _jit_tracer = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state

# Shapes that an op remembers; a service with every M up to 8192 for a few weights stays well below.
_MAX_PLANS = 1 << 16
# Kernels that calls of one shape may need: other majors, alignments or dtypes of inputs.
_PLANS_A_SHAPE = 8


class Op(traced.Portable):
    """One fused GEMM: D = epilogue(A @ B, inputs).

    Parameters
    ----------
    name : str
        Name in messages.
    epilogue : Epilogue
        What happens to the FP32 accumulator.
    instead : callable, optional
        What computes a call's D from its arguments, with `out` and `out_dtype`, where no kernel serves them.
    made_by : pair of str and plain value, optional
        The :func:`cutlass_ops.run.traced.maker` that makes such an op in another process, and what it needs; by default
        the one of ops that are an epilogue and nothing else.
    """

    def __init__(
        self,
        name: str,
        epilogue: Epilogue,
        instead: Callable[..., Tensor] | None = None,
        made_by: tuple[str, Any] | None = None,
    ) -> None:
        self.name = self.__name__ = name
        self.epilogue = epilogue
        self.graph: Graph = epilogue.graph
        self.products = self.graph.products
        self.__doc__ = _docstring(epilogue)
        self.names = tuple(i.name for i in self.graph.inputs)
        self.outputs = tuple(o.name for o in self.graph.outputs)
        self._scalars = tuple(i.name if i.kind is Kind.SCALAR else None for i in self.graph.inputs)
        self._has_scalars, self._has_one_output = any(self._scalars), len(self.outputs) == 1
        self._count = len(self.names)
        self._instead = instead
        self.about = traced.register(name, self.graph, self, *(made_by or ("epilogue", self.graph.to_json())))
        self._plans: dict[tuple[Any, ...], tuple[AnyPlan, ...]] = {}
        self.__signature__ = _signature(self.names)

    def __repr__(self) -> str:
        return f"<op {self.name}({', '.join(('a', 'b', *self.names))})>"

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
        if _is_traced():
            return traced.Traced(self.about)(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        if named or len(inputs) != self._count:
            inputs = self.positional(inputs, named)
        if self._has_scalars:
            inputs = tuple(
                x if name is None or type(x) is float else operands.scalar(name, x)
                for name, x in zip(self._scalars, inputs, strict=True)
            )
        # As traced.is_watched() asks, without the call, which would show.
        watched = _dispatch_modes() or _transforms() is not None or _jit_tracer() is not None
        if not watched and not (_function_modes() and traced.is_watched()):
            results = self._run_warm(a, b, inputs, out, out_dtype)
            if results is not None:
                return results
        if traced.is_elsewhere(a, b, inputs, out):
            return traced.detour(self, a, b, inputs, out, out_dtype)
        return self._run_cold(a, b, inputs, out, out_dtype)

    def run_plain(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run the op on tensors with memory of their own, whatever watches this thread's operators."""
        if self._has_scalars:
            inputs = tuple(
                x if name is None else operands.scalar(name, x) for name, x in zip(self._scalars, inputs, strict=True)
            )
        results = self._run_warm(a, b, inputs, out, out_dtype)
        return self._run_cold(a, b, inputs, out, out_dtype) if results is None else results

    def _run_warm(self, a: Any, b: Any, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run the op as it ran before at these shapes; None where it did not, or where arguments must be looked at."""
        # A function call for each argument would cost as much as the rest.
        grad = _grad_enabled()
        for x in (a, b, *inputs):
            kind = type(x)
            if kind is Tensor or kind is Parameter:
                if (grad and x.requires_grad) or x.is_neg():
                    return None
            elif kind is not float:
                return None
        dtype = out_dtype
        if out is not None:
            if type(out) is not Tensor or (out_dtype is not None and out.dtype != out_dtype):
                return None
            dtype = out.dtype
        try:
            plans = self._plans.get((a.shape, b.shape, a.dtype, dtype, a.get_device()))
        except (AttributeError, RuntimeError):  # no tensor, or a nested one, which has no shape
            return None
        if plans is not None:
            for plan in plans:
                results = plan.run(a, b, inputs, out)
                if results is not None:
                    return results[0] if self._has_one_output else Outputs(self.outputs, results)
        return None

    def positional(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, ...]:
        """Bring inputs given by name into the epilogue's order.

        Raises
        ------
        TypeError
            If one is missing, unknown or given twice.
        """
        return traced.bind(self.name, self.names, inputs, named)

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return outputs of the right shapes, dtypes and device for checked arguments, and compute nothing."""
        loader.prepare()
        return check_call(self.graph, a, b, dict(zip(self.names, inputs, strict=True)), None, out_dtype).results()

    def wrap(self, call: Call) -> Any:
        """Return a call's results as the caller expects them: D, or a named tuple with D first."""
        results = call.results()
        return results[0] if len(results) == 1 else Outputs(self.outputs, results)

    def plan(
        self, a: Tensor, b: Tensor, *inputs: Any, out_dtype: torch.dtype | None = None, **named: Any
    ) -> Plan | PeerPlan:
        """Return how a call with these arguments would be served, without running it."""
        values = dict(zip(self.names, self.positional(inputs, named), strict=True))
        return self._plan(check_call(self.graph, a, b, values, None, out_dtype))

    def warm_up(self, a: Tensor, b: Tensor, *inputs: Any, out_dtype: torch.dtype | None = None, **named: Any) -> int:
        """Compile and load every kernel that calls of this op with a weight may need: see :func:`warm_up`."""
        values = dict(zip(self.names, self.positional(inputs, named), strict=True))
        call = check_call(self.graph, a, b, values, None, out_dtype)
        if call.is_reference:
            return 0
        signature, device = self._signature_of(call)
        specs = dispatch.specs_for(signature, device, call.problem.n, call.problem.k)
        return len(REGISTRY.kernels(specs))

    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = check_call(self.graph, a, b, dict(zip(self.names, inputs, strict=True)), out, out_dtype)
        if call.is_reference:
            call.run_reference()
            return self.wrap(call)
        try:
            plan = self._plan(call)
        except UnsupportedError:
            if self._instead is None:
                raise
            ops = make_ops_plan(self._instead, (a, b, *inputs), call.outputs[0].dtype)
            self._remember(ops, _key(a, b, call.given[0], out_dtype))
            return self._instead(a, b, *inputs, out=out, out_dtype=out_dtype)
        plan.launch_call(call)
        self._remember(plan, _key(a, b, call.given[0], out_dtype))
        return self.wrap(call)

    def _plan(self, call: Call) -> Plan | PeerPlan:
        problem = call.problem
        signature, device = self._signature_of(call)
        extents = (problem.m, problem.n, problem.k)
        peer = dispatch.fallback(signature, device, extents)
        if peer is not None and can_fall_back(call, peer):
            return make_peer_plan(peer, call)
        spec, config = dispatch.choose(signature, device, extents)
        plan = make_plan(self.name, spec, config, call)
        # What other numbers of rows may need is compiled meanwhile, so that no later batch has to wait for it.
        if env.jit_enabled():
            BACKGROUND.add(dispatch.specs_for(signature, device, problem.n, problem.k))
        return plan

    def _signature_of(self, call: Call) -> tuple[OpSignature, Device]:
        device = device_of(call.problem.a.device)
        signature = signature_of(call, device)
        if not dispatch.serves(signature, device):
            what = f"{self.name} with a {signature.a}, b {signature.b} and d {signature.d}"
            raise UnsupportedError(arch.unserved(what, device.capability))
        return signature, device

    def _remember(self, plan: AnyPlan, key: tuple[Any, ...]) -> None:
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        others = (p for p in self._plans.get(key, ()) if not p.same_as(plan))
        self._plans[key] = (plan, *others)[:_PLANS_A_SHAPE]


def _key(a: Tensor, b: Tensor, out: Tensor | None, out_dtype: torch.dtype | None) -> tuple[Any, ...]:
    """Return what decides the choice of a kernel, as far as looking at it is cheap; the kernel checks the rest."""
    return a.shape, b.shape, a.dtype, out_dtype if out is None else out.dtype, a.get_device()


class Kernel(traced.Portable):
    """One exact kernel, as its specification declares it: no choice, no conversion.

    Attributes
    ----------
    spec : KernelSpec
        The declaration.
    loaded : LoadedKernel
        The compiled kernel.

    Examples
    --------
    >>> kernel = co.build(spec)  # doctest: +SKIP
    >>> kernel(x, weight.t(), bias=bias, out=d)  # doctest: +SKIP
    """

    def __init__(self, spec: KernelSpec, loaded: LoadedKernel) -> None:
        self.spec = spec
        self.loaded = loaded
        self._op = graph_op(spec.slug, spec.epilogue)
        self.outputs = self._op.outputs
        self.about = traced.register(f"kernel_{spec.slug}", spec.epilogue, self, "kernel", spec.to_json())

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
        if torch.compiler.is_dynamo_compiling():
            return traced.Traced(self.about)(a, b, *inputs, out=out, **named)
        bound = self._op.positional(inputs, named)
        if traced.is_watched() or traced.is_elsewhere(a, b, bound, out):
            return traced.detour(self, a, b, bound, out, None)
        return self.run_plain(a, b, bound, out, None)

    def run_plain(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run the kernel on tensors with memory of their own, whatever watches this thread's operators."""
        values = dict(zip(self._op.names, inputs, strict=True))
        call = check_call(self.spec.epilogue, a, b, values, out, out_dtype, self.spec)
        if call.problem.a.device.type != "cuda":
            raise NoDeviceError(f"{self!r} runs on a CUDA device, and a is on {call.problem.a.device}")
        if call.is_reference:
            call.run_reference()
        else:
            make_plan(self.spec.slug, self.spec, self.spec.launch_config, call).launch_call(call)
        return self._op.wrap(call)

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return outputs of the right shapes, dtypes and device for checked arguments, and compute nothing."""
        values = dict(zip(self._op.names, inputs, strict=True))
        return check_call(self.spec.epilogue, a, b, values, None, out_dtype, self.spec).results()


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

    Examples
    --------
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=f, config=config)  # doctest: +SKIP
    >>> kernel = co.build(spec)  # doctest: +SKIP
    >>> d = kernel(x, weight.t(), bias=bias)  # doctest: +SKIP
    """
    return Kernel(spec, REGISTRY.kernel(spec))


# ---- Construction ------------------------------------------------------------------------------------------------


def graph_op(
    name: str,
    graph: Graph,
    doc: str = "",
    instead: Callable[..., Tensor] | None = None,
    made_by: tuple[str, Any] | None = None,
) -> Op:
    """Return the op of a graph that was not traced from one function; the rest is as for :class:`Op`."""
    return Op(name, Epilogue.of(name, doc, graph), instead, made_by)


@traced.maker("epilogue")
def _op_again(name: str, plain: Any) -> Op:
    return graph_op(name, Graph.from_json(plain))


@traced.maker("kernel")
def _kernel_again(name: str, plain: Any) -> Kernel:
    return build(KernelSpec.from_json(plain))


def _signature(names: Sequence[str]) -> inspect.Signature:
    positional = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("a", "b", *names)]
    keyword = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=None) for n in ("out", "out_dtype")]
    return inspect.Signature([*positional, *keyword])


_SHAPES = {
    Kind.ROW: "(N,)",
    Kind.COL: "(M,)",
    Kind.TILE: "(M, N)",
    Kind.SCALAR: "number or 0-d",
    Kind.PRODUCT: "(K, N), the same dtype and major as b",
}


def _docstring(epilogue: Epilogue) -> str:
    inputs = "".join(f"{i.name} : {_SHAPES[i.kind]}\n" for i in epilogue.graph.inputs)
    outputs = "\n".join(f"{o.name} : {_SHAPES[o.kind]}" for o in epilogue.graph.outputs)
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

_EXAMPLES = {
    Kind.ROW: "torch.ones(3).bfloat16()",
    Kind.TILE: "torch.ones(2, 3).bfloat16()",
}


def _example(op: Op) -> str:
    """Return the example of a named op, for its docstring."""
    inputs = "".join(f">>> {i.name} = {_EXAMPLES[i.kind]}\n" for i in op.graph.inputs)
    return (
        "\nExamples\n--------\n>>> a = torch.ones(2, 8).bfloat16()\n"
        f">>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)\n{inputs}"
        f">>> co.{op.name}({', '.join(('a', 'b', *op.names))}).shape\ntorch.Size([2, 3])\n"
    )


for _named in NAMED:
    _named.__doc__ = f"{_named.__doc__}{_example(_named)}"


@traced.remembered
def op(epilogue: Epilogue) -> Op:
    """Return the op of an epilogue; equal epilogues give the same op."""
    return Op(epilogue.name, epilogue)


def gemm(
    a: Tensor,
    b: Tensor,
    *,
    epilogue: Epilogue | None = None,
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
        The epilogue's inputs by name: Row (N,), Col (M,), Tile (M, N), Scalar a number or 0-d tensor, Product (K, N) of
        ``b``'s dtype and major.

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

    Examples
    --------
    >>> a = torch.ones(2, 8).bfloat16()  # (M, K)
    >>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)
    >>> co.gemm(a, b).tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    >>> @co.epilogue
    ... def scaled(acc, bias: co.Row, scale: co.Scalar):
    ...     return (acc + bias) * scale
    >>> bias = torch.tensor([0.0, 1.0, 2.0]).bfloat16()
    >>> co.gemm(a, b, epilogue=scaled, bias=bias, scale=0.5, out_dtype=torch.float32).tolist()
    [[4.0, 4.5, 5.0], [4.0, 4.5, 5.0]]

    An epilogue with further outputs gives a named tuple:

    >>> @co.epilogue
    ... def with_sums(acc):
    ...     return {"d": co.e.relu(acc), "row_sum": co.e.sum(acc, dim=1)}
    >>> d, row_sum = co.gemm(a, b, epilogue=with_sums)
    >>> row_sum.tolist()
    [24.0, 24.0]
    """
    return op_of(epilogue)(a, b, out=out, out_dtype=out_dtype, **inputs)


def called(op: object, epilogue: Epilogue | None = None) -> Op:
    """Return the op behind what a user calls: an op, :func:`gemm` with its epilogue, or a decorated function.

    Raises
    ------
    TypeError
        If it is none of these, or has an epilogue already.
    """
    if op is gemm:
        return op_of(epilogue)
    if isinstance(op, Op | Epilogue):
        if epilogue is not None:
            raise TypeError(f"{op.name} has its epilogue: pass cutlass_ops.gemm with epilogue=")
        return op if isinstance(op, Op) else op_of(op)
    raise TypeError(
        f"op is {op!r}: pass cutlass_ops.gemm, a named op such as cutlass_ops.gemm_bias_relu, a function decorated "
        "with @cutlass_ops.epilogue, or what cutlass_ops.run.norms.rmsnorm_op() and its like return"
    )


def warm_up(
    op: object,
    a: Tensor,
    b: Tensor,
    *inputs: Any,
    epilogue: Epilogue | None = None,
    out_dtype: torch.dtype | None = None,
    **named: Any,
) -> int:
    """Compile and load every kernel that calls with a weight may need, whatever the number of rows.

    The first call compiles the kernel that it needs and leaves the others to background threads; after this, nothing is
    left to compile.

    Parameters
    ----------
    op : Op, Epilogue or cutlass_ops.gemm
        What is called: a named op such as ``cutlass_ops.gemm_bias_relu``, or ``cutlass_ops.gemm`` with ``epilogue``.
    a : Tensor
        (..., M, K). Extents other than K do not matter.
    b : Tensor
        (K, N).
    *inputs, epilogue, out_dtype, **named
        As for the call itself.

    Returns
    -------
    int
        How many kernels there are; 0 on the CPU.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As the call itself would.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If a kernel cannot be had.

    Examples
    --------
    On a GPU it returns how many kernels there are; nothing is compiled for tensors on the CPU:

    >>> a = torch.ones(2, 8).bfloat16()  # (M, K)
    >>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)
    >>> co.warm_up(co.gemm_bias_relu, a, b, bias=torch.zeros(3).bfloat16())
    0
    """
    return called(op, epilogue).warm_up(a, b, *inputs, out_dtype=out_dtype, **named)


def op_of(epilogue: Epilogue | None) -> Op:
    """Return the op that :func:`gemm` runs for an epilogue.

    Raises
    ------
    TypeError
        If it is none.
    """
    if epilogue is None:
        return _plain
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"epilogue must be a function decorated with @cutlass_ops.epilogue, not {type(epilogue).__name__}"
        )
    return op(epilogue)
