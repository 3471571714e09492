"""Norms fused with GEMMs on CPU tensors: against float64 and PyTorch's own error, and what is refused in words."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.autograd import forward_ad

import cutlass_ops as co
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.run import folding, norms

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
M, N, K, EPS = 33, 72, 512, 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def rows(kind, dtype, m=M, k=K):
    """Return rows of x: what a norm meets in a network, and what is hard for it."""
    x = torch.randn(m, k)
    if kind == "heavy":
        x[:, ::61] *= 1000  # outlier channels
    if kind == "tiny":
        x *= 1e-4
    return x.to(dtype)


def weights(dtype, n=N, k=K):
    """Return a weight (N, K) as a linear layer has it, and gamma."""
    return (torch.randn(n, k) / math.sqrt(k)).to(dtype), (1 + 0.3 * torch.randn(k)).to(dtype)


def exact_rms(x, weight, gamma=None, eps=EPS):
    return F.linear(
        F.rms_norm(x.double(), x.shape[-1:], None if gamma is None else gamma.double(), eps), weight.double()
    )


def eager_rms(x, weight, gamma=None, eps=EPS):
    return F.linear(F.rms_norm(x, x.shape[-1:], gamma, eps), weight)


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def assert_accurate(found, wanted, eager):
    assert found.shape == wanted.shape
    assert error(found, wanted) <= 2 * error(eager, wanted)


# ---- RMSNorm ------------------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny"])
@pytest.mark.parametrize("with_gamma", [False, True])
def test_rmsnorm_is_as_accurate_as_pytorchs_however_it_is_given(kind, dtype, with_gamma):
    x, (weight, gamma) = rows(kind, dtype), weights(dtype)
    gamma = gamma if with_gamma else None
    wanted, eager = exact_rms(x, weight, gamma), eager_rms(x, weight, gamma)
    found = co.rmsnorm_gemm(x, weight.t(), gamma, eps=EPS)
    assert found.dtype == dtype
    assert_accurate(found, wanted, eager)
    rstd = (x.float().square().mean(1) + EPS).rsqrt()
    statistic = co.RowStatistic(x.float().square().sum(1), K, EPS)
    torch.testing.assert_close(statistic.rstd, rstd)
    for given in (rstd, statistic):
        assert_accurate(co.rmsnorm_gemm(x, weight.t(), gamma, rstd=given), wanted, eager)
    if with_gamma:
        assert torch.equal(co.rmsnorm_gemm(x, co.prepare(weight.t(), gamma), eps=EPS), found)


@pytest.mark.parametrize("eps", [0.0, 1e-12, 0.1, 3, torch.tensor(0.1)])
def test_eps_is_inside_the_root_and_a_launch_argument(eps):
    x, (weight, _) = rows("normal", BF16), weights(BF16)
    found = co.rmsnorm_gemm(x, weight.t(), eps=eps, out_dtype=F32)
    assert error(found, exact_rms(x, weight, eps=float(eps))) <= 1e-5
    assert norms.rmsnorm_op().graph == composed.rms_norm.graph  # and no constant in it


@DTYPES
def test_rows_of_zeros_nan_and_infinity_come_out_as_pytorchs(dtype):
    x, (weight, gamma) = rows("normal", dtype), weights(dtype)
    x[0], x[1, 5], x[2, 7], x[3, 9] = 0, math.nan, math.inf, -math.inf
    if dtype == BF16:
        x[4] = 1e25 * x[5]  # its squares are beyond FP32: PyTorch has 0 there
    for eps in (EPS, 0.0):
        wanted = eager_rms(x, weight, gamma, eps)
        for found in (
            co.rmsnorm_gemm(x, weight.t(), gamma, eps=eps),
            co.rmsnorm_gemm(x, weight.t(), gamma, rstd=co.RowStatistic(x.float().square().sum(1), K, eps)),
        ):
            assert torch.equal(found.isnan(), wanted.isnan())
            assert found[1:4].isnan().all()
            assert not found.isinf().any()
            assert torch.equal(found[4] == 0, wanted[4] == 0)
            assert found[0].isnan().all() if eps == 0 else (found[0] == 0).all()
    # The other rows do not notice.
    assert torch.equal(found[5:], co.rmsnorm_gemm(x[5:], weight.t(), gamma, eps=0.0))


def test_a_product_beyond_fp16_is_scaled_before_it_is_rounded():
    x, (weight, _) = rows("normal", F16), weights(F16)
    x, weight = (x * 1e4).to(F16), weight * 8
    assert (x @ weight.t()).isinf().any()
    found = co.rmsnorm_gemm(x, weight.t(), eps=EPS)
    assert found.isfinite().all()
    assert_accurate(found, exact_rms(x, weight), eager_rms(x, weight))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0, 4)])
@pytest.mark.parametrize("given", ["gathered", "statistic", "tensor"])
def test_leading_dimensions_of_x_and_its_statistic(batch, given):
    x, (weight, _) = torch.randn(*batch, K).to(BF16), weights(BF16)
    statistic = co.RowStatistic(x.float().square().sum(-1), K, EPS)
    arguments = {"gathered": {"eps": EPS}, "statistic": {"rstd": statistic}, "tensor": {"rstd": statistic.rstd}}[given]
    found = co.rmsnorm_gemm(x, weight.t(), **arguments)
    wanted = exact_rms(x.reshape(-1, K), weight).view(*batch, N)
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted, rtol=0.01, atol=0.01)
    if given == "statistic":  # which still holds after a view of x
        flat = co.rmsnorm_gemm(x.reshape(-1, K), weight.t(), **arguments)
        assert torch.equal(flat, found.view(-1, N))


def test_without_columns_the_norm_of_nothing_is_multiplied():
    x, w = torch.zeros(3, 0, dtype=BF16), torch.zeros(0, 5, dtype=BF16)
    wanted = F.rms_norm(x, (0,), eps=EPS) @ w
    assert torch.equal(co.rmsnorm_gemm(x, w, eps=EPS), wanted)
    assert torch.equal(co.rmsnorm_gemm(x, w, rstd=co.RowStatistic(torch.zeros(3), 0, EPS)), wanted)


# ---- What follows -------------------------------------------------------------------------------------------------


@co.epilogue
def bias_gelu(acc, bias: co.Row, residual: co.Tile):
    """An activation, a residual, and a sum of what is stored."""
    d = co.gelu(acc + bias) + residual
    return {"d": d, "row": co.sum(d, dim=1)}


def test_any_epilogue_follows_the_norm():
    x, (weight, gamma) = rows("normal", BF16), weights(BF16)
    inputs = {"bias": torch.randn(N).to(BF16), "residual": torch.randn(M, N).to(BF16)}
    out = torch.full((M, N), math.nan, dtype=BF16)
    found = co.rmsnorm_gemm(x, weight.t(), gamma, eps=EPS, epilogue=bias_gelu, out=out, **inputs)
    wanted = F.gelu(exact_rms(x, weight, gamma) + inputs["bias"].double()) + inputs["residual"].double()
    eager = F.gelu(eager_rms(x, weight, gamma) + inputs["bias"]) + inputs["residual"]
    assert found.d is out
    assert_accurate(found.d, wanted, eager)
    assert error(found.row, wanted.sum(1)) <= 2e-3


@co.epilogue
def geglu(acc, up: co.Product):
    """Another gate."""
    return co.gelu(acc, approximate="tanh") * up


@DTYPES
@pytest.mark.parametrize("how", ["plain", "gamma", "prepared"])
def test_a_product_behind_a_norm_is_one_of_the_normalised_rows(dtype, how):
    x, (weight, gamma), (up, _) = rows("heavy", dtype), weights(dtype), weights(dtype)
    used = None if how == "plain" else gamma
    matrices = [co.prepare(w.t(), gamma) if how == "prepared" else w.t() for w in (weight, up)]
    arguments = {"gamma": gamma} if how == "gamma" else {}
    found = co.rmsnorm_gemm(x, matrices[0], **arguments, eps=EPS, epilogue=geglu, up=matrices[1])
    wanted = F.gelu(exact_rms(x, weight, used), approximate="tanh") * exact_rms(x, up, used)
    eager = F.gelu(eager_rms(x, weight, used), approximate="tanh") * eager_rms(x, up, used)
    assert_accurate(found, wanted, eager)


# ---- The statistic from the GEMM before ---------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize("in_place", [False, True])
def test_the_statistic_of_a_residual_stream(dtype, in_place):
    a, b, residual = torch.randn(2, 3, 40).to(dtype), torch.randn(40, K).to(dtype), torch.randn(2, 3, K).to(dtype)
    weight, gamma = weights(dtype)
    exact, eager = a.double() @ b.double() + residual.double(), a @ b + residual
    y, statistic = co.gemm_residual_rms(a, b, residual, eps=EPS, out=residual if in_place else None)
    assert y.dtype == dtype
    assert (y is residual) is in_place
    assert error(y, exact) <= 2 * error(eager, exact)
    # Of y as it is stored, which differs from the sum before its rounding.
    assert statistic.sum_square.dtype == F32
    torch.testing.assert_close(statistic.sum_square, y.float().square().sum(-1), rtol=1e-6, atol=0)
    assert (statistic.count, statistic.eps) == (K, EPS)
    d = co.rmsnorm_gemm(y, weight.t(), gamma, rstd=statistic)
    assert_accurate(d, exact_rms(y, weight, gamma), eager_rms(y, weight, gamma))
    other = dataclasses.replace(statistic, eps=1.0)
    wanted = exact_rms(y, weight, eps=1.0)
    assert error(co.rmsnorm_gemm(y, weight.t(), rstd=other, out_dtype=F32), wanted) <= 1e-5


def test_an_epilogue_before_the_residual():
    a, b = torch.randn(5, 40).to(BF16), torch.randn(40, 48).to(BF16)
    bias, residual = torch.randn(48).to(BF16), torch.randn(5, 48)
    y, statistic = co.gemm_residual_rms(a, b, residual, eps=EPS, epilogue=builtin.bias_relu, bias=bias)
    assert error(y, F.relu(a.double() @ b.double() + bias.double()) + residual.double()) <= torch.finfo(BF16).eps
    torch.testing.assert_close(statistic.sum_square, y.float().square().sum(-1))


# ---- Prepared weights ---------------------------------------------------------------------------------------------


@DTYPES
@pytest.mark.parametrize(("n", "k"), [(72, 64), (71, 63), (1, 64), (64, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_prepared_weights_keep_their_major_and_are_aligned(n, k, transposed, dtype):
    w = torch.randn(n, k).to(dtype).t() if transposed else torch.randn(k, n).to(dtype)
    gamma = torch.randn(k)
    found = co.prepare(w, gamma).matrix
    assert torch.equal(found, (w.double() * gamma.double()[:, None]).to(dtype))
    contiguous, other = (0, 1) if transposed else (1, 0)
    if min(n, k) > 1:
        assert found.stride(contiguous) == 1
        assert found.stride(other) % 8 == 0


@pytest.mark.parametrize("factor", [2e-3, 1.0, 60000.0])
def test_what_fp16_can_hold_is_prepared(factor):
    weight, gamma = weights(F16)
    folded = co.prepare(weight.t(), torch.full((K,), factor)).matrix
    assert error(folded, weight.t().double() * factor) <= torch.finfo(F16).eps
    assert folded.isfinite().all()
    # What was infinite or NaN before is not the folding's to judge.
    weight[3, 5], weight[4, 5] = math.inf, math.nan
    assert not co.prepare(weight.t(), gamma).matrix[5, 3:5].isfinite().any()


def test_what_fp16_cannot_hold_is_refused_and_bf16_serves():
    weight, gamma = weights(F16)
    large, small = gamma.clone(), gamma * 1e-5
    large[7] = 60000
    weight[11, 7] = 4
    with pytest.raises(
        ValueError, match=r"exceeds the largest value of torch\.float16, 65504, in 1 of 72 columns: use BF16"
    ):
        co.prepare(weight.t(), large)
    with pytest.raises(ValueError, match=r"too small for torch\.float16.* in 72 of 72 columns: use BF16"):
        co.prepare(weight.t(), small)
    for extreme in (large, small):
        co.prepare(weight.t().to(BF16), extreme)
    # Unprepared it cannot be checked, but it can be seen.
    x = rows("normal", F16)
    assert not co.rmsnorm_gemm(x, weight.t(), large, eps=EPS)[:, 11].isfinite().any()


# ---- LayerNorm ----------------------------------------------------------------------------------------------------


def exact_layer(x, weight, gamma=None, beta=None, eps=EPS):
    vectors = (v if v is None else v.double() for v in (gamma, beta))
    return F.linear(F.layer_norm(x.double(), x.shape[-1:], *vectors, eps), weight.double())


def eager_layer(x, weight, gamma=None, beta=None, eps=EPS):
    return F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, eps), weight)


@DTYPES
@pytest.mark.parametrize("kind", ["normal", "heavy", "tiny"])
@pytest.mark.parametrize("vectors", [(False, False), (True, False), (True, True), (False, True)])
def test_layernorm_is_as_accurate_as_pytorchs(kind, dtype, vectors):
    x, (weight, gamma) = rows(kind, dtype), weights(dtype)
    gamma, beta = (v if used else None for v, used in zip((gamma, torch.randn(K).to(dtype)), vectors, strict=True))
    wanted, eager = exact_layer(x, weight, gamma, beta), eager_layer(x, weight, gamma, beta)
    assert_accurate(co.layernorm_gemm(x, weight.t(), gamma, beta, eps=EPS), wanted, eager)
    prepared = co.prepare(weight.t(), gamma, beta, norm="layer")
    assert (prepared.shift is None) is (beta is None)
    assert_accurate(co.layernorm_gemm(x, prepared, eps=EPS), wanted, eager)


@pytest.mark.parametrize(("dtype", "ratio"), [(F16, 1), (F16, 10), (F16, 50), (BF16, 10), (BF16, 50), (BF16, 200)])
def test_layernorm_of_rows_far_from_zero(dtype, ratio):
    x, (weight, _) = (torch.randn(M, 4096) + ratio).to(dtype), weights(dtype, k=4096)
    for b in (weight.t(), co.prepare(weight.t(), norm="layer")):
        assert_accurate(co.layernorm_gemm(x, b, eps=EPS), exact_layer(x, weight), eager_layer(x, weight))


@DTYPES
def test_with_moments_given_rows_may_be_further_from_zero_than_one_pass_can_tell(dtype):
    x, (weight, _) = (torch.randn(M, 4096) + 1000).to(dtype), weights(dtype, k=4096)
    wanted, eager = exact_layer(x, weight), eager_layer(x, weight)
    variance, mean = torch.var_mean(x.float(), -1, correction=0)
    found = co.layernorm_gemm(x, weight.t(), mean=mean, rstd=(variance + EPS).rsqrt())
    assert_accurate(found, wanted, eager)
    # One pass has no digits left for the variance: the limit that the documentation names is one.
    prepared = co.prepare(weight.t(), norm="layer")
    assert error(co.layernorm_gemm(x, prepared, eps=EPS), wanted) > 2 * error(eager, wanted)


def test_a_layernorm_that_is_not_prepared_folds_nothing(monkeypatch):
    monkeypatch.setattr("cutlass_ops.run.weights.fold_layernorm", None)
    x, (weight, gamma) = rows("normal", BF16), weights(BF16)
    found = co.layernorm_gemm(x, weight.t(), gamma, gamma, eps=EPS)
    assert_accurate(found, exact_layer(x, weight, gamma, gamma), eager_layer(x, weight, gamma, gamma))


def test_layernorms_rows_of_zeros_nan_and_infinity():
    x, (weight, _) = rows("normal", BF16), weights(BF16)
    beta = torch.randn(K).to(BF16)
    x[0], x[1, 5], x[2, 7] = 0, math.nan, math.inf
    found = co.layernorm_gemm(x, weight.t(), None, beta, eps=EPS)
    wanted = eager_layer(x, weight, None, beta)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert error(found[0], beta.double() @ weight.t().double()) <= torch.finfo(BF16).eps


def test_an_epilogue_follows_a_layernorm():
    x, (weight, gamma) = rows("normal", BF16), weights(BF16)
    bias, beta = torch.randn(N), torch.randn(K)
    found = co.layernorm_gemm(x, weight.t(), gamma, beta, eps=EPS, epilogue=builtin.bias_gelu, bias=bias)
    wanted = F.gelu(exact_layer(x, weight, gamma, beta) + bias.double())
    assert_accurate(found, wanted, F.gelu(eager_layer(x, weight, gamma, beta.to(BF16)) + bias.to(BF16)))


# ---- Errors -------------------------------------------------------------------------------------------------------


@co.epilogue
def gathering(acc):
    """Takes of A what a norm changes."""
    return acc * co.mean_of_a()


@co.epilogue
def named_gamma(acc, gamma: co.Row):
    """An input by the name of an argument."""
    return acc * gamma


@co.epilogue
def named_as_the_sums(acc, row_sum_square: co.Col):
    """An input by the name of one of the norm's."""
    return acc * row_sum_square


