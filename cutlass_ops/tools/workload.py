"""A call of an op with tensors that have data, for commands that run one: `profile` and `bench`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import dtypes, mma
from cutlass_ops.declare import spelling
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import HasGraph, Major
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.operand.call import Call, call_at
from cutlass_ops.run import gated
from cutlass_ops.run.ops import Op, graph_op
from cutlass_ops.ship import shipping
from cutlass_ops.tuner.trial import filled

_SCALAR = 0.5


@dataclass(frozen=True)
class Workload:
    """One op at one problem."""

    op: Op
    graph: Graph  # the op's epilogue
    call: Call  # its tensors have no data
    dtype: str  # what A and B are multiplied as
    rate: float = 1.0  # peak throughput of that type relative to BF16

    @property
    def problem(self) -> Problem:
        """M, N and K."""
        return self.call.problem

    @property
    def moved(self) -> int:
        """Bytes of all operands, inputs and outputs."""
        tensors = [self.call.arguments.a, self.call.arguments.b, *self.call.outputs]
        tensors += [x for x in self.call.arguments.inputs.values() if isinstance(x, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    def draw(self, device: str = "cuda") -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        """Return A, B and the epilogue's inputs: normal numbers, so that the sums have a variance of 1."""
        arguments = self.call.arguments
        scale = self.problem.k**-0.25
        given = [arguments.inputs[i.name] for i in self.graph.inputs]
        inputs = tuple(_filled(x, 1.0, device) if isinstance(x, Tensor) else _SCALAR for x in given)
        return _filled(arguments.a, scale, device), _filled(arguments.b, scale, device), inputs


def workload(asked: str | Op, problem: Problem, dtype: str, a: Major = "row", b: Major = "col") -> Workload:
    """Return an op at a problem."""
    name, graph = (asked, epilogue_named(asked, dtype).graph) if isinstance(asked, str) else (asked.name, asked.graph)
    call = call_at(graph, problem, dtype, a, b, input_dtypes=spelling.INPUT_DTYPES.get(name))
    # Only this op knows that two GEMMs serve calls for which no kernel takes both weights.
    op = gated.swiglu_op(None) if name == "gemm_swiglu" else graph_op(name, graph, math=call.arguments.math)
    element = dtypes.dtype(dtype, mma.OPERANDS)
    found = mma.mma_of(element, element)
    return Workload(op, graph, call, element.name, found.rate if found else 1.0)


def epilogue_named(name: str, dtype: str) -> HasGraph:
    """Return the epilogue of a named op or of an import path; modules of the working folder come first."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return shipping.graph_named(name, dtype)


def _filled(like: Tensor, scale: float, device: str) -> Tensor:
    """Return a tensor with the shape, strides and type of another, and numbers."""
    return filled(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device), scale)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an op a few times, the last of them between profiler marks: ``python -m cutlass_ops.tools.workload``."""
    name, problem, dtype, calls = (sys.argv[1:] if arguments is None else list(arguments))[:4]
    found = workload(name, spelling.problems_of(problem)[0], dtype)
    a, b, inputs = found.draw()
    _between_marks(lambda: found.op(a, b, *inputs), int(calls))


def _between_marks(run: Callable[[], object], calls: int) -> None:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
