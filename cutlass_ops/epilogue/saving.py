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
    """What runs forward, and which of its values the backward reads."""

    runs: Graph  # The epilogue, with the outputs for the backward after its own. It takes products in `apart` as tiles.
    kept: tuple[str, ...]  # the outputs of `graph` that the backward reads
    graph: Graph  # what is differentiated; a product that the backward reads is an output of it
    placed: Graph  # the same without what is stored, but with where extrema are
    apart: dict[str, str]  # for products that are computed first, as tiles, their outputs in `graph`


@functools.lru_cache(maxsize=1024)
def saving(graph: Graph, wrt: frozenset[str], *, store: bool, narrow: bool) -> Saving:
    """Return what a forward computes and stores.

    `wrt` names the inputs whose gradients are wanted, besides those of the accumulator and products. With `store`,
    values are stored that spare the backward a GEMM. Otherwise the backward reads only tiles that the epilogue returns
    beside D, and where the results of its reductions are. With `narrow`, tiles are FP16, whose range a product may
    exceed before a norm scales it: then it is not stored.

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
            new = Names(placed)
            names = [new.new("saved", str(at)) for at in range(len(nodes))]
            extended = _extended(placed, [Output(name, node) for name, node in zip(names, nodes, strict=True)])
            if extended is None:
                continue
            cheaper = vjp(extended, wrt, of=of, kept=("d", *beside, *names))
            if not cheaper.again:
                return _stored(placed, extended, nodes, names, tuple(cheaper.kept))
    return Saving(placed, tuple(found.kept), placed, placed, {})


def _stored(
    placed: Graph, extended: Graph, nodes: Sequence[int], names: Sequence[str], kept: tuple[str, ...]
) -> Saving:
    """Return the graph that runs for an epilogue that stores nodes under some names."""
    if not placed.products:
        return Saving(extended, kept, extended, placed, {})
    apart = {str(placed.nodes[at].attr): name for at, name in zip(nodes, names, strict=True)}
    apart = {product: apart.get(product, "") for product in placed.products}
    inputs = [i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in extended.inputs]
    outputs = [o for o in extended.outputs if o.name not in apart.values()]
    runs = canonical(inputs, extended.nodes, outputs, placed.rounded)
    return Saving(runs, kept, extended, placed, apart)


def _with_places(graph: Graph) -> Graph:
    """Return an epilogue that says where its extrema are, as far as a kernel's number of outputs allows."""
    missing = [o for o in graph.outputs if needs_place(o) and place_of(graph, o) is None]
    if not missing:
        return graph
    names = Names(graph)
    places = [Output(names.new("place", o.name), o.node, o.kind, f"arg{o.reduce}") for o in missing]
    return _extended(graph, places) or graph


def _extended(graph: Graph, outputs: Sequence[Output]) -> Graph | None:
    """Return an epilogue with further outputs; None if a kernel cannot have that many."""
    try:
        return canonical(graph.inputs, graph.nodes, (*graph.outputs, *outputs), graph.rounded)
    except ConfigError:
        return None


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
    """Return the nodes that a value independent of the sources multiplies or divides: the range changes there."""
    reached, found = set(sources), set()
    for index, node in enumerate(graph.nodes):
        if reached.isdisjoint(node.args):
            continue
        reached.add(index)
        if node.op in ("mul", "div") and any(a not in reached for a in node.args):
            found |= {a for a in node.args if a in reached}
    # What such a value is made of is as large.
    return frozenset(found | {s for s in sources if found})
