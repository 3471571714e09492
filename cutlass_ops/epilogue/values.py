"""Symbolic values: what an epilogue's parameters are while it is traced, and the errors that they raise.

A :class:`Value` records what is done with it as nodes of a :class:`Tracer`. Whatever Python, NumPy or PyTorch could do
with an object and an epilogue cannot is refused here, with the line of the user's function and a way out.
"""

from __future__ import annotations

import linecache
import math
import numbers
import operator
import os
import sys
import types
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, NoReturn

from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.epilogue.nodes import Kind, Node
from cutlass_ops.epilogue.operations import OPS, SWAP_PAIRS, to_fp32

# Operations on constants that FP64 arithmetic and one rounding to FP32 give bit for bit as FP32 arithmetic does.
_FOLDED: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": operator.abs,
}

_SELECT = "use co.maximum, co.minimum, co.clamp, co.relu or co.leaky_relu"
_BRANCH = f"an epilogue cannot branch on a traced value (if, while, and, or, not, assert): {_SELECT}"
_COMPARE = f"an epilogue cannot compare traced values: {_SELECT}"
_NUMBER = "a traced value is not a Python number: use the functions of cutlass_ops (co.exp, not math.exp)"
_SEQUENCE = "a traced value stands for one element: it cannot be indexed, iterated or measured with len()"
_ROUND = "rounding to integers is not supported: co.cast rounds to a dtype"
_OPERATOR = "the operator {} is not supported: an epilogue computes element by element with + - * / and co's functions"
_ARRAY = "a traced value is not a NumPy array: use the functions of cutlass_ops (co.exp, not numpy.exp)"
_METHOD = "use + - * / and the functions of cutlass_ops"
_REDUCED = "a reduction can only be an output, in the returned dictionary: no operation takes it"
_TENSOR = (
    "a tensor or array cannot be a constant: give the function a parameter annotated co.Row, co.Col, co.Tile or "
    "co.Scalar and pass it at the call"
)

_REFUSED: dict[str, str] = {
    "__bool__": _BRANCH,
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), _COMPARE),
    **dict.fromkeys(("__int__", "__float__", "__complex__", "__index__"), _NUMBER),
    **dict.fromkeys(("__len__", "__iter__", "__getitem__", "__setitem__", "__contains__", "__reversed__"), _SEQUENCE),
    **dict.fromkeys(("__round__", "__floor__", "__ceil__", "__trunc__"), _ROUND),
    **dict.fromkeys(("__array__", "__array_function__"), _ARRAY),
    "__call__": "a traced value is not a function",
    "__invert__": _OPERATOR.format("~"),
    **{
        f"__{side}{name}__": _OPERATOR.format(symbol)
        for side in ("", "r")
        for name, symbol in {
            "matmul": "@",
            "mod": "%",
            "floordiv": "//",
            "divmod": "divmod",
            "and": "&",
            "or": "|",
            "xor": "^",
            "lshift": "<<",
            "rshift": ">>",
        }.items()
    },
}

_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow")

_UFUNCS = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div"}


class _Line(NamedTuple):
    """A line of the user's code, for a message."""

    function: str
    file: str
    number: int

    def error(self, problem: str) -> EpilogueError:
        source = linecache.getline(self.file, self.number).strip()
        shown = f"\n    {source}" if source else ""
        return EpilogueError(f"{self.function}: {problem}\n  {self.file}:{self.number}{shown}")


