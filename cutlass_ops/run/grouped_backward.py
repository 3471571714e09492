"""Gradients of ops with groups of rows: the steps of :mod:`cutlass_ops.run.backward`, for each group.

The gradient of A is another product by groups, and that of B the product of each group's rows. Nothing here asks the
device where groups end. Rows of no group have a gradient of 0: what a forward or a gradient has there is anything.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.derivatives import ACC
from cutlass_ops.epilogue.graph import Expression, Graph
from cutlass_ops.epilogue.graph import expression as expression_of
from cutlass_ops.epilogue.nodes import Kind, Node
from cutlass_ops.run.backward import Step, Values
from cutlass_ops.run.portable import Portable

# Columns of ones by which rows are added up: a line of 16 bytes.
_ONES = 8


def require(called: Portable, b: Tensor) -> None:
    """Refuse a call whose gradient no kernel computes, before it runs.

    Raises
    ------
    NotImplementedError
        If the epilogue numbers rows.
    ValueError
        If the gradient's rows would not be aligned.
    """
    if Node("row_index") in called.graph.nodes:
        raise NotImplementedError(
            f"{called!r} has no gradient: its epilogue numbers the rows of each group. Pass what depends on that as a "
            "Col or a Tile"
        )
    step = arch.TMA_ALIGNMENT_BYTES // b.element_size()
    if b.shape[-1] % step:
        raise ValueError(
            f"w has {b.shape[-1]} columns, and gradients multiply rows as long, which begin at multiples of "
            f"{arch.TMA_ALIGNMENT_BYTES} bytes: pad N to a multiple of {step}, or call under torch.no_grad()"
        )


class GroupedStep(Step):
    """The backward of a call with groups of rows, each with a weight of its own."""

    def __init__(self, called: Portable, a: Tensor, b: Tensor, values: Values) -> None:
        self.called, self.a, self.b = called, a, b
        self.offsets: Tensor = values["offsets"]
        self.values = {name: x for name, x in values.items() if name != "offsets"}
        (self.m, self.k), (self.experts, _, self.n) = a.shape, b.shape
        self.batch = (self.m,)
        self.weights = {ACC: b, **{name: values[name] for name in called.graph.products}}
        self.wide = torch.promote_types(a.dtype, torch.float32)
        self.kinds = {i.name: i.kind for i in called.graph.inputs}

    @functools.cached_property
    def expert(self) -> Tensor:
        """The group of each row; of rows of no group, the last one."""
        rows = torch.arange(self.m, dtype=torch.int32, device=self.a.device)
        return torch.searchsorted(self.offsets, rows, right=True).clamp_(max=self.experts - 1)

    def used(self, x: Tensor) -> Tensor:
        """Return a tensor with zeros in the rows of no group."""
        rows = torch.arange(self.m, dtype=torch.int32, device=x.device)
        unused = (rows >= self.offsets[-1]).reshape(-1, *(1,) * (x.ndim - 1))
        return x.masked_fill(unused, 0)

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """Return the sum of each group's rows, (E, N), by the product with a matrix of ones."""
        ones, op = self.a.new_ones(self.m, _ONES), self.called.of_weights(builtin.identity.graph)
        return op.as_list(ones.mT, x.to(self.a.dtype), self.offsets, out_dtype=self.wide)[0][:, 0]

    def run(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Run the op of a graph for each group."""
        return self.called.of(graph).as_list(a, b, self.offsets, *inputs, out_dtype=dtype or self.a.dtype)

    def in_tiles(self, expression: Expression) -> Expression:
        """Return an expression whose sums are tiles: kernels add up those of one GEMM."""
        outputs = [o._replace(kind=Kind.TILE, reduce=None) for o in expression.outputs]
        return expression_of(expression.inputs, expression.nodes, outputs)

    def summed(self, expression: Expression, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an expression's results, with the sums of each group."""
        kinds = {o.name: o.kind for o in expression.outputs if o.reduce is not None}
        sums = {
            name: self.sum_of_rows(x) if kinds[name] is Kind.ROW else self.used(x.sum(-1, dtype=self.wide))
            for name, x in results.items()
            if name in kinds
        }
        return results | sums

    def _elementwise(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        # A row of each expert is a tile of those of all rows.
        apart = {i.name for i in expression.inputs if i.kind is Kind.ROW and values[i.name].ndim > 1}
        values = values | {name: values[name][self.expert] for name in apart}
        inputs = [i._replace(kind=Kind.TILE) if i.name in apart else i for i in expression.inputs]
        rows = {o.name for o in expression.outputs if o.kind is Kind.ROW}
        outputs = [o._replace(kind=Kind.TILE, reduce=None) if o.name in rows else o for o in expression.outputs]
        found = super()._elementwise(expression_of(inputs, expression.nodes, outputs), acc, values)
        columns = {o.name for o in expression.outputs if o.kind is Kind.COL}
        found |= {name: self.used(x) for name, x in found.items() if name in columns}
        return found | {name: self.sum_of_rows(x) for name, x in found.items() if name in rows}

    def dense(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any) -> list[Tensor]:
        """Run the op of a graph for all rows together."""
        from cutlass_ops.run.ops import op_of_graph  # late: it is of kernels alone

        dtype = self.a.dtype
        return op_of_graph(graph).as_list(a, b, *inputs, out_dtype=dtype, **self.over(graph, inputs, dtype))

    def alike(self, name: str, gradient: Tensor, x: Tensor) -> Tensor:
        """Return an input's gradient in the input's shape."""
        return super().alike(name, self.used(gradient) if self.kinds[name] is Kind.TILE else gradient, x)

    def of_a(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """Return the gradient of A."""
        found = super().of_a(leaves)
        return None if found is None else self.used(found)

    def of_weight(self, gradient: Tensor | None, weight: Tensor, into: Tensor | None = None) -> Tensor | None:
        """Return the gradient of the weights of all groups, in their layout; None if it is added to `into`."""
        if gradient is None:
            return None
        if into is not None:
            first, second, total = (self.a, gradient, into) if into.is_contiguous() else (gradient, self.a, into.mT)
            op = self.called.of_weights(builtin.residual.graph)
            op(first.mT, second, self.offsets, total, out=total)
            return None
        op = self.called.of_weights(builtin.identity.graph)
        # Of weights (E, N, K) passed as w.mT, the gradient is that of w, transposed.
        turned = weight.stride(-2) == 1 and weight.stride(-1) != 1
        first, second = (gradient, self.a) if turned else (self.a, gradient)
        (found,) = op.as_list(first.mT, second, self.offsets, out_dtype=weight.dtype)
        return found.mT if turned else found
