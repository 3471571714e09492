"""The gradients of an epilogue, as another expression: its vector-Jacobian product.

The rules of operations are texts in :data:`cutlass_ops.epilogue.operations.OPS`. Here they are read and put together.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue.build import Builder
from cutlass_ops.epilogue.graph import Expression, expression, renumbered
from cutlass_ops.epilogue.names import MAX_LENGTH
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED, OPS, REDUCTIONS

ACC = "a @ b"

# The kinds of gradients that are sums. A scalar's is a sum for each row, which is still to be summed.
_SUMMED = {Kind.ROW: Kind.ROW, Kind.COL: Kind.COL, Kind.SCALAR: Kind.COL}


def gathered_leaf(name: str) -> str:
    """Return the leaf of a gathered value: an input may have the same name."""
    return f"{name}()"


class Vjp(NamedTuple):
    """The gradients of an epilogue for given gradients of its outputs.

    A leaf is :data:`ACC`, the name of an input, or ``"mean_of_a()"`` and the like.
    """

    # Computes the gradients. Its D is the accumulator's gradient. Other leaves whose gradient is 0 have no
    # output.
    expression: Expression
    # Whether the expression's accumulator is A @ B once more, and its products those of A. If not, its
    # accumulator is the gradient of D: then it needs no GEMM, or can be the epilogue of the GEMM that gives that
    # gradient. Gathered values are those of A either way.
    again: bool
    given: dict[str, str]  # by output of the epilogue: the input with the output's gradient
    kept: dict[str, str]  # by output of the epilogue: the input with the output itself
    found: dict[str, str]  # by leaf: the output with its gradient; a scalar's is a column that is still to be summed
    # By leaf: the output of the epilogue whose gradient is the leaf's as it is. The leaf is then not in `found`.
    same: dict[str, str]


def vjp(
    graph: Expression,
    wrt: Collection[str] | None = None,
    *,
    of: Collection[str] | None = None,
    kept: Collection[str] = (),
    in_fp64: bool = False,
) -> Vjp:
    """Return the expression of an epilogue's gradients. Raises ConfigError if an output has none, or a name is unknown.

    `wrt` names the inputs whose gradients are wanted, besides those of the accumulator, products and gathered values;
    by default all. `of` names the outputs with a gradient, by default all that can have one; the gradients of the
    others are 0. `kept` names tiles among the outputs that are still there. If they make the accumulator and the
    products unnecessary, the result reads them. Otherwise it computes A @ B again, and reads none. With `in_fp64`, FP64
    is to compute the gradients: the constants of their rules are then sums of FP32 numbers.

    Examples
    --------
    >>> from cutlass_ops.epilogue import builtin
    >>> found = vjp(builtin.bias_relu.graph)
    >>> found.again, [i.name for i in found.expression.inputs], [o.name for o in found.expression.outputs]
    (True, ['bias', 'grad_d'], ['d', 'grad_bias'])
    >>> vjp(builtin.bias_relu.graph, kept=["d"]).again
    False
    """
    if graph.block_scales:
        raise ConfigError(
            f"{graph.parts_are}, and an operand that has them has no gradient: call under torch.no_grad(), or pass "
            "detached tensors"
        )
    outputs = {o.name: o for o in graph.outputs}
    unknown = [name for name in (*(of or ()), *kept) if name not in outputs]
    unknown += [name for name in wrt or () if name not in {i.name for i in graph.inputs}]
    if unknown:
        raise ConfigError(f"the epilogue has no {', '.join(unknown)}")
    of = differentiable(graph) if of is None else of
    if graph.quantized is not None:
        raise ConfigError(f"d is quantised to {graph.quantized}, through which no gradient passes")
    for name in of:
        if not _has_rule(graph, outputs[name]):
            raise _refusal(name, str(outputs[name].reduce))
    derived = functools.partial(_derived, graph, wrt, of, in_fp64=in_fp64)
    found = derived(kept, again=False) or derived((), again=True)
    assert found is not None
    return found


def differentiable(graph: Expression) -> tuple[str, ...]:
    """Return the names of the outputs that can have a gradient: all but indices."""
    return tuple(o.name for o in graph.outputs if o.reduction is None or REDUCTIONS[o.reduction].result != "i32")


def supported(graph: Expression) -> tuple[str, ...]:
    """Return the names of the outputs whose gradients have a rule."""
    return tuple(o.name for o in graph.outputs if _has_rule(graph, o))


def needs_place(output: Output) -> bool:
    """Whether an output's gradient goes to one place, which another reduction must tell: see :func:`place_of`."""
    return output.reduce is not None and "at" in _reads(REDUCTIONS[output.reduce].vjp)


