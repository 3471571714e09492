"""Gradients of ops with groups of rows: the steps of :mod:`cutlass_ops.run.backward`, for each group.

The gradient of A is another product by groups, and that of B the product of each group's rows. Nothing here asks the
device where groups end. Rows of no group have a gradient of 0, whatever values a forward or a gradient has there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Expression, Graph
from cutlass_ops.epilogue.nodes import Kind, Node, Output
from cutlass_ops.epilogue.saving import saving
from cutlass_ops.run import traced
from cutlass_ops.run.backward import SeveralSteps, Values
from cutlass_ops.run.portable import Portable

# Columns of ones by which rows are added up: a line of 16 bytes.
_ONES = 8


def require(called: Portable, wrt: frozenset[str]) -> None:
    """Refuse calls whose gradient no kernel computes, before they run. Raises NotImplementedError.

    Such an epilogue numbers rows, or swaps pairs and the gradient would store a tile beside D.
    """
    if Node("row_index") in called.graph.nodes:
        raise NotImplementedError(
            f"{called!r} has no gradient: its epilogue numbers the rows of each group. Pass what depends on that as a "
            "Col or a Tile"
        )
    if called.graph.swaps_pairs and saving(called.graph, wrt, store=True, narrow=False).runs != called.graph:
        raise NotImplementedError(
            f"{called!r} has no gradient: its epilogue swaps pairs of columns, and its backward needs a tile that the "
            "forward would store beside D, which no kernel of groups does. Apply the epilogue to the result instead; "
            "or pass .detach() of the inputs that are multiplied by the product"
        )


def require_lines(b: Tensor) -> None:
    """Raise ValueError if the rows of D's gradient would not be aligned."""
    step = arch.TMA_ALIGNMENT_BYTES // b.element_size()
    if b.shape[-1] % step:
        raise ValueError(
            f"w has {b.shape[-1]} columns, and the backward multiplies the gradient of D, whose rows must begin at "
            f"multiples of {arch.TMA_ALIGNMENT_BYTES} bytes: pad N to a multiple of {step}, or call under "
            "torch.no_grad()"
        )


def _tile(expression: Expression, output: Output, acc: Tensor | None, values: Values) -> Tensor | None:
    """Return the existing tile that an output equals, if there is one."""
    node = expression.nodes[output.node]
    if node.op == "acc":
        return acc
    of_tile = node.op == "input" and any(i.name == node.attr and i.kind is Kind.TILE for i in expression.inputs)
    return values[str(node.attr)] if of_tile else None


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield matrices that kernels multiply and whose sum is x: for FP32, three in BF16, of 8 bits each."""
    if x.dtype != torch.float32:
        yield x
        return
    for _ in range(3):
        part = x.to(torch.bfloat16)
        yield part
        # Nothing is left of an infinity.
        x = (x - part).nan_to_num_(0.0, 0.0, 0.0)


class _Last(torch.autograd.Function):
    """A result computed from two matrices that has no gradient: it raises only if someone differentiates it."""

    @staticmethod
    def forward(ctx, found, x, gradient):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        return found.view_as(found)

    @staticmethod
    def backward(ctx, *_):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        raise NotImplementedError(traced.NO_SECOND_GRADIENT.format("an argument"))


class GroupedStep(SeveralSteps):
    """The backward of a call with groups of rows, each with its own weight."""

    def __init__(self, called: Portable, a: Tensor, b: Tensor, values: Values) -> None:
        self.offsets: Tensor = values["offsets"]
        super().__init__(called, a, b, {name: x for name, x in values.items() if name != "offsets"})

    @functools.cached_property
    def expert(self) -> Tensor:
        """The group of each row; rows of no group have the last one."""
        rows = torch.arange(self.m, dtype=torch.int32, device=self.a.device)
        return torch.searchsorted(self.offsets, rows, right=True).clamp_(max=len(self.offsets) - 1)

    def used(self, x: Tensor) -> Tensor:  # noqa: D102
        rows = torch.arange(self.m, dtype=torch.int32, device=x.device)
        unused = (rows >= self.offsets[-1]).reshape(-1, *(1,) * (x.ndim - 1))
        return x.masked_fill(unused, 0)

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """Return the sum of each group's rows, (E, N), by products with a matrix of ones."""
        sums = [self.of_lines(part.new_ones(self.m, _ONES), part, self.wide)[:, 0] for part in _parts(x)]
        return functools.reduce(torch.add, sums)

    def of_lines(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x.T @ y for each group. No other backward may differentiate it."""
        op = self.called.of_weights(builtin.identity.graph)
        with torch.no_grad():
            (found,) = op.as_list(x.mT, y, self.offsets, out_dtype=dtype)
        return _Last.apply(found, x, y) if torch.is_grad_enabled() else found  # type: ignore[no-untyped-call]

    def add_of_lines(self, x: Tensor, y: Tensor, total: Tensor) -> None:
        """Add x.T @ y to the total of each group."""
        self.called.of_weights(builtin.residual.graph).as_list(x.mT, y, self.offsets, total, out=total)

    def run(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Run the op of a graph for each group."""
        return self.called.of(graph).as_list(a, b, self.offsets, *inputs, out_dtype=dtype or self.a.dtype)

    def _elementwise(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        # A row for each expert becomes a tile, with the expert's row for each row of A.
        spread = {name: values[name][self.expert] for name in self._rows_apart(expression, values)}
        values = values | spread
        kinds = {o.name: o.kind for o in expression.outputs}
        rows = [o for o in expression.outputs if o.kind is Kind.ROW]
        # An existing tile is added up directly.
        found = {o.name: x for o in rows if (x := _tile(expression, o, acc, values)) is not None}
        if len(found) < len(kinds):
            tiles = self._in_tiles_of_rows(expression, spread, [o.name for o in rows], without=list(found))
            found |= super()._elementwise(tiles, acc, values)
        return {
            name: self.sum_of_rows(x) if kinds[name] is Kind.ROW else self.used(x) if kinds[name] is Kind.COL else x
            for name, x in found.items()
        }

    def dense(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any) -> list[Tensor]:
        """Run the op of a graph for all rows together."""
        from cutlass_ops.run.ops import op_of_graph  # late: only kernels need it

        dtype = self.a.dtype
        return op_of_graph(graph).as_list(a, b, *inputs, out_dtype=dtype, **self.over(graph, inputs, dtype))

    def alike(self, name: str, gradient: Tensor, x: Tensor) -> Tensor:
        """Return an input's gradient in the input's shape."""
        return super().alike(name, self.used(gradient) if self.kinds[name] is Kind.TILE else gradient, x)

    def of_a(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """Return the gradient of A."""
        found = super().of_a(leaves)
        return None if found is None else self.used(found)
