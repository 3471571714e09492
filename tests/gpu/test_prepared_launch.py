"""Prepared launches besides those of ``test_contract.py``: prepared weights, other tensors, memory that goes away."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import ops
from tests.gpu import kernels, tensors
from tests.gpu.cases import captured
from tests.unit.op_table import flat

pytestmark = pytest.mark.gpu

M, N, K, EPS = 72, 256, 128, 1e-5
BF16 = torch.bfloat16


def operands():
    return tensors.matrix(M, K, "bf16"), tensors.matrix(K, N, "bf16", "col")


def odd(m, k, n):
    return tensors.matrix(m, k, "bf16", aligned=False), tensors.matrix(k, n, "bf16", "col", aligned=False)


def request(name):
    """Return a call as a user makes it."""
    (x, w), gamma = operands(), torch.rand(K, device="cuda") + 0.5
    prepared, up = co.prepare(w, gamma), co.prepare(tensors.matrix(K, N, "bf16", "col"), gamma)
    return {
        "misaligned": (co.gemm, odd(65, 129, 257), {}),
        "tiny": (co.gemm, odd(2, 5, 3), {}),
        "few rows": (co.gemm_bias_silu, (x[:16], w, tensors.vector(N, "bf16")), {}),
        "a scalar on the device": (ops.op(kernels.scaled), (x, w, torch.rand((), device="cuda")), {}),
        "norm": (co.rmsnorm_gemm, (x, prepared), {"eps": EPS}),
        "norm, few rows": (co.rmsnorm_gemm, (x[:4], prepared), {"eps": EPS}),
        "norm, misaligned": (co.rmsnorm_gemm, odd(65, 129, 264), {"eps": EPS}),
        "layernorm": (co.layernorm_gemm, (x, co.prepare(w, gamma, gamma, norm="layer")), {"eps": EPS}),
        "normed gate": (co.gemm_swiglu, (x, prepared, up), {"eps": EPS}),
    }[name]


REQUESTS = (
    "misaligned", "tiny", "few rows", "a scalar on the device", "norm", "norm, few rows", "norm, misaligned",
    "layernorm", "normed gate",
)  # fmt: skip


def equal(first, second):
    return all(torch.equal(x, y) for x, y in zip(flat(first), flat(second), strict=True))


def spoil(launch):
    for x in flat(launch.results):
        x.fill_(3)


@pytest.fixture
def ready():
    """A prepared launch, its operands, and what it computes."""
    (x, w), bias = operands(), tensors.vector(N, "bf16")
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias, out=torch.empty(M, N, device="cuda", dtype=BF16))
    return launch, x, w, bias


@pytest.mark.parametrize("name", REQUESTS)
def test_it_has_the_bits_of_an_ordinary_call_by_itself_and_in_a_graph(name):
    op, arguments, named = request(name)
    launch, x = co.prepare_launch(op, *arguments, **named), arguments[0]
    assert launch() is launch.results
    graph, _ = captured(launch)
    before = x.clone()
    for values in (before, before * 0.5, torch.randn_like(x)):  # other values in the same memory
        x.copy_(values)
        wanted = op(*arguments, **named)
        for run in (launch, graph.replay):
            spoil(launch)
            run()
            assert equal(launch.results, wanted)
    assert equal(launch(a=before), op(before, *arguments[1:], **named))  # and other memory


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


def test_it_is_prepared_before_a_capture():
    x, w = operands()
    co.gemm(x, w)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        y = x + 1
        with pytest.raises(NotImplementedError, match="is being captured into a CUDA graph"):
            co.prepare_launch(co.gemm, y, w)


@pytest.mark.parametrize("aligned", [True, False])
def test_launches_follow_each_other_without_gaps(aligned):
    """Many launches that overlap with their predecessors: each reads what the one before has written."""
    n = 256 if aligned else 129
    x, w = tensors.matrix(72, n, "bf16", aligned=aligned), tensors.matrix(n, n, "bf16", "col", aligned=aligned)
    y = torch.empty_like(x)
    there, back = co.prepare_launch(co.gemm, x, w, out=y), co.prepare_launch(co.gemm, y, w, out=x)
    wanted = x.clone()
    for _ in range(8):
        there(), back()
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
