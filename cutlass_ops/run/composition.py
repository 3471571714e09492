"""A call by PyTorch's own operators: these serve it until its kernel is there.

A user would write the same: cuBLAS's product, with the bias that it can add, then one operator for each step of the
epilogue, in D's type. The error is that of such a program. docs/usage.md lists the calls for which PyTorch has no fast
operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cutlass_ops.declare.form import DENSE, GROUPED, MASKED, Form
from cutlass_ops.epilogue.graph import Expression, Graph
from cutlass_ops.epilogue.nodes import D_SCALE, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED, INDICES
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import Call
from cutlass_ops.operand.results import new_strides, quantized_dtype
from cutlass_ops.run import by_pytorch
from cutlass_ops.run.by_pytorch import FP8_DTYPES, Manner, Operands, Value


def run(call: Call) -> None:
    """Compute a checked call into its outputs. Rows that belong to no group stay as they are."""
    arguments = call.arguments
    values = list(arguments.inputs.values())
    found = Composition.of(call)(arguments.a, arguments.b, values)
    for output, x in zip(call.outputs, found, strict=True):
        used = _used(arguments.form, values[0], output) if arguments.form in (GROUPED, MASKED) else None
        output.copy_(x if used is None else torch.where(used, x, output))


# ---- The composition of an epilogue ----------------------------------------------------------------------------------

# The place of a value in the graph, what computes it, and the places of its arguments.
Step: TypeAlias = tuple[int, Callable[..., Value], tuple[int, ...]]


class Composition:
    """Computes the outputs of calls with one epilogue: called with A, B and the inputs, as kernels see them.

    `math` is how FP32 operands are multiplied, or how sums of FP8 products are added up. `dtype` is A's, `dtypes` are
    the outputs', and `numbers` names the inputs that are numbers.
    """

    def __init__(
        self,
        graph: Graph,
        form: Form,
        math: str | None,
        dtype: torch.dtype,
        dtypes: tuple[torch.dtype, ...],
        numbers: frozenset[str],
    ) -> None:
        self.graph, self.form, self.math, self.a, self.dtypes = graph, form, math, dtype, dtypes
        self.names = (*form.operands, *(i.name for i in graph.inputs))
        self.kinds = {i.name: i.kind for i in graph.inputs}
        self.numbers = numbers
        self.users = _users(graph)
        self.wide = _computed_in(graph, dtype, dtypes[0])
        self.norm = self._norm()
        if graph.gathered and self.norm is None and self.wide != torch.float64:
            self.wide = torch.float32  # the product of rows that are not normalised yet may overflow FP16
        eps = None if self.norm is None else self.norm.eps
        self.manner = Manner(self.wide, form, math, eps, graph)
        self.steps = self._steps()
        d, *others = graph.outputs
        # Whether D is a value as it is: nothing is left to do for it, usually.
        self.is_one_value = not others and d.kind is Kind.TILE and d.reduction is None
        self.is_one_value &= quantized_dtype(graph) is None and d.node == self.steps[-1][0]
        self.is_one_value &= graph.nodes[d.node].op != "input"

    @classmethod
    def of(cls, call: Call) -> Composition:
        """Return the composition of a checked call, and of similar calls."""
        arguments = call.arguments
        numbers = frozenset(name for name, x in arguments.inputs.items() if not isinstance(x, Tensor))
        dtypes = tuple(x.dtype for x in call.outputs)
        return _made(call.graph, arguments.form, arguments.math, arguments.a.dtype, dtypes, numbers)

    def __call__(self, a: Tensor, b: Tensor, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        """Compute the outputs, in their dtypes, each contiguous."""
        # Autocast would change the operands' dtypes, unlike for a kernel.
        if torch._C._is_any_autocast_enabled():
            with torch.autocast(a.device.type, enabled=False):
                return self._compute(a, b, inputs)
        return self._compute(a, b, inputs)

    def _compute(self, a: Tensor, b: Tensor, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        of = by_pytorch.Operands(self.manner, a, b, dict(zip(self.names, inputs, strict=True)))
        values: dict[int, Value] = {}
        for at, function, arguments in self.steps:
            values[at] = function(of, *[values[x] for x in arguments])
        if self.is_one_value:
            x = values[at]
            if x.dtype is self.dtypes[0] and x.shape == of.shape and x.is_contiguous():
                return (x,)
        found = {o.name: self._output(o, of, values[o.node]) for o in self.graph.outputs if o.kind is not Kind.BLOCKS_D}
        to = quantized_dtype(self.graph)
        if to is not None:
            d = found["d"].float()
            scaled, scale = reference.quantized(d.flatten(0, -2), to)
            found["d"], found[D_SCALE] = scaled.view(d.shape), scale.view(*d.shape[:-1], scale.shape[-1])
        results: list[Tensor] = []
        for output, dtype in zip(self.graph.outputs, self.dtypes, strict=True):
            x = reference.rounded(found[output.name], dtype)
            if output.kind is not Kind.TILE or not x.is_contiguous():
                strides = new_strides(output.kind, x.shape)
                if x.stride() != strides:
                    x = torch.empty_strided(x.shape, strides, dtype=dtype, device=x.device).copy_(x)
            # A kernel gives each result memory of its own.
            others = (a, b, *inputs, *results)
            results.append(x.clone() if any(isinstance(y, Tensor) and _overlap(x, y) for y in others) else x)
        return tuple(results)

    def _output(self, output: Output, of: Operands, value: Value) -> Tensor:
        x = by_pytorch.as_tensor(value, of)
        if x.shape != of.shape:
            x = x.expand(of.shape)
        if output.reduction is None:
            return x
        dim = -1 if output.kind is Kind.COL else -2
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        found: Tensor = by_pytorch.REDUCED[output.reduction](x, dim, wide)
        return found

    # -- What computes each value --

    def _steps(self) -> tuple[Step, ...]:
        """Return the steps that compute the values that outputs need, in order."""
        found: dict[int, Step] = {}
        wanted = [o.node for o in self.graph.outputs]
        while wanted:
            at = wanted.pop()
            if at not in found:
                function, arguments = self._match(at)
                found[at] = at, function, arguments
                wanted += arguments
        return tuple(found[at] for at in sorted(found))

    def _match(self, at: int) -> tuple[Callable[..., Value], tuple[int, ...]]:
        node = self.graph.nodes[at]
        if self.norm is not None and at in self.norm.normed:
            return functools.partial(by_pytorch.product, name=self.norm.normed[at], left=True), ()
        for pattern in (self._fused_product, self._scaled_product, self._own_backward):
            known = pattern(at)
            if known is not None:
                return known
        if node.op == "acc":
            return by_pytorch.product, ()
        if node.op == "input":
            name = str(node.attr)
            if self.kinds[name] is Kind.PRODUCT:
                return functools.partial(by_pytorch.product, name=name), ()
            return functools.partial(by_pytorch.input_value, name, self.kinds[name]), ()
        if node.op == "const":
            return functools.partial(by_pytorch.constant, node.attr), ()
        if node.op in ("seed", "integer"):
            return functools.partial(by_pytorch.constant, int(node.attr or 0)), ()
        if node.op in INDICES:
            return functools.partial(by_pytorch.index, node.op == "row_index"), ()
        if node.op in GATHERED:
            return functools.partial(by_pytorch.mean, node.op == "mean_square_of_a"), ()
        return functools.partial(by_pytorch.apply, node), node.args

    def _only_user(self, at: int) -> int | None:
        """Return the only node that reads a value; None if several do, or if the value is an output."""
        users = self.users[at]
        return users[0] if len(users) == 1 else None

    def _fused_product(self, at: int) -> tuple[Callable[..., Value], tuple[int, ...]] | None:
        """Match what cuBLASLt computes with the product: a bias, and ReLU or GELU by tanh after it."""
        graph, nodes = self.graph, self.graph.nodes
        node, activation = nodes[at], None
        if node.op in ("relu", "gelu_tanh"):
            activation, below = node.op, node.args[0]
            if self._only_user(below) != at:
                return None
            node = nodes[below]
        if node.op != "add" or self.form != DENSE or self.wide not in (torch.float16, torch.bfloat16):
            return None
        for acc, row in (node.args, node.args[::-1]):
            name = str(nodes[row].attr)
            is_row = nodes[row].op == "input" and self.kinds[name] is Kind.ROW
            if nodes[acc].op == "acc" and is_row and len(self.users[acc]) == 1 and not graph.parts:
                return functools.partial(by_pytorch.biased, name, activation), ()
        return None

    def _scaled_product(self, at: int) -> tuple[Callable[..., Value], tuple[int, ...]] | None:
        """Match what ``torch._scaled_mm`` computes: the product of FP8 operands times two scales."""
        nodes = self.graph.nodes
        outer = nodes[at]
        if outer.op != "mul" or self.form != DENSE or self.a not in FP8_DTYPES:
            return None
        for inner, second in (outer.args, outer.args[::-1]):
            if nodes[inner].op != "mul" or self._only_user(inner) != at or not self._is_factor(second):
                continue
            for acc, first in (nodes[inner].args, nodes[inner].args[::-1]):
                if nodes[acc].op == "acc" and len(self.users[acc]) == 1 and self._is_factor(first):
                    names = str(nodes[first].attr), str(nodes[second].attr)
                    of_a, of_b = names if self.kinds[names[1]] is not Kind.COL else names[::-1]
                    kinds = self.kinds[of_a], self.kinds[of_b]
                    if kinds[0] is not Kind.ROW and kinds[1] is not Kind.COL:
                        return functools.partial(by_pytorch.scaled, of_a, of_b, kinds), ()
        return None

    def _is_factor(self, at: int) -> bool:
        node = self.graph.nodes[at]
        return node.op == "input" and self.kinds[str(node.attr)] in (Kind.ROW, Kind.COL, Kind.SCALAR)

    def _own_backward(self, at: int) -> tuple[Callable[..., Value], tuple[int, ...]] | None:
        """Match what PyTorch's own backward of an activation computes by one operator."""
        if self.graph.nodes[at].op not in ("mul", "where"):
            return None
        for template, leaves, function in _backwards():
            bound: dict[str, int] = {}
            if _matches(template, template.outputs[0].node, self.graph, at, bound):
                return functools.partial(by_pytorch.call, function), tuple(bound[leaf] for leaf in leaves)
        return None

    def _norm(self) -> _Norm | None:
        """Return how A's rows are normalised before they are multiplied, unless something reads other products."""
        graph = self.graph
        if graph.gathered != ("mean_square_of_a",) or self.form != DENSE:
            return None
        from cutlass_ops.epilogue import composed  # late: few calls need it, and a first call waits for its imports

        template = composed.rms_norm.graph
        normed: dict[int, str | None] = {}
        eps: set[int] = set()
        for at, node in enumerate(graph.nodes):
            is_product = node.op == "input" and self.kinds[str(node.attr)] is Kind.PRODUCT
            if node.op != "acc" and not is_product:
                continue
            for user in self.users[at]:
                bound: dict[str, int] = {}
                if user < 0 or not _matches(template, template.outputs[0].node, graph, user, bound):
                    return None
                if bound["acc"] != at:
                    return None
                normed[user] = str(node.attr) if is_product else None
                eps.add(bound["eps"])
        if len(eps) != 1 or not normed:
            return None
        node = graph.nodes[eps.pop()]
        is_number = node.op == "const" or (node.op == "input" and str(node.attr) in self.numbers)
        return _Norm(normed, node) if is_number else None


