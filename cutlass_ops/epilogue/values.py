"""Symbolic values: what an epilogue's parameters are while it is traced, and the errors that they raise.

A :class:`Value` records what is done with it as nodes of a :class:`Tracer`. Whatever Python, NumPy or PyTorch could do
with an object and an epilogue cannot is refused here, with the line of the user's function and a way out.
"""

from __future__ import annotations

import linecache
import math
import numbers
import os
import reprlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar, NamedTuple, NoReturn, cast

from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.epilogue import otherwise
from cutlass_ops.epilogue.build import Builder
from cutlass_ops.epilogue.graph import MAX_NODES, fits
from cutlass_ops.epilogue.nodes import Kind, Node
from cutlass_ops.epilogue.operations import OPS, REDUCTIONS, TO_FLOAT, Signature, Type, to_fp32

_BRANCH = (
    "an epilogue cannot branch on a traced value (if, while, and, or, not, assert, a < b < c, max(x, y)): use "
    "co.where(condition, x, y), co.maximum, co.minimum, co.clamp, co.relu or co.leaky_relu; join "
    "conditions with & and |; ~ negates"
)
_NUMBER = "a traced value is not a Python number: use the functions of cutlass_ops (co.exp, not math.exp)"
_SEQUENCE = "a traced value stands for one element: it cannot be indexed, iterated or measured with len()"
_ROUND = (
    "Python's rounding takes no traced value: use co.round, co.floor, co.ceil or co.trunc; co.cast rounds to a dtype"
)
_OPERATOR = "the operator {} is not supported: an epilogue computes element by element with + - * / and co's functions"
_ARRAY = "a traced value is not a NumPy array: use the functions of cutlass_ops (co.exp, not numpy.exp)"
_METHOD = "use + - * / and the functions of cutlass_ops"
_LOGIC = "the operator {} is not supported for numbers: it takes conditions, such as {}"
_SEED = "an Integer is a seed or an offset of co.uniform and co.dropout_mask: use a co.Scalar to compute with a number"
_REDUCED = "a reduction can only be an output, in the returned dictionary: no operation takes it"
_QUANTIZED = "what co.e.quantize gives can only be D: compute with the value that it was given instead"
_TENSOR = (
    "a tensor or array cannot be a constant: give the function a parameter annotated co.Row, co.Col, co.Tile or "
    "co.Scalar and pass it at the call"
)