def place_of(graph: Expression, output: Output) -> Output | None:
    """Return the output that says where an output's value is; None if the epilogue has none."""
    return next((o for o in graph.outputs if o[1:] == (output.node, output.kind, f"arg{output.reduce}")), None)


def _has_rule(graph: Expression, output: Output) -> bool:
    if output.reduce is None:
        return True
    return bool(REDUCTIONS[output.reduce].vjp) and (not needs_place(output) or place_of(graph, output) is not None)


def _refusal(name: str, reduction: str) -> ConfigError:
    if REDUCTIONS[reduction].result == "i32":
        return ConfigError(f"output {name!r}: {reduction} gives indices, which have no gradient")
    return ConfigError(
        f"output {name!r}: the gradient of {reduction} goes to the element that is the result, and the epilogue does "
        f"not say which: return arg{reduction} of the same values as well"
    )


# Replaces the accumulator if the expression must do without it.
_NO_ACC = Node("input", (), "the accumulator")


def _derived(
    graph: Expression,
    wrt: Collection[str] | None,
    of: Collection[str],
    kept: Collection[str],
    *,
    again: bool,
    in_fp64: bool,
) -> Vjp | None:
    """Return the gradients; None if they depend on A, and must not."""
    build, names, inputs = Builder(graph.inputs, simplify=True, in_fp64=in_fp64), Names(graph), list(graph.inputs)

    def take(prefix: str, output: Output, noted: dict[str, str]) -> int:
        """Return the node of a new input that represents an output or its gradient."""
        if output.name not in noted:
            noted[output.name] = names.new(prefix, output.name)
            inputs.append(Input(noted[output.name], output.kind))
            build.kinds[noted[output.name]] = output.kind
        return build.put("input", attr=noted[output.name])

    given: dict[str, str] = {}
    held: dict[str, str] = {}
    there = {o.node: o for o in graph.outputs if o.name in kept and o.reduce is None and not _is_leaf(graph, o)}
    at = _placed(graph, build, {i: take("kept", o, held) for i, o in there.items()}, again=again)

    totals: dict[int, int] = {}

    def contribute(index: int, value: int | None) -> None:
        if value is not None:
            totals[index] = build.put("add", totals[index], value) if index in totals else value

    for output in graph.outputs:
        if output.name not in of:
            continue
        is_acc = output.name == "d" and not again
        values = {"g": build.put("acc") if is_acc else take("grad", output, given), "x": at[output.node]}
        if output.reduce is not None and "r" in _reads(REDUCTIONS[output.reduce].vjp):
            values["r"] = take("kept", output, held)
        if needs_place(output):
            index = build.put("column_index" if output.kind is Kind.COL else "row_index")
            at_output = place_of(graph, output)
            assert at_output is not None
            values |= {"place": build.put("to_float", index), "at": take("kept", at_output, held)}
        rule = "g" if output.reduce is None else REDUCTIONS[output.reduce].vjp
        contribute(output.node, _expanded(rule, build, values))
    for index in reversed(range(len(graph.nodes))):
        info = OPS.get(graph.nodes[index].op)
        if info is None or index not in totals:
            continue
        args = graph.nodes[index].args
        values = {"g": totals[index], "r": at[index], **dict(zip(info.names, (at[a] for a in args), strict=True))}
        for arg, rule in zip(args, info.vjp, strict=True):
            contribute(arg, _expanded(rule, build, values))

    # Tiles that are a gradient of an output as it is.
    alike = {build.put("input", attr=name): o for o, name in given.items() if build.kinds[name] is Kind.TILE}
    if "d" in of and not again:
        alike[build.put("acc")] = "d"
    gathered = {gathered_leaf(name): Kind.COL for name in GATHERED}
    kinds = {ACC: Kind.TILE, **gathered, **{i.name: i.kind for i in graph.inputs}}
    found, same, outputs = {}, {}, [Output("d", build.put("const", attr=0.0))]
    for index, node in enumerate(graph.nodes):
        leaf = str(node.attr) if node.op == "input" else ACC if node.op == "acc" else gathered_leaf(node.op)
        wanted = wrt is None or leaf in wrt or leaf not in build.kinds or kinds[leaf] is Kind.PRODUCT
        if leaf not in kinds or index not in totals or not wanted:
            continue
        kind = _SUMMED.get(kinds[leaf])
        if kind is None and totals[index] in alike:
            same[leaf] = alike[totals[index]]
        elif leaf != ACC:
            found[leaf] = names.new("grad", leaf.removesuffix("()"))
            outputs.append(Output(found[leaf], totals[index], kind or Kind.TILE, kind and "sum"))
        else:
            found[leaf] = "d"
        if leaf == ACC:
            outputs[0] = Output("d", totals[index])

    nodes, _ = renumbered(build.nodes, outputs)
    of_a = {_NO_ACC, *(Node("input", (), name) for name in graph.products)}
    if not again and not of_a.isdisjoint(nodes):
        return None
    used = {node.attr for node in nodes if node.op == "input"}
    read, held = ({o: name for o, name in noted.items() if name in used} for noted in (given, held))
    return Vjp(expression(inputs, build.nodes, outputs), again, read, held, found, same)


