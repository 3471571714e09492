"""The epilogues and ops of modules, by activation, bias and residual.

Modules look them up when they are made: PyTorch's tracer would compute them again at each trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from cutlass_ops.epilogue import Epilogue, Graph, builtin, canonical, epilogue, functions
from cutlass_ops.epilogue.nodes import Kind, Node, Output
from cutlass_ops.nn.reading import rows, vectors
from cutlass_ops.operand import reference
from cutlass_ops.run import named, ops
from cutlass_ops.run.ops import Op

# By whether there is a bias, and whether there is a residual: a layer may lose its bias.
LinearOps: TypeAlias = tuple[tuple[Op, ...], tuple[Op, ...]]


@epilogue
def _quick_gelu(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return acc * functions.sigmoid(acc * 1.702)


@epilogue
def _relu2(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return functions.square(functions.relu(acc))


@epilogue
def _relu6(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return functions.minimum(functions.relu(acc), 6.0)


@epilogue
def _leaky_relu(acc):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return functions.leaky_relu(acc, 0.01)


class _Activation(NamedTuple):
    """An activation in both languages."""

    written: str | Epilogue  # an operation of one argument, an epilogue of several, or an empty string for none
    function: Callable[[Tensor], Tensor]  # the same in PyTorch


# "none" is no activation.
ACTIVATIONS = {
    "none": _Activation("", lambda x: x),
    "relu": _Activation("relu", F.relu),
    "gelu": _Activation("gelu", F.gelu),
    "gelu_tanh": _Activation("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
    "quick_gelu": _Activation(_quick_gelu, lambda x: x * torch.sigmoid(1.702 * x)),
    "silu": _Activation("silu", F.silu),
    "sigmoid": _Activation("sigmoid", torch.sigmoid),
    "tanh": _Activation("tanh", torch.tanh),
    "hardswish": _Activation("hardswish", F.hardswish),
    "leaky_relu": _Activation(_leaky_relu, F.leaky_relu),
    "mish": _Activation("mish", F.mish),
    "relu2": _Activation(_relu2, lambda x: F.relu(x).square()),
    "relu6": _Activation(_relu6, F.relu6),
    "softplus": _Activation("softplus", F.softplus),
}
# Further names of ``hidden_act`` in Hugging Face's configurations.
ALIASES = {
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "linear": "none",
    "swish": "silu",
}


def known(activation: str | None) -> str:
    """Return an activation's name in :data:`ACTIVATIONS`. Raises ValueError, with the known names, if there is none."""
    name = "none" if activation is None else activation
    name = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(
            f"activation is {activation!r}: use one of {', '.join(ACTIVATIONS)}, or a name of Hugging Face's for one "
            f"of them ({', '.join(ALIASES)}); for another, write an epilogue and pass it to co.nn.Linear as epilogue="
        )
    return name


def activated(activation: str, x: Tensor) -> Tensor:
    """Return the activation of x in PyTorch, by its name in :data:`ACTIVATIONS`."""
    return ACTIVATIONS[activation].function(x)


def written(activation: str | None) -> str | Graph:
    """Return an activation as an operation, or as the graph of several; an empty string for none."""
    found = ACTIVATIONS[known(activation)].written
    return found.graph if isinstance(found, Epilogue) else found


@functools.lru_cache(maxsize=256)
def linear_ops(activation: str | None) -> LinearOps:
    """Return the ops of a layer with an activation. Raises ValueError if the activation is unknown."""
    return _ops_after(_graph_of(activation))


def ops_with(after: Epilogue) -> LinearOps:
    """Return a layer's ops with an epilogue for an activation. Raises TypeError or ValueError if it does not fit."""
    if not isinstance(after, Epilogue):
        raise TypeError(f"epilogue must be a function with @co.epilogue, not {type(after).__name__}")
    graph = after.graph
    further = [o.name for o in graph.outputs[1:]]
    if further:
        raise ValueError(
            f"epilogue has the outputs d, {', '.join(further)}, and a layer returns D alone: call "
            "co.gemm(x, layer.weight.t(), epilogue=...)"
        )
    own = [i.name for i in graph.inputs if i.name in ("bias", "residual")]
    if own:
        raise ValueError(f"epilogue has an input {own[0]}, which the layer adds by itself: leave it out or rename it")
    return _ops_after(graph)


def chosen(
    ops: LinearOps, bias: Tensor | None, residual: Tensor | None, inputs: Sequence[Any] = ()
) -> tuple[Op, list[Any]]:
    """Return the op that adds what is given, and its inputs."""
    op = ops[int(bias is not None)][int(residual is not None)]
    return op, [*vectors(bias), *inputs, *(() if residual is None else (rows(residual),))]


def _graph_of(activation: str | None) -> Graph:
    found = written(activation)
    if not isinstance(found, str):
        return found
    nodes = (Node("acc"), Node(found, (0,))) if found else (Node("acc"),)
    return canonical((), nodes, (Output("d", len(nodes) - 1),))


def _ops_after(graph: Graph) -> LinearOps:
    """Return the ops of D = graph(A @ B + bias) + residual, by whether there is a bias, and a residual."""
    biased = builtin.bias.graph.then(graph)
    without, with_bias = ((_op_of(g), _op_of(g.then(builtin.residual.graph))) for g in (graph, biased))
    return without, with_bias


def _op_of(graph: Graph) -> Op:
    return next((op for op in named.NAMED if op.graph == graph), None) or ops.op_of_graph(graph)


def evaluated(graph: Graph, x: Tensor, d: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Return an epilogue of a layer's sums D (..., N) in PyTorch, in D's dtype. x is A (..., K)."""

    def flat(kind: Kind, value: Any) -> Any:
        if kind is Kind.TILE:
            return value.expand(d.shape).reshape(-1, d.shape[-1])
        return value.expand(d.shape[:-1]).reshape(-1) if kind is Kind.COL else value

    given = {i.name: flat(i.kind, inputs[i.name]) for i in graph.inputs}
    dtype = torch.float64 if d.dtype is torch.float64 else torch.float32
    acc, a = d.reshape(-1, d.shape[-1]), x.reshape(-1, x.shape[-1])
    return reference.evaluate(graph, acc, given, dtype, a=a)["d"].to(d.dtype).reshape(d.shape)


@functools.lru_cache(maxsize=256)
def after_norm(activation: str | None, *, bias: bool) -> Epilogue | None:
    """Return the epilogue after a norm's GEMM; None if there is none."""
    graph = _graph_of(activation)
    graph = builtin.bias.graph.then(graph) if bias else graph
    return None if graph == builtin.identity.graph else Epilogue(graph.title, "", graph)
