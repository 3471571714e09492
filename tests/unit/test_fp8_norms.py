"""Norms, gates and residuals with FP8 operands and FP8 results, on the CPU: against FP64 of the same operands."""

import functools
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from signatures import H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds import legality
from cutlass_ops.operand import reference
from cutlass_ops.operand.call import check_call, signature_of
from cutlass_ops.run import fp8, gated, ops, portable
from cutlass_ops.run.requests import requested

E4M3, E5M2, BF16, F16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32
M, N, K, EPS = 24, 48, 64, 1e-5

pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def quantised(rows, columns, dtype=E4M3):
    """Return a matrix in FP8, and the scale of each row."""
    x = torch.randn(rows, columns)
    scale = x.abs().amax(1) / torch.finfo(dtype).max
    return (x / scale[:, None]).to(dtype), scale


def error(found, wanted):
    return ((found.double() - wanted).norm() / wanted.norm()).item()


def assert_rounded_once(found, exact, dtype=BF16):
    """Require a result as near as one rounding to its dtype."""
    assert found.dtype is dtype
    assert found.shape == exact.shape
    once = reference.rounded(exact, dtype).double()
    assert error(found, exact) <= 1.05 * error(once, exact)


def stream(dtype=E4M3, scale=0.01):
    """Return what gemm_residual_rms gives: a stream, its statistic, and its copy in FP8, and what that stands for."""
    y = torch.randn(M, K).to(BF16)
    statistic = co.RowStatistic(y.float().square().sum(1), K, EPS)
    copy = reference.rounded(y.float() / scale, dtype)
    return y, statistic, copy, copy.double() * scale * statistic.rstd.double()[:, None]


# ---- RMSNorm ---------------------------------------------------------------------------------------------------------


@co.epilogue
def bias_relu(acc, bias: co.Row):
    return co.e.relu(acc + bias)


@co.epilogue
def gate(acc, up: co.Product):
    return acc * up


