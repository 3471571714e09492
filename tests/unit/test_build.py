"""Building expressions: what is folded, what is merged, and what stays as a user wrote it."""

import itertools

import pytest
import torch

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue import Row, epilogue, functions
from cutlass_ops.epilogue.build import Builder
from cutlass_ops.epilogue.graph import Expression, Graph, expression
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.operand.reference import evaluate

WRITTEN = {
    "x + 0": lambda build, x: build.put("add", x, build.put("const", attr=0.0)),
    "0 + x": lambda build, x: build.put("add", build.put("const", attr=0.0), x),
    "x - 0": lambda build, x: build.put("sub", x, build.put("const", attr=0.0)),
    "x * 1": lambda build, x: build.put("mul", x, build.put("const", attr=1.0)),
    "1 * x": lambda build, x: build.put("mul", build.put("const", attr=1.0), x),
    "x / 1": lambda build, x: build.put("div", x, build.put("const", attr=1.0)),
    "--x": lambda build, x: build.put("neg", build.put("neg", x)),
    "where(c, x, x)": lambda build, x: build.put("where", build.put("isnan", x), x, x),
}


@pytest.mark.parametrize("simplify", [False, True])
@pytest.mark.parametrize("write", WRITTEN.values(), ids=WRITTEN)
def test_derived_values_are_simplified_and_written_ones_are_not(write, simplify):
    build = Builder(simplify=simplify)
    x = build.put("acc")
    assert write(build, x) == (x if simplify else len(build.nodes) - 1)


def test_what_is_not_the_same_value_stays():
    build = Builder(simplify=True)
    x, zero, one = build.put("acc"), build.put("const", attr=0.0), build.put("const", attr=1.0)
    kept = [build.put("mul", x, zero), build.put("sub", zero, x), build.put("div", one, x)]
    assert len({x, zero, one, *kept}) == 6
    assert build.nodes[build.put("mul", x, build.put("const", attr=-1.0))] == Node("neg", (x,))


def test_equal_nodes_are_one_and_zeros_of_both_signs_are_two():
    build = Builder()
    x = build.put("acc")
    assert build.put("mul", x, x) == build.put("mul", x, x)
    assert build.put("const", attr=0.0) != build.put("const", attr=-0.0)
    assert build.put("const", attr=float("nan")) == build.put("const", attr=float("nan"))


@pytest.mark.parametrize("op", ["add", "sub", "mul", "neg", "abs"])
def test_constants_are_computed_as_a_kernel_would(op):
    values = [1.0, -0.0, 1.5, float("inf"), 3e38, 1e-45, 0.1]
    for pair in itertools.product(torch.tensor(values).tolist(), repeat=1 if op in ("neg", "abs") else 2):
        build = Builder()
        node = build.nodes[build.put(op, *(build.put("const", attr=x) for x in pair))]
        wanted = getattr(torch, op)(*map(torch.tensor, pair))
        assert node.op == "const"
        torch.testing.assert_close(torch.tensor(node.attr), wanted, rtol=0, atol=0, equal_nan=True)


def test_what_a_user_writes_keeps_its_json():
    @epilogue
    def written(acc, bias: Row):
        return functions.neg(-(acc * 1.0 + 0.0)) + functions.maximum(bias, 1.0 + 1.0)

    assert [node[0] for node in written.graph.to_json()["nodes"]] == [
        *("acc", "const", "mul", "const", "add", "neg", "neg", "input", "const", "maximum", "add")
    ]

    @epilogue
    def after(acc):
        return acc + 0.0

    composed = written.graph.then(after.graph)
    assert (composed.nodes[:-1], composed.nodes[-1]) == (written.graph.nodes, Node("add", (10, 3)))


def test_an_expression_needs_no_accumulator_and_a_graph_that_reads_a_does():
    parts = [Input("x", Kind.TILE), Input("y", Kind.ROW)], [Node("input", (), "x")], [Output("d", 0)]
    found = expression(*parts)
    assert found == Expression((Input("x", Kind.TILE),), (Node("input", (), "x"),), (Output("d", 0),))
    x = torch.randn(3, 2)
    assert torch.equal(evaluate(found, torch.zeros(3, 2), {"x": x})["d"], x)
    assert Graph(found.inputs, found.nodes, found.outputs).is_pointwise
    with pytest.raises(ConfigError, match="no output depends on the accumulator"):
        Graph((), (Node("mean_of_a"),), (Output("d", 0),))


def test_only_a_kernel_limits_the_outputs():
    outputs = [Output("d", 0), *(Output(f"output{i}", 0, Kind.COL, "sum") for i in range(12))]
    found = expression([], [Node("acc")], outputs)
    assert len(evaluate(found, torch.ones(3, 2), {})) == 13
    with pytest.raises(ConfigError, match="at most 8 outputs, not 13"):
        Graph(found.inputs, found.nodes, found.outputs)
