"""Prepared launches on the device: an ordinary call's bits, other tensors, streams, graphs, memory that goes away."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import ops
from tests.gpu import kernels, tensors

pytestmark = pytest.mark.gpu

M, N, K, EPS = 72, 256, 128, 1e-5
BF16 = torch.bfloat16


@co.epilogue
def with_pre(acc, bias: co.Row, alpha: co.Scalar):
    """A further tile."""
    pre = acc * alpha + bias
    return {"d": co.e.relu(pre), "pre": pre}


def is_stream_k(config):
    return getattr(config, "stream_k", False) or getattr(config, "scheduler", "") == "stream_k"


def requests():
    """Return calls of every form that one kernel serves, as a user makes them."""
    (x, w), gamma = operands(), torch.rand(K, device="cuda") + 0.5
    bias, residual, rows = tensors.vector(N, "bf16"), tensors.matrix(M, N, "bf16"), torch.rand(M, device="cuda")
    prepared, layer = co.prepare(w, gamma), co.prepare_layernorm(w, gamma, gamma)
    up, eps = tensors.matrix(K, N, "bf16", "col"), {"eps": EPS}
    prepared_up = co.prepare(up, gamma)
    return {
        "aligned": (co.gemm_bias_relu, (x, w, bias), {}),
        "misaligned": (co.gemm, odd(65, 129, 257), {}),
        "tiny": (co.gemm, odd(2, 5, 3), {}),
        "one row": (co.gemm_bias_silu, (x[:1], w, bias), {}),
        "few rows": (co.gemm_bias_silu, (x[:16], w, bias), {}),
        "a batch": (co.gemm, (x.contiguous().view(3, 24, K), w), {}),
        "FP32": (co.gemm, (x, w), {"out_dtype": torch.float32}),
        "further outputs": (co.gemm, (x, w), {"epilogue": with_pre, "bias": bias, "alpha": 0.5}),
        "a scalar on the device": (ops.op(kernels.scaled), (x, w, rows[0]), {}),
        "reductions": (co.gemm_residual_rms, (x, w, residual), eps),
        "norm": (co.rmsnorm_gemm, (x, prepared), eps),
        "norm, few rows": (co.rmsnorm_gemm, (x[:4], prepared), eps),
        "norm of sums": (co.rmsnorm_gemm, (x, prepared), {"rstd": co.RowStatistic(rows, K, EPS)}),
        "norm, misaligned": (co.rmsnorm_gemm, odd(65, 129, 264), eps),
        "layernorm": (co.layernorm_gemm, (x, layer), eps),
        "gate": (co.gemm_swiglu, (x, w, up), {}),
        "normed gate": (co.gemm_swiglu, (x, prepared, prepared_up), eps),
    }


STREAM_K = [name for name, spec in kernels.configurations().items() if is_stream_k(spec.config)]

REQUESTS = (
    "aligned",
    "misaligned",
    "tiny",
    "one row",
    "few rows",
    "a batch",
    "FP32",
    "further outputs",
    "a scalar on the device",
    "reductions",
    "norm",
    "norm, few rows",
    "norm of sums",
    "norm, misaligned",
    "layernorm",
    "gate",
    "normed gate",
)


def operands():
    return tensors.matrix(M, K, "bf16"), tensors.matrix(K, N, "bf16", "col")


def odd(m, k, n):
    return tensors.matrix(m, k, "bf16", aligned=False), tensors.matrix(k, n, "bf16", "col", aligned=False)


def outputs(results):
    if isinstance(results, co.ResidualRms):
        return [results.y, results.rstd.sum_square]
    return [results] if isinstance(results, torch.Tensor) else list(results)


def equal(first, second):
    return all(torch.equal(x, y) for x, y in zip(outputs(first), outputs(second), strict=True))


def spoil(launch):
    for x in outputs(launch.results):
        x.fill_(3)


@pytest.fixture
def ready():
    """A prepared launch, its operands, and what it computes."""
    (x, w), bias = operands(), tensors.vector(N, "bf16")
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias, out=torch.empty(M, N, device="cuda", dtype=BF16))
    return launch, x, w, bias


def test_every_request_is_named():
    assert tuple(requests()) == REQUESTS


@pytest.mark.parametrize("name", REQUESTS)
def test_every_form_has_the_bits_of_an_ordinary_call(name):
    op, arguments, named = requests()[name]
    wanted = op(*arguments, **named)
    launch = co.prepare_launch(op, *arguments, **named)
    for _ in range(3):
        spoil(launch)
        assert launch() is launch.results
        assert equal(launch.results, wanted)
    # Of other values in the same memory, and of other memory.
    x = arguments[0]
    before = x.clone()
    other = before.mul(0.5)
    x.copy_(other)
    changed = op(*arguments, **named)
    spoil(launch)
    assert equal(launch(), changed)
    assert equal(launch(a=x), changed)
    assert equal(launch(a=before), wanted)


@pytest.mark.parametrize("name", [c.slug for c in (kernels.SM80, kernels.GEMV)])
def test_exact_kernels(name):
    config = {c.slug: c for c in (kernels.SM80, kernels.GEMV)}[name]
    kernel = co.build(kernels.spec(kernels.OPS["gemm_bias_relu"], "bf16", ("row", "col"), config))
    (x, w), bias = operands(), tensors.vector(N, "bf16")
    launch = co.prepare_launch(kernel, x, w, bias)
    spoil(launch)
    assert equal(launch(), kernel(x, w, bias))


@pytest.mark.parametrize("name", STREAM_K)
def test_kernels_that_clear_memory_first(name):
    """Stream-K: an ordinary launch, with the preparation's own workspace."""
    kernel = co.build(kernels.configurations()[name])
    x, w = tensors.matrix(128, 8192, "bf16"), tensors.matrix(8192, 128, "bf16", "col")
    inputs = [tensors.vector(128, "bf16") for _ in kernel.names]
    launch = co.prepare_launch(kernel, x, w, *inputs)
    for _ in range(3):
        spoil(launch)
        assert equal(launch(), kernel(x, w, *inputs))


