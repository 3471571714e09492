"""Norms, gates and residuals in FP8 on the device, Fp8State in graphs and without waiting, and a decoder layer."""

import itertools
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.run import fp8, requests
from tests.gpu import fp8_values, kernels, oracle, tensors
from tests.gpu.fp8_values import BF16, E4M3, E5M2, quantised, wide
from tests.gpu.warm import served_warm
from tests.scripts import script

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

EPS = 1e-5
# What the Tensor Core may lose of a sum of FP8 products, relative to the norm of the result (docs/fp8.md).
SUMS = 2 * fp8_values.SUMS
assert_near = partial(fp8_values.assert_near, sums=SUMS, worst=16)
# One row, few rows, some beyond tiles, and lines of FP8 that TMA does not store.
SHAPES = [(1, 256, 512), (16, 512, 1024), (65, 264, 528), (333, 512, 4096)]
# Whether each row of x and each column of the weight has a scale.
NORMS = [(False, True), (True, False)]
# The result's dtype, and whether columns have scales.
GATES = [(BF16, True), (E4M3, True), (E5M2, False)]
# A's dtype, whether there is gamma, whether rows have scales, the copy's dtype, and whether there is amax.
RESIDUALS = [
    (E4M3, True, False, E4M3, True),
    (E4M3, True, False, E4M3, False),
    (E4M3, False, True, E5M2, True),
    (BF16, True, False, E4M3, True),
    (BF16, False, True, E5M2, False),
]


def normed(m, k):
    """Return a copy of a stream in FP8, its scale, its statistic, and what it stands for."""
    y = torch.randn(m, k, device="cuda").to(BF16)
    scale = (y.float().abs().amax() / 448).reshape(())
    copy = fp8.divided(y, scale, E4M3)
    statistic = co.RowStatistic(y.float().square().sum(1), k, EPS)
    return copy, scale, statistic, copy.double() * scale.double() * statistic.rstd.double()[:, None]


@co.epilogue
def bias_relu(acc, bias: co.Row):
    return co.e.relu(acc + bias)


# ---- Functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), NORMS)
def test_rmsnorm(shape, rows, columns):
    m, n, k = shape
    x, scale, statistic, exact_x = normed(m, k)
    w, scale_w = quantised(n, k)
    scale_a = scale.expand(m).contiguous() if rows else scale
    scale_b = scale_w if columns else scale_w.amax()
    exact = exact_x @ wide(w, scale_b).t()
    assert_near(co.rmsnorm_gemm(co.Scaled(x, scale_a), co.Scaled(w.t(), scale_b), rstd=statistic), exact)
    bias = torch.randn(n, device="cuda")
    after = (exact + bias.double()).relu()
    of_d = (after.abs().amax(1) / 448).clamp(min=1e-6).float() if rows else (after.abs().amax() / 448).float()
    d, amax = co.rmsnorm_gemm(
        co.Scaled(x, scale_a),
        co.Scaled(w.t(), scale_b),
        rstd=statistic,
        epilogue=bias_relu,
        bias=bias,
        scale_out=of_d,
        amax=True,
        out_dtype=E4M3,
    )
    assert_near(d, after / of_d.double().reshape(-1, 1))
    torch.testing.assert_close(amax.double(), after.abs().amax(1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "columns"), GATES)
def test_swiglu(shape, dtype, columns):
    m, n, k = shape
    x, scale, statistic, exact_x = normed(m, k)
    (gate, of_gate), (up, of_up) = quantised(n, k), quantised(n, k)
    scales = (of_gate, of_up) if columns else (of_gate.amax(), of_up.amax())
    full = [wide(w, s) for w, s in zip((gate, up), scales, strict=True)]
    # Sums of a few hundred would be infinite after the exponential: weights are those of a trained layer.
    scales = tuple(s / k**0.5 for s in scales)
    exact = F.silu(exact_x @ full[0].t() / k**0.5) * (exact_x @ full[1].t() / k**0.5)
    operands = co.Scaled(x, scale), co.Scaled(gate, scales[0]).t(), co.Scaled(up, scales[1]).t()
    named = {"rstd": statistic}
    if dtype is BF16:
        assert_near(co.gemm_swiglu(*operands, **named), exact)
        return
    of_d = (exact.abs().amax() / torch.finfo(dtype).max).float()
    named |= {"scale_out": of_d, "out_dtype": dtype}
    assert_near(co.gemm_swiglu(*operands, **named), exact / of_d.double())
    # By two GEMMs, of which the first one's result is rounded to BF16.
    d, amax = co.gemm_swiglu(*operands, **named, amax=True)
    assert oracle.error(d, exact / of_d.double()) <= torch.finfo(dtype).eps / 2 + 2 * SUMS + 2.0**-8
    torch.testing.assert_close(amax.double(), exact.abs().amax(1), rtol=0.03, atol=0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("a", "with_gamma", "rows", "dtype", "amax"), RESIDUALS)
