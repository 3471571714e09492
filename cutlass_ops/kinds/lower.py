"""What both templates render alike: operand types, launch arguments, and the epilogue as loads, computes and stores.

CUTLASS's visitors pass fragments from node to node. One visitor for each operation would be slow to compile and hard to
read, so the elementwise part of a graph becomes as few C++ functions as the outputs allow: one for each value that is
stored or reduced, and one for each subexpression that several of those share, so that nothing is computed twice. Where
pairs of columns are swapped, values go from element to element, which no such function does: a visitor of its own.

Between functions values are FP32, or FP64 if the sums are. Truth values and indices are therefore computed anew in each
function that needs one. What depends on an element's place is loaded, as an input is: an index as the bits of an FP32
value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from cutlass_ops.base.dtypes import DType, f32, f64, i32, i64
from cutlass_ops.base.mma import BLOCK_K
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K, Form
from cutlass_ops.declare.spec import KernelSpec, Operand
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.names import is_plain
from cutlass_ops.epilogue.nodes import PARTS, Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED, INDICES, REDUCTIONS, SWAP_PAIRS, UNIFORM, Type
from cutlass_ops.kinds.cpp import (
    DOUBLES,
    HEADERS,
    cpp_expression,
    exact_inverse,
    float_literal,
    seed_literal,
    type_of,
)

ACC = "acc"


def flag(value: bool) -> str:
    """Spell a truth value."""
    return str(value).lower()


@dataclass(frozen=True)
class Compute:
    """One rendered C++ function on FP32 scalars, or on FP64 ones."""

    name: str  # name of the value, unique in the epilogue; the C++ struct is named after it
    # Names of the leaves and of the earlier computes that are its parameters: first leaves, in the order in which
    # they are loaded, since a tree of visitors passes its children's values by position
    args: tuple[str, ...]
    # Statements of the body, the last one a ``return``; none where pairs of its only argument are swapped
    lines: tuple[str, ...]

    @property
    def swaps_pairs(self) -> bool:
        """Whether it is no function, but its argument's value of the column beside."""
        return not self.lines

    @property
    def label(self) -> str:
        """The name without its underscore, for the names of types."""
        return self.name.rstrip("_")

    @property
    def struct(self) -> str:
        """Name of the C++ struct that holds the function."""
        return f"Function_{self.label}"


@dataclass(frozen=True)
class Store:
    """One output and the compute whose value it takes."""

    output: Output
    compute: str


@dataclass(frozen=True)
class Place:
    """A leaf whose value follows from where an element is."""

    name: str  # name of the value
    functor: str  # the C++ type that gives it of a row and a column
    arguments: tuple[str, ...] = ()  # its launch arguments, of which ``o.`` begins those that a call has


@dataclass(frozen=True)
class Visitor:
    """One visitor of the epilogue: its name, its C++ type, its launch arguments, and whose values it takes."""

    name: str
    type: str
    arguments: str
    edges: tuple[int, ...] = ()
    aliases: tuple[str, ...] = ()
    params: str = ""  # the type of its arguments, if the host does not know the visitor


@dataclass(frozen=True)
class Lowered:
    """An epilogue as loads, computes in topological order, and stores; D is the first store."""

    leaves: tuple[str, ...]
    computes: tuple[Compute, ...]
    stores: tuple[Store, ...]
    places: tuple[Place, ...] = ()

    def place(self, leaf: str) -> Place | None:
        """Return what a leaf's place makes it, if that is what it is."""
        return next((p for p in self.places if p.name == leaf), None)


def lower(graph: Graph, compute: DType = f32) -> Lowered:
    """Group the graph's operations into computes, in FP32 or FP64."""
    owners = _owners(graph)
    roots = sorted({root for nodes in owners.values() for root in nodes})
    names = _names(graph, roots)
    computes = tuple(_compute(graph, root, roots, names, compute) for root in roots)
    used = {arg for compute in computes for arg in compute.args}
    leaves = tuple(name for name in _leaves(graph) if name in used)
    stores = tuple(Store(o, names[o.node]) for o in graph.outputs)
    return Lowered(leaves, computes, stores, _places(graph))


