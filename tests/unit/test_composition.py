"""PyTorch's own operators compute what a kernel does, for every form of call, and as few as a user would write."""

import pytest
import torch
from fake_device import Everything, fake_device
from op_table import BF16, COUNTS, E4M3, ENDS, F16, F32, I8, ROWS, K, M, N, biased, draw, ends, flat, itself, weight
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.epilogue.operations import OPS, REDUCTIONS, UNIFORM
from cutlass_ops.run import ops


@pytest.fixture
def empty(monkeypatch):
    """A made-up device for which nothing is compiled."""
    with fake_device(monkeypatch) as fake:
        fake.absent = Everything()
        yield fake


def near(found, wanted, bound=None, name=""):
    """Compare results by their norms, of a call's written elements alone."""
    written = ROWS[name].written if name in ROWS else itself
    for mine, theirs in zip(flat(found), flat(wanted), strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        mine, theirs = written(mine).double(), written(theirs).double()
        finite = theirs.isfinite()
        assert torch.equal(finite, mine.isfinite())
        mine, theirs = mine[finite], theirs[finite]
        limit = bound or {1: 0.1, 2: 0.02, 4: 1e-5, 8: 1e-12}[flat(wanted)[0].dtype.itemsize]
        assert (mine - theirs).norm() <= limit * theirs.norm() + 1e-9


@co.epilogue
def by_tanh(acc, bias: co.Row):
    return co.e.gelu(acc + bias, approximate="tanh")


def _cases():
    """Yield the calls of ``op_table.py``, and some whose compositions differ from theirs."""
    for name, row in ROWS.items():
        yield name, row.function, (), row.named(row.given())
    x, w, rows = draw(M, K), weight(K, N), torch.rand(M) + 0.5
    a8, b8, ai, bi = draw(M, K, dtype=E4M3), weight(K, N, E4M3), draw(M, K, dtype=I8), weight(K, N, I8)
    yield "GELU by tanh", co.gemm, (x, w), {"epilogue": by_tanh, "bias": draw(N)}
    yield "a tensor as the scale", co.gemm, (co.Scaled(x, rows), co.Scaled(w, torch.tensor(0.5))), {}
    yield "FP8, mixed scales", co.gemm, (co.Scaled(a8, rows), co.Scaled(b8, 0.5)), {}
    yield "INT8 results", co.gemm, (ai, bi), {"out_dtype": I8}
    wide = (draw(M, K, dtype=F16, scale=300), weight(K, N, F16))
    yield "RMSNorm FP16", co.rmsnorm_gemm, wide, {"eps": 1e-5}
    prepared = co.prepare(w, draw(K))
    yield "RMSNorm, bias", co.rmsnorm_gemm, (x, prepared), {"eps": 1e-5, "epilogue": biased, "bias": draw(N)}


CASES = list(_cases())
# TF32 is rounded on the reference alone; blocks and FP8 are computed in BF16.
BOUNDS = {"TF32": 2e-3, "FP8, blocks": 0.02, "quantised": 0.1, "gemm, D in FP32": 1e-5}


@pytest.mark.sample(9)
@pytest.mark.parametrize(("name", "function", "arguments", "named"), CASES, ids=[case[0] for case in CASES])
def test_what_pytorch_computes_is_what_the_kernel_would(empty, monkeypatch, name, function, arguments, named):
    found = [function(*arguments, **named) for _ in range(2)]
    assert empty.launches == []
    assert empty.needed
    monkeypatch.undo()
    wanted = function(*arguments, **named)
    for each in found:  # cold and warm
        near(each, wanted, BOUNDS.get(name), name)


def test_rows_of_no_group_stay_as_they_are(empty, monkeypatch):
    x, w = draw(24, K), weight(K, N, BF16, 3)
    masked = draw(3, 8, K)
    given = [torch.full(shape, 7.0, dtype=BF16) for shape in ((24, N), (3, 8, N))]
    co.gemm(x, w, groups=co.Groups(ends(*ENDS)), out=given[0])
    co.gemm(masked, w, groups=co.Groups(counts=ends(*COUNTS)), out=given[1])
    assert empty.launches == []
    monkeypatch.undo()
    wanted = [torch.full_like(x, 7.0) for x in given]
    co.gemm(x, w, groups=co.Groups(ends(*ENDS)), out=wanted[0])
    co.gemm(masked, w, groups=co.Groups(counts=ends(*COUNTS)), out=wanted[1])
    near(given, wanted)
    assert (given[0][ENDS[-1] :] == 7).all()
    assert (given[1][1] == 7).all()


@pytest.mark.sample(7)
@pytest.mark.parametrize(
    "op", sorted(set(OPS) - {"cast", UNIFORM, "logical_and", "logical_or", "logical_not", "isnan"})
)
def test_each_operation_is_the_reference_s(empty, monkeypatch, op):
    arity = OPS[op].arity
    conditions = {"lt", "le", "gt", "ge", "eq", "ne", "sign"}
    if op == "where":
        nodes = (Node("acc"), Node("input", (), "y"), Node("lt", (0, 1)), Node("where", (2, 0, 1)))
    elif op in conditions - {"sign"}:
        nodes = (Node("acc"), Node("input", (), "y"), Node(op, (0, 1)), Node("where", (2, 0, 1)))
    elif op == "to_float":
        nodes = (Node("acc"), Node("input", (), "y"), Node("lt", (0, 1)), Node("to_float", (2,)))
    elif arity == 2:
        nodes = (Node("acc"), Node("abs", (0,)), Node("input", (), "y"), Node(op, (1, 2)))
    else:
        nodes = (
            (Node("acc"), Node("abs", (0,)), Node(op, (1,)))
            if op.startswith(("log", "sqrt", "rsqrt"))
            else (Node("acc"), Node(op, (0,)))
        )
    reads = any(node.op == "input" for node in nodes)
    graph = Graph((Input("y", Kind.TILE),) if reads else (), nodes, (Output("d", len(nodes) - 1),))
    op_of = ops.op_of_graph(graph)
    arguments = (draw(M, K), weight(K, N), *((draw(M, N).abs() + 0.1,) if reads else ()))
    found = op_of(*arguments, out_dtype=F32)
    assert empty.launches == []
    monkeypatch.undo()
    near(found, op_of(*arguments, out_dtype=F32), 1e-4)


@pytest.mark.sample(2)
@pytest.mark.parametrize("reduction", sorted(REDUCTIONS))
@pytest.mark.parametrize("kind", [Kind.ROW, Kind.COL])
def test_each_reduction_is_the_reference_s(empty, monkeypatch, reduction, kind):
    graph = Graph((), (Node("acc"),), (Output("d", 0), Output("found", 0, kind, reduction)))
    op = ops.op_of_graph(graph)
    arguments = draw(M, K), weight(K, N)
    found = op(*arguments, out_dtype=F32)
    monkeypatch.undo()
    near(found, op(*arguments, out_dtype=F32))


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in ("view", "expand", "reshape", "_unsafe_view", "unsqueeze", "t", "transpose", "alias", "detach"):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def operators(graph, arguments):
    """Return the operators that compute a warm call of PyTorch's."""
    from cutlass_ops.run.composition import Composition

    op = ops.op_of_graph(graph)
    call = op.checked_call(*arguments[:2], arguments[2:], None)
    of = call.arguments
    with Counted() as counted:
        Composition.of(call)(of.a, of.b, list(of.inputs.values()))
    return counted.names


GELU = Graph((), (Node("acc"), Node("gelu", (0,))), (Output("d", 1),))


@pytest.mark.parametrize(
    ("graph", "inputs", "wanted"),
    [
        (builtin.identity.graph, (), ["mm"]),
        (builtin.bias.graph, (N,), ["addmm"]),
        (builtin.bias_relu.graph, (N,), ["addmm", "relu"]),  # one of cuBLASLt's on a GPU
        (builtin.bias_gelu.graph, (N,), ["addmm", "gelu"]),
        (builtin.bias_silu.graph, (N,), ["addmm", "silu"]),
        (builtin.residual.graph, ((M, N),), ["mm", "add"]),
        (GELU, (), ["mm", "gelu"]),
    ],
)
def test_as_few_operators_compute_it_as_a_user_would_write(graph, inputs, wanted):
    arguments = (draw(M, K), weight(K, N), *(draw(*(x if isinstance(x, tuple) else (x,))) for x in inputs))
    assert operators(graph, arguments) == wanted
