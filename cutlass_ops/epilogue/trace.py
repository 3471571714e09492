"""Tracing: run a Python function once on symbolic values and keep the expression graph that it builds.

Nothing reads the function's source to understand it; source lines serve error messages only.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import reprlib
import sys
import types
import weakref
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from cutlass_ops.base.errors import ConfigError, EpilogueError
from cutlass_ops.epilogue import doubles, otherwise
from cutlass_ops.epilogue.graph import Graph, canonical
from cutlass_ops.epilogue.names import check_name
from cutlass_ops.epilogue.nodes import D_SCALE, Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import Type, to_fp32
from cutlass_ops.epilogue.values import ANNOTATIONS, TRACER, Computed, Quantized, Reduction, Symbol, Tracer, Value

_LAMBDA = (lambda: None).__name__

_serials = itertools.count()
_BY_TOKEN: weakref.WeakValueDictionary[str, Epilogue] = weakref.WeakValueDictionary()


# How a function returned its outputs: by their names, in order, or D alone.
Container = Literal["", "dict", "tuple"]


class Returned(NamedTuple):
    """How an epilogue function returned its outputs; a call of it in another epilogue returns them in the same way."""

    container: Container = ""  # ``"dict"``, ``"tuple"``, or an empty string for D's value alone
    unconverted: tuple[str, ...] = ()  # outputs returned as a truth value or an index, which are stored as FP32 values


class Epilogue:
    """A traced epilogue function. Two epilogues are equal if their graphs are equal.

    It keeps the graph, and of the function the name, docstring and signature only: what the function closes over may
    be freed. Each epilogue has its own of these. Equal epilogues share kernels.

    Attributes
    ----------
    name : str
        The function's name.
    doc : str
        Its docstring without indentation, or an empty string.
    graph : Graph
        The expression that it computes.
    returned : Returned
        How the function returned its outputs.
    token : str
        A name for this object, valid in this process.

    Examples
    --------
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row):
    ...     "Add a bias."
    ...     return acc + bias
    >>> biased.name, [each.name for each in biased.inputs], [each.name for each in biased.outputs]
    ('biased', ['bias'], ['d'])
    >>> biased.__doc__
    'Add a bias.'
    >>> @co.epilogue
    ... def renamed(x, bias: co.Row):
    ...     return x + bias
    >>> biased == renamed
    True
    """

    name: str
    doc: str
    graph: Graph
    returned: Returned
    token: str

    def __init__(
        self,
        name: str,
        doc: str | None,
        graph: Graph,
        signature: inspect.Signature | None = None,
        returned: Returned | None = None,
        place: tuple[str, str] = ("", ""),
    ) -> None:
        self.name = self.__name__ = name
        self.__doc__ = doc
        self.__module__, self.__qualname__ = place[0], place[1] or name
        self.__signature__ = _signature(graph) if signature is None else signature
        self.doc = inspect.cleandoc(doc or "")
        self.graph = graph
        self.returned = returned or Returned(
            "dict" if sum(o.kind is not Kind.BLOCKS_D for o in graph.outputs) > 1 else ""
        )
        self.token = f"{name}.{next(_serials)}"
        # Kernels are looked up by epilogue on every call: hash the graph once.
        self._hash = hash(graph)
        _BY_TOKEN[self.token] = self

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(self, "_hash"):
            raise AttributeError(f"{name} of an epilogue cannot be set: write another function")
        super().__setattr__(name, value)

    # In a class, it is no method. With this, help() and inspect take it for the function that it was.
    def __get__(self, instance: object, owner: type | None = None) -> Epilogue:
        return self

    # It never changes, so that copies are the same object.
    def __copy__(self) -> Epilogue:
        return self

    def __deepcopy__(self, memo: Any) -> Epilogue:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        place = self.__module__, self.__qualname__
        return _again, (self.name, self.__doc__, self.graph.to_program(), place, tuple(self.returned))

    @staticmethod
    def by_token(token: str) -> Epilogue:
        """Return the epilogue with a token, as long as something refers to it."""
        return _BY_TOKEN[token]

    @property
    def inputs(self) -> tuple[Input, ...]:
        """The inputs in the order of the parameters, without the accumulator."""
        return self.graph.inputs

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The outputs, D first."""
        return self.graph.outputs

    @property
    def signature(self) -> inspect.Signature:
        """The function's signature, with the accumulator first."""
        return self.__signature__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Put the expression into another epilogue that is being traced.

        Raises
        ------
        TypeError
            Outside of an epilogue function.
        EpilogueError
            If the arguments do not fit.
        """
        tracer, graph = TRACER.get(), self.graph
        if tracer is None:
            raise TypeError(f"{self.name} is an epilogue: apply it with gemm(a, b, epilogue={self.name}, ...)")
        if graph.parts:
            raise tracer.error(
                f"{self.name} has {' and '.join(graph.parts)} of an operand, and cannot be called in another epilogue: "
                "copy its expression"
            )
        try:
            acc, *values = self.signature.bind(*args, **kwargs).arguments.values()
        except TypeError as exc:
            raise tracer.error(f"{self.name}{self.signature}: {exc}") from None
        given = {Node("acc"): tracer.lift(acc)}
        for declared, value in zip(graph.inputs, values, strict=True):
            wanted = Type.SEED if declared.kind is Kind.INTEGER else Type.FLOAT
            given[Node("input", (), declared.name)] = tracer.lift(value, wanted)
        tracer.rounded |= {to_fp32(exact): exact for exact in graph.rounded}
        at = tracer.repeat(graph.nodes, given)
        found = {o.name: self._value(tracer, o, at) for o in graph.outputs if o.kind is not Kind.BLOCKS_D}
        if self.returned.container == "tuple":
            outputs: Any = namedtuple("Outputs", found)  # type: ignore[misc]
            return outputs(**found)
        return found if self.returned.container else found["d"]

    def _value(self, tracer: Tracer, output: Output, at: Sequence[int]) -> Symbol:
        node = at[output.node]
        if output.reduce is not None:
            return Reduction(tracer, node, output.reduce, output.kind)
        if output.name == "d" and self.graph.quantized is not None:
            return Quantized(tracer, node, self.graph.quantized)
        if output.name in self.returned.unconverted:
            node = at[self.graph.nodes[output.node].args[0]]
        return Computed(tracer, node)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Epilogue):
            return NotImplemented
        return self is other or self.graph == other.graph

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        inputs = "".join(f", {i.name}: {i.kind.value.capitalize()}" for i in self.inputs)
        return f"<epilogue {self.name}(acc{inputs}) -> {', '.join(o.name for o in self.outputs)}>"


def _signature(graph: Graph) -> inspect.Signature:
    """Return the signature of a function that has a graph."""
    kinds = {t.kind: t for t in ANNOTATIONS.values()}
    # An input may be called acc as well.
    first = "acc_" if any(i.name == "acc" for i in graph.inputs) else "acc"
    parameters = [inspect.Parameter(first, inspect.Parameter.POSITIONAL_ONLY)]
    for i in graph.inputs:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(i.name, kind, annotation=kinds.get(i.kind, Value)))
    return inspect.Signature(parameters)


def _again(name: str, doc: str | None, graph: Any, place: tuple[str, str], returned: tuple[Any, ...]) -> Epilogue:
    """Return a pickled epilogue: the object in its place in a loaded module if that is the same, else its graph."""
    found: Any = sys.modules.get(place[0])
    for part in place[1].split("."):
        found = getattr(found, part, None)
    own = Epilogue(name, doc, Graph.from_program(graph), None, Returned(*returned), place)
    return found if isinstance(found, Epilogue) and (found.name, found.graph) == (name, own.graph) else own


def epilogue(function: Callable[..., Any] | Graph) -> Epilogue:
    """Turn a Python function into an epilogue, by tracing it once.

    The first parameter is the FP32 accumulator (FP64 with FP64 operands). Each further parameter is annotated
    :class:`Row`, :class:`Col`, :class:`Tile`, :class:`Scalar`, :class:`Product` or :class:`Integer`. The function
    returns D's value, a dictionary with ``"d"`` and further outputs, or a tuple with D first. A further output is a
    value, stored as an (M, N) tensor, or a reduction. In a tuple, further outputs are called ``output1``, ``output2``
    and so on, unless the function's return annotation names them: a NamedTuple, or a tuple of names. If D is the result
    of :func:`cutlass_ops.e.quantize`, its scales are the second output, ``"d_scale"``.

    Parameters
    ----------
    function : function
        A function defined with ``def``, whose parameters have no defaults. It runs once, now, and never again. The
        epilogue does not keep it, nor what it closes over. A lambda of the accumulator alone works too, and a graph,
        such as ``epilogue.graph`` or the result of its method ``then``. In a class, use it with ``@staticmethod``.

    Returns
    -------
    Epilogue
        Immutable and hashable. Two with the same graph are equal.

    Raises
    ------
    EpilogueError
        If the function cannot be traced. The message shows the line and says what to do instead.

    Examples
    --------
    >>> @co.epilogue
    ... def swish_residual(acc, bias: co.Row, residual: co.Tile, scale: co.Scalar):
    ...     return co.e.silu(acc + bias) * scale + residual
    >>> swish_residual
    <epilogue swish_residual(acc, bias: Row, residual: Tile, scale: Scalar) -> d>
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> bias, residual = torch.zeros(3).bfloat16(), torch.ones(2, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=swish_residual, bias=bias, residual=residual, scale=0.5).shape
    torch.Size([2, 3])

    A return annotation names the outputs in a tuple:

    >>> @co.epilogue
    ... def with_sums(acc) -> ("d", "row_sum"):
    ...     return co.e.relu(acc), co.e.sum(acc, dim=1)
    >>> co.gemm(a, b, epilogue=with_sums).row_sum.tolist()
    [24.0, 24.0]

    A function that cannot be traced is refused where it is defined:

    >>> @co.epilogue
    ... def leaky(acc):
    ...     return acc if acc > 0 else 0.1 * acc
    Traceback (most recent call last):
    cutlass_ops.base.errors.EpilogueError: leaky: an epilogue cannot branch on a traced value ...
    """
    if isinstance(function, Epilogue):
        return function
    if isinstance(function, Graph):
        return Epilogue(_title(function), "", function)
    if isinstance(function, staticmethod):
        return epilogue(function.__func__)
    if not isinstance(function, types.FunctionType):
        raise EpilogueError(f"an epilogue is a function defined with def, not {_called(function)}")
    tracer = Tracer(function)
    inputs = _inputs(tracer)
    args, kwargs = _arguments(tracer, inputs)
    token = TRACER.set(tracer)
    try:
        outputs, returned = _outputs(tracer, function(*args, **kwargs))
    except RecursionError:
        raise tracer.error_at_def(
            "the function calls itself without an end, or too deeply: an epilogue is one expression, so write a loop "
            "with a known number of steps"
        ) from None
    finally:
        TRACER.reset(token)
    try:
        graph = canonical(inputs, tracer.nodes, outputs)
        graph = replace(graph, rounded=doubles.unseen(graph, tracer.rounded))
        if graph.is_pointwise:
            raise ConfigError("no output depends on the accumulator, so there is nothing to multiply")
    except ConfigError as exc:
        raise tracer.error_at_def(str(exc)) from None
    place = function.__module__, function.__qualname__
    # A lambda has no name: it is called by what it computes, as a graph is.
    name = _title(graph) if function.__name__ == _LAMBDA else function.__name__
    return Epilogue(name, function.__doc__, graph, inspect.signature(function), returned, place)


def _title(graph: Graph) -> str:
    return graph.title or "identity"


def epilogue_given(given: object) -> Epilogue:
    """Return the epilogue that a call is given: a decorated function, or a lambda, which is traced now.

    Raises TypeError if it is neither; the message says what to write. Raises EpilogueError as :func:`epilogue` does.
    """
    if isinstance(given, Epilogue):
        return given
    if isinstance(given, types.FunctionType) and given.__name__ == _LAMBDA:
        return epilogue(given)
    raise TypeError(f"epilogue must be a function decorated with @cutlass_ops.epilogue, not {_called(given)}")


def _called(given: object) -> str:
    """Return a description of an object that is no epilogue function, and what to write instead."""
    name = given if isinstance(given, str) else str(getattr(given, "__name__", type(given).__name__))
    shown = reprlib.repr(given) if isinstance(given, str) else name
    found = otherwise.expression_of(name, "acc")
    if found:
        return f"{shown}: write lambda acc: {found}"
    if isinstance(given, functools.partial):
        whole = getattr(given.func, "__name__", "the function")
        return f"a functools.partial: write a function with def that calls {whole} with these values, and decorate it"
    if isinstance(given, types.MethodType | classmethod):
        return (
            f"the method {name}: an epilogue is called without an object, so define it outside of the class, or as "
            "@staticmethod without self"
        )
    if isinstance(given, types.FunctionType):
        return f"{name}: decorate that function"
    return f"{shown}: write a function of acc with def, and decorate it"


# Sets by hand what torch._dynamo.disable sets: importing that takes a second, and this room knows no PyTorch.
epilogue._torchdynamo_disable = True  # type: ignore[attr-defined]
epilogue._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "an epilogue is traced by cutlass_ops where it is defined: define it outside of the function that torch.compile "
    "traces"
)


def _inputs(tracer: Tracer) -> list[Input]:
    function = tracer.function
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise tracer.error_at_def("an epilogue is a plain function that returns its result, no generator or coroutine")
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise tracer.error_at_def("the function needs a first parameter, the accumulator")
    if function.__name__ == _LAMBDA and len(parameters) > 1:
        names = ", ".join(["acc", *(f"{p.name}: co.Row" for p in parameters[1:])])
        raise tracer.error_at_def(
            "a lambda cannot annotate its inputs: write a function with def and annotate each, such as "
            f"@co.epilogue def fused({names})"
        )
    owner = function.__qualname__.rpartition(".")[0]
    if parameters[0].name in ("self", "cls") and owner and not owner.endswith("<locals>"):
        raise tracer.error_at_def(
            f"{parameters[0].name} is the first parameter, and an epilogue is called without an object: write "
            "@staticmethod above @co.epilogue and leave it out, or define the function outside of the class"
        )
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise tracer.error_at_def(f"{parameter} is not possible: declare each input by name")
        if parameter.default is not parameter.empty:
            raise tracer.error_at_def(
                f"parameter {parameter.name} has a default: inputs are given at the call. Write a constant into the "
                "function's body"
            )
    if _annotation(function, parameters[0].annotation) is not None:
        raise tracer.error_at_def(
            f"the first parameter is the accumulator, so {parameters[0].name} cannot be an input: put one before it"
        )
    inputs = []
    for parameter in parameters[1:]:
        kind = _annotation(function, parameter.annotation)
        if kind is None:
            given = "no annotation" if parameter.annotation is parameter.empty else f"annotation {parameter.annotation}"
            raise tracer.error_at_def(
                f"parameter {parameter.name} has {given}: annotate it co.Row (N,), co.Col (M,), co.Tile (M, N), "
                "co.Scalar, co.Product (K, N) or co.Integer"
            )
        try:
            check_name(parameter.name, "input")
        except ConfigError as exc:
            raise tracer.error_at_def(str(exc)) from None
        inputs.append(Input(parameter.name, kind))
    return inputs


def _annotation(function: types.FunctionType, annotation: object) -> Kind | None:
    """Return the kind that an annotation names; None if it is not one of ours."""
    if isinstance(annotation, str):
        annotation = _resolve(function, annotation)
    if isinstance(annotation, type) and annotation in ANNOTATIONS.values():
        return ANNOTATIONS[annotation.__name__].kind
    return None


def _resolve(function: types.FunctionType, text: str) -> object:
    """Look up a dotted name as the function would, for annotations that ``__future__`` made strings."""
    first, *rest = text.strip("'\" ").split(".")
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if first in cells:
        found: object = cells[first].cell_contents
    elif first in function.__globals__:
        found = function.__globals__[first]
    else:
        # A local of the scope around, or an import for type checkers only: go by the last part of the name.
        return ANNOTATIONS.get(rest[-1] if rest else first)
    for name in rest:
        found = getattr(found, name, None)
    return found


def _arguments(tracer: Tracer, inputs: Sequence[Input]) -> tuple[list[Value], dict[str, Value]]:
    kinds = {t.kind: t for t in ANNOTATIONS.values()}
    tracer.kinds = {i.name: i.kind for i in inputs}
    values: list[Value] = [Computed(tracer, tracer.put("acc"))]
    values += [kinds[i.kind](tracer, tracer.put("input", attr=i.name)) for i in inputs]
    parameters = inspect.signature(tracer.function).parameters.values()
    pairs = list(zip(parameters, values, strict=True))
    keywords = {p.name: v for p, v in pairs if p.kind is p.KEYWORD_ONLY}
    return [v for p, v in pairs if p.name not in keywords], keywords


def _outputs(tracer: Tracer, result: object) -> tuple[list[Output], Returned]:
    container: Container = "dict" if isinstance(result, dict) else "tuple" if isinstance(result, tuple | list) else ""
    if isinstance(result, Value | Quantized):
        result = {"d": result}
    if isinstance(result, (tuple, list)):
        result = _named(tracer, result)
    if isinstance(result, Reduction):
        raise tracer.error_at_def('a reduction cannot be D: return {"d": value, "name": reduction}')
    if result is None:
        raise tracer.error_at_def("the function returns nothing: return D's value, or a dictionary with 'd' in it")
    if not isinstance(result, dict):
        raise tracer.error_at_def(
            f"the function returns {type(result).__name__}: return D's value, or a dictionary "
            '{"d": value, "name": value or reduction}'
        )
    if "d" not in result:
        raise tracer.error_at_def("the returned dictionary lacks 'd', the value of D")
    d = result["d"]
    if isinstance(d, Quantized):
        if D_SCALE in result:
            raise tracer.error_at_def(f"the name {D_SCALE!r} is reserved for scales of a quantised D: use another name")
        scales = Output(D_SCALE, d.node, Kind.BLOCKS_D, d.dtype)
        first = [_output(tracer, "d", Computed(d.tracer, d.node)), scales]
    else:
        first = [_output(tracer, "d", d)]
    outputs = [*first, *(_output(tracer, name, value) for name, value in result.items() if name != "d")]
    names = tuple(output.name for output in outputs)
    declared = _annotated(tracer.function)
    if declared is not None and declared not in (names, tuple(name for name in names if name != D_SCALE)):
        raise tracer.error_at_def(
            f"the function's annotation names {', '.join(declared)}, and it returns {', '.join(names)}: give both the "
            "same names in the same order"
        )
    unconverted = (name for name, x in result.items() if isinstance(x, Value) and x.type is not Type.FLOAT)
    return outputs, Returned(container, tuple(unconverted))


def _named(tracer: Tracer, result: Sequence[object]) -> dict[str, object]:
    """Return the values of a tuple by name: its own names, those of the function's annotation, or numbers."""
    names = getattr(result, "_fields", None) or _annotated(tracer.function)
    if names is None:
        names = ("d", *(f"output{number}" for number in range(1, len(result))))
    if len(names) != len(result) or len(set(names)) != len(names) or "d" not in names:
        raise tracer.error_at_def(
            f"the function returns {len(result)} values, and they are called {', '.join(names) or 'nothing'}: each "
            "needs a name of its own, and D's is 'd'"
        )
    if names[0] != "d":
        raise tracer.error_at_def(f"the function returns {', '.join(names)}, and D must come first: put 'd' first")
    return dict(zip(names, result, strict=True))


