"""Ops as PyTorch operators, for torch.compile, torch.export, fake tensors and modes.

PyTorch's tracer stops at this module. A program names the op by a string and calls it when the program runs. The string
holds the whole epilogue, so that a saved program runs in a process that has never seen the function. Ops are looked up
during tracing and become constants of the graph.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.form import DENSE, GROUPED, MASKED, RAGGED_K, Form
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph, fits
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run.results import FP8, Outputs, scale_strides, usual_dtype

if TYPE_CHECKING:
    from typing_extensions import Self


# How an exact kernel is made again; everything else is an op.
EXACT = "kernel"


class Portable(ABC):
    """An op or exact kernel that programs can call. It is immutable, so copies are the same object.

    Its pickle is the string that names it in programs, so that unpickling needs no module of the user.

    Attributes
    ----------
    about : str
        The result of :func:`register`.
    graph : Graph
        The epilogue.
    form : Form
        How the GEMMs of a call belong together.
    """

    about: str
    graph: Graph
    form: Form = DENSE

    @abstractmethod
    def __call__(self, a: Tensor, b: Tensor, *inputs: Any, **given: Any) -> Any:
        """Run it."""

    @abstractmethod
    def run_plain(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it on tensors with memory of their own, hidden from modes."""

    @abstractmethod
    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device."""

    @abstractmethod
    def of(self, graph: Graph) -> Portable:
        """Return what runs another epilogue as this runs its own: the op of a gradient.

        Raises
        ------
        NotImplementedError
            If nothing does.
        """

    def why_no_gradient(self, dtype: torch.dtype) -> str | None:
        """Return why operands of a dtype have no gradients and what to do, or None if they have."""
        return None

    def why_not(self, graph: Graph, dtype: torch.dtype) -> str | None:
        """Return why an epilogue cannot follow a product of operands of a dtype, or None if it can."""
        return None

    def of_weights(self, graph: Graph) -> Portable:
        """Return what multiplies each group's rows of two matrices: the op of a gradient of weights.

        Raises
        ------
        NotImplementedError
            If calls have no groups.
        """
        raise NotImplementedError(f"{self!r} has no groups")

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what a call takes besides A and B, in order."""
        return (*self.form.operands, *(i.name for i in self.graph.inputs))

    def as_list(self, a: Tensor, b: Tensor, *inputs: Any, **given: Any) -> list[Tensor]:
        """Run it and return its outputs as a list."""
        found = self(a, b, *inputs, **given)
        return [found] if isinstance(found, Tensor) else list(found)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self.about.split(";", 4)[4],)


Made = TypeVar("Made", bound=Portable)


# ---- Strings that stand for ops ------------------------------------------------------------------------------------

_LIVE: weakref.WeakValueDictionary[str, Portable] = weakref.WeakValueDictionary()
# By the kind of a string: the module and the function in it that make an object again from a name and plain values. The
# module is imported when a program names such an object: most programs name none of most kinds.
MAKERS = {
    "epilogue": ("cutlass_ops.run.named", "op_again"),
    EXACT: ("cutlass_ops.run.kernels", "kernel_again"),
    "gemm_swiglu": ("cutlass_ops.run.gated", "swiglu_again"),
    "gated": ("cutlass_ops.run.gated", "gated_again"),
    "math": ("cutlass_ops.run.ops", "in_math_again"),
    "grouped": ("cutlass_ops.run.grouped", "GroupedOp.again"),
    "masked": ("cutlass_ops.run.grouped", "MaskedOp.again"),
    "wgrad": ("cutlass_ops.run.grouped", "WgradOp.again"),
}


