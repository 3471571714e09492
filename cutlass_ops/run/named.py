"""The named ops: a GEMM with an epilogue that the library has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import gemm
from cutlass_ops.run.ops import PLAIN, Op, graph_op

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cutlass_ops.base.mma import Math
    from cutlass_ops.run.values import Groups, OperandA, OperandB


class Named(Op):
    """A named op, which takes operand values and groups as :func:`cutlass_ops.gemm` does."""

    if TYPE_CHECKING:

        def __call__(  # noqa: D102
            self,
            a: OperandA,
            b: OperandB,
            *inputs: Tensor,
            groups: Groups | None = None,
            out: Any = None,
            out_dtype: torch.dtype | None = None,
            math: Math | None = None,
            **named: Tensor,
        ) -> Tensor: ...

    def flattened(self, a: Any, b: Any, groups: Any) -> tuple[Op, tuple[Any, ...]]:  # noqa: D102
        return gemm.flattened(self.epilogue, self.name, a, b, groups)


gemm_bias = Named("gemm_bias", builtin.bias)
gemm_bias_relu = Named("gemm_bias_relu", builtin.bias_relu)
gemm_bias_gelu = Named("gemm_bias_gelu", builtin.bias_gelu)
gemm_bias_silu = Named("gemm_bias_silu", builtin.bias_silu)
gemm_residual = Named("gemm_residual", builtin.residual)
gemm_bias_residual = Named("gemm_bias_residual", builtin.bias_residual)
gemm_bias_relu_residual = Named("gemm_bias_relu_residual", builtin.bias_relu_residual)

NAMED: tuple[Op, ...] = (
    PLAIN,
    gemm_bias,
    gemm_bias_relu,
    gemm_bias_gelu,
    gemm_bias_silu,
    gemm_residual,
    gemm_bias_residual,
    gemm_bias_relu_residual,
)

_EXAMPLES = {
    Kind.ROW: "torch.ones(3).bfloat16()",
    Kind.TILE: "torch.ones(2, 3).bfloat16()",
}


def _example(op: Op) -> str:
    """Return the example of a named op, for its docstring."""
    inputs = "".join(f">>> {i.name} = {_EXAMPLES[i.kind]}\n" for i in op.graph.inputs)
    return (
        "\nExamples\n--------\n>>> a = torch.ones(2, 8).bfloat16()\n"
        f">>> b = torch.ones(3, 8).bfloat16().t()  # (K, N), from a weight (N, K)\n{inputs}"
        f">>> co.{op.name}({', '.join(('a', 'b', *op.names))}).shape\ntorch.Size([2, 3])\n"
    )


for _named in NAMED:
    _named.__doc__ = f"{_named.__doc__}{_example(_named)}"


def op_again(name: str, plain: Any) -> Op:
    """Return the op that a program names, by :func:`cutlass_ops.run.portable.find`: the named one, if it is that."""
    graph = Graph.from_program(plain)
    known = (op for op in NAMED if op.name == name and op.graph == graph)
    return next(known, None) or graph_op(name, graph)
