"""PyTorch as a peer: the same results as the reference, and as careful with its arguments as a kernel."""

import logging
import math

import pytest
import torch
from fake_device import fake_device
from signatures import H100
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cutlass_ops as co
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.operand.call import check_call, signature_of
from cutlass_ops.run import by_pytorch, ops
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


@pytest.fixture
def allowed(tmp_path, monkeypatch, session):
    """A made-up device on which the user's tuning measured PyTorch as the fastest at M rows, and allowed it."""
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path))
    call = call_of(builtin.bias_relu)
    signature = signature_of(call, H100)
    (kernel, *_) = policies.policy(signature, H100).kernels
    point = Point(Problem(M, N, K), "2026-11-21", (Measured(kernel, 10.0, 0.0),), (("cublaslt", 8.0),))
    table = Table(H100.name, 132, signature, (point,), fallback=True).select()
    tables.update(tables.path_of(tmp_path, H100.name, signature), table)
    policies.forget()
    with fake_device(monkeypatch) as device:
        yield device


def test_an_op_takes_the_peer_that_tuning_allowed(allowed, caplog):
    caplog.set_level(logging.INFO, "cutlass_ops")
    op, (a, b, inputs) = ops.Op("relu", builtin.bias_relu), tensors()
    wanted = torch.relu(torch.addmm(inputs["bias"], a, b))
    for _ in range(3):
        torch.testing.assert_close(op(a, b, inputs["bias"]), wanted)
    out = torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    assert op(a, b, inputs["bias"], out=out) is out
    torch.testing.assert_close(out, wanted)
    assert (allowed.launches, allowed.needed) == ([], [])  # no kernel is asked for
    assert op.served_by_pytorch == 4
    assert "PyTorch (cublaslt) serves, as tuning allowed" in caplog.text
    # It was measured at this number of rows alone.
    for _ in range(2):
        op(torch.cat([a, a]), b, inputs["bias"])
    assert (len(allowed.launches), op.served_by_pytorch) == (2, 4)
    found = explaining.explain_call("gemm_bias_relu", call_of(builtin.bias_relu), H100)
    assert found.served_by == "PyTorch (cublaslt)"
    assert "tuning allowed PyTorch" in found.why


@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (torch.zeros(1).bfloat16(), "bias"),  # what PyTorch would broadcast
        (torch.zeros(M, N).bfloat16(), "bias"),
        (1.0, "bias"),
    ],
)
def test_what_pytorch_serves_is_checked_as_ever(allowed, bias, message):
    op, (a, b, inputs) = ops.Op("relu", builtin.bias_relu), tensors()
    op(a, b, inputs["bias"])
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=message):
            op(a, b, bias)
    with pytest.raises(ValueError, match="out"):
        op(a, b, inputs["bias"], out=torch.empty(M, N + 1).bfloat16())
    assert op.served_by_pytorch == 1


def test_a_bias_of_another_type_is_another_signature(allowed):
    op, (a, b, inputs) = ops.Op("relu", builtin.bias_relu), tensors()
    op(a, b, inputs["bias"])
    op(a, b, inputs["bias"].float())
    assert len(allowed.launches) == 1  # tuning said nothing about it
    op(a, b, inputs["bias"])
    assert op.served_by_pytorch == 2


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


@pytest.mark.parametrize("k", [16, 10, 2945])
@pytest.mark.parametrize("along", [-1, -2], ids=["row", "col"])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 1)], ids=str)
def test_pytorchs_groups_get_lines_of_whole_16_bytes(shape, along, k):
    """torch._grouped_mm refuses other strides."""
    x = torch.randn(*shape, k).bfloat16()
    x = x if along == -1 else x.mT
    found = by_pytorch.in_whole_lines(x)
    assert torch.equal(found, x)
    assert found.stride(along) == 1
    others = [found.stride(at) for at in range(found.ndim) if at != along % found.ndim]
    assert all(step % 8 == 0 for step in others)
    assert (found is x) == (k == 16)
