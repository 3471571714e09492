"""Building an expression node by node: what the tracer, :meth:`Graph.then` and derivatives have in common."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence

from cutlass_ops.epilogue.nodes import Kind, Node
from cutlass_ops.epilogue.operations import INDICES, OPS, SWAP_PAIRS, Type, to_fp32

# Operations on constants that FP64 arithmetic and one rounding to FP32 give bit for bit as FP32 arithmetic does.
_FOLDED: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": operator.abs,
}


def type_of(node: Node, args: Sequence[Type], kinds: Mapping[str, Kind]) -> Type:
    """Return the type of one node's value.

    Parameters
    ----------
    node : Node
        The node.
    args : sequence of Type
        Types of its arguments.
    kinds : mapping of str to Kind
        The kind of each input.

    Raises
    ------
    KeyError
        If the operation takes no such arguments.
    """
    if node.op in OPS:
        return dict(OPS[node.op].signatures)[tuple(args)]
    if node.op == "seed" or (node.op == "input" and kinds.get(str(node.attr)) is Kind.INTEGER):
        return Type.SEED
    return Type.INDEX if node.op == "integer" or node.op in INDICES else Type.FLOAT


class Builder:
    """An expression that grows. Equal nodes are one node, and operations on constants are computed where that is exact.

    Parameters
    ----------
    simplify : bool
        Whether x + 0, x - 0, x * 1, x / 1, x * -1, -(-x) and a choice between x and x become simpler as well. What a
        user wrote stays as it was written: its kernel keeps its key, and -0 + 0 is 0.

    Attributes
    ----------
    nodes : list of Node
        The nodes so far, arguments before their operations.
    types : list of Type
        The type of each node's value.
    kinds : dict of str to Kind
        The kinds of the inputs. An input is declared here before its node is put.
    rounded : dict of float to float
        For constants that are not what was written, or what FP64 would compute: that number.
    """

    def __init__(self, *, simplify: bool = False) -> None:
        self.nodes: list[Node] = []
        self.types: list[Type] = []
        self.kinds: dict[str, Kind] = {}
        self.rounded: dict[float, float] = {}
        self._simplify = simplify
        self._at: dict[Node, int] = {}

    def put(self, op: str, *args: int, attr: str | float | None = None) -> int:
        """Return the node of an operation on earlier nodes, or of a leaf.

        Raises
        ------
        KeyError
            If the operation takes no arguments of these types.
        """
        constants = [self._number(a) for a in args]
        numbers = [x for x in constants if x is not None]
        if op in _FOLDED and len(numbers) == len(args):
            fold = _FOLDED[op]
            exact = fold(*(self.rounded.get(x, x) for x in numbers))
            # A number that was rounded is one node with those that are what it is now.
            return self.constant(fold(*numbers), exact, is_exact=self.rounded.keys().isdisjoint(numbers))
        if op == SWAP_PAIRS and numbers:
            return args[0]
        found = self._simpler(op, args, constants) if self._simplify else None
        return self._append(Node(op, args, attr)) if found is None else found

    def constant(self, value: float, exact: float, *, is_exact: bool = True) -> int:
        """Return the node of a constant, of which FP64 would have `exact`, if that `is_exact`: see :attr:`rounded`."""
        kept = to_fp32(value)
        if not is_exact or (kept != exact and not math.isnan(exact)):
            self.rounded.setdefault(kept, exact)
        return self.put("const", attr=kept)

    def place(self, nodes: Sequence[Node], given: Mapping[Node, int]) -> list[int]:
        """Put a graph's nodes, but for leaves that are given; return where each of them is."""
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