_REFUSED: dict[str, str] = {
    "__bool__": _BRANCH,
    **dict.fromkeys(("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"), _REDUCED),
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

for _name in ("__xor__", "__rxor__"):
    _REFUSED[_name] += "; of conditions, use !="

# Of one function. A loop that does not end would fill the memory.
MAX_STEPS = 1 << 14

_ARITHMETIC = ("add", "sub", "mul", "truediv", "pow")

_UFUNCS = {"add": "add", "subtract": "sub", "multiply": "mul", "divide": "div", "power": "pow"}
_UFUNCS |= {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge", "equal": "eq", "not_equal": "ne"}


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
    here = os.path.join(os.path.dirname(__file__), "")
    frame = sys._getframe(1) if hasattr(sys, "_getframe") else None
    while frame is not None:
        code = frame.f_code
        if code.co_filename == file or (file is None and not code.co_filename.startswith(here)):
            return _Line(code.co_name, code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class Tracer(Builder):
    """One run of one function: what it has built so far, and the place of errors."""

    def __init__(self, function: types.FunctionType) -> None:
        super().__init__()
        self.function = function
        self._steps = 0

    def put(self, op: str, *args: int, attr: str | float | int | None = None) -> int:  # noqa: D102
        self._count()
        return super().put(op, *args, attr=attr)

    def _count(self) -> None:
        """Refuse a function that does not end."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise self.error(
                f"the function has taken {MAX_STEPS:,} steps, and an epilogue has at most {MAX_NODES} operations: does "
                "each of its loops end?"
            )

    def error(self, problem: str) -> EpilogueError:
        """Return an error that shows the line of the function that is running."""
        line = _calling_line(self.function.__code__.co_filename) or self._def_line()
        return _Line(self.function.__name__, line.file, line.number).error(problem)

    def error_at_def(self, problem: str) -> EpilogueError:
        """Return an error that shows the function's ``def`` line."""
        return self._def_line().error(problem)

    def _def_line(self) -> _Line:
        code = self.function.__code__
        number = code.co_firstlineno  # the first decorator's line, if there is one
        while linecache.getline(code.co_filename, number).lstrip().startswith("@"):
            number += 1
        return _Line(self.function.__name__, code.co_filename, number)

    def apply(self, op: str, args: Sequence[object], attr: str | None = None) -> Value:
        """Append an operation, or its result if that is a constant."""
        if op not in OPS:
            return Computed(self, self.put(op))
        signature = self._signature(op, args)
        if op in _WRAPPING and signature[1] is Type.INDEX:
            args = [a if isinstance(a, Value) else _wrapped(int(cast("int", a))) for a in args]
        indices = tuple(self.lift(a, wanted) for a, wanted in zip(args, signature[0], strict=True))
        return Computed(self, self.put(op, *indices, attr=attr))

    def repeat(self, nodes: Sequence[Node], given: Mapping[Node, int]) -> list[int]:
        """Put a traced function's nodes as if it ran here, except given leaves; return the place of each."""
        at: list[int] = []
        for node in nodes:
            args = [at[a] for a in node.args]
            if node in given:
                at.append(given[node])
            elif node.op == "pow":  # another operation, if the exponent is a number here
                x, y = (Computed(self, a) for a in args)
                number = self._number(args[1])
                at.append(power(self, x, y if number is None else number).node)
            else:
                at.append(self.put(node.op, *args, attr=node.attr))
        return at

    def _signature(self, op: str, args: Sequence[object]) -> Signature:
        """Return the types of an operation's arguments: their own if it takes them, else FP32."""
        possible = OPS[op].signatures
        for is_fit in (self._is, self._becomes):
            for signature in possible:
                if all(map(is_fit, args, signature[0])):
                    return signature
        for arg in args:
            self.lift(arg, Type.SEED if possible[0][0][0] is Type.SEED else None)  # what is no value at all is an error
        if Type.SEED in possible[0][0]:
            raise self.error(
                f"co.{op} takes whole numbers of 64 bits: annotate the parameter co.Integer, or write a Python int"
            )
        if any(isinstance(x, Value) and x.type is Type.SEED for x in args):
            raise self.error(_SEED)
        if op == "where":
            raise self.error(
                "co.where takes a condition, such as x > 0, and then two numbers: write x != 0 for a number"
            )
        raise self.error(_LOGIC.format(*_JOINED[op]))

    def _is(self, x: object, wanted: Type) -> bool:
        """Whether an argument is of a type, a number of Python's being of any that holds it."""
        if isinstance(x, Value):
            return x.type is wanted
        if wanted in _BITS:
            # An index takes every int: as an FP32 value, one beyond 32 bits would silently make the others FP32.
            is_whole = isinstance(x, numbers.Integral) and not isinstance(x, bool)
            return is_whole and (wanted is Type.INDEX or fits(int(cast("int", x)), _BITS[wanted]))
        return wanted is Type.FLOAT

    def _becomes(self, x: object, wanted: Type) -> bool:
        return self._is(x, wanted) or (
            wanted is Type.FLOAT and isinstance(x, Value) and x.type in (Type.TRUTH, Type.INDEX)
        )

    def lift(self, x: object, wanted: Type | None = Type.FLOAT) -> int:
        """Return the node of a traced value or a number, as a value of a type; any type if that is None."""
        self._count()
        if isinstance(x, Value):
            if x.tracer is not self:
                raise self.error("this value belongs to another epilogue's tracing: pass it as a parameter")
            if wanted is Type.FLOAT and x.type is not Type.FLOAT:
                if x.type is Type.SEED:
                    raise self.error(_SEED)
                return self.put(TO_FLOAT, x.node)
            return x.node
        if isinstance(x, Reduction | Quantized):
            raise self.error(type(x).refusal)
        if isinstance(x, numbers.Real) and not isinstance(x, bool):
            if wanted in _BITS and isinstance(x, numbers.Integral):
                if wanted is Type.INDEX and not fits(int(x), _BITS[wanted]):
                    raise self.error(
                        f"{shown(x)} has more than the 32 bits of an index: use a number from -2**31 up to 2**31 - 1"
                    )
                return self.put("seed" if wanted is Type.SEED else "integer", attr=int(x))
            return self._constant(x)
        if _is_array(x):
            raise self.error(_TENSOR)
        raise self.error(f"a value or a number is needed here, not {type(x).__name__}{_why_no_number(x)}")

    def _constant(self, x: numbers.Real) -> int:
        exact = self.in_range(x)
        return self.constant(to_fp32(exact), exact)

    def in_range(self, x: numbers.Real) -> float:
        """Return a Python or NumPy number rounded to FP64, if FP32 has a number near it."""
        try:
            exact = float(x)
        except OverflowError:  # an int or a fraction beyond FP64
            exact = math.inf
        rounded = to_fp32(exact)
        # NumPy's longdouble becomes infinite, and fractions 0, without a word.
        if (math.isinf(rounded) and x not in (math.inf, -math.inf)) or (rounded == 0 and x != 0):
            raise self.error("a constant is outside FP32's range (1.4e-45 to 3.4e38): write 0.0 or math.inf if meant")
        return exact


def _why_no_number(x: object) -> str:
    """Return what to do with something that is no real number, for a message."""
    if isinstance(x, bool) or getattr(getattr(x, "dtype", None), "kind", "") == "b":
        return ": a truth value is known already, so choose by Python's own if"
    if isinstance(x, numbers.Complex):
        return ": an epilogue computes with real numbers"
    return ": write float(...) of it" if isinstance(x, numbers.Number) else ""


def shown(x: object) -> str:
    """Return a user's value for a message. Python refuses to write ints of thousands of digits."""
    is_large = isinstance(x, int) and x.bit_length() > _SHOWN_BITS
    return f"an int of {cast('int', x).bit_length()} bits" if is_large else reprlib.repr(x)


_SHOWN_BITS = 128


# Operations on indices that wrap: a number of any size is there what its lowest bits are.
_WRAPPING = ("add", "sub", "mul", "neg")
# Bits of the types that count.
_BITS = {Type.INDEX: 32, Type.SEED: 64}
_JOINED = {
    "logical_and": ("&", "(x > 0) & (x < 1)"),
    "logical_or": ("|", "(x < 0) | (x > 1)"),
    "logical_not": ("~", "~(x > 0)"),
}

TRACER: ContextVar[Tracer | None] = ContextVar("cutlass_ops_tracer", default=None)


def _wrapped(x: int) -> int:
    """Return a whole number wrapped to 32 bits."""
    return (x + 2**31) % 2**32 - 2**31


# What PyTorch and NumPy have under other names, or for what is something else here.
_OTHERWISE = {
    **dict.fromkeys(("clamp", "clip"), "use co.clamp"),
    **dict.fromkeys(("clamp_min", "fmax"), "use co.maximum"),
    **dict.fromkeys(("clamp_max", "fmin"), "use co.minimum"),
    "absolute": "use co.abs",
    **{name: f"use co.{name}imum(x, y), or as an output co.{name}(x, dim)" for name in ("max", "min")},
    **{name: f"as an output, use co.{name}(x, dim)" for name in (*REDUCTIONS.keys() - {"max", "min"}, "amax")},
    "mean": "as an output, use co.sum(x, dim), and divide that",
    **dict.fromkeys(("to", "type", "half", "bfloat16"), "use co.cast(x, dtype) to round it"),
    **dict.fromkeys(("float", "double"), "leave it out, since the value has the type in which the epilogue computes"),
    "dropout": "use co.dropout_mask with a seed, and co.where",
}


def _instead(name: str) -> str:
    return _OTHERWISE.get(name) or (f"use co.{name}" if name in OPS else otherwise.hint(name) or _METHOD)


def _is_array(x: object) -> bool:
    is_scalar = any((t.__module__, t.__name__) == ("numpy", "generic") for t in type(x).__mro__)
    return hasattr(type(x), "__array__") and not isinstance(x, Symbol) and not is_scalar


def _number(x: Any) -> Any:
    """Return the value of an array without dimensions, into which NumPy converts a scalar to compare it."""
    return x if isinstance(x, Symbol) or not hasattr(x, "ndim") or x.ndim else x.item()


class Symbol:
    """The base of traced values and reductions: Python can do little with them, and the errors say so."""

    __slots__ = ("node", "tracer")

    def __init__(self, tracer: Tracer | None = None, node: int = 0) -> None:
        if tracer is None:  # as by `bias: co.Row()`
            name = f"co.{type(self).__name__}"
            raise EpilogueError(
                f"{name} is an annotation, and takes no call: write `bias: {name}` in the function's def"
            )
        self.tracer = tracer
        self.node = node

    def __getattr__(self, name: str) -> NoReturn:
        # Private names are protocols that Python and notebooks probe for: they are just not there.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        if isinstance(self, Reduction | Quantized):
            raise self.tracer.error(self.refusal)
        raise self.tracer.error(f"a traced value has no attribute {name}: {_instead(name)}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: object, **kwargs: object) -> Value:
        # NumPy scalars on the left of an operator come here.
        name = ufunc.__name__
        if name in _UFUNCS and method == "__call__" and not kwargs:
            return self.tracer.apply(_UFUNCS[name], tuple(map(_number, inputs)))
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
    """A value in an epilogue while the function is traced: FP32, unless :attr:`type` says otherwise.

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
        return Computed(self.tracer, self.tracer.lift(self, None))

    def __abs__(self) -> Value:
        return self.tracer.apply("abs", (self,))

    def __pow__(self, exponent: Value | float, modulus: object = None) -> Value:
        if modulus is not None:
            raise self.tracer.error("pow takes no modulus in an epilogue: leave out the third argument")
        return power(self.tracer, self, exponent)

    def __rpow__(self, base: float) -> Value:
        return power(self.tracer, base, self)

    def __lt__(self, other: Value | float) -> Value:
        return self.tracer.apply("lt", (self, other))

    def __le__(self, other: Value | float) -> Value:
        return self.tracer.apply("le", (self, other))

    def __gt__(self, other: Value | float) -> Value:
        return self.tracer.apply("gt", (self, other))

    def __ge__(self, other: Value | float) -> Value:
        return self.tracer.apply("ge", (self, other))

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return self.tracer.apply("eq", (self, other))

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return self.tracer.apply("ne", (self, other))

    __hash__ = object.__hash__

    def __and__(self, other: Value) -> Value:
        return self.tracer.apply("logical_and", (self, other))

    def __rand__(self, other: Value) -> Value:
        return self.tracer.apply("logical_and", (other, self))

    def __or__(self, other: Value) -> Value:
        return self.tracer.apply("logical_or", (self, other))

    def __ror__(self, other: Value) -> Value:
        return self.tracer.apply("logical_or", (other, self))

    def __invert__(self) -> Value:
        return self.tracer.apply("logical_not", (self,))

    @property
    def type(self) -> Type:
        """The type: an FP32 value, a truth value, an index or a seed."""
        return self.tracer.types[self.node]

    def __repr__(self) -> str:
        node = self.tracer.nodes[self.node]
        return f"<traced {node.op} %{self.node}>"


class Computed(Value):
    """The accumulator, and computed values.

    Inputs have classes of their own. None of these is derived from this class. Otherwise Python would swap a comparison
    such as ``acc > bias``, which must stay as written.
    """

    __slots__ = ()


class Reduction(Symbol):
    """A reduction of a value over the rows or columns of D. It can only be an output: no operation takes it.

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

    refusal: ClassVar[str] = _REDUCED
    function: str
    kind: Kind

    def __init__(self, tracer: Tracer, node: int, function: str, kind: Kind) -> None:
        super().__init__(tracer, node)
        self.function = function
        self.kind = kind

    def __repr__(self) -> str:
        return f"<traced reduction {self.function} of %{self.node}>"


class Quantized(Symbol):
    """D in FP8, and a scale for each 1x128 of it: two outputs, and nothing to compute with.

    Examples
    --------
    >>> @co.epilogue
    ... def quantised(acc):
    ...     found = co.e.quantize(acc, "e4m3")
    ...     print(found)
    ...     return found
    <traced e4m3 of %0>
    """

    __slots__ = ("dtype",)

    refusal: ClassVar[str] = _QUANTIZED
    dtype: str

    def __init__(self, tracer: Tracer, node: int, dtype: str) -> None:
        super().__init__(tracer, node)
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"<traced {self.dtype} of %{self.node}>"


def _refusal(problem: str) -> Callable[..., NoReturn]:
    def refuse(self: Symbol, *_: object, **__: object) -> NoReturn:
        raise self.tracer.error(problem)

    return refuse


for _name, _problem in _REFUSED.items():
    setattr(Symbol, _name, _refusal(_problem))
for _kind in (Reduction, Quantized):
    for _name in _ARITHMETIC:
        setattr(_kind, f"__{_name}__", _refusal(_kind.refusal))
        setattr(_kind, f"__r{_name}__", _refusal(_kind.refusal))
    for _name in ("neg", "pos", "abs"):
        setattr(_kind, f"__{_name}__", _refusal(_kind.refusal))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Quantized, f"__{_name}__", _refusal(_QUANTIZED))


class Row(Value):
    """Annotation of an input with one value for each column of D, shape (N,): a bias.

    Its dtype is FP16, BF16 or FP32, or FP64 with FP64 operands.

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

    Its dtype is FP16, BF16 or FP32, or FP64 with FP64 operands.

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

    Its dtype is FP16, BF16 or FP32, or FP64 with FP64 operands.

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
    """Annotation of an input that is one number: a Python number, or a tensor of one element and any real dtype.

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
    """Annotation of a second product: a call takes a matrix (K, N), and the function gets A @ matrix in FP32.

    An epilogue has at most one. The matrix has B's dtype and major. Pass both weights (N, K) as transposes,
    ``weight.t()``. For a 16-bit D, N is a multiple of 8.

    Examples
    --------
    >>> @co.epilogue
    ... def gated(acc, up: co.Product):
    ...     return co.e.relu(acc) * up
    >>> a, weight, up = torch.ones(1, 4).bfloat16(), torch.ones(8, 4).bfloat16(), torch.ones(8, 4).bfloat16()
    >>> co.gemm(a, weight.t(), epilogue=gated, up=up.t()).tolist()
    [[16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0, 16.0]]
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.PRODUCT


class Integer(Value):
    """Annotation of an input that is a 64-bit integer: a seed or an offset of :func:`cutlass_ops.e.uniform`.

    A call takes a Python int, or an integer tensor of one element. The kernel reads a GPU tensor on the device.

    Examples
    --------
    >>> @co.epilogue
    ... def noisy(acc, seed: co.Integer):
    ...     return acc + co.e.uniform(seed)
    >>> a, b = torch.zeros(1, 8).bfloat16(), torch.zeros(8, 2).bfloat16()
    >>> first = co.gemm(a, b, epilogue=noisy, seed=2**40)
    >>> torch.equal(co.gemm(a, b, epilogue=noisy, seed=2**40), first)
    True
    """

    __slots__ = ()
    kind: ClassVar[Kind] = Kind.INTEGER


ANNOTATIONS: dict[str, type[Row | Col | Tile | Scalar | Product | Integer]] = {
    t.__name__: t for t in (Row, Col, Tile, Scalar, Product, Integer)
}


# Powers that PyTorch computes in other ways if the exponent is a Python number.
_POWERS: dict[float, tuple[str, ...]] = {
    2: ("square",),
    0.5: ("sqrt",),
    -0.5: ("rsqrt",),
    -1: ("reciprocal",),
    -2: ("square", "reciprocal"),
}


def power(tracer: Tracer, x: object, y: object) -> Value:
    """Return x to the power of y, as PyTorch computes it."""
    if isinstance(x, Value) and isinstance(y, numbers.Real) and not isinstance(y, bool):
        if y == 1:
            return Computed(tracer, tracer.lift(x))
        if y == 3:
            return tracer.apply("mul", (tracer.apply("square", (x,)), x))
        exponent = tracer.in_range(y)
        if exponent in _POWERS:
            found: object = x
            for op in _POWERS[exponent]:
                found = tracer.apply(op, (found,))
            return cast("Value", found)
    return tracer.apply("pow", (x, y))


def apply(op: str, *args: object) -> Value:
    """Apply an operation inside an epilogue function. Raises EpilogueError outside of one, or for a wrong argument."""
    return _current(op).apply(op, args)


def apply_float(x: object) -> Value:
    """Return a value or a number as an FP32 value."""
    tracer = _current("to_float")
    return Computed(tracer, tracer.lift(x))


def apply_power(x: object, y: object) -> Value:
    """Raise a value or a number to the power of another."""
    return power(_current("pow"), x, y)


def apply_cast(x: object, dtype: str | dtypes.DType) -> Value:
    """Round a value to an element type; to FP32 that is the value itself."""
    tracer = _current("cast")
    try:
        element = dtypes.dtype(dtype, (*dtypes.ROUNDED, dtypes.f32))
    except (ValueError, TypeError) as exc:
        raise tracer.error(str(exc)) from None
    if element is dtypes.f32:
        return Computed(tracer, tracer.lift(x))
    return tracer.apply("cast", (x,), element.name)


def reduce(function: str, x: object, dim: object, called: str | None = None) -> Reduction:
    """Reduce a value over rows (``dim`` 1 or -1) or columns (0 or -2) of D. Messages name ``called``, if given."""
    tracer = _current(function)
    kind = {1: Kind.COL, -1: Kind.COL, 0: Kind.ROW, -2: Kind.ROW}.get(dim) if type(dim) is int else None
    if kind is None:
        two = " (for the greater of two values use co.maximum)" if function == "max" and isinstance(dim, Value) else ""
        raise tracer.error(
            f"co.{called or function} reduces over a row with dim=1 or over a column with dim=0, not "
            f"dim={shown(dim)}{two}"
        )
    return Reduction(tracer, tracer.lift(x), function, kind)


def quantize(x: object, dtype: object, block: object) -> Quantized:
    """Return D as a type of FP8 with a scale for each block of columns."""
    tracer = _current("quantize")
    try:
        element = dtypes.dtype(dtype, dtypes.FP8)
    except ValueError as exc:
        raise tracer.error(str(exc)) from None
    if type(block) is not int or block != BLOCK_K:
        raise tracer.error(
            f"co.e.quantize has a scale for each {BLOCK_K} columns, which one tile has, and block is {shown(block)}: "
            f"use block={BLOCK_K}, or a co.Scalar or co.Col with the scale of an earlier call"
        )
    return Quantized(tracer, tracer.lift(x), element.name)


def error(function: str, problem: str) -> EpilogueError:
    """Return an error about a call of one of the language's functions, to raise; it shows the line of that call."""
    return _current(function).error(problem)


def _current(function: str) -> Tracer:
    tracer = TRACER.get()
    if tracer is None:
        line = _calling_line()
        # Of two functions of this name, the other is for tensors.
        instead = "call co.Scaled.quantize" if function == "quantize" else "use PyTorch"
        name = "e.quantize" if function == "quantize" else function
        problem = f"co.{name} works on the values of an @epilogue function only: for tensors {instead}"
        raise line.error(problem) if line else EpilogueError(problem)
    return tracer
