"""Gradients of ops, by calls of ops: those of :mod:`cutlass_ops.epilogue.derivatives`, in the following steps.

1. The gradients of the accumulator, of products and of inputs, element by element, from what the forward stored
   (:mod:`cutlass_ops.epilogue.saving`). If it stored nothing, by one op that computes A @ B again, with each product by
   a GEMM of its own, as a tile.
2. dA and dB of each product, by a GEMM each. dB has the layout of B. It may be added to a parameter's ``main_grad``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
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
from cutlass_ops.run import batches, reference, sizes, watching
from cutlass_ops.run.portable import Portable
from cutlass_ops.run.sizes import surely
from cutlass_ops.run.tensors import overlap, require_tensor

Values = dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _vjp(graph: Graph, wrt: frozenset[str], of: frozenset[str], kept: frozenset[str]) -> Vjp:
    return derivatives.vjp(graph, wrt, of=of, kept=kept)


@functools.lru_cache(maxsize=1024)
def as_epilogue(expression: Expression) -> Graph | None:
    """Return an expression as the epilogue of a GEMM, its products as tiles; None if it is none."""
    inputs = tuple(i._replace(kind=Kind.TILE) if i.kind is Kind.PRODUCT else i for i in expression.inputs)
    try:
        return Graph(inputs, expression.nodes, expression.outputs)
    except ConfigError:
        return None


@functools.lru_cache(maxsize=1024)
def _as_elementwise(expression: Expression) -> Graph | None:
    """Return an expression as an epilogue that reads no product: its accumulator and products as tiles.

    None if it is no epilogue. The tile that stands for the accumulator is :data:`_GIVEN`; D is always an output.
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


# The name of the gradient of D where it is an input.
_GIVEN = "given_d"


# ---- The forward of one call ---------------------------------------------------------------------------------------


def wanted(names: Sequence[str], tensors: Sequence[Tensor]) -> frozenset[str]:
    """Return the names of the inputs whose gradients are wanted."""
    pairs = zip(names, tensors, strict=True)
    return frozenset(name for name, x in pairs if x.requires_grad and x.is_floating_point())


