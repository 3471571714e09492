"""Prepared launches: the bits of an ordinary call, of what memory has now, and an error for what would be missed."""

import copy
import math
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from fake_device import fake_device
from signatures import A100
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_ops as co
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch
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


def forms():
    """Return calls of every form, as a user makes them."""
    x, w, bias, gamma = matrix(M, K), matrix(N, K).t(), torch.randn(N), torch.rand(K)
    prepared, layer = co.prepare(w, gamma), co.prepare_layernorm(w, gamma, gamma)
    sums, eps = co.RowStatistic(torch.rand(M), K, EPS), {"eps": EPS}
    return {
        "aligned": (co.gemm_bias_relu, (x, w, bias), {}),
        "misaligned": (co.gemm, (matrix(M, 129, aligned=False), matrix(257, 129, aligned=False).t()), {}),
        "few rows": (co.gemm_bias_silu, (matrix(2, K), w, bias), {}),
        "tiny": (co.gemm, (matrix(2, 5), matrix(3, 5).t()), {}),
        "a batch": (co.gemm, (x.view(3, 16, K), w), {}),
        "another dtype": (co.gemm, (x, w), {"out_dtype": torch.float32}),
        "further outputs": (co.gemm, (x, w), {"epilogue": several, "bias": bias, "alpha": 0.5}),
        "an epilogue": (several, (x, w, bias), {"alpha": 2}),
        "norm": (co.rmsnorm_gemm, (x, prepared), eps),
        "norm of sums": (co.rmsnorm_gemm, (x, prepared), {"rstd": sums}),
        "layernorm": (co.layernorm_gemm, (x, layer), eps),
        "residual": (co.gemm_residual_rms, (x, w, matrix(M, N)), eps),
        "swiglu": (co.gemm_swiglu, (x, w, matrix(N, K).t()), {}),
        "normed swiglu": (co.gemm_swiglu, (x, prepared, co.prepare(matrix(N, K).t(), gamma)), eps),
        "scaled": (co.scaled_gemm, (x, w, torch.rand(M), 0.5), {}),
        **forms_in_fp8(),
    }


def forms_in_fp8():
    """What a layer in FP8 calls."""
    n, k = 528, 272  # lines of FP8 begin at multiples of 16 bytes
    x, w = (matrix(rows, k, aligned=False).to(torch.float8_e4m3fn) for rows in (M, n))
    sums, columns, scale = co.RowStatistic(torch.rand(M), k, EPS), torch.rand(n), {"scale_out": 0.1}
    normed = {"rstd": sums, "scale_a": 0.5, "scale_b": columns}
    copy = {"eps": EPS, "scale_a": 0.5, "scale_b": columns, "gamma": torch.rand(n), **scale}
    gate = {**normed, "scale_up": columns, **scale, "out_dtype": torch.float8_e4m3fn}
    return {
        "norm of FP8": (co.rmsnorm_gemm, (x, w.t()), normed),
        "residual with a copy in FP8": (co.gemm_residual_rms, (x, w.t(), matrix(M, n)), copy),
        "the same with amax": (co.gemm_residual_rms, (x, w.t(), matrix(M, n)), copy | {"amax": True}),
        "swiglu in FP8": (co.gemm_swiglu, (x, w.t(), w.t()), gate),
        "prepared in FP8": (co.scaled_gemm, (x, co.prepare(w.float().bfloat16().t(), dtype=x.dtype), 0.5), {}),
    }


FORMS = tuple(forms())


def tensors_of(results):
    if isinstance(results, co.ResidualRms):
        return [results.y, results.rstd.sum_square]
    if isinstance(results, co.QuantizedResidualRms):
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


@pytest.mark.parametrize(
    ("form", "recorded"), [*((form, True) for form in FORMS), ("aligned", False), ("further outputs", False)]
)
def test_every_form_has_the_bits_of_an_ordinary_call(device, form, recorded, monkeypatch):
    op, arguments, named = forms()[form]
    wanted = (
        op(*arguments, **named)
        if not isinstance(op, co.Epilogue)
        else co.gemm(*arguments[:2], epilogue=op, bias=arguments[2], **named)
    )
    device.repeats = recorded
    launch = co.prepare_launch(op, *arguments, **named)
    for x in tensors_of(launch.results):
        x.fill_(3)
    device.launches.clear()
    monkeypatch.setattr(ops, "check_call", None)
    monkeypatch.setattr(plan.Plan, "run", None)
    for _ in range(2):
        assert launch() is launch.results
        assert equal(launch(), wanted)
    assert len(device.launches) == 4
    assert {each.spec for each in device.launches} == {launch.spec}


