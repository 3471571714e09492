"""The public ops: a GEMM with an epilogue, as one kernel."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.loader import LoadedKernel
from cutlass_ops.base.errors import NoDeviceError, UnsupportedError
from cutlass_ops.choose import dispatch
from cutlass_ops.choose.dispatch import Decision
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue, builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import operators, traced  # noqa: F401 - the first registers operators
from cutlass_ops.run.call import Call, check_call, device_of, signature_of
from cutlass_ops.run.plan import PeerPlan, Plan, as_out, can_fall_back, make_ops_plan, make_peer_plan, make_plan
from cutlass_ops.run.registry import OpSignature, Registry
from cutlass_ops.run.rows import Rows
from cutlass_ops.run.supply import Supply, supply, supply_others
from cutlass_ops.run.warm import Warm

if TYPE_CHECKING:
    from cutlass_ops.run.launch import Launch

_log = logging.getLogger("cutlass_ops")

# What to do about an argument that a prepared launch would not read where it lies.
_COPY = "pass a contiguous tensor of the full shape and of a dtype that kernels read"
_FOLD = "prepare the weight once, with cutlass_ops.prepare or cutlass_ops.prepare_layernorm, and pass the result"


class Instead(NamedTuple):
    """Other ops that compute a call that no single kernel serves.

    Attributes
    ----------
    why : str
        The reason, for users.
    compute : callable
        Takes a function that calls an op, then the call's arguments with `out` and `out_dtype`; returns the outputs as
        the op does. It may read only shapes and types of intermediate tensors: `explain` and `warm_up` run it without
        computing values.
    """

    why: str
    compute: Callable[..., Any]


class Op(Warm):
    """One fused GEMM: D = epilogue(A @ B, inputs).

    Parameters
    ----------
    name : str
        Name in messages.
    epilogue : Epilogue
        Function of the FP32 accumulator and the inputs.
    instead : Instead, optional
        Fallback for calls that no single kernel serves.
    made_by : pair of str and plain value, optional
        The :func:`cutlass_ops.run.traced.maker` that makes this op again in another process, and its argument. The
        default rebuilds an op from its epilogue.
    """

    form: Form = DENSE  # of calls whose B has two dimensions

    def __init__(
        self,
        name: str,
        epilogue: Epilogue,
        instead: Instead | None = None,
        made_by: tuple[str, Any] | None = None,
    ) -> None:
        super().__init__(name, epilogue.graph, self.form)
        self.epilogue = epilogue
        self.products = self.graph.products
        self.__doc__ = _docstring(epilogue)
        self._instead = instead
        how, plain = made_by or ("epilogue", self.graph.to_json())
        self.about = traced.register(name, self.graph, self, how, plain, self.form)
        self.__signature__ = _signature(self.names)

    def __repr__(self) -> str:
        return f"<op {self.name}({', '.join(('a', 'b', *self.names))})>"

    def of(self, graph: Graph) -> Op:
        """Return the op of another epilogue."""
        return op_of_graph(graph)

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device for checked arguments."""
        loader.prepare()
        return self.checked_call(a, b, inputs, None, out_dtype).results()

    def plan(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        **named: Any,
    ) -> Decision:
        """Return the decision for a call with these arguments, without compiling, loading or running anything.

        Raises
        ------
        TypeError, ValueError
            As the call itself.
        UnsupportedError
            If no single kernel serves the call. :func:`cutlass_ops.explain` says whether other ops do.
        """
        return self._decide(self.checked(a, b, inputs, named, out, out_dtype))

    def warm_up(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        **named: Any,
    ) -> int:
        """Compile and load every kernel that calls of this op with a weight may need: see :func:`warm_up`."""
        call = self.checked(a, b, inputs, named, out, out_dtype)
        return Registry.current().ready(self._specs_for(call), call.arguments.a.device)

    def specs_of(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        **named: Any,
    ) -> tuple[KernelSpec, ...]:
        """Return every kernel that calls of this op with a weight may need; none for tensors on the CPU."""
        return self._specs_for(self.checked(a, b, inputs, named, out, out_dtype))

    def prepare_launch(
        self,
        a: Tensor,
        b: Tensor,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        **named: Any,
    ) -> Launch:
        """Prepare calls with these tensors: see :func:`prepare_launch`."""
        from cutlass_ops.run import launch  # late: few programs prepare launches

        values = self.positional(inputs, named)
        launch.check(self, a, b, values, out)
        call = self.checked_call(a, b, values, out, out_dtype)
        launch.require_given(self, call.tensors(), (a, b, values, call.outputs), _COPY)
        return launch.make(self, None if call.is_reference else self._best_plan(call), call, (a, b, *values))

    def _best_plan(self, call: Call) -> Plan:
        """Return the plan of the best kernel for a call, whatever has to be compiled for it."""
        try:
            decision = self._decide(call)
        except UnsupportedError as exc:
            why = self.why_instead(call)
            if not why:
                raise
            raise UnsupportedError(
                f"{self.name}: {why}, and a prepared launch is one kernel: call the op itself"
            ) from exc
        # Of other tensors, no other kernel serves.
        plan = make_plan(self.name, decision.spec, decision.order, call)
        return replace(plan, way=replace(plan.way, misaligned=False))

    def instead_of(self, call: Call) -> list[tuple[Op, Call]]:
        """Return the fallback ops of a checked call, each with its own checked call; an empty list if there are none.

        Nothing is computed: intermediate tensors have no values. Of batches that take a call each, it is the first
        one's.
        """
        if call.why_apart is not None:
            return [(self, part) for part in itertools.islice(call.parts(), 1)]
        found: list[tuple[Op, Call]] = []

        def noted(op: Op, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, out_dtype: Any = None) -> Any:
            part = check_call(op.graph, a, b, dict(zip(op.names, inputs, strict=True)), out, out_dtype)
            found.append((op, part))
            return op.wrap(part)

        if self._instead is not None:
            checked = call.arguments
            arguments = (checked.a, checked.b, *checked.inputs.values())
            d = call.outputs[0]
            out = None if call.given[0] is None else d
            self._instead.compute(noted, *arguments, out=out, out_dtype=d.dtype)
        return found

    def why_instead(self, call: Call) -> str:
        """Return the reason for a call's fallback ops, for users; empty if there are none."""
        return call.why_apart or ("" if self._instead is None else self._instead.why)

    def checked(
        self, a: Any, b: Any, inputs: tuple[Any, ...], named: Mapping[str, Any], out: Any, out_dtype: torch.dtype | None
    ) -> Call:
        """Check a call's arguments as the call itself does.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit. The message names it.
        """
        return self.checked_call(a, b, self.positional(inputs, named), out, out_dtype)

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        return check_call(self.graph, a, b, dict(zip(self.names, inputs, strict=True)), out, out_dtype)

    def _specs_for(self, call: Call) -> tuple[KernelSpec, ...]:
        """Return every kernel that a call's weight may need, each once, including those of fallback ops."""
        if call.is_reference:
            return ()
        try:
            return self._decide(call).specs
        except UnsupportedError:
            if not self.why_instead(call):
                raise
        parts = (op._specs_for(part) for op, part in self.instead_of(call))
        return tuple(dict.fromkeys(spec for specs in parts for spec in specs))

    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = self.checked_call(a, b, inputs, out, out_dtype)
        call.refuse_differentiated()
        self.copied_inputs += len(call.arguments.copied)
        if call.is_reference:
            call.run_reference()
            return self.wrap(call)
        if call.why_apart is not None or call.arguments.is_folded:
            return self._run_parts(call)
        results = self._run_spread(call, a, b, out, out_dtype)
        if results is not None:
            return results
        try:
            plan, supplied, rows = self._plan(call)
        except UnsupportedError:
            if self._instead is None:
                raise
            _log.info("%s: no single kernel serves, so several ops do: %s", self.name, self._instead.why)
            compute = functools.partial(self._instead.compute, _call)
            ops = make_ops_plan(compute, (a, b, *inputs), call.outputs[0].dtype, self.outputs)
            self._remember(ops, call, a, b, out_dtype)
            # The same path as later calls take, so that each op remembers its part.
            return compute(a, b, *inputs, out=as_out(self.outputs, call.given), out_dtype=call.outputs[0].dtype)
        plan.launch_call(call)
        self._remember(plan, call, a, b, out_dtype, rows)
        if supplied is not None:
            supplied.until_it_is_there(call.arguments.a.device, functools.partial(self._forget, plan))
        return self.wrap(call)

    def _run_parts(self, call: Call) -> Any:
        """Run a call with batches as calls of what kernels know: one GEMM each, or fewer dimensions of batches."""
        apart = call.why_apart
        if apart is not None:
            _log.info("%s: %s", self.name, apart)
        for part in call.parts() if apart is not None else (call,):
            of_part = part.arguments
            out = part.outputs[0] if len(part.outputs) == 1 else dict(zip(self.outputs, part.outputs, strict=True))
            self.run_plain(of_part.a, of_part.b, tuple(of_part.inputs.values()), out, None)
        return self.wrap(call)

    def _plan(self, call: Call) -> tuple[Plan | PeerPlan, Supply | None, Rows | None]:
        """Return a plan for a call, ready to run, and what plans others like it. A missing kernel is built."""
        decision = self._decide(call)
        if decision.peer is not None:
            _log.info("%s %s: PyTorch (%s) serves, as tuning allowed", self.name, decision.problem, decision.peer)
            return make_peer_plan(decision.peer, call), None, Rows.of(self.name, decision, call)
        supplied = supply(decision)
        if _log.isEnabledFor(logging.DEBUG):  # a slug takes longer than the choice
            _log.debug("%s %s: %s serves", self.name, decision.problem, supplied.spec.slug)
        plan = make_plan(self.name, supplied.spec, supplied.serves.order, call)
        supply_others(decision, call.arguments.a.device)
        return plan, supplied, Rows.of(self.name, decision, call)

    def _decide(self, call: Call) -> Decision:
        """Decide what serves a call.

        Raises
        ------
        UnsupportedError
            If no single kernel does.
        """
        device = device_of(call.arguments.a.device)
        if call.why_apart is not None:
            raise UnsupportedError(f"{self.name}: {call.why_apart}")
        signature = signature_of(call, device)
        decision = decide(signature, device, call)
        if decision is None:
            what = f"{self.name} with a {signature.a}, b {signature.b} and d {signature.d}"
            raise UnsupportedError(dispatch.unserved(what, signature, device))
        return decision


