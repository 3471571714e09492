"""Norms, gates and residuals in FP8 on the device, Fp8State in graphs and without waiting, and a decoder layer."""

import itertools
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.run import fp8, requests
from cutlass_ops.run.call import check_call, device_of, signature_of
from cutlass_ops.run.registry import Registry
from tests.gpu import oracle, tensors
from tests.gpu.warm import served_warm
from tests.scripts import script

pytestmark = pytest.mark.gpu

E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
EPS = 1e-5
# What the Tensor Core may lose of a sum of FP8 products, relative to the norm of the result (docs/fp8.md).
SUMS = 2.0**-8
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


def calls():
    """Yield every call of this file's functions, without data."""

    def empty(*extents, dtype=F32):
        return torch.empty(extents, device="meta", dtype=dtype)

    for m, n, k in SHAPES:
        x, w = empty(m, k, dtype=E4M3), empty(n, k, dtype=E4M3).t()
        statistic = co.RowStatistic(empty(m), k, EPS)
        for rows, columns in NORMS:
            named = {"rstd": statistic, "scale_a": empty(m) if rows else empty()}
            named |= {"scale_b": empty(n) if columns else empty()}
            yield co.rmsnorm_gemm, (x, w), named
            named |= {"epilogue": bias_relu, "bias": empty(n), "scale_out": empty(m) if rows else empty()}
            yield co.rmsnorm_gemm, (x, w), named | {"amax": True, "out_dtype": E4M3}
        for dtype, columns in GATES:
            scale = empty(n) if columns else empty()
            named = {"rstd": statistic, "scale_a": empty(), "scale_b": scale, "scale_up": scale}
            named |= {} if dtype is BF16 else {"scale_out": empty(), "out_dtype": dtype}
            for amax in (False,) if dtype is BF16 else (False, True):
                yield co.gemm_swiglu, (x, w, w), named | {"amax": amax}
        for a, with_gamma, rows, dtype, amax in RESIDUALS:
            operands = empty(m, k, dtype=a), empty(n, k, dtype=a).t(), empty(m, n, dtype=BF16)
            scale = empty(m) if rows else empty()
            named = {"scale_a": scale, "scale_b": empty(n)} if a is E4M3 else {}
            named |= {"gamma": empty(n)} if with_gamma else {}
            named |= {"eps": EPS, "scale_out": scale, "quantized_dtype": dtype, "amax": amax}
            yield co.gemm_residual_rms, operands, named


def decided(function, arguments, named):
    """Return what serves a call: a decision, or several if two GEMMs do."""
    op, (a, b, *inputs), more = requests.requested(function, *arguments, **named)
    out_dtype = more.pop("out_dtype", None)
    more.pop("out", None)
    inputs = op.positional(tuple(inputs), more)
    call = check_call(op.graph, a, b, dict(zip(op.names, inputs, strict=True)), None, out_dtype)
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    found = dispatch.decide(signature_of(call, device), device, call.problem)
    parts = [call] if found else [part for _, part in op.instead_of(call)]
    return [dispatch.decide(signature_of(part, device), device, part.problem) for part in parts]


@pytest.fixture(scope="module", autouse=True)
def _built():
    """Compile all kernels side by side, before the first test."""
    if torch.cuda.is_available() and device_of(torch.device("cuda", torch.cuda.current_device())).has_wgmma:
        found = [each.spec for call in calls() for each in decided(*call)]
        found += [spec for name, m in EVERY for spec in every_spec(*requested(name, m)[:3])]
        Registry.current().kernels(dict.fromkeys(found))


@pytest.fixture(autouse=True)
def hopper():
    if not device_of(torch.device("cuda", torch.cuda.current_device())).has_wgmma:
        pytest.skip("FP8 needs Hopper")


def quantised(rows, k, dtype=E4M3):
    """Return a matrix in FP8, and the scale of each row."""
    x = torch.randn(rows, k, device="cuda")
    scale = x.abs().amax(1) / torch.finfo(dtype).max
    return (x / scale[:, None]).to(dtype), scale


