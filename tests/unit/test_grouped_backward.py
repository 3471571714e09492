"""Autograd of groups of rows on the CPU: in FP64 against differences, in BF16 against PyTorch, eager and compiled."""

import itertools
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn import Parameter

import cutlass_ops as co
from cutlass_ops.epilogue import Col, Product, Row, Scalar, Tile, epilogue, functions

BF16 = torch.bfloat16
N = 8


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


def rows_of(offsets):
    bounds = [0, *offsets.tolist()]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


# ---- BF16 ------------------------------------------------------------------------------------------------------------


def silu_routed(acc, bias, weight, residual, alpha):
    return F.silu(acc + bias) * weight[:, None] * alpha + residual


CASES = {
    "plain": (None, lambda acc: acc, ()),
    "routed": (routed, silu_routed, ("bias", "weight", "residual", "alpha")),
    "stored": (stored, lambda acc, bias: F.gelu(acc + bias), ("bias",)),
    "gated": (gated, lambda acc, up, bias: F.silu(acc + bias) * up, ("up", "bias")),
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


def wanted(function, given, gradient, offsets=GROUPS):
    """Return the gradients in float64, of the rows that have an expert alone."""
    exact, found = {name: x.detach().double().requires_grad_() for name, x in given.items()}, []
    for expert, rows in enumerate(rows_of(offsets)):
        x, w, inputs = exact["x"][rows], exact["w"][expert], {}
        for name, value in list(exact.items())[2:]:
            inputs[name] = x @ value[expert] if name == "up" else value
            inputs[name] = value[expert] if name == "bias" else inputs[name]
            inputs[name] = value[rows] if name in ("weight", "residual") else inputs[name]
        found.append(function(x @ w, **inputs))
    d = torch.cat(found)
    return torch.autograd.grad(d, list(exact.values()), gradient[: len(d)].double())


@pytest.mark.sample(6)
@pytest.mark.parametrize("how", ["eager", "recompute", "aot_eager"])
@pytest.mark.parametrize("turned", [False, True], ids=["E,K,N", "E,N,K"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_pytorch_s(name, turned, how):
    if (name, turned, how) == ("gated", False, "recompute"):
        pytest.skip("one kernel of two products reads weights along K")
    torch._dynamo.reset()
    of, function, names = CASES[name]
    given = tensors(names, turned=turned)

    def layer(x, w, offsets, *inputs):
        d = co.gemm(x, w, groups=co.Groups(offsets), epilogue=of, **dict(zip(names, inputs, strict=True)))
        return d if isinstance(d, torch.Tensor) else d.d

    run = torch.compile(layer, backend=how, fullgraph=True) if how == "aot_eager" else layer
    gradient = torch.randn(T, N).to(BF16)
    gradient[int(GROUPS[-1]) :] = torch.nan  # of rows that nobody wrote
    with co.recompute() if how == "recompute" else nullcontext():
        d = run(*list(given.values())[:2], GROUPS, *list(given.values())[2:])
    found = torch.autograd.grad(d, list(given.values()), gradient)
    for x, y, like in zip(found, wanted(function, given, gradient), given.values(), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        assert (x - y).norm() <= (0.01 if like.ndim else 0.05) * y.norm()


@pytest.mark.parametrize("offsets", [(0, 0, 0, 0), (T, T, T, T), (0, 0, 0, T), (1, 38, 39, 40)])
def test_any_group_may_be_empty_or_have_all_rows(offsets):
    of, function, names = CASES["routed"]
    given, ends, gradient = tensors(names, turned=True), torch.tensor(offsets, dtype=torch.int32), torch.randn(T, N)
    d = co.gemm(given["x"], given["w"], groups=co.Groups(ends), epilogue=of, **dict(list(given.items())[2:]))
    found = torch.autograd.grad(d, list(given.values()), gradient.to(BF16))
    for x, y, like in zip(found, wanted(function, given, gradient, ends), given.values(), strict=True):
        assert (x - y).norm() <= (0.01 if like.ndim else 0.05) * y.norm()


def test_the_gradient_of_x_can_be_differentiated_again():
    given = tensors((), turned=True)
    x, w = given["x"], given["w"].detach()

    def twice(product, x):
        (first,) = torch.autograd.grad(product(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), x)[0]

    def exact(x):
        return torch.cat([x[rows] @ w[expert].double() for expert, rows in enumerate(rows_of(GROUPS))])

    found = twice(lambda x: co.gemm(x, w, groups=co.Groups(GROUPS), out_dtype=torch.float32)[: int(GROUPS[-1])], x)
    theirs = twice(exact, x.detach().double().requires_grad_())
    assert (found - theirs).norm() <= 0.02 * theirs.norm()


@epilogue
def by_row(acc, factor: Row, weight: Col):
    return acc * factor * weight


@pytest.mark.parametrize("shape", [(EXPERTS, N), (N,), (1, N)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_row_is_of_each_expert_or_of_all(shape, recompute):
    given = tensors(("weight",), turned=True)
    factor, gradient = torch.randn(shape).to(BF16).requires_grad_(), torch.randn(T, N).to(BF16)
    with co.recompute() if recompute else nullcontext():
        d = co.gemm(
            given["x"], given["w"], groups=co.Groups(GROUPS), epilogue=by_row, factor=factor, weight=given["weight"]
        )
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
            return co.gemm(*given.values(), groups=co.Groups(GROUPS), epilogue=rotary, cosine=cosine, sine=sine)

    def turned(acc):
        return acc * cosine + acc.view(-1, N // 2, 2).flip(-1).view(-1, N) * sine

    found = torch.autograd.grad(layer(cosine), list(given.values()), gradient)
    for x, y in zip(found, wanted(turned, given, gradient), strict=True):
        assert (x - y).norm() <= 0.01 * y.norm()
    with pytest.raises(NotImplementedError, match=r"its epilogue swaps pairs .* pass \.detach\(\) of the inputs"):
        layer(cosine.requires_grad_())


def test_rows_of_no_expert_have_no_gradient():
    given = tensors(("bias", "weight", "residual", "alpha"), turned=True)
    x, w, *_ = given.values()
    d = co.gemm(x, w, groups=co.Groups(GROUPS), epilogue=routed, **dict(list(given.items())[2:]))
    d.backward(torch.full_like(d, torch.inf))
    for name in ("x", "residual", "weight"):
        assert not given[name].grad[int(GROUPS[-1]) :].any()


def test_a_gradient_is_added_to_main_grad():
    x = torch.randn(T, WIDE).to(BF16)
    parameter, w = Parameter(torch.randn(EXPERTS, N, WIDE).to(BF16)), torch.randn(EXPERTS, WIDE, N).to(BF16)
    gradient = torch.randn(T, N).to(BF16)
    for weight, turn in ((parameter, True), (Parameter(w), False)):
        weight.main_grad = torch.ones(weight.shape)
        co.gemm(x, weight.mT if turn else weight, groups=co.Groups(GROUPS)).backward(gradient)
        exact = torch.stack([x[rows].double().mT @ gradient[rows].double() for rows in rows_of(GROUPS)]) + 1
        torch.testing.assert_close(weight.main_grad.double(), exact.mT if turn else exact, rtol=1e-5, atol=1e-5)
        assert weight.grad is None


def test_there_may_be_no_rows():
    x, w = torch.zeros(0, WIDE, dtype=BF16, requires_grad=True), torch.randn(2, WIDE, N).to(BF16).requires_grad_()
    co.gemm(x, w, groups=co.Groups(torch.zeros(2, dtype=torch.int32))).sum().backward()
    assert x.grad.shape == x.shape
    assert not w.grad.any()


# ---- Refusals --------------------------------------------------------------------------------------------------------


def test_what_has_no_gradient_is_refused_before_it_runs():
    x, w = torch.randn(T, WIDE).to(BF16).requires_grad_(), torch.randn(EXPERTS, 9, WIDE).to(BF16).mT
    co.gemm(x, torch.randn(EXPERTS, N, WIDE).to(BF16).mT, groups=co.Groups(GROUPS))  # a call of the same kind
    with pytest.raises(ValueError, match="w has 9 columns, and the backward multiplies the gradient of D"):
        co.gemm(x, w, groups=co.Groups(GROUPS))
    with pytest.raises(NotImplementedError, match="its epilogue numbers the rows of each group"):
        co.gemm(x, torch.randn(EXPERTS, WIDE, N).to(BF16), groups=co.Groups(GROUPS), epilogue=numbered)
    with pytest.raises(ValueError, match="a requires grad, and a call with `out` has no backward"):
        co.gemm(x, torch.randn(EXPERTS, WIDE, N).to(BF16), groups=co.Groups(GROUPS), out=torch.empty(T, N, dtype=BF16))


def test_gradients_of_weights_are_not_differentiated_again():
    given = tensors((), turned=True)
    d = co.gemm(given["x"], given["w"], groups=co.Groups(GROUPS))
    of_x, of_w = torch.autograd.grad(d.square().sum(), list(given.values()), create_graph=True)
    torch.autograd.grad(of_x.sum(), given["x"], retain_graph=True)
    with pytest.raises(NotImplementedError, match="Gradients of the weights of groups are not differentiated again"):
        torch.autograd.grad(of_w.sum(), given["x"])
