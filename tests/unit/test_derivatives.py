"""Gradients of epilogues: each operation's rule, and whole expressions, against PyTorch's autograd."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import given
from hypothesis import strategies as st

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue import Col, Integer, Row, Scalar, Tile, builtin, composed, epilogue, functions
from cutlass_ops.epilogue.derivatives import ACC, differentiable, vjp
from cutlass_ops.epilogue.graph import Graph, canonical, expression
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import OPS, REDUCTIONS, Type
from cutlass_ops.operand import reference
from cutlass_ops.operand.reference import evaluate
from tests.strategies import PATIENT, programs

F64 = torch.float64
ROOT = Path(__file__).parents[2]

# What differentiates as PyTorch's own function does, where the reference computes another way.
PYTORCH = {
    **reference._FUNCTIONS,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "sign": torch.sign,
    "cast": lambda x: x,  # PyTorch rounds the gradient as well
}
# Ties, kinks and zeros of both signs, and what is around them.
POINTS = [-25.0, -3.5, -3.0, -2.0, -1.0, -0.75, -0.5, -0.0, 0.0, 0.25, 0.5, 1.0, 2.0, 2.5, 3.0, 4.0, 20.0, 25.0]
# Where PyTorch's own rules give NaN or infinity on both sides: part of what is compared.
FLOATS = [name for name, info in OPS.items() if info.signatures[0] == ((Type.FLOAT,) * info.arity, Type.FLOAT)]


def single(name):
    """The epilogue of one operation: of the accumulator and further tiles."""
    names = ("y", "z")[: OPS[name].arity - 1]
    attr = "bf16" if name == "cast" else None
    nodes = [Node("acc"), *(Node("input", (), n) for n in names), Node(name, tuple(range(OPS[name].arity)), attr)]
    return canonical([Input(n, Kind.TILE) for n in names], nodes, [Output("d", len(nodes) - 1)])


def gradients(graph, acc, inputs, grads, kept=()):
    """What the derived expression gives, by leaf."""
    acc = acc.detach()
    found = vjp(graph, kept=kept)
    outputs = evaluate(graph, acc, inputs, F64)
    values = {name: inputs[name] for name in inputs}
    values |= {name: grads[o] for o, name in found.given.items()}
    values |= {name: outputs[o].detach() for o, name in found.kept.items()}
    wanted = {i.name: values[i.name] for i in found.expression.inputs}
    results = evaluate(found.expression, acc if found.again else grads["d"], wanted, F64)
    return {leaf: results[o] for leaf, o in found.found.items()} | {leaf: grads[o] for leaf, o in found.same.items()}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_rule_gives_what_pytorch_s_autograd_gives(name, kept):
    points = torch.tensor(POINTS, dtype=F64)
    n = len(POINTS)
    values = [points[:, None].expand(n, n), points.expand(n, n)][: OPS[name].arity]
    values = [x.clone().requires_grad_() for x in values]
    g = torch.linspace(0.5, 1.5, n * n, dtype=F64).reshape(n, n)
    d = PYTORCH[name](*values)
    wanted = torch.autograd.grad(d, values, g, materialize_grads=True) if d.requires_grad else [x * 0 for x in values]
    graph = single(name)
    inputs = {i.name: x.detach() for i, x in zip(graph.inputs, values[1:], strict=True)}
    found = gradients(graph, values[0], inputs, {"d": g}, ["d"] if kept else [])
    for leaf, x in zip((ACC, *inputs), wanted, strict=True):
        if leaf not in found:  # no output: it is 0 everywhere
            assert not x.any(), leaf
            continue
        # Constants are FP32.
        torch.testing.assert_close(
            found[leaf], x, rtol=2e-7, atol=2e-7, equal_nan=True, msg=lambda text, leaf=leaf: f"{leaf}: {text}"
        )


def test_the_points_have_every_kink_and_tie():
    assert {-3.0, 3.0, 0.0, 20.0} < set(POINTS)
    # The others take or give truth values, or numbers that are not FP32: they have tests of their own.
    assert set(OPS) - set(FLOATS) == {
        *("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not", "isnan"),
        *("where", "to_float", "uniform"),
    }


def test_an_operation_has_a_rule_for_each_argument_and_none_between_types():
    for info in OPS.values():
        assert len(info.vjp) == info.arity
        for types, result in info.signatures:
            assert all(r == "0" for of, r in zip(types, info.vjp, strict=True) if (of, result).count(Type.FLOAT) == 1)


def test_every_rule_is_documented():
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", text[text.index("## Rules") :], re.MULTILINE))
    rules = {name: info.vjp for name, info in OPS.items()} | {
        n: (each.vjp,) for n, each in REDUCTIONS.items() if each.vjp
    }
    assert rows == {name: ", ".join(r if r == "0" else f"`{r}`" for r in each) for name, each in rules.items()}


@epilogue
def chosen(acc, x: Tile, y: Tile):
    inside = (acc > x) & ~(y >= 1.0) | functions.isnan(y)
    counted = inside * 2.0 + functions.column_index() * 0.5
    return functions.where(inside, x * y, acc * functions.sign(y)) * counted


@epilogue
def turned(acc, position: Col, frequency: Row, seed: Integer):
    angle = position * frequency
    kept = functions.uniform(seed) >= 0.5
    z = acc * functions.cos(angle) + functions.swap_pairs(acc) * functions.sin(angle)
    return functions.where(kept, z, 0.0)


@pytest.mark.parametrize(
    ("traced", "shapes"), [(chosen, {"x": (5, 6), "y": (5, 6)}), (turned, {"position": (5,), "frequency": (6,)})]
)
def test_conditions_neighbours_and_random_numbers(traced, shapes):
    torch.manual_seed(0)
    acc, g = torch.randn(5, 6, dtype=F64).requires_grad_(), torch.randn(5, 6, dtype=F64)
    inputs = {name: torch.randn(shape, dtype=F64).requires_grad_() for name, shape in shapes.items()}
    seed = {"seed": 7} if traced is turned else {}
    d = evaluate(traced.graph, acc, inputs | seed, F64)["d"]
    wanted = torch.autograd.grad(d, [acc, *inputs.values()], g)
    found = gradients(traced.graph, acc, {name: x.detach() for name, x in inputs.items()} | seed, {"d": g})
    assert set(found) == {ACC, *inputs}
    for leaf, value in zip((ACC, *inputs), wanted, strict=True):
        torch.testing.assert_close(found[leaf], value)


@epilogue
def wide(acc, bias: Row, scale: Col, residual: Tile, alpha: Scalar):
    y = functions.maximum(acc + bias, -residual) * scale
    return {
        "d": functions.silu(y) * alpha + residual,
        "pre": y,
        "sums": functions.sum(y, dim=1),
        "squares": functions.sum_square(y, dim=0),
        "logs": functions.logsumexp(y * alpha, dim=1),
        "best": functions.argmax(y, dim=1),
    }


SHAPES = {Kind.ROW: (4,), Kind.COL: (5,), Kind.TILE: (5, 4), Kind.SCALAR: ()}


@pytest.mark.parametrize("kept", [[], ["pre"], ["d"]])
def test_reductions_and_every_kind_of_input(kept):
    torch.manual_seed(1)
    acc = torch.randn(5, 4, dtype=F64, requires_grad=True)
    inputs = {i.name: torch.randn(SHAPES[i.kind], dtype=F64, requires_grad=True) for i in wide.inputs}
    outputs = evaluate(wide.graph, acc, inputs, F64)
    of = differentiable(wide.graph)
    assert of == ("d", "pre", "sums", "squares", "logs")
    grads = {name: torch.randn_like(outputs[name]) for name in of}
    wanted = torch.autograd.grad([outputs[n] for n in of], [acc, *inputs.values()], [grads[n] for n in of])
    found = gradients(wide.graph, acc, {n: x.detach() for n, x in inputs.items()}, grads, kept)
    found["alpha"] = found["alpha"].sum()  # a scalar's is a column that is still to be summed
    for leaf, value in zip((ACC, *inputs), wanted, strict=True):
        torch.testing.assert_close(found[leaf], value)


def test_what_is_kept_replaces_the_accumulator():
    @epilogue
    def layer(acc, bias: Row):
        pre = acc + bias
        return {"d": functions.gelu(pre), "pre": pre}

    again, from_kept = vjp(layer.graph, of=["d"]), vjp(layer.graph, of=["d"], kept=["pre"])
    assert (again.again, again.given, again.kept) == (True, {"d": "grad_d"}, {})
    assert (from_kept.again, from_kept.given, from_kept.kept) == (False, {}, {"pre": "kept_pre"})
    # D alone does not tell what x was, and the sign of relu's is enough.
    assert vjp(layer.graph, of=["d"], kept=["d"]).again
    assert not vjp(builtin.bias_relu.graph, kept=["d"]).again

    # The GEMM that gives the gradient of D can have it as its epilogue.
    @epilogue
    def next_layer(acc, residual: Tile):
        return acc + residual

    graph = Graph(*(getattr(from_kept.expression, part) for part in ("inputs", "nodes", "outputs")))
    assert next_layer.graph.then(graph).inputs == (*next_layer.inputs, *graph.inputs)


def test_a_linear_epilogue_needs_nothing_and_passes_gradients_on():
    found = vjp(builtin.bias_residual.graph)
    assert (found.again, found.expression.inputs, found.given, found.kept) == (False, (), {}, {})
    assert (found.found, found.same) == ({"bias": "grad_bias"}, {ACC: "d", "residual": "d"})


def test_only_what_is_wanted_is_computed():
    found = vjp(builtin.bias_relu_residual.graph, wrt=["residual"])
    assert (found.found, found.same) == ({ACC: "d"}, {"residual": "d"})
    assert [o.name for o in found.expression.outputs] == ["d"]
    assert vjp(wide.graph, of=["sums"]).given == {"sums": "grad_sums"}
    for name in ("nothing", "d"):
        with pytest.raises(ConfigError, match=f"has no {name}$"):
            vjp(builtin.bias_relu.graph, wrt=[name])


def test_products_and_gathered_values_are_leaves():
    found = vjp(composed.swiglu.graph)
    assert (found.again, found.found) == (True, {ACC: "d", "up": "grad_up"})
    found = vjp(composed.layer_norm.graph, wrt=["column_sum"])
    assert set(found.found) == {ACC, "mean_of_a()", "mean_square_of_a()", "column_sum"}


def test_names_of_users_are_left_alone():
    @epilogue
    def taken(x, acc: Row, grad_acc: Row, mean_of_a: Col):
        return {"d": functions.tanh(x * acc) * grad_acc * mean_of_a * functions.mean_of_a(), "grad_d": x}

    found = vjp(taken.graph)
    assert set(found.found) == {ACC, "acc", "grad_acc", "mean_of_a", "mean_of_a()"}
    names = [i.name for i in found.expression.inputs] + [o.name for o in found.expression.outputs]
    assert len(set(names)) == len(names)
    assert {"acc", "grad_acc", "mean_of_a", "grad1"} <= set(names)
    name = "x" * 64
    long = canonical(
        [Input(name, Kind.ROW)], [Node("acc"), Node("input", (), name), Node("mul", (0, 1))], [Output("d", 2)]
    )
    assert vjp(long).found[name] == "grad1"


@pytest.mark.parametrize("name", [name for name in REDUCTIONS if name not in ("sum", "sum_square", "logsumexp")])
def test_a_reduction_without_gradient_is_refused_by_name(name):
    graph = canonical([], [Node("acc")], [Output("d", 0), Output("best", 0, Kind.COL, name)])
    with pytest.raises(
        ConfigError, match=rf"output 'best': (the gradient of {name} .* return arg{name} of|{name} gives indices)"
    ):
        vjp(graph, of=["d", "best"])
    assert vjp(graph, of=["d"]).same == {ACC: "d"}


@pytest.mark.slow
@PATIENT
@given(programs(tame=True, max_outputs=3), st.integers(0, 2**30))
def test_drawn_epilogues(program, seed):
    traced = program.epilogue()
    acc, inputs = program.tensors(5, 4, seed, F64)
    acc = acc.double().requires_grad_()
    for x in inputs.values():
        x.requires_grad_()
    of = [o.name for o in traced.outputs if o.reduce not in ("max", "min")]
    graph = expression(traced.inputs, traced.graph.nodes, [o for o in traced.outputs if o.name in of])
    values = program.evaluate(acc, inputs, F64)
    generator = torch.Generator().manual_seed(seed)
    grads = {name: torch.randn(values[name].shape, generator=generator, dtype=F64) for name in of}
    leaves = {ACC: acc, **{i.name: inputs[i.name] for i in graph.inputs}}
    live = [name for name in of if values[name].requires_grad]
    wanted = torch.autograd.grad(
        [values[n] for n in live], list(leaves.values()), [grads[n] for n in live], materialize_grads=True
    )
    found = gradients(graph, acc, {i.name: inputs[i.name].detach() for i in graph.inputs}, grads)
    kinds = {i.name: i.kind for i in graph.inputs}
    for (leaf, _), value in zip(leaves.items(), wanted, strict=True):
        if leaf not in found:
            assert not value.any()
            continue
        mine = found[leaf].sum() if kinds.get(leaf) is Kind.SCALAR else found[leaf]
        torch.testing.assert_close(mine, value, rtol=1e-5, atol=1e-6)
