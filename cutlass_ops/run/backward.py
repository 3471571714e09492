"""Gradients of ops: a second operator, for calls that autograd records, whose backward calls ops again.

A call without gradients never comes here: :class:`cutlass_ops.run.traced.Traced` chooses the operator. A compiler that
traces through autograd sees only the calls of ops that forward and backward make. The gradients are those of
:mod:`cutlass_ops.epilogue.derivatives`, in the following steps.

1. What the expression of the gradients needs: each product of A by a GEMM of its own, as a tile.
2. The gradients of the accumulator, of products and of inputs, by one op that computes A @ B again. If they need no
   accumulator, as those of a bias, elementwise by PyTorch.
3. dA and dB of each product, by a GEMM each. dB has the layout of B.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue import builtin, derivatives
from cutlass_ops.epilogue.derivatives import ACC, Vjp, gathered_leaf
from cutlass_ops.epilogue.graph import Expression, Graph
from cutlass_ops.epilogue.graph import expression as expression_of
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import operands, reference, traced
from cutlass_ops.run.traced import Portable

Values = dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _vjp(graph: Graph, wrt: frozenset[str], of: frozenset[str], kept: frozenset[str]) -> Vjp:
    return derivatives.vjp(graph, wrt, of=of, kept=kept)


@functools.lru_cache(maxsize=1024)
def _as_epilogue(expression: Expression) -> Graph | None:
    """Return an expression as the epilogue of a GEMM, its products as tiles; None if it is none."""
    inputs = tuple(i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in expression.inputs)
    try:
        return Graph(inputs, expression.nodes, expression.outputs)
    except ConfigError:
        return None


# ---- The operator --------------------------------------------------------------------------------------------------


def _plain(*arguments: Any) -> Any:
    return torch.ops.cutlass_ops.fused_gemm(*arguments)


def _recorded(op, a, b, tensors, numbers, places, out_dtype):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    tensors = list(tensors or ())
    if not traced.is_differentiated(a, b, *tensors):
        return _plain(op, a, b, tensors, numbers, places, out_dtype)
    called = traced.find(op)
    if called.graph.quantized is not None:
        raise ValueError(
            "the epilogue quantises D, and no gradient passes through that: call under torch.no_grad(), or take D in "
            "another dtype and quantise it by cutlass_ops.quantize"
        )
    names = tuple(i.name for at, i in enumerate(called.graph.inputs) if at not in (places or ()))
    _refuse_fp8(called.graph, dict(zip(("a", "b", *names), (a, b, *tensors), strict=True)), out_dtype)
    for name, value in zip(("a", "b", *names), (a, b, *tensors), strict=True):
        operands.require_tensor(name, value)
    called.of(builtin.identity.graph)  # an exact kernel has no backward, which is known before it runs
    return list(_Recorded.apply(called, op, names, numbers, places, out_dtype, a, b, *tensors))  # type: ignore[no-untyped-call]


def _refuse_fp8(graph: Graph, given: Mapping[str, Any], out_dtype: torch.dtype | None) -> None:
    """Refuse gradients of what is in FP8: they would need copies of the operands, transposed, with scales of their own.

    Raises
    ------
    ValueError
        If an operand or a result is in FP8.
    """
    outside = "call under torch.no_grad()"
    if out_dtype is not None and out_dtype.itemsize == 1:
        raise ValueError(
            f"out_dtype is {out_dtype}, and no gradient passes through a result in FP8: {outside}, or take D in "
            "another dtype and quantise it"
        )
    copies = [o.name for o in graph.outputs if o.reduce is None and graph.stored_type(o)]
    if copies:
        raise ValueError(f"the output {copies[0]} is in FP8, and no gradient passes through it: {outside}")
    for name in ("a", "b"):
        if given[name].dtype.itemsize == 1:
            wrt = next(n for n, x in given.items() if traced.is_differentiated(x))
            raise ValueError(
                f"{wrt} requires grad and {name} is {given[name].dtype}: there are no gradients of a product in FP8. "
                f"{outside[0].upper()}{outside[1:]}, or pass {wrt}.detach()"
            )


class _Recorded(torch.autograd.Function):
    """A call of an op, as a node of autograd's graph."""

    @staticmethod
    def forward(ctx, called, op, names, numbers, places, out_dtype, a, b, *tensors):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        graph = called.graph
        results = _plain(op, a, b, list(tensors), numbers, places, out_dtype)
        by_name = {o.name: x for o, x in zip(graph.outputs, results, strict=True)}
        ctx.called, ctx.names, ctx.numbers, ctx.places = called, names, numbers, places
        pairs = zip(names, tensors, strict=True)
        ctx.wrt = frozenset(name for name, x in pairs if x.requires_grad and x.is_floating_point())
        # Tiles that the epilogue stores beside D are there to be used again; of others, only what must be kept.
        beside = [o.name for o in graph.outputs[1:] if o.reduce is None]
        found = _vjp(graph, ctx.wrt, frozenset(derivatives.supported(graph)), frozenset(beside))
        ctx.kept = tuple(found.kept)
        ctx.save_for_backward(a, b, *tensors, *(by_name[name] for name in ctx.kept))
        ctx.mark_non_differentiable(*(x for x in results if not x.is_floating_point()))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN002, ANN205
        a, b, *others = ctx.saved_tensors
        graph, count = ctx.called.graph, len(ctx.names)
        tensors, kept = others[:count], dict(zip(ctx.kept, others[count:], strict=True))
        # Kernels read no repeated values, such as those of the gradient of a sum.
        of = {o.name: g.contiguous() for o, g in zip(graph.outputs, grads, strict=True) if g is not None}
        if not of:
            return (None,) * (8 + count)
        try:
            found = _vjp(graph, ctx.wrt, frozenset(of), frozenset(kept))
        except ConfigError as error:
            raise NotImplementedError(f"{ctx.called!r} has no gradient: {error}") from None
        inputs = traced.inputs_of(tensors, ctx.numbers, ctx.places)
        values = dict(zip((i.name for i in graph.inputs), inputs, strict=True))
        step = _Step(ctx.called, a, b, values)
        leaves = step.gradients(found, of, kept)
        grad_a = step.of_a(leaves) if ctx.needs_input_grad[6] else None
        grad_b = step.of_weight(leaves.get(ACC), b) if ctx.needs_input_grad[7] else None
        of_inputs = []
        for name, x in zip(ctx.names, tensors, strict=True):
            gradient = leaves.get(name) if name in ctx.wrt else None
            if name in graph.products and gradient is not None:
                of_inputs.append(step.of_weight(gradient, x))
            else:
                of_inputs.append(None if gradient is None else _alike(gradient, x))
        return *(None,) * 6, grad_a, grad_b, *of_inputs


