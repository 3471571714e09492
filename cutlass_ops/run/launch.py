"""Prepared launches: calls that are checked and chosen once, for callers who repeat them.

An ordinary warm call looks its shapes up, and encodes descriptors. It passes every tensor to the kernel, which checks
it. A prepared launch has done all of this. It checks only what could make its results wrong: whether its tensors'
memory has moved, and whether PyTorch traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils import _pytree

from cutlass_ops.base import env
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand import call as calls
from cutlass_ops.operand import watching
from cutlass_ops.operand.call import Call
from cutlass_ops.operand.results import Outputs
from cutlass_ops.operand.scalars import require_fp32
from cutlass_ops.operand.tensors import refuse_differentiated, require_memory, require_tensor
from cutlass_ops.run.plan import Plan, in_range
from cutlass_ops.run.values import Scaled

if TYPE_CHECKING:
    from cutlass_ops.run.warm import Warm

# Bound here since looking them up in their modules takes as long as calling them.
_is_traced, _grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
_dispatch_modes, _jit_tracer = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state

_PLAIN = (Tensor, Parameter)

# What to do about an argument that a prepared launch would not read in place.
COPY = "pass a contiguous tensor of the full shape and of a dtype that kernels read"
FOLD = "prepare the weight once, with cutlass_ops.prepare, and pass the result"


# A launch reads these: slots take less than half the time of other attributes.
@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Launch:
    """A call that is ready to run, made by :func:`cutlass_ops.prepare_launch`.

    Called without arguments, it launches with exactly the tensors that it was prepared with, and returns the same
    result tensors each time. It makes three checks, and otherwise encodes and allocates nothing:

    - whether PyTorch is tracing or a mode is active. That is an error, since they would not see the launch;
    - whether each tensor's memory is where it was. If not, as after ``x.data = y``, it makes an ordinary call;
    - whether autograd would record. That is an error if one of the prepared tensors requires grad.

    Shapes, strides and dtypes of the tensors must not be changed in place. Numbers keep their values from the
    preparation, and so does a Scalar or an Integer in a CPU tensor. To change such a value, pass a GPU tensor, which
    the kernel reads at each launch.

    Called with arguments, by position (a, b, inputs) or by name, it uses these for this launch. Parts of operand
    values are arguments of their own: offsets or counts come after b, then ``scale_a`` and ``scale_b``, then inputs.
    Arguments and outputs that are left out stay as prepared: ``launch(a=x, out=d)`` changes only a and D. A tensor must
    have the shape of the one that it replaces. The kernel checks every argument: dtype, shape, device, major,
    alignment, overlaps. That takes about as long as an ordinary call.

    The kernel runs on the stream that is current at the call, and a CUDA graph may capture it. All launches without
    arguments write the same outputs and use the same scratch memory, so two of them must not run at the same time on
    two streams.

    Attributes
    ----------
    name : str
        The op's name.
    problem : Problem
        M, N and K.
    spec : KernelSpec or None
        The kernel; None if PyTorch computes, as for tensors on the CPU or an extent of 0.
    results : Tensor or named tuple
        What a call without arguments returns: D, or all outputs with D first.

    Examples
    --------
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16().t()
    >>> d = torch.empty(2, 3).bfloat16()
    >>> launch = co.prepare_launch(co.gemm, a, b, out=d)
    >>> launch() is d, d[0].tolist()
    (True, [8.0, 8.0, 8.0])
    >>> a.mul_(2)[0, 0].item(), launch()[0].tolist()
    (2.0, [16.0, 16.0, 16.0])
    >>> launch(a=torch.ones(2, 8).bfloat16())[0].tolist()  # another A, once
    [8.0, 8.0, 8.0]
    """

    name: str
    problem: Problem
    spec: KernelSpec | None
    results: Any
    _repeat: Callable[[], object]
    _scratch: Tensor | None
    _memory: tuple[tuple[Callable[[], int], int], ...]  # what says where each tensor lies, and where it lay
    _tensors: tuple[Tensor, ...]
    _ordinary: _Ordinary

    def __call__(self, *arguments: Any, out: Any = None, **named: Any) -> Any:
        """Launch. The class's own documentation has the arguments.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit the preparation. The message names it.
        NotImplementedError
            If PyTorch traces, or a mode is active.
        """
        if _is_traced() or _dispatch_modes() or _jit_tracer() is not None:
            _refuse_tracing(self.name)
        if _grad_enabled():
            for x in self._tensors:
                if x.requires_grad:  # perhaps since the preparation
                    self._ordinary.refuse_differentiated()
        if forward_ad._current_level >= 0:
            self._ordinary.refuse_tangents(arguments, named)
        if arguments or named or out is not None:
            return self._ordinary.run_with(arguments, named, out)
        for where, before in self._memory:
            if where() != before:
                return self._ordinary.run()
        self._repeat()
        return self.results

    def __repr__(self) -> str:
        return f"<launch of {self.name} at {self.problem}: {'PyTorch' if self.spec is None else self.spec.slug}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a prepared launch cannot be copied or pickled: prepare one where it is used")


# A launch takes tensors alone.
_OF_GROUPS = " (pass its tensor by the name above)"


@dataclass(frozen=True, slots=True)
class _Ordinary:
    """The same call as an ordinary one, with a known plan."""

    op: Warm
    plan: Plan | None  # None if PyTorch serves
    names: tuple[str, ...]  # of a, b and the inputs
    arguments: tuple[Any, ...]  # the values of `names`, as the caller gave them
    shapes: tuple[torch.Size | None, ...]  # the shapes of `arguments`; None for a number
    outputs: tuple[Tensor, ...]  # D first

    def run_with(self, given: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
        """Run it with some arguments instead of those of the preparation."""
        require_untraced(self.op.name)  # transforms as well, whose tensors may be among these
        arguments, outputs, place = [*self.arguments], self.outputs, 0
        if len(given) > len(arguments):
            self._refuse(given, named)
        for x in given:
            self._check(self.names[place], x, self.shapes[place])
            arguments[place] = x
            place += 1
        for name, x in named.items():
            if name not in self.names or (at := self.names.index(name)) < place:
                self._refuse(given, named)
            self._check(name, x, self.shapes[at])
            arguments[at] = x
        if type(out) is Tensor:
            self._check("d", out, outputs[0].shape, _output)
            outputs = (out, *outputs[1:])
        elif out is not None:
            others = calls.given_outputs(self.op.graph, out)
            for name, x, before in zip(self.op.outputs, others, outputs, strict=True):
                if x is not None:
                    self._check(name, x, before.shape, _output)
            outputs = tuple(before if x is None else x for x, before in zip(others, outputs, strict=True))
        return self._run(arguments, outputs)

    def run(self) -> Any:
        """Run it with the tensors of the preparation, at their current addresses."""
        names = (*self.names, *map(_output, self.op.outputs))
        for name, x in zip(names, (*self.arguments, *self.outputs), strict=True):
            if isinstance(x, Tensor):
                require_plain(name, x)
        return self._run(self.arguments, self.outputs)

    def refuse_differentiated(self) -> None:
        """Refuse tensors of the preparation whose use autograd would record."""
        names = (*self.names, *map(_output, self.op.outputs))
        for name, x in zip(names, (*self.arguments, *self.outputs), strict=True):
            refuse_differentiated(name, x)

    def refuse_tangents(self, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Refuse tensors with a tangent, among those of the preparation and those that replace them."""
        for name, x in (*zip(self.names, (*given, *self.arguments[len(given) :]), strict=False), *named.items()):
            if isinstance(x, Tensor):
                watching.refuse_tangent(name, x)

    def _run(self, arguments: Sequence[Any], outputs: tuple[Tensor, ...]) -> Any:
        op = self.op
        a, b, *inputs = arguments
        numbers = op.numbers(tuple(inputs))
        if a.dtype != torch.float64:
            for name, x in zip(self.names[2:], numbers, strict=True):
                if type(x) is float:
                    require_fp32(name, x)
        results = None if self.plan is None else self.plan.run(a, b, numbers, outputs)
        if results is None:
            # PyTorch computes, or the kernel has refused something: the checks, or the kernel, then raise the error.
            if self.plan is None:
                self._require_dtypes(arguments, outputs)
            named = dict(zip(op.outputs, outputs, strict=True))
            call = op.checked_call(a, b, numbers, named, self.outputs[0].dtype)
            call.run_reference() if self.plan is None else self.plan.launch_call(call)
        return outputs[0] if len(outputs) == 1 else Outputs(op.outputs, outputs)

    def _require_dtypes(self, arguments: Sequence[Any], outputs: tuple[Tensor, ...]) -> None:
        """Refuse a tensor whose dtype is not the prepared one. A kernel does so itself, but PyTorch would not."""
        names = (*self.names, *map(_output, self.op.outputs))
        before = (*self.arguments, *self.outputs)
        for name, x, prepared in zip(names, (*arguments, *outputs), before, strict=True):
            if isinstance(x, Tensor) and isinstance(prepared, Tensor) and x.dtype != prepared.dtype:
                raise TypeError(
                    f"{name} is {x.dtype}, and the launch of {self.op.name} was prepared for {prepared.dtype}: prepare "
                    "another one, or call the op"
                )

    def _refuse(self, given: tuple[Any, ...], named: dict[str, Any]) -> NoReturn:
        names = self.names
        wrong = [f"{len(given)} are given"] if len(given) > len(names) else []
        wrong += [f"{name} is given twice" for name in named if name in names[: len(given)]]
        wrong += [f"{name} is unknown{_OF_GROUPS if name == 'groups' else ''}" for name in named if name not in names]
        raise TypeError(f"a launch of {self.op.name} takes ({', '.join(names)}): {', '.join(wrong)}")

    def _check(self, name: str, value: Any, shape: torch.Size | None, called: Callable[[str], str] = str) -> None:
        # Written out: a call for each question would cost as much as the launch.
        try:
            if type(value) in _PLAIN and value.shape == shape and not value.requires_grad and not value.is_neg():
                return
        except RuntimeError:  # nested tensors have no shape
            pass
        name = called(name)
        if shape is None and not isinstance(value, Tensor):
            return  # a number
        if isinstance(value, Scaled):
            raise TypeError(f"{name} must be a tensor: pass the values as {name}, and their scale as scale_{name}")
        require_tensor(name, value)
        require_plain(name, value)
        if shape is not None and value.shape != shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, and the launch of {self.op.name} was prepared for "
                f"{tuple(shape)}: prepare another one, or call the op"
            )