@pytest.mark.parametrize(("rows", "columns"), list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("given", ["statistic", "tensor"])
def test_rmsnorm_of_fp8_rows(rows, columns, given):
    _, statistic, x, normed = stream()
    w, scale_w = quantised(N, K)
    scale_b = scale_w if columns else torch.tensor(0.5)
    scale_a = torch.full((M,), 0.01) if rows else torch.tensor(0.01)
    exact = normed @ (w.double() * (scale_w[:, None] if columns else 0.5)).t()
    rstd = statistic if given == "statistic" else statistic.rstd
    assert_rounded_once(co.rmsnorm_gemm(co.Scaled(x, scale_a), co.Scaled(w.t(), scale_b), rstd=rstd), exact)
    bias = torch.randn(N)
    found = co.rmsnorm_gemm(co.Scaled(x, scale_a), co.Scaled(w.t(), scale_b), rstd=rstd, epilogue=bias_relu, bias=bias)
    assert_rounded_once(found, (exact + bias.double()).relu())


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("amax", [False, True])
def test_rmsnorm_with_a_result_in_fp8(dtype, rows, amax):
    _, statistic, x, normed = stream()
    w, scale_b = quantised(N, K)
    exact = (normed @ (w.double() * scale_b[:, None]).t()).relu()
    most = exact.abs().amax(1) if rows else exact.abs().amax()
    scale = (most / torch.finfo(dtype).max).float()
    b, named = co.Scaled(w.t(), scale_b), {"rstd": statistic, "epilogue": bias_relu, "bias": torch.zeros(N)}
    found = co.rmsnorm_gemm(co.Scaled(x, 0.01), b, **named, scale_out=scale, amax=amax, out_dtype=dtype)
    if amax:
        torch.testing.assert_close(found.amax.double(), exact.abs().amax(1), rtol=1e-5, atol=0)
        assert found._fields == ("d", "amax")
        found = found.d
    assert_rounded_once(found, exact / (scale[:, None] if rows else scale).double(), dtype)
    out = torch.empty(M, N, dtype=dtype)
    named |= {"scale_out": scale, "amax": amax}
    co.rmsnorm_gemm(co.Scaled(x, 0.01), b, **named, out=out if not amax else {"d": out})
    assert torch.equal(out.float(), found.float())


def test_scales_of_blocks_come_before_a_norm():
    y = torch.randn(M, 256)
    x, w = y.to(E4M3), torch.randn(N, 256).to(E4M3)
    scale_a, scale_b = torch.rand(M, 2) + 0.5, torch.rand(1, 2) + 0.5
    statistic = co.RowStatistic(y.square().sum(1), 256, EPS)
    found = co.rmsnorm_gemm(co.Scaled(x, scale_a), co.Scaled(w.t(), scale_b), rstd=statistic)
    first, second = reference.dequantised(x.double(), w.t(), scale_a.double(), scale_b.double())
    assert_rounded_once(found, first @ second * statistic.rstd.double()[:, None])


def test_a_norm_of_16_bits_may_have_scales_and_a_result_in_fp8():
    y, statistic, _, _ = stream()
    w = torch.randn(K, N).to(BF16)
    exact = y.double() * statistic.rstd.double()[:, None] @ w.double()
    assert_rounded_once(co.rmsnorm_gemm(y, w, eps=EPS, scale_out=0.05, out_dtype=E4M3), exact / 0.05, E4M3)
    assert_rounded_once(co.rmsnorm_gemm(co.Scaled(y, 0.5), co.Scaled(w, 2.0), rstd=statistic), exact)


# ---- SwiGLU ----------------------------------------------------------------------------------------------------------


def gates(columns=(True, True)):
    (gate, of_gate), (up, of_up) = quantised(N, K), quantised(N, K)
    scales = [s if each else torch.tensor(0.3) for s, each in zip((of_gate, of_up), columns, strict=True)]
    full = [w.double() * s.double().reshape(-1, 1) for w, s in zip((gate, up), scales, strict=True)]
    return gate.t(), up.t(), scales, full


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("columns", list(itertools.product((False, True), repeat=2)))
@pytest.mark.parametrize("rows", [False, True])
def test_swiglu_of_fp8(normed, columns, rows):
    _, statistic, x, exact_x = stream()
    if not normed:
        exact_x = x.double() * 0.01
    w_gate, w_up, scales, full = gates(columns)
    exact = F.silu(exact_x @ full[0].t()) * (exact_x @ full[1].t())
    named = {"rstd": statistic} if normed else {}
    operands = co.Scaled(x, torch.full((M,), 0.01) if rows else 0.01), *map(co.Scaled, (w_gate, w_up), scales)
    assert_rounded_once(co.gemm_swiglu(*operands, **named), exact)
    scale = (exact.abs().amax() / 448).float()
    found = co.gemm_swiglu(*operands, **named, scale_out=scale, out_dtype=E4M3)
    assert_rounded_once(found, exact / scale.double(), E4M3)
    by_rows = (exact.abs().amax(1) / 57344).float()
    d, amax = co.gemm_swiglu(*operands, **named, scale_out=by_rows, amax=True, out_dtype=E5M2)
    assert_rounded_once(d, exact / by_rows.double()[:, None], E5M2)
    torch.testing.assert_close(amax.double(), exact.abs().amax(1), rtol=1e-4, atol=0)


def test_two_gemms_compute_the_same():
    """What serves a call that no kernel with two weights takes: its gate is rounded to BF16 in between."""
    _, statistic, x, exact_x = stream()
    w_gate, w_up, scales, full = gates()
    exact = F.silu(exact_x @ full[0].t()) * (exact_x @ full[1].t())
    scale = float(exact.abs().max()) / 400
    op, arguments, _ = requested(
        co.gemm_swiglu,
        co.Scaled(x, 0.01),
        *map(co.Scaled, (w_gate, w_up), scales),
        rstd=statistic,
        scale_out=scale,
        amax=True,
        out_dtype=E4M3,
    )
    a, b, *inputs = arguments
    out = {"d": torch.empty(M, N, dtype=E4M3), "amax": torch.empty(M)}
    d, amax = op._instead.compute(ops._call, a, b, *inputs, out=out, out_dtype=E4M3)
    assert (d is out["d"], amax is out["amax"]) == (True, True)
    assert error(d, exact / scale) <= 0.04
    torch.testing.assert_close(amax.double(), exact.abs().amax(1), rtol=0.01, atol=0)


# ---- The residual stream ---------------------------------------------------------------------------------------------


@co.epilogue
def biased(acc, bias: co.Row):
    return acc + bias


@pytest.mark.sample(2)
@pytest.mark.parametrize("a", [E4M3, BF16, F16])
@pytest.mark.parametrize("with_gamma", [False, True])
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("amax", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_residual_with_a_copy_in_fp8(a, with_gamma, rows, amax, dtype):
    if a is E4M3:
        (x, _), (w, scale_w) = quantised(M, K), quantised(N, K)
        operands = co.Scaled(x, torch.tensor(0.01)), co.Scaled(w.t(), scale_w)
        exact = x.double() * 0.01 @ (w.double() * scale_w.double()[:, None]).t()
    else:
        x, w = torch.randn(M, K).to(a), torch.randn(N, K).to(a)
        operands = x, w.t()
        exact = x.double() @ w.double().t()
    residual, bias, gamma = torch.randn(M, N).to(BF16), torch.randn(N), 1 + 0.2 * torch.randn(N)
    wide = BF16 if a is E4M3 else a
    exact = exact + bias.double() + residual.double()
    scale = torch.rand(M) + 0.01 if rows else torch.tensor(0.03)
    made = co.gemm_residual_rms(
        *operands, residual, eps=EPS, epilogue=biased, bias=bias, gamma=gamma if with_gamma else None,
        scale_out=scale, amax=amax, quantized_dtype=dtype,
    )  # fmt: skip
    assert_rounded_once(made.y, exact, wide)
    torch.testing.assert_close(made.rstd.sum_square, made.y.float().square().sum(1))
    assert (made.rstd.count, made.rstd.eps) == (N, EPS)
    # The copy is of y as it is stored.
    stood = made.y.float() * gamma if with_gamma else made.y.float()
    wanted = reference.rounded(stood * (scale[:, None] if rows else scale).reciprocal(), dtype)
    assert made.quantized.dtype is dtype
    assert torch.equal(made.quantized.float(), wanted.float())
    assert (made.amax is None) is not amax
    if amax:
        assert torch.equal(made.amax, stood.abs().amax(1))


def test_scales_of_blocks_come_before_a_residual():
    x, w = torch.randn(M, 256).to(E4M3), torch.randn(N, 256).to(E4M3)
    scale_a, scale_b, residual = torch.rand(M, 2) + 0.5, torch.rand(1, 2) + 0.5, torch.randn(M, N).to(BF16)
    operands, named = (co.Scaled(x, scale_a), co.Scaled(w.t(), scale_b)), {"eps": EPS, "scale_out": 0.5, "amax": True}
    made = co.gemm_residual_rms(*operands, residual, **named)
    first, second = reference.dequantised(x.double(), w.t(), scale_a.double(), scale_b.double())
    assert_rounded_once(made.y, first @ second + residual.double())
    assert torch.equal(made.quantized.float(), reference.rounded(made.y.float() * 2, E4M3).float())


def test_outputs_may_be_given_and_y_may_be_the_residual():
    (x, _), (w, scale) = quantised(M, K), quantised(N, K)
    residual = torch.randn(2, M // 2, N).to(BF16)
    x = x.view(2, M // 2, K)
    operands, named = (co.Scaled(x, 0.01), co.Scaled(w.t(), scale)), {"eps": EPS, "scale_out": 0.05, "amax": True}
    wanted = co.gemm_residual_rms(*operands, residual, **named)
    out = {"d": residual, "quantized": torch.empty(2, M // 2, N, dtype=E4M3), "amax": torch.empty(2, M // 2)}
    found = co.gemm_residual_rms(*operands, residual, **named, out=out)
    assert found.y is residual
    assert found.quantized is out["quantized"]
    for name in ("y", "quantized", "amax"):
        mine, theirs = getattr(found, name), getattr(wanted, name)
        assert torch.equal(mine.float(), theirs.float())
        assert mine.shape == theirs.shape
    plain = co.gemm_residual_rms(co.Scaled(x, 0.01), co.Scaled(w.t(), scale), residual, eps=EPS)
    assert isinstance(plain, co.types.ResidualRms)
    assert plain.y.dtype is BF16


def test_the_statistic_and_the_copy_are_what_the_next_gemm_takes():
    """A residual, then the norm's GEMM of the copy: as near the unquantised one as FP8 is."""
    x, w, residual = torch.randn(M, K).to(BF16), torch.randn(N, K).to(BF16), torch.randn(M, N).to(BF16)
    gamma, following = 1 + 0.2 * torch.randn(N), torch.randn(32, N).to(BF16)
    y = x.double() @ w.double().t() + residual.double()
    exact = F.rms_norm(y, (N,), gamma.double(), EPS) @ following.double().t()
    scale = ((y * gamma).abs().amax() / 448).float()
    made = co.gemm_residual_rms(x, w.t(), residual, eps=EPS, gamma=gamma, scale_out=scale)
    prepared = co.prepare(following.t(), dtype=E4M3)
    found = co.rmsnorm_gemm(co.Scaled(made.quantized, scale), prepared, rstd=made.rstd)
    assert error(found, exact) <= 0.05
    # gamma in the weight instead.
    made = co.gemm_residual_rms(x, w.t(), residual, eps=EPS, scale_out=(y.abs().amax() / 448).float())
    prepared = co.prepare(following.t(), gamma, dtype=E4M3)
    found = co.rmsnorm_gemm(co.Scaled(made.quantized, (y.abs().amax() / 448).float()), prepared, rstd=made.rstd)
    assert error(found, exact) <= 0.05


# ---- Prepared weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("with_gamma", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("n", "k"), [(300, 64), (5, 63), (1, 17), (3, 0), (0, 16)])
def test_a_weight_is_quantised_once(dtype, with_gamma, transposed, n, k):
    w = (torch.randn(n, k).t() if transposed else torch.randn(k, n)).to(BF16)
    gamma = torch.randn(k) if with_gamma else None
    found = co.prepare(w, gamma, dtype=dtype)
    exact = w.double() * (1 if gamma is None else gamma.double()[:, None])
    assert found.folded is with_gamma
    assert (found.matrix.dtype, found.matrix.shape, found.scale.dtype, found.scale.shape) == (dtype, (k, n), F32, (n,))
    assert found.scale.is_contiguous()
    if k:
        assert torch.equal(found.scale, fp8.scale_of(exact.abs().amax(0), dtype))
        wanted = reference.rounded(exact / found.scale.double(), dtype)
        assert torch.equal(found.matrix.float(), wanted.float())
        assert found.matrix.stride(0) == 1
        assert found.matrix.stride(1) % 16 == 0
        x = torch.randn(4, k).to(BF16)
        padded = torch.zeros(4, -(-k // 16) * 16, dtype=E4M3)
        padded[:, :k] = x
        assert co.gemm(co.Scaled(padded[:, :k], 1.0), co.Scaled(found.matrix, found.scale)).shape == (4, n)


def test_columns_of_zeros_have_a_scale_of_1_and_what_is_infinite_is_refused():
    w = torch.randn(32, 4).to(BF16)
    w[:, 2] = 0
    found = co.prepare(w, dtype=E4M3)
    assert found.scale[2] == 1
    assert (found.matrix[:, 2].float() == 0).all()
    w[3, 1], w[4, 3] = float("inf"), float("nan")
    with pytest.raises(ValueError, match=r"^w or gamma is infinite or NaN in 2 of 4 columns"):
        co.prepare(w, dtype=E4M3)


@pytest.mark.parametrize("k", [64, 50])
def test_a_row_major_weight_in_fp8_is_transposed_once(k):
    w = torch.randn(k, N).to(E4M3)
    x = torch.zeros(M, 64, dtype=E4M3)
    x[:, :k] = torch.randn(M, k).to(E4M3)
    x = x[:, :k]
    with pytest.raises(ValueError, match=r"^b is .* along K only.* prepare\(b\)\.matrix, a copy made once"):
        co.gemm(co.Scaled(x, 1.0), co.Scaled(w, 1.0))
    found = co.prepare(w)
    assert (found.scale, found.folded) == (None, False)
    assert torch.equal(found.matrix.float(), w.float())
    exact = x.double() @ w.double()
    assert_rounded_once(co.gemm(co.Scaled(x, 1.0), co.Scaled(found.matrix, 1.0)), exact)
    statistic = co.RowStatistic(torch.full((M,), float(k)), k, 0.0)  # rows of ones
    assert_rounded_once(co.rmsnorm_gemm(co.Scaled(x, 1.0), co.Scaled(found.matrix, 1.0), rstd=statistic), exact)


# ---- K, and what explain says ----------------------------------------------------------------------------------------


def test_explain_refuses_on_the_cpu_what_a_call_refuses():
    x, w = torch.zeros(M, 64, dtype=E4M3)[:, :50], torch.zeros(N, 50, dtype=E4M3)
    for function in (co.gemm, functools.partial(co.explain, co.gemm)):
        with pytest.raises(ValueError, match=r"^b is .*50.* or pass prepare\(b\)\.matrix"):
            function(co.Scaled(x, 1.0), co.Scaled(w.t(), 1.0))
    assert co.gemm(co.Scaled(x, 1.0), co.Scaled(co.prepare(w.t()).matrix, 1.0)).shape == (M, N)


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def test_an_epilogue_that_casts_a_further_output_to_fp8_stores_it_so():
    @co.epilogue
    def copied(acc):
        return {"d": acc, "copy": co.e.cast(acc, "e5m2"), "again": co.e.cast(acc, "bf16")}

    a, b = torch.randn(M, K).to(F16), torch.randn(K, N).to(F16)
    assert [x.dtype for x in co.gemm(a, b, epilogue=copied)] == [F16, E5M2, F16]
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 64))
    spec = co.KernelSpec(a="f16.row", b="f16.col", d="f16.row.align4", epilogue=copied, config=config)
    assert [str(x) for x in spec.outputs] == ["e5m2.row.align4", "f16.row.align4"]
    out = {"copy": torch.empty(M, N, dtype=BF16)}
    assert co.gemm(a, b, epilogue=copied, out=out).copy.dtype is BF16


# ---- LayerNorm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (torch.int8, torch.int8)], ids=str)
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("ratio", [0, 20])
def test_layernorm_of_values_in_8_bits_as_they_are(dtypes, prepared, ratio):
    x, w = (
        (4 * torch.randn(rows, K) + shift).to(t) for rows, shift, t in zip((M, N), (4 * ratio, 0), dtypes, strict=True)
    )
    rows = x.double()
    mean, rstd = rows.mean(1), (rows.var(1, correction=0) + EPS).rsqrt()
    weight = co.prepare(w.t(), norm="layer") if prepared else w.t()
    found = co.layernorm_gemm(x, weight, mean=mean.float(), rstd=rstd.float())
    assert_rounded_once(found, F.layer_norm(rows, (K,), eps=EPS) @ w.double().t())


# ---- INT8 ------------------------------------------------------------------------------------------------------------


def test_norms_of_int8_with_a_statistic_that_is_given():
    x, w = ((40 * torch.randn(rows, K)).to(torch.int8) for rows in (M, N))
    rstd, residual = torch.rand(M), torch.randn(M, N).to(BF16)
    product = (x.double() @ w.double().t()) * 0.01
    found = co.rmsnorm_gemm(co.Scaled(x, 0.1), co.Scaled(w.t(), 0.1), rstd=rstd)
    assert_rounded_once(found, product * rstd.double()[:, None])
    found = co.gemm_residual_rms(co.Scaled(x, 0.1), co.Scaled(w.t(), 0.1), residual, eps=EPS)
    assert_rounded_once(found[0], product + residual.double())


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def requests(m):
    """The calls of a layer, each with its op and arguments, without data."""

    def empty(rows, columns, dtype=E4M3):
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    x, wide = empty(m, 4096), empty(m, 4096, BF16)
    statistic = co.RowStatistic(torch.empty(m, device="meta"), 4096, EPS)
    one, columns = torch.empty((), device="meta"), torch.empty(4096, device="meta")
    w, hidden, gate = empty(4096, 4096).t(), empty(m, 14336), empty(14336, 4096).t()
    wide_columns = torch.empty(14336, device="meta")
    normed, copy = {"rstd": statistic}, {"eps": EPS, "gamma": columns, "scale_out": one}
    a, b, gated = co.Scaled(x, one), co.Scaled(w, columns), co.Scaled(gate, wide_columns)
    return {
        "qkv": (co.rmsnorm_gemm, (a, b), normed),
        "a layer norm": (co.layernorm_gemm, (x, w), {"mean": statistic.sum_square, "rstd": statistic.sum_square}),
        "o": (co.gemm_residual_rms, (a, b, wide), copy),
        "o, amax": (co.gemm_residual_rms, (a, b, wide), copy | {"amax": True}),
        "o, no copy": (co.gemm_residual_rms, (a, b, wide), {"eps": EPS}),
        "down": (
            co.gemm_residual_rms, (co.Scaled(hidden, one), co.Scaled(empty(4096, 14336).t(), columns), wide), copy,
        ),
        "gate": (
            co.gemm_swiglu, (a, gated, gated), {**normed, "scale_out": one, "out_dtype": E4M3},
        ),
        "bf16": (co.gemm_residual_rms, (empty(m, 4096, BF16), empty(4096, 4096, BF16).t(), wide),
                 {"eps": EPS, "gamma": columns, "scale_out": one, "amax": True}),
    }  # fmt: skip


CALLS = tuple(requests(1))


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("m", [1, 16, 1024, 4096])
def test_every_call_of_a_layer_is_one_legal_kernel(name, m):
    function, arguments, named = requests(m)[name]
    op, (a, b, *inputs), more = requested(function, *arguments, **named)
    out_dtype = more.pop("out_dtype", None)
    more.pop("out", None)
    values = dict(zip(op.names, op.positional(tuple(inputs), more), strict=True))
    call = check_call(op.graph, a, b, values, None, out_dtype)
    signature = signature_of(call, H100)
    decision = dispatch.decide(signature, H100, call.problem)
    assert decision.kept
    for config in decision.kept:
        assert config.family.tma or name == "bf16"
        assert legality.check(H100.spec(signature, config)) == ()


# ---- Programs --------------------------------------------------------------------------------------------------------


def test_a_saved_op_is_made_again():
    op = gated.swiglu_op(composed.rms_norm_of_sums, (False, True, True), "tensor", True)
    assert pickle.loads(pickle.dumps(op)) is op
    portable._LIVE.pop(op.about.split(";", 4)[4])
    again = portable._made.__wrapped__(op.about.split(";", 4)[4])
    assert (again.graph, again.outputs) == (op.graph, ("d", "amax"))


# ---- Refusals --------------------------------------------------------------------------------------------------------


X, W, ONES = torch.ones(M, K).to(E4M3), torch.ones(N, K).to(E4M3).t(), torch.ones(K)
TILE = torch.ones(M, N).to(BF16)
STATISTIC = co.RowStatistic(torch.ones(M), K, EPS)
NORMED, ONE = {"rstd": STATISTIC}, (co.Scaled(X, 1.0), co.Scaled(W, 1.0))
REFUSED = {
    "the statistic of what is quantised": (
        lambda: co.rmsnorm_gemm(X, W, eps=EPS), TypeError, r"^rstd is missing, and a is quantised.* gemm_residual_rms",
    ),
    "the same with scales": (
        lambda: co.rmsnorm_gemm(co.Scaled(TILE, 1.0), co.Scaled(TILE.t(), 1.0), eps=EPS), TypeError, "^rstd is missing",
    ),
    "gamma and a weight in FP8": (
        lambda: co.rmsnorm_gemm(*ONE, ONES, **NORMED), TypeError, r"^b is .*gamma would round it again.*dtype=",
    ),
    "gamma prepared into FP8": (lambda: co.prepare(W, ONES), TypeError, "^w is .* gamma would round it again"),
    "FP8 prepared in FP8": (lambda: co.prepare(W, dtype=E5M2), TypeError, "^w is .* another dtype would round it"),
    "a weight prepared for nothing": (lambda: co.prepare(TILE), TypeError, "^gamma is missing, and w is .*dtype="),
    "a dtype that is no FP8": (lambda: co.prepare(TILE, dtype=F16), TypeError, "^dtype is torch.float16: use .*e4m3fn"),
    "gamma of a weight without it": (
        lambda: co.rmsnorm_gemm(X, co.prepare(W), ONES, **NORMED), TypeError, "^b is prepared without gamma",
    ),
    "one scale": (
        lambda: co.rmsnorm_gemm(co.Scaled(X, 1.0), W, rstd=STATISTIC), TypeError, "^scale_b is missing: a has a scale",
    ),
    "a prepared weight's scale again": (
        lambda: co.rmsnorm_gemm(ONE[0], co.Scaled(co.prepare(torch.ones(K, N).to(BF16), dtype=E4M3), 1.0), **NORMED),
        TypeError, "^the values of b are a PreparedWeight, which has scales of its own: pass it as b itself",
    ),
    "two of three scales": (
        lambda: co.gemm_swiglu(co.Scaled(X, 1.0), co.Scaled(W, 1.0), W), TypeError,
        "^b_up has no scale, and others have one: pass cutlass_ops.Scaled",
    ),
    "a product after scales": (
        lambda: co.rmsnorm_gemm(*ONE, **NORMED, epilogue=gate, up=W), ValueError, "^gate has the product up, which has",
    ),
    "a product before a residual": (
        lambda: co.gemm_residual_rms(co.Scaled(X, 1.0), co.Scaled(W, 1.0), TILE, eps=EPS, epilogue=gate, up=W),
        ValueError, "^gate has the product up, which has scales",
    ),
    "a scale of a result that is not in FP8": (
        lambda: co.rmsnorm_gemm(*ONE, **NORMED, scale_out=1.0), TypeError, r"^scale_out needs .*out_dtype=.*e4m3fn$",
    ),
    "the same of two weights, with out": (
        lambda: co.gemm_swiglu(X, W, W, scale_out=1.0, out=TILE), TypeError, r"^scale_out needs .*not torch.bfloat16",
    ),
    "amax without a scale": (
        lambda: co.rmsnorm_gemm(*ONE, **NORMED, amax=True), TypeError, "^amax=True is .*pass scale_out=",
    ),
    "gamma without a copy": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, gamma=torch.ones(N)), TypeError,
        "^gamma is of the copy in FP8: pass scale_out=",
    ),
    "amax without a copy": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, amax=True), TypeError, "^amax=True asks for .*scale_out=",
    ),
    "a copy in another dtype": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, scale_out=1.0, quantized_dtype=BF16), TypeError,
        "^quantized_dtype is torch.bfloat16: use",
    ),
    "moments of FP8": (
        lambda: co.layernorm_gemm(X, W, eps=EPS), TypeError, "^a is .*mean_of_a, mean_square_of_a .* of 16 bits only",
    ),
    "a layer norm's gamma and a weight in FP8": (
        lambda: co.layernorm_gemm(X, W, ONES, mean=ONES[:M], rstd=ONES[:M]), TypeError, "^b is .*use one of torch.fl",
    ),
    "gamma along K": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, gamma=ONES, scale_out=1.0), ValueError,
        r"^gamma has shape \(64,\): as a Row it must have shape \(48,\)",
    ),
    "y in FP32": (
        lambda: co.gemm_residual_rms(X, W, TILE, eps=EPS, out=TILE.float()), TypeError,
        r"^out is torch\.float32 and a is torch\.float8_e4m3fn: pass an out of torch\.bfloat16",
    ),
    "A in FP32": (
        lambda: co.gemm_residual_rms(TILE.float(), W.float(), TILE, eps=EPS), TypeError, "^a is torch.float32: gemm_r",
    ),
    "a name": (
        lambda: co.rmsnorm_gemm(TILE, TILE.t(), eps=EPS, epilogue=named), ValueError, "^named has an input scale_out",
    ),
}  # fmt: skip


