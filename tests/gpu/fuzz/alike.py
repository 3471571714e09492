"""Relations between calls of one kernel, of any values: no tolerance, and no result that is known beforehand.

A row of D depends neither on where it is among the others nor on which others there are, nor does a column, nor a GEMM
of a batch. Twice as large an A makes D twice as large. All of this holds to the last bit for a kernel whose thread
blocks each add up all of K in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run.requests import Request

# Where inputs and outputs have rows and columns of D.
_ROWS = {Kind.COL: -1, Kind.TILE: -2, Kind.BLOCKS_A: -2}
_COLUMNS = {Kind.ROW: -1, Kind.TILE: -1, Kind.PRODUCT: -1}
_ROWS_OUT, _COLUMNS_OUT = {Kind.COL: -1, Kind.TILE: -2}, {Kind.ROW: -1, Kind.TILE: -1}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Values = dict[str, Any]
Kernel = Callable[..., Any]


def why_not(kernel: Kernel, asked: Request) -> str | None:
    """Call a kernel in related ways; say which relation does not hold, None if all do."""
    graph: Graph = asked.op.graph
    a, b, *inputs = asked.arguments
    given: Values = {**dict(zip(asked.op.names, inputs, strict=False)), **asked.named, "a": a, "b": b}
    first = _results(kernel, graph, given)
    for name, values, expected in _related(graph, given, first):
        found = _results(kernel, graph, values)
        for output, wanted in expected.items():
            if not torch.equal(_bits(found[output]), _bits(wanted)):
                return f"{output} of {name} has other bits"
    return None


def _related(graph: Graph, given: Values, first: Mapping[str, Tensor]) -> Iterator[tuple[str, Values, Values]]:
    """Yield other arguments, and which outputs they should give."""
    inputs = {declared.name: declared.kind for declared in graph.inputs}
    outputs = {declared.name: declared.kind for declared in graph.outputs}
    a, b = given["a"], given["b"]

    def moved(places: Mapping[str, int], at: Tensor) -> Values:
        return {**given, **{name: _taken(given[name], dim, at) for name, dim in places.items()}}

    def expected(kinds: Mapping[Kind, int], at: Tensor) -> Values:
        return {name: _taken(first[name], kinds[kind], at) for name, kind in outputs.items() if kind in kinds}

    if a.ndim > 2 or b.ndim > 2:
        if a.shape[0] > 1 and all(kind in (Kind.TILE, Kind.ROW, Kind.SCALAR) for kind in inputs.values()):
            names = ["a", *["b"] * (b.ndim > 2), *(name for name, kind in inputs.items() if kind is Kind.TILE)]
            one = {name: given[name][:1] for name in names}
            yield "one batch", {**given, **one}, {name: x[:1] for name, x in first.items()}
        return
    rows = {"a": -2, **{name: _ROWS[kind] for name, kind in inputs.items() if kind in _ROWS}}
    some = len(a) // 32 * 16  # a multiple of what any kernel loads at a time
    for name, count in (("rows in another order", len(a)), *([("fewer rows", some)] if some else [])):
        at = torch.randperm(len(a), device=a.device)[:count]
        yield name, moved(rows, at), expected(_ROWS_OUT, at)
    if Kind.BLOCKS_B not in inputs.values() and not graph.swaps_pairs:
        columns = {"b": -1, **{name: _COLUMNS[kind] for name, kind in inputs.items() if kind in _COLUMNS}}
        at = torch.randperm(b.shape[-1], device=a.device)
        yield "columns in another order", moved(columns, at), expected(_COLUMNS_OUT, at)
    # Below its normal numbers, FP16 has fewer bits.
    d = first["d"]
    is_scaled = a.dtype.is_floating_point and a.itemsize > 1 and torch.finfo(d.dtype).smallest_normal < 1e-30
    if is_scaled and not inputs and bool((d * 2).isfinite().all()):
        yield "twice A", {**given, "a": _like(a, a * 2)}, {"d": d * 2}


def _results(kernel: Kernel, graph: Graph, given: Values) -> dict[str, Tensor]:
    others = {name: x for name, x in given.items() if name not in ("a", "b")}
    found = kernel(given["a"], given["b"], **others)
    return dict(zip((o.name for o in graph.outputs), [found] if isinstance(found, Tensor) else found, strict=True))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.itemsize])


def _taken(x: Any, dim: int, at: Tensor) -> Any:
    """Return parts of a tensor, which lie in memory as the tensor does."""
    if not isinstance(x, Tensor) or x.ndim < -dim:
        return x  # the same for all
    return _like(x, x.view(_BITS[x.itemsize]).index_select(dim, at).view(x.dtype))


def _like(x: Tensor, values: Tensor) -> Tensor:
    return torch.empty_strided(values.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(values)
