"""Norms and gates on the device: against float64 and PyTorch's own error, for every way to get a row's statistic."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import composed
from cutlass_ops.run import ops
from cutlass_ops.run.registry import Registry
from tests.gpu import oracle, tensors
from tests.gpu.memory import placed
from tests.gpu.tensors import DTYPES

pytestmark = pytest.mark.gpu

EPS = 1e-5
NAN, INF = math.nan, math.inf
# One row, one more than a tile's, and several tiles; K beyond whole steps of the main loop.
SHAPES = [(1, 256, 512), (65, 264, 520), (333, 512, 4096)]
MISALIGNED = (33, 63, 65)
WAYS = ("gathered", "sums", "rstd")


@co.epilogue
def bias_gelu_residual(acc, bias: co.Row, residual: co.Tile):
    """What may follow a norm, with an output besides D."""
    d = co.gelu(acc + bias, approximate="tanh") + residual
    return {"d": d, "row": co.sum_square(d, dim=1)}


def draw(dtype, shape, kind="normal"):
    """Return x (M, K), a weight (N, K) and gamma."""
    m, n, k = shape
    x = torch.randn(m, k, device="cuda")
    if kind == "heavy":
        x[:, ::61] *= 1000
    if kind == "tiny":
        x *= 1e-4
    weight, gamma = torch.randn(n, k, device="cuda") / math.sqrt(k), 1 + 0.3 * torch.randn(k, device="cuda")
    return [t.to(DTYPES[dtype]) for t in (x, weight, gamma)]


def sums(x):
    return co.RowStatistic(x.float().square().sum(-1), x.shape[-1], EPS)


def given(way, x):
    return {"gathered": {"eps": EPS}, "sums": {"rstd": sums(x)}, "rstd": {"rstd": sums(x).rstd}}[way]


def exact_rms(x, weight, gamma=None):
    return F.linear(
        F.rms_norm(x.double(), x.shape[-1:], None if gamma is None else gamma.double(), EPS), weight.double()
    )


def eager_rms(x, weight, gamma=None):
    return F.linear(F.rms_norm(x, x.shape[-1:], gamma, EPS), weight)


@pytest.mark.parametrize("shape", [*SHAPES, MISALIGNED], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny"])
def test_rmsnorm(shape, dtype, way, kind):
    x, weight, gamma = draw(dtype, shape, kind)
    prepared = co.prepare(weight.t(), gamma)
    wanted, eager = exact_rms(x, weight, gamma), eager_rms(x, weight, gamma)
    here = placed(wanted.shape, Operand.of(f"{dtype}.row{'.align1' if shape == MISALIGNED else ''}"))
    co.rmsnorm_gemm(x, prepared, **given(way, x), out=here.view)
    oracle.assert_close(here.view, wanted, eager)
    here.assert_only()
    first = co.rmsnorm_gemm(x, prepared, **given(way, x))
    for _ in range(3):  # warm calls, by other values of eps as well
        assert torch.equal(co.rmsnorm_gemm(x, prepared, **given(way, x)), first)
    oracle.assert_close(co.rmsnorm_gemm(x, weight.t(), gamma, **given(way, x)), wanted, eager)


@pytest.mark.parametrize("eps", [0.0, 1e-3, 1.0])
def test_one_kernel_serves_every_eps(eps):
    x, weight, _ = draw("bf16", SHAPES[1])
    before = len(Registry.current().entries())
    wanted = F.linear(F.rms_norm(x.double(), x.shape[-1:], None, eps), weight.double())
    for value in (eps, torch.tensor(eps), torch.tensor(eps, device="cuda")):
        oracle.assert_close(co.rmsnorm_gemm(x, weight.t(), eps=value), wanted)
    assert len(Registry.current().entries()) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_rows_of_zeros_nan_and_infinity(way, dtype, shape):
    x, weight, _ = draw(dtype, shape)
    clean = co.rmsnorm_gemm(x, weight.t(), **given(way, x))
    x[0], x[7, 5], x[9, -1], x[64, 0] = 0, NAN, INF, -INF
    found, wanted = co.rmsnorm_gemm(x, weight.t(), **given(way, x)), eager_rms(x, weight)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert (found[0] == 0).all()
    touched = torch.zeros(shape[0], dtype=torch.bool, device="cuda")
    touched[[0, 7, 9, 64]] = True
    assert found[touched][1:].isnan().all()
    assert torch.equal(found[~touched], clean[~touched])


@pytest.mark.parametrize("way", WAYS)
def test_a_product_beyond_fp16_is_scaled_before_it_is_rounded(way):
    x, weight, _ = draw("f16", SHAPES[2])
    x, weight = (x * 1e4).half(), weight * 8
    assert (x @ weight.t()).isinf().any()
    oracle.assert_close(co.rmsnorm_gemm(x, weight.t(), **given(way, x)), exact_rms(x, weight), eager_rms(x, weight))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_an_epilogue_follows_the_norm(shape, dtype):
    (m, n, _), (x, weight, gamma) = shape, draw(dtype, shape)
    bias, residual = tensors.vector(n, dtype), torch.randn(m, n, device="cuda").to(DTYPES[dtype])
    prepared = co.prepare(weight.t(), gamma)
    found = co.rmsnorm_gemm(x, prepared, eps=EPS, epilogue=bias_gelu_residual, bias=bias, residual=residual)
    wanted = F.gelu(exact_rms(x, weight, gamma) + bias.double(), approximate="tanh") + residual.double()
    eager = F.gelu(eager_rms(x, weight, gamma) + bias, approximate="tanh") + residual
    oracle.assert_close(found.d, wanted, eager)
    assert oracle.error(found.row, wanted.square().sum(1)) <= torch.finfo(DTYPES[dtype]).eps


@pytest.mark.parametrize("shape", [*SHAPES, MISALIGNED], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_statistic_of_a_residual_stream_feeds_the_next_gemm(shape, dtype, in_place):
    m, n, _ = shape
    x, weight, _ = draw(dtype, shape)
    residual = torch.randn(m, n, device="cuda").to(DTYPES[dtype])
    wanted, eager = x.double() @ weight.t().double() + residual.double(), x @ weight.t() + residual
    y, statistic = co.gemm_residual_rms(x, weight.t(), residual, eps=EPS, out=residual if in_place else None)
    oracle.assert_close(y, wanted, eager)
    # To FP32's sums, of y as it was stored: of its unrounded values they would differ in the third digit.
    torch.testing.assert_close(statistic.sum_square.double(), y.double().square().sum(1), rtol=2e-5, atol=1e-6)
    following = torch.randn(shape[2], n, device="cuda").to(DTYPES[dtype]) / math.sqrt(n)
    d = co.rmsnorm_gemm(y, following.t(), rstd=statistic)
    oracle.assert_close(d, exact_rms(y, following), eager_rms(y, following))
    again = co.rmsnorm_gemm(y, following.t(), rstd=replace(statistic, eps=0.5), out_dtype=torch.float32)
    unscaled = y.double() @ following.t().double()
    assert oracle.error(again, unscaled * (y.double().square().mean(1, keepdim=True) + 0.5).rsqrt()) <= 2e-5


def test_a_chain_of_launches_in_a_graph():
    """Each kernel reads what the one before wrote: nothing may start too early, however often it is replayed."""
    shape = (333, 512, 512)
    x, weight, gamma = draw("bf16", shape)
    prepared = co.prepare(weight.t(), gamma)

    def run():
        y, statistic = x, None
        for _ in range(4):
            h = co.rmsnorm_gemm(y, prepared, **({"eps": EPS} if statistic is None else {"rstd": statistic}))
            y, statistic = co.gemm_residual_rms(h, weight.t(), y, eps=EPS)
        return y, statistic.sum_square

    with torch.inference_mode():
        wanted = run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        for _ in range(20):
            for tensor in found:
                tensor.fill_(NAN)
            graph.replay()
            torch.cuda.synchronize()
            for tensor, right in zip(found, wanted, strict=True):
                assert torch.equal(tensor, right)


@pytest.mark.parametrize("shape", [*SHAPES, MISALIGNED], ids=str)
@pytest.mark.parametrize(("dtype", "mean"), [("bf16", 0), ("f16", 0), ("bf16", 100), ("f16", 30)])
def test_layernorm(shape, dtype, mean):
    x, weight, gamma = draw(dtype, shape)
    x, beta = x + mean, tensors.vector(shape[2], dtype)
    exact = [t.double() for t in (x, gamma, beta, weight)]
    wanted = F.linear(F.layer_norm(exact[0], x.shape[-1:], exact[1], exact[2], EPS), exact[3])
    eager = F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), weight)
    found = co.layernorm_gemm(x, co.prepare(weight.t(), gamma, beta, norm="layer"), eps=EPS)
    oracle.assert_close(found, wanted, eager)
    variance, means = torch.var_mean(x.float(), -1, correction=0)
    moments = {"mean": means, "rstd": (variance + EPS).rsqrt()}
    oracle.assert_close(co.layernorm_gemm(x, weight.t(), gamma, beta, **moments), wanted, eager)


@pytest.mark.parametrize("shape", [*SHAPES, MISALIGNED], ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("way", [None, *WAYS])
def test_swiglu(shape, dtype, way):
    x, gate, gamma = draw(dtype, shape, "normal" if way is None else "heavy")
    up = draw(dtype, shape)[1]

    def composed(x, gate, up):
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    if way is None:
        found = co.gemm_swiglu(x, gate.t(), up.t())
        wanted, eager = composed(x.double(), gate.double(), up.double()), composed(x, gate, up)
    else:
        found = co.gemm_swiglu(x, *(co.prepare(w.t(), gamma) for w in (gate, up)), **given(way, x))
        normed = F.rms_norm(x.double(), x.shape[-1:], gamma.double(), EPS)
        wanted = composed(normed, gate.double(), up.double())
        eager = composed(F.rms_norm(x, x.shape[-1:], gamma, EPS), gate, up)
    oracle.assert_close(found, wanted, eager)


def test_swiglus_weights_need_one_major():
    x, gate, _ = draw("bf16", SHAPES[1])
    with pytest.raises(ValueError, match=r"b is col-major, up is row-major: both weights need the same major"):
        co.gemm_swiglu(x, gate.t(), gate.t().contiguous())


def test_aligned_gates_are_one_kernel():
    x, gate, _ = draw("bf16", SHAPES[1])
    plan = ops.op(composed.swiglu).plan(x, gate.t(), gate.t())
    assert plan.spec.epilogue.products == ("up",)
    assert plan.spec.inputs[0] == plan.spec.b
