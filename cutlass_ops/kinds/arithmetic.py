"""How long an epilogue computes, for the time models."""

from __future__ import annotations

from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import BLOCKS, Kind

# Instructions of an operation, where there are more than one: by the machine code, rounded.
_INSTRUCTIONS = {
    **dict.fromkeys(("div", "log1p", "expm1", "softplus"), 8),
    **dict.fromkeys(("reciprocal", "sqrt", "rsqrt", "exp", "exp2", "log", "log2"), 4),
    **dict.fromkeys(("sigmoid", "silu", "elu"), 6),
    **dict.fromkeys(("tanh", "gelu_tanh", "mish"), 12),
    **dict.fromkeys(("gelu", "ndtr", "pow"), 16),
    **dict.fromkeys(("erf", "sin", "cos"), 20),
    "uniform": 60,
}
_FREE = frozenset(("cast", "to_float"))
# To load and convert an element of a tile, to round and store one, and to add one up.
_TILE, _STORE, _REDUCE = 2, 2, 3
# To find the greatest of a block, to multiply by its inverse, and to store.
_QUANTIZE = 6
# Clocks from one instruction to the next, where a warp has its scheduler to itself (benchmarks/NOTES.md).
_CLOCKS = 2.0


def clocks(epilogue: Graph) -> float:
    """Return the clocks that a warp alone on its scheduler takes for an element of D of each of its threads.

    What is the same for all of a row or of a column, a thread computes once for many elements.
    """
    kinds = {given.name: given.kind for given in epilogue.inputs}
    each: list[bool] = []  # whether a node has another value for each element
    count = 0
    for node in epilogue.nodes:
        of_element = node.op == "acc" or kinds.get(str(node.attr)) in (Kind.TILE, Kind.PRODUCT)
        each.append(of_element or node.op == "uniform" or any(each[at] for at in node.args))
        if node.args and each[-1] and node.op not in _FREE:
            count += _INSTRUCTIONS.get(node.op, 1)
        elif node.op == "uniform":
            count += _INSTRUCTIONS[node.op]
    count += sum(_TILE for given in epilogue.inputs if given.kind is Kind.TILE)
    for output in epilogue.outputs:
        count += _STORE if output.kind is Kind.TILE else 0 if output.kind in BLOCKS else _REDUCE
    if epilogue.quantized is not None:
        count += _QUANTIZE
    return _CLOCKS * count
