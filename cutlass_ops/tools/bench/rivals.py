"""Other ways to compute an op, as far as they are installed and compute it.

Each takes A, B and the epilogue's inputs, and returns D or what :func:`cutlass_ops.run.peers.peers` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.run.peers import Peer, peers
from cutlass_ops.tools.workload import Workload
from cutlass_ops.tuner import comparing

# In this order in tables.
NAMES = ("eager", "cublaslt", "compile", "triton", "quack")

# What a hand-written kernel here, and quack's, have: (bias, activation) by the epilogue's graph.
_SIMPLE: Mapping[Graph, tuple[bool, str]] = {
    builtin.identity.graph: (False, ""),
    builtin.bias.graph: (True, ""),
    builtin.bias_relu.graph: (True, "relu"),
}


class Missing(Exception):
    """A rival that is not there. The message says why."""


def rival(name: str, work: Workload) -> Peer:
    """Return a way, one of :data:`NAMES`, to compute an op. Raises Missing if it cannot, or is not installed."""
    return _MAKERS[name](work)


def _pytorch(name: str) -> Callable[[Workload], Peer]:
    def make(work: Workload) -> Peer:
        found = peers(work.graph, work.call.arguments.a.dtype)
        if name == "cublaslt" and work.graph == builtin.identity.graph:
            raise Missing("the same as eager: torch.mm calls cuBLAS")
        if name not in found:
            raise Missing("cuBLASLt has no such epilogue in PyTorch")
        return found[name]

    return make


def _compiled(work: Workload) -> Peer:
    eager = peers(work.graph, work.call.arguments.a.dtype)["eager"]
    compiled = comparing.compiled(lambda a, b, *inputs: eager(a, b, inputs))
    return lambda a, b, inputs: compiled(a, b, *inputs)


def _simple(work: Workload) -> tuple[bool, str]:
    found = _SIMPLE.get(work.graph)
    if found is None:
        raise Missing("written for plain GEMM, bias, and bias with ReLU only")
    if work.call.arguments.a.dtype.itemsize != 2:
        raise Missing("written for 16 bits only")
    return found


def _triton(work: Workload) -> Peer:
    has_bias, activation = _simple(work)
    if find_spec("triton") is None:
        raise Missing("not installed: pip install triton")
    gemm = import_module("cutlass_ops.tools.bench.triton_gemm").gemm

    def run(a: Any, b: Any, inputs: Sequence[Any]) -> Any:
        return gemm(a, b, inputs[0] if has_bias else None, relu=activation == "relu")

    return run


def _quack(work: Workload) -> Peer:
    has_bias, activation = _simple(work)
    if find_spec("quack") is None:
        raise Missing("not installed: pip install quack-kernels")
    quack = import_module("quack.gemm_interface")

    def run(a: Any, b: Any, inputs: Sequence[Any]) -> Any:
        bias = inputs[0] if has_bias else None
        if not activation:
            return quack.gemm(a, b, bias=bias)
        return quack.gemm_act(a, b, bias=bias, activation=activation, store_preact=False)[1]

    return run


_MAKERS: Mapping[str, Callable[[Workload], Peer]] = {
    "eager": _pytorch("eager"),
    "cublaslt": _pytorch("cublaslt"),
    "compile": _compiled,
    "triton": _triton,
    "quack": _quack,
}