def test_a_residual_and_its_copy(shape, a, with_gamma, rows, dtype, amax):
    m, n, k = shape
    if a is E4M3:
        (x, scale_a), (w, scale_b) = quantised(m, k), quantised(n, k)
        scale_a = scale_a if rows else scale_a.amax()
        operands = co.Scaled(x, scale_a), co.Scaled(w, scale_b).t()
        exact = wide(x, scale_a) @ wide(w, scale_b).t()
    else:
        x, w = torch.randn(m, k, device="cuda").to(a), torch.randn(n, k, device="cuda").to(a)
        operands = x, w.t()
        exact = x.double() @ w.double().t()
    residual = torch.randn(m, n, device="cuda").to(BF16)
    gamma = 1 + 0.2 * torch.randn(n, device="cuda")
    exact += residual.double()
    scale = ((exact.abs().amax(1) if rows else exact.abs().amax()) / torch.finfo(dtype).max / 2).float()
    named = {"eps": EPS, "scale_out": scale, "quantized_dtype": dtype}
    named |= {"gamma": gamma} if with_gamma else {}
    made = co.gemm_residual_rms(*operands, residual, **named, amax=amax)
    assert_near(made.y, exact)
    torch.testing.assert_close(made.rstd.sum_square, made.y.float().square().sum(1), rtol=1e-4, atol=0)
    stood = made.y.float() * gamma if with_gamma else made.y.float()
    # One rounding of what is stored. A reciprocal may be off by its last bit, which moves few values a step.
    copied = stood.double() / scale.double().reshape(-1, 1)
    assert_near(made.quantized, copied)
    same = made.quantized.float() == fp8.divided(stood, scale.reshape(-1, 1) if rows else scale, dtype).float()
    assert same.float().mean() >= 0.999
    assert (made.amax is not None) is amax
    if amax:
        torch.testing.assert_close(made.amax, stood.abs().amax(1), rtol=1e-6, atol=0)


def test_a_weight_is_prepared():
    w, gamma = torch.randn(1000, 520, device="cuda").to(BF16), torch.rand(520, device="cuda")
    found = co.prepare(w.t(), gamma, dtype=E4M3)
    on_the_host = co.prepare(w.cpu().t(), gamma.cpu(), dtype=E4M3)
    assert torch.equal(found.scale.cpu(), on_the_host.scale)
    assert torch.equal(found.matrix.float().cpu(), on_the_host.matrix.float())
    x, scale, statistic, exact_x = normed(70, 520)
    padded = torch.zeros(70, 528, device="cuda").to(E4M3)
    padded[:, :520].copy_(x)
    d = co.rmsnorm_gemm(co.Scaled(padded[:, :520], scale), found, rstd=statistic)
    assert_near(d, exact_x @ (found.matrix.double() * found.scale.double()))


# ---- Every kernel ----------------------------------------------------------------------------------------------------


def requested(name, m):
    """Return a call of a layer with small weights, and its exact result."""
    k, n = 1024, 512
    x, scale, statistic, exact_x = normed(m, k)
    (w, scale_b), (up, scale_up) = quantised(n, k), quantised(n, k)
    scale_b, scale_up = scale_b / k**0.5, scale_up / k**0.5
    first = exact_x @ wide(w, scale_b).t()
    if name == "gate":
        exact = F.silu(first) * (exact_x @ wide(up, scale_up).t())
        of_d = (exact.abs().amax() / 448).float()
        named = {"rstd": statistic, "scale_out": of_d, "out_dtype": E4M3}
        operands = co.Scaled(x, scale), co.Scaled(w, scale_b).t(), co.Scaled(up, scale_up).t()
        return co.gemm_swiglu, operands, named, {"d": exact / of_d.double()}
    residual, gamma = torch.randn(m, n, device="cuda").to(BF16), torch.rand(n, device="cuda") + 0.5
    y = x.double() * scale.double() @ wide(w, scale_b).t() + residual.double()
    copy = y * gamma.double()
    of_copy = (copy.abs().amax() / 448).float()
    named = {"eps": EPS, "gamma": gamma, "scale_out": of_copy, "amax": True}
    exact = {"d": y, "quantized": copy / of_copy.double(), "row_sum_square": y.square().sum(1)}
    operands = co.Scaled(x, scale), co.Scaled(w, scale_b).t(), residual
    return co.gemm_residual_rms, operands, named, exact | {"amax": copy.abs().amax(1)}


@pytest.mark.parametrize(("name", "m"), list(itertools.product(("gate", "residual"), (16, 512, 4096))))
def test_every_kernel_that_a_weight_may_need_is_right(name, m):
    function, arguments, named, exact = requested(name, m)
    for results in kernels.by_every_kernel(function, *arguments, **named):
        found = {"d": results} if isinstance(results, torch.Tensor) else results._asdict()
        assert set(found) == set(exact)
        for output, wanted in exact.items():
            if wanted.ndim == 2:
                # A copy is one of BF16, rounded before.
                step = 2.0**-9 if output == "quantized" else 0
                assert oracle.error(found[output], wanted) <= torch.finfo(found[output].dtype).eps / 2 + SUMS + step
            else:
                torch.testing.assert_close(found[output].double(), wanted, rtol=0.03, atol=0)