def _overlap(x: Tensor, y: Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


_made = functools.lru_cache(maxsize=1024)(Composition)


@dataclass(frozen=True)
class _Norm:
    """Where a graph has normalised products, each with the name of its matrix, and what is added to mean squares."""

    normed: Mapping[int, str | None]
    eps: Node


def _users(graph: Expression) -> dict[int, list[int]]:
    """Return the nodes that read each value, and -1 for each output that is the value itself."""
    found: dict[int, list[int]] = {at: [] for at in range(len(graph.nodes))}
    for at, node in enumerate(graph.nodes):
        for argument in node.args:
            found[argument].append(at)
    for output in graph.outputs:
        found[output.node].append(-1)
    return found


def _computed_in(graph: Graph, dtype: torch.dtype, d: torch.dtype) -> torch.dtype:
    """Return the dtype of an epilogue's values."""
    if dtype == torch.float64:
        return torch.float64
    if graph.knows_places or dtype in (torch.float32, torch.int8) or quantized_dtype(graph) is not None:
        return torch.float32
    if d in (torch.float16, torch.bfloat16, torch.float32):
        return d
    return torch.bfloat16 if dtype in FP8_DTYPES else dtype


# ---- Patterns ------------------------------------------------------------------------------------------------------


def _matches(template: Expression, at: int, graph: Expression, node: int, bound: dict[str, int]) -> bool:
    """Whether a node computes what a template's node does; binds the template's leaves to the values that it reads."""
    mine, other = template.nodes[at], graph.nodes[node]
    if mine.op in ("acc", "input"):
        return bound.setdefault(str(mine.attr or mine.op), node) == node
    if mine.op != other.op or mine.attr != other.attr:
        return False
    orders = [other.args, other.args[::-1]] if mine.op in ("add", "mul") else [other.args]
    for order in orders:
        tried = dict(bound)
        if all(_matches(template, x, graph, y, tried) for x, y in zip(mine.args, order, strict=True)):
            bound.update(tried)
            return True
    return False


@functools.cache
def _backwards() -> tuple[tuple[Expression, tuple[str, str], Callable[[Tensor, Tensor], Tensor]], ...]:
    """Return the expressions of activations' gradients, each with two leaves and PyTorch's operator for these.

    The leaves are the gradient of the result, and the saved argument or result.
    """
    from cutlass_ops.epilogue import derivatives

    aten = torch.ops.aten
    of_argument: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "gelu": aten.gelu_backward,
        "gelu_tanh": functools.partial(aten.gelu_backward, approximate="tanh"),
        "silu": aten.silu_backward,
        "hardswish": aten.hardswish_backward,
        "mish": aten.mish_backward,
    }
    of_result: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "relu": lambda g, r: aten.threshold_backward(g, r, 0),
        "sigmoid": aten.sigmoid_backward,
        "tanh": aten.tanh_backward,
    }
    found = []
    for table, kept in ((of_argument, ()), (of_result, ("d",))):
        for op, function in table.items():
            graph = Graph((), (Node("acc"), Node(op, (0,))), (Output("d", 1),))
            vjp = derivatives.vjp(graph, kept=kept)
            leaves = (vjp.given["d"], "acc") if vjp.again else ("acc", vjp.kept["d"])
            found.append((vjp.expression, leaves, function))
    return tuple(found)


def _used(form: Form, ends: Any, output: Tensor) -> Tensor:
    """Return which rows of a result belong to some group, to be broadcast over it."""
    at = 0 if form == GROUPED else 1
    rows = torch.arange(output.shape[at], device=output.device)
    used: Tensor = rows < (ends[-1] if form == GROUPED else ends[:, None])
    return used.reshape(*used.shape, *(1 for _ in output.shape[at + 1 :]))
