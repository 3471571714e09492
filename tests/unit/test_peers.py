"""PyTorch as a peer: the same results as the reference, and as careful with its arguments as a kernel."""

import math

import pytest
import torch
from signatures import H100
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_ops as co
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.run import named, serving
from cutlass_ops.run.call import check_call, signature_of
from cutlass_ops.run.fallbacks import PeerPlan, can_fall_back, make_peer_plan
from cutlass_ops.run.peers import peers
from cutlass_ops.tools import explaining

M, N, K = 24, 40, 16


def tensors():
    a, b = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16().t()
    return a, b, {"bias": torch.randn(N).bfloat16(), "residual": torch.randn(M, N).bfloat16()}


def call_of(epilogue, out=None, out_dtype=None, a=None):
    first, b, inputs = tensors()
    names = [i.name for i in epilogue.graph.inputs]
    return check_call(epilogue.graph, first if a is None else a, b, {n: inputs[n] for n in names}, out, out_dtype)


@pytest.mark.parametrize("epilogue", builtin.BY_OP.values(), ids=lambda e: e.name)
def test_every_peer_computes_the_epilogue(epilogue):
    call = call_of(epilogue)
    given = call.arguments
    wanted = co.gemm(given.a.double().bfloat16(), given.b, epilogue=epilogue, **given.inputs).double()
    found = peers(epilogue.graph)
    assert "eager" in found
    for peer in found.values():
        d = peer(given.a, given.b, list(given.inputs.values()))
        assert (d.shape, d.dtype) == ((M, N), torch.bfloat16)
        torch.testing.assert_close(d.double(), wanted, rtol=0.03, atol=0.1)


def test_a_peers_plan_serves_cold_and_warm_calls():
    call = call_of(builtin.bias_relu_residual)
    plan = make_peer_plan("eager", call)
    plan.launch_call(call)
    a, b, inputs = call.arguments.a, call.arguments.b, tuple(call.arguments.inputs.values())
    (warm,) = plan.run(a, b, inputs, None)
    assert torch.equal(warm, call.outputs[0])
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    assert plan.run(a, b, inputs, (out,))[0] is out
    assert torch.equal(out, warm)


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.zeros(1).bfloat16(), torch.zeros(M, N).bfloat16()),  # what PyTorch would broadcast
        (torch.zeros(N).bfloat16(), torch.zeros(1, N).bfloat16()),
        (torch.zeros(N), torch.zeros(M, N).bfloat16()),
        (torch.zeros(N).bfloat16(), 1.0),
    ],
)
def test_a_peers_plan_refuses_other_inputs(inputs):
    call = call_of(builtin.bias_relu_residual)
    plan = make_peer_plan("eager", call)
    assert plan.run(call.arguments.a, call.arguments.b, inputs, None) is None
    right = tuple(call.arguments.inputs.values())
    assert plan.run(call.arguments.a, call.arguments.b, right, (torch.empty(M, N + 1).bfloat16(),)) is None


def test_which_calls_a_peer_can_serve():
    @co.epilogue
    def two(acc):
        """D, and what it was before."""
        return {"d": co.relu(acc), "pre": acc}

    assert can_fall_back(call_of(builtin.bias_relu))
    assert not can_fall_back(call_of(builtin.bias_relu, out_dtype=torch.float32))
    assert not can_fall_back(call_of(two))
    assert not can_fall_back(call_of(builtin.bias_relu, a=torch.randn(2, 3, K).bfloat16()))


def test_an_op_takes_the_peer_that_tuning_allowed(tmp_path, monkeypatch, session):
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path))
    monkeypatch.setattr(serving, "device_of", lambda device: H100)
    call = call_of(builtin.bias_relu)
    signature = signature_of(call, H100)
    (kernel, *_) = policies.policy(signature, H100).kernels
    point = Point(Problem(M, N, K), "2026-11-21", (Measured(kernel, 10.0, 0.0),), (("cublaslt", 8.0),))
    table = Table(H100.name, 132, signature, (point,), fallback=True).select()
    tables.update(tables.path_of(tmp_path, H100.name, signature), table)
    policies.forget()
    plan, *_ = named.gemm_bias_relu._plan(call)
    assert isinstance(plan, PeerPlan)
    assert plan.name == "cublaslt"
    found = explaining.explain_call("gemm_bias_relu", call, H100)
    assert found.served_by == "PyTorch (cublaslt)"
    assert "tuning allowed PyTorch" in found.why


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_peers_of_norms_normalise_before_they_round(eps):
    # Rows whose product with B is beyond FP16's range until they are scaled.
    a, b = (torch.randn(M, K) * 1e4).half(), torch.randn(K, N).half() * 4
    residual, columns = torch.randn(M, N).half(), b.float().sum(0)
    x = a.double()
    rms = x * (x.square().mean(1, keepdim=True) + eps).rsqrt() @ b.double()
    centred = x - x.mean(1, keepdim=True)
    layer = centred * (centred.square().mean(1, keepdim=True) + eps).rsqrt() @ b.double()
    assert (a @ b).isinf().any()
    followed = composed.rms_norm.graph.then(builtin.residual.graph)
    for graph, inputs, wanted in (
        (composed.rms_norm.graph, [eps], rms),
        (composed.layer_norm.graph, [columns, eps], layer),
        (followed, [eps, residual], rms + residual.double()),
    ):
        for peer in peers(graph).values():
            d = peer(a, b, inputs)
            assert d.dtype == torch.float16
            assert (d.double() - wanted).norm() <= 2e-3 * wanted.norm()


class Crossings(TorchDispatchMode):
    """Notes the operations that take a tensor to another device, which no CUDA graph can hold."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
        if len({x.device for x in tensors}) > 1:
            self.found.append(str(func))
        return result


@co.epilogue
def numbers(acc, bias: co.Row, alpha: co.Scalar):
    """A number that is given, and constants."""
    return co.maximum(acc * alpha + 0.25, -1e30) + bias


@co.epilogue
def scaled_rows(acc, alpha: co.Scalar):
    return acc * co.rsqrt(co.mean_square_of_a() + alpha)


@pytest.mark.parametrize("epilogue", [numbers, scaled_rows, composed.rms_norm, composed.layer_norm], ids=str)
def test_peers_can_be_captured_with_numbers_among_their_inputs(epilogue):
    with FakeTensorMode(), Crossings() as crossings:
        half = {"device": "cuda", "dtype": torch.float16}
        inputs = [torch.empty(N, **half) if i.kind.value == "row" else 0.5 for i in epilogue.graph.inputs]
        for peer in peers(epilogue.graph).values():
            d = peer(torch.empty(M, K, **half), torch.empty(K, N, **half), inputs)
            assert (d.shape, d.dtype, d.device.type) == ((M, N), torch.float16, "cuda")
        assert not crossings.found
        torch.tensor(0.5, device="cuda")
        assert crossings.found  # it can tell


def test_numbers_beyond_fp32_and_fp16_are_infinite():
    a, b, inputs = tensors()
    (eager,) = peers(numbers.graph).values()
    d = eager(a.half(), b.half(), [inputs["bias"].half(), math.copysign(1e300, -1)])
    assert d.isfinite().logical_or(d.isinf()).all()
    assert d.isinf().any()