def test_other_tensors_of_the_same_shapes(ready):
    launch, x, w, bias = ready
    x2, w2, bias2 = torch.randn_like(x), torch.randn_like(w), torch.randn_like(bias)
    d = torch.empty(M, N, device="cuda", dtype=BF16)
    own = launch().clone()
    assert launch(x2, w2, bias2, out=d) is d
    assert equal(d, co.gemm_bias_relu(x2, w2, bias2))
    assert equal(launch.results, own)
    padded = torch.randn(M, K + 8, device="cuda").to(BF16)[:, :K]
    assert equal(launch(a=padded), co.gemm_bias_relu(padded, w, bias))
    assert equal(launch(), own)


def shifted(x):
    """Return a matrix of the same shape, one element after an aligned address."""
    return x.new_zeros(x.shape[0], x.shape[1] + 8)[:, 1 : 1 + x.shape[1]]


WRONG = {
    "shape": ({"a": lambda x: x[:8]}, ValueError, "a has shape"),
    "major": ({"a": lambda x: x.t().contiguous().t()}, ValueError, "a must be row-major"),
    "alignment": ({"a": shifted}, ValueError, "a must be aligned"),
    "dtype": ({"bias": lambda x: x.float()}, TypeError, "bias must have dtype bf16"),
    "device": ({"a": lambda x: x.cpu()}, ValueError, "b is on cuda:0 and a is on cpu"),
    "overlap": ({"out": lambda x: x}, ValueError, "out shares memory with"),
}