X, W, GAMMA = torch.ones(4, 8, dtype=BF16), torch.ones(8, 6, dtype=BF16), torch.ones(8, dtype=BF16)
SUMS = co.RowStatistic(torch.ones(4), 8, EPS)
TILE = torch.ones(4, 6, dtype=BF16)
ERRORS = {
    "no eps": (lambda: co.rmsnorm_gemm(X, W), TypeError, "eps and rstd are missing"),
    "eps twice": (lambda: co.rmsnorm_gemm(X, W, eps=EPS, rstd=SUMS), TypeError, "eps and rstd are both given"),
    "eps as text": (lambda: co.rmsnorm_gemm(X, W, eps="1e-5"), TypeError, "^eps must be a number"),
    "rstd in 16 bits": (lambda: co.rmsnorm_gemm(X, W, rstd=X[:, 0]), TypeError, r"^rstd is torch\.bfloat16: pass FP32"),
    "a statistic in 16 bits": (
        lambda: co.rmsnorm_gemm(X, W, rstd=co.RowStatistic(X[:, 0], 8, EPS)),
        TypeError, r"^rstd\.sum_square is torch\.bfloat16: pass FP32",
    ),
    "prepared twice": (
        lambda: co.prepare(co.prepare(W, norm="layer"), norm="layer"), TypeError,
        r"^w must be .*: pass w\.matrix",
    ),
    "rstd as a number": (lambda: co.rmsnorm_gemm(X, W, rstd=1.0), TypeError, r"^rstd must be a torch\.Tensor"),
    "rstd of other rows": (lambda: co.rmsnorm_gemm(X, W, rstd=torch.ones(5)), ValueError, r"^rstd has shape \(5,\)"),
    "another tensor's statistic": (
        lambda: co.rmsnorm_gemm(torch.ones(4, 6, dtype=BF16), torch.ones(6, 6, dtype=BF16), rstd=SUMS),
        ValueError, "^rstd is the statistic of rows of 8 elements, and rows of a have 6",
    ),
    "gamma of N": (lambda: co.rmsnorm_gemm(X, W, GAMMA[:6], eps=EPS), ValueError, r"gamma \(6,\).*pass b\.t\(\)$"),
    "gamma twice": (lambda: co.rmsnorm_gemm(X, co.prepare(W, GAMMA), GAMMA, eps=EPS), TypeError, "^b is prepared and"),
    "a weight (N, K)": (lambda: co.rmsnorm_gemm(X, W.t(), eps=EPS), ValueError, r"pass b\.t\(\)$"),
    "prepare with a gradient": (
        lambda: co.prepare(W, torch.nn.Parameter(GAMMA)), ValueError, "^gamma requires grad.*no_grad",
    ),
    "an epilogue that is none": (lambda: co.rmsnorm_gemm(X, W, eps=EPS, epilogue=F.relu), TypeError, "decorated with"),
    "an epilogue that gathers": (
        lambda: co.rmsnorm_gemm(X, W, eps=EPS, epilogue=gathering), ValueError, "^gathering takes mean_of_a, which",
    ),
    "an input by a taken name": (
        lambda: co.rmsnorm_gemm(X, W, eps=EPS, epilogue=named_gamma), ValueError, "^named_gamma has an input gamma",
    ),
    "an input by the norm's name": (
        lambda: co.rmsnorm_gemm(X, W, rstd=SUMS, epilogue=named_as_the_sums, row_sum_square=SUMS.sum_square),
        ValueError, "have the name row_sum_square: rename",
    ),
    "an input missing": (
        lambda: co.rmsnorm_gemm(X, W, eps=EPS, epilogue=builtin.bias), TypeError,
        r"^rmsnorm_gemm takes.* is missing$",
    ),
    "one weight prepared": (
        lambda: co.rmsnorm_gemm(X, co.prepare(W, GAMMA), eps=EPS, epilogue=geglu, up=W),
        TypeError, r"^b is prepared and up is not: pass prepare\(up, gamma\)",
    ),
    "the other prepared": (
        lambda: co.rmsnorm_gemm(X, W, eps=EPS, epilogue=geglu, up=co.prepare(W, GAMMA)),
        TypeError, "^up is prepared and b is not",
    ),
    "a residual of other rows": (
        lambda: co.gemm_residual_rms(X, W, TILE[:3], eps=EPS), ValueError, r"^residual has shape \(3, 6\)",
    ),
    "two outputs before the residual": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, epilogue=bias_gelu), ValueError, "D as its only output",
    ),
    "a dtype of y": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, out_dtype=torch.float32), TypeError, "takes no out_dtype",
    ),
    "amax of a tensor": (
        lambda: co.rmsnorm_gemm(X, W, eps=EPS, amax=torch.ones(4)), TypeError, "amax must be True or False",
    ),
    "an op given something else": (lambda: norms.rmsnorm_op(given="sum"), ValueError, '^given is .sum.: use "sums"'),
    "no eps for a layernorm": (lambda: co.layernorm_gemm(X, W), TypeError, "eps, mean and rstd are missing"),
    "mean alone": (lambda: co.layernorm_gemm(X, W, mean=torch.ones(4)), TypeError, "mean is given alone"),
    "moments and eps": (
        lambda: co.layernorm_gemm(X, W, eps=EPS, mean=torch.ones(4), rstd=torch.ones(4)),
        TypeError, "eps and rstd are both given",
    ),
    "gamma beside a prepared weight": (
        lambda: co.layernorm_gemm(X, co.prepare(W, norm="layer"), GAMMA, eps=EPS), TypeError,
        "^b is prepared and already",
    ),
    "beta of N": (lambda: co.layernorm_gemm(X, W, None, GAMMA[:6], eps=EPS), ValueError, r"beta \(6,\)"),
    "a product behind a layernorm": (
        lambda: co.layernorm_gemm(X, W, eps=EPS, epilogue=geglu, up=W), ValueError, "^geglu has the product up, but",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_and_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


# ---- Gamma folded again ---------------------------------------------------------------------------------------------


# A weight's placement, and a gamma.
FOLDED = {
    "whole lines along K": (lambda w: w.t().contiguous().t(), lambda g: g),
    "whole lines along N": (lambda w: w.contiguous(), lambda g: g),
    "gamma in FP32": (lambda w: w.contiguous(), lambda g: g.float()),
    "gamma of every second element": (lambda w: w.contiguous(), lambda g: g.repeat_interleave(2)[::2]),
    "a part of a wider weight": (lambda w: torch.cat([w, w], 1)[:, : w.shape[1]], lambda g: g),
    "lines that are not whole": (lambda w: w[:, 1:].contiguous(), lambda g: g),
    "one column": (lambda w: w[:, :1].contiguous(), lambda g: g),
}


@pytest.mark.parametrize(("place", "of_gamma"), FOLDED.values(), ids=FOLDED)
def test_a_fold_lies_as_kernels_read_it_the_first_time_and_later(place, of_gamma):
    w, gamma = place(torch.randn(64, 40).to(BF16)), of_gamma(torch.rand(64).to(BF16))
    first = folding.fold(w, gamma)
    for _ in range(2):
        found = folding.fold(w, gamma)
        assert torch.equal(found, (w.double() * gamma.double()[:, None]).to(BF16))
        assert (found.dtype, found.stride()) == (BF16, first.stride())
        assert found.data_ptr() != first.data_ptr()
        along = 0 if found.stride(0) == 1 else 1
        assert found.stride(along) == 1
        assert found.stride(1 - along) % 8 == 0
        w.mul_(2)
    assert folding.fold(w, gamma.clone().requires_grad_()).grad_fn is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda w, g: (w, g[:-1]), ValueError, r"they must be \(K, N\) and \(K,\) with the same K"),
        (lambda w, g: (w, g.double()), TypeError, r"gamma is torch\.float64"),
        (lambda w, g: (w.float(), g), TypeError, r"w is torch\.float32"),
        (lambda w, g: (1.0, g), TypeError, r"w must be a torch\.Tensor"),
        (lambda w, g: (w.to_sparse(), g), TypeError, r"call w\.to_dense"),
        (lambda w, g: (w, g.to("meta")), ValueError, "gamma is on meta and w is on cpu"),
        (lambda w, g: (forward_ad.make_dual(w, torch.ones_like(w)), g), ValueError, "w has a tangent"),
    ],
)
def test_what_was_not_folded_before_is_still_checked(change, kind, message):
    w, gamma = torch.randn(K, N).to(BF16), torch.rand(K)
    folding.fold(w, gamma)
    with forward_ad.dual_level(), pytest.raises(kind, match=message):
        folding.fold(*change(w, gamma))


