"""Building an expression node by node: what the tracer, :meth:`Graph.then` and derivatives have in common."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from cutlass_ops.epilogue.nodes import Input, Kind, Node
from cutlass_ops.epilogue.operations import INDICES, OPS, SWAP_PAIRS, Type, to_fp32

# Constants with at most this many significant bits are certainly as written: FP32 has twice as many.
KEPT_BITS = 12

# Operations on constants that FP64 arithmetic and one rounding to FP32 give bit for bit as FP32 arithmetic does.
_FOLDED: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": operator.abs,
}


def type_of(node: Node, args: Sequence[Type], kinds: Mapping[str, Kind]) -> Type:
    """Return the type of a node's value; `kinds` is by input. Raises KeyError if the op takes no such arguments."""
    if node.op in OPS:
        return dict(OPS[node.op].signatures)[tuple(args)]
    if node.op == "seed" or (node.op == "input" and kinds.get(str(node.attr)) is Kind.INTEGER):
        return Type.SEED
    return Type.INDEX if node.op == "integer" or node.op in INDICES else Type.FLOAT


class Builder:
    """An expression that grows. Equal nodes are one node, and operations on constants are computed if that is exact.

    `simplify` says whether x + 0, x - 0, x * 1, x / 1, x * -1, -(-x) and a choice between x and x become simpler too.
    What a user wrote is not simplified: its kernel keeps its key, and -0 + 0 is 0. `in_fp64` says whether FP64 is to
    compute the expression. An operation on constants is then computed here only if FP32 has its result, and
    :meth:`number` gives numbers that FP32 does not have.
    """

    def __init__(self, inputs: Iterable[Input] = (), *, simplify: bool = False, in_fp64: bool = False) -> None:
        self.nodes: list[Node] = []  # arguments before their operations
        self.types: list[Type] = []  # of each node's value
        self.kinds = {i.name: i.kind for i in inputs}  # an input is declared here before its node is put
        # for constants that are not what was written, or what FP64 would compute: that number
        self.rounded: dict[float, float] = {}
        self._simplify, self._in_fp64 = simplify, in_fp64
        self._at: dict[Node, int] = {}

    def put(self, op: str, *args: int, attr: str | float | int | None = None) -> int:
        """Return an operation's node, or a leaf's. Raises KeyError if the operation takes no such types."""
        constants = [self._number(a) for a in args]
        numbers = [x for x in constants if x is not None]
        if op in _FOLDED and len(numbers) == len(args):
            fold = _FOLDED[op]
            folded, exact = fold(*numbers), fold(*(self.rounded.get(x, x) for x in numbers))
            if not self._in_fp64 or to_fp32(folded) == folded:
                # A number that was rounded is one node with those that are what it is now.
                return self.constant(folded, exact, is_exact=self.rounded.keys().isdisjoint(numbers))
        if op == SWAP_PAIRS and numbers:
            return args[0]
        found = self._simpler(op, args, constants) if self._simplify else None
        return self._append(Node(op, args, attr)) if found is None else found

    def constant(self, value: float, exact: float, *, is_exact: bool = True) -> int:
        """Return the node of a constant. FP64 would have `exact`, if `is_exact`: see :attr:`rounded`."""
        kept = to_fp32(value)
        if not is_exact or (kept != exact and not math.isnan(exact)):
            self.rounded.setdefault(kept, exact)
        return self.put("const", attr=kept)

    def number(self, value: float) -> int:
        """Return the node of a number: rounded to FP32, or for FP64 a sum of constants that FP64 computes exactly."""
        if not self._in_fp64 or to_fp32(value) == value:
            return self.put("const", attr=to_fp32(value))
        parts = []
        while value:
            fraction, exponent = math.frexp(value)
            parts.append(math.ldexp(round(math.ldexp(fraction, KEPT_BITS)), exponent - KEPT_BITS))
            value -= parts[-1]
        first, *others = (self.put("const", attr=part) for part in parts)
        return functools.reduce(lambda total, part: self._append(Node("add", (total, part))), others, first)

    def place(self, nodes: Sequence[Node], given: Mapping[Node, int]) -> list[int]:
        """Put a graph's nodes, except given leaves; return the place of each."""
        at: list[int] = []
        for node in nodes:
            found = given.get(node)
            at.append(
                self._append(Node(node.op, tuple(at[a] for a in node.args), node.attr)) if found is None else found
            )
        return at

    def _append(self, node: Node) -> int:
        found = self._at.get(node)
        if found is None:
            self.types.append(type_of(node, [self.types[a] for a in node.args], self.kinds))
            found = self._at[node] = len(self.nodes)
            self.nodes.append(node)
        return found

    def _number(self, at: int) -> float | None:
        value = self.nodes[at].attr
        return value if isinstance(value, float) else None

    def _simpler(self, op: str, args: Sequence[int], constants: Sequence[float | None]) -> int | None:
        """Return the node of something simpler with the same value; None if there is nothing."""
        if op == "neg" and self.nodes[args[0]].op == "neg":
            return self.nodes[args[0]].args[0]
        if op == "where" and args[1] == args[2]:
            return args[1]
        neutral = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0}.get(op)
        if neutral is None:
            return None
        x, y = args
        if constants[1] == neutral:
            return x
        if constants[0] == neutral and op in ("add", "mul"):
            return y
        if op == "mul" and -1.0 in constants:
            return self.put("neg", y if constants[0] == -1.0 else x)
        return None