def register(name: str, graph: Graph, called: Portable, how: str, plain: Any, form: Form = DENSE) -> str:
    """Register an object for programs; return the string that describes and names it.

    Parameters
    ----------
    name : str
        Name for readers of a program.
    graph : Graph
        The epilogue.
    called : Portable
        The op or kernel.
    how : str
        What makes it again in another process: a key of `MAKERS`.
    plain
        The maker's argument, as plain values.
    form : Form
        How the GEMMs of a call belong together.
    """
    op = named(name, {how: plain})
    _LIVE.setdefault(op, called)
    outputs = ",".join(f"{o.name}:{o.kind.value}:{graph.stored_type(o)}" for o in graph.outputs)
    marks = {Kind.SCALAR: "", Kind.INTEGER: ":integer"}
    scalars = ",".join(i.name + marks[i.kind] for i in graph.inputs if i.kind in marks)
    names = ",".join((*(f"{name}:{form}" for name in form.operands), *(i.name for i in graph.inputs)))
    return ";".join((names, ",".join(graph.products), scalars, outputs, op))


def named(name: str, made_by: Mapping[str, Any]) -> str:
    """Return the string that names an object in programs, from what makes it again and the plain values for that."""
    return f"{name} {json.dumps(made_by, separators=(',', ':'))}"


def maker_of(op: str) -> tuple[str, Any]:
    """Return what makes the object again that a string names, and its plain values."""
    ((how, plain),) = json.loads(op.partition(" ")[2]).items()
    return how, plain


def find(op: str) -> Portable:
    """Return the object that a string names: the one of this process, or a new one made from the string.

    Raises
    ------
    ConfigError
        If this version of the library cannot read the string.
    """
    return _LIVE.get(op) or _made(op)


@functools.lru_cache(maxsize=1024)
def _made(op: str) -> Portable:
    name = op.partition(" ")[0]
    try:
        how, plain = maker_of(op)
        module, function = MAKERS[how]
    except (ValueError, AttributeError, KeyError):
        raise ConfigError(
            f"the program calls {op[:60]!r}, which this version of cutlass_ops cannot read: export it again"
        ) from None
    make: Callable[[str, Any], Portable] = attrgetter(function)(importlib.import_module(module))
    return make(name, plain)