def decide(signature: OpSignature, device: Device, call: Call) -> Decision | None:
    """Decide what serves a checked call; None if no kernel serves its signature. Unsuitable peers are dropped.

    Raises
    ------
    UnsupportedError
        If no kernel of the signature can be launched at this problem.
    """
    found = dispatch.decide(signature, device, call.chosen_for)
    if found is None or found.peer is None or can_fall_back(call, found.peer):
        return found
    return replace(found, peer=None)


def _call(op: Op, *arguments: Any, **named: Any) -> Any:
    return op(*arguments, **named)


class Kernel(Warm):
    """One exact kernel, as its specification declares it. It converts no operand and chooses nothing.

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

    _autocasts = False

    def __init__(self, spec: KernelSpec, loaded: LoadedKernel) -> None:
        super().__init__(spec.slug, spec.epilogue, spec.form)
        self.spec = spec
        self.loaded = loaded
        name = f"kernel_{spec.slug}"
        self.about = traced.register(name, spec.epilogue, self, traced.EXACT, spec.to_json(), spec.form)

    def __repr__(self) -> str:
        return f"<kernel {self.spec.slug}>"

    def __call__(self, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Run the kernel.

        Parameters
        ----------
        a, b : Tensor
            A (..., M, K) and B (K, N) of the declared types; of the form batched, B (..., K, N); of the form grouped,
            A (T, K) and B (E, K, N).
        *inputs, **named
            The epilogue's inputs, by position or by name. Of the form grouped, offsets come before them.
        out : Tensor or mapping of str to Tensor, optional
            Where to write the outputs.

        Returns
        -------
        Tensor or named tuple
            D, or all outputs with D first.

        Raises
        ------
        TypeError, ValueError
            If an argument does not match the declaration.
        NoDeviceError
            If the operands are not on a CUDA device.
        """
        if torch.compiler.is_dynamo_compiling():
            return traced.Traced(self.about)(a, b, *inputs, out=out, **named)
        if named:  # such as out_dtype, which the declaration decides
            inputs = self.positional(inputs, named)
        return super().__call__(a, b, *inputs, out=out)

    def _run_cold(self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
        call = self.checked_call(a, b, inputs, out, out_dtype)
        call.refuse_differentiated()
        self._require_device(call.arguments.a)
        self.copied_inputs += len(call.arguments.copied)
        if call.is_reference:
            call.run_reference()
            return self.wrap(call)
        results = self._run_spread(call, a, b, out, out_dtype)
        if results is not None:
            return results
        plan = make_plan(self.name, self.spec, self.spec.order, call, exact=True)
        plan.launch_call(call)
        self._remember(plan, call, a, b, out_dtype)
        return self.wrap(call)

    def prepare_launch(self, a: Tensor, b: Tensor, *inputs: Any, out: Any = None, **named: Any) -> Launch:
        """Prepare calls with these tensors: see :func:`prepare_launch`."""
        from cutlass_ops.run import launch  # late: few programs prepare launches

        values = self.positional(inputs, named)
        launch.check(self, a, b, values, out)
        call = self.checked_call(a, b, values, out)
        self._require_device(call.arguments.a)
        launch.require_given(self, call.tensors(), (a, b, values, call.outputs), _COPY)
        plan = None if call.is_reference else make_plan(self.name, self.spec, self.spec.order, call, exact=True)
        return launch.make(self, plan, call, (a, b, *values))

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device for checked arguments."""
        return self.checked_call(a, b, inputs, None, out_dtype).results()

    def of(self, graph: Graph) -> NoReturn:
        """Refuse gradients: they would need other kernels than this one."""
        raise NotImplementedError(
            f"{self!r} is one exact kernel and has no backward: call an op, such as cutlass_ops.gemm, or call under "
            "torch.no_grad()"
        )

    def _require_device(self, a: Tensor) -> None:
        if a.device.type != "cuda":
            raise NoDeviceError(f"a is on {a.device}, and {self!r} runs only on CUDA devices: move the operands there")

    def checked_call(  # noqa: D102
        self, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None = None
    ) -> Call:
        values = dict(zip(self.names, inputs, strict=True))
        offsets = [values.pop(name) for name in self.spec.form.operands]
        return check_call(self.graph, a, b, values, out, out_dtype, self.spec, *offsets)


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
        If the declaration is illegal. The message lists every reason.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> config = co.Sm90Config(co.ThreadblockShape(128, 128, 64))
    >>> spec = co.KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=f, config=config)  # doctest: +SKIP
    >>> kernel = co.build(spec)  # doctest: +SKIP
    >>> d = kernel(x, weight.t(), bias=bias)  # doctest: +SKIP
    """
    return Kernel(spec, Registry.current().kernel(spec))


# ---- Construction ------------------------------------------------------------------------------------------------


def graph_op(
    name: str,
    graph: Graph,
    doc: str = "",
    instead: Instead | None = None,
    made_by: tuple[str, Any] | None = None,
) -> Op:
    """Return the op of a composed graph. Other parameters as for :class:`Op`."""
    return Op(name, Epilogue.of(name, doc, graph), instead, made_by)


@traced.maker("epilogue")
def _op_again(name: str, plain: Any) -> Op:
    return graph_op(name, Graph.from_json(plain))


@traced.maker(traced.EXACT)
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
    Kind.INTEGER: "int or 0-d",
    Kind.BLOCKS_A: "(..., M, K / 128), FP32, rounded up",
    Kind.BLOCKS_B: "(N / 128, K / 128) or (N, K / 128), FP32, rounded up",
    Kind.BLOCKS_D: "(..., M, N / 128), FP32, rounded up",
}