def _calling_line(file: str | None = None) -> _Line | None:
    """Return the innermost running line of a file; without one, the innermost outside this package."""
    here = os.path.dirname(__file__)
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file or (file is None and os.path.dirname(code.co_filename) != here):
            return _Line(code.co_name, code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class Tracer:
    """One run of one function: the nodes made so far, and where errors are."""

    def __init__(self, function: types.FunctionType) -> None:
        self.nodes: list[Node] = []
        self.function = function

    def error(self, problem: str) -> EpilogueError:
        """Return an error that shows the line of the function that is running."""
        line = _calling_line(self.function.__code__.co_filename) or self._def_line()
        return _Line(self.function.__name__, line.file, line.number).error(problem)

    def error_at_def(self, problem: str) -> EpilogueError:
        """Return an error that shows the function's ``def`` line."""
        return self._def_line().error(problem)

    def _def_line(self) -> _Line:
        code = self.function.__code__
        number = code.co_firstlineno  # the first decorator's line, where there is one
        while linecache.getline(code.co_filename, number).lstrip().startswith("@"):
            number += 1
        return _Line(self.function.__name__, code.co_filename, number)

    def add(self, node: Node) -> int:
        """Append a node and return its index."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def apply(self, op: str, args: Sequence[object], attr: str | None = None) -> Value:
        """Append an operation, or its result where that is a constant."""
        indices = tuple(self.lift(a) for a in args)
        constants = [n.attr for n in (self.nodes[i] for i in indices) if isinstance(n.attr, float)]
        if op in _FOLDED and len(constants) == len(indices):
            return Value(self, self.add(Node("const", (), to_fp32(_FOLDED[op](*constants)))))
        if op == SWAP_PAIRS and constants:
            return Value(self, indices[0])
        return Value(self, self.add(Node(op, indices, attr)))

    def lift(self, x: object) -> int:
        """Return the node of a traced value or a number."""
        if isinstance(x, Value):
            if x.tracer is not self:
                raise self.error("this value belongs to another epilogue's tracing: pass it as a parameter")
            return x.node
        if isinstance(x, Reduction):
            raise self.error(_REDUCED)
        if isinstance(x, numbers.Real) and not isinstance(x, bool):
            return self.add(Node("const", (), self._constant(x)))
        if _is_array(x):
            raise self.error(_TENSOR)
        raise self.error(f"a value or a number is needed here, not {type(x).__name__}")

    def _constant(self, x: numbers.Real) -> float:
        try:
            exact = float(x)
            rounded = to_fp32(exact)
        except OverflowError:  # an int beyond FP64
            exact, rounded = 0.0, math.inf
        if math.isinf(rounded) != math.isinf(exact) or (rounded == 0) != (exact == 0):
            raise self.error("a constant is outside FP32's range (1.4e-45 to 3.4e38): write 0.0 or math.inf if meant")
        return rounded


TRACER: ContextVar[Tracer | None] = ContextVar("cutlass_ops_tracer", default=None)


def _instead(name: str) -> str:
    return f"use co.{name}" if name in OPS else _METHOD


def _is_array(x: object) -> bool:
    return hasattr(type(x), "__array__") and not isinstance(x, Symbol)


class Symbol:
    """What traced values and reductions have in common: Python can do little with them, and says so."""

    __slots__ = ("node", "tracer")

    def __init__(self, tracer: Tracer, node: int) -> None:
        self.tracer = tracer
        self.node = node

    def __getattr__(self, name: str) -> NoReturn:
        # Private names are protocols that Python and notebooks probe for: they are just not there.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        raise self.tracer.error(f"a traced value has no attribute {name}: {_instead(name)}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **kwargs: object) -> Value:
        # NumPy scalars on the left of an operator come here.
        name = ufunc.__name__
        if name in _UFUNCS and method == "__call__" and not kwargs:
            return self.tracer.apply(_UFUNCS[name], inputs)
        raise self.tracer.error(f"NumPy's {name} cannot take a traced value: {_instead(name)}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> NoReturn:
        if any(_is_array(a) for a in args):
            problem = _TENSOR
        else:
            name = getattr(function, "__name__", str(function))
            problem = f"PyTorch's {name} cannot take a traced value: {_instead(name)}"
        tracer = TRACER.get()
        raise tracer.error(problem) if tracer else EpilogueError(problem)

    __hash__ = object.__hash__


class Value(Symbol):
    """One element of an epilogue's computation in FP32, while the function is traced.

    Examples
    --------
    >>> @co.epilogue
    ... def shown(acc):
    ...     print(acc, -acc)
    ...     return acc
    <traced acc %0> <traced neg %1>
    """

    __slots__ = ()

    def __add__(self, other: Value | float) -> Value:
        return self.tracer.apply("add", (self, other))

    def __radd__(self, other: float) -> Value:
        return self.tracer.apply("add", (other, self))

    def __sub__(self, other: Value | float) -> Value:
        return self.tracer.apply("sub", (self, other))

    def __rsub__(self, other: float) -> Value:
        return self.tracer.apply("sub", (other, self))

    def __mul__(self, other: Value | float) -> Value:
        return self.tracer.apply("mul", (self, other))

    def __rmul__(self, other: float) -> Value:
        return self.tracer.apply("mul", (other, self))

    def __truediv__(self, other: Value | float) -> Value:
        return self.tracer.apply("div", (self, other))

    def __rtruediv__(self, other: float) -> Value:
        return self.tracer.apply("div", (other, self))

    def __neg__(self) -> Value:
        return self.tracer.apply("neg", (self,))

    def __pos__(self) -> Value:
        return self

    def __abs__(self) -> Value:
        return self.tracer.apply("abs", (self,))

    def __pow__(self, exponent: object) -> NoReturn:
        known: dict[object, str] = {2: "co.square(x)", 0.5: "co.sqrt(x)", -0.5: "co.rsqrt(x)", -1: "1 / x"}
        instead = known.get(exponent if isinstance(exponent, (int, float)) else None, "a product or co.exp")
        raise self.tracer.error(f"the operator ** is not supported: use {instead}")

    def __rpow__(self, base: object) -> NoReturn:
        raise self.tracer.error("the operator ** is not supported: use co.exp(x * math.log(base))")

    def __repr__(self) -> str:
        node = self.tracer.nodes[self.node]
        return f"<traced {node.op} %{self.node}>"


class Reduction(Symbol):
    """A reduction of a value over a row or a column of D: an output, and nothing to compute with.

    Examples
    --------
    >>> @co.epilogue
    ... def with_sums(acc):
    ...     row_sum = co.e.sum(acc, dim=1)
    ...     print(row_sum)
    ...     return {"d": acc, "row_sum": row_sum}
    <traced reduction sum of %0>
    """

    __slots__ = ("function", "kind")

    function: str
    kind: Kind

    def __init__(self, tracer: Tracer, node: int, function: str, kind: Kind) -> None:
        super().__init__(tracer, node)
        self.function = function
        self.kind = kind

    def __repr__(self) -> str:
        return f"<traced reduction {self.function} of %{self.node}>"


def _refusal(problem: str) -> Callable[..., NoReturn]:
    def refuse(self: Symbol, *_: object, **__: object) -> NoReturn:
        raise self.tracer.error(problem)

    return refuse


for _name, _problem in _REFUSED.items():
    setattr(Symbol, _name, _refusal(_problem))
for _name in _ARITHMETIC:
    setattr(Reduction, f"__{_name}__", _refusal(_REDUCED))
    setattr(Reduction, f"__r{_name}__", _refusal(_REDUCED))
for _name in ("neg", "pos", "abs"):
    setattr(Reduction, f"__{_name}__", _refusal(_REDUCED))


class Row(Value):
    """Annotation of an input with one value for each column of D, shape (N,): a bias.

    Its dtype is FP16, BF16 or FP32.

    Examples
    --------
    >>> @co.epilogue
    ... def biased(acc, bias: co.Row):
    ...     return acc + bias
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=biased, bias=torch.tensor([0.0, 1.0, 2.0])).tolist()
    [[8.0, 9.0, 10.0], [8.0, 9.0, 10.0]]
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.ROW


