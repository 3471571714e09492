"""Prepared launches: the bits of an ordinary call, of what memory has now, and an error for what would be missed."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_ops as co
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.run import ops, plan

BF16 = torch.bfloat16
M, N, K, EPS = 48, 520, 264, 1e-5


def matrix(rows, columns, *, aligned=True):
    found = torch.randn(rows, columns + (not aligned)).to(BF16) / 8
    return found[:, :columns]


@co.epilogue
def several(acc, bias: co.Row, alpha: co.Scalar):
    """Two tiles and a reduction."""
    pre = acc * alpha + bias
    return {"d": co.relu(pre), "pre": pre, "top": co.max(pre, dim=0)}


def tensors_of(results):
    if isinstance(results, co.types.ResidualRms):
        return [results.y, results.rstd.sum_square]
    if isinstance(results, co.types.QuantizedResidualRms):
        more = [] if results.amax is None else [results.amax]
        return [results.y, results.rstd.sum_square, results.quantized, *more]
    return [results] if isinstance(results, torch.Tensor) else list(results)


def equal(first, second):
    pairs = zip(tensors_of(first), tensors_of(second), strict=True)
    return all(x.dtype == y.dtype and torch.equal(x.float(), y.float()) for x, y in pairs)


@pytest.fixture
def ready(device, monkeypatch):
    """A prepared launch, and a device for which nothing more may be compiled, checked or planned."""
    x, w, bias = matrix(M, K), matrix(N, K).t(), torch.randn(N)
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias, out=torch.full((M, N), math.nan).to(BF16))
    device.closed = True
    return launch, x, w, bias


# ---- Other tensors ---------------------------------------------------------------------------------------------------


def test_other_tensors_serve_one_call(ready, monkeypatch):
    launch, x, w, bias = ready
    monkeypatch.setattr(ops, "check_call", None)
    other, own, second = matrix(M, K), launch.results, torch.empty(M, N, dtype=BF16)
    monkeypatch.setattr(ops, "check_call", None)
    assert launch(a=other, out=second) is second
    assert own.isnan().all()
    monkeypatch.undo()
    wanted = co.gemm_bias_relu(other, w, bias)
    assert equal(second, wanted)
    assert launch(other) is own
    assert equal(own, wanted)
    assert equal(launch(other, w, bias=bias * 2), co.gemm_bias_relu(other, w, bias * 2))
    assert equal(launch(), co.gemm_bias_relu(x, w, bias))


@pytest.mark.usefixtures("device")
def test_other_numbers_and_some_outputs():
    x, w, bias = matrix(M, K), matrix(N, K).t(), torch.randn(N)
    launch = co.prepare_launch(several, x, w, bias, 0.5)
    top = torch.empty(N)
    found = launch(alpha=2, out={"top": top})
    assert found.top is top
    assert found.d is launch.results.d
    assert found._fields == ("d", "pre", "top")
    assert equal(found, co.gemm(x, w, epilogue=several, bias=bias, alpha=2.0))
    assert equal(launch(alpha=torch.tensor(2.0)), found)
    with pytest.raises(ValueError, match="alpha requires grad"):
        launch(alpha=torch.tensor(2.0, requires_grad=True))
    with pytest.raises(TypeError, match="alpha must be a number"):
        launch(alpha="2")
    with pytest.raises(ValueError, match=r"^alpha is 1e\+39, beyond FP32's range"):
        launch(alpha=1e39)
    number = torch.tensor(0.5)
    frozen = co.prepare_launch(several, x, w, bias, number)
    number.fill_(4.0)
    assert equal(frozen(), co.gemm(x, w, epilogue=several, bias=bias, alpha=0.5))


def test_strides_may_be_others_that_the_kernel_reads(ready):
    launch, _, w, bias = ready
    padded = torch.randn(M, K + 8).to(BF16)[:, :K]
    assert equal(launch(padded), co.gemm_bias_relu(padded.contiguous(), w, bias))


def negative(x):
    return torch._neg_view(x)


WRONG = {
    "shape": (
        {"a": lambda x: x[:8]},
        ValueError,
        r"a has shape \(8, 264\), and the launch of gemm_bias_relu was prepared",
    ),
    "shape of b": ({"b": lambda w: w[:, :8]}, ValueError, r"b has shape \(264, 8\)"),
    "shape of an input": ({"bias": lambda x: x[:1]}, ValueError, r"bias has shape \(1,\)"),
    "shape of the output": ({"out": lambda x: x[:8]}, ValueError, r"out has shape \(8, 520\)"),
    "dtype": ({"a": lambda x: x.half()}, TypeError, "b is torch.bfloat16 and a is torch.float16"),
    "dtype of an input": ({"bias": lambda x: x.to(BF16)}, TypeError, "bias must have dtype f32; it is torch.bfloat16"),
    "dtype of the output": ({"out": lambda x: x.float()}, TypeError, "out is torch.float32, and out_dtype asks for"),
    "major": ({"a": lambda x: x.t().contiguous().t()}, ValueError, "a must be row-major"),
    "major of b": ({"b": lambda w: w.contiguous()}, ValueError, "b must be col-major"),
    "no tensor": ({"a": lambda x: 1.0}, TypeError, "a must be a torch.Tensor, not float"),
    "negation": ({"a": negative}, ValueError, "a is a lazy negation"),
    "gradient": ({"a": lambda x: x.clone().requires_grad_()}, ValueError, "a requires grad"),
    "meta": ({"a": lambda x: x.to("meta")}, ValueError, "b is on cpu and a is on meta"),
    "unknown": ({"c": lambda _: None}, TypeError, "c is unknown"),
    "output's name": ({"out": lambda x: {"e": x}}, ValueError, "out names e: the outputs are d"),
}


@pytest.mark.parametrize(("change", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_refused(ready, device, change, kind, message):
    launch, x, w, bias = ready
    given = {"a": x, "b": w, "bias": bias, "out": launch.results, "c": None}
    device.launches.clear()
    with pytest.raises(kind, match=message):
        launch(**{name: make(given[name]) for name, make in change.items()})
    assert device.launches == []
    launch()


def test_arguments_are_counted(ready):
    launch, x, w, bias = ready
    with pytest.raises(TypeError, match=r"takes \(a, b, bias\): 4 are given"):
        launch(x, w, bias, bias)
    with pytest.raises(TypeError, match=r"takes \(a, b, bias\): a is given twice"):
        launch(x, a=x)


# ---- What would be missed --------------------------------------------------------------------------------------------


def test_memory_that_has_moved_is_followed(ready, device):
    launch, x, w, bias = ready
    launch()
    other = matrix(M, K)
    x.data = other
    assert launch() is launch.results
    assert equal(launch(), co.gemm_bias_relu(other, w, bias))
    device.launches.clear()
    bias.data = bias.data.to(BF16)  # now of another kernel
    with pytest.raises(TypeError, match="bias must have dtype f32"):
        launch()
    assert device.launches == []


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Counting, FakeTensorMode])
@pytest.mark.parametrize("other", [False, True])
def test_modes_are_refused(ready, device, mode, other):
    launch, x, w, _ = ready
    device.launches.clear()
    with mode(), pytest.raises(NotImplementedError, match="a mode is active, which would not see a prepared launch of"):
        launch(x) if other else launch()
    with mode(), pytest.raises(NotImplementedError, match="call the op itself there"):
        co.prepare_launch(co.gemm, x, w)
    assert device.launches == []


def test_tracers_are_refused(ready, device):
    launch, x, *_ = ready
    device.launches.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(NotImplementedError, match="PyTorch traces"):
            torch.jit.trace(lambda y: y + launch(), torch.zeros(M, N), check_trace=False)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="prepared launch"):
        torch.compile(lambda y: y + launch(), backend="eager", fullgraph=True)(torch.zeros(M, N))
    assert device.launches == []
    for transform in (torch.func.vmap(lambda y: launch(y)), torch.func.grad(lambda y: launch(y).sum())):
        with pytest.raises(NotImplementedError, match="PyTorch traces"):
            transform(x[None])
    assert device.launches == []
    with pytest.raises(NotImplementedError, match="PyTorch traces"):
        torch.func.vmap(lambda y: co.prepare_launch(co.gemm, y, ready[2]))(x[None])


def test_results_of_inference_mode_are_written_outside_of_it():
    x, w = matrix(M, K), matrix(N, K).t()
    with torch.inference_mode():
        launch, out = co.prepare_launch(co.gemm, x, w), torch.empty(M, N, dtype=x.dtype)
        quantised = co.Scaled.quantize(x, "e4m3")
    wanted = co.gemm(x, w)
    assert equal(co.gemm(x, w, out=out), wanted)
    assert equal(launch(), wanted)
    assert launch().is_inference()
    x = 2 * x
    assert equal(launch(x), co.gemm(x, w))
    again = co.Scaled.quantize(x, "e4m3", out=quantised)
    assert equal(again.scale, 2 * co.Scaled.quantize(x / 2, "e4m3").scale)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.usefixtures("device")
def test_a_tensor_that_requires_grad_since_the_preparation_is_refused(place):
    arguments = [matrix(M, K), matrix(N, K).t(), torch.randn(N)]
    launch = co.prepare_launch(co.gemm_bias_relu, *arguments)
    wanted = launch().clone()
    arguments[place].requires_grad_()
    with pytest.raises(ValueError, match="requires grad, and this has no backward"):
        co.prepare_launch(co.gemm_bias_relu, *arguments)
    with pytest.raises(ValueError, match=f"^{('a', 'b', 'bias')[place]} requires grad, and this has no backward"):
        launch()
    assert launch.results.grad_fn is None
    with torch.no_grad():
        assert equal(launch(), wanted)


@pytest.mark.usefixtures("device")
def test_what_would_be_computed_at_each_call_is_refused():
    x, w, gamma = matrix(M, K), matrix(N, K).t(), torch.ones(K)
    fold = "prepare the weight once, with cutlass_ops.prepare, and pass the result"
    with pytest.raises(ValueError, match=f"gemm_swiglu computes what it passes as b .*{fold}"):
        co.prepare_launch(co.gemm_swiglu, x, w, w, gamma, eps=EPS)
    copied = "pass a contiguous tensor of the full shape"
    with pytest.raises(ValueError, match=f"gemm_bias computes what it passes as bias .*{copied}"):
        co.prepare_launch(co.gemm_bias, x, w, torch.zeros(()).to(BF16).expand(N))
    with pytest.raises(ValueError, match=f"gemm_residual computes what it passes as residual .*{copied}"):
        co.prepare_launch(co.gemm_residual, x, w, torch.zeros(1, N, dtype=BF16))
    with pytest.raises(ValueError, match="a is a lazy negation"):
        co.prepare_launch(co.gemm, negative(x), w)
    viewed = co.prepare_launch(co.gemm_bias, x, w, torch.ones(1, N, dtype=BF16))
    assert equal(viewed(bias=torch.zeros(1, N, dtype=BF16)), co.gemm(x, w))


# ---- Which kernel ----------------------------------------------------------------------------------------------------


def test_it_waits_for_the_best_kernel(device):
    x, w, bias = matrix(M, K), matrix(N, K).t(), torch.randn(N)
    best = co.gemm_bias_relu.plan(x, w, bias)
    device.absent.add(best.spec)
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias)
    assert launch.spec == best.spec
    launch()
    assert [each.spec for each in device.launches] == [best.spec]
    assert best.order.numbers == (device.launches[0].raster, device.launches[0].swizzle)
    assert (device.needed, device.guessed) == ([], [])


@pytest.mark.parametrize("recorded", [True, False])
def test_scratch_memory_is_kept_and_is_each_calls_own_with_other_tensors(device, recorded):
    device.workspace, device.repeats = 4096, recorded
    x, w = matrix(M, K), matrix(N, K).t()
    launch = co.prepare_launch(co.gemm, x, w)
    for _ in range(2):
        launch()
    launch(x)
    first, second, third = (each.workspace for each in device.launches)
    assert first is second
    assert first.numel() == 4096
    assert third.data_ptr() != first.data_ptr()


def test_a_kernel_that_refuses_says_why(device, monkeypatch):
    x, w, bias = matrix(M, K), matrix(N, K).t(), torch.randn(N)
    spec = co.gemm_bias_relu.plan(x, w, bias).spec
    kernel = device.kernel(spec)
    monkeypatch.setattr(kernel, "prepare", lambda *_: 16 * 3 + 6)
    with pytest.raises(ValueError, match="bias must be aligned to"):
        co.prepare_launch(co.gemm_bias_relu, x, w, bias)


def test_exact_kernels_have_launches_too(device):
    config = co.Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32))
    types = {"a": "bf16.row", "b": "bf16.col", "d": "f16.col", "inputs": {"bias": "f32"}, "outputs": {"pre": "f32.col"}}
    kernel = co.build(co.KernelSpec(**types, epilogue=several, config=config))
    x, w, bias = matrix(M, K), matrix(N, K).t(), torch.randn(N)
    launch = co.prepare_launch(kernel, x, w, bias, alpha=0.5)
    assert launch.spec == kernel.spec
    assert equal(launch(), kernel(x, w, bias, 0.5))
    assert launch().d.stride() == (1, M)
    assert equal(launch(x * 2), kernel(x * 2, w, bias, 0.5))
    with pytest.raises(TypeError, match="bias must have dtype f32"):
        launch(bias=bias.to(BF16))


def test_profilers_see_a_launch_by_name(device, monkeypatch):
    seen = []
    monkeypatch.setenv("CUTLASS_OPS_NVTX", "1")
    monkeypatch.setattr(plan.torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(plan.torch.cuda.nvtx, "range_pop", lambda: None)
    launch = co.prepare_launch(co.gemm, matrix(M, K), matrix(N, K).t())
    launch()
    assert seen == ["gemm"]
    assert len(device.launches) == 1


# ---- The object ------------------------------------------------------------------------------------------------------


def test_a_launch_is_frozen_and_says_what_it_is(ready):
    launch, *_ = ready
    assert (launch.name, launch.problem.extents) == ("gemm_bias_relu", (M, N, K))
    assert repr(launch) == f"<launch of gemm_bias_relu at {M}x{N}x{K}: {launch.spec.slug}>"
    with pytest.raises(AttributeError):
        launch.results = None
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled: prepare one where it is used"):
            make(launch)


def test_on_the_cpu_another_dtype_is_refused_as_a_kernel_would():
    a, b, bias = (torch.randn(*shape).bfloat16() for shape in ((4, 16), (16, 8), (8,)))
    launch = co.prepare_launch(co.gemm_bias_relu, a, b, bias)
    for name, x in (("a", a), ("bias", bias), ("out", torch.empty(4, 8).bfloat16())):
        with pytest.raises(TypeError, match=rf"^{name} is torch.float16, and the launch of gemm_bias_relu was prep"):
            launch(**{name: x.half()})
        assert torch.equal(launch(**{name: x.clone()}), launch())


def test_an_extent_of_zero():
    launch = co.prepare_launch(co.gemm, torch.empty(0, K).to(BF16), matrix(N, K).t())
    assert launch().shape == (0, N)
    assert launch.spec is None
