"""Objects that programs can call, and the strings that name them in programs.

A string has all that is needed to make the object again, so a saved program runs in a process that has never seen it.
"""

from __future__ import annotations

import functools
import importlib
import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote

import torch
from torch import Tensor

from cutlass_ops.base.errors import ConfigError, CutlassOpsError
from cutlass_ops.declare.form import DENSE, GROUPED, MASKED, RAGGED_K, Form
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import tape

if TYPE_CHECKING:
    from typing_extensions import Self

# How an exact kernel is made again; everything else is an op.
EXACT = "kernel"

# Arguments of calls with groups, besides the epilogue's inputs.
_OF_FORMS = frozenset(name for form in (GROUPED, MASKED, RAGGED_K) for name in form.operands)


class Portable(ABC):
    """An op or exact kernel that programs can call. It is immutable, so copies are the same object.

    Its pickle is the string that names it in programs, so that unpickling needs no module of the user.
    """

    about: str  # the result of :func:`register`
    graph: Graph
    form: Form = DENSE

    @abstractmethod
    def __call__(self, a: Tensor, b: Tensor, *inputs: Any, **given: Any) -> Any:
        """Run it."""

    @abstractmethod
    def run_plain(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it on tensors with memory of their own, hidden from modes."""

    def run_warm(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it as a similar call ran before; None if there was none, or if its arguments need checking."""
        return None

    def plans_like(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None
    ) -> Sequence[Any]:
        """Return the plans of kernels for calls like this one; none if each call needs a further look."""
        return ()

    def run_new(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it as :meth:`run_plain` does, after :meth:`run_warm` returned None."""
        return self.run_plain(a, b, inputs, out, out_dtype)

    @abstractmethod
    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return empty outputs of the right shapes, dtypes and device."""

    @abstractmethod
    def of(self, graph: Graph) -> Portable:
        """Return the op of a gradient, with another epilogue. Raises NotImplementedError if there is none."""

    def why_not(self, graph: Graph, dtype: torch.dtype) -> str | None:
        """Return why an epilogue cannot follow a product of operands of a dtype, or None if it can."""
        return None

    def of_weights(self, graph: Graph) -> Portable:
        """Return the op of a gradient of weights. Raises NotImplementedError if calls have no groups."""
        raise NotImplementedError(f"{self!r} has no groups")

    @functools.cached_property
    def recorders(self) -> dict[Any, Any]:
        """How autograd records calls, by their kind. It is forgotten with the session."""
        return {}

    @functools.cached_property
    def program_name(self) -> str:
        """The string that names it in programs."""
        return self.about.split(";", 4)[4]

    @functools.cached_property
    def are_numbers(self) -> tuple[bool, ...]:
        """Whether each of :attr:`inputs` is a number."""
        of_epilogue = (i.kind in (Kind.SCALAR, Kind.INTEGER) for i in self.graph.inputs)
        return (*(False for _ in self.form.operands), *of_epilogue)

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of a call's arguments besides A and B, in order."""
        return (*self.form.operands, *(i.name for i in self.graph.inputs))

    def as_list(self, a: Tensor, b: Tensor, *inputs: Any, **given: Any) -> list[Tensor]:
        """Run it and return its outputs as a list."""
        recording = tape.active()
        if recording is not None:
            return recording.call(self, a, b, inputs, given)
        found = self(a, b, *inputs, **given)
        return [found] if isinstance(found, Tensor) else list(found)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return find, (self.program_name,)


_LIVE: weakref.WeakValueDictionary[str, Portable] = weakref.WeakValueDictionary()
# By the kind of a string: the module and the function in it that make an object again from a name and plain values. The
# module is imported when a program names such an object: most programs name none of most kinds.
MAKERS = {
    "epilogue": ("cutlass_ops.run.named", "op_again"),
    EXACT: ("cutlass_ops.run.kernels", "kernel_again"),
    "gemm_swiglu": ("cutlass_ops.run.gated", "swiglu_again"),
    "gated": ("cutlass_ops.run.gated", "gated_again"),
    "math": ("cutlass_ops.run.ops", "in_math_again"),
    "groups": ("cutlass_ops.run.grouped", "again"),
}


def register(name: str, graph: Graph, called: Portable, how: str, plain: Any, form: Form = DENSE) -> str:
    """Register an op or kernel for programs; return the string that describes and names it.

    `how` is a key of `MAKERS` and `plain` its argument, in plain values: they make the object in another process.
    `name` is for readers of a program.
    """
    op = named(name, {how: plain})
    _LIVE.setdefault(op, called)
    # Pickles of torch.fx's graphs import what is called by its module and name: `__getattr__` finds it.
    called.__module__, called.__qualname__ = __name__, _IMPORTED + op.encode().hex()  # type: ignore[attr-defined]
    outputs = ",".join(f"{o.name}:{o.kind.value}:{graph.stored_type(o)}" for o in graph.outputs)
    marks = {Kind.SCALAR: "", Kind.INTEGER: ":integer"}
    scalars = ",".join(i.name + marks[i.kind] for i in graph.inputs if i.kind in marks)
    names = ",".join((*(f"{name}:{form}" for name in form.operands), *(i.name for i in graph.inputs)))
    return ";".join((names, ",".join(graph.products), scalars, outputs, op))


def named(name: str, made_by: Mapping[str, Any]) -> str:
    """Return the string that names an object in programs, from its maker and the maker's plain values.

    A name that is no identifier of ASCII letters is encoded as in a URL: the name ends at the first space.
    """
    return f"{quote(name, safe='', errors='surrogatepass')} {json.dumps(made_by, separators=(',', ':'))}"


def name_of(op: str) -> str:
    """Return the name for readers in a string."""
    return unquote(op.partition(" ")[0], errors="surrogatepass")


def maker_of(op: str) -> tuple[str, Any]:
    """Return the maker of the object that a string names, and its plain values."""
    ((how, plain),) = json.loads(op.partition(" ")[2]).items()
    return how, plain


def find(op: str) -> Portable:
    """Return the object that a string names: the one of this process, or a new one made from the string.

    Raises ConfigError if this version of the library cannot read the string.
    """
    return _LIVE.get(op) or _made(op)


_IMPORTED = "called_"


def __getattr__(name: str) -> Portable:
    try:
        op = bytes.fromhex(name.removeprefix(_IMPORTED)).decode() if name.startswith(_IMPORTED) else ""
    except ValueError:
        op = ""
    if not op:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return find(op)


@functools.lru_cache(maxsize=1024)
def _made(op: str) -> Portable:
    try:
        how, plain = maker_of(op)
        module, function = MAKERS[how]
        make: Callable[[str, Any], Portable] = getattr(importlib.import_module(module), function)
        return make(name_of(op), plain)
    except CutlassOpsError:
        raise
    # The string may come from anywhere, but a maker expects a valid one.
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as exc:
        raise ConfigError(
            f"the program calls {op[:60]!r}, which this version of cutlass_ops cannot read: export it again"
        ) from exc


def bind(op: str, names: tuple[str, ...], inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return inputs in the epilogue's order. Raises TypeError if one is missing, unknown or given twice."""
    values = dict(zip(names, inputs, strict=False))
    wrong = [f"{len(inputs) + 2} were given"] if len(inputs) > len(names) else []
    wrong += [f"{name} is given twice" for name in values if name in named]
    values |= named
    wrong += [f"{name} is missing" for name in names if name not in values]
    wrong += [f"{name} is unknown{_otherwise(name)}" for name in named if name not in names]
    nothing = [name for name in names if name not in _OF_FORMS and name in values and values[name] is None]
    if nothing and not wrong:
        raise TypeError(f"{' and '.join(nothing)} of {op} is None: {_without(op, names, nothing)}")
    if wrong:
        raise TypeError(f"{op} takes ({', '.join(('a', 'b', *names))}): {', '.join(wrong)}")
    return tuple(values[name] for name in names)


# Arguments that torch._scaled_mm and other libraries have, and what to pass here.
_OTHERWISE = {
    "bias": "pass an epilogue= that returns acc + bias, of an input bias: co.Row",
    "scale_a": "pass a as cutlass_ops.Scaled(a, scale_a)",
    "scale_b": "pass b as cutlass_ops.Scaled(b, scale_b)",
    "scale_result": "pass an epilogue= that multiplies by its reciprocal, and out_dtype=torch.float8_e4m3fn",
    "use_fast_accum": "pass math='fast' or math='promoted'",
    "counts": "pass groups=cutlass_ops.Groups(counts=counts)",
    "expected": "pass groups=cutlass_ops.Groups(counts=counts, expected=expected)",
    "offs": "pass groups=cutlass_ops.Groups(offs)",
    "offsets": "pass groups=cutlass_ops.Groups(offsets)",
}


def _otherwise(name: str) -> str:
    return f" ({_OTHERWISE[name]})" if name in _OTHERWISE else ""


def _without(op: str, names: Sequence[str], nothing: Sequence[str]) -> str:
    """Return what to call instead of an op, for a call without some of its inputs."""
    from cutlass_ops.epilogue import builtin  # late, since importing it traces the named ops

    if op in builtin.BY_OP:
        parts = [part for part in op.split("_") if part not in nothing]
        other = "_".join(parts)
        if other in builtin.BY_OP:
            return (
                f"call cutlass_ops.{other}({', '.join(('a', 'b', *(name for name in names if name not in nothing)))})"
            )
        if len(parts) == 2:
            return f"call cutlass_ops.gemm(a, b, epilogue=lambda acc: cutlass_ops.e.{parts[1]}(acc))"
    return f"pass an epilogue that has no {' and no '.join(nothing)}"
