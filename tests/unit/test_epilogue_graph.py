"""Graphs: canonical form, JSON, and what is refused from a file that nobody vouches for."""

import copy
import json
import keyword
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.epilogue import functions
from cutlass_ops.epilogue.graph import MAX_INPUTS, MAX_NODES, MAX_OUTPUTS, Graph, canonical
from cutlass_ops.epilogue.names import CPP_KEYWORDS, IN_KERNELS, RESERVED, check_name, is_plain
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import GATHERED, Type
from cutlass_ops.epilogue.trace import epilogue
from cutlass_ops.epilogue.values import Integer, Product, Row, Scalar
from tests.strategies import PATIENT, epilogues

BIAS_RELU = {
    "inputs": [["bias", "row"]],
    "nodes": [["acc", [], None], ["input", [], "bias"], ["add", [0, 1], None], ["relu", [2], None]],
    "outputs": [["d", 3, "tile", None], ["total", 2, "col", "sum"]],
}


def changed(path, value):
    data = copy.deepcopy(BIAS_RELU)
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return data


@given(epilogues())
@PATIENT
def test_json_round_trip(drawn):
    graph = drawn.graph
    data = json.loads(json.dumps(graph.to_json(), allow_nan=False))
    again = Graph.from_json(data)
    assert again == graph
    assert hash(again) == hash(graph)
    assert again.to_json() == graph.to_json()


@pytest.mark.slow
@given(epilogues(), st.randoms(use_true_random=False))
@PATIENT
def test_canonical_form_does_not_depend_on_the_order_of_nodes(drawn, random):
    graph = drawn.graph
    # Write the same expression down in another topological order, with every node twice.
    order, place = [], {}
    pending = [i for i in range(len(graph.nodes)) for _ in range(2)]
    while pending:
        ready = [i for i in pending if all(a in place for a in graph.nodes[i].args)]
        index = random.choice(ready)
        pending.remove(index)
        node = graph.nodes[index]
        order.append(Node(node.op, tuple(random.choice(place[a]) for a in node.args), node.attr))
        place.setdefault(index, []).append(len(order) - 1)
    outputs = [Output(o.name, random.choice(place[o.node]), o.kind, o.reduce) for o in graph.outputs]
    assert canonical(graph.inputs, order, outputs) == graph


def test_canonical_drops_what_no_output_needs():
    nodes = [Node("acc"), Node("exp", (0,)), Node("relu", (0,))]
    assert canonical([], nodes, [Output("d", 2)]).nodes == (Node("acc"), Node("relu", (0,)))


def test_a_long_chain_is_no_recursion():
    nodes = [Node("acc")] + [Node("neg", (i,)) for i in range(MAX_NODES - 1)]
    assert len(canonical([], nodes, [Output("d", MAX_NODES - 1)]).nodes) == MAX_NODES


def test_pairs_of_a_constant_have_no_node():
    nodes = (Node("acc"), Node("const", (), 0.5), Node("swap_pairs", (1,)), Node("mul", (0, 2)))
    with pytest.raises(ConfigError, match="swap_pairs of a constant"):
        Graph((), nodes, (Output("d", 3),))