def bind(op: str, names: tuple[str, ...], inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return inputs given by position and by name in the epilogue's order.

    Raises
    ------
    TypeError
        If one is missing, unknown or given twice.
    """
    values = dict(zip(names, inputs, strict=False))
    wrong = [f"{len(inputs) + 2} were given"] if len(inputs) > len(names) else []
    wrong += [f"{name} is given twice" for name in values if name in named]
    values |= named
    wrong += [f"{name} is missing" for name in names if name not in values]
    wrong += [f"{name} is unknown" for name in named if name not in names]
    if wrong:
        raise TypeError(f"{op} takes ({', '.join(('a', 'b', *names))}): {', '.join(wrong)}")
    return tuple(values[name] for name in names)


# ---- Calls ---------------------------------------------------------------------------------------------------------


class _Choice(threading.local):
    """Whether calls that autograd records store values for the backward, in this thread."""

    # An attribute of the object from the start: of one that comes later, compiled functions would not notice.
    def __init__(self) -> None:
        self.recompute = False


_CHOICE = _Choice()


def is_recomputing() -> bool:
    """Whether :class:`recompute` is active in this thread."""
    return _CHOICE.recompute


class recompute:  # noqa: N801 - it is used as a function
    """Have calls inside store nothing for their gradients: the backward then multiplies A @ B again.

    By default, a call that autograd records stores one tile more if that spares its backward a GEMM, such as the
    pre-activation of a linear layer, as PyTorch does. Inside this context, it stores none, which saves memory.

    Examples
    --------
    >>> x, weight = torch.ones(2, 8).bfloat16(), torch.ones(3, 8).bfloat16().requires_grad_()
    >>> with co.recompute():
    ...     d = co.gemm_bias_gelu(x, weight.t(), torch.zeros(3).bfloat16())
    >>> d.sum().backward()
    >>> weight.grad.shape
    torch.Size([3, 8])
    """

    def __enter__(self) -> None:
        self._before = _CHOICE.recompute
        _CHOICE.recompute = True

    def __exit__(self, *_: object) -> None:
        _CHOICE.recompute = self._before


class Traced:
    """Stand-in for an op while its caller is traced. It calls the op as an operator."""

    def __init__(self, about: str) -> None:
        names, products, scalars, outputs, self.op = about.split(";", 4)
        made_by = self.op[: self.op.find(":") + 1]
        # An exact kernel converts nothing, and a call that names its arithmetic is served in it.
        self.autocasts = not any(f' {{"{how}":' in made_by for how in (EXACT, "math"))
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
            raise NotImplementedError(_NO_TRANSFORM)
        values = bind(self.op.partition(" ")[0], self.names, inputs, named)
        if self.autocasts:
            a, b, values = autocast(a, b, values, self.names, self.products)
        tensors, numbers, places = [], [], []
        for place, (name, value) in enumerate(zip(self.names, values, strict=True)):
            found = scalar_argument(name, value) if name in self.scalars else value
            if name in self.integers:
                found = integer_argument(name, value)
            if isinstance(found, float):
                numbers.append(found)
                places.append(place)
            else:
                tensors.append(found)
        arguments = (self.op, a, b, tensors, numbers, places)
        if is_differentiated(a, b, *tensors):
            if self.form == RAGGED_K.name:
                raise NotImplementedError(NO_SECOND_GRADIENT.format(self._differentiated(a, b, values)))
            if out is not None:
                raise ValueError(
                    f"{self._differentiated(a, b, values)} requires grad, and a call with `out` has no backward: omit "
                    "`out`, or call under torch.no_grad()"
                )
            results = torch.ops.cutlass_ops.fused_gemm_grad(*arguments, out_dtype, _CHOICE.recompute)
        elif out is None:
            results = torch.ops.cutlass_ops.fused_gemm(*arguments, out_dtype)
        else:
            results = self._outputs(a, b, values, out, out_dtype)
            torch.ops.cutlass_ops.fused_gemm_out(*arguments, results)
        return results[0] if len(self.outputs) == 1 else Outputs(self.outputs, results)

    def _differentiated(self, a: Any, b: Any, values: Sequence[Any]) -> str:
        """Return the name of the first argument that requires grad."""
        return next(n for n, x in zip(("a", "b", *self.names), (a, b, *values), strict=True) if is_differentiated(x))

    def _outputs(self, a: Any, b: Any, values: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> list[Any]:
        """Return all outputs: the caller's, and empty tensors for the others."""
        given = out if isinstance(out, Mapping) else {"d": out}
        unknown = [name for name in given if name not in self.outputs]
        if unknown:
            raise ValueError(f"out names {', '.join(unknown)}: the outputs are {', '.join(self.outputs)}")
        # Batches of A and B broadcast; with a single B, those of A are rows.
        lead: tuple[int, ...] = ()
        if self.form == RAGGED_K.name:
            lead = tuple(values[0].shape)  # that of offsets
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
    "{} requires grad, and grouped_gemm_wgrad has no backward: call it under torch.no_grad(), or in a "
    "torch.autograd.Function. Gradients of grouped_gemm's weights are not differentiated again"
)

# What an output may be stored as that is not D's type, by the name in the string.
_STORED: dict[str, torch.dtype] = {t.name: getattr(torch, t.torch_name) for t in (*dtypes.REDUCED, *dtypes.FP8)}


def scalar_argument(name: str, value: Any) -> Tensor | float:
    """Convert a scalar for an operator: a tensor, or a number that is a constant of the program.

    A number that varies between calls of a compiled program becomes a tensor. Otherwise each value would recompile it.

    Raises
    ------
    TypeError, ValueError
        As for :func:`number`.
    """
    if isinstance(value, Tensor):
        return value
    symbolic = isinstance(value, (torch.SymInt, torch.SymFloat))
    if not symbolic and torch.compiler.is_dynamo_compiling() and not isinstance(value, (bool, str)):
        if type(value) not in (int, float):
            return torch.as_tensor(value)  # the tracer treats NumPy's scalars as arrays
        # During tracing, a variable argument also has the type of a plain number.
        symbolic = not _symbolic_shapes().has_static_value(value)
    if symbolic:
        return torch.mul(torch.ones((), dtype=torch.float64, device="cpu"), value)
    return number(name, value)


