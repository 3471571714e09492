"""Ops inside functions that torch.compile compiles: two operators of PyTorch's, which it takes as they are.

PyTorch's tracer follows a call of an op only as far as this module: a compiled graph names the op by a string, and the
call happens when the graph runs. What is found on the way (the op of an epilogue, of a norm and what follows it) is
looked up while tracing, and is a constant of the graph.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from cutlass_ops.epilogue import Epilogue
from cutlass_ops.epilogue.graph import Graph


class Traceable(Protocol):
    """What can be called in a compiled function: an op, or one kernel."""

    about: str

    def __call__(self, a: Tensor, b: Tensor, *inputs: Any, **given: Any) -> Any:
        """Run it."""

    def results_of(
        self, a: Tensor, b: Tensor, inputs: Sequence[Any], out_dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Return outputs of the right shapes, dtypes and device, and compute nothing."""


Made = TypeVar("Made", bound=Traceable)

_KNOWN: dict[str, Traceable] = {}
_RESULTS: dict[str, Any] = {}


def register(name: str, graph: Graph, traceable: Traceable) -> str:
    """Make something known to compiled graphs; return what they need to know of it, as one string.

    What stands for it in a graph says what it computes, and is the same in every process: PyTorch keeps compiled graphs
    on the disk by what is in them.

    Parameters
    ----------
    name : str
        For whoever reads a graph.
    graph : Graph
        The epilogue.
    traceable : Traceable
        What is called.
    """
    digest = hashlib.sha256(json.dumps(graph.to_json(), sort_keys=True).encode()).hexdigest()
    key = f"{name}.{digest[:16]}"
    _KNOWN.setdefault(key, traceable)
    result_type(graph)
    return ";".join((key, ",".join(i.name for i in graph.inputs), ",".join(graph.products), _outputs(graph)))


def result_type(graph: Graph) -> Any:
    """Return the named tuple of an epilogue's outputs, or None where D is the only one."""
    names = _outputs(graph)
    if len(graph.outputs) > 1 and names not in _RESULTS:
        _RESULTS[names] = namedtuple("Outputs", names.split(","))
    return _RESULTS.get(names)


def _outputs(graph: Graph) -> str:
    return ",".join(o.name for o in graph.outputs)


def bind(op: str, names: tuple[str, ...], inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Bring inputs given by position and by name into the epilogue's order.

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


class Traced:
    """What stands for an op while its caller is traced."""

    def __init__(self, about: str) -> None:
        self.key, names, products, self.outputs = about.split(";")
        self.names = tuple(names.split(",")) if names else ()
        self.products = tuple(products.split(",")) if products else ()

    def __call__(
        self, a: Any, b: Any, *inputs: Any, out: Any = None, out_dtype: torch.dtype | None = None, **named: Any
    ) -> Any:
        """Call the op as an operator."""
        values = bind(self.key, self.names, inputs, named)
        tensors = [x if isinstance(x, Tensor) else None for x in values]
        numbers = [0.0 if isinstance(x, Tensor) else float(x) for x in values]
        if isinstance(out, Tensor) and "," not in self.outputs:
            torch.ops.cutlass_ops.fused_gemm_out(self.key, a, b, tensors, numbers, out)
            return out
        if out is not None:
            raise TypeError("a compiled function takes out for D alone, as a tensor: leave it out")
        found = torch.ops.cutlass_ops.fused_gemm(self.key, a, b, tensors, numbers, out_dtype)
        return found[0] if "," not in self.outputs else _RESULTS[self.outputs](*found)


# ---- Constants of a trace ------------------------------------------------------------------------------------------

_MAKERS: dict[str, Callable[..., Traceable]] = {}


def remembered(make: Callable[..., Made]) -> Callable[..., Made]:
    """Have a function that makes ops, of epilogues and plain values, remember them, and be a constant of a trace.

    PyTorch's tracer would go through a cache, and make an op at every call.
    """
    name, cached = f"{make.__module__}.{make.__qualname__}", functools.lru_cache(maxsize=1024)(make)
    _MAKERS[name] = cached

    @functools.wraps(make)
    def made(*args: Any) -> Made:
        if torch.compiler.is_dynamo_compiling():
            plain: list[Any] = []
            for x in args:
                plain += [True, x.token] if isinstance(x, Epilogue) else [False, x]
            return cast("Made", Traced(_about(name, *plain)))  # for as long as the trace takes
        return cached(*args)

    return made


def _about(maker: str, *plain: Any) -> str:
    pairs = zip(plain[::2], plain[1::2], strict=True)
    return _MAKERS[maker](*(Epilogue.by_token(x) if is_token else x for is_token, x in pairs)).about


# What the decorator torch._dynamo.assume_constant_result would set; to import it takes a second.
_about._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- The operators -------------------------------------------------------------------------------------------------


def _inputs(tensors: Sequence[Tensor | None], numbers: Sequence[float]) -> list[Tensor | float]:
    return [number if tensor is None else tensor for tensor, number in zip(tensors, numbers, strict=True)]


def _run(op, a, b, tensors, numbers, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    given = {} if out_dtype is None else {"out_dtype": out_dtype}
    found = _KNOWN[op](a, b, *_inputs(tensors, numbers), **given)
    return [found] if isinstance(found, Tensor) else list(found)


def _run_out(op, a, b, tensors, numbers, out):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    _KNOWN[op](a, b, *_inputs(tensors, numbers), out=out)


def _shapes(op, a, b, tensors, numbers, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return _KNOWN[op].results_of(a, b, _inputs(tensors, numbers), out_dtype)


_LIBRARY = torch.library.Library("cutlass_ops", "DEF")  # type: ignore[no-untyped-call]


def declare(schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> None:
    """Make an operator of PyTorch's, for as long as this module is there.

    Parameters
    ----------
    schema : str
        Name, arguments and results, as PyTorch writes them.
    run : callable
        Computes it.
    shapes : callable
        Takes the same arguments, and returns results without data.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    # What register_fake does as well, but for the name of the source line that it reads, which takes 2 ms.
    _LIBRARY.impl(name, shapes, "Meta")  # type: ignore[no-untyped-call]


_ARGUMENTS = "str op, Tensor a, Tensor b, Tensor?[] tensors, float[] numbers"
declare(f"fused_gemm({_ARGUMENTS}, ScalarType? out_dtype) -> Tensor[]", _run, _shapes)
declare(f"fused_gemm_out({_ARGUMENTS}, Tensor(a!) out) -> ()", _run_out, lambda *_: None)
