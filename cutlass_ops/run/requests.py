"""From what a user calls to the op behind it: ops, epilogues, and functions that prepare arguments."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.run import casting
from cutlass_ops.run.ops import Op, gemm, op_of


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

    def as_autocast(self) -> Request:
        """Return the call with the operands that the op makes of it under torch.autocast, if that is active."""
        dtype = casting.autocast_dtype(self.arguments[0]) if self.op.autocasts else None
        if dtype is None:
            return self
        multiplied = {"a", "b", *self.op.graph.products}

        def cast(name: str, value: Any) -> Any:
            return casting.autocast_to(dtype, value) if name in multiplied else value

        # Others are named. What is one too many stays, so that it is refused.
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
        of = called(op, named.pop("epilogue", None))
        math = named.pop("math", None)
        if len(arguments) + sum(name in named for name in ("a", "b")) < 2:
            raise TypeError(f"a or b is missing: pass the arguments of a call of {of.name}, as to the op itself")
        return _request_of(of if math is None else of.in_math(math), *arguments, **named)
    bound = inspect.signature(op).bind(*arguments, **named)
    bound.apply_defaults()
    given = {"inputs": {}, **bound.arguments}
    found, values = prepare(**{name: given[name] for name in inspect.signature(prepare).parameters})
    if given.get("math") is not None:
        found = found.in_math(given["math"])
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