@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_written(ready, change, kind, message):
    launch, x, w, bias = ready
    given = {"a": x, "b": w, "bias": bias, "out": torch.empty(M, N, device="cuda", dtype=BF16)}
    if "out" in change:  # D would be written over B
        buffer = torch.randn(N, K + N, device="cuda").to(BF16)
        given |= {"b": buffer[:, :K].t(), "out": buffer[:M].as_strided((M, N), (K + N, 1), 8)}
        launch(b=given["b"])
        change = {"b": lambda b: b, **change}
    spoil(launch)
    before = launch.results.clone()
    with pytest.raises(kind, match=message):
        launch(**{name: make(given[name]) for name, make in change.items()})
    assert torch.equal(launch.results, before)


def test_memory_that_moves_is_followed_and_freed_memory_is_refused(ready):
    launch, x, w, bias = ready
    launch()
    other = torch.randn_like(x)
    x.data = other
    assert equal(launch(), co.gemm_bias_relu(other, w, bias))
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        launch()


def test_it_keeps_its_memory():
    (x, w), bias = operands(), tensors.vector(N, "bf16")
    wanted = co.gemm_bias_relu(x, w, bias)
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias)
    del x, w, bias
    junk = [torch.full((M, N), 7.0, device="cuda", dtype=BF16) for _ in range(64)]
    assert equal(launch(), wanted)
    assert len(junk) == 64


@pytest.mark.parametrize("name", ["aligned", "misaligned", "few rows", "reductions", "norm"])
def test_it_runs_on_the_stream_that_is_current(name):
    op, arguments, named = requests()[name]
    launch = co.prepare_launch(op, *arguments, **named)
    stream = torch.cuda.Stream()
    x = arguments[0]
    second = torch.randn_like(x)
    with torch.no_grad():
        for values in (x.clone(), second):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # what runs on another stream would read x before it is written
                x.copy_(values)
                launch()
            torch.cuda.current_stream().wait_stream(stream)
            assert equal(launch.results, op(*arguments, **named))


@pytest.mark.parametrize("name", REQUESTS)
def test_a_graph_replays_it(name):
    op, arguments, named = requests()[name]
    launch = co.prepare_launch(op, *arguments, **named)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    x = arguments[0]
    for _ in range(2):
        x.copy_(torch.randn_like(x))
        wanted = op(*arguments, **named)
        spoil(launch)
        graph.replay()
        assert equal(launch.results, wanted)
        spoil(launch)
        assert equal(launch(), wanted)


def test_it_is_prepared_before_a_capture():
    x, w = operands()
    co.gemm(x, w)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = x + 1
        with pytest.raises(NotImplementedError, match="is being captured into a CUDA graph"):
            co.prepare_launch(co.gemm, y, w)


def test_launches_follow_each_other_without_gaps(ready):
    """Many launches that overlap with their predecessors: each reads what the one before has written."""
    x = torch.randn(M, N, device="cuda").to(BF16) / 16
    w = torch.randn(N, N, device="cuda").to(BF16).t() / 16
    y = torch.empty_like(x)
    there, back = co.prepare_launch(co.gemm, x, w, out=y), co.prepare_launch(co.gemm, y, w, out=x)
    start = x.clone()
    for _ in range(8):
        there(), back()
    wanted = start
    for _ in range(16):
        wanted = co.gemm(wanted, w)
    assert torch.equal(x, wanted)


def test_misaligned_launches_follow_each_other():
    x, w = odd(65, 129, 129)
    y = torch.empty(65, 129, device="cuda", dtype=BF16)
    there, back = co.prepare_launch(co.gemm, x, w, out=y), co.prepare_launch(co.gemm, y, w, out=x)
    start = x.clone()
    for _ in range(8):
        there(), back()
    wanted = start
    for _ in range(16):
        wanted = co.gemm(wanted, w)
    assert torch.equal(x, wanted)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    (x, w), bias = (t.to("cuda:1") for t in operands()), tensors.vector(N, "bf16").to("cuda:1")
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias)
    assert torch.cuda.current_device() == 0
    assert equal(launch(), co.gemm_bias_relu(x, w, bias))


def test_peers_of_the_tuner_do_not_serve(ready):
    assert ready[0].spec.epilogue == builtin.bias_relu.graph
