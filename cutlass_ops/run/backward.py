"""Gradients of ops, by calls of ops: those of :mod:`cutlass_ops.epilogue.derivatives`, in the following steps.

1. The gradients of the accumulator, of products and of inputs, element by element, from what the forward stored
   (:mod:`cutlass_ops.epilogue.saving`). If it stored nothing, one op computes A @ B again, and each product is a tile
   that a GEMM of its own computes.
2. dA and dB of each product, by a GEMM each. dB has the layout of B. It may be added to a parameter's ``main_grad``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue import builtin, composed, derivatives
from cutlass_ops.epilogue.derivatives import ACC, Vjp, gathered_leaf
from cutlass_ops.epilogue.graph import Expression, Graph, canonical
from cutlass_ops.epilogue.graph import expression as expression_of
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED
from cutlass_ops.epilogue.saving import Saving, saving
from cutlass_ops.operand import batches, reference, sizes, watching
from cutlass_ops.operand.sizes import surely
from cutlass_ops.operand.tensors import overlap, require_tensor
from cutlass_ops.run import tape
from cutlass_ops.run.plan import new_tensor
from cutlass_ops.run.portable import Portable

Values = dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _vjp(graph: Graph, wrt: frozenset[str], of: frozenset[str], kept: frozenset[str], *, in_fp64: bool) -> Vjp:
    return derivatives.vjp(graph, wrt, of=of, kept=kept, in_fp64=in_fp64)


@functools.lru_cache(maxsize=1024)
def as_epilogue(expression: Expression) -> Graph | None:
    """Return an expression as the epilogue of a GEMM, with its products as tiles; None if it cannot be one."""
    inputs = tuple(i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in expression.inputs)
    try:
        return Graph(inputs, expression.nodes, expression.outputs)
    except ConfigError:
        return None


@functools.lru_cache(maxsize=1024)
def _as_elementwise(expression: Expression) -> Graph | None:
    """Return an expression as an epilogue that reads no product: its accumulator and products are tiles.

    None if it cannot be one. The tile that stands for the accumulator is :data:`_GIVEN`; D is always an output.
    """
    if any(i.name == _GIVEN for i in expression.inputs):
        return None
    inputs = [i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in expression.inputs]
    nodes = [Node("input", (), _GIVEN) if node == Node("acc") else node for node in expression.nodes]
    if any(node.op == "acc" for node in expression.nodes):
        inputs.append(Input(_GIVEN, Kind.TILE))
    d, *others = expression.outputs
    try:
        return canonical(inputs, nodes, (Output("d", d.node), *others))
    except ConfigError:
        return None


# The name of the gradient of D if it is an input.
_GIVEN = "given_d"


# ---- The forward of one call ---------------------------------------------------------------------------------------


def wanted(names: Sequence[str], tensors: Sequence[Tensor]) -> frozenset[str]:
    """Return the names of the inputs whose gradients are wanted."""
    pairs = zip(names, tensors, strict=True)
    return frozenset(name for name, x in pairs if x.requires_grad and x.is_floating_point())


@dataclass(frozen=True, eq=False)
class Forward:
    """An op that autograd records, with what its backward reads again."""

    called: Portable  # the user's op
    runs: Portable  # the same op, or one with a few more outputs
    saving: Saving
    # Places in the results of `runs` of what the backward reads. With products apart, some is elsewhere.
    kept_at: tuple[int, ...]
    in_fp64: bool

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def of(cls, called: Portable, wrt: frozenset[str], dtype: torch.dtype, *, store: bool) -> Forward:
        """Return how to record a call, for the gradients of the accumulator, of products and of the inputs `wrt`."""
        found = saving(called.graph, wrt, store=store, narrow=dtype is torch.float16)
        runs = called if found.runs == called.graph else called.of(found.runs)
        outputs = [o.name for o in runs.graph.outputs]
        kept_at = () if found.apart else tuple(map(outputs.index, found.kept))
        return cls(called, runs, found, kept_at, dtype is torch.float64)

    def run(
        self, a: Tensor, b: Tensor, inputs: tuple[Any, ...], out_dtype: torch.dtype | None
    ) -> tuple[Sequence[Tensor], list[Tensor]]:
        """Run it; return the outputs of the user's op, and what the backward reads."""
        count = len(self.called.graph.outputs)
        if self.saving.apart:
            values = dict(zip(self.called.inputs, inputs, strict=True))
            products = {name: self.product(a, values[name], values) for name in self.saving.apart}
            results: Sequence[Tensor] = self.runs.as_list(a, b, *(values | products).values(), out_dtype=out_dtype)
            by_name = {o.name: x for o, x in zip(self.runs.graph.outputs, results, strict=True)}
            by_name |= {output: products[name] for name, output in self.saving.apart.items()}
            return results[:count], [by_name[name] for name in self.saving.kept]
        found = None if watching.is_watched() else self.runs.run_warm(a, b, inputs, None, out_dtype)
        if found is None:
            found = self.runs.as_list(a, b, *inputs, out_dtype=out_dtype)
        results = (found,) if isinstance(found, Tensor) else found
        return results[:count], [results[at] for at in self.kept_at]

    def product(self, a: Tensor, b: Tensor, values: Values) -> Tensor:
        """Return a @ b, in a's dtype."""
        of_form = [values[name] for name in self.called.form.operands]
        return self.called.of(builtin.identity.graph).as_list(a, b, *of_form, out_dtype=a.dtype)[0]

    def vjp(self, wrt: frozenset[str], of: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Vjp:
        """Return the expression of the gradients. Raises NotImplementedError if an output has no derivative."""
        graph = self.saving.graph if set(self.saving.kept) <= set(kept) else self.saving.placed
        try:
            return _vjp(graph, wrt, frozenset(of), frozenset(kept), in_fp64=self.in_fp64)
        except ConfigError as error:
            raise NotImplementedError(f"{self.called!r} has no gradient: {error}") from None

    def vjp_asked(
        self, wrt: frozenset[str], asked: Collection[str], of: Mapping[str, Tensor], kept: Mapping[str, Tensor]
    ) -> Vjp:
        """Return the expression of the gradients that the running backward is asked for.

        It leaves out the gradients of inputs only if none is asked for and nothing else is to be computed, as behind a
        bias. Otherwise it is whole: a partial expression would be another kernel, which may not be compiled.
        """
        inputs = wrt.difference(self.called.graph.products)
        if inputs and inputs.isdisjoint(asked):
            alone = self.vjp(wrt - inputs, of, kept)
            if not alone.again and not alone.found:
                return alone
        return self.vjp(wrt, of, kept)

    def spent(self, kept: Mapping[str, Tensor]) -> frozenset[int]:
        """Return the addresses of what only one backward keeps (:func:`is_spent`), without the op's results."""
        returned = {o.name for o in self.called.graph.outputs}
        own = [x for name, x in kept.items() if name not in returned and not watching.is_special(x)]
        return frozenset(x.data_ptr() for x in own)


def saved_of(ctx: Any) -> list[Tensor]:
    """Return what a forward saved, and let autograd free it, unless the graph is retained.

    The list then has the only references. Without this, autograd would keep it until the node's whole backward is done.
    """
    saved = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


def is_spent() -> bool:
    """Whether only the running backward needs what was saved: a retained graph may have another backward."""
    return not (torch._C._autograd._get_current_graph_task_keep_graph() or watching.is_watched())


# ---- What a backward is asked for ------------------------------------------------------------------------------------


def asked_of(ctx: Any, wanted: Sequence[bool]) -> tuple[bool, ...]:
    """Return which gradients of a node's `wanted` tensors the running backward needs.

    ``ctx.needs_input_grad`` says only which tensors required gradients in the forward.
    """
    return tuple([want and _runs(node) for want, (node, _) in zip(wanted, ctx.next_functions, strict=True)])


def _runs(node: Any, otherwise: bool = True) -> bool:
    """Whether the running backward passes a gradient to a node.

    `otherwise` is the answer without the engine, and for a leaf whose gradient torch.autograd.grad returns.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return otherwise


def _is_accumulated(parameter: Tensor) -> bool:
    """Whether the running backward adds to a parameter's gradient. torch.autograd.grad returns the gradient instead."""
    return _runs(torch.autograd.graph.get_gradient_edge(parameter).node, otherwise=False)


class MainGrad(NamedTuple):
    """Where the gradient of a parameter's matrix is to be added, in the matrix's layout."""

    parameter: Tensor
    total: Tensor


def main_grad(name: str, matrix: Tensor) -> MainGrad | None:
    """Return where a matrix's gradient is to be added: the ``main_grad`` of its parameter, if any.

    Raises TypeError or ValueError if it is no tensor that a kernel can add to.
    """
    parameter = matrix if matrix._base is None else matrix._base
    found = getattr(parameter, "main_grad", None)
    if found is None:
        return None
    require_tensor(f"main_grad of {name}", found)
    whole = sizes.lies_as(matrix, parameter)
    if not whole and not (parameter.ndim > 1 and sizes.lies_as(matrix, parameter.mT)):
        raise ValueError(
            f"{name} has shape {tuple(matrix.shape)} and strides {matrix.stride()}, a view of its parameter "
            f"{tuple(parameter.shape)} that is neither the whole nor its transpose, and the parameter has a main_grad: "
            "pass the parameter or its transpose, or remove main_grad"
        )
    _require_to_add(name, found, parameter)
    of_parameter: Tensor = found
    # A call may multiply by a copy of the parameter, which torch.autocast asks for.
    return MainGrad(getattr(parameter, "main_grad_of", parameter), of_parameter if whole else of_parameter.mT)


def _require_to_add(name: str, total: Tensor, parameter: Tensor) -> None:
    """Require a main_grad that a kernel can add a parameter's gradient to."""
    shape, device = tuple(parameter.shape), parameter.device
    wide = torch.float64 if parameter.dtype is torch.float64 else torch.float32

    def new() -> str:
        where = "" if device.type == "cpu" else f", device={str(device)!r}"
        return f"torch.zeros({shape}, dtype={wide}{where})"

    if total.shape != parameter.shape:
        is_flat = total.ndim == 1 and total.numel() == parameter.numel()
        instead = f"main_grad.view({shape})" if is_flat else new()
        raise ValueError(
            f"main_grad of {name} has shape {tuple(total.shape)}, and its parameter {shape}: make it {instead}"
        )
    if not total.is_contiguous():
        raise ValueError(
            f"main_grad of {name} has shape {shape} and strides {total.stride()}, and kernels add to contiguous memory"
            f": make it {new()}, or a piece of a buffer, buffer[begin:end].view({shape})"
        )
    allowed = (wide,) if wide is torch.float64 else (wide, torch.bfloat16, parameter.dtype)
    if total.dtype not in allowed or total.device != device:
        types = " or ".join(dict.fromkeys(map(str, allowed)))
        raise TypeError(f"main_grad of {name} is {total.dtype} on {total.device}: make it {types} on {device}")
    if total.is_neg():
        raise ValueError(f"main_grad of {name} is a lazy negation: make it main_grad.resolve_neg()")
    if total.is_inference():
        raise ValueError(
            f"main_grad of {name} comes from torch.inference_mode(), outside of which PyTorch changes it no more: make "
            "it main_grad.clone()"
        )
    # The parameter itself, if this is a copy for torch.autocast.
    original = getattr(parameter, "main_grad_of", parameter)
    if all(map(watching.has_values, (total, original))) and overlap(total, original):
        raise ValueError(
            f"main_grad of {name} shares memory with its parameter, which the gradient would change: make it {new()}"
        )


def added(into: Mapping[str, MainGrad | None]) -> dict[str, Tensor]:
    """Return the tensors to which the running backward adds gradients, by the name of the matrix."""
    return {name: x.total for name, x in into.items() if x is not None and _is_accumulated(x.parameter)}


def refuse_main_grads(into: Mapping[str, Tensor]) -> None:
    """Raise NotImplementedError if there are gradients to be differentiated again and added somewhere."""
    if into:
        raise NotImplementedError(
            f"create_graph=True, and the parameter of {', '.join(into)} has a main_grad, in which a gradient leaves "
            "autograd: remove main_grad"
        )


# ---- The backward of one call --------------------------------------------------------------------------------------


class Step:
    """The backward of one call: its operands, and the ops that it calls."""

    spent: Collection[int] = ()  # addresses of tiles that only one op still reads: it may write its results there
    same: Collection[str] = ()  # leaves whose gradients are incoming gradients, unchanged

    def __init__(
        self, called: Portable, a: Tensor, b: Tensor, values: Values, batch: tuple[int, ...] | None = None
    ) -> None:
        self.called, self.a, self.b, self.values = called, a, b, values
        self.batch = tuple(a.shape[:-1]) if batch is None else batch
        self.m, self.k, self.n = math.prod(self.batch), a.shape[-1], b.shape[-1]
        self.weights: dict[str, Tensor] = {ACC: b, **{name: values[name] for name in called.graph.products}}
        self.kinds = {i.name: i.kind for i in called.graph.inputs}
        # Only tests use FP64.
        self.wide = torch.promote_types(a.dtype, torch.float32)

    def run(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Run the op of a graph."""
        dtype = dtype or self.a.dtype
        return self.called.of(graph).as_list(a, b, *inputs, out_dtype=dtype, **self.over(graph, inputs, dtype))

    def over(self, graph: Graph, inputs: Sequence[Any], dtype: torch.dtype) -> dict[str, Any]:
        """Return the `out` of a call whose results overwrite its spent inputs, if there are any."""
        if not self.spent:
            return {}
        pairs = zip(graph.inputs, inputs, strict=True)
        tiles = [x for i, x in pairs if i.kind is Kind.TILE and x.data_ptr() in self.spent and x.dtype == dtype]
        outputs = [o.name for o in graph.outputs if o.reduce is None and not graph.stored_type(o)]
        return {"out": dict(zip(outputs, tiles, strict=False))} if tiles else {}

    def product(self, a: Tensor, b: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Return a @ b."""
        return self.run(builtin.identity.graph, a, b, dtype=dtype)[0]

    def gradients(self, found: Vjp, of: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of each leaf, unless it is 0."""
        given = {name: of[output] for output, name in found.given.items()}
        # An expression computes with FP32 values, and places are whole numbers.
        given |= {
            name: kept[output] if kept[output].is_floating_point() else kept[output].to(self.wide)
            for output, name in found.kept.items()
        }
        expression = found.expression
        kinds = {i.name: i.kind for i in expression.inputs}
        values = {**self.values, **{name: self.as_input(kinds.get(name), x) for name, x in given.items()}}
        values = {i.name: values[i.name] for i in expression.inputs}
        if not found.again:
            results = self._elementwise(expression, of.get("d"), values)
        else:
            for name in expression.products:
                values[name] = self.product(self.a, values[name])
            tiles = self.in_tiles(expression)
            graph = as_epilogue(tiles)
            # Such as an epilogue with too many outputs, or in FP64 one with reductions.
            if graph is None or self.called.why_not(graph, self.a.dtype) is not None:
                acc = self.product(self.a, self.b, self.wide)
                results = self._elementwise(expression, acc, values)
            else:
                # Values that are added up later are not rounded before.
                later = tiles is not expression and any(o.reduce is not None for o in expression.outputs)
                listed = self.run(graph, self.a, self.b, *values.values(), dtype=self.wide if later else None)
                results = self.summed(expression, dict(zip((o.name for o in graph.outputs), listed, strict=True)))
        self.same = found.same
        leaves = {leaf: of[output] for leaf, output in found.same.items()}
        leaves |= {leaf: results[output] for leaf, output in found.found.items()}
        # Multiplied matrices have A's dtype. They repeat no values in memory, unlike PyTorch's gradient of a sum.
        multiplied = (leaf for leaf in self.weights if leaf in leaves)
        return leaves | {leaf: leaves[leaf].to(self.a.dtype).contiguous() for leaf in multiplied}

    def as_input(self, kind: Kind | None, value: Tensor) -> Tensor:
        """Return an output, or its gradient, in the shape of an input."""
        return value

    def in_tiles(self, expression: Expression) -> Expression:
        """Return an expression as the op computes it; :meth:`summed` turns its results into those that are wanted."""
        return expression

    def summed(self, expression: Expression, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an expression's results from those of :meth:`in_tiles`."""
        return results

    def gradients_behind(self, found: Vjp, a: Tensor, b: Tensor, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of each leaf, by the GEMM that computes the gradient of D: a @ b."""
        values = self.values | {name: kept[output] for output, name in found.kept.items()}
        graph = as_epilogue(found.expression)
        assert graph is not None
        listed = self.run(graph, a, b, *(values[i.name] for i in graph.inputs))
        results = dict(zip((o.name for o in graph.outputs), listed, strict=True))
        return {leaf: results[output] for leaf, output in found.found.items()}

    def _elementwise(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        """Compute an expression by PyTorch, for a given accumulator and with products as tiles.

        The results have A's leading dimensions, as an op's have.
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
                # An existing tile is added up directly, and not converted first.
                of_columns = output.kind is Kind.COL
                sums[output.name] = tile.sum(1, dtype=self.wide) if of_columns else sum_of_rows(tile, self.wide)
            elif output.name != "d" or node.op not in ("acc", "const"):
                others.append(output)
        if not others:
            return self._unfolded(expression, sums)
        if has_kernels(self.a):
            found = self._by_kernel(expression, tiles["acc"], flat)
            if found is not None:
                return self._unfolded(expression, found)
        # D comes first, even if nobody reads it.
        d = others[0]._replace(name="d", kind=Kind.TILE, reduce=None)
        wanted = others if others[0].name == "d" else [d, *others]
        rest = expression_of(inputs, expression.nodes, wanted)
        taken = {i.name: flat[i.name] for i in rest.inputs}
        a = self._rows_of_a() if rest.gathered else None
        results = reference.evaluate(rest, tiles["acc"], self._unrounded(taken), self.wide, a=a)
        return self._unfolded(expression, sums | {o.name: results[o.name] for o in others})

    def _unrounded(self, values: Values) -> Values:
        """Return inputs with numbers as kernels for A's dtype take them: the reference rounds other numbers to FP32."""
        if self.a.dtype != torch.float64:
            return values
        return {n: self.a.new_full((), x) if isinstance(x, float) else x for n, x in values.items()}

    def _by_kernel(self, expression: Expression, acc: Tensor, values: Values) -> dict[str, Tensor] | None:
        """Compute an expression by an epilogue that reads no product; None if it cannot be one.

        PyTorch would launch a kernel for each operation. This launches one kernel, which reads and writes each tile
        once.
        """
        means = {name: gathered_leaf(name) for name in expression.gathered}
        graph = _as_elementwise(_of_columns(expression, tuple(means)))
        if graph is None:
            return None
        values = {**values, _GIVEN: acc, **{_column_of(name): self._flat(Kind.COL, self._mean(name)) for name in means}}
        a = _unread(self.a, (self.m, _UNREAD_K), (_UNREAD_K, 1))
        b = _unread(self.a, (_UNREAD_K, self.n), (1, _UNREAD_K))
        listed = self.dense(graph, a, b, *(values[i.name] for i in graph.inputs))
        return dict(zip((o.name for o in graph.outputs), listed, strict=True))

    def dense(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any) -> list[Tensor]:
        """Run the op of a graph for one GEMM."""
        return self.run(graph, a, b, *inputs)

    def _mean(self, name: str) -> Tensor:
        """Return the values gathered from A's rows, without a copy of A in FP32."""
        if name == "mean_of_a":
            return self.a.mean(-1, dtype=self.wide)
        norms: Tensor = torch.linalg.vector_norm(self.a, dim=-1, dtype=self.wide)
        return norms.square() / max(self.k, 1)

    def _rows_of_a(self) -> Tensor:
        """Return A with as many rows as D has."""
        return self.a.reshape(self.m, self.k)

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
        """Return the gradient of A from those of the accumulator, products and gathered values."""
        a, k = self.a, 1 if surely(self.k == 0) else self.k
        parts = [(leaves[leaf], weight) for leaf, weight in self.weights.items() if leaf in leaves]
        after: list[tuple[Graph, tuple[Tensor, ...]]] = []
        mean, square = (leaves.get(gathered_leaf(name)) for name in ("mean_of_a", "mean_square_of_a"))
        if mean is not None:
            after.append((composed.plus_column.graph, (mean / k,)))
        if square is not None:
            after.append((composed.plus_scaled.graph, (a.contiguous(), square * (2.0 / k))))
        if not parts:
            return None if not after else self._means_alone(mean, square)
        if len(parts) == 1 and not after and parts[0][1].ndim == a.ndim == 2 and _is_col_major(a):
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
            (total,) = self.run(graph, d, weight.mT, *inputs, dtype=None if last else self.wide)
        return total

    def _means_alone(self, mean: Tensor | None, square: Tensor | None) -> Tensor:
        a, k = self.a.to(self.wide), max(self.k, 1)
        total = torch.zeros_like(a)
        if mean is not None:
            total = total + mean[..., None] / k
        if square is not None:
            total = total + a * (square[..., None] * (2.0 / k))
        return total.to(self.a.dtype)

    def of_operands(
        self,
        leaves: dict[str, Tensor],
        tensors: Mapping[str, Tensor],
        wrt: frozenset[str],
        into: Mapping[str, Tensor],
        asked: Collection[str],
    ) -> list[Tensor | None]:
        """Return the gradients of A and B, if they are asked for, and of the epilogue's tensors: None if there is none.

        The order keeps few tiles alive at once. What is no product comes first. With several products, each gradient is
        freed as soon as its weight's gradient exists. With one product, the weight's gradient is first: a GEMM with few
        tiles and long sums, whose kernel may need a workspace.
        """
        found: dict[str, Tensor | None] = {}
        inputs = [name for name in tensors if name in wrt and name in leaves]
        a = "a" in asked
        for name in inputs:
            if name not in self.weights:
                found[name] = self.alike(name, leaves.pop(name), tensors[name])
        several = len(self.weights) > 1
        of_a = self.of_a(leaves) if a and several else None
        wanted_weights = {ACC: self.b} if "b" in asked else {}
        wanted_weights |= {name: tensors[name] for name in inputs if name in self.weights and name in asked}
        for name, weight in wanted_weights.items():
            found[name] = self.of_weight(leaves.get(name), weight, into.get("b" if name == ACC else name))
            if several:
                leaves.pop(name, None)
        if a and not several:
            self._forget_a(leaves)
            of_a = self.of_a(leaves)
        return [of_a, found.get(ACC), *map(found.get, tensors)]

    def _forget_a(self, leaves: Mapping[str, Tensor]) -> None:
        """Free A if its gradient reads only its shape: between layers, nothing else may hold it."""
        if any(gathered_leaf(name) in leaves for name in GATHERED):
            return
        if not watching.is_watched() and not watching.is_special(self.a):
            a = self.a
            self.a = torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta")

    def alike(self, name: str, gradient: Tensor, x: Tensor) -> Tensor:
        """Return an input's gradient in the input's shape."""
        found = _alike(gradient, x)
        # A view counts its own references. Autograd would take it for a tensor that nobody else has, keep it, and add
        # the next gradient to it in place: to the caller's as well.
        is_view = found.dtype == gradient.dtype and found.numel() == gradient.numel() and found.shape != gradient.shape
        return found.clone() if is_view and name in self.same else found

    def of_weight(self, gradient: Tensor | None, weight: Tensor, into: Tensor | None = None) -> Tensor | None:
        """Return the gradient of B or of a product's matrix, in its layout; None if it is added to `into`."""
        if gradient is None:
            return None
        a, d = self.in_lines(self.a, self.k), self.in_lines(gradient, self.n)
        if into is None:
            return self.by_layout(a, d, weight, weight.dtype)
        first, second, total = (a, d, into) if into.is_contiguous() else (d, a, into.mT)
        self.add_of_lines(first, second, total)
        return None

    def by_layout(self, a: Tensor, d: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return A.T @ D. For weight.T, it is the transpose of D.T @ A: then the weight's gradient needs no copy."""
        return self.of_lines(d, a, dtype).mT if _is_col_major(weight) else self.of_lines(a, d, dtype)

    def in_lines(self, x: Tensor, columns: int) -> Tensor:
        """Return a matrix with a line for each row of D."""
        return x.reshape(self.m, columns)

    def of_lines(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x.T @ y."""
        return self.product(x.mT, y, dtype)

    def add_of_lines(self, x: Tensor, y: Tensor, total: Tensor) -> None:
        """Add x.T @ y to a tensor."""
        self.called.of(builtin.residual.graph).as_list(x.mT, y, total, out=total)


# Rows that are added up at first: in blocks, PyTorch adds without scratch memory.
_BLOCK = 128
# Elements of a tile for which the scratch memory, 8 MiB, does not matter.
_LITTLE = 1 << 20


def sum_of_rows(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each GEMM's rows: (..., M, N) becomes (..., N).

    If PyTorch adds few columns of many rows at once, it needs scratch memory four times as large as a BF16 tile
    (benchmarks/NOTES.md, "A sum's scratch memory").
    """
    rows = tile.shape[-2]
    whole = rows // _BLOCK * _BLOCK
    if not surely(whole > _BLOCK and tile.numel() > _LITTLE):
        return tile.sum(-2, dtype=dtype)
    blocks: Tensor = tile.narrow(-2, 0, whole).unflatten(-2, (-1, _BLOCK))  # type: ignore[no-untyped-call]
    total = blocks.sum(-2, dtype=dtype).sum(-2)
    return total if whole == rows else total + tile.narrow(-2, whole, rows - whole).sum(-2, dtype=dtype)


# K's extent in operands that nobody reads: they only define M and N.
_UNREAD_K = 8


def _unread(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    if watching.is_watched() or torch.compiler.is_dynamo_compiling():
        return like.new_empty_strided(shape, strides)
    recording = tape.active()
    make = new_tensor if recording is None else functools.partial(recording.make, new_tensor)
    return make(like, shape, strides, like.dtype)


def has_kernels(a: Tensor) -> bool:
    """Whether kernels serve calls with a tensor like this."""
    return a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and 0 not in a.shape


def _column_of(name: str) -> str:
    return f"{name}_column"


@functools.lru_cache(maxsize=1024)
def _of_columns(expression: Expression, gathered: tuple[str, ...]) -> Expression:
    """Return an expression that takes the values gathered from A as columns."""
    if not gathered:
        return expression
    given = {Node(name): Node("input", (), _column_of(name)) for name in GATHERED}
    inputs = [*expression.inputs, *(Input(_column_of(name), Kind.COL) for name in gathered)]
    return expression_of(inputs, [given.get(node, node) for node in expression.nodes], expression.outputs)


class SeveralSteps(Step):
    """The backward of a call with several GEMMs. Kernels reduce the D of one, so sums over them are made of tiles."""

    def in_tiles(self, expression: Expression) -> Expression:  # noqa: D102
        outputs = [o._replace(kind=Kind.TILE, reduce=None) for o in expression.outputs]
        return expression_of(expression.inputs, expression.nodes, outputs)

    def summed(self, expression: Expression, results: dict[str, Tensor]) -> dict[str, Tensor]:  # noqa: D102
        kinds = {o.name: o.kind for o in expression.outputs if o.reduce is not None}
        sums = {
            name: self.sum_of_rows(x) if kinds[name] is Kind.ROW else self.used(x.sum(-1, dtype=self.wide))
            for name, x in results.items()
            if name in kinds
        }
        return results | sums

    def sum_of_rows(self, x: Tensor) -> Tensor:
        """Return the sum of each GEMM's rows: (..., N)."""
        return sum_of_rows(x, self.wide)

    def used(self, x: Tensor) -> Tensor:
        """Return a tensor with zeros in rows that belong to no GEMM."""
        return x

    def _in_tiles_of_rows(
        self, expression: Expression, rows: Mapping[str, Tensor], sums: Collection[str], without: Collection[str] = ()
    ) -> Expression:
        """Return an expression in which the inputs `rows` and the outputs `sums` are tiles."""
        inputs = [i._replace(kind=Kind.TILE) if i.name in rows else i for i in expression.inputs]
        outputs = [o._replace(kind=Kind.TILE, reduce=None) if o.name in sums else o for o in expression.outputs]
        return expression_of(inputs, expression.nodes, [o for o in outputs if o.name not in without])

    def _rows_apart(self, expression: Expression, values: Values) -> list[str]:
        """Return the inputs that have a row for each GEMM."""
        return [i.name for i in expression.inputs if i.kind is Kind.ROW and values[i.name].numel() != self.n]


class _BatchedStep(SeveralSteps):
    """The backward of a call with batches: tensors that batches share get the sum of their gradients.

    If a backward does not multiply A @ B again, it treats the rows of all batches as those of one D.
    """

    def __init__(self, called: Portable, a: Tensor, b: Tensor, values: Values) -> None:
        self.lead = tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]
        rows, n = a.shape[-2], b.shape[-1]
        super().__init__(called, a, b, values, (*self.lead, rows))
        self.own = {Kind.ROW: (n,), Kind.COL: (rows,), Kind.TILE: (rows, n), Kind.PRODUCT: (rows, n)}

    def as_input(self, kind: Kind | None, value: Tensor) -> Tensor:
        return value.unsqueeze(-2) if kind is Kind.ROW else value  # a 1 before N is no batch: see batches.spread

    def alike(self, name: str, gradient: Tensor, x: Tensor) -> Tensor:
        kind = self.kinds[name]
        if kind not in (Kind.ROW, Kind.COL, Kind.TILE) or x.numel() in (1, gradient.numel()):
            return super().alike(name, gradient, x)
        shape = batches.without_ones(kind, x, self.lead, self.own[kind]).shape
        return self._of_shared(gradient, shape).reshape(x.shape).to(x.device, x.dtype)

    def of_a(self, leaves: Mapping[str, Tensor]) -> Tensor | None:
        total = super().of_a(leaves)
        return None if total is None else self._of_shared(total, self.a.shape).to(self.a.dtype)

    def of_weight(self, gradient: Tensor | None, weight: Tensor, into: Tensor | None = None) -> Tensor | None:
        if gradient is None or weight.shape[:-2] == self.lead:
            return super().of_weight(gradient, weight, into)
        # Gradients of shared tensors are added up before they are rounded.
        found = self.by_layout(self.in_lines(self.a, self.k), gradient, weight, self.wide)
        found = self._of_shared(found, weight.shape)
        if into is not None:
            into.add_(found)
            return None
        return found.to(weight.dtype)

    def in_lines(self, x: Tensor, columns: int) -> Tensor:
        return x if x.ndim > 2 else x[None]  # two dimensions would be a weight

    def _of_shared(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Add up the gradients of tensors that several batches share."""
        if sizes.same(gradient.shape, shape):
            return gradient
        lead = gradient.ndim - len(shape)
        summed = [*range(lead), *(lead + at for at, extent in enumerate(shape) if surely(extent == 1))]
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        return gradient.sum(summed, keepdim=True).reshape(shape)

    def _elementwise(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        if Node("row_index") in expression.nodes:
            return self._by_batches(expression, acc, values)
        # A row that differs between batches is a tile of all their rows.
        rows = {
            name: batches.without_ones(Kind.ROW, values[name], self.lead, self.own[Kind.ROW]).unsqueeze(-2)
            for name in self._rows_apart(expression, values)
        }
        of_batches = any(
            self.kinds[name] is Kind.ROW and isinstance(x, Tensor) and x.numel() != self.n
            for name, x in self.values.items()
        )
        sums = {o.name for o in expression.outputs if of_batches and o.kind is Kind.ROW}
        found = super()._elementwise(self._in_tiles_of_rows(expression, rows, sums), acc, values | rows)
        return {name: self.sum_of_rows(x) if name in sums else x for name, x in found.items()}

    def _by_batches(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        """Compute by PyTorch an expression that counts the rows of each batch from 0."""
        if acc is None:  # no gradient of D, so that the expression does not read it
            acc = self.a.new_zeros((1, 1), dtype=self.wide)
        gathered = expression.gathered
        values = values | {_column_of(name): self._mean(name) for name in gathered}
        expression = _of_columns(expression, gathered)
        inputs = [i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in expression.inputs]
        outputs = list(self.in_tiles(expression).outputs)
        if outputs[0].name != "d":  # D comes first, even if nobody reads it
            outputs.insert(0, outputs[0]._replace(name="d"))
        rest = expression_of(inputs, expression.nodes, outputs)
        taken = {i.name: self._spread(i.kind, values[i.name]) for i in rest.inputs}
        results = reference.evaluate(rest, acc.expand(*self.batch, self.n), self._unrounded(taken), self.wide)
        return self.summed(expression, results)

    def _flat(self, kind: Kind, value: Any) -> Any:
        if kind not in (Kind.COL, Kind.TILE, Kind.PRODUCT) or not isinstance(value, Tensor):
            return super()._flat(kind, value)
        value = batches.without_ones(kind, value, self.lead, self.own[kind])
        if kind is Kind.COL:
            return value.expand(self.batch).reshape(self.m)
        return value.expand(*self.batch, self.n).reshape(self.m, self.n)

    def _spread(self, kind: Kind, value: Any) -> Any:
        """Return an input as it is shared, or with all batches."""
        return batches.spread(kind, value, self.lead, self.own[kind]) if kind in self.own else value

    def _rows_of_a(self) -> Tensor:
        return self.a.expand(*self.batch, self.k).reshape(self.m, self.k)


def step_of(called: Portable, a: Tensor, b: Tensor, values: Values) -> Step:
    """Return the backward of a call, for one GEMM or for batches."""
    return (Step if b.ndim == 2 else _BatchedStep)(called, a, b, values)


def _is_col_major(matrix: Tensor) -> bool:
    return surely(matrix.stride(-2) == 1) and not surely(matrix.stride(-1) == 1)


def _alike(gradient: Tensor, x: Tensor) -> Tensor:
    """Return an input's gradient in the input's shape: the dimensions that PyTorch broadcasts are summed."""
    if gradient.numel() != x.numel():
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if x.numel() == 1:
            gradient = gradient.sum()
        else:
            same = gradient if gradient.ndim == x.ndim else gradient.reshape(-1, gradient.shape[-1])
            gradient = same.sum_to_size(x.shape[max(x.ndim - same.ndim, 0) :])  # the dimensions before are 1
    # No view if none is needed: see Step.alike.
    return (gradient if gradient.shape == x.shape else gradient.reshape(x.shape)).to(x.device, x.dtype)
