"""The expression graph of an epilogue: immutable, hashable, and the same for every consumer.

Tracing builds it, rendering and the PyTorch reference read it. It holds no Python objects of the traced function,
so two functions with equal graphs are one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(str, Enum):
    """How an input or an output spans the (M, N) result.

    ``ROW`` is one value for each column of D, shape (N,); ``COL`` one value for each row of D, shape (M,);
    ``TILE`` one value for each element, shape (M, N); ``SCALAR`` a single value.
    """

    ROW = "row"
    COL = "col"
    TILE = "tile"
    SCALAR = "scalar"


@dataclass(frozen=True)
class Input:
    """One named input of an epilogue.

    Attributes
    ----------
    name : str
        The parameter's name; a valid C++ identifier as well.
    kind : Kind
        The input's shape class.
    """

    name: str
    kind: Kind


@dataclass(frozen=True)
class Node:
    """One operation on FP32 values.

    Attributes
    ----------
    op : str
        ``"acc"``, ``"input"``, ``"const"`` or a name in :data:`cutlass_ops.epilogue.ops.OPS`.
    args : tuple of int
        Indices of earlier nodes.
    attr : str, float or None
        The input's name for ``"input"``, the value for ``"const"``, the element type for ``"cast"``.
    """

    op: str
    args: tuple[int, ...] = ()
    attr: str | float | None = None


@dataclass(frozen=True)
class Output:
    """One result of an epilogue.

    Attributes
    ----------
    name : str
        ``"d"`` for the GEMM's result, else the name that the function gave it.
    node : int
        Index of the node that holds its value.
    kind : Kind
        ``TILE`` for an (M, N) tensor, ``COL`` for a reduction over each row (M,), ``ROW`` for one over each column (N,).
    reduce : str or None
        ``"sum"``, ``"sum_square"`` or ``"max"`` for a reduction, None for a tile.
    """

    name: str
    node: int
    kind: Kind = Kind.TILE
    reduce: str | None = None


@dataclass(frozen=True)
class Graph:
    """A whole epilogue: inputs in declared order, nodes in topological order, outputs with D first."""

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON form: equal graphs give equal values."""
        return {
            "inputs": [[i.name, i.kind.value] for i in self.inputs],
            "nodes": [[n.op, list(n.args), n.attr.hex() if isinstance(n.attr, float) else n.attr] for n in self.nodes],
            "outputs": [[o.name, o.node, o.kind.value, o.reduce] for o in self.outputs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Rebuild a graph from :meth:`to_json`'s value; :func:`validate` says whether it is well formed."""
        return cls(
            inputs=tuple(Input(str(name), Kind(kind)) for name, kind in data["inputs"]),
            nodes=tuple(
                Node(str(op), tuple(int(a) for a in args), float.fromhex(attr) if op == "const" else attr)
                for op, args, attr in data["nodes"]
            ),
            outputs=tuple(
                Output(str(name), int(node), Kind(kind), reduce) for name, node, kind, reduce in data["outputs"]
            ),
        )