def _is_leaf(graph: Expression, output: Output) -> bool:
    """Whether an output is an input or a number, which is there anyway."""
    node = graph.nodes[output.node]
    return node.op != "acc" and node.op not in OPS and not (node.op == "input" and node.attr in graph.products)


def _placed(graph: Expression, build: Builder, there: Mapping[int, int], *, again: bool) -> list[int]:
    """Put an epilogue's values, except those that are there; return the place of each."""
    at: list[int] = []
    for index, node in enumerate(graph.nodes):
        placed = Node(node.op, tuple(at[a] for a in node.args), node.attr)
        if placed.op == "acc" and not again:
            placed = _NO_ACC
        at.append(there[index] if index in there else build.put(placed.op, *placed.args, attr=placed.attr))
    return at


class Names:
    """Names for new inputs and outputs, apart from those of an epilogue."""

    def __init__(self, graph: Expression) -> None:
        self._taken = {*(i.name for i in graph.inputs), *(o.name for o in graph.outputs)}

    def new(self, prefix: str, name: str) -> str:
        """Return a name made of two parts, or a numbered one if that is taken or too long."""
        found = f"{prefix}_{name}"
        if found in self._taken or len(found) > MAX_LENGTH:
            numbered = (f"{prefix}{number}" for number in itertools.count(1))
            found = next(each for each in numbered if each not in self._taken)
        self._taken.add(found)
        return found


# ---- Reading a rule --------------------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.USub: "neg",
    ast.BitAnd: "logical_and",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
    ast.Eq: "eq",
}


def _expanded(rule: str, build: Builder, values: Mapping[str, int]) -> int | None:
    """Return the node of a rule's value; None if that is always 0."""
    if rule == "0":
        return None
    *parts, last = _parsed(rule)
    named = dict(values)
    for part in parts:
        assert isinstance(part, ast.Assign)
        assert isinstance(part.targets[0], ast.Name)
        named[part.targets[0].id] = _value(part.value, build, named)
    assert isinstance(last, ast.Expr)
    return _value(last.value, build, named)


def _reads(rule: str) -> frozenset[str]:
    return frozenset(node.id for part in _parsed(rule) for node in ast.walk(part) if isinstance(node, ast.Name))


@functools.cache
def _parsed(rule: str) -> tuple[ast.stmt, ...]:
    return tuple(ast.parse(rule).body)


def _value(tree: ast.expr, build: Builder, values: Mapping[str, int]) -> int:
    match tree:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=int() | float() as number):
            return build.number(number)
        case ast.UnaryOp(op=operation, operand=x):
            op, arguments = _OPERATORS[type(operation)], [x]
        case ast.BinOp(left=x, op=operation, right=y):
            op, arguments = _OPERATORS[type(operation)], [x, y]
        case ast.Compare(left=x, ops=[operation], comparators=[y]):
            op, arguments = _OPERATORS[type(operation)], [x, y]
        case ast.Call(func=ast.Name(id=op), args=arguments):
            pass
        case _:
            raise ValueError(f"a rule cannot have {ast.unparse(tree)}")
    return build.put(op, *(_value(x, build, values) for x in arguments))