class Col(Value):
    """Annotation of an input with one value for each row of D, shape (M,): a scale for each token.

    Its dtype is FP16, BF16 or FP32.

    Examples
    --------
    >>> @co.epilogue
    ... def scaled(acc, scale: co.Col):
    ...     return acc * scale
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=scaled, scale=torch.tensor([1.0, 0.5])).tolist()
    [[8.0, 8.0, 8.0], [4.0, 4.0, 4.0]]
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.COL


class Tile(Value):
    """Annotation of an input of D's shape (M, N): a residual.

    Its dtype is FP16, BF16 or FP32.

    Examples
    --------
    >>> @co.epilogue
    ... def added(acc, residual: co.Tile):
    ...     return acc + residual
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=added, residual=torch.eye(2, 3)).tolist()
    [[9.0, 8.0, 8.0], [8.0, 9.0, 8.0]]
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.TILE


class Scalar(Value):
    """Annotation of an input that is one value: a Python number or a 0-d tensor.

    Examples
    --------
    >>> @co.epilogue
    ... def scaled(acc, scale: co.Scalar):
    ...     return acc * scale
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=scaled, scale=0.5).tolist()
    [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.SCALAR


class Product(Value):
    """Annotation of a second product of A: a call takes a matrix (K, N), and the function sees A @ matrix in FP32.

    There is one at most. The matrix has A's dtype and B's major.

    Examples
    --------
    >>> @co.epilogue
    ... def gated(acc, up: co.Product):
    ...     return co.e.relu(acc) * up
    >>> a, b = torch.ones(2, 8).bfloat16(), torch.ones(8, 3).bfloat16()
    >>> co.gemm(a, b, epilogue=gated, up=0.5 * b).tolist()
    [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.PRODUCT


ANNOTATIONS: dict[str, type[Row | Col | Tile | Scalar | Product]] = {
    t.__name__: t for t in (Row, Col, Tile, Scalar, Product)
}


def apply(op: str, *args: object) -> Value:
    """Apply an operation of the tables to values and numbers, inside an epilogue function.

    Raises
    ------
    EpilogueError
        Outside of one, or if an argument is neither a value nor a number.
    """
    return _current(op).apply(op, args)


def apply_cast(x: object, dtype: str | dtypes.DType) -> Value:
    """Round a value to an element type; to FP32 that is the value itself."""
    tracer = _current("cast")
    try:
        element = dtypes.dtype(dtype)
    except (ValueError, TypeError) as exc:
        raise tracer.error(str(exc)) from None
    if element is dtypes.f32:
        return Value(tracer, tracer.lift(x))
    return tracer.apply("cast", (x,), element.name)


def reduce(function: str, x: object, dim: object) -> Reduction:
    """Reduce a value over the rows (``dim`` 1 or -1) or the columns (0 or -2) of D."""
    tracer = _current(function)
    kind = {1: Kind.COL, -1: Kind.COL, 0: Kind.ROW, -2: Kind.ROW}.get(dim) if type(dim) is int else None
    if kind is None:
        two = " (for the greater of two values use co.maximum)" if function == "max" and isinstance(dim, Value) else ""
        raise tracer.error(
            f"co.{function} reduces over a row with dim=1 or over a column with dim=0, not dim={dim!r}{two}"
        )
    return Reduction(tracer, tracer.lift(x), function, kind)


def error(function: str, problem: str) -> EpilogueError:
    """Return an error about a call of one of the language's functions, to raise; it shows the line of that call."""
    return _current(function).error(problem)


def _current(function: str) -> Tracer:
    tracer = TRACER.get()
    if tracer is None:
        line = _calling_line()
        problem = f"co.{function} works on the values of an @epilogue function only: for tensors use PyTorch"
        raise line.error(problem) if line else EpilogueError(problem)
    return tracer
