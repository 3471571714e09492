"""What an epilogue may be where D is INT32: nothing but the sums."""

from __future__ import annotations

from cutlass_ops.epilogue.graph import Graph


def why_not(graph: Graph) -> str | None:
    """Say why an epilogue gives no D in INT32; None if it does: D is the unchanged accumulator, and the only output.

    Other epilogues compute in FP32, which has every whole number only up to 2**24.
    """
    if len(graph.outputs) == 1 and graph.nodes[graph.outputs[0].node].op == "acc":
        return None
    return (
        "the epilogue computes in FP32, which has every whole number up to 2**24 only: use one that returns acc and "
        "nothing else, for the sums themselves, or D in FP32"
    )