@pytest.mark.usefixtures("device")
def test_it_reads_what_memory_has_now(ready):
    launch, x, w, bias = ready
    before = launch().clone()
    for each in (x, bias):
        each.mul_(2)
    w.copy_(matrix(N, K).t())
    assert equal(launch(), co.gemm_bias_relu(x, w, bias))
    assert not equal(launch(), before)


@pytest.mark.parametrize("named", [False, True])
def test_given_outputs_are_written_and_others_are_allocated_once(device, named):
    x, w, bias, d = matrix(M, K), matrix(N, K).t(), torch.randn(N), torch.empty(M, N, dtype=BF16)
    out = {"d": d, "top": torch.empty(N)} if named else d
    launch = co.prepare_launch(several, x, w, bias, 0.5, out=out)
    assert launch().d is d
    assert launch().pre is launch.results.pre
    assert not named or launch().top is out["top"]


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


def test_the_memory_is_kept(ready):
    launch, *_ = ready
    before = launch().clone()
    del _
    junk = [torch.full((M, K), 7.0).to(BF16) for _ in range(64)]
    assert equal(launch(), before)
    assert len(junk) == 64


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


def test_function_modes_that_trace_nothing_are_no_matter(ready):
    launch, *_ = ready
    with torch.device("cpu"):
        launch()


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


def test_gradients_are_refused(ready, device):
    launch, x, w, bias = ready
    weight = torch.nn.Parameter(w.t().contiguous())
    with pytest.raises(ValueError, match="b requires grad, and this has no backward"):
        co.prepare_launch(co.gemm_bias_relu, x, weight.t(), bias)
    with torch.no_grad():
        launch = co.prepare_launch(co.gemm_bias_relu, x, weight.t(), bias)
        wanted = launch().clone()
    for call in (launch, lambda: launch(x)):
        with pytest.raises(ValueError, match="b requires grad"):
            call()
    with torch.inference_mode():
        assert equal(launch(), wanted)
    weight.requires_grad_(False)


def test_results_of_inference_mode_are_written_outside_of_it():
    x, w = matrix(M, K), matrix(N, K).t()
    with torch.inference_mode():
        launch, out = co.prepare_launch(co.gemm, x, w), torch.empty(M, N, dtype=x.dtype)
        quantised = co.quantize(x, "e4m3")
    wanted = co.gemm(x, w)
    assert equal(co.gemm(x, w, out=out), wanted)
    assert equal(launch(), wanted)
    assert launch().is_inference()
    x = 2 * x
    assert equal(launch(x), co.gemm(x, w))
    again = co.quantize(x, "e4m3", out=dict(zip(("d", "d_scale"), quantised, strict=True)))
    assert equal(again.d_scale, 2 * co.quantize(x / 2, "e4m3").d_scale)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.usefixtures("device")
def test_a_tensor_that_requires_grad_since_the_preparation_is_refused(place):
    arguments = [matrix(M, K), matrix(N, K).t(), torch.randn(N)]
    launch = co.prepare_launch(co.gemm_bias_relu, *arguments)
    wanted = launch().clone()
    arguments[place].requires_grad_()
    with pytest.raises(ValueError, match=f"^{('a', 'b', 'bias')[place]} requires grad, and this has no backward"):
        launch()
    assert launch.results.grad_fn is None
    with torch.no_grad():
        assert equal(launch(), wanted)


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


def test_wrappers_are_refused(ready):
    launch, x, w, bias = ready
    with pytest.raises(TypeError, match="a is on the device meta, and has no memory"):
        co.prepare_launch(co.gemm_bias_relu, x.to("meta"), w.to("meta"), bias.to("meta"))
    with pytest.raises(TypeError, match="a is a Wrapper, which has no memory of its own"):
        launch(Wrapper(x))
    with pytest.raises(TypeError, match="b is a Wrapper"):
        co.prepare_launch(co.gemm_bias_relu, x, Wrapper(w), bias)


