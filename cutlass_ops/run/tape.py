"""Steps that run again without their Python: a function's calls are recorded once, and then made directly.

The backward of a call decides much and computes little: which expression, which ops, how their operands lie. All of it
follows from its key. So the second step with a key is recorded, and later ones only make its calls. The record has
calls of ops, and of PyTorch functions that return tensors; anything else that a step asks is part of the key.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from cutlass_ops.operand import watching

Compute = Callable[[list[Tensor]], Sequence[Tensor | None]]

# Keys with which a kind of step is remembered. Programs whose shapes never repeat would fill memory.
_MAX_KEYS = 256


# Functions that may return a view of the whole tensor in the same layout.
_SAME_VIEWS = frozenset(("expand", "reshape", "view"))


class _Active(threading.local):
    tape: _Tape | None = None


_ACTIVE = _Active()


def active() -> _Tape | None:
    """Return what records this thread's calls of ops, if anything does."""
    return _ACTIVE.tape


class Tapes:
    """The steps of one kind, by key."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # A program, or whether the next step is to be recorded: False if it was, and cannot be repeated.
        self._known: dict[Hashable, Compute | bool] = {}

    def run(self, what: Hashable, compute: Compute, tensors: list[Tensor]) -> Sequence[Tensor | None]:
        """Return compute(tensors), by the calls that it made before if it computed the same with similar tensors.

        `what` says what decides, besides the tensors' layouts, which calls the function makes. `compute` takes tensors
        out of the list, so that memory is freed early. There is at least one tensor.
        """
        lie = _lie(tensors)
        if lie is None:
            return compute(tensors)
        key = what, lie
        known = self._known.get(key)
        if callable(known):
            return known(tensors)
        if known is None and len(self._known) >= _MAX_KEYS:
            self._known.clear()
        self._known[key] = known is None
        if not known:
            return compute(tensors)
        tape = _Tape(tensors)
        _ACTIVE.tape = tape
        try:
            with tape:
                results = compute(tensors)
        finally:
            _ACTIVE.tape = None
        self._known[key] = tape.program(results) or False
        return results


def _lie(tensors: Sequence[Tensor]) -> tuple[Any, ...] | None:
    """Return all that a step may ask of tensors except values; None if it may ask more, or its calls are watched."""
    if torch.is_grad_enabled() or watching.is_watched() or torch.compiler.is_dynamo_compiling():
        return None
    if forward_ad._current_level >= 0:
        return None
    found: list[Any] = []
    for x in tensors:
        kind = type(x)
        if kind is not Tensor and kind is not Parameter:
            return None
        if x.is_neg():
            return None
        found += (x.shape, x.stride(), x.dtype, x.device)
    # Two tensors that are the same now may differ in the next step.
    return tuple(found) if len(set(map(id, tensors))) == len(tensors) else None


class _Tape(TorchFunctionMode):
    """Records the calls of one step, each as a line of Python whose variables are tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._count = itertools.count()
        self._constants: dict[str, Any] = {}
        # For each line: the variables that it sets, its text, those that it reads, and whether it only computes.
        self._lines: list[tuple[list[str], str, list[str], bool]] = []
        self._can_repeat = True
        self._given = [self._new(x) for x in tensors]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if not isinstance(found, Tensor):
            if isinstance(found, (tuple, list)) and any(isinstance(x, Tensor) for x in found):
                self._can_repeat = False  # no step calls functions with several results
            return found
        changes = func.__name__.endswith("_")
        if not changes and self._name(found) is not None:
            return found  # the function returned an argument
        if func.__name__ in _SAME_VIEWS and self._is_same(found, args[0]):
            return found
        read: list[str] = []
        given = [self._text(x, read) for x in args]
        given += [f"{name}={self._text(x, read)}" for name, x in (kwargs or {}).items()]
        if func.__name__ == "__get__":
            text = f"{given[0]}.{func.__self__.__name__}"
        else:
            text = f"{self._constant(func)}({', '.join(given)})"
        self._write([found], f"({text},)", read, not changes)
        return found

    def call(self, op: Any, a: Tensor, b: Tensor, inputs: tuple[Any, ...], given: dict[str, Any]) -> list[Tensor]:
        """Run an op, as one line."""
        read: list[str] = []
        out, out_dtype = given.get("out"), given.get("out_dtype")
        arguments = [self._text(x, read) for x in (a, b, inputs, out, out_dtype)]
        _ACTIVE.tape = None
        try:
            with torch._C.DisableTorchFunction():
                found: list[Tensor] = op.as_list(a, b, *inputs, **given)
        finally:
            _ACTIVE.tape = self
        self._write(found, f"{self._constant(_Call(op))}({', '.join(arguments)})", read, out is None)
        return found

    def make(self, function: Callable[..., Tensor], like: Tensor, *plain: Any) -> Tensor:
        """Make a new tensor like another one, as one line: `function` is none of PyTorch's."""
        read: list[str] = []
        arguments = [self._text(x, read) for x in (like, *plain)]
        with torch._C.DisableTorchFunction():
            found = function(like, *plain)
        self._write([found], f"({self._constant(function)}({', '.join(arguments)}),)", read, True)
        return found

    def program(self, results: Sequence[Tensor | None]) -> Compute | None:
        """Return a function that makes the recorded calls again; None if a tensor came from elsewhere."""
        returned: list[str] = []
        text = self._text(tuple(results), returned)
        if not self._can_repeat:
            return None
        needed, body = set(returned), list[str]()
        for written, line, read, only_computes in reversed(self._lines):
            if only_computes and needed.isdisjoint(written):
                continue
            last = {*written, *read} - needed
            needed |= last
            if last:  # memory is freed as early as in the step itself
                body.append(f"    del {', '.join(sorted(last))}")
            body.append(f"    {', '.join(written)}, = {line}")
        unread = [name for name in self._given if name not in needed]
        head = [
            "def program(given):",
            f"    {''.join(f'{name}, ' for name in self._given)} = given",
            "    given.clear()",
        ]
        head += [f"    del {', '.join(unread)}"] if unread else []
        exec("\n".join((*head, *reversed(body), f"    return {text}")), self._constants)
        made: Compute = self._constants["program"]
        return made

    def _write(self, results: Sequence[Tensor], text: str, read: list[str], only_computes: bool) -> None:
        names = [self._name(x) or self._new(x) for x in results]
        self._lines.append((names, text, read, only_computes))

    def _new(self, tensor: Tensor) -> str:
        name = f"t{next(self._count)}"
        self._names[id(tensor)] = weakref.ref(tensor), name
        return name

    def _name(self, tensor: Tensor) -> str | None:
        known = self._names.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else None

    def _is_same(self, view: Tensor, tensor: Tensor) -> bool:
        """Whether a view has the layout of the whole tensor: then it stands for that tensor."""
        known = self._name(tensor)
        same = view.shape == tensor.shape and view.stride() == tensor.stride() and view.dtype == tensor.dtype
        if known is None or not same or view.data_ptr() != tensor.data_ptr():
            return False
        self._names[id(view)] = weakref.ref(view), known
        return True

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _text(self, value: Any, read: list[str]) -> str:
        """Return an argument as Python source, and add its variables to those that are read."""
        if isinstance(value, Tensor):
            name = self._name(value)
            if name is None:
                self._can_repeat = False
                return "None"
            read.append(name)
            return name
        if type(value) in (tuple, list):
            items = "".join(f"{self._text(x, read)}, " for x in value)
            return f"({items})" if type(value) is tuple else f"[{items}]"
        if type(value) is dict:
            return f"{{{', '.join(f'{name!r}: {self._text(x, read)}' for name, x in value.items())}}}"
        return repr(value) if value is None or type(value) in (int, bool, str) else self._constant(value)


class _Call:
    """A call of an op in a record. Once a kernel serves it, that is launched without a look into the op's plans.

    The record's key has all that the look would ask, and the kernel checks the rest.
    """

    __slots__ = ("op", "plan")

    def __init__(self, op: Any) -> None:
        self.op, self.plan = op, None

    def __call__(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out: Any, out_dtype: torch.dtype | None
    ) -> Sequence[Tensor]:
        op = self.op
        given = None if out is None else (out,) if isinstance(out, Tensor) else tuple(map(out.get, op.outputs))
        plans = op.plans_like(a, b, inputs, out, out_dtype) if self.plan is None else (self.plan,)
        for plan in plans:
            results = plan.run(a, b, inputs, given)
            if results is not None:
                self.plan = plan
                op.served_warm += 1
                op.copied_operands += plan.copies
                return results  # type: ignore[no-any-return]
        self.plan = None
        found = op.run_warm(a, b, inputs, out, out_dtype)
        if found is None:
            named = {} if out is None else {"out": out}
            return op.as_list(a, b, *inputs, out_dtype=out_dtype, **named)  # type: ignore[no-any-return]
        return (found,) if isinstance(found, Tensor) else found