def _leaves(graph: Graph) -> tuple[str, ...]:
    """Name everything that the epilogue may load, in the order that parameters have everywhere."""
    return (ACC, *graph.gathered, *(place.name for place in _places(graph)), *(i.name for i in graph.inputs))


_PLACES = {"row_index": "cutlass_ops::RowOfPlace", "column_index": "cutlass_ops::ColumnOfPlace"}


def _places(graph: Graph) -> tuple[Place, ...]:
    used = {node.op for node in graph.nodes}
    indices = tuple(Place(name, _PLACES[name]) for name in INDICES if name in used)
    randoms = (
        Place(_leaf_name(graph, node), "cutlass_ops::Uniform", tuple(_seed(graph.nodes[a]) for a in node.args))
        for node in graph.nodes
        if node.op == UNIFORM
    )
    return (*indices, *randoms)


def _seed(node: Node) -> str:
    return f"o.{node.attr}" if node.op == "input" else f"{{{seed_literal(int(node.attr or 0))}, nullptr}}"


_LOADED = ("acc", "input", UNIFORM, *GATHERED, *INDICES)


def _is_leaf(node: Node) -> bool:
    return node.op in _LOADED


def _leaf_name(graph: Graph, node: Node) -> str:
    if node.op == UNIFORM:
        return f"uniform{[n for n in graph.nodes if n.op == UNIFORM].index(node)}_"
    return str(node.attr) if node.op == "input" else node.op


def _owners(graph: Graph) -> dict[int, set[int]]:
    """For each node, the computes that need it; a node needed by several becomes a compute itself."""
    alone = {o.node for o in graph.outputs}
    for index, node in enumerate(graph.nodes):
        if node.op == SWAP_PAIRS:
            alone |= {index, *(a for a in node.args if not _is_leaf(graph.nodes[a]))}
    types = graph.types
    owners: dict[int, set[int]] = {index: {index} for index in alone}
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        mine = owners.get(index, set())
        if _is_leaf(node):
            continue
        if index not in alone and len(mine) > 1 and types[index] is Type.FLOAT and node.op != "const":
            mine = owners[index] = {index}
        for arg in node.args:
            owners.setdefault(arg, set()).update(mine if arg not in alone else {arg})
    return owners


def _names(graph: Graph, roots: list[int]) -> dict[int, str]:
    """Name each compute after its output, a shared one by number.

    The names end in an underscore, as local variables do; the names that users give cannot, so none collide.
    """
    taken = {o.name for o in graph.outputs}
    numbered = (f"shared{i}" for i in count() if f"shared{i}" not in taken)
    names: dict[int, str] = {}
    for output in (*(o for o in graph.outputs if o.reduce is None), *graph.outputs):
        names.setdefault(output.node, f"{output.name}_")
    for root in roots:
        if root not in names:
            names[root] = f"{next(numbered)}_"
    return names


def _compute(graph: Graph, root: int, roots: list[int], names: dict[int, str], compute: DType) -> Compute:
    """Write the function that computes ``root`` from leaves and from other computes."""
    if graph.nodes[root].op == SWAP_PAIRS:
        (swapped,) = graph.nodes[root].args
        return Compute(names[root], (names.get(swapped) or _leaf_name(graph, graph.nodes[swapped]),), ())
    args: list[str] = []
    lines: list[str] = []
    spelled: dict[int, str] = {}
    types = graph.types

    def value(index: int) -> str:
        if index in spelled:
            return spelled[index]
        node = graph.nodes[index]
        if index != root and index in names:
            spelled[index] = _parameter(names[index])
        elif node.op in INDICES:
            spelled[index] = f"cutlass_ops::index_of({_parameter(node.op)})"
        elif _is_leaf(node):
            spelled[index] = _parameter(_leaf_name(graph, node))
        elif node.op in ("const", "integer"):
            spelled[index] = cpp_expression(node, (), compute)
        else:
            inverse = exact_inverse(graph.nodes[node.args[1]]) if node.op == "div" else None
            if inverse is None:
                expression = cpp_expression(node, tuple(value(a) for a in node.args), compute, types[index])
            else:
                expression = f"({value(node.args[0])} * {float_literal(inverse, compute)})"
            spelled[index] = f"v{len(lines)}_"
            lines.append(f"{type_of(types[index], compute)} const {spelled[index]} = {expression};")
        return spelled[index]

    def _parameter(name: str) -> str:
        if name not in args:
            args.append(name)
        return name

    result = value(root)
    lines.append(f"return {result};")
    leaves = [name for name in _leaves(graph) if name in args]
    return Compute(names[root], (*leaves, *(name for name in args if name not in leaves)), tuple(lines))