@pytest.mark.slow
def test_vmap_and_compilers_are_told_that_weights_are_prepared_outside():
    w, gamma = weights(BF16)[0].t(), torch.rand(K)
    batches = torch.stack([w, w])
    for prepared in (
        lambda w: co.prepare(w, gamma).matrix,
        lambda w: co.prepare(w, dtype=torch.float8_e4m3fn).matrix,
        lambda w: co.prepare(w, gamma, norm="layer").matrix,
    ):
        with pytest.raises(NotImplementedError, match=r"^w is a tensor of torch\.vmap, .* prepare weights one by one"):
            torch.vmap(prepared)(batches)
        torch.compiler.reset()
        with pytest.raises(Exception, match="prepare checks the values of a weight: call it outside"):
            torch.compile(prepared, backend="eager", fullgraph=True)(w)
        assert torch.equal(torch.compile(prepared, backend="eager")(w).float(), prepared(w).float())
    lines = torch.compile(lambda w: co.prepare(w).matrix, backend="eager", fullgraph=True)(w.float())
    assert torch.equal(lines, w.float())


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda w, g: co.prepare(w * 1e30, g * 1e30), ValueError, "^gamma times w exceeds .*columns: divide gamma"),
        (lambda w, g: co.prepare(w * 1e-20, g * 1e-20), ValueError, "^gamma times w is too .*columns: multiply gamma"),
        (lambda w, g: co.prepare(w.double()), TypeError, r"^w is torch\.float64: use one of torch\.float16, torch\.bf"),
        (lambda w, g: co.prepare(w[:, 0], g), ValueError, r"^w has shape \(512,\): it must be \(K, N\)$"),
        (lambda w, g: co.prepare(w[None], g, norm="layer"), ValueError, "^w has shape .*so prepare weights of"),
    ],
)
def test_advice_about_weights_can_be_followed(call, kind, message):
    with pytest.raises(kind, match=message):
        call(weights(BF16)[0].t(), torch.ones(K))