# ---- Preparation -----------------------------------------------------------------------------------------------------


def require_untraced(name: str) -> None:
    """Raise NotImplementedError if PyTorch traces, or a mode or transform is active: it would miss the launch."""
    if _is_traced() or watching.is_watched():
        _refuse_tracing(name)


def require_preparable(name: str) -> None:
    """Require that a launch of this name can be prepared now.

    Raises NotImplementedError if PyTorch is tracing, a mode is active, or a CUDA graph captures the stream.
    """
    require_untraced(name)
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"the stream is being captured into a CUDA graph: prepare the launch of {name} before, launch it here"
        )


def check(op: Warm, a: Any, b: Any, inputs: tuple[Any, ...], out: Any) -> None:
    """Require that a call's arguments are the memory that a launch reads and writes.

    Raises TypeError or ValueError if one is differentiated, or has no memory of its own; NotImplementedError as
    :func:`require_preparable`.
    """
    require_preparable(op.name)
    given = out.items() if isinstance(out, Mapping) else (("d", out),)
    named = (("a", a), ("b", b), *zip(op.names, inputs, strict=True), *((_output(name), x) for name, x in given))
    for name, x in named:
        if isinstance(x, Tensor):
            require_plain(name, x)
            if x.device.type == "meta":
                raise TypeError(f"{name} is on the device meta, and has no memory: pass a tensor on a GPU or the CPU")