# What reduce.h and reductions.h have for each reduction.
REDUCERS = {
    "sum": "Sum",
    "sum_square": "SumSquare",
    "max": "Max",
    "min": "Min",
    "argmax": "ArgMax",
    "argmin": "ArgMin",
    "logsumexp": "LogSumExp",
}


def named_for_cpp(spec: KernelSpec) -> KernelSpec:
    """Return the same kernel with names that can stand in C++: most names can, and stay.

    Those that take the place of others have no lower-case letter, which no name has that stays.
    """
    graph = spec.epilogue
    inputs = {i.name: i.name if is_plain(i.name) else f"IN{at}" for at, i in enumerate(graph.inputs)}
    further = graph.outputs[1:]
    outputs = {o.name: o.name if is_plain(o.name) else f"OUT{at}" for at, o in enumerate(further)}
    if all(new == old for names in (inputs, outputs) for old, new in names.items()):
        return spec
    renamed = Graph(
        tuple(i._replace(name=inputs[i.name]) for i in graph.inputs),
        tuple(Node(n.op, n.args, inputs[str(n.attr)]) if n.op == "input" else n for n in graph.nodes),
        (graph.outputs[0], *(o._replace(name=outputs[o.name]) for o in further)),
    )
    types: dict[str, Any] = {
        "inputs": {inputs[i.name]: operand for i, operand in spec.typed_inputs},
        "outputs": {outputs[o.name]: operand for o, operand in spec.typed_outputs},
    }
    return replace(spec, epilogue=renamed, **types)


# ---- Operands and launch arguments -----------------------------------------------------------------------------------

# What reads the arguments of each form, and each kind of argument.
READERS = {DENSE: "call", BATCHED: "batched", GROUPED: "groups", RAGGED_K: "batched"}
_READERS = {
    Kind.ROW: "row",
    Kind.COL: "col",
    Kind.TILE: "tile",
    Kind.SCALAR: "scalar",
    Kind.PRODUCT: "second",
    Kind.INTEGER: "scalar",
}


def types(
    spec: KernelSpec, lowered: Lowered, places: str, loaded: Callable[[Operand], Operand] = lambda operand: operand
) -> dict[str, Any]:
    """Return the template variables that say what the kernel computes on, and the headers that few kernels need."""
    a, b = loaded(spec.a), loaded(spec.b)
    reductions = (REDUCTIONS[o.reduction].header for o in spec.epilogue.outputs if o.reduction is not None)
    headers = {HEADERS[node.op] for node in spec.epilogue.nodes if node.op in HEADERS} | set(filter(None, reductions))
    headers |= {places} if lowered.places else set()
    headers |= {DOUBLES} if spec.a.dtype is f64 else set()
    operands = (a, b, spec.d, *spec.inputs, *spec.outputs)
    elements = dict.fromkeys(operand.dtype for operand in operands)
    if HEADERS[UNIFORM] in headers:
        elements.pop(i64, None)  # a seed's type: this header, which reads seeds, says it
    if spec.form in (GROUPED, RAGGED_K):
        elements[i32] = None  # of where groups end
    return {
        "element_types": [{"cpp": t.cpp, "dl_code": t.dl_code} for t in {t.cpp: t for t in elements}.values()],
        "a": _operand(a),
        "b": _operand(b),
        "d": _operand(spec.d),
        "inputs": [{"name": i.name, "element": operand.dtype.cpp} for i, operand in spec.typed_inputs],
        "outputs": [{"name": o.name, "element": operand.dtype.cpp} for o, operand in spec.typed_outputs],
        "computes": [
            {"struct": c.struct, "params": list(c.args), "lines": list(c.lines)}
            for c in lowered.computes
            if not c.swaps_pairs
        ],
        "headers": sorted(headers),
        "swaps_pairs": spec.epilogue.swaps_pairs,
        "batched": spec.form == BATCHED,
    }