@co.epilogue
def named(acc, scale_out: co.Scalar):
    return acc * scale_out


@pytest.mark.parametrize(("call", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_errors_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_gradients_in_fp8_are_refused():
    x, w = torch.randn(M, K).to(BF16).requires_grad_(), torch.randn(K, N).to(BF16)
    with pytest.raises(ValueError, match=r"^the output quantized is in FP8, and no gradient .* torch\.no_grad\(\)"):
        co.gemm_residual_rms(x, w, TILE, eps=EPS, scale_out=1.0)
    with torch.no_grad():
        assert co.gemm_residual_rms(x, w, TILE, eps=EPS, scale_out=1.0).quantized.dtype is E4M3
    gamma = torch.ones(N, requires_grad=True)
    with pytest.raises(ValueError, match=r"^gamma requires grad and a is|^the output quantized"):
        co.gemm_residual_rms(co.Scaled(X, 1.0), co.Scaled(W, 1.0), TILE, eps=EPS, gamma=gamma, scale_out=1.0)
    bias = torch.zeros(N, requires_grad=True)
    with pytest.raises(ValueError, match=r"^bias requires grad and a is torch.float8_e4m3fn, and products in 8 bits"):
        co.gemm_bias(X, W, bias)
    with pytest.raises(ValueError, match=r"^b requires grad and b is|^b requires grad and a is"):
        co.gemm(X, W.detach().requires_grad_())
