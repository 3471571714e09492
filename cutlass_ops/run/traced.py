"""Ops as PyTorch operators, for torch.compile, torch.export, fake tensors and modes.

PyTorch's tracer stops at this module. A program names the op by a string (:mod:`cutlass_ops.run.portable`) and calls it
when the program runs. Ops are looked up during tracing and become constants of the graph.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.form import GROUPED, MASKED, RAGGED_K
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.trace import epilogue_given
from cutlass_ops.operand import scalars, sizes, watching
from cutlass_ops.operand.results import FP8, Outputs, scale_strides, usual_dtype
from cutlass_ops.operand.tensors import require_tensor
from cutlass_ops.run import casting, flops, portable
from cutlass_ops.run.portable import Portable

Made = TypeVar("Made", bound=Portable)
P = ParamSpec("P")
Result = TypeVar("Result")


# ---- Calls ---------------------------------------------------------------------------------------------------------


class _Choice(threading.local):
    """Whether calls that autograd records store values for the backward, in this thread."""

    # The object has this attribute from the start: compiled functions would not notice a later one.
    def __init__(self) -> None:
        self.recompute = False


_CHOICE = _Choice()


def is_recomputing() -> bool:
    """Whether :class:`recompute` is active in this thread."""
    return _CHOICE.recompute


class recompute:  # noqa: N801 - it is used as a function
    """Context in which calls store nothing extra for gradients: the backward computes A @ B again.

    By default, a call that autograd records stores one more tile if this saves a GEMM in the backward, such as the
    pre-activation of a linear layer. Inside this context it does not, which saves memory. It also works as a decorator.

    Examples
    --------
    >>> x, weight = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16().requires_grad_()
    >>> with co.recompute():
    ...     d = co.gemm_bias_gelu(x, weight.t(), torch.zeros(3).bfloat16())
    >>> d.sum().backward()
    >>> weight.grad.shape
    torch.Size([3, 8])
    """

    def __init__(self) -> None:
        self._before: list[bool] = []  # one object may be entered again before it is left

    def __enter__(self) -> None:
        self._before.append(_CHOICE.recompute)
        _CHOICE.recompute = True

    def __exit__(self, *_: object) -> None:
        _CHOICE.recompute = self._before.pop()

    def __call__(self, function: Callable[P, Result]) -> Callable[P, Result]:
        """Return a function that runs in this context."""

        # contextlib.ContextDecorator would enter this object. PyTorch's tracer enters only what it saw made.
        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> Result:
            with recompute():
                return function(*args, **kwargs)

        return inside


class Traced:
    """Stand-in for an op while its caller is traced. It calls the op as an operator."""

    def __init__(self, about: str) -> None:
        names, products, scalars, outputs, self.op = about.split(";", 4)
        made_by = self.op[: self.op.find(":") + 1]
        # An exact kernel converts nothing, and a call that names its arithmetic gets it.
        self.autocasts = not any(f' {{"{how}":' in made_by for how in (portable.EXACT, "math"))
        of_forms = [name.partition(":") for name in names.split(",")] if names else []
        self.names = tuple(name for name, _, _ in of_forms)
        self.form = next((form for _, _, form in of_forms if form), "")  # if it has operands of its own
        self.products = tuple(products.split(",")) if products else ()
        marked = [scalar.partition(":") for scalar in scalars.split(",")] if scalars else []
        self.scalars = tuple(name for name, _, mark in marked if not mark)
        self.integers = tuple(name for name, _, mark in marked if mark)
        described = [output.split(":") for output in outputs.split(",")]
        self.outputs, self.kinds = tuple(d[0] for d in described), tuple(d[1] for d in described)
        self.dtypes = tuple(d[2] for d in described)

    def __call__(
        self,
        a: Any,
        b: Any,
        *inputs: Any,
        out: Any = None,
        out_dtype: torch.dtype | None = None,
        math: str | None = None,
        **named: Any,
    ) -> Any:
        """Call the op as an operator."""
        if math is not None:
            own = Traced(_about(_IN_MATH, False, self.op, False, math))
            return own(a, b, *inputs, out=out, out_dtype=out_dtype, **named)
        # During tracing, the tracer itself may stop at this question if the answer is yes.
        if torch.compiler.is_dynamo_compiling() and torch._C._functorch.maybe_current_level() is not None:
            raise NotImplementedError(watching.NO_TRANSFORM)
        values = portable.bind(self.op.partition(" ")[0], self.names, inputs, named)
        if self.autocasts:
            a, b, values = casting.autocast(a, b, values, self.names, self.products)
        tensors, numbers, places = [], [], []
        for place, (name, value) in enumerate(zip(self.names, values, strict=True)):
            found = scalars.scalar_argument(name, value) if name in self.scalars else value
            if name in self.integers:
                found = scalars.integer_argument(name, value)
            if isinstance(found, float):
                numbers.append(found)
                places.append(place)
            else:
                tensors.append(found)
        arguments = (self.op, a, b, tensors, numbers, places)
        differentiated = watching.is_differentiated(a, b, *tensors)
        if differentiated:
            if self.form == RAGGED_K.name:
                raise NotImplementedError(NO_SECOND_GRADIENT.format(self._differentiated(a, b, values)))
            if out is not None:
                raise ValueError(
                    f"{self._differentiated(a, b, values)} requires grad, and a call with `out` has no backward: omit "
                    "`out`, or call under torch.no_grad()"
                )
        if differentiated and _CHOICE.recompute:
            results = torch.ops.cutlass_ops.fused_gemm_grad(*arguments, out_dtype, True)
        elif out is None:
            results = torch.ops.cutlass_ops.fused_gemm(*arguments, out_dtype)
        else:
            results = self._outputs(a, b, values, out, out_dtype)
            if not torch.compiler.is_dynamo_compiling() or not self._copied(arguments, results):
                torch.ops.cutlass_ops.fused_gemm_out(*arguments, results)
        return results[0] if len(self.outputs) == 1 else Outputs(self.outputs, results)

    def _copied(self, arguments: Sequence[Any], given: Sequence[Any]) -> bool:
        """Write outputs by copies, in a program that is compiled; return False if the operator has to write them.

        If an operator writes a view such as ``cache[i]``, Inductor's program writes the same place for every i, and
        autograd does not see what is overwritten (PyTorch 2.13).
        """
        if self.form:  # rows of no group stay as they are
            found = [x.clone() for x in given]
            torch.ops.cutlass_ops.fused_gemm_out(*arguments, found)
        else:
            found = torch.ops.cutlass_ops.fused_gemm(*arguments, None if self.dtypes[0] else given[0].dtype)
        if any(x.dtype != y.dtype or not sizes.agree(x.shape, y.shape) for x, y in zip(given, found, strict=True)):
            return False
        for x, y in zip(given, found, strict=True):
            x.copy_(y)
        return True

    def _differentiated(self, a: Any, b: Any, values: Sequence[Any]) -> str:
        """Return the name of the first argument that requires grad."""
        return next(
            n for n, x in zip(("a", "b", *self.names), (a, b, *values), strict=True) if watching.is_differentiated(x)
        )

    def _outputs(self, a: Any, b: Any, values: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> list[Any]:
        """Return all outputs: the caller's, and empty tensors for the others."""
        given = out if isinstance(out, Mapping) else {"d": out}
        unknown = [str(name) for name in given if name not in self.outputs]
        if unknown:
            raise ValueError(f"out names {', '.join(unknown)}: the outputs are {', '.join(self.outputs)}")
        # Batches of A and B broadcast; with a single B, those of A are rows.
        lead: tuple[int, ...] = ()
        if self.form == RAGGED_K.name:
            lead = tuple(values[0].shape)  # the device of offsets
        elif b.ndim > 2 and not self.form:
            lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
        by_rows = self.form in (GROUPED.name, MASKED.name)  # D has x's rows, in x's dimensions
        m, n = (*lead, a.shape[-2]) if (b.ndim > 2 or lead) and not by_rows else a.shape[:-1], b.shape[-1:]
        shapes = {"tile": (*m, *n), "col": m, "row": (*lead, *n), "blocks_d": (*m, -(-n[0] // BLOCK_K))}
        d = given.get("d")
        if d is not None and out_dtype is not None and d.dtype != out_dtype:
            raise TypeError(f"out is {d.dtype}, and out_dtype asks for {out_dtype}")
        quantized = FP8[self.dtypes[0]] if self.dtypes[0] else None
        d_dtype = d.dtype if d is not None else quantized or out_dtype or usual_dtype(a.dtype, b.dtype)
        found = []
        for name, kind, dtype in zip(self.outputs, self.kinds, self.dtypes, strict=True):
            tensor = given.get(name)
            if tensor is None:
                stored = _STORED[dtype] if dtype else d_dtype
                if kind == "blocks_d":
                    tensor = a.new_empty_strided(shapes[kind], scale_strides(shapes[kind]), dtype=stored)
                else:
                    tensor = a.new_empty(shapes[kind], dtype=stored)
            found.append(tensor)
        return found


NO_SECOND_GRADIENT = (
    "{} requires grad, and a sum over each group's rows has no backward: call it under torch.no_grad(), or in a "
    "torch.autograd.Function. Gradients of the weights of groups are not differentiated again"
)

# Types of outputs other than D's type, by their names in the string.
_STORED: dict[str, torch.dtype] = {t.name: getattr(torch, t.torch_name) for t in (*dtypes.REDUCED, *dtypes.FP8)}


def is_elsewhere(a: Any, b: Any, inputs: Sequence[Any], out: Any) -> bool:
    """Whether a call must take :func:`detour`: PyTorch watches, or an argument is more than its memory."""
    return watching.is_watched() or any(map(watching.is_special, _arguments(a, b, inputs, out)))


def detour(called: Portable, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
    """Make a call through PyTorch: modes see an operator, and tensor subclasses override it.

    Raises TypeError, ValueError or NotImplementedError if a kernel cannot read an argument.
    """
    if out is None and _is_plain(called, a, b, inputs) and watching.is_differentiated(a, b, *inputs):
        flops.count()
        recorder, results = _record_directly(called, a, b, inputs, out_dtype, _CHOICE.recompute)
        called.recorders[kind_of_recorded(a, b, inputs, out_dtype)] = recorder
        return results[0] if len(results) == 1 else Outputs(tuple(o.name for o in called.graph.outputs), results)
    entry = Traced(called.about)
    values = _arguments(a, b, inputs, out)
    overriding = tuple(filter(watching.overrides, values))
    if overriding:
        # A tensor subclass may rebuild the tuple without names: add them afterwards.
        listed = len(entry.outputs) > 1 and all(isinstance(x, Tensor) for x in overriding)
        called = portable.find(called.program_name)  # pickles need the one that its name finds
        run: Callable[..., Any] = called.as_list if listed else called
        given = {name: x for name, x in (("out", out), ("out_dtype", out_dtype)) if x is not None}
        found = torch.overrides.handle_torch_function(run, overriding, a, b, *inputs, **given)
        return Outputs(entry.outputs, found) if listed else found
    for name, value in zip(("a", "b", *entry.names), (a, b, *inputs), strict=True):
        watching.refuse_others(name, value)
    for value in out.values() if isinstance(out, Mapping) else (out,):
        watching.refuse_others("out", value)
        if isinstance(value, Tensor) and torch._is_functional_tensor(value):
            raise TypeError("out is a functional tensor, which cannot be written to: omit `out`, and copy the result")
    differentiated = watching.is_differentiated(a, b, *inputs)
    if differentiated:  # PyTorch would raise its own error for an argument that is no tensor
        for name, value in zip(("a", "b", *entry.names), (a, b, *inputs), strict=True):
            if name not in (*entry.scalars, *entry.integers):
                require_tensor(name, value)
    flops.count()
    if (
        differentiated
        or watching.is_watched()
        or any(map(watching.needs_operator, values))
        or watching.only_shapes(values)
    ):
        return entry(a, b, *inputs, out=out, out_dtype=out_dtype)
    return called.run_plain(a, b, tuple(inputs), out, out_dtype)


def late(module: str, name: str) -> Callable[..., Any]:
    """Return a function whose module is imported at its first call: most programs need no gradients, for example."""
    found: list[Callable[..., Any]] = []

    def function(*arguments: Any) -> Any:
        if not found:  # another thread may be importing it: the import waits for that
            found.append(getattr(importlib.import_module(f"cutlass_ops.run.{module}"), name))
        return found[0](*arguments)

    return function


_record_directly = late("recorded", "record_directly")


def _is_plain(called: Portable, a: Any, b: Any, inputs: Sequence[Any]) -> bool:
    """Whether nothing watches a call, and its arguments are numbers and plain tensors.

    PyTorch's dispatcher would only pass such a call on, and would take longer than all else. Scalars are numbers here.
    """
    if watching.is_watched() or called.form == RAGGED_K:
        return False
    for x, is_number in zip((a, b, *inputs), (False, False, *called.are_numbers), strict=True):
        if is_number and type(x) is float:
            continue
        if is_number or type(x) not in (Tensor, Parameter) or not watching.is_memory(x):
            return False
    return True


def kind_of_recorded(a: Any, b: Any, inputs: Sequence[Any], out_dtype: torch.dtype | None) -> Any:
    """Return everything that decides how autograd records a call; None if it needs a closer look.

    It checks of tensors what a warm call checks: see ``watching.is_memory``.
    """
    found = [out_dtype, _CHOICE.recompute]
    for x in (a, b, *inputs):
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            if x.is_neg():
                return None
            found += (x.requires_grad, x.dtype)
        elif kind is float:
            found.append(None)
        else:
            return None
    return tuple(found)


def _arguments(a: Any, b: Any, inputs: Sequence[Any], out: Any) -> tuple[Any, ...]:
    return (a, b, *inputs, *(out.values() if isinstance(out, Mapping) else (out,)))


# ---- Constants of a trace ------------------------------------------------------------------------------------------

_REMEMBERED: dict[str, Callable[..., Portable]] = {}


# The maker of an op that multiplies FP32 operands in some type, from another op's string.
_IN_MATH = "cutlass_ops.run.ops.op_in_math"


def remembered(make: Callable[..., Made]) -> Callable[..., Made]:
    """Cache a function that makes ops from epilogues and plain values, and make its result a constant of a trace.

    PyTorch's tracer would ignore an ordinary cache and make an op at every call.
    """
    name, cached = f"{make.__module__}.{make.__qualname__}", functools.lru_cache(maxsize=1024, typed=True)(make)
    _REMEMBERED[name] = cached
    defaults, count = make.__defaults__ or (), make.__code__.co_argcount

    @functools.wraps(make)
    def made(*args: Any) -> Made:
        # To the cache, an explicit default would be another argument.
        args = (*args, *defaults[len(defaults) + len(args) - count :]) if len(args) < count else args
        for x in args:
            if isinstance(x, FunctionType):  # the cache would keep the function, and what it closes over
                args = tuple(epilogue_given(x) if isinstance(x, FunctionType) else x for x in args)
                break
        if torch.compiler.is_dynamo_compiling():
            plain: list[Any] = []
            for x in args:
                plain += [True, x.token] if isinstance(x, Epilogue) else [False, x]
            return cast("Made", Traced(_about(name, *plain)))  # only during the trace
        return cached(*args)

    return made


def _about(remembered: str, *plain: Any) -> str:
    pairs = zip(plain[::2], plain[1::2], strict=True)
    return _REMEMBERED[remembered](*(Epilogue.by_token(x) if is_token else x for is_token, x in pairs)).about


# Set by hand what torch._dynamo.assume_constant_result sets: importing that takes a second.
_about._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- The operators -------------------------------------------------------------------------------------------------


def inputs_of(
    tensors: Sequence[Tensor] | None, numbers: Sequence[float] | None, places: Sequence[int] | None
) -> tuple[Tensor | float, ...]:
    """Return the inputs of an operator's arguments in the epilogue's order."""
    # AOTInductor's packages pass None for an empty list.
    values: list[Tensor | float] = list(tensors or ())
    for number, place in zip(numbers or (), places or (), strict=True):
        values.insert(place, number)
    return tuple(values)


def called_with(op: str, tensors: Any, numbers: Any, places: Any) -> tuple[Portable, tuple[Tensor | float, ...]]:
    """Return the op or kernel that a program calls, and the inputs that it gives.

    Raises ConfigError if no op has this name, or if it takes another number of inputs.
    """
    called = portable.find(op)
    inputs = inputs_of(tensors, numbers, places) if len(numbers or ()) == len(places or ()) else ()
    if len(inputs) != len(called.form.operands) + len(called.graph.inputs):
        raise ConfigError(
            f"the program gives {called!r} {len(tensors or ())} tensors and {len(numbers or ())} numbers in "
            f"{len(places or ())} places besides a and b, and its inputs are ({', '.join(called.inputs)}): "
            "export it again"
        )
    return called, inputs


def run(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the results of a call that autograd does not record."""
    called, inputs = called_with(op, tensors, numbers, places)
    return _listed(called.run_plain(a, b, inputs, None, out_dtype))


def run_warm(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the results of a call that only repeats another one; None for other calls."""
    if watching.is_watched():
        return None
    called, inputs = called_with(op, tensors, numbers, places)
    found = called.run_warm(a, b, inputs, None, out_dtype)
    return None if found is None else _listed(found)


def run_new(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the results of a call for which :func:`run_warm` returned None, and which nothing watches."""
    called, inputs = called_with(op, tensors, numbers, places)
    return _listed(called.run_new(a, b, inputs, None, out_dtype))


def _listed(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def _run_out(op, a, b, tensors, numbers, places, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    called, inputs = called_with(op, tensors, numbers, places)
    outputs = [o.name for o in called.graph.outputs]
    if len(out) != len(outputs):
        raise ConfigError(f"the program gives {called!r} {len(out)} outputs, and it has {', '.join(outputs)}")
    given = out[0] if len(out) == 1 else dict(zip(outputs, out, strict=True))
    called.run_plain(a, b, inputs, given, None)


def shapes(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the results of an operator without data."""
    called, inputs = called_with(op, tensors, numbers, places)
    return called.results_of(a, b, inputs, out_dtype)


def refuse_vmap(*_):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201
    """Refuse a call under vmap."""
    raise NotImplementedError(watching.NO_TRANSFORM)


_LIBRARY = torch.library.Library("cutlass_ops", "DEF")  # type: ignore[no-untyped-call]


def declare(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define a PyTorch operator by its schema, in PyTorch's notation. `shapes` returns results without data."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # register_fake would do the same, but takes 2 ms to find the name of the source line.
    _LIBRARY.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]


def override(name: str, run: Callable[..., Any], key: str) -> None:
    """Register a function for an operator under one of PyTorch's dispatch keys."""
    _LIBRARY.impl(name, run, key)  # type: ignore[no-untyped-call]


def count_changes(name: str, written: Callable[..., Sequence[Tensor]]) -> None:
    """Tell autograd what an operator overwrites: `written` returns these tensors from the operator's arguments."""
    operator = getattr(torch.ops.cutlass_ops, name).default

    def run(*arguments: Any) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            found = operator(*arguments)
        torch.autograd.graph.increment_version(written(*arguments))
        return found

    override(name, run, "ADInplaceOrView")


# Numbers come with their positions, since some tracers do not support lists of optional tensors.
ARGUMENTS = "str op, Tensor a, Tensor b, Tensor[] tensors, float[] numbers, int[] places"
declare(f"fused_gemm({ARGUMENTS}, ScalarType? out_dtype) -> Tensor[]", run, shapes)
declare(f"fused_gemm_out({ARGUMENTS}, Tensor(a!)[] out) -> ()", _run_out, lambda *_: None)
for _name in ("fused_gemm", "fused_gemm_out"):
    override(_name, refuse_vmap, "FuncTorchBatched")
count_changes("fused_gemm_out", lambda *arguments: arguments[-1])