def require_given(op: Warm, tensors: Iterable[tuple[str, Any]], given: Any, advice: str) -> None:
    """Require that kernels would read the caller's memory: a copy would not follow what the caller writes later.

    `tensors` are what a kernel would read, by name. `given` has the caller's arguments, in any structure. Raises
    ValueError that names a tensor, with `advice` on what to do instead.
    """
    known = {x.data_ptr() for x in _pytree.tree_leaves(given) if isinstance(x, Tensor) and watching.is_memory(x)}
    for name, x in tensors:
        if isinstance(x, Tensor) and watching.is_memory(x) and x.data_ptr() not in known:
            raise ValueError(
                f"{op.name} computes what it passes as {name} from its arguments at each call, and a prepared launch "
                f"is the kernel alone: {advice}"
            )


def make(op: Warm, plan: Plan | None, call: Call, arguments: tuple[Any, ...]) -> Launch:
    """Return the launch of a checked call. `plan` is None if PyTorch serves it; `arguments` are the caller's."""
    outputs = tuple(call.results())
    tensors = tuple(x for x in (*arguments, *outputs) if isinstance(x, Tensor))
    shapes = tuple(x.shape if isinstance(x, Tensor) and x.ndim else None for x in arguments)
    repeat: Callable[[], object] = call.run_reference
    scratch = None
    if plan is not None:
        repeat, scratch = plan.prepared(call)
    return Launch(
        name=op.name,
        problem=call.problem,
        spec=None if plan is None else plan.spec,
        results=outputs[0] if len(outputs) == 1 else Outputs(op.outputs, outputs),
        _repeat=in_range(op.name, repeat) if env.nvtx_enabled() else repeat,
        _scratch=scratch,
        _memory=tuple((x.data_ptr, x.data_ptr()) for x in tensors),
        _tensors=tensors,
        _ordinary=_Ordinary(op, plan, ("a", "b", *op.names), arguments, shapes, outputs),
    )


def _output(name: str) -> str:
    return "out" if name == "d" else f"out[{name!r}]"


def require_plain(name: str, value: Any) -> None:
    """Require a tensor that has its values in memory and is not differentiated. Raises TypeError or ValueError."""
    if type(value) not in _PLAIN:
        require_memory(name, value)
    if value.requires_grad:
        refuse_differentiated(name, value)
    if value.is_neg():
        raise ValueError(f"{name} is a lazy negation, which would be copied at each call: pass {name}.resolve_neg()")


def _refuse_tracing(name: str) -> NoReturn:
    raise NotImplementedError(
        f"PyTorch traces or a mode is active, which would not see a prepared launch of {name}: call the op itself there"
    )
