"""Gradients of ops with groups of rows: the steps of :mod:`cutlass_ops.run.backward`, for each group.

The gradient of A is another product by groups, and that of B the product of each group's rows. Nothing here asks the
device where groups end. Rows of no group have a gradient of 0: what a forward or a gradient has there is anything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.derivatives import ACC
from cutlass_ops.epilogue.graph import Expression, Graph
from cutlass_ops.epilogue.graph import expression as expression_of
from cutlass_ops.epilogue.nodes import Kind, Node, Output
from cutlass_ops.epilogue.saving import saving
from cutlass_ops.run import traced
from cutlass_ops.run.backward import Step, Values
from cutlass_ops.run.portable import Portable
from cutlass_ops.run.sizes import surely

# Columns of ones by which rows are added up: a line of 16 bytes.
_ONES = 8


def require(called: Portable, b: Tensor, wrt: frozenset[str]) -> None:
    """Refuse a call whose gradient no kernel computes, before it runs.

    Parameters
    ----------
    called : Portable
        The op.
    b : Tensor
        The weights.
    wrt : frozenset of str
        The inputs whose gradients are wanted.

    Raises
    ------
    NotImplementedError
        If the epilogue numbers rows, or swaps pairs and the gradient would store a tile beside D.
    ValueError
        If the gradient's rows would not be aligned.
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
    step = arch.TMA_ALIGNMENT_BYTES // b.element_size()
    if b.shape[-1] % step:
        raise ValueError(
            f"w has {b.shape[-1]} columns, and the backward multiplies the gradient of D, whose rows must begin at "
            f"multiples of {arch.TMA_ALIGNMENT_BYTES} bytes: pad N to a multiple of {step}, or call under "
            "torch.no_grad()"
        )


def _tile(expression: Expression, output: Output, acc: Tensor | None, values: Values) -> Tensor | None:
    """Return the tile that an output is, if it is one that is there."""
    node = expression.nodes[output.node]
    if node.op == "acc":
        return acc
    of_tile = node.op == "input" and any(i.name == node.attr and i.kind is Kind.TILE for i in expression.inputs)
    return values[str(node.attr)] if of_tile else None


def _parts(x: Tensor) -> Iterator[Tensor]:
    """Yield matrices that kernels multiply and whose sum is a matrix: of one in FP32, three in BF16, of 8 bits each."""
    if x.dtype != torch.float32:
        yield x
        return
    for _ in range(3):
        part = x.to(torch.bfloat16)
        yield part
        # What is left of an infinity is nothing.
        x = (x - part).nan_to_num_(0.0, 0.0, 0.0)


class _Last(torch.autograd.Function):
    """What is computed from two matrices, and has no gradient: only who differentiates it is refused."""

    @staticmethod
    def forward(ctx, found, x, gradient):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN205
        return found.view_as(found)

    @staticmethod
    def backward(ctx, *_):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        raise NotImplementedError(traced.NO_SECOND_GRADIENT.format("an argument"))


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
        """Return the sum of each group's rows, (E, N), by products with a matrix of ones."""
        sums = [self._of_rows(part.new_ones(self.m, _ONES), part, self.wide)[:, 0] for part in _parts(x)]
        return functools.reduce(torch.add, sums)

    def _of_rows(self, x: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the product of each group's rows of two matrices, which no other backward may differentiate."""
        op = self.called.of_weights(builtin.identity.graph)
        with torch.no_grad():
            (found,) = op.as_list(x.mT, gradient, self.offsets, out_dtype=dtype)
        return _Last.apply(found, x, gradient) if torch.is_grad_enabled() else found  # type: ignore[no-untyped-call]

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
        apart = {i.name for i in expression.inputs if i.kind is Kind.ROW and values[i.name].numel() != self.n}
        values = values | {name: values[name][self.expert] for name in apart}
        inputs = [i._replace(kind=Kind.TILE) if i.name in apart else i for i in expression.inputs]
        rows = {o.name for o in expression.outputs if o.kind is Kind.ROW}
        # A tile that is there is added up as it is.
        given = {
            o.name: x
            for o in expression.outputs
            if o.name in rows and (x := _tile(expression, o, acc, values)) is not None
        }
        outputs = [o._replace(kind=Kind.TILE, reduce=None) if o.name in rows else o for o in expression.outputs]
        outputs = [o for o in outputs if o.name not in given]
        found = {**given}
        if outputs:
            found |= super()._elementwise(expression_of(inputs, expression.nodes, outputs), acc, values)
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
        # Of weights (E, N, K) passed as w.mT, the gradient is that of w, transposed.
        turned = surely(weight.stride(-2) == 1) and not surely(weight.stride(-1) == 1)
        first, second = (gradient, self.a) if turned else (self.a, gradient)
        found = self._of_rows(first, second, weight.dtype)
        return found.mT if turned else found
