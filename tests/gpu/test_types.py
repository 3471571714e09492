"""The other types on the device: against float64 of what is multiplied, over shapes and layouts that are not usual."""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.base.dtypes import tf32
from cutlass_ops.choose import dispatch
from cutlass_ops.run import reference
from cutlass_ops.run.call import check_call, device_of, signature_of
from tests.gpu import oracle, tensors

pytestmark = pytest.mark.gpu

# One row, one more than a tile's, several tiles; K beyond whole steps; lines that no vector access divides.
SHAPES = [(1, 256, 512), (65, 264, 524), (333, 512, 1024), (129, 251, 1037)]
# Of FP32 sums, and of operands halfway between two numbers of TF32, which may be rounded to either.
SUMS = 5e-5
LAYOUTS = list(itertools.product(("row", "col"), repeat=2))


@co.epilogue
def bias_gelu_sum(acc, bias: co.Row, scale: co.Col, r: co.Tile):
    d = co.e.gelu(acc * scale + bias) + r
    return {"d": d, "row": co.e.sum(d, dim=1)}


def draw(m, n, k, a, b, *, aligned):
    x, w = tensors.matrix(m, k, "f32", a, aligned=aligned), tensors.matrix(k, n, "f32", b, aligned=aligned)
    bias, scale, r = torch.randn(n, device="cuda"), torch.rand(m, device="cuda"), torch.randn(m, n, device="cuda")
    return x, w, {"bias": bias, "scale": scale, "r": r}


def product(x, w):
    """Return what the Tensor Cores are to multiply, in float64."""
    return reference.as_multiplied(x, tf32).double() @ reference.as_multiplied(w, tf32).double()


@pytest.mark.parametrize(("a", "b"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("aligned", [True, False], ids=["aligned", "misaligned"])
def test_tf32_is_right(shape, a, b, aligned):
    m, n, k = shape
    x, w, inputs = draw(m, n, k, a, b, aligned=aligned)
    wanted = product(x, w)
    assert oracle.error(co.gemm(x, w, math="tf32"), wanted) <= SUMS
    d, row = co.gemm(x, w, epilogue=bias_gelu_sum, math="tf32", **inputs)
    wanted = F.gelu(wanted * inputs["scale"][:, None].double() + inputs["bias"].double()) + inputs["r"].double()
    assert oracle.error(d, wanted) <= SUMS
    assert oracle.error(row, wanted.sum(1)) <= SUMS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tf32_has_narrower_results(dtype):
    x, w, _ = draw(96, 264, 512, "row", "col", aligned=True)
    oracle.assert_close(co.gemm(x, w, math="tf32", out_dtype=dtype), product(x, w))


@pytest.mark.parametrize(("a", "b"), LAYOUTS)
def test_tf32_rounds_to_nearest(a, b):
    """Truncation would lose up to a whole unit in the last place; ties may go either way."""
    k, n = 64, 64
    x = torch.zeros(256, k, device="cuda")
    x[:, 0] = 1 + torch.arange(256, device="cuda") * 2.0**-18
    one = torch.zeros(k, n, device="cuda")
    one[0] = 1
    x, one = (y if major == "row" else y.t().contiguous().t() for y, major in ((x, a), (one, b)))
    found = co.gemm(x, one, math="tf32")[:, :1]
    assert ((found - x[:, :1]).abs() <= 2.0**-11).all()
    assert torch.equal(found, reference.as_multiplied(found, tf32))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0), (1, 1, 1)])
def test_tf32_of_nothing_and_of_one(m, n, k):
    x, w = torch.ones(m, k, device="cuda"), torch.ones(k, n, device="cuda")
    assert co.gemm(x, w, math="tf32").tolist() == torch.full((m, n), float(k)).tolist()


def test_tf32_in_batches():
    x, w = torch.randn(3, 65, 136, device="cuda"), torch.randn(3, 72, 136, device="cuda")
    assert oracle.error(co.gemm(x, w.mT, math="tf32"), product(x, w.mT)) <= SUMS
    turned = x.mT.contiguous().mT  # along M, which wgmma does not read
    assert oracle.error(co.gemm(turned, w.mT, math="tf32"), product(x, w.mT)) <= SUMS


def test_two_weights_in_tf32():
    @co.epilogue
    def gated(acc, up: co.Product):
        return co.e.silu(acc) * up

    x, gate, up = (torch.randn(rows, 512, device="cuda") / 512**0.25 for rows in (96, 256, 256))
    if not device_of(x.device).has_wgmma:
        pytest.skip("two weights need wgmma")
    found = co.gemm(x, gate.t(), epilogue=gated, up=up.t(), math="tf32")
    assert oracle.error(found, F.silu(product(x, gate.t())) * product(x, up.t())) <= SUMS