def assert_near(found, exact):
    """Require at most one rounding to the result's dtype, and the error of the sums."""
    info = torch.finfo(found.dtype)
    exact = exact.clamp(-info.max, info.max)
    assert found.shape == exact.shape
    assert oracle.error(found, exact) <= info.eps / 2 + SUMS
    # A few wrong elements hardly move the norm: none may be far off.
    rounding = torch.maximum(exact.abs() * info.eps / 2, torch.full_like(exact, info.smallest_normal * info.eps / 2))
    typical = exact.norm() / exact.numel() ** 0.5
    assert ((found.double() - exact).abs() - 1.02 * rounding - 16 * SUMS * typical).max() <= 0


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
    exact = exact_x @ (w.double() * scale_b.double().reshape(-1, 1)).t()
    assert_near(co.rmsnorm_gemm(x, w.t(), rstd=statistic, scale_a=scale_a, scale_b=scale_b), exact)
    bias = torch.randn(n, device="cuda")
    after = (exact + bias.double()).relu()
    of_d = (after.abs().amax(1) / 448).clamp(min=1e-6).float() if rows else (after.abs().amax() / 448).float()
    d, amax = co.rmsnorm_gemm(
        x, w.t(), rstd=statistic, scale_a=scale_a, scale_b=scale_b, epilogue=bias_relu, bias=bias,
        scale_out=of_d, amax=True, out_dtype=E4M3,
    )  # fmt: skip
    assert_near(d, after / of_d.double().reshape(-1, 1))
    torch.testing.assert_close(amax.double(), after.abs().amax(1), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "columns"), GATES)
def test_swiglu(shape, dtype, columns):
    m, n, k = shape
    x, scale, statistic, exact_x = normed(m, k)
    (gate, of_gate), (up, of_up) = quantised(n, k), quantised(n, k)
    scales = (of_gate, of_up) if columns else (of_gate.amax(), of_up.amax())
    full = [w.double() * s.double().reshape(-1, 1) for w, s in zip((gate, up), scales, strict=True)]
    # Sums of a few hundred would be infinite after the exponential: weights are those of a trained layer.
    scales = tuple(s / k**0.5 for s in scales)
    exact = F.silu(exact_x @ full[0].t() / k**0.5) * (exact_x @ full[1].t() / k**0.5)
    named = {"rstd": statistic, "scale_a": scale, "scale_b": scales[0], "scale_up": scales[1]}
    if dtype is BF16:
        assert_near(co.gemm_swiglu(x, gate.t(), up.t(), **named), exact)
        return
    of_d = (exact.abs().amax() / torch.finfo(dtype).max).float()
    named |= {"scale_out": of_d, "out_dtype": dtype}
    assert_near(co.gemm_swiglu(x, gate.t(), up.t(), **named), exact / of_d.double())
    # By two GEMMs, of which the first one's result is rounded to BF16.
    d, amax = co.gemm_swiglu(x, gate.t(), up.t(), **named, amax=True)
    assert oracle.error(d, exact / of_d.double()) <= torch.finfo(dtype).eps / 2 + 2 * SUMS + 2.0**-8
    torch.testing.assert_close(amax.double(), exact.abs().amax(1), rtol=0.03, atol=0.01)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("a", "with_gamma", "rows", "dtype", "amax"), RESIDUALS)
