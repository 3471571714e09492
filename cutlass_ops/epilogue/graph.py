"""The expression graph of an epilogue: immutable, hashable, and the same for every consumer.

Tracing builds it, rendering and the PyTorch reference read it. It holds no Python objects of the traced function,
so two functions with equal graphs are one kernel. A graph that exists is well formed and canonical: its constructor
checks, and refuses anything else.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cutlass_ops.base import dtypes
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.frozen import hashed_once
from cutlass_ops.epilogue.build import Builder, type_of
from cutlass_ops.epilogue.names import check_name
from cutlass_ops.epilogue.nodes import BLOCKS, D_SCALE, PARTS, Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import (
    GATHERED,
    INDICES,
    OPS,
    REDUCTIONS,
    SWAP_PAIRS,
    UNIFORM,
    Type,
    to_fp32,
)

MAX_INPUTS = 16
MAX_OUTPUTS = 8
MAX_PRODUCTS = 1
MAX_NODES = 256
MAX_TITLE = 48  # characters

# Bits of constants that are whole numbers, the sign among them.
_BITS = {"integer": 32, "seed": 64}

# They have no words in a title.
_SILENT = ("acc", "const", "integer", "seed", "to_float", "add", "sub", "mul", "div")

_LEAVES = frozenset(("acc", "input", "const", "integer", "seed", *GATHERED, *INDICES))


@hashed_once
@dataclass(frozen=True, repr=False)
class Expression:
    """A computation of each element: inputs in declared order, nodes in canonical order, outputs with D first.

    It need not be the epilogue of a GEMM: it may have no accumulator, and more outputs than a kernel stores. Raises
    ConfigError if the parts are no well-formed canonical graph; see :func:`validate` and :func:`canonical`.
    """

    inputs: tuple[Input, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]

    def __post_init__(self) -> None:
        validate(self)

    @property
    def title(self) -> str:
        """Its computation as a few words of a C++ identifier, such as ``"bias_relu"``; empty for D = A @ B.

        These are its inputs and functions in the order of the computation, then the names of further outputs, cut to
        :data:`MAX_TITLE` characters. They follow from the graph alone: functions with equal graphs share a kernel,
        which may have been compiled before any of them was written.
        """
        with_acc: set[int] = set()
        for index, node in enumerate(self.nodes):
            if node.op == "acc" or not with_acc.isdisjoint(node.args):
                with_acc.add(index)
        words: list[str] = []
        seen: set[int] = set()

        def visit(index: int) -> None:
            if index in seen:
                return
            seen.add(index)
            node = self.nodes[index]
            # The accumulator is what happens to: bias, then relu, then residual.
            for arg in sorted(node.args, key=lambda a: a not in with_acc):
                visit(arg)
            if node.op not in _SILENT:
                words.append(str(node.attr) if node.op in ("input", "cast") else node.op)

        for output in self.outputs:
            visit(output.node)
        words += [output.name for output in self.outputs[1:]]
        # A name may end in an underscore or hold two, as identifiers of C++ should not.
        joined = "_".join(word for name in words for word in name.split("_") if word)
        return joined[:MAX_TITLE].rstrip("_")

    def __repr__(self) -> str:
        return f"<graph {self.title or 'acc'}>"

    @cached_property
    def gathered(self) -> tuple[str, ...]:
        """Values gathered from A's rows, in the order of :data:`cutlass_ops.epilogue.operations.GATHERED`."""
        used = {node.op for node in self.nodes}
        return tuple(name for name in GATHERED if name in used)

    @cached_property
    def swaps_pairs(self) -> bool:
        """Whether it takes a value of the neighbouring column."""
        return any(node.op == SWAP_PAIRS for node in self.nodes)

    @cached_property
    def knows_places(self) -> bool:
        """Whether a value depends on its row or column."""
        return any(node.op in INDICES or node.op == UNIFORM for node in self.nodes)

    @cached_property
    def types(self) -> tuple[Type, ...]:
        """The type of each node's value."""
        return value_types(self.inputs, self.nodes)

    @cached_property
    def products(self) -> tuple[str, ...]:
        """Names of the inputs that are multiplied by A: one at most."""
        return tuple(i.name for i in self.inputs if i.kind is Kind.PRODUCT)

    def stored_type(self, output: Output) -> str:
        """Return the name of the type in which an output is stored by default; empty for D's type.

        A reduction has its own, and so has what is quantised. A further tile that is a cast to FP8 is stored in that,
        since such a cast has no other purpose than a copy in 8 bits beside D.
        """
        if output.name == "d":
            return self.quantized or ""
        if output.kind is Kind.BLOCKS_D:
            return "f32"
        if output.reduce is not None:
            return REDUCTIONS[output.reduce].result
        node = self.nodes[output.node]
        is_copy = node.op == "cast" and any(t.name == node.attr for t in dtypes.FP8)
        return str(node.attr) if is_copy else ""

    @cached_property
    def quantized(self) -> str | None:
        """The name of D's type of FP8 if the scales of its blocks are an output, else None."""
        return next((o.reduce for o in self.outputs if o.kind is Kind.BLOCKS_D), None)

    @cached_property
    def block_scales(self) -> tuple[str, ...]:
        """Names of the scales of blocks of A and of B, which the accumulator has already; none if it has none."""
        return tuple(i.name for kind in BLOCKS for i in self.inputs if i.kind is kind)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the inputs that are parts of an operand."""
        return tuple(i.name for kind in PARTS for i in self.inputs if i.kind is kind)

    @cached_property
    def in_blocks(self) -> tuple[bool, bool]:
        """Whether blocks of A, and blocks of B, have values of a part, such as scales."""
        of = {PARTS[i.kind].operand for i in self.inputs if i.kind in PARTS}
        return "a" in of, "b" in of

    @property
    def parts_are(self) -> str:
        """Names of the inputs that are parts of an operand, and what they are, for messages."""
        nouns = dict.fromkeys(PARTS[i.kind].noun for i in self.inputs if i.kind in PARTS)
        return f"{' and '.join(self.parts)} {'are' if len(self.parts) > 1 else 'has'} {' and '.join(nouns)}"


@hashed_once
@dataclass(frozen=True, repr=False)
class Graph(Expression):
    """A whole epilogue of a GEMM: an expression of the accumulator, within the limits of a kernel.

    Raises ConfigError if the parts are no such epilogue.
    """

    # Constants as they were written, if FP32 rounds them to a number that looks written: 1 for 1 + 1e-9. FP64
    # refuses such an epilogue. Kernels do not depend on them: they are no part of the graph's identity or JSON
    # form.
    rounded: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for what, values, limit in (
            ("inputs", self.inputs, MAX_INPUTS),
            ("nodes", self.nodes, MAX_NODES),
            ("outputs", self.outputs, MAX_OUTPUTS),
        ):
            if isinstance(values, tuple) and len(values) > limit:
                raise ConfigError(f"an epilogue has at most {limit} {what}, not {len(values)}")
        super().__post_init__()
        if len(self.products) > MAX_PRODUCTS:
            raise ConfigError(
                f"an epilogue has one product of A besides the accumulator, not {len(self.products)} "
                f"({', '.join(self.products)}): compute the others by a GEMM of their own and pass them as tiles"
            )
        self._check_block_scales()
        if not self.is_pointwise and not any(node.op == "acc" for node in self.nodes):
            raise ConfigError("no output depends on the accumulator, so there is nothing to multiply")

    @cached_property
    def is_pointwise(self) -> bool:
        """Whether it reads neither A nor B, so that nothing is multiplied, as in a part of a backward."""
        reads_operands = bool(self.products or self.gathered or self.parts)
        return not reads_operands and not any(node.op == "acc" for node in self.nodes)

    def _check_block_scales(self) -> None:
        kinds = sorted(i.kind.value for i in self.inputs if i.kind in BLOCKS)
        if kinds and kinds != sorted(kind.value for kind in BLOCKS):
            raise ConfigError(
                f"an epilogue has scales of blocks of A and of B, each once, or none: not {', '.join(kinds)}"
            )
        unscaled = (*self.gathered, *self.products)
        if kinds and unscaled:
            raise ConfigError(
                f"scales of blocks are the accumulator's, and {', '.join(unscaled)} would have none of them"
            )

    def then(self, other: Graph, *, products: bool | Graph = False) -> Graph:
        """Return the graph that feeds this graph's D into another's accumulator.

        The other's inputs come after this graph's, and its outputs are the result's. If `products` is True, the other's
        products of A pass through this graph as its accumulator does: right if this graph stands for an operation on
        the rows of A. If `products` is a graph, they pass through that instead, because it differs for each weight, as
        scales do. Inputs that both have are one; its others come after this graph's. Raises ConfigError if this graph
        has further outputs, a name is in both, or the result exceeds the limits.
        """
        other_way = products if isinstance(products, Graph) else self
        for each in (self, other_way):
            if len(each.outputs) != 1:
                further = ", ".join(o.name for o in each.outputs[1:])
                raise ConfigError(
                    f"an epilogue that another follows has D as its only output, and this one has {further}"
                )
        before = tuple(dict.fromkeys((*self.inputs, *other_way.inputs)))
        _refuse_shared(before, other)
        build = Builder((*before, *other.inputs))
        fed = {Node("acc"): build.place(self.nodes, {})[self.outputs[0].node]}
        for name in other.products if products else ():
            product = Node("input", (), name)
            through = {Node("acc"): build.put("input", attr=name)}
            fed[product] = build.place(other_way.nodes, through)[other_way.outputs[0].node]
        at = build.place(other.nodes, fed)
        outputs = [o._replace(node=at[o.node]) for o in other.outputs]
        rounded = (*self.rounded, *other_way.rounded, *other.rounded)
        return canonical((*before, *other.inputs), build.nodes, outputs, rounded)

    def beside(self, other: Graph, d: str) -> Graph:
        """Return the graph that computes both from one accumulator: this graph's inputs and outputs, then the other's.

        The other's D is then called `d`. Raises ConfigError if a name is in both, or the result exceeds the limits.
        """
        _refuse_shared(self.inputs, other)
        build = Builder((*self.inputs, *other.inputs))
        mine, theirs = build.place(self.nodes, {}), build.place(other.nodes, {})
        outputs = [o._replace(node=mine[o.node]) for o in self.outputs]
        outputs += [o._replace(node=theirs[o.node], name=d if o.name == "d" else o.name) for o in other.outputs]
        return canonical((*self.inputs, *other.inputs), build.nodes, outputs, (*self.rounded, *other.rounded))

    def renamed(self, names: Mapping[str, str]) -> Graph:
        """Return the same graph with other names of inputs. Raises ConfigError if a new name is invalid or taken."""

        def new(node: Node) -> Node:
            return Node("input", (), names.get(str(node.attr), node.attr)) if node.op == "input" else node

        inputs = tuple(i._replace(name=names.get(i.name, i.name)) for i in self.inputs)
        return Graph(inputs, tuple(map(new, self.nodes)), self.outputs, self.rounded)

    def of_kernels(self) -> Graph:
        """Return the graph that kernels and tables know: without its constants' values before FP32 rounded them."""
        return replace(self, rounded=()) if self.rounded else self

    def to_json(self) -> dict[str, Any]:
        """Return the canonical JSON form: equal graphs give equal values."""
        return {
            "inputs": [[i.name, i.kind.value] for i in self.inputs],
            "nodes": [[n.op, list(n.args), n.attr.hex() if isinstance(n.attr, float) else n.attr] for n in self.nodes],
            "outputs": [[o.name, o.node, o.kind.value, o.reduce] for o in self.outputs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Graph:
        """Rebuild a graph from :meth:`to_json`'s value. Raises ConfigError unless it is well-formed and canonical."""
        if not isinstance(data, Mapping) or set(data) != {"inputs", "nodes", "outputs"}:
            raise ConfigError("an epilogue graph is an object with the fields inputs, nodes and outputs")
        return cls(
            inputs=tuple(Input(name, _kind(kind)) for name, kind in _rows(data, "inputs", 2)),
            nodes=tuple(
                Node(op, tuple(args) if isinstance(args, list) else args, _constant(attr) if op == "const" else attr)
                for op, args, attr in _rows(data, "nodes", 3)
            ),
            outputs=tuple(
                Output(name, node, _kind(kind), reduce) for name, node, kind, reduce in _rows(data, "outputs", 4)
            ),
        )

    def to_program(self) -> dict[str, Any]:
        """Return the form for programs and pickles: the JSON form, and constants that FP32 rounded."""
        return self.to_json() | ({"rounded": [x.hex() for x in self.rounded]} if self.rounded else {})

    @classmethod
    def from_program(cls, data: Mapping[str, Any]) -> Graph:
        """Rebuild a graph from :meth:`to_program`'s value. Raises ConfigError as :meth:`from_json` does."""
        rounded = data.get("rounded", []) if isinstance(data, Mapping) else []
        if not isinstance(rounded, list):
            raise ConfigError(f"the rounded constants of an epilogue are a list, not {reprlib.repr(rounded)}")
        graph = cls.from_json({name: data[name] for name in data if name != "rounded"})
        return replace(graph, rounded=tuple(map(_constant, rounded)))


def _refuse_shared(inputs: Sequence[Input], other: Graph) -> None:
    mine = {i.name for i in inputs}
    taken = [name for name in (*(i.name for i in other.inputs), *(o.name for o in other.outputs[1:])) if name in mine]
    if taken:
        raise ConfigError(f"both epilogues have the name {', '.join(taken)}: rename it in one of them")


def canonical(
    inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output], rounded: Iterable[float] = ()
) -> Graph:
    """Build the one graph that stands for an expression, however it was written down.

    Equal nodes are merged, unused ones dropped, and the rest numbered in the order in which the outputs first need
    them, arguments before their operation and from left to right. Nodes come in any topological order. Raises
    ConfigError if the result is malformed, too large, or leaves an input unused.
    """
    return Graph(tuple(inputs), *renumbered(nodes, outputs), tuple(sorted(set(rounded))))


def expression(inputs: Sequence[Input], nodes: Sequence[Node], outputs: Sequence[Output]) -> Expression:
    """Build an expression as :func:`canonical` does, without unused inputs. Raises ConfigError if it is malformed."""
    kept, placed = renumbered(nodes, outputs)
    used = {node.attr for node in kept if node.op == "input"}
    return Expression(tuple(i for i in inputs if i.name in used), kept, placed)


def validate(graph: Expression) -> None:
    """Raise ConfigError if an expression is malformed or not canonical. It trusts no field's type."""
    for what, values in (("inputs", graph.inputs), ("nodes", graph.nodes), ("outputs", graph.outputs)):
        if not isinstance(values, tuple):
            raise ConfigError(f"an epilogue's {what} are a tuple, not {type(values).__name__}")
    _check_names(graph)
    types: list[Type] = []
    for index, node in enumerate(graph.nodes):
        _check_node(node, index, graph)
        types.append(_type_of(node, index, graph, types))
    for output in graph.outputs:
        _check_output(output, graph, types)
    if (graph.nodes, graph.outputs) != renumbered(graph.nodes, graph.outputs):
        raise ConfigError(
            "the epilogue graph is not canonical: each node stands once, is used, and they are in the order in which "
            "the outputs first need them"
        )
    used = {node.attr for node in graph.nodes if node.op == "input"}
    if used.intersection(graph.parts):
        raise ConfigError(f"{graph.parts_are}, which the accumulator has already: no operation has them")
    unused = [i.name for i in graph.inputs if i.name not in used and i.kind not in PARTS]
    if unused:
        raise ConfigError(f"no output depends on the input {', '.join(unused)}: use it or remove it")


def value_types(inputs: Sequence[Input], nodes: Sequence[Node]) -> tuple[Type, ...]:
    """Return the type of each node's value. Raises KeyError if an operation takes no such arguments."""
    kinds = {i.name: i.kind for i in inputs}
    found: list[Type] = []
    for node in nodes:
        found.append(type_of(node, [found[a] for a in node.args], kinds))
    return tuple(found)


def renumbered(nodes: Sequence[Node], outputs: Sequence[Output]) -> tuple[tuple[Node, ...], tuple[Output, ...]]:
    """Return nodes and outputs in canonical form: see :func:`canonical`."""
    order: dict[Node, int] = {}
    placed: dict[int, int] = {}
    for output in outputs:
        stack = [output.node]
        while stack:
            node = nodes[stack[-1]]
            missing = [a for a in node.args if a not in placed]
            if missing:
                stack.append(missing[0])
                continue
            node = Node(node.op, tuple(placed[a] for a in node.args), node.attr)
            placed[stack.pop()] = order.setdefault(node, len(order))
    return tuple(order), tuple(o._replace(node=placed[o.node]) for o in outputs)


def _check_names(graph: Expression) -> None:
    if not graph.outputs or graph.outputs[0].name != "d":
        raise ConfigError("an epilogue's first output is 'd'")
    seen: set[str] = set()
    named = [(i.name, "input") for i in graph.inputs] + [(o.name, "output") for o in graph.outputs[1:]]
    for name, what in named:
        check_name(name, what)
        if name in seen or (what, name) == ("output", "d"):
            raise ConfigError(f"{what} name {name!r} is taken: inputs and outputs need names of their own")
        seen.add(name)
    for given in graph.inputs:
        if not isinstance(given.kind, Kind):
            raise ConfigError(f"input {given.name!r} has no kind")
        if given.kind is Kind.BLOCKS_D:
            raise ConfigError(f"input {given.name!r} is of the kind of D's scales, which are an output")


def _check_node(node: Node, index: int, graph: Expression) -> None:
    leaf = isinstance(node.op, str) and node.op in _LEAVES
    if not leaf and (not isinstance(node.op, str) or node.op not in OPS):
        raise ConfigError(f"node {index}: unknown operation {reprlib.repr(node.op)}: use one of {', '.join(OPS)}")
    arity = 0 if leaf else OPS[node.op].arity
    if not isinstance(node.args, tuple) or len(node.args) != arity:
        raise ConfigError(f"node {index}: {node.op} takes {arity} arguments")
    if not all(type(a) is int and 0 <= a < index for a in node.args):
        raise ConfigError(f"node {index}: the arguments of {node.op} must be indices of earlier nodes")
    if node.op == SWAP_PAIRS and graph.nodes[node.args[0]].op == "const":
        raise ConfigError(f"node {index}: {node.op} of a constant is that constant, and has no node")
    if not _attr_fits(node, graph):
        raise ConfigError(f"node {index}: {reprlib.repr(node.attr)} is not an attribute for {node.op}")


def fits(number: int, bits: int) -> bool:
    """Whether a whole number fits into `bits` bits, including its sign."""
    return -(1 << (bits - 1)) <= number < 1 << (bits - 1)


def _type_of(node: Node, index: int, graph: Expression, types: Sequence[Type]) -> Type:
    taken = [types[a] for a in node.args]
    try:
        return type_of(node, taken, {i.name: i.kind for i in graph.inputs})
    except KeyError:
        given = ", ".join(t.value for t in taken)
        raise ConfigError(f"node {index}: {node.op} takes no arguments of the types {given}") from None


def _attr_fits(node: Node, graph: Expression) -> bool:
    if node.op == "input":
        return isinstance(node.attr, str) and any(i.name == node.attr for i in graph.inputs)
    if node.op == "const":
        return type(node.attr) is float and to_fp32(node.attr).hex() == node.attr.hex()
    if node.op in _BITS:
        return type(node.attr) is int and fits(node.attr, _BITS[node.op])
    if node.op == "cast":
        # Values are FP32 already: a cast to that is nothing, and has no node.
        return isinstance(node.attr, str) and any(t.name == node.attr for t in dtypes.ROUNDED)
    return node.attr is None


def _check_output(output: Output, graph: Expression, types: Sequence[Type]) -> None:
    if type(output.node) is not int or not 0 <= output.node < len(graph.nodes):
        raise ConfigError(f"output {output.name!r}: {reprlib.repr(output.node)} is not the index of a node")
    if types[output.node] is not Type.FLOAT:
        raise ConfigError(f"output {output.name!r}: a {types[output.node].value} is not stored: use to_float of it")
    if output.reduce is None:
        if output.kind is not Kind.TILE:
            raise ConfigError(f"output {output.name!r} is not reduced, so it must be a tile")
        return
    if output.name == "d":
        raise ConfigError("output 'd' is the (M, N) result and cannot be a reduction")
    if output.kind is Kind.BLOCKS_D:
        _check_scales(output, graph)
        return
    if not isinstance(output.reduce, str) or output.reduce not in REDUCTIONS:
        raise ConfigError(f"output {output.name!r}: unknown reduction: use one of {', '.join(REDUCTIONS)}")
    if output.kind not in (Kind.ROW, Kind.COL):
        raise ConfigError(f"output {output.name!r} is a reduction, so it must be a row or a column")


def _check_scales(output: Output, graph: Expression) -> None:
    # One place for them, or equal epilogues would be several graphs.
    d, second = graph.outputs[:2]
    of_d = output is second and output.name == D_SCALE and output.node == d.node
    if not of_d or not any(t.name == output.reduce for t in dtypes.FP8):
        raise ConfigError(
            f"output {output.name!r} is not the scales of D: these are the second output, called {D_SCALE!r}, of D's "
            "value, and name a type of FP8"
        )


def _rows(data: Mapping[str, Any], field: str, width: int) -> list[list[Any]]:
    rows = data[field]
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ConfigError(f"{field} must be a list of lists of {width} values")
    return rows


def _kind(value: object) -> Kind:
    for kind in Kind:
        if isinstance(value, str) and value == kind.value:
            return kind
    raise ConfigError(f"unknown kind {reprlib.repr(value)}: use one of {', '.join(k.value for k in Kind)}")


def _constant(value: object) -> float:
    try:
        number = float.fromhex(value) if isinstance(value, str) else None
    except (ValueError, OverflowError):
        number = None
    # One spelling for each number, or equal graphs could have different JSON.
    if number is None or number.hex() != value:
        raise ConfigError(f"a constant is written as Python's float.hex() does, not {reprlib.repr(value)}")
    return number