@pytest.mark.parametrize("m", [16, 512])
@pytest.mark.parametrize(("a", "b"), [("row", "col"), ("row", "row")])
def test_every_kernel_that_a_weight_may_need_is_right(m, a, b):
    x, w, _ = draw(m, 512, 2048, a, b, aligned=True)
    wanted = product(x, w)
    op = co.gemm_bias_relu.in_math("tf32")
    inputs = {"bias": torch.zeros(512, device="cuda")}
    call = check_call(op.graph, x, w, inputs, None, None, math="tf32")
    device = device_of(x.device)
    for spec in dispatch.decide(signature_of(call, device), device, call.problem).specs[:6]:
        assert oracle.error(co.build(spec)(x, w, **inputs), wanted.relu()) <= SUMS


def test_gradients_in_tf32():
    x, w = torch.randn(96, 256, device="cuda"), torch.randn(128, 256, device="cuda")
    x.requires_grad_(), w.requires_grad_()
    d = co.gemm(x, w.t(), math="tf32")
    g = torch.randn_like(d)
    d.backward(g)
    assert oracle.error(x.grad, product(g, w.detach())) <= SUMS
    assert oracle.error(w.grad, product(g.t(), x.detach())) <= SUMS


# ---- INT8 ------------------------------------------------------------------------------------------------------------


def whole(rows, columns):
    return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device="cuda")


def exact(x, w):
    """Return sums of whole numbers: float64 has them all."""
    return x.double() @ w.double()


# K in multiples of 16 bytes; sums below and above 2**24, up to which FP32 has every whole number.
INT8_SHAPES = [(1, 256, 512), (65, 264, 528), (333, 512, 4096), (129, 251, 1040), (17, 33, 16)]


@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
def test_int8_is_exact_before_the_epilogue(shape):
    m, n, k = shape
    x, w = whole(m, k), whole(n, k)
    found = co.gemm(x, w.t(), out_dtype=torch.float32)
    assert torch.equal(found, exact(x, w.t()).float())
    assert torch.equal(co.gemm(x, w.t()), exact(x, w.t()).float().bfloat16())


@pytest.mark.parametrize("m", [16, 512])
def test_the_greatest_sums_of_int8_are_exact(m):
    k = 65536
    x, w = torch.full((m, k), -128, dtype=torch.int8, device="cuda"), whole(64, k)
    w[0] = -128
    w[1, 1:] = -128
    assert torch.equal(co.gemm(x, w.t(), out_dtype=torch.float32), exact(x, w.t()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", INT8_SHAPES, ids=str)
def test_scales_and_an_epilogue_follow_int8(shape, dtype):
    @co.epilogue
    def bias_relu_sum(acc, bias: co.Row):
        d = co.e.relu(acc + bias)
        return {"d": d, "row": co.e.sum(d, dim=1)}

    m, n, k = shape
    x, w = whole(m, k), whole(n, k)
    scale_x, scale_w = (torch.rand(extent, device="cuda") / k**0.5 / 64 for extent in (m, n))
    bias = torch.randn(n, device="cuda")
    d, row = co.scaled_gemm(x, w.t(), scale_x, scale_w * 64, epilogue=bias_relu_sum, bias=bias, out_dtype=dtype)
    wanted = (exact(x, w.t()) * scale_x[:, None].double() * scale_w.double() * 64 + bias.double()).relu()
    oracle.assert_close(d, wanted)
    assert oracle.error(row, wanted.sum(1)) <= 2e-5


def test_int8_in_batches():
    x, w = whole(3 * 65, 144).view(3, 65, 144), whole(3 * 72, 144).view(3, 72, 144)
    found = co.gemm(x, w.mT, out_dtype=torch.float32)
    assert torch.equal(found, exact(x, w.mT).float())


@pytest.mark.parametrize("m", [16, 512])
def test_every_kernel_that_an_int8_weight_may_need_is_exact(m):
    x, w = whole(m, 2048), whole(512, 2048)
    bias = torch.zeros(512, device="cuda")
    call = check_call(co.gemm_bias_relu.graph, x, w.t(), {"bias": bias}, None, torch.float32)
    device = device_of(x.device)
    for spec in dispatch.decide(signature_of(call, device), device, call.problem).specs[:6]:
        assert torch.equal(co.build(spec)(x, w.t(), bias=bias), exact(x, w.t()).relu().float())
