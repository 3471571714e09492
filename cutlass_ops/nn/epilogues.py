"""The epilogues and ops of modules, by activation, bias and residual.

Modules look them up when they are made: PyTorch's tracer would compute them again at each trace.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

from cutlass_ops.epilogue import Epilogue, Graph, builtin, canonical
from cutlass_ops.epilogue.nodes import Node, Output
from cutlass_ops.run import named, ops
from cutlass_ops.run.ops import Op

LinearOps: TypeAlias = tuple[tuple[Op, ...], tuple[Op, ...]]

# For each name, the operation of the epilogue language; "none" is no activation.
ACTIVATIONS = {
    "none": "",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "silu": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "hardswish": "hardswish",
    "mish": "mish",
    "softplus": "softplus",
}


def operation(activation: str | None) -> str:
    """Return an activation's operation; an empty string for none.

    Raises
    ------
    ValueError
        If the activation is unknown. The message lists the known ones.
    """
    found = ACTIVATIONS.get("none" if activation is None else activation)
    if found is None:
        raise ValueError(f"activation is {activation!r}: use one of {', '.join(ACTIVATIONS)}")
    return found


@functools.lru_cache(maxsize=256)
def linear_graph(activation: str | None, *, bias: bool, residual: bool = False) -> Graph:
    """Return D = activation(A @ B + bias) + residual.

    Raises
    ------
    ValueError
        If the activation is unknown. The message lists the known ones.
    """
    op = operation(activation)
    graph = builtin.bias.graph if bias else builtin.identity.graph
    if op:
        graph = graph.then(canonical((), (Node("acc"), Node(op, (0,))), (Output("d", 1),)))
    return graph.then(builtin.residual.graph) if residual else graph


@functools.lru_cache(maxsize=256)
def linear_op(activation: str | None, *, bias: bool, residual: bool = False) -> Op:
    """Return the op of :func:`linear_graph`."""
    graph = linear_graph(activation, bias=bias, residual=residual)
    return next((op for op in named.NAMED if op.graph == graph), None) or ops.op_of_graph(graph)


def linear_ops(activation: str | None) -> LinearOps:
    """Return a layer's ops by whether there is a bias, and whether there is a residual: a layer may lose its bias."""
    with_bias, without = (
        tuple(linear_op(activation, bias=bias, residual=residual) for residual in (False, True))
        for bias in (True, False)
    )
    return without, with_bias


@functools.lru_cache(maxsize=256)
def after_norm(activation: str | None, *, bias: bool) -> Epilogue | None:
    """Return what follows a norm's GEMM; None if nothing does."""
    graph = linear_graph(activation, bias=bias)
    return None if graph == builtin.identity.graph else Epilogue.of(graph.title, "", graph)
