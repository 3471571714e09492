"""Two GEMMs whose backward is one chain: the derivative between them is the epilogue of a GEMM, or a kernel between."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd import forward_ad

import cutlass_ops as co
from cutlass_ops.epilogue import Row, Tile, epilogue, functions
from cutlass_ops.run import backward, gated, ops
from cutlass_ops.run.chained import chain

BF16 = torch.bfloat16


@epilogue
def tanh_times(acc, bias: Row, gate: Tile):
    return functions.gelu(acc + bias, approximate="tanh") * gate


# Ops, the same in PyTorch, and what the first and the second take besides.
X, W1, B1, UP, GATE, W2, B2, RESIDUAL = (
    *((2, 8, 16), (24, 16), (24,), (24, 16), (2, 8, 24)),
    *((32, 24), (32,), (2, 8, 32)),
)
PAIRS = {
    "gelu": (
        lambda x, w1, b1, w2, b2: chain(co.gemm_bias_gelu, co.gemm_bias, x, w1.t(), w2.t(), [b1], [b2]),
        lambda x, w1, b1, w2, b2: F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2),
        [X, W1, B1, W2, B2],
    ),
    "relu_residual": (
        lambda x, w1, b1, w2, b2, r: chain(co.gemm_bias_relu, co.gemm_bias_residual, x, w1.t(), w2.t(), [b1], [b2, r]),
        lambda x, w1, b1, w2, b2, r: F.linear(F.relu(F.linear(x, w1, b1)), w2, b2) + r,
        [X, W1, B1, W2, B2, RESIDUAL],
    ),
    "swiglu": (
        lambda x, w1, up, w2: chain(gated.swiglu_op(None), ops.op_of(None), x, w1.t(), w2.t(), [up.t()], []),
        lambda x, w1, up, w2: F.linear(F.silu(F.linear(x, w1)) * F.linear(x, up), w2),
        [X, W1, UP, W2],
    ),
    "tiles": (
        lambda x, w1, b1, g, w2: chain(ops.op_of(tanh_times), ops.op_of(None), x, w1.t(), w2.t(), [b1, g], []),
        lambda x, w1, b1, g, w2: F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh") * g, w2),
        [X, W1, B1, GATE, W2],
    ),
}
# Nothing to chain: the first is linear, or the second is not.
APART = {
    "linear": (
        lambda x, w1, b1, w2: chain(co.gemm_bias, ops.op_of(None), x, w1.t(), w2.t(), [b1], []),
        lambda x, w1, b1, w2: F.linear(F.linear(x, w1, b1), w2),
        [X, W1, B1, W2],
    ),
    "activated": (
        lambda x, w1, b1, w2, b2: chain(co.gemm_bias_gelu, co.gemm_bias_gelu, x, w1.t(), w2.t(), [b1], [b2]),
        lambda x, w1, b1, w2, b2: F.gelu(F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)),
        [X, W1, B1, W2, B2],
    ),
}


def tensors(shapes, *, needed=None):
    torch.manual_seed(0)
    needed = needed or [True] * len(shapes)
    return [torch.randn(s).to(BF16).requires_grad_(n) for s, n in zip(shapes, needed, strict=True)]


def step(function, given):
    d = function(*given)
    grad = torch.linspace(-1, 1, d.numel(), dtype=torch.float64).reshape(d.shape).to(BF16).to(d.dtype)
    return d, torch.autograd.grad(d, [x for x in given if x.requires_grad], grad)


@pytest.mark.sample(9)
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", PAIRS | APART)
def test_a_chain_has_pytorch_s_gradients(name, backend):
    torch._dynamo.reset()
    mine, theirs, shapes = (PAIRS | APART)[name]
    given = tensors(shapes)
    function = mine if backend is None else torch.compile(mine, backend=backend, fullgraph=True)
    (d, found), (exact_d, exact) = (
        step(function, given),
        step(theirs, [x.detach().double().requires_grad_() for x in given]),
    )
    assert (d - exact_d).norm() <= 0.01 * exact_d.norm()
    for x, y, like in zip(found, exact, given, strict=True):
        assert (x.shape, x.dtype, x.stride()) == (like.shape, like.dtype, like.stride())
        assert (x - y).norm() <= 0.01 * y.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_a_step_of_a_chain_launches_an_elementwise_kernel_only_where_columns_are_added_up(name, device, monkeypatch):
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    mine, _, shapes = PAIRS[name]
    given = tensors(shapes)
    first = step(mine, given)[1]
    launched = len(device.launches)
    # Forward, the chain, a gradient for each matrix and X; of a product, one more each way.
    elementwise = [x for x in device.launches if isinstance(x.spec.config, co.types.PointwiseConfig)]
    assert len(elementwise) == (name != "swiglu")
    assert launched - len(elementwise) == (9 if name == "swiglu" else 6)
    device.closed = True
    again = step(mine, given)[1]
    assert len(device.launches) == 2 * launched
    assert all(map(torch.equal, first, again))
    assert [co.check(spec) for spec in device.loaded] == [()] * len(device.loaded)


@pytest.mark.parametrize("block", [co.nn.MLP(8, 16, dtype=torch.bfloat16), co.nn.GatedMLP(8, 16, dtype=torch.bfloat16)])
@pytest.mark.parametrize("norm", [torch.nn.Identity(), torch.nn.RMSNorm(8, dtype=torch.bfloat16)])
def test_a_residual_may_be_the_input_or_what_it_is_made_of(block, norm):
    x = torch.randn(5, 8).bfloat16().requires_grad_()
    once, again = (
        torch.autograd.grad(block(norm(x), residual=x).float().sum(), x, create_graph=each)[0] for each in (False, True)
    )
    torch.testing.assert_close(again, once, rtol=0.02, atol=0.02)


def test_a_chain_can_be_differentiated_again():
    mine, theirs, shapes = PAIRS["gelu"]

    def twice(function, given):
        (grad,) = torch.autograd.grad(function(*given).sum(), given[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), [given[1], given[3]])

    given = tensors(shapes)
    exact = twice(theirs, [x.detach().double().requires_grad_() for x in given])
    for x, y in zip(twice(mine, given), exact, strict=True):
        assert (x - y).norm() <= 0.02 * y.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch's own modules
def test_what_is_refused():
    mine, _, shapes = PAIRS["gelu"]
    given = tensors(shapes)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"^a has a tangent, and cutlass_ops has no forward-mode"),
    ):
        mine(forward_ad.make_dual(given[0].detach(), torch.ones_like(given[0])), *given[1:])
    with pytest.raises(NotImplementedError, match="does not support"):
        torch.vmap(lambda x: mine(x, *given[1:]))(given[0].detach()[None])
    with pytest.raises(ValueError, match=r"^a \(2, 8, 24\) and b \(16, 24\)"):
        chain(co.gemm_bias_gelu, co.gemm_bias, given[0], given[1].t(), given[1].t(), [given[2]], [given[4]])