class Forward(NamedTuple):
    """An op that autograd records, with what its backward reads again.

    Attributes
    ----------
    called : Portable
        The op of the user.
    runs : Portable
        What runs: the same op, or one with a few outputs more.
    saving : Saving
        What it stores.
    hooked : bool
        Whether what it stores passes through hooks of saved tensors, which may keep it.
    """

    called: Portable
    runs: Portable
    saving: Saving
    hooked: bool

    @classmethod
    def of(cls, called: Portable, wrt: frozenset[str], dtype: torch.dtype, *, store: bool) -> Forward:
        """Return how a call is recorded, for the gradients of the accumulator, of products and of the inputs `wrt`."""
        found = saving(called.graph, wrt, store=store, narrow=dtype is torch.float16)
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return cls(called, called if found.runs == called.graph else called.of(found.runs), found, hooked)

    def run(
        self, a: Tensor, b: Tensor, values: Values, out_dtype: torch.dtype | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run it; return the outputs of the user's op, and what the backward reads."""
        products = {name: self.product(a, values[name], values) for name in self.saving.apart}
        results = self.runs.as_list(a, b, *(values | products).values(), out_dtype=out_dtype)
        by_name = {o.name: x for o, x in zip(self.runs.graph.outputs, results, strict=True)}
        by_name |= {output: products[name] for name, output in self.saving.apart.items()}
        return results[: len(self.called.graph.outputs)], [by_name[name] for name in self.saving.kept]

    def product(self, a: Tensor, b: Tensor, values: Values) -> Tensor:
        """Return a @ b, in a's dtype."""
        of_form = [values[name] for name in self.called.form.operands]
        return self.called.of(builtin.identity.graph).as_list(a, b, *of_form, out_dtype=a.dtype)[0]

    def vjp(self, wrt: frozenset[str], of: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> Vjp:
        """Return the expression of the gradients, which reads what is kept.

        Raises
        ------
        NotImplementedError
            If an output with a gradient has no derivative.
        """
        graph = self.saving.graph if set(self.saving.kept) <= set(kept) else self.saving.placed
        try:
            return _vjp(graph, wrt, frozenset(of), frozenset(kept))
        except ConfigError as error:
            raise NotImplementedError(f"{self.called!r} has no gradient: {error}") from None

    def vjp_asked(
        self, wrt: frozenset[str], tensors: Mapping[str, Tensor], of: Mapping[str, Tensor], kept: Mapping[str, Tensor]
    ) -> Vjp:
        """Return the expression of the gradients that the backward that runs is asked for.

        It is without those of inputs if none of them is asked for and nothing else is to be computed, as behind a bias.
        Otherwise it is whole: of a part, the kernel would be another one, which nobody may have compiled.
        """
        inputs = wrt.difference(self.called.graph.products)
        if inputs and not any(is_asked(tensors[name]) for name in inputs):
            alone = self.vjp(wrt - inputs, of, kept)
            if not alone.again and not alone.found:
                return alone
        return self.vjp(wrt, of, kept)

    def spent(self, kept: Mapping[str, Tensor]) -> frozenset[int]:
        """Return the addresses of what is kept for a backward that runs now, and for nothing else.

        What the op returned is the caller's, and a graph that is retained has another backward.
        """
        if self.hooked or torch._C._autograd._get_current_graph_task_keep_graph() or watching.is_watched():
            return frozenset()
        returned = {o.name for o in self.called.graph.outputs}
        own = [x for name, x in kept.items() if name not in returned and not watching.is_special(x)]
        return frozenset(x.data_ptr() for x in own)


def saved_of(ctx: Any) -> list[Tensor]:
    """Return what a forward saved. Autograd lets it go, unless the graph is retained: the list has the only references.

    Otherwise it would lie there until the node's whole backward is done.
    """
    saved = list(ctx.saved_tensors)
    ctx.maybe_clear_saved_tensors()
    return saved


# ---- What a backward is asked for ------------------------------------------------------------------------------------


def is_asked(x: Tensor) -> bool:
    """Whether the backward that runs needs a tensor's gradient.

    ``ctx.needs_input_grad`` says only which tensors required gradients in the forward.
    """
    # A view that was made under torch.no_grad() may require gradients and be no node of the graph.
    if x._is_view() and x.grad_fn is None:
        return True
    try:
        return torch._C._will_engine_execute_node(_node(x))
    except RuntimeError:  # a leaf of which torch.autograd.grad returns the gradient, or a backward without the engine
        return True


def _is_accumulated(parameter: Tensor) -> bool:
    """Whether the backward that runs adds to a parameter's gradient. torch.autograd.grad returns it instead."""
    try:
        return torch._C._will_engine_execute_node(_node(parameter))
    except RuntimeError:
        return False


def _node(x: Tensor) -> Any:
    return torch.autograd.graph.get_gradient_edge(x).node


class MainGrad(NamedTuple):
    """Where the gradient of a parameter's matrix is to be added, as the matrix lies."""

    parameter: Tensor
    total: Tensor


def main_grad(name: str, matrix: Tensor) -> MainGrad | None:
    """Return where a matrix's gradient is to be added: the ``main_grad`` of its parameter, if any.

    Raises
    ------
    TypeError, ValueError
        If it is no tensor that a kernel can add to.
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
    # What is multiplied may be a copy of the parameter that torch.autocast asks for.
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
    # Of a copy that torch.autocast asks for, the parameter itself.
    original = getattr(parameter, "main_grad_of", parameter)
    if all(map(watching.has_values, (total, original))) and overlap(total, original):
        raise ValueError(
            f"main_grad of {name} shares memory with its parameter, which the gradient would change: make it {new()}"
        )


def added(into: Mapping[str, MainGrad | None]) -> dict[str, Tensor]:
    """Return the tensors to which the backward that runs adds gradients, by the name of the matrix."""
    return {name: x.total for name, x in into.items() if x is not None and _is_accumulated(x.parameter)}


def refuse_main_grads(into: Mapping[str, Tensor]) -> None:
    """Refuse gradients that are to be differentiated again and added somewhere.

    Raises
    ------
    NotImplementedError
        If there are any.
    """
    if into:
        raise NotImplementedError(
            f"create_graph=True, and the parameter of {', '.join(into)} has a main_grad, in which a gradient leaves "
            "autograd: remove main_grad"
        )


# ---- The backward of one call --------------------------------------------------------------------------------------


class Step:
    """The backward of one call: its operands, and the ops that it makes calls of.

    Attributes
    ----------
    spent : collection of int
        The addresses of tiles that nothing reads after the one op that reads them: it may write its results there.
    same : collection of str
        The leaves whose gradients are gradients that came in, as they are.
    """

    spent: Collection[int] = ()
    same: Collection[str] = ()

    def __init__(self, called: Portable, a: Tensor, b: Tensor, values: Values) -> None:
        self.called, self.a, self.b, self.values = called, a, b, values
        self.batch, (self.k, self.n) = tuple(a.shape[:-1]), b.shape
        self.m = math.prod(self.batch)
        self.weights: dict[str, Tensor] = {ACC: b, **{name: values[name] for name in called.graph.products}}
        # FP64 is that of tests.
        self.wide = torch.promote_types(a.dtype, torch.float32)

    def run(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Run the op of a graph."""
        dtype = dtype or self.a.dtype
        return self.called.of(graph).as_list(a, b, *inputs, out_dtype=dtype, **self.over(graph, inputs, dtype))

    def over(self, graph: Graph, inputs: Sequence[Any], dtype: torch.dtype) -> dict[str, Any]:
        """Return the `out` of a call whose results overwrite those of its inputs that are spent, if there are any."""
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
        """Return the gradient of each leaf, as far as it is not 0."""
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
            # Such as one of too many outputs, or in FP64 one with reductions.
            if graph is None or self.called.why_not(graph, self.a.dtype) is not None:
                acc = self.product(self.a, self.b, self.wide)
                results = self._elementwise(expression, acc, values)
            else:
                # What is added up afterwards is not rounded before.
                later = tiles is not expression and any(o.reduce is not None for o in expression.outputs)
                listed = self.run(graph, self.a, self.b, *values.values(), dtype=self.wide if later else None)
                results = self.summed(expression, dict(zip((o.name for o in graph.outputs), listed, strict=True)))
        self.same = found.same
        leaves = {leaf: of[output] for leaf, output in found.same.items()}
        leaves |= {leaf: results[output] for leaf, output in found.found.items()}
        # What is multiplied has A's dtype, and repeats no values in memory, as PyTorch's gradient of a sum does.
        multiplied = (leaf for leaf in self.weights if leaf in leaves)
        return leaves | {leaf: leaves[leaf].to(self.a.dtype).contiguous() for leaf in multiplied}

    def as_input(self, kind: Kind | None, value: Tensor) -> Tensor:
        """Return an output, or its gradient, in the shape of an input."""
        return value

    def in_tiles(self, expression: Expression) -> Expression:
        """Return an expression as the op computes it; :meth:`summed` makes of its results what is wanted."""
        return expression

    def summed(self, expression: Expression, results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return an expression's results, of those of :meth:`in_tiles`."""
        return results

    def gradients_behind(self, found: Vjp, a: Tensor, b: Tensor, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the gradient of each leaf, by the GEMM that gives the gradient of D: a @ b."""
        values = self.values | {name: kept[output] for output, name in found.kept.items()}
        graph = as_epilogue(found.expression)
        assert graph is not None
        listed = self.run(graph, a, b, *(values[i.name] for i in graph.inputs))
        results = dict(zip((o.name for o in graph.outputs), listed, strict=True))
        return {leaf: results[output] for leaf, output in found.found.items()}

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
        """Return inputs with numbers as kernels for A's dtype take them: of others, the reference takes FP32."""
        if self.a.dtype != torch.float64:
            return values
        return {n: self.a.new_full((), x) if isinstance(x, float) else x for n, x in values.items()}

    def _by_kernel(self, expression: Expression, acc: Tensor, values: Values) -> dict[str, Tensor] | None:
        """Compute an expression by an epilogue that reads no product; None if it is no epilogue.

        PyTorch would launch a kernel for each operation. This one launches one, which reads and writes each tile once.
        """
        means = {name: gathered_leaf(name) for name in expression.gathered}
        graph = _as_elementwise(_of_columns(expression, tuple(means)))
        if graph is None:
            return None
        values = {**values, _GIVEN: acc, **{_column_of(name): self._flat(Kind.COL, self._mean(name)) for name in means}}
        a, b = self.a.new_empty(self.m, _UNREAD_K), self.a.new_empty(self.n, _UNREAD_K).t()
        listed = self.dense(graph, a, b, *(values[i.name] for i in graph.inputs))
        return dict(zip((o.name for o in graph.outputs), listed, strict=True))

    def dense(self, graph: Graph, a: Tensor, b: Tensor, *inputs: Any) -> list[Tensor]:
        """Run the op of a graph for one GEMM."""
        return self.run(graph, a, b, *inputs)

    def _mean(self, name: str) -> Tensor:
        """Return what is gathered of A's rows, without a copy of A in FP32."""
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
        """Return the gradient of A, of the accumulator's, products' and gathered values' gradients."""
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
        if len(parts) == 1 and not after and parts[0][1].ndim == 2 and _is_col_major(a):
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
        *,
        a: bool,
        b: bool,
    ) -> list[Tensor | None]:
        """Return the gradients of A and B, if they are wanted, and of the epilogue's tensors: None if there is none.

        The order is one in which few tiles are there at once. What is no product comes first. Of several products, each
        gradient is let go when that of its weight is there. With one, the weight's gradient is first: a GEMM with few
        tiles and long sums, whose kernel may need a workspace.
        """
        found: dict[str, Tensor | None] = {}
        inputs = [name for name in tensors if name in wrt and name in leaves]
        a, b = a and is_asked(self.a), b and is_asked(self.b)
        for name in inputs:
            if name not in self.weights:
                found[name] = self.alike(name, leaves.pop(name), tensors[name])
        several = len(self.weights) > 1
        of_a = self.of_a(leaves) if a and several else None
        wanted_weights = {ACC: self.b} if b else {}
        wanted_weights |= {name: tensors[name] for name in inputs if name in self.weights and is_asked(tensors[name])}
        for name, weight in wanted_weights.items():
            found[name] = self.of_weight(leaves.get(name), weight, into.get("b" if name == ACC else name))
            if several:
                leaves.pop(name, None)
        if a and not several:
            self._forget_a(leaves)
            of_a = self.of_a(leaves)
        return [of_a, found.get(ACC), *map(found.get, tensors)]

    def _forget_a(self, leaves: Mapping[str, Tensor]) -> None:
        """Let A go if its gradient reads only its shape: between layers, nothing else may hold it."""
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
        d, a = gradient.reshape(self.m, self.n), self.a.reshape(self.m, self.k)
        if into is not None:
            first, second, total = (a.t(), d, into) if into.is_contiguous() else (d.t(), a, into.t())
            self.called.of(builtin.residual.graph)(first, second, total, out=total)
            return None
        # Of a weight.t(), the gradient is that of the weight, transposed: the weight's has no copy then.
        return self.product(d.t(), a).t() if _is_col_major(weight) else self.product(a.t(), d)


# So many rows are added up at first: in blocks, PyTorch adds without scratch memory.
_BLOCK = 128


def sum_of_rows(tile: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each GEMM's rows: of (..., M, N), (..., N).

    Added up at once, few columns of many rows cost PyTorch scratch memory four times as large as a BF16 tile
    (benchmarks/NOTES.md, "A sum's scratch memory").
    """
    rows = tile.shape[-2]
    whole = rows // _BLOCK * _BLOCK
    if not surely(whole > _BLOCK):
        return tile.sum(-2, dtype=dtype)
    blocks: Tensor = tile.narrow(-2, 0, whole).unflatten(-2, (-1, _BLOCK))  # type: ignore[no-untyped-call]
    total = blocks.sum(-2, dtype=dtype).sum(-2)
    return total if whole == rows else total + tile.narrow(-2, whole, rows - whole).sum(-2, dtype=dtype)


# The extent of K of operands that nobody reads: they say what M and N are.
_UNREAD_K = 8


def has_kernels(a: Tensor) -> bool:
    """Whether kernels serve calls with a tensor like this."""
    return a.is_cuda and a.dtype in (torch.float16, torch.bfloat16) and 0 not in a.shape


def _column_of(name: str) -> str:
    return f"{name}_column"


@functools.lru_cache(maxsize=1024)
def _of_columns(expression: Expression, gathered: tuple[str, ...]) -> Expression:
    """Return an expression that takes as columns what it would gather from A."""
    if not gathered:
        return expression
    given = {Node(name): Node("input", (), _column_of(name)) for name in GATHERED}
    inputs = [*expression.inputs, *(Input(_column_of(name), Kind.COL) for name in gathered)]
    return expression_of(inputs, [given.get(node, node) for node in expression.nodes], expression.outputs)


class _BatchedStep(Step):
    """The backward of a call with batches: what they share gets the sum of their gradients.

    Kernels reduce the D of one GEMM. So a backward that multiplies A @ B again takes its sums of tiles by PyTorch. One
    that does not sees the rows of all batches as those of one D.
    """

    def __init__(self, called: Portable, a: Tensor, b: Tensor, values: Values) -> None:
        self.called, self.a, self.b, self.values = called, a, b, values
        self.lead = tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]
        (rows, self.k), self.n = a.shape[-2:], b.shape[-1]
        self.batch = (*self.lead, rows)
        self.m = math.prod(self.batch)
        self.weights = {ACC: b, **{name: values[name] for name in called.graph.products}}
        self.wide = torch.promote_types(a.dtype, torch.float32)
        self.kinds = {i.name: i.kind for i in called.graph.inputs}
        self.own = {Kind.ROW: (self.n,), Kind.COL: (rows,), Kind.TILE: (rows, self.n), Kind.PRODUCT: (rows, self.n)}

    def in_tiles(self, expression: Expression) -> Expression:
        outputs = [o._replace(kind=Kind.TILE, reduce=None) for o in expression.outputs]
        return expression_of(expression.inputs, expression.nodes, outputs)

    def as_input(self, kind: Kind | None, value: Tensor) -> Tensor:
        return value.unsqueeze(-2) if kind is Kind.ROW else value  # a 1 before N is no batch: see batches.spread

    def summed(self, expression: Expression, results: dict[str, Tensor]) -> dict[str, Tensor]:
        kinds = {o.name: o.kind for o in expression.outputs if o.reduce is not None}
        sums = {
            name: x.sum(-1, dtype=self.wide) if kinds[name] is Kind.COL else sum_of_rows(x, self.wide)
            for name, x in results.items()
            if name in kinds
        }
        return results | sums

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
        if gradient is None:
            return None
        a = self.a if self.a.ndim > 2 else self.a[None]  # two dimensions would be a weight
        is_shared = weight.shape[:-2] != self.lead
        if into is not None and not is_shared:
            first, second, total = (a.mT, gradient, into) if into.is_contiguous() else (gradient.mT, a, into.mT)
            self.called.of(builtin.residual.graph)(first, second, total, out=total)
            return None
        # What batches share is added up before it is rounded.
        dtype = self.wide if is_shared else weight.dtype
        turned = surely(weight.stride(-2) == 1) and not surely(weight.stride(-1) == 1)
        found = self.product(gradient.mT, a, dtype).mT if turned else self.product(a.mT, gradient, dtype)
        found = self._of_shared(found, weight.shape)
        if into is not None:
            into.add_(found)
            return None
        return found.to(weight.dtype)

    def _of_shared(self, gradient: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Add up the gradients of what several batches share."""
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
        apart = {i.name for i in expression.inputs if i.kind is Kind.ROW and values[i.name].numel() != self.n}
        rows = {name: batches.without_ones(Kind.ROW, values[name], self.lead, self.own[Kind.ROW]) for name in apart}
        values = values | {name: x.unsqueeze(-2) for name, x in rows.items()}
        inputs = [i._replace(kind=Kind.TILE) if i.name in apart else i for i in expression.inputs]
        of_batches = any(
            self.kinds[name] is Kind.ROW and isinstance(x, Tensor) and x.numel() != self.n
            for name, x in self.values.items()
        )
        sums = {o.name for o in expression.outputs if of_batches and o.kind is Kind.ROW}
        outputs = [o._replace(kind=Kind.TILE, reduce=None) if o.name in sums else o for o in expression.outputs]
        found = super()._elementwise(expression_of(inputs, expression.nodes, outputs), acc, values)
        return {name: sum_of_rows(x, self.wide) if name in sums else x for name, x in found.items()}

    def _by_batches(self, expression: Expression, acc: Tensor | None, values: Values) -> dict[str, Tensor]:
        """Compute an expression by PyTorch that counts the rows of each batch from 0."""
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
    """Return the backward of a call, of one GEMM or of batches."""
    return (Step if b.ndim == 2 else _BatchedStep)(called, a, b, values)


def _is_col_major(matrix: Tensor) -> bool:
    return matrix.ndim == 2 and surely(matrix.stride(0) == 1) and not surely(matrix.stride(1) == 1)


def _alike(gradient: Tensor, x: Tensor) -> Tensor:
    """Return an input's gradient in the input's shape: what PyTorch broadcasts is summed."""
    if gradient.numel() != x.numel():
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if x.numel() == 1:
            gradient = gradient.sum()
        else:
            same = gradient if gradient.ndim == x.ndim else gradient.reshape(-1, gradient.shape[-1])
            gradient = same.sum_to_size(x.shape[max(x.ndim - same.ndim, 0) :])  # the dimensions before are 1
    # Not a view where none is needed: see Step.alike.
    return (gradient if gradient.shape == x.shape else gradient.reshape(x.shape)).to(x.device, x.dtype)