def _docstring(epilogue: Epilogue) -> str:
    inputs = "".join(f"{i.name} : {_SHAPES[i.kind]}\n" for i in epilogue.graph.inputs)
    outputs = "\n".join(f"{o.name} : {_SHAPES[o.kind]}" for o in epilogue.graph.outputs)
    return (
        f"{epilogue.doc}\n\nParameters\n----------\na : (..., M, K), FP16 or BF16, either major\n"
        f"b : (K, N), the same dtype, either major; or (..., K, N), a GEMM for each batch\n{inputs}"
        "out : Tensor or mapping, optional\n    Where to write the outputs.\n"
        "out_dtype : torch.dtype, optional\n    D's dtype; by default that of a.\n\n"
        f"Returns\n-------\n{outputs}\n\n"
        "Raises\n------\nTypeError, ValueError\n    If an argument does not fit. The message names it.\n"
        "UnsupportedError\n    If no kernel supports the device.\n"
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
    """Return the op of an epilogue. Equal epilogues give the same op."""
    return Op(epilogue.name, epilogue)


@functools.lru_cache(maxsize=1024)
def op_of_graph(graph: Graph) -> Op:
    """Return the op of a graph. Equal graphs give the same op."""
    return graph_op(graph.title or "gemm", graph)


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
        (..., M, K), FP16 or BF16, either major, any stride between lines. If b has two dimensions, leading
        dimensions are folded into M.
    b : Tensor
        (K, N), the same dtype. Pass a weight of shape (N, K) as ``weight.t()``. With leading dimensions, (..., K, N),
        there is a GEMM for each batch: leading dimensions of a and b broadcast as those of ``torch.matmul``, and may
        have two strides.
    epilogue : Epilogue, optional
        A function decorated with :func:`cutlass_ops.epilogue`; by default D = A @ B.
    out : Tensor or mapping of str to Tensor, optional
        Where to write D, or the outputs by name.
    out_dtype : torch.dtype, optional
        D's dtype, FP16, BF16 or FP32, and on Hopper FP8, which saturates; by default that of ``a``, and BF16 for FP8.
    **inputs
        The epilogue's inputs by name: Row (N,), Col (M,), Tile (M, N), Scalar a number or 0-d tensor, Product (K, N) of
        ``b``'s dtype and major, Integer an int or a 0-d tensor. With batches, a tensor may have their dimensions before
        its own, or broadcast to them. A row may have leading dimensions of 1, a column a last one, and a tile may have
        1 for M or N. Where values repeat in memory, a copy is made at each call.

    Returns
    -------
    Tensor or named tuple
        D (..., M, N), or all outputs with D first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message names it and says what to do.
    UnsupportedError
        If no kernel supports the device.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

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

    Batches, of which each has a bias:

    >>> q, k = torch.ones(2, 4, 8).bfloat16(), torch.ones(2, 3, 8).bfloat16()
    >>> co.gemm(q, k.mT, epilogue=scaled, bias=torch.zeros(2, 3).bfloat16(), scale=0.5).shape
    torch.Size([2, 4, 3])

    An epilogue with further outputs gives a named tuple:

    >>> @co.epilogue
    ... def with_sums(acc):
    ...     return {"d": co.e.relu(acc), "row_sum": co.e.sum(acc, dim=1)}
    >>> d, row_sum = co.gemm(a, b, epilogue=with_sums)
    >>> row_sum.tolist()
    [24.0, 24.0]
    """
    return op_of(epilogue)(a, b, out=out, out_dtype=out_dtype, **inputs)


class Request(NamedTuple):
    """A user's call, brought to the arguments of its op.

    Attributes
    ----------
    op : Op
        The op.
    arguments : tuple
        A, B, and the epilogue's inputs by position.
    named : dict
        Other inputs by name, and `out` and `out_dtype` if given.
    """

    op: Op
    arguments: tuple[Any, ...]
    named: dict[str, Any]


# Prepares the arguments of a function that is not an op: takes some of them by name, returns the op and its positional
# arguments. `inputs` (which it may change), `out` and `out_dtype` then go to the op by name.
Prepare = Callable[..., tuple[Op, tuple[Any, ...]]]
_Function = TypeVar("_Function", bound=Callable[..., Any])
_PREPARED_BY: dict[object, Prepare] = {}


def prepared_by(prepare: Prepare) -> Callable[[_Function], _Function]:
    """Register a function's preparation, so that `explain` and `warm_up` accept the function itself."""

    def note(function: _Function) -> _Function:
        _PREPARED_BY[function] = prepare
        return function

    return note


def requested(op: Any, /, *arguments: Any, **named: Any) -> Request:
    """Resolve a user's call to its op and the op's arguments.

    Parameters
    ----------
    op : Op, Epilogue or function
        As for :func:`called`, or a function of this library such as :func:`cutlass_ops.rmsnorm_gemm`.
    *arguments, **named
        The call's arguments.

    Raises
    ------
    TypeError, ValueError
        If `op` is none of these, or an argument does not fit.
    """
    prepare = _PREPARED_BY.get(op) if isinstance(op, FunctionType) else None
    if prepare is None:
        return _request_of(called(op, named.pop("epilogue", None)), *arguments, **named)
    bound = inspect.signature(op).bind(*arguments, **named)
    bound.apply_defaults()
    given = {"inputs": {}, **bound.arguments}
    found, values = prepare(**{name: given[name] for name in inspect.signature(prepare).parameters})
    return Request(found, values, given["inputs"] | {n: given[n] for n in ("out", "out_dtype") if n in given})


def _request_of(op: Op, /, a: Any, b: Any, *inputs: Any, **named: Any) -> Request:
    return Request(op, (a, b, *inputs), named)


def called(op: object, epilogue: Epilogue | None = None) -> Op:
    """Return the op of an op, of :func:`gemm` with an epilogue, or of a decorated function.

    Raises
    ------
    TypeError
        If `op` is none of these, or already has an epilogue.
    """
    if op is gemm:
        return op_of(epilogue)
    if isinstance(op, Op | Epilogue):
        if epilogue is not None:
            raise TypeError(f"{op.name} already has an epilogue: pass cutlass_ops.gemm with epilogue=")
        return op if isinstance(op, Op) else op_of(op)
    raise TypeError(
        f"op is {op!r}: pass cutlass_ops.gemm, a named op such as cutlass_ops.gemm_bias_relu, a function decorated "
        "with @cutlass_ops.epilogue, or an op from cutlass_ops.run.norms such as rmsnorm_op()"
    )


def warm_up(op: object, /, *arguments: Any, **named: Any) -> int:
    """Compile and load every kernel that calls with this weight may need, at any number of rows.

    Without it, the first call compiles one kernel and background threads compile the others. If other ops serve the
    call, such as two GEMMs for :func:`cutlass_ops.gemm_swiglu` before Hopper, their kernels are compiled. A function's
    own preparation, such as folding gamma into a weight, does run. If an argument requires grad and gradients are
    enabled, the kernels of the backward are compiled too: for this, the call and its backward run once.

    Parameters
    ----------
    op : Op, Epilogue or function
        A named op such as ``cutlass_ops.gemm_bias_relu``, a decorated function, ``cutlass_ops.gemm`` with ``epilogue``,
        or a function such as ``cutlass_ops.rmsnorm_gemm``.
    *arguments, **named
        The arguments of a call. Only K matters among A's extents.

    Returns
    -------
    int
        Number of kernels; 0 for tensors on the CPU.

    Raises
    ------
    TypeError, ValueError, UnsupportedError
        As the call itself.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If a kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> a = torch.ones(2, 8).bfloat16()  # (M, K)
    >>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)
    >>> co.warm_up(co.gemm_bias_relu, a, b, bias=torch.zeros(3).bfloat16())
    0
    """
    request = requested(op, *arguments, **named)
    specs = list(request.op.specs_of(*request.arguments, **request.named))
    if specs and traced.is_differentiated(*request.arguments, *request.named.values()):
        from cutlass_ops.run import recorded  # late, as gradients are

        # The first of these calls are the forward's, which may store more than a call without gradients.
        Registry.current().kernels(specs)
        for each in recorded.calls_of_a_step(request.op, request.arguments, request.named):
            if isinstance(each.called, Op):
                specs += each.called.specs_of(each.a, each.b, *each.inputs, out_dtype=each.out_dtype)
    return Registry.current().ready(dict.fromkeys(specs), request.arguments[0].device) if specs else 0


def prepare_launch(op: object, /, *arguments: Any, **named: Any) -> Launch:
    """Prepare a call for callers who repeat it: at the call, hardly more than CUDA's own launch is left to do.

    The best kernel is compiled if it is not there, as by :func:`warm_up`. No stand-in serves, and no peer of PyTorch's
    that the tuner found. Some kernels clear memory ahead of each launch (stream-K), or share it with other launches of
    their stream (reductions of D on Hopper; the means of a norm beside the main loop). They take an ordinary launch's
    time, without the look-up.

    Parameters
    ----------
    op : Op, Kernel, Epilogue or function
        As for :func:`warm_up`, or the result of :func:`build`. Weights of norms must be prepared, by
        :func:`cutlass_ops.prepare` or :func:`cutlass_ops.prepare_layernorm`.
    *arguments, **named
        The arguments of a call. An output that is not in `out` is allocated here, once. The launch keeps all tensors.

    Returns
    -------
    Launch
        Its documentation has its contract. That of a function is its op's: `x` is called ``a`` and `w` ``b``, and that
        of :func:`cutlass_ops.gemm_residual_rms` returns D and the sums of squares.

    Raises
    ------
    TypeError, ValueError
        As the call itself. Also if an argument requires grad, or would be copied or computed at each call, such as a
        broadcast input.
    NotImplementedError
        If PyTorch traces, a mode is active, or the stream is being captured into a CUDA graph.
    UnsupportedError
        If no single kernel serves the call.
    MissingKernelError, CompileError, ToolchainError, StoreError, LoadError
        If the kernel cannot be compiled, stored or loaded.

    Examples
    --------
    >>> x, weight, bias = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16(), torch.zeros(3).bfloat16()
    >>> launch = co.prepare_launch(co.gemm_bias_relu, x, weight.t(), bias, out=torch.empty(2, 3).bfloat16())
    >>> for step in range(3):
    ...     d = launch()  # reads what x has now
    >>> d.tolist()
    [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]]
    """
    from cutlass_ops.run import launch

    if isinstance(op, Kernel):
        return op.prepare_launch(*arguments, **named)
    request = requested(op, *arguments, **named)
    found = request.op
    launch.require_untraced(found.name)
    pairs = zip(("a", "b", *found.names), request.arguments, strict=False)
    launch.require_given(found, (*pairs, *request.named.items()), (arguments, named), _FOLD)
    return found.prepare_launch(*request.arguments, **request.named)


def op_of(epilogue: Epilogue | None) -> Op:
    """Return the op that :func:`gemm` runs for an epilogue.

    Raises
    ------
    TypeError
        If `epilogue` is not one.
    """
    if epilogue is None:
        return _plain
    if not isinstance(epilogue, Epilogue):
        raise TypeError(
            f"epilogue must be a function decorated with @cutlass_ops.epilogue, not {type(epilogue).__name__}"
        )
    return op(epilogue)
