"""Which epilogues can be computed in FP64, as those of FP64 operands are.

The functions in C++ are in ``templates/include/cutlass_ops/doubles.h``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from cutlass_ops.epilogue.build import KEPT_BITS
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.epilogue.operations import INDICES, OPS, to_fp32


def why_not(graph: Graph) -> str | None:
    """Return why an epilogue cannot be computed in FP64 and what to do, or None if it can."""
    for output in graph.outputs:
        if output.kind is Kind.BLOCKS_D or output.reduce is not None:
            return f"its output {output.name} is reduced, which FP64 kernels do not: use the tile as an output"
    for node in graph.nodes:
        if node.op in INDICES:
            return f"it takes {node.op}, which FP64 kernels do not give: use a Row or a Col of indices"
        if node.op in OPS and not OPS[node.op].in_fp64:
            return f"{node.op} has no form in FP64: leave it out, and use it on the result"
    lost = [*(_shortest(x) for x in _constants(graph) if not _looks_kept(x)), *map(repr, graph.rounded)]
    return f"its constant {lost[0]} is rounded to FP32, as every constant is: use a Scalar" if lost else None


def unseen(graph: Graph, rounded: Mapping[float, float]) -> tuple[float, ...]:
    """Return the original values of a graph's constants whose FP32 value does not show that it was rounded.

    `rounded` has these values by FP32's: see :class:`cutlass_ops.epilogue.build.Builder`.
    """
    kept = {value for value in _constants(graph) if _looks_kept(value)}
    return tuple(sorted(exact for value, exact in rounded.items() if value in kept))


def _constants(graph: Graph) -> list[float]:
    return [node.attr for node in graph.nodes if isinstance(node.attr, float)]


def _looks_kept(value: float) -> bool:
    """Whether FP32 most likely has a constant as it was written, as a graph from a file keeps FP32's value only.

    That is so of short decimals that are that value, such as 0.75, and of values with few significant bits.
    """
    if not math.isfinite(value) or float(_shortest(value)) == value:
        return True
    return math.ldexp(math.frexp(value)[0], KEPT_BITS).is_integer()


def _shortest(value: float) -> str:
    """Return the fewest decimal digits that FP32 reads as a value."""
    return next(text for digits in range(1, 18) if to_fp32(float(text := f"{value:.{digits}g}")) == value)
