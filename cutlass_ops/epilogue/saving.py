"""What a forward stores for its gradients: the epilogue with a few outputs more.

Without them, the backward multiplies A @ B again. The candidates, from the cheapest on:

1. What the epilogue returns anyway: D, or a tile beside it.
2. One value that everything depends on, such as the pre-activation of a linear layer. The last one is taken.
3. The accumulator and the product. A kernel of two products gives D alone, so that the product is then a GEMM of its
   own and D's kernel reads it as a tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue.derivatives import Names, needs_place, place_of, supported, vjp
from cutlass_ops.epilogue.graph import Graph, canonical
from cutlass_ops.epilogue.nodes import Kind, Node, Output
from cutlass_ops.epilogue.operations import OPS, Type


class Saving(NamedTuple):
    """What runs forward, and what of it is for the backward.

    Attributes
    ----------
    runs : Graph
        What runs: the epilogue, behind whose outputs are those for the backward. If there are products in `apart`, it
        takes them as tiles.
    kept : tuple of str
        The outputs of `graph` that the backward reads.
    graph : Graph
        What is differentiated. A product that the backward reads is an output of it.
    placed : Graph
        The same without what is stored, but with where extrema are.
    apart : dict of str to str
        For products that are computed first, as tiles, their outputs in `graph`.
    """

    runs: Graph
    kept: tuple[str, ...]
    graph: Graph
    placed: Graph
    apart: dict[str, str]


@functools.lru_cache(maxsize=1024)
def saving(graph: Graph, wrt: frozenset[str], *, store: bool, narrow: bool) -> Saving:
    """Return what a forward computes and stores.

    Parameters
    ----------
    graph : Graph
        The epilogue.
    wrt : frozenset of str
        The inputs whose gradients are wanted, besides those of the accumulator and products.
    store : bool
        Whether values are stored that spare the backward a GEMM. If not, only what the epilogue returns as a tile
        beside D is read again, and where the results of its reductions are.
    narrow : bool
        Whether tiles are FP16, whose range a product may exceed before a norm scales it: then it is not stored.

    Examples
    --------
    >>> from cutlass_ops.epilogue import builtin
    >>> found = saving(builtin.bias_gelu.graph, frozenset(("bias",)), store=True, narrow=False)
    >>> [o.name for o in found.runs.outputs], found.kept
    (['d', 'saved_0'], ('saved_0',))
    >>> saving(builtin.bias_relu.graph, frozenset(("bias",)), store=True, narrow=False).kept
    ('d',)
    """
    placed = _with_places(graph)
    own = {o.name for o in graph.outputs}
    of = [name for name in supported(placed) if name in own]
    beside = [o.name for o in graph.outputs[1:] if o.reduce is None]
    found = vjp(placed, wrt, of=of, kept=beside)
    if found.again and store:
        for nodes in _candidates(placed, narrow=narrow):
            extended, names = _with_tiles(placed, nodes)
            if extended is None:
                continue
            cheaper = vjp(extended, wrt, of=of, kept=("d", *beside, *names))
            if not cheaper.again:
                return _stored(placed, extended, nodes, names, tuple(cheaper.kept))
    return Saving(placed, tuple(found.kept), placed, placed, {})


def _stored(
    placed: Graph, extended: Graph, nodes: Sequence[int], names: Sequence[str], kept: tuple[str, ...]
) -> Saving:
    """Return what runs for an epilogue that stores nodes under some names."""
    if not placed.products:
        return Saving(extended, kept, extended, placed, {})
    apart = {str(placed.nodes[at].attr): name for at, name in zip(nodes, names, strict=True)}
    apart = {product: apart.get(product, "") for product in placed.products}
    inputs = [i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in extended.inputs]
    outputs = [o for o in extended.outputs if o.name not in apart.values()]
    runs = canonical(inputs, extended.nodes, outputs, placed.rounded)
    return Saving(runs, kept, extended, placed, apart)


def _with_places(graph: Graph) -> Graph:
    """Return an epilogue that says where its extrema are, as far as a kernel has so many outputs."""
    missing = [o for o in graph.outputs if needs_place(o) and place_of(graph, o) is None]
    if not missing:
        return graph
    names = Names(graph)
    places = [Output(names.new("place", o.name), o.node, o.kind, f"arg{o.reduce}") for o in missing]
    try:
        return canonical(graph.inputs, graph.nodes, (*graph.outputs, *places), graph.rounded)
    except ConfigError:
        return graph


def _with_tiles(graph: Graph, nodes: Sequence[int]) -> tuple[Graph | None, tuple[str, ...]]:
    """Return an epilogue that stores nodes too, and the new outputs; None if a kernel has not so many."""
    names = Names(graph)
    called = tuple(names.new("saved", str(at)) for at in range(len(nodes)))
    tiles = [Output(name, node) for name, node in zip(called, nodes, strict=True)]
    try:
        return canonical(graph.inputs, graph.nodes, (*graph.outputs, *tiles), graph.rounded), called
    except ConfigError:
        return None, ()


def _candidates(graph: Graph, *, narrow: bool) -> Iterator[tuple[int, ...]]:
    """Yield the nodes that may be stored together, the cheapest first."""
    yield ()
    products = {Node("acc"), *(Node("input", (), name) for name in graph.products)}
    whole = [index for index, node in enumerate(graph.nodes) if node in products]
    returned = {o.node for o in graph.outputs if o.reduce is None}
    narrow_ones = _scaled(graph, whole) if narrow else frozenset()
    for index in reversed(range(len(graph.nodes))):
        is_value = graph.nodes[index].op in OPS or index in whole
        if index in returned or not is_value or graph.types[index] is not Type.FLOAT or index in narrow_ones:
            continue
        if not _reach_outputs(graph, whole, without=index):
            yield (index,)
    # Those that are returned are there, and those that nothing needs are not stored.
    if len(whole) > 1 and narrow_ones.isdisjoint(whole):
        yield tuple(index for index in whole if index not in returned)


def _reach_outputs(graph: Graph, sources: Sequence[int], *, without: int) -> bool:
    """Whether a source reaches an output along nodes other than one."""
    reached = set(sources) - {without}
    for index, node in enumerate(graph.nodes):
        if index != without and not reached.isdisjoint(node.args):
            reached.add(index)
    return any(o.node in reached for o in graph.outputs)


def _scaled(graph: Graph, sources: Sequence[int]) -> frozenset[int]:
    """Return the nodes that something independent of the sources multiplies or divides: their range is another's."""
    reached, found = set(sources), set()
    for index, node in enumerate(graph.nodes):
        if reached.isdisjoint(node.args):
            continue
        reached.add(index)
        if node.op in ("mul", "div") and any(a not in reached for a in node.args):
            found |= {a for a in node.args if a in reached}
    # What such a value is made of is as large.
    return frozenset(found | {s for s in sources if found})