def test_a_residual_and_its_copy(shape, a, with_gamma, rows, dtype, amax):
    m, n, k = shape
    if a is E4M3:
        (x, scale_a), (w, scale_b) = quantised(m, k), quantised(n, k)
        factors = {"scale_a": scale_a if rows else scale_a.amax(), "scale_b": scale_b}
        exact = x.double() * factors["scale_a"].double().reshape(-1, 1) @ (w.double() * scale_b.double()[:, None]).t()
    else:
        x, w, factors = torch.randn(m, k, device="cuda").to(a), torch.randn(n, k, device="cuda").to(a), {}
        exact = x.double() @ w.double().t()
    residual = torch.randn(m, n, device="cuda").to(BF16)
    gamma = 1 + 0.2 * torch.randn(n, device="cuda")
    exact += residual.double()
    scale = ((exact.abs().amax(1) if rows else exact.abs().amax()) / torch.finfo(dtype).max / 2).float()
    named = {"eps": EPS, **factors, "scale_out": scale, "quantized_dtype": dtype}
    named |= {"gamma": gamma} if with_gamma else {}
    made = co.gemm_residual_rms(x, w.t(), residual, **named, amax=amax)
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
    d = co.rmsnorm_gemm(padded[:, :520], found, rstd=statistic, scale_a=scale)
    assert_near(d, exact_x @ (found.matrix.double() * found.scale.double()))


# ---- Every kernel ----------------------------------------------------------------------------------------------------


def requested(name, m):
    """Return a call of a layer with small weights, and its exact result."""
    k, n = 1024, 512
    x, scale, statistic, exact_x = normed(m, k)
    (w, scale_b), (up, scale_up) = quantised(n, k), quantised(n, k)
    scale_b, scale_up = scale_b / k**0.5, scale_up / k**0.5
    first = exact_x @ (w.double() * scale_b.double()[:, None]).t()
    if name == "gate":
        exact = F.silu(first) * (exact_x @ (up.double() * scale_up.double()[:, None]).t())
        of_d = (exact.abs().amax() / 448).float()
        named = {"rstd": statistic, "scale_a": scale, "scale_b": scale_b, "scale_up": scale_up, "scale_out": of_d}
        return co.gemm_swiglu, (x, w.t(), up.t()), named | {"out_dtype": E4M3}, {"d": exact / of_d.double()}
    residual, gamma = torch.randn(m, n, device="cuda").to(BF16), torch.rand(n, device="cuda") + 0.5
    y = x.double() * scale.double() @ (w.double() * scale_b.double()[:, None]).t() + residual.double()
    copy = y * gamma.double()
    of_copy = (copy.abs().amax() / 448).float()
    named = {"eps": EPS, "scale_a": scale, "scale_b": scale_b, "gamma": gamma, "scale_out": of_copy, "amax": True}
    exact = {"d": y, "quantized": copy / of_copy.double(), "row_sum_square": y.square().sum(1)}
    return co.gemm_residual_rms, (x, w.t(), residual), named, exact | {"amax": copy.abs().amax(1)}


EVERY = list(itertools.product(("gate", "residual"), (16, 512, 4096)))


def every_spec(function, arguments, named):
    """Return the kernels that a call's weight may need, the first ones."""
    (decision,) = decided(function, arguments, named)
    return decision.specs[:6]


@pytest.mark.parametrize(("name", "m"), EVERY)
def test_every_kernel_that_a_weight_may_need_is_right(name, m):
    function, arguments, named, exact = requested(name, m)
    op, (a, b, *inputs), more = requests.requested(function, *arguments, **named)
    more = {n: x for n, x in more.items() if n not in ("out", "out_dtype")}
    inputs = op.positional(tuple(inputs), more)
    for spec in every_spec(function, arguments, named):
        results = co.build(spec)(a, b, *inputs)
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


def test_other_numbers_of_rows_are_served_as_well():
    for m in (200, 201, 7, 1, 333):
        function, arguments, named, exact = requested("residual", m)
        made = function(*arguments, **named)
        assert_near(made.y, exact["d"])
        torch.testing.assert_close(made.amax.double(), exact["amax"], rtol=0.03, atol=0)


# ---- States ----------------------------------------------------------------------------------------------------------


class Step:
    """One GEMM whose result is quantised with delayed scaling."""

    def __init__(self):
        self.state = co.Fp8State(history=4, device="cuda")
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
    step.state.load_state_dict(co.Fp8State(history=4, device="cuda").state_dict())
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
    rows = co.Fp8State("RowWise", scaling="current")
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