@pytest.mark.parametrize(("left", "right", "equal"), [(0.0, -0.0, False), (math.nan, math.nan, True), (1.0, 1.0, True)])
def test_constants_are_compared_by_their_bits(left, right, equal):
    one, two = (
        Graph((), (Node("acc"), Node("const", (), c), Node("mul", (0, 1))), (Output("d", 2),)) for c in (left, right)
    )
    assert (one == two) is equal
    assert (one.to_json() == two.to_json()) is equal
    assert len({one, two}) == (1 if equal else 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("nodes", 2, 0), "system", "unknown operation"),
        (("nodes", 2, 0), ["add"], "unknown operation"),
        (("nodes", 2, 1), [0], "takes 2 arguments"),
        (("nodes", 2, 1), "01", "takes 2 arguments"),
        (("nodes", 0, 1), [0], "takes 0 arguments"),
        (("nodes", 2, 1), [0, 2], "earlier nodes"),
        (("nodes", 2, 1), [0, -1], "earlier nodes"),
        (("nodes", 2, 1), [0, True], "earlier nodes"),
        (("nodes", 2, 1), [0, 10**400], "earlier nodes"),
        (("nodes", 2, 2), "bf16", "is not an attribute for add"),
        (("nodes", 0, 2), 1, "is not an attribute for acc"),
        (("nodes", 1, 2), "other", "is not an attribute for input"),
        (("nodes", 1), ["mean_of_a", [0], None], "takes 0 arguments"),
        (("nodes", 1), ["mean_square_of_a", [], "bias"], "is not an attribute for mean_square_of_a"),
        (("nodes", 3), ["cast", [2], "f32"], "is not an attribute for cast"),
        (("nodes", 3), ["cast", [2], "float>(x); //"], "is not an attribute for cast"),
        (("nodes", 1), ["const", [], 0.5], "float.hex"),
        (("nodes", 1), ["const", [], "0x1p-1"], "float.hex"),
        (("nodes", 1), ["const", [], "-nan"], "float.hex"),
        (("nodes", 1), ["const", [], "0x1p+99999"], "float.hex"),
        (("nodes", 1), ["const", [], "1" * 100_000], "float.hex"),
        (("nodes", 1), ["const", [], (0.1).hex()], "is not an attribute for const"),
        (("nodes", 1), ["const", [], (0.5).hex()], "does not depend|no output depends on the input bias"),
        (("nodes", 3), ["relu", [2]], "lists of 3 values"),
        (("nodes",), {"0": []}, "lists of 3 values"),
        (("nodes",), [], "is not the index of a node"),
        (("nodes", 2, 1), [1, 0], "not canonical"),
        (("nodes", 3), ["relu", [1], None], "not canonical"),
        (("inputs",), [["bias", "row"], ["gate", "tile"]], "no output depends on the input gate"),
        (("inputs",), [["bias", "row"], ["bias", "row"]], "taken"),
        (("inputs", 0, 1), "diagonal", "unknown kind"),
        (("inputs", 0, 1), ["row"], "unknown kind"),
        (("inputs", 0, 0), "x; system()", "ASCII letters"),
        (("inputs", 0, 0), 7, "not a string"),
        (("inputs", 0), ["bias", "row", 1], "lists of 2 values"),
        (("outputs",), [], "first output is 'd'"),
        (("outputs", 0, 0), "y", "first output is 'd'"),
        (("outputs", 0, 1), 4, "is not the index of a node"),
        (("outputs", 0, 1), True, "is not the index of a node"),
        (("outputs", 0, 2), "row", "must be a tile"),
        (("outputs", 0), ["d", 3, "col", "sum"], "cannot be a reduction"),
        (("outputs", 1, 0), "bias", "taken"),
        (("outputs", 1, 0), "d", "taken"),
        (("outputs", 1, 2), "tile", "a row or a column"),
        (("outputs", 1, 3), "mean", "unknown reduction"),
        (("outputs", 1, 3), ["sum"], "unknown reduction"),
    ],
)
def test_malformed_graphs_are_refused(path, value, reason):
    with pytest.raises(ConfigError, match=reason):
        Graph.from_json(changed(path, value))


@pytest.mark.parametrize("data", [None, [], "graph", 3, {}, {"inputs": [], "nodes": []}, BIAS_RELU | {"extra": 1}])
def test_what_is_no_graph_at_all_is_refused(data):
    with pytest.raises(ConfigError, match="fields inputs, nodes and outputs"):
        Graph.from_json(data)


# ---- What a graph takes of A itself ---------------------------------------------------------------------------------


def traced(function):
    return epilogue(function).graph


def scaled(acc, eps: Scalar):
    return acc * functions.rsqrt(functions.mean_square_of_a() + eps)


def shifted(acc, pre: Row):
    return acc + pre


def gated(acc, up: Product):
    return functions.silu(acc) * up


def with_bias(acc, bias: Row):
    return {"d": functions.relu(acc + bias), "pre": acc + bias, "row": functions.sum(acc, 1)}


def test_gathered_values_are_leaves_named_in_the_tables_order():
    def moments(acc):
        square, mean = functions.mean_square_of_a(), functions.mean_of_a()
        return acc * (square - mean * mean) - functions.mean_of_a()

    graph = traced(moments)
    assert graph.gathered == ("mean_of_a", "mean_square_of_a") == tuple(GATHERED)
    assert [n for n in graph.nodes if n.op in GATHERED] == [Node("mean_square_of_a"), Node("mean_of_a")]
    assert traced(scaled).gathered == ("mean_square_of_a",)
    assert traced(with_bias).gathered == ()
    assert Graph.from_json(json.loads(json.dumps(graph.to_json()))) == graph
    assert ["mean_of_a", [], None] in graph.to_json()["nodes"]


