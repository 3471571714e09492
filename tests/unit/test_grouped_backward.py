"""Autograd of groups of rows on the CPU: in FP64 against differences, in BF16 against PyTorch, eager and compiled."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn import Parameter

import cutlass_ops as co
from cutlass_ops.declare.form import GROUPED, RAGGED_K
from cutlass_ops.epilogue import Col, Product, Row, Scalar, Tile, builtin, composed, epilogue, functions
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import portable, recorded, traced
from cutlass_ops.run.grouped import grouped_op
from cutlass_ops.run.reference import gemm_reference

F64, BF16 = torch.float64, torch.bfloat16
# The second expert has no rows, and the last rows have no expert.
SIZES, ROWS, N, K = (3, 0, 4), 9, 8, 6
USED = sum(SIZES)


@epilogue
def routed(acc, bias: Row, weight: Col, residual: Tile, alpha: Scalar):
    return functions.silu(acc + bias) * weight * alpha + residual


@epilogue
def stored(acc, bias: Row):
    pre = acc + bias
    return {"d": functions.gelu(pre), "pre": pre}


@epilogue
def gated(acc, up: Product, bias: Row):
    return functions.silu(acc + bias) * up


@epilogue
def numbered(acc):
    return acc * functions.row_index()


def ends(sizes=SIZES):
    return torch.tensor(sizes).cumsum(0).int()


def rows_of(offsets):
    bounds = [0, *offsets.tolist()]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


# ---- FP64 ------------------------------------------------------------------------------------------------------------


class InFp64(portable.Portable):
    """An op with groups that computes in FP64 by the reference, and leaves NaN in rows of no group."""

    def __init__(self, form, graph):
        self.form, self.graph = form, graph
        self.about = portable.register("in_fp64", graph, self, f"{form}_in_fp64", graph.to_json(), form)

    def __call__(self, a, b, *inputs, out_dtype=None):
        return traced.Traced(self.about)(a, b, *inputs, out_dtype=out_dtype)

    def run_plain(self, a, b, inputs, out, out_dtype):
        offsets, *others = inputs
        values, found = dict(zip((i.name for i in self.graph.inputs), others, strict=True)), []
        for expert, rows in enumerate(rows_of(offsets)):
            of_a, of_b = (a[rows], b[expert]) if self.form == GROUPED else (a[:, rows], b[rows])
            given = {i.name: self._of_group(i.kind, values[i.name], expert, rows) for i in self.graph.inputs}
            types = {o.name: F64 for o in self.graph.outputs[1:]}
            results = gemm_reference(of_a, of_b, self.graph, given, d_dtype=F64, output_dtypes=types, compute_dtype=F64)
            found.append(list(results.values()))
        if self.form == RAGGED_K:
            return [torch.stack(each) for each in zip(*found, strict=True)]
        rest = a.new_full((len(a) - int(offsets[-1]), b.shape[-1]), torch.nan)
        return [torch.cat([*each, rest]) for each in zip(*found, strict=True)]

    def _of_group(self, kind, value, expert, rows):
        if kind is Kind.ROW or kind is Kind.PRODUCT:
            return value[expert] if value.ndim > 1 else value
        return value[rows] if kind in (Kind.COL, Kind.TILE) else value

    def results_of(self, a, b, inputs, out_dtype=None):
        raise NotImplementedError

    def of(self, graph):
        return InFp64(self.form, graph)

    def of_weights(self, graph):
        return InFp64(RAGGED_K, graph)


def _grouped_again(name, plain):
    return InFp64(GROUPED, Graph.from_json(plain))


def _ragged_again(name, plain):
    return InFp64(RAGGED_K, Graph.from_json(plain))


portable.MAKERS["grouped_in_fp64"] = (__name__, "_grouped_again")
portable.MAKERS["ragged_k_in_fp64"] = (__name__, "_ragged_again")

EPILOGUES = {
    "plain": builtin.identity,
    "bias": builtin.bias,
    "relu": builtin.bias_relu,
    "routed": routed,
    "stored": stored,
    "gated": gated,
    "swiglu": composed.swiglu,
}
SHAPES = {
    Kind.ROW: (len(SIZES), N),
    Kind.COL: (ROWS,),
    Kind.TILE: (ROWS, N),
    Kind.SCALAR: (),
    Kind.PRODUCT: (len(SIZES), K, N),
}


def drawn(graph, *, shared=False):
    torch.manual_seed(0)
    shapes = [(ROWS, K), (len(SIZES), K, N), *(SHAPES[i.kind] for i in graph.inputs)]
    if shared:
        kinds = [None, None, *(i.kind for i in graph.inputs)]
        shapes = [(N,) if kind is Kind.ROW else shape for shape, kind in zip(shapes, kinds, strict=True)]
    return [torch.randn(shape, dtype=F64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", EPILOGUES)
def test_gradients_are_those_that_differences_show(name, shared, recompute):
    op = InFp64(GROUPED, EPILOGUES[name].graph)

    def used(a, b, *inputs):
        if recompute:
            with co.recompute():
                found = op.as_list(a, b, ends(), *inputs)
        else:
            found = op.as_list(a, b, ends(), *inputs)
        return tuple(x[:USED] for x in found)

    assert torch.autograd.gradcheck(used, drawn(op.graph, shared=shared), atol=1e-4)


@pytest.mark.parametrize("sizes", [(0, 0, 0), (9, 0, 0), (1, 7, 1)])
def test_any_group_may_be_empty_or_have_all_rows(sizes):
    op = InFp64(GROUPED, routed.graph)

    def used(a, b, *inputs):
        return op(a, b, ends(sizes), *inputs)[: sum(sizes)]

    assert torch.autograd.gradcheck(used, drawn(op.graph), atol=1e-4)


def test_the_gradient_of_x_can_be_differentiated_again():
    op, (a, b) = InFp64(GROUPED, builtin.identity.graph), drawn(builtin.identity.graph)
    assert torch.autograd.gradgradcheck(lambda a: op(a, b.detach(), ends())[:USED], a, atol=1e-4)


# ---- BF16 ------------------------------------------------------------------------------------------------------------


def silu_routed(acc, bias, weight, residual, alpha):
    return F.silu(acc + bias) * weight[:, None] * alpha + residual


CASES = {
    "plain": (None, lambda acc: acc, ()),
    "routed": (routed, silu_routed, ("bias", "weight", "residual", "alpha")),
    "swiglu": (composed.swiglu, lambda acc, up: F.silu(acc) * up, ("up",)),
}
EXPERTS, T, WIDE = 4, 40, 16
GROUPS = torch.tensor([9, 9, 30, 37], dtype=torch.int32)


def tensors(names, *, turned):
    torch.manual_seed(1)
    shapes = {"bias": (EXPERTS, N), "weight": (T,), "residual": (T, N), "alpha": ()}

    def weights():
        lines = torch.randn(EXPERTS, *((N, WIDE) if turned else (WIDE, N))) * 0.3
        return lines.to(BF16).mT if turned else lines.to(BF16)

    given = {"x": torch.randn(T, WIDE).to(BF16), "w": weights()}
    given |= {name: weights() if name == "up" else torch.randn(shapes[name]).to(BF16) for name in names}
    return {name: x.detach().requires_grad_() for name, x in given.items()}


def wanted(function, given, gradient):
    """Return the gradients in float64, of the rows that have an expert alone."""
    exact, found = {name: x.detach().double().requires_grad_() for name, x in given.items()}, []
    for expert, rows in enumerate(rows_of(GROUPS)):
        x, w, inputs = exact["x"][rows], exact["w"][expert], {}
        for name, value in list(exact.items())[2:]:
            inputs[name] = x @ value[expert] if name == "up" else value
            inputs[name] = value[expert] if name == "bias" else inputs[name]
            inputs[name] = value[rows] if name in ("weight", "residual") else inputs[name]
        found.append(function(x @ w, **inputs))
    d = torch.cat(found)
    return torch.autograd.grad(d, list(exact.values()), gradient[: len(d)].double())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("turned", [False, True], ids=["E,K,N", "E,N,K"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_pytorch_s(name, turned, backend):
    torch._dynamo.reset()
    of, function, names = CASES[name]
    given = tensors(names, turned=turned)

    def layer(x, w, offsets, *inputs):
        return co.grouped_gemm(x, w, offsets, epilogue=of, **dict(zip(names, inputs, strict=True)))

    run = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    gradient = torch.randn(T, N).to(BF16)
    gradient[int(GROUPS[-1]) :] = torch.nan  # of rows that nobody wrote
    d = run(*list(given.values())[:2], GROUPS, *list(given.values())[2:])
    found = torch.autograd.grad(d, list(given.values()), gradient)
    for x, y, like in zip(found, wanted(function, given, gradient), given.values(), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        assert (x - y).norm() <= (0.01 if like.ndim else 0.05) * y.norm()


@epilogue
def by_row(acc, factor: Row, weight: Col):
    return acc * factor * weight


@pytest.mark.parametrize("shape", [(EXPERTS, N), (N,), (1, N)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_row_is_of_each_expert_or_of_all(shape, recompute):
    given = tensors(("weight",), turned=True)
    factor, gradient = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(T, N).to(BF16)
    with co.recompute() if recompute else nullcontext():
        d = co.grouped_gemm(given["x"], given["w"], GROUPS, epilogue=by_row, factor=factor, weight=given["weight"])
    leaves = [given["x"], given["w"], factor, given["weight"]]
    found = torch.autograd.grad(d, leaves, gradient)
    x, w, row, weight = exact = [y.detach().double().requires_grad_() for y in leaves]
    rows = row.expand(EXPERTS, N)
    parts = [x[at] @ w[e] * rows[e] * weight[at, None] for e, at in enumerate(rows_of(GROUPS))]
    wanted = torch.autograd.grad(torch.cat(parts), exact, gradient[: int(GROUPS[-1])].double())
    for y, z in zip(found, wanted, strict=True):
        assert y.shape == z.shape
        assert (y - z).norm() <= 0.01 * z.norm()


@epilogue
def rotary(acc, cosine: Row, sine: Row):
    return acc * cosine + functions.swap_pairs(acc) * sine


@pytest.mark.parametrize("recompute", [False, True])
def test_a_rotation_has_a_gradient_if_its_angles_have_none(recompute):
    given = tensors((), turned=True)
    cosine, sine, gradient = torch.randn(N), torch.randn(N), torch.randn(T, N).to(BF16)

    def layer(cosine):
        with co.recompute() if recompute else nullcontext():
            return co.grouped_gemm(*given.values(), GROUPS, epilogue=rotary, cosine=cosine, sine=sine)

    def turned(acc):
        return acc * cosine + acc.view(-1, N // 2, 2).flip(-1).view(-1, N) * sine

    found = torch.autograd.grad(layer(cosine), list(given.values()), gradient)
    for x, y in zip(found, wanted(turned, given, gradient), strict=True):
        assert (x - y).norm() <= 0.01 * y.norm()
    with pytest.raises(NotImplementedError, match=r"its epilogue swaps pairs .* pass \.detach\(\) of the inputs"):
        layer(cosine.requires_grad_())


def test_gradients_of_rows_are_as_exact_as_fp32():
    """The same number of each expert, multiplied by many rows that nearly cancel."""
    x, w, bias = torch.zeros(T, WIDE).to(BF16), torch.zeros(EXPERTS, WIDE, N).to(BF16), torch.zeros(EXPERTS, N)
    gradient = (1 + torch.rand(T, N)).requires_grad_(False)
    bias.requires_grad_()
    d = co.grouped_gemm(x, w, GROUPS, epilogue=builtin.bias, bias=bias, out_dtype=torch.float32)
    d.backward(gradient)
    exact = torch.stack([gradient[rows].double().sum(0) for rows in rows_of(GROUPS)])
    torch.testing.assert_close(bias.grad.double(), exact, rtol=1e-6, atol=1e-6)


def test_rows_of_no_expert_have_no_gradient():
    given = tensors(("bias", "weight", "residual", "alpha"), turned=True)
    x, w, *_ = given.values()
    d = co.grouped_gemm(x, w, GROUPS, epilogue=routed, **dict(list(given.items())[2:]))
    d.backward(torch.full_like(d, torch.inf))
    for name in ("x", "residual", "weight"):
        assert not given[name].grad[int(GROUPS[-1]) :].any()


def test_a_gradient_is_added_to_main_grad():
    x = torch.randn(T, WIDE).to(BF16)
    parameter, w = Parameter(torch.randn(EXPERTS, N, WIDE).to(BF16)), torch.randn(EXPERTS, WIDE, N).to(BF16)
    gradient = torch.randn(T, N).to(BF16)
    for weight, turn in ((parameter, True), (Parameter(w), False)):
        weight.main_grad = torch.ones(weight.shape)
        co.grouped_gemm(x, weight.mT if turn else weight, GROUPS).backward(gradient)
        exact = torch.stack([x[rows].double().mT @ gradient[rows].double() for rows in rows_of(GROUPS)]) + 1
        torch.testing.assert_close(weight.main_grad.double(), exact.mT if turn else exact, rtol=1e-5, atol=1e-5)
        assert weight.grad is None


def test_a_backward_calls_these_ops():
    given = tensors(("bias",), turned=True)
    calls = recorded.calls_of_a_step(
        grouped_op(builtin.bias), (given["x"], given["w"], GROUPS), {"bias": given["bias"]}
    )
    assert sorted(call.called.name for call in calls) == ["grouped_gemm"] * 2 + ["grouped_gemm_wgrad"] * 2
    assert all(call.inputs[0] is GROUPS or call.inputs[0].equal(GROUPS) for call in calls)


def test_there_may_be_no_rows():
    x, w = torch.zeros(0, WIDE, dtype=BF16, requires_grad=True), torch.randn(2, WIDE, N).to(BF16).requires_grad_()
    co.grouped_gemm(x, w, torch.zeros(2, dtype=torch.int32)).sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.any()


# ---- Refusals --------------------------------------------------------------------------------------------------------


def test_what_has_no_gradient_is_refused_before_it_runs():
    x, w = torch.randn(T, WIDE).to(BF16).requires_grad_(), torch.randn(EXPERTS, 9, WIDE).to(BF16).mT
    with pytest.raises(ValueError, match="w has 9 columns, and the backward multiplies the gradient of D"):
        co.grouped_gemm(x, w, GROUPS)
    with pytest.raises(NotImplementedError, match="its epilogue numbers the rows of each group"):
        co.grouped_gemm(x, torch.randn(EXPERTS, WIDE, N).to(BF16), GROUPS, epilogue=numbered)
    with pytest.raises(ValueError, match="a requires grad, and a call with `out` has no backward"):
        co.grouped_gemm(x, torch.randn(EXPERTS, WIDE, N).to(BF16), GROUPS, out=torch.empty(T, N, dtype=BF16))


def test_gradients_of_weights_are_not_differentiated_again():
    given = tensors((), turned=True)
    d = co.grouped_gemm(given["x"], given["w"], GROUPS)
    of_x, of_w = torch.autograd.grad(d.square().sum(), list(given.values()), create_graph=True)
    torch.autograd.grad(of_x.sum(), given["x"], retain_graph=True)
    with pytest.raises(NotImplementedError, match="Gradients of grouped_gemm's weights are not differentiated again"):
        torch.autograd.grad(of_w.sum(), given["x"])
