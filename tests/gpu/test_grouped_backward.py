"""Autograd of groups of rows on the device, against float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.epilogue import composed
from tests.gpu import tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="groups of rows need Hopper"
    ),
]

BF16 = torch.bfloat16
EXPERTS, ROWS, N, K = 5, 300, 136, 72
SIZES = {"ragged": [5, 0, 130, 64, 77], "one group": [0, 300, 0, 0, 0], "all empty": [0] * 5}


@co.epilogue
def routed(acc, bias: co.Row, weight: co.Col, residual: co.Tile, alpha: co.Scalar):
    return (co.silu(acc + bias) * weight) * alpha + residual


def silu_routed(acc, bias, weight, residual, alpha):
    return F.silu(acc + bias) * weight[:, None] * alpha + residual


CASES = {
    "plain": (None, lambda acc: acc, ()),
    "routed": (routed, silu_routed, ("bias", "weight", "residual", "alpha")),
    "swiglu": (composed.swiglu, lambda acc, up: F.silu(acc) * up, ("up",)),
}


def drawn(names):
    shapes = {"bias": (EXPERTS, N), "weight": (ROWS,), "residual": (ROWS, N), "alpha": ()}

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, device="cuda") * scale).to(BF16)

    given = {"x": normal(ROWS, K), "w": normal(EXPERTS, N, K, scale=0.1).mT}
    given |= {name: normal(EXPERTS, N, K, scale=0.1).mT if name == "up" else normal(*shapes[name]) for name in names}
    return {name: x.detach().requires_grad_() for name, x in given.items()}


def wanted(function, given, sizes, gradient):
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    bounds, found = [0, *itertools.accumulate(sizes)], []
    for expert, (first, end) in enumerate(itertools.pairwise(bounds)):
        rows, inputs = slice(first, end), {}
        for name, value in list(exact.items())[2:]:
            inputs[name] = exact["x"][rows] @ value[expert] if name == "up" else value
            inputs[name] = value[expert] if name == "bias" else inputs[name]
            inputs[name] = value[rows] if name in ("weight", "residual") else inputs[name]
        found.append(function(exact["x"][rows] @ exact["w"][expert], **inputs))
    d = torch.cat(found)
    return torch.autograd.grad(d, list(exact.values()), gradient[: len(d)].double())


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, sizes, recompute):
    torch.manual_seed(0)
    of, function, names = CASES[name]
    given = drawn(names)
    offsets = torch.tensor(sizes, device="cuda").cumsum(0).int()
    gradient = torch.randn(ROWS, N, device="cuda").to(BF16)
    gradient[sum(sizes) :] = torch.nan
    inputs = {name: given[name] for name in names}
    if recompute:
        with co.recompute():
            d = co.grouped_gemm(given["x"], given["w"], offsets, epilogue=of, **inputs)
    else:
        d = co.grouped_gemm(given["x"], given["w"], offsets, epilogue=of, **inputs)
    found = torch.autograd.grad(d, list(given.values()), gradient)
    for x, y, like in zip(found, wanted(function, given, sizes, gradient), given.values(), strict=True):
        assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        assert (x.double() - y).norm() <= (0.01 if like.ndim else 0.05) * y.norm()


def test_nothing_waits_for_the_device():
    given = drawn(("bias", "weight", "residual", "alpha"))
    offsets = torch.tensor(SIZES["ragged"], device="cuda").cumsum(0).int()
    x, w, *_ = given.values()
    inputs = dict(list(given.items())[2:])

    def step():
        co.grouped_gemm(x, w, offsets, epilogue=routed, **inputs).sum().backward()

    step()
    with tensors.without_synchronisation():
        step()
