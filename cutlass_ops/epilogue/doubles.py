"""Which epilogues can be computed in FP64, as those of FP64 operands are.

The functions in C++ are in ``templates/include/cutlass_ops/doubles.h``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind, Node
from cutlass_ops.epilogue.operations import INDICES, OPS, to_fp32


def why_not(graph: Graph) -> str | None:
    """Return why an epilogue cannot be computed in FP64 and what to do, or None if it can.

    Parameters
    ----------
    graph : Graph
        The epilogue.
    """
    for output in graph.outputs:
        if output.kind is Kind.BLOCKS_D or output.reduce is not None:
            return f"its output {output.name} is reduced, which FP64 kernels do not: use the tile as an output"
    for node in graph.nodes:
        if node.op in INDICES:
            return f"it takes {node.op}, which FP64 kernels do not give: use a Row or a Col of indices"
        if node.op in OPS and not OPS[node.op].in_fp64:
            return f"{node.op} has no form in FP64: leave it out, and use it on the result"
    shown = [n.attr for n in graph.nodes if n.op == "const" and isinstance(n.attr, float) and not _looks_kept(n.attr)]
    lost = [*map(_shortest, shown), *map(repr, graph.rounded)]
    return f"its constant {lost[0]} is rounded to FP32, as every constant is: use a Scalar" if lost else None


def why_no_gradient(graph: Graph) -> str | None:
    """Return why an epilogue has no gradients in FP64 and what to do, or None if it has."""
    for node in graph.nodes:
        rules = " ".join(OPS[node.op].vjp) if node.op in OPS else ""
        if any(to_fp32(float(number)) != float(number) for number in re.findall(r"\d+\.\d+", rules)):
            return (
                f"the derivative of {node.op} has a constant, which is rounded to FP32 as every constant is: apply "
                f"{node.op} to the result instead"
            )
        if node.op == "pow" and not _keeps_less_one(graph.nodes[node.args[1]]):
            return (
                f"the derivative of pow has an exponent less 1, {graph.nodes[node.args[1]].attr} - 1, which is rounded "
                "to FP32 as every constant is: use a Scalar, or apply pow to the result instead"
            )
    return None


def _keeps_less_one(exponent: Node) -> bool:
    """Whether FP32 holds an exponent less 1, if the exponent is a constant."""
    if exponent.op != "const" or not isinstance(exponent.attr, float):
        return True
    return to_fp32(exponent.attr - 1) == exponent.attr - 1


def unseen(graph: Graph, rounded: Mapping[float, float]) -> tuple[float, ...]:
    """Return what some constants of a graph were, of which FP32's value does not tell that they are rounded.

    Parameters
    ----------
    graph : Graph
        The epilogue.
    rounded : mapping of float to float
        By FP32's values: see :class:`cutlass_ops.epilogue.build.Builder`.
    """
    kept = {n.attr for n in graph.nodes if n.op == "const" and isinstance(n.attr, float) and _looks_kept(n.attr)}
    return tuple(sorted(exact for value, exact in rounded.items() if value in kept))


def _looks_kept(value: float) -> bool:
    """Whether FP32 most likely has a constant as it was written, as a graph from a file keeps FP32's value only.

    That is so of short decimals that are that value, such as 0.75, and of values with at most 12 significant bits.
    """
    if not math.isfinite(value) or float(_shortest(value)) == value:
        return True
    return math.frexp(value)[0] * 2**12 % 1 == 0


def _shortest(value: float) -> str:
    """Return the fewest decimal digits that FP32 reads as a value."""
    return next(text for digits in range(1, 18) if to_fp32(float(text := f"{value:.{digits}g}")) == value)