def _annotated(function: types.FunctionType) -> tuple[str, ...] | None:
    """Return the names in a function's return annotation: a tuple of texts, or a NamedTuple."""
    annotation: object = inspect.signature(function).return_annotation
    if isinstance(annotation, str):
        text = annotation
        try:
            annotation = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            annotation = _resolve(function, text)
    annotation = getattr(annotation, "_fields", annotation)
    if isinstance(annotation, (tuple, list)) and annotation and all(isinstance(name, str) for name in annotation):
        return tuple(annotation)
    return None


def _output(tracer: Tracer, name: str, value: object) -> Output:
    if name != "d":
        try:
            check_name(name, "output")
        except ConfigError as exc:
            raise tracer.error_at_def(str(exc)) from None
    if isinstance(value, Quantized):
        raise tracer.error_at_def(
            f"output {name!r} is quantised with scales of blocks, and only D can be: return it as 'd', or quantise the "
            "stored tensor by co.Scaled.quantize"
        )
    if not isinstance(value, (Value, Reduction)):
        raise tracer.error_at_def(f"output {name!r} is {type(value).__name__}: a traced value or a reduction is needed")
    if value.tracer is not tracer:
        raise tracer.error_at_def(f"output {name!r} belongs to another epilogue's tracing")
    if isinstance(value, Value):
        return Output(name, tracer.lift(value))
    if name == "d":
        raise tracer.error_at_def("'d' is the (M, N) result and cannot be a reduction: give that another name")
    return Output(name, value.node, value.kind, value.function)
