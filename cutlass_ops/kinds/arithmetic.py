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
_FREE = frozenset(("acc", "input", "const", "integer", "seed", "cast", "to_float"))
# To load and convert an element of a tile, to round and store one, and to add one up.
_TILE, _STORE, _REDUCE = 2, 2, 3
# To find the greatest of a block, to multiply by its inverse, and to store.
_QUANTIZE = 6
# Clocks from one instruction to the next, where a warp has its scheduler to itself (benchmarks/NOTES.md).
_CLOCKS = 2.0


def clocks(epilogue: Graph) -> float:
    """Return the clocks that a warp alone on its scheduler takes for an element of D of each of its threads."""
    count = sum(_INSTRUCTIONS.get(node.op, 1) for node in epilogue.nodes if node.op not in _FREE)
    count += sum(_TILE for given in epilogue.inputs if given.kind is Kind.TILE)
    for output in epilogue.outputs:
        count += _STORE if output.kind is Kind.TILE else 0 if output.kind in BLOCKS else _REDUCE
    if epilogue.quantized is not None:
        count += _QUANTIZE
    return _CLOCKS * count