def layout_of(operand: Operand) -> str:
    """Return CUTLASS's name of a layout."""
    return "RowMajor" if operand.major == "row" else "ColumnMajor"


def fields(spec: KernelSpec, whole_accesses: Callable[[Operand, bool], bool]) -> list[dict[str, str]]:
    """List the launch arguments after A, B and D: their C++ type, and how the binding reads and checks them."""
    found = [
        _blocks(spec, i)
        if i.kind in PARTS
        else _field(spec.form, i.name, i.kind, operand, whole_accesses(operand, False))
        for i, operand in spec.typed_inputs
    ]
    return found + [
        _scales(o.name)
        if o.kind is Kind.BLOCKS_D
        else _field(spec.form, o.name, o.kind, operand, whole_accesses(operand, True), "_output")
        for o, operand in spec.typed_outputs
    ]


def _blocks(spec: KernelSpec, given: Input) -> dict[str, str]:
    """Read scales of blocks, of which a row is for each of some rows of A or columns of B."""
    of_a = PARTS[given.kind].operand == "a"
    operand, extent = (spec.a, "m") if of_a else (spec.b.transposed, "n")
    assert operand.scaling is not None
    each, of_k = operand.scaling
    if spec.form == GROUPED:
        element = f"Element_{given.name}"
        of_rows = f"groups.row_scales<{element}>(o.problem, {of_k})"
        of_weights = f"groups.weight_scales<{element}>(o.problem, {each}, {of_k})"
        read = of_rows if of_a else of_weights
        return {"name": given.name, "type": "cutlass_ops::GroupedScales", "read": read}
    read = f"call.blocks<Element_{given.name}>(o.problem.{extent}, {each}, o.problem.k, {of_k})"
    return {"name": given.name, "type": "cutlass_ops::StridedScales", "read": read}


def _scales(name: str) -> dict[str, str]:
    """Read where the scales of D's blocks go."""
    read = f"call.blocks_output<Element_{name}>(o.problem.m, 1, o.problem.n, {BLOCK_K})"
    return {"name": name, "type": "cutlass_ops::WrittenScales", "read": read}


def _field(form: Form, name: str, kind: Kind, operand: Operand, whole: bool, suffix: str = "") -> dict[str, str]:
    """Read an argument, with the distances between its batches or groups if there are several; scalars are shared."""
    element, matrix = f"Element_{name}", "cutlass_ops::Matrix" if form == DENSE else "cutlass_ops::BatchedMatrix"
    how = f"{'call' if kind in (Kind.SCALAR, Kind.INTEGER) else READERS[form]}.{_READERS[kind]}{suffix}"
    if kind in (Kind.SCALAR, Kind.INTEGER):
        return {"name": name, "type": f"cutlass_ops::Scalar<{element}>", "read": f"{how}<{element}>()"}
    if kind is Kind.PRODUCT:
        return {"name": name, "type": matrix, "read": f"{how}<ElementB, MajorB, AlignmentB>(o.problem)"}
    if kind is not Kind.TILE:
        vector = f"{element}*" if form == DENSE else f"cutlass_ops::BatchedVector<{element}>"
        return {"name": name, "type": vector, "read": f"{how}<{element}>(o.problem)"}
    arguments = f"{element}, cutlass_ops::Major::{_major(operand)}, {operand.alignment}, {flag(whole)}"
    return {"name": name, "type": matrix, "read": f"{how}<{arguments}>(o.problem)"}


def _operand(operand: Operand) -> dict[str, Any]:
    return {
        "element": operand.dtype.cpp,
        "layout": layout_of(operand),
        "major": _major(operand),
        "alignment": operand.alignment,
    }


def _major(operand: Operand) -> str:
    return f"k{operand.major.capitalize()}"