def integer_argument(name: str, value: Any) -> Tensor:
    """Return a whole number of 64 bits as an operator takes it: a tensor, since its numbers are doubles.

    Raises
    ------
    TypeError, ValueError
        If it is no such number: see :func:`integer`.
    """
    if isinstance(value, Tensor):
        return value
    if isinstance(value, torch.SymInt) or torch.compiler.is_dynamo_compiling():
        if isinstance(value, (bool, float, str)):
            raise TypeError(f"{name} must be an int or a tensor of one whole number, not {type(value).__name__}")
        return torch.mul(torch.ones((), dtype=torch.int64, device="cpu"), value)
    return torch.tensor(integer(name, value), dtype=torch.int64, device="cpu")


def integer(name: str, value: Any) -> int:
    """Return a whole number of 64 bits that is no tensor.

    Raises
    ------
    TypeError
        If it is no whole number.
    ValueError
        If it has more bits.
    """
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        value = value.item()  # NumPy's
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int or a tensor of one whole number, not {type(value).__name__}")
    if not fits(value, 64):
        raise ValueError(f"{name} is {value}: an Integer has 64 bits, from -2**63 up to 2**63 - 1")
    return value


def _symbolic_shapes() -> Any:
    return torch.fx.experimental.symbolic_shapes


_LARGEST = int(sys.float_info.max)


def number(name: str, value: Any) -> float:
    """Return a scalar that is not a tensor as a float.

    Raises
    ------
    TypeError
        If it is not a real number.
    ValueError
        If it is beyond the range of a double.
    """
    if getattr(value, "size", 0) == 1 and hasattr(value, "item"):
        value = value.item()  # NumPy's
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise TypeError(f"{name} must be a number or a tensor of one element, not {type(value).__name__}")
    # PyTorch's tracer would mistake float()'s OverflowError for its own.
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise ValueError(f"{name} is beyond the range of a double: pass a number up to 3.4e38, the range of FP32")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number or a tensor of one element, not {type(value).__name__}") from None


