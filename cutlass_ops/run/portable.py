"""What programs can call, and the strings that name it in them.

A string holds all that makes an object again, so that a saved program runs in a process that has never seen it.
"""

from __future__ import annotations

import functools
import importlib
import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.form import DENSE, Form
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind

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

    def run_warm(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Run it as such a call ran before; None if there was none, or if its arguments need checking."""
        return None

    def run_new(self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None) -> Any:
        """Do as :meth:`run_plain` where :meth:`run_warm` returned None."""
        return self.run_plain(a, b, inputs, out, out_dtype)

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
    # Pickles of torch.fx's graphs import what is called by its module and name: `__getattr__` finds it.
    called.__module__, called.__qualname__ = __name__, _IMPORTED + op.encode().hex()  # type: ignore[attr-defined]
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