@pytest.mark.usefixtures("device")
def test_what_would_be_computed_at_each_call_is_refused():
    x, w, gamma = matrix(M, K), matrix(N, K).t(), torch.ones(K)
    fold = "prepare the weight once, with cutlass_ops.prepare or cutlass_ops.prepare_layernorm"
    with pytest.raises(ValueError, match=f"rmsnorm_gemm computes what it passes as b .*{fold}"):
        co.prepare_launch(co.rmsnorm_gemm, x, w, gamma, eps=EPS)
    with pytest.raises(ValueError, match=f"gemm_swiglu computes what it passes as b .*{fold}"):
        co.prepare_launch(co.gemm_swiglu, x, w, w, gamma, eps=EPS)
    with pytest.raises(ValueError, match=f"layernorm_gemm computes what it passes as column_sum .*{fold}"):
        co.prepare_launch(co.layernorm_gemm, x, w, eps=EPS)
    assert co.prepare_launch(co.rmsnorm_gemm, x, w, eps=EPS)() is not None
    copied = "pass a contiguous tensor of the full shape"
    with pytest.raises(ValueError, match=f"gemm_bias computes what it passes as bias .*{copied}"):
        co.prepare_launch(co.gemm_bias, x, w, torch.zeros(()).to(BF16).expand(N))
    with pytest.raises(ValueError, match=f"gemm_residual computes what it passes as residual .*{copied}"):
        co.prepare_launch(co.gemm_residual, x, w, torch.zeros(1, N, dtype=BF16))
    with pytest.raises(ValueError, match="a is a lazy negation"):
        co.prepare_launch(co.gemm, negative(x), w)
    viewed = co.prepare_launch(co.gemm_bias, x, w, torch.ones(1, N, dtype=BF16))
    assert equal(viewed(bias=torch.zeros(1, N, dtype=BF16)), co.gemm(x, w))


def test_arguments_are_checked_as_by_a_call(device):
    with pytest.raises(ValueError, match=r"b looks like a weight of shape \(N, K\)"):
        co.prepare_launch(co.gemm, matrix(M, K), matrix(N, K))
    with pytest.raises(TypeError, match="bias is missing"):
        co.prepare_launch(co.gemm_bias, matrix(M, K), matrix(N, K).t())
    with pytest.raises(TypeError, match=r"pass cutlass_ops\.gemm, a named op"):
        co.prepare_launch(torch.mm, matrix(M, K), matrix(N, K).t())
    assert device.loaded == {}


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
    assert device.queued == []


def test_a_peer_does_not_serve(device, monkeypatch):
    x, w, bias = matrix(M, K), matrix(N, K).t(), torch.randn(N).to(BF16)
    decide = dispatch.decide
    monkeypatch.setattr(dispatch, "decide", lambda *given: with_peer(decide(*given)))
    assert co.gemm_bias_relu.plan(x, w, bias).peer == "eager"
    launch = co.prepare_launch(co.gemm_bias_relu, x, w, bias)
    launch()
    assert [each.spec for each in device.launches] == [launch.spec]


def with_peer(decision):
    return replace(decision, peer="eager")


@pytest.mark.usefixtures("session")
def test_two_gemms_are_refused(monkeypatch):
    with fake_device(monkeypatch, A100) as device:
        x, w = matrix(M, K), matrix(N, K).t()
        with pytest.raises(UnsupportedError, match=r"gemm_swiglu: no kernel takes both weights.* call the op itself"):
            co.prepare_launch(co.gemm_swiglu, x, w, w.clone())
        assert device.loaded == {}


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


@pytest.mark.parametrize("form", FORMS)
def test_on_the_cpu_pytorch_computes(form):
    op, arguments, named = forms()[form]
    launch = co.prepare_launch(op, *arguments, **named)
    assert launch.spec is None
    wanted = tensors_of(launch())
    wanted = [x.clone() for x in wanted]
    x = arguments[0]
    other = x.clone()
    x.zero_()
    assert not equal(launch(), wanted)
    assert equal(launch(other), wanted)
    assert "PyTorch" in repr(launch)


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
