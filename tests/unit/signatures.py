"""Signatures of calls, for tests of what is decided by them."""

from functools import cache

import cutlass_ops as co
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run.registry import OpSignature

H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")
H200 = Device((9, 0), 132, "NVIDIA H200")
A100 = Device((8, 0), 108, "NVIDIA A100-SXM4-80GB")


@co.epilogue
def statistics(acc, bias: co.Row):
    """A reduction over each side, and the value before the activation."""
    pre = acc + bias
    return {"d": co.relu(pre), "pre": pre, "square": co.sum_square(pre, dim=1), "top": co.max(pre, dim=0)}


@cache
def signature(epilogue=builtin.bias_relu, dtype="bf16", majors=("row", "col"), *, a=8, b=8, d=8, d_dtype=None):
    """Operand types of a call; ``a``, ``b`` and ``d`` are alignments in elements."""
    graph = epilogue.graph
    result = Operand.of(f"{d_dtype or dtype}.row")
    result = Operand(result.dtype, "row", min(d, result.alignment))
    vector = Operand(Operand.of(dtype).dtype, "row", 1)
    return OpSignature(
        epilogue=graph,
        a=Operand.of(f"{dtype}.{majors[0]}.align{a}"),
        b=Operand.of(f"{dtype}.{majors[1]}.align{b}"),
        d=result,
        inputs=tuple(result if i.kind is Kind.TILE else vector for i in graph.inputs),
        outputs=tuple(result if o.reduce is None else Operand.of("f32.align1") for o in graph.outputs[1:]),
    )