def test_a_product_is_an_input_and_there_is_one_at_most():
    graph = traced(gated)
    assert graph.inputs == (Input("up", Kind.PRODUCT),)
    assert graph.products == ("up",)
    assert graph.to_json()["inputs"] == [["up", "product"]]
    assert Graph.from_json(graph.to_json()) == graph
    assert traced(with_bias).products == ()
    inputs = (Input("up", Kind.PRODUCT), Input("left", Kind.PRODUCT))
    nodes = (
        Node("acc"), Node("input", (), "up"), Node("mul", (0, 1)), Node("input", (), "left"), Node("mul", (2, 3)),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"one product of A besides the accumulator, not 2 \(up, left\).*tiles"):
        Graph(inputs, nodes, (Output("d", 4),))


def test_then_is_the_function_that_calls_the_other_with_its_result():
    def together(acc, eps: Scalar, bias: Row):
        x = acc * functions.rsqrt(functions.mean_square_of_a() + eps)
        return {"d": functions.relu(x + bias), "pre": x + bias, "row": functions.sum(x, 1)}

    assert traced(scaled).then(traced(with_bias)) == traced(together)


@pytest.mark.slow
@given(epilogues(max_inputs=2, max_outputs=1), epilogues(max_inputs=0))
@PATIENT
def test_then_is_substitution_for_any_two(first, second):
    def together(*values):
        return second(first(*values)["d"])

    together.__signature__ = first.signature
    assert first.graph.then(second.graph) == epilogue(together).graph


def test_products_pass_through_the_first_graph_only_if_asked():
    def only_acc(acc, eps: Scalar, up: Product):
        return functions.silu(acc * functions.rsqrt(functions.mean_square_of_a() + eps)) * up

    def both(acc, eps: Scalar, up: Product):
        scale = functions.rsqrt(functions.mean_square_of_a() + eps)
        return functions.silu(acc * scale) * (up * scale)

    assert traced(scaled).then(traced(gated)) == traced(only_acc)
    assert traced(scaled).then(traced(gated), products=True) == traced(both)
    # A product in the first graph stays what it is.
    assert traced(gated).then(traced(scaled)).products == ("up",)


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (with_bias, scaled, "has D as its only output, and this one has pre, row"),
        (scaled, scaled, "both epilogues have the name eps: rename it"),
        (shifted, with_bias, "both epilogues have the name pre"),
    ],
)
def test_graphs_that_cannot_follow_each_other(first, second, reason):
    with pytest.raises(ConfigError, match=reason):
        traced(first).then(traced(second))


def test_the_accumulator_must_be_used():
    # What reads nothing of A and B needs none: see test_pointwise.py.
    with pytest.raises(ConfigError, match="accumulator"):
        Graph((Input("up", Kind.PRODUCT),), (Node("input", (), "up"),), (Output("d", 0),))


def test_a_graph_of_lists_is_refused():
    with pytest.raises(ConfigError, match="nodes are a tuple"):
        Graph((), [Node("acc")], (Output("d", 0),))  # type: ignore[arg-type]