@pytest.mark.parametrize("name", ["gate", "residual"])
def test_a_second_call_is_served_warm_with_the_same_bits(name):
    function, arguments, named, _ = requested(name, 200)
    op = requests.requested(function, *arguments, **named).op

    def call():
        found = function(*arguments, **named)
        return [found] if isinstance(found, torch.Tensor) else [found.y, found.quantized, found.amax]

    first = [x.clone() for x in call()]
    for mine, theirs in zip(served_warm(op, call), first, strict=True):
        assert torch.equal(mine.float(), theirs.float())


# ---- States ----------------------------------------------------------------------------------------------------------


class Step:
    """One GEMM whose result is quantised with delayed scaling."""

    def __init__(self):
        self.state = co.nn.Fp8State(history=4, device="cuda")
        self.x = torch.randn(64, 512, device="cuda").to(BF16)
        self.w, self.gamma = torch.randn(256, 512, device="cuda").to(BF16), torch.rand(256, device="cuda")
        self.residual = torch.randn(64, 256, device="cuda").to(BF16)

    @torch.no_grad()
    def __call__(self):
        made = co.gemm_residual_rms(
            self.x, self.w.t(), self.residual, eps=EPS, gamma=self.gamma, scale_out=self.state.scale, amax=True
        )
        self.state.record(made.amax)
        self.state.step()
        return made


def test_a_captured_graph_updates_its_scales():
    step = Step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    step.state.load_state_dict(co.nn.Fp8State(history=4, device="cuda").state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    plain = Step()
    plain.w, plain.gamma, plain.residual = step.w, step.gamma, step.residual
    for number in range(4):
        x = torch.randn(64, 512, device="cuda").to(BF16) * (1 + number)
        plain.x = x
        step.x.copy_(x)
        graph.replay()
        wanted = plain()
        assert torch.equal(made.quantized.float(), wanted.quantized.float())
        assert torch.equal(step.state.scale, plain.state.scale)
        assert torch.equal(step.state.history, plain.state.history)
    assert step.state.scale != 1


def test_nothing_waits_for_the_device():
    step = Step()
    rows = co.nn.Fp8State("RowWise", scaling="current")
    x = torch.randn(16, 64, device="cuda")

    def run():
        step()
        step.state.quantize(x)
        return rows.quantize(x)

    run()
    with tensors.without_synchronisation():
        run()


# ---- A whole layer ---------------------------------------------------------------------------------------------------


LAYER_ROWS = (16, 300)


@pytest.fixture
def bench(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds the examples' folder
    return script("bench_fp8_layer")


@pytest.fixture
def layers(bench):
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 2}
    with torch.no_grad():
        found = bench.Layers.draw(bench.block.configuration(sizes), "cuda", 256)
        drawn = [bench.draw(found, m, 64, "cuda") for m in LAYER_ROWS]
        bench.harness.side_by_side(partial(found.fp8, x.stream, x.positions, x.paired) for x in drawn)
        yield found


@pytest.mark.parametrize("m", LAYER_ROWS)
def test_a_layer_is_as_near_bf16_as_dynamic_scales_of_rows(bench, layers, m):
    x = bench.draw(layers, m, 64, "cuda")
    found = bench.errors(layers, x)
    assert found["error"] <= 1.25 * found["rowwise_error"]
    y = layers.fp8(x.stream, x.positions, x.paired).y
    torch._dynamo.reset()
    compiled = torch.compile(layers.fp8, dynamic=False, fullgraph=True)(x.stream, x.positions, x.paired)
    # Only attention's way to FP8 is compiled, which may round a value the other way.
    assert bench.block.error(compiled.y, y.double()) <= 0.02


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_no_kernel_of_a_layer_only_normalises_activates_or_quantises(bench, layers):
    """Four GEMMs and attention; what PyTorch's compiler makes besides is on the way from QKV to O."""
    profile = script("profile_layer")
    x = bench.draw(layers, 300, 64, "cuda")
    torch._dynamo.reset()
    run = torch.compile(layers.fp8, dynamic=False, fullgraph=True)
    kernels = profile.kernels_of(lambda: run(x.stream, x.positions, x.paired))
    counts = {kind: sum(k["count"] for k in kernels if k["kind"] == kind) for kind in ("gemm", "attention")}
    others = [k for k in kernels if k["kind"] == "other" and not k["kernel"].startswith("Mem")]
    assert counts["gemm"] == 4, kernels
    assert counts["attention"] >= 1, kernels
    assert sum(k["count"] for k in others) <= 2, kernels
    assert all(k["kernel"].startswith("triton_") for k in others), kernels