traced.declare(f"fused_gemm_grad({traced.ARGUMENTS}, ScalarType? out_dtype) -> Tensor[]", _plain, traced.shapes)
# Not by torch.library.register_autograd, which takes no None for an empty list and would refuse only after the call.
traced.override("fused_gemm_grad", _recorded, "Autograd")
traced.override("fused_gemm_grad", traced.refuse_vmap, "FuncTorchBatched")


# ---- The backward of one call --------------------------------------------------------------------------------------


class _Step:
    """The backward of one call: its operands, and the ops that it makes calls of."""

    def __init__(self, called: Portable, a: Tensor, b: Tensor, values: Values) -> None:
        self.called, self.a, self.b, self.values = called, a, b, values
        self.batch, (self.k, self.n) = tuple(a.shape[:-1]), b.shape
        self.m = math.prod(self.batch)
        self.weights: dict[str, Tensor] = {ACC: b, **{name: values[name] for name in called.graph.products}}
        # FP64 is that of tests.
        self.wide = torch.promote_types(a.dtype, torch.float32)

    def run(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Run the op of a graph."""
        return self.called.of(graph).as_list(a, b, *inputs, out_dtype=dtype or self.a.dtype)

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a @ b."""
        return self.run(builtin.identity.graph, a, b, dtype=dtype)[0]

    def gradients(self, found: Vjp, of: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of each leaf, as far as it is not 0."""
        values = dict(self.values)
        values |= {name: of[output] for output, name in found.given.items()}
        values |= {name: kept[output] for output, name in found.kept.items()}
        expression = found.expression
        values = {i.name: values[i.name] for i in expression.inputs}
        if not found.again:
            results = self._elementwise(expression, of.get("d"), values)
        else:
            for name in expression.products:
                values[name] = self.product(self.a, values[name])
            graph = _as_epilogue(expression)
            if graph is None:  # such as one of too many outputs
                acc = self.product(self.a, self.b, self.wide)
                results = self._elementwise(expression, acc, values)
            else:
                listed = self.run(graph, self.a, self.b, *values.values())
                results = dict(zip((o.name for o in graph.outputs), listed, strict=True))
        leaves = {leaf: of[output] for leaf, output in found.same.items()}
        leaves |= {leaf: results[output] for leaf, output in found.found.items()}
        # What is multiplied has A's dtype.
        return leaves | {leaf: leaves[leaf].to(self.a.dtype) for leaf in self.weights if leaf in leaves}

    def _elementwise(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        """Compute an expression by PyTorch, for a given accumulator; products are there as tiles.

        As of an op, the results have A's leading dimensions.
        """
        flat = {i.name: self._flat(i.kind, values[i.name]) for i in expression.inputs}
        if acc is None:  # no gradient of D, so that the expression does not read it
            acc = self.a.new_zeros((1, 1), dtype=self.wide).expand(*self.batch, self.n)
        tiles = {"acc": self._flat(Kind.TILE, acc), **flat}
        inputs = tuple(i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in expression.inputs)
        sums, others = {}, []
        for output in expression.outputs:
            node = expression.nodes[output.node]
            tile = tiles.get("acc" if node.op == "acc" else str(node.attr) if node.op == "input" else "")
            if output.reduce == "sum" and isinstance(tile, Tensor) and tile.ndim == 2:
                # A tile that is there is added as it is, and not converted first.
                sums[output.name] = tile.sum(1 if output.kind is Kind.COL else 0, dtype=self.wide)
            elif output.name != "d" or node.op not in ("acc", "const"):
                others.append(output)
        if not others:
            return self._unfolded(expression, sums)
        # D comes first, even if nobody reads it.
        d = others[0]._replace(name="d", kind=Kind.TILE, reduce=None)
        wanted = others if others[0].name == "d" else [d, *others]
        rest = expression_of(inputs, expression.nodes, wanted)
        taken = {i.name: flat[i.name] for i in rest.inputs}
        results = reference.evaluate(rest, tiles["acc"], taken, self.wide, a=self.a.reshape(self.m, self.k))
        return self._unfolded(expression, sums | {o.name: results[o.name] for o in others})

    def _unfolded(self, expression: Expression, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        shapes = {Kind.TILE: (*self.batch, self.n), Kind.COL: self.batch, Kind.ROW: (self.n,)}
        return {o.name: results[o.name].reshape(shapes[o.kind]) for o in expression.outputs if o.name in results}

    def _flat(self, kind: Kind, value: Any) -> Any:
        """Return an input as an expression takes it, leading dimensions folded and values repeated."""
        if not isinstance(value, Tensor):
            return value
        if kind in (Kind.SCALAR, Kind.INTEGER):
            return value.reshape(())
        if kind in (Kind.ROW, Kind.COL):
            return value.reshape(-1)
        full = (*self.batch, self.n)
        if value.ndim != len(full):  # leading dimensions are folded already
            full = (self.m, self.n)
        return value.expand(full).reshape(self.m, self.n)

    def of_a(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """Return the gradient of A, of the accumulator's, products' and gathered values' gradients."""
        a, k = self.a, max(self.k, 1)
        parts = [(leaves[leaf], weight) for leaf, weight in self.weights.items() if leaf in leaves]
        after: list[tuple[Graph, tuple[Tensor, ...]]] = []
        mean, square = (leaves.get(gathered_leaf(name)) for name in ("mean_of_a", "mean_square_of_a"))
        if mean is not None:
            after.append((builtin.plus_column.graph, (mean / k,)))
        if square is not None:
            after.append((builtin.plus_scaled.graph, (a.contiguous(), square * (2.0 / k))))
        if not parts:
            return None if not after else self._means_alone(mean, square)
        if len(parts) == 1 and not after and _is_col_major(a):
            d, weight = parts[0]
            return self.product(weight, d.t()).t()
        total: Tensor | None = None
        for at, (d, weight) in enumerate(parts):
            last = at == len(parts) - 1
            steps: list[tuple[Graph, tuple[Tensor, ...]]] = []
            if total is not None:
                steps.append((builtin.residual.graph, (total,)))
            steps += after if last else []
            graph, inputs = builtin.identity.graph, tuple[Tensor, ...]()
            for following, values in steps:
                graph, inputs = graph.then(following), (*inputs, *values)
            (total,) = self.run(graph, d, weight.t(), *inputs, dtype=None if last else self.wide)
        return total

    def _means_alone(self, mean: Tensor | None, square: Tensor | None) -> Tensor:
        a, k = self.a.to(self.wide), max(self.k, 1)
        total = torch.zeros_like(a)
        if mean is not None:
            total = total + mean[..., None] / k
        if square is not None:
            total = total + a * (square[..., None] * (2.0 / k))
        return total.to(self.a.dtype)

    def of_weight(self, gradient: Tensor | None, weight: Tensor) -> Tensor | None:
        """Return the gradient of B or of a product's matrix, in its layout."""
        if gradient is None:
            return None
        d, a = gradient.reshape(self.m, self.n), self.a.reshape(self.m, self.k)
        # Of a weight.t(), the gradient is that of the weight, transposed: the weight's has no copy then.
        return self.product(d.t(), a).t() if _is_col_major(weight) else self.product(a.t(), d)


def _is_col_major(matrix: Tensor) -> bool:
    return matrix.ndim == 2 and matrix.stride(0) == 1 and matrix.stride(1) != 1


def _alike(gradient: Tensor, x: Tensor) -> Tensor:
    """Return an input's gradient in the input's shape: what PyTorch broadcasts is summed."""
    if gradient.numel() != x.numel():
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if x.numel() == 1:
            gradient = gradient.sum()
        else:
            same = gradient if gradient.ndim == x.ndim else gradient.reshape(-1, gradient.shape[-1])
            gradient = same.sum_to_size(x.shape)
    return gradient.reshape(x.shape).to(x.device, x.dtype)