def test_limits():
    chain = (Node("acc"), *(Node("neg", (i,)) for i in range(MAX_NODES)))
    with pytest.raises(ConfigError, match=f"at most {MAX_NODES} nodes"):
        Graph((), chain, (Output("d", MAX_NODES),))
    with pytest.raises(ConfigError, match=f"at most {MAX_INPUTS} inputs"):
        Graph(tuple(Input(f"x{i}", Kind.ROW) for i in range(MAX_INPUTS + 1)), (Node("acc"),), (Output("d", 0),))
    with pytest.raises(ConfigError, match=f"at most {MAX_OUTPUTS} outputs"):
        Graph((), (Node("acc"),), (Output("d", 0), *(Output(f"y{i}", 0) for i in range(MAX_OUTPUTS))))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["acc", "input", "const", "add", "cast", "bf16", "nan", "row", "tile", "sum", "d", "bias"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@given(epilogues(max_steps=5), st.data())
@PATIENT
def test_a_tampered_graph_is_refused_or_is_another_canonical_graph(drawn, data):
    tampered = drawn.graph.to_json()
    place, steps = tampered, []
    # Walk to a random place and put something else there.
    while True:
        keys = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        steps.append(key)
        if not isinstance(place[key], list) or data.draw(st.booleans()):
            place[key] = data.draw(JSON | st.integers(-2, 8))
            break
        place = place[key]
    try:
        graph = Graph.from_json(tampered)
    except ConfigError:
        return
    assert graph.to_json() == tampered


@given(JSON, JSON, JSON)
@PATIENT
def test_arbitrary_json_never_raises_anything_else(inputs, nodes, outputs):
    with pytest.raises(ConfigError):
        Graph.from_json({"inputs": inputs, "nodes": nodes, "outputs": outputs})


def test_deeply_nested_json_is_refused():
    nested: list = []
    for _ in range(5000):
        nested = [nested]
    for path in (("nodes", 2, 0), ("nodes", 2, 1), ("nodes", 2, 2), ("inputs", 0, 1), ("outputs", 0, 1)):
        with pytest.raises(ConfigError):
            Graph.from_json(changed(path, nested))


GOOD = ["bias", "x", "W", "residual_2", "rowScale", "x" * 64, "relu", "exp"]
# In C++ they are keywords, macros, or names of the kernel's own.
TAKEN = ["c", "d", "n", "acc", "stream", "threadIdx", "float", "xor", "a__b", "bias_", "INFINITY", "M_PI", "IN0_", "v3"]


@pytest.mark.parametrize("name", [*GOOD, "b1", *TAKEN])
def test_good_names(name):
    check_name(name, "input")
    assert is_plain(name) == (name not in TAKEN)


def test_what_is_in_the_way_in_cpp_is_no_concern_of_the_users():
    for name in (CPP_KEYWORDS | IN_KERNELS) - set(keyword.kwlist) - RESERVED:
        check_name(name, "output")
        assert not is_plain(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "ASCII"),
        ("2x", "ASCII"),
        ("x\n", "ASCII"),
        ("x;", "ASCII"),
        ("lambda", "Python keyword"),
        *((name, "an argument of every call") for name in sorted(RESERVED)),
        ("x" * 65, "65 characters"),
        (b"bias", "not a string"),
    ],
)
def test_bad_names(name, reason):
    with pytest.raises(ConfigError, match=reason):
        check_name(name, "input")


# ---- Types ---------------------------------------------------------------------------------------------------------


def chosen(acc, seed: Integer):
    keep = (functions.column_index() - 3 <= functions.row_index()) & (functions.uniform(seed, 2**40) >= 0.5)
    return {"d": functions.where(keep, acc, -math.inf), "kept": keep, "at": functions.argmax(keep, 1)}


def test_truth_values_and_indices_have_types_and_what_is_stored_is_fp32():
    graph = traced(chosen)
    types = {node.op: found for node, found in zip(graph.nodes, graph.types, strict=True)}
    assert {op: t.value for op, t in types.items() if t is not Type.FLOAT} == {
        **dict.fromkeys(("column_index", "row_index", "integer", "sub"), "index"),
        **dict.fromkeys(("le", "ge", "logical_and"), "truth"),
        **dict.fromkeys(("input", "seed"), "seed"),
    }
    assert [graph.nodes[o.node].op for o in graph.outputs] == ["where", "to_float", "to_float"]
    assert graph.knows_places
    again = Graph.from_json(json.loads(json.dumps(graph.to_json())))
    assert again == graph
    assert hash(again) == hash(graph)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (["integer", [], 3], ["integer", [], 1 << 31], "not an attribute for integer"),
        (["integer", [], 3], ["integer", [], True], "not an attribute for integer"),
        (["integer", [], 3], ["integer", [], "3"], "not an attribute for integer"),
        (["integer", [], 3], ["seed", [], 3], "sub takes no arguments of the types index, seed"),
        (["seed", [], 1 << 40], ["seed", [], 1 << 63], "not an attribute for seed"),
        (["seed", [], 1 << 40], ["integer", [], 4], "uniform takes no arguments of the types seed, index"),
        (["seed", [], 1 << 40], ["const", [], (4.0).hex()], "uniform takes no arguments of the types seed, float"),
    ],
)
def test_what_has_another_type_is_refused(before, after, reason):
    data = json.loads(json.dumps(traced(chosen).to_json()))
    data["nodes"][data["nodes"].index(before)] = after
    with pytest.raises(ConfigError, match=reason):
        Graph.from_json(data)


def test_only_fp32_values_are_stored():
    data = traced(chosen).to_json()
    data["outputs"][1][1] = next(at for at, node in enumerate(data["nodes"]) if node[0] == "logical_and")
    with pytest.raises(ConfigError, match="output 'kept': a truth is not stored: use to_float of it"):
        Graph.from_json(data)