def autocast(
    a: Any, b: Any, inputs: tuple[Any, ...], names: Sequence[str], products: Sequence[str]
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return a call's arguments with A, B and products in the dtype that torch.autocast asks for, if any is active.

    What is cast is what F.linear casts of its operands: no FP64, and no FP8. Other inputs stay as they are, since
    kernels compute with them in FP32.
    """
    dtype = autocast_dtype(a)
    if dtype is None:
        return a, b, inputs
    pairs = zip(names, inputs, strict=True)
    values = tuple(autocast_to(dtype, x) if name in products else x for name, x in pairs)
    return autocast_to(dtype, a), autocast_to(dtype, b), values


def autocast_dtype(tensor: Any) -> torch.dtype | None:
    """Return the dtype that torch.autocast asks for on a tensor's device; None if it is not active there."""
    if not torch.compiler.is_dynamo_compiling() and not _any_autocast():
        return None  # at once: every call with a norm's vector asks
    if not isinstance(tensor, Tensor) or tensor.device.type not in _AUTOCASTING:
        return None
    if not torch.is_autocast_enabled(tensor.device.type):
        return None
    return torch.get_autocast_dtype(tensor.device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Turn torch.autocast off for what computes with operands that are cast already."""
    if device.type not in _AUTOCASTING:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


# PyTorch refuses the question for others, such as "meta".
_AUTOCASTING = ("cpu", "cuda")
_any_autocast = torch._C._is_any_autocast_enabled


def autocast_to(dtype: torch.dtype | None, x: Any) -> Any:
    """Return an operand in a dtype, if it is one of those that torch.autocast casts."""
    if dtype is None or not isinstance(x, Tensor) or x.dtype not in _CAST:
        return x
    return x.to(dtype)


_CAST = frozenset((torch.float32, torch.bfloat16, torch.float16))

_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_jit_tracer = torch._C._get_tracing_state
_before_dispatch: Callable[[], int] = torch._ops._len_torch_dispatch_stack_pre_dispatch


def is_watched() -> bool:
    """Whether a mode, a tracer, or a transform such as vmap watches this thread's operators."""
    if _dispatch_modes() or _transforms() is not None or _jit_tracer() is not None:
        return True
    # Tracing before dispatch has its own modes, and always a function mode as well.
    return bool(_function_modes()) and _before_dispatch() > 0


def is_elsewhere(a: Any, b: Any, inputs: Sequence[Any], out: Any) -> bool:
    """Whether a call must take :func:`detour`: PyTorch watches, or an argument is not just its memory."""
    return is_watched() or any(map(is_special, _arguments(a, b, inputs, out)))


def detour(called: Portable, a: Any, b: Any, inputs: Sequence[Any], out: Any, out_dtype: torch.dtype | None) -> Any:
    """Make a call through PyTorch: modes see an operator, and tensor subclasses override it.

    Raises
    ------
    TypeError, NotImplementedError
        If a kernel cannot read an argument. The message says what to pass.
    """
    entry = Traced(called.about)
    values = _arguments(a, b, inputs, out)
    overriding = tuple(filter(_overrides, values))
    if overriding:
        # A tensor subclass may rebuild the tuple without names: add them afterwards.
        listed = len(entry.outputs) > 1 and all(isinstance(x, Tensor) for x in overriding)
        run: Callable[..., Any] = called.as_list if listed else called
        given = {name: x for name, x in (("out", out), ("out_dtype", out_dtype)) if x is not None}
        found = torch.overrides.handle_torch_function(run, overriding, a, b, *inputs, **given)
        return Outputs(entry.outputs, found) if listed else found
    for name, value in zip(("a", "b", *entry.names), (a, b, *inputs), strict=True):
        refuse_others(name, value)
    for value in out.values() if isinstance(out, Mapping) else (out,):
        refuse_others("out", value)
        if isinstance(value, Tensor) and torch._is_functional_tensor(value):
            raise TypeError("out is a functional tensor, which cannot be written to: omit `out`, and copy the result")
    differentiated = is_differentiated(a, b, *inputs)
    if differentiated or is_watched() or any(map(_needs_operator, values)) or _only_shapes(values):
        return entry(a, b, *inputs, out=out, out_dtype=out_dtype)
    return called.run_plain(a, b, tuple(inputs), out, out_dtype)


def goes_by_operator(**tensors: Any) -> bool:
    """Whether a function that is not an op must run as an operator for these arguments: see :func:`detour`.

    Raises
    ------
    TypeError, NotImplementedError
        If an operator cannot read an argument.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    values = tuple(tensors.values())
    special = any(_overrides(x) or _needs_operator(x) for x in values)
    if not is_watched() and not special and not _only_shapes(values):
        return False
    for name, value in tensors.items():
        refuse_others(name, value)
    return True


def _arguments(a: Any, b: Any, inputs: Sequence[Any], out: Any) -> tuple[Any, ...]:
    return (a, b, *inputs, *(out.values() if isinstance(out, Mapping) else (out,)))


def is_special(value: Any) -> bool:
    """Whether an argument is something other than the values in its memory."""
    if not isinstance(value, Tensor):
        return _overrides(value)
    differentiated = value.requires_grad and torch.is_grad_enabled()
    return differentiated or _overrides(value) or _needs_operator(value) or value.device.type == "meta"


def is_differentiated(*values: Any) -> bool:
    """Whether autograd records a call with these arguments."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in values)


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _only_shapes(values: Sequence[Any]) -> bool:
    """Whether all tensors are on "meta". If only some are, the call's checks report different devices."""
    return all(_is_meta(x) for x in values if isinstance(x, Tensor))


def _overrides(value: Any) -> bool:
    """Whether an argument's class overrides PyTorch's functions, as proxies of torch.fx do."""
    # has_torch_function is true for every value while a function mode is active.
    kind = type(value)
    return (
        kind not in (Tensor, Parameter)
        and hasattr(kind, "__torch_function__")
        and torch.overrides.has_torch_function((value,))
    )


def _needs_operator(value: Any) -> bool:
    """Whether only PyTorch's dispatcher can read a tensor."""
    if not isinstance(value, Tensor):
        return False
    others = type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    return others or torch._is_functional_tensor(value)


def refuse_others(name: str, value: Any) -> None:
    """Refuse a tensor that no operator can read.

    Raises
    ------
    TypeError, NotImplementedError
        With what to pass.
    """
    if not isinstance(value, Tensor):
        return
    if hasattr(type(value), "to_local"):
        raise TypeError(
            f"{name} is a {type(value).__name__}, spread over several devices, and a kernel runs on one: pass "
            f"{name}.to_local()"
        )
    if value.is_nested:
        raise TypeError(f"{name} is a nested tensor: pass {name}.values() or {name}.to_padded_tensor(0)")
    if _transforms() is not None and torch._C._functorch.is_gradtrackingtensor(value):
        raise NotImplementedError(_NO_TRANSFORM)


_NO_TRANSFORM = (
    "cutlass_ops does not support torch.func.grad, jvp or vmap: call it outside of the transformed function. Instead "
    "of vmap, use leading dimensions of a, which are folded into M"
)


# ---- Constants of a trace ------------------------------------------------------------------------------------------

_REMEMBERED: dict[str, Callable[..., Portable]] = {}


# What makes an op that multiplies FP32 operands in some type, from another op's string.
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
        # The cache would take a default that is given for another argument.
        args = (*args, *defaults[len(defaults) + len(args) - count :]) if len(args) < count else args
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


def _run(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    found = find(op).run_plain(a, b, inputs_of(tensors, numbers, places), None, out_dtype)
    return [found] if isinstance(found, Tensor) else list(found)


def _run_out(op, a, b, tensors, numbers, places, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    called = find(op)
    given = out[0] if len(out) == 1 else dict(zip(Traced(called.about).outputs, out, strict=True))
    called.run_plain(a, b, inputs_of(tensors, numbers, places), given, None)


def shapes(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """Return the results of an operator without data."""
    return find(op).results_of(a, b, inputs_of(tensors, numbers, places), out_dtype)


def refuse_vmap(*_):  # type: ignore[no-untyped-def]  # noqa: ANN002, ANN201
    """Refuse a call under vmap."""
    raise NotImplementedError(_NO_TRANSFORM)


_LIBRARY = torch.library.Library("cutlass_ops", "DEF")  # type: ignore[no-untyped-call]


def declare(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Define a PyTorch operator.

    Parameters
    ----------
    schema : str
        Name, arguments and results, in PyTorch's notation.
    run : callable
        Computes the results.
    shapes : callable
        Takes the same arguments and returns results without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # register_fake would do the same, but takes 2 ms to find the name of the source line.
    _LIBRARY.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]


def override(name: str, run: Callable[..., Any], key: str) -> None:
    """Have a function run where one of PyTorch's dispatch keys meets an operator."""
    _LIBRARY.impl(name, run, key)  # type: ignore[no-untyped-call]


# Numbers come with their positions, since some tracers do not support lists of optional tensors.
ARGUMENTS = "str op, Tensor a, Tensor b, Tensor[] tensors, float[] numbers, int[] places"
declare(f"fused_gemm({ARGUMENTS}, ScalarType? out_dtype) -> Tensor[]", _run, shapes)
declare(f"fused_gemm_out({ARGUMENTS}, Tensor(a!)[] out) -> ()", _run_out, lambda *_: None)
for _name in ("fused_gemm", "fused_gemm_out"):
    override(_name, refuse_vmap, "FuncTorchBatched")
