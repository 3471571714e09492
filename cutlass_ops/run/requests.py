"""From what a user calls to the op behind it: ops, epilogues, and functions that prepare arguments."""

from __future__ import annotations

import importlib
import inspect
import itertools
import reprlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from types import FunctionType
from typing import Any, NamedTuple, TypeVar, cast

from cutlass_ops.base.errors import ConfigError, CutlassOpsError
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.run import casting
from cutlass_ops.run.gemm import flattened, gemm
from cutlass_ops.run.ops import Op, op_of
from cutlass_ops.run.values import VALUES


class Request(NamedTuple):
    """A user's call, brought to the arguments of its op."""

    op: Op
    arguments: tuple[Any, ...]  # A, B, and the epilogue's inputs by position
    named: dict[str, Any]  # other inputs by name, and `out` and `out_dtype` if given

    def as_autocast(self) -> Request:
        """Return the call with its operands cast as the op casts them under torch.autocast, if that is active."""
        dtype = casting.autocast_dtype(self.arguments[0]) if self.op.autocasts else None
        if dtype is None:
            return self
        multiplied = {"a", "b", *self.op.graph.products}

        def cast(name: str, value: Any) -> Any:
            return casting.autocast_to(dtype, value) if name in multiplied else value

        # Other inputs are named. A surplus argument stays, so that it is refused.
        names = itertools.chain(("a", "b", *self.op.names), itertools.repeat(""))
        arguments = tuple(map(cast, names, self.arguments))
        return Request(self.op, arguments, {name: cast(name, value) for name, value in self.named.items()})


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


def is_known(op: object) -> bool:
    """Whether an object is an op or stands for one: other callables are the user's own."""
    known = isinstance(op, Op | Epilogue) or op is gemm
    return known or (isinstance(op, FunctionType) and op in _PREPARED_BY)


def requested(op: Any, /, *arguments: Any, **named: Any) -> Request:
    """Resolve a user's call to its op and the op's arguments.

    `op` is as for :func:`called`, or a function of this library such as :func:`cutlass_ops.rmsnorm_gemm`, or its name.
    Raises TypeError or ValueError if it is none of these, or if an argument does not fit.
    """
    op = named_object(op) if isinstance(op, str) else op
    prepare = _PREPARED_BY.get(op) if isinstance(op, FunctionType) else None
    if prepare is None:
        return _request_of(op, *arguments, **named)
    bound = inspect.signature(op).bind(*arguments, **named)
    bound.apply_defaults()
    given = {"inputs": {}, **bound.arguments}
    found, values = prepare(**{name: given[name] for name in inspect.signature(prepare).parameters})
    if given.get("math") is not None:
        found = found.in_math(given["math"])
    return Request(found, values, given["inputs"] | {n: given[n] for n in ("out", "out_dtype") if n in given})


def _request_of(
    given: Any, /, *arguments: Any, epilogue: Any = None, groups: Any = None, math: Any = None, **named: Any
) -> Request:
    """Return a call of an op, of :func:`gemm` or of an epilogue."""
    op = called(given, epilogue)
    at = (*arguments, *(named.pop(name) for name in ("a", "b")[len(arguments) :] if name in named))
    if len(at) < 2:
        raise TypeError(f"a or b is missing: pass the arguments of a call of {op.name}, as to the op itself")
    a, b, *inputs = at
    tensors: tuple[Any, ...] = a, b
    if groups is not None or isinstance(a, VALUES) or isinstance(b, VALUES):
        # As the call itself does, so that both find the same op.
        by_name = "" if given is gemm or isinstance(given, Epilogue) else op.name
        op, tensors = flattened(epilogue if given is gemm else op.epilogue, by_name, a, b, groups)
    return Request(op if math is None else op.in_math(math), (*tensors, *inputs), named)


def called(op: object, epilogue: Epilogue | None = None) -> Op:
    """Return the op of an op, of :func:`gemm` with an epilogue, or of a decorated function; or of the name of one.

    Raises TypeError if `op` is none of these or already has an epilogue; ConfigError if it is an unknown name.
    """
    op = named_object(op) if isinstance(op, str) else op
    if op is gemm:
        return op_of(epilogue)
    if isinstance(op, Op | Epilogue):
        if epilogue is not None:
            raise TypeError(f"{op.name} already has an epilogue: pass cutlass_ops.gemm with epilogue=")
        return op if isinstance(op, Op) else op_of(op)
    raise TypeError(
        f"op is {reprlib.repr(op)}: pass cutlass_ops.gemm, a named op such as cutlass_ops.gemm_bias_relu or its name, "
        "a function decorated with @cutlass_ops.epilogue, or an op from cutlass_ops.run.norms such as rmsnorm_op()"
    )


def named_object(text: str) -> object:
    """Return what a string names: an op or function of this library, or an epilogue at an import path.

    Raises ConfigError if it names none. The message lists the ops.
    """
    from cutlass_ops.declare import spelling  # late, since importing it traces the named ops

    name = spelling.op_of(text)
    if name == gemm.__name__:
        return gemm
    if ":" in name:
        return import_object(name, f"{', '.join(spelling.OPS)}, or MODULE:NAME of an epilogue")
    if name in spelling.NORMS:  # by its name, since that module registers the function here
        module = "gated" if name == "gemm_swiglu" else "norms"
        return cast(object, getattr(importlib.import_module(f"cutlass_ops.run.{module}"), name))
    from cutlass_ops.run import named  # late as well

    return next(op for op in named.NAMED if op.name == name)


def name_or_op(given: object) -> str | Op:
    """Return an op's name, an epilogue's import path, or the op of anything else, with :func:`called`'s errors."""
    from cutlass_ops.declare import spelling  # late, since importing it traces the named ops

    if isinstance(given, str):
        return spelling.op_of(given)
    name = getattr(given, "__name__", None)
    return name if name in spelling.OPS and named_object(name) is given else called(given)


def import_object(name: str, instead: str) -> object:
    """Return the object at ``MODULE:NAME``, or raise ConfigError; ``instead`` describes the valid values."""
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(f"unknown name {name!r}: use {instead}")
    with foreign(name):
        return cast(object, getattr(importlib.import_module(module), attribute))


@contextmanager
def foreign(name: str) -> Iterator[None]:
    """Turn any exception from a user's module into a ConfigError with its location.

    The module's prints go to standard error: standard output is for answers, such as a JSON value.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (CutlassOpsError, ImportError, AttributeError) as exc:
        raise ConfigError(f"{name} cannot be imported: {exc}") from exc
    except (Exception, SystemExit) as exc:
        last = traceback.extract_tb(exc.__traceback__)[-1]
        where = "" if isinstance(exc, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise ConfigError(f"{name} cannot be imported: {type(exc).__name__}: {exc}{where}") from exc
