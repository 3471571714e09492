"""A call's best kernel serves it if it is loaded. Until it is, PyTorch does, and no call waits for a compiler."""

import itertools
import logging
import threading
import warnings

import pytest
import torch
from fake_device import Everything, fake_device
from signatures import H100, signature

import cutlass_ops as co
from cutlass_ops.base.errors import CompileError, MissingKernelError, ToolchainError
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.operand import call
from cutlass_ops.run import ops, supply
from cutlass_ops.tools import explaining

M, N, K = 48, 520, 264
BF16 = torch.bfloat16


def rows(count):
    return torch.randn(count, K).to(BF16) / 8


B, BIAS = torch.randn(N, K).to(BF16).t() / 8, torch.randn(N).to(BF16)


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as fake:
        yield fake


@pytest.fixture
def op():
    return ops.Op("relu", builtin.bias_relu)


def best(m=M):
    return dispatch.decide(signature(), H100, Problem(m, N, K))


@pytest.fixture
def specs(device):
    """Every kernel of the signature; none of them is compiled."""
    found = dispatch.specs(signature(), H100)
    device.absent.update(found)
    return found


@pytest.fixture
def captured(monkeypatch):
    monkeypatch.setattr(supply, "is_captured", lambda: True)


def right(a, d):
    wanted = torch.relu(a.float() @ B.float() + BIAS.float())
    assert (d.float() - wanted).norm() <= 0.01 * wanted.norm()


def test_a_kernel_that_is_there_serves_from_the_first_call_on(op, device):
    for count in (M, M, 77):
        a = rows(count)
        right(a, op(a, B, BIAS))
    assert [launch.spec for launch in device.launches] == [best(M).spec, best(M).spec, best(77).spec]
    assert op.served_by_pytorch == 0


def test_pytorch_serves_until_the_best_kernel_is_there(op, device, specs, caplog):
    caplog.set_level(logging.INFO, "cutlass_ops")
    wanted, a = best().spec, rows(M)
    device.kernel(next(spec for spec in specs if spec != wanted))  # another kernel that is loaded serves nothing
    for _ in range(3):
        right(a, op(a, B, BIAS))
    assert device.launches == []
    assert op.served_by_pytorch == 3
    assert device.needed[0] == wanted
    assert f"PyTorch serves until {wanted.slug} is there" in caplog.text
    device.built(wanted)
    assert (wanted, a.device) in device.on_device
    for _ in range(2):
        right(a, op(a, B, BIAS))
    assert [launch.spec for launch in device.launches] == [wanted, wanted]
    assert op.served_by_pytorch == 3
    assert op.served_warm == 3


def test_bits_change_at_most_once(op, device, specs):
    a, found = rows(M), []
    for at in range(12):  # the same call each time
        if at == 4:
            device.built(best().spec)
        if at == 8:
            for spec in specs:
                device.built(spec)
        found.append(op(a, B, BIAS))
    changes = sum(not torch.equal(x, y) for x, y in itertools.pairwise(found))
    assert changes <= 1
    assert len(device.launches) == 8


def test_the_decision_about_a_new_weight_is_made_while_pytorch_serves(op, device, monkeypatch):
    monkeypatch.setattr(supply, "_A_LOAD", 0.0)
    device.decides = False
    policies.forget(shipped=True)
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "decide", lambda *_: pytest.fail("the call decided"))
        a = rows(M)
        for _ in range(2):
            right(a, op(a, B, BIAS))
    assert op.served_by_pytorch == 2
    (decide,) = device.undecided
    decide()
    right(a, op(a, B, BIAS))
    assert [launch.spec for launch in device.launches] == [best().spec]


def test_other_numbers_of_rows_are_guesses_that_follow(op, device, specs):
    op(rows(M), B, BIAS)
    assert device.needed == [best().spec]
    assert device.guessed == list(best().specs)
    device.built(best().specs[-1])
    assert (best().specs[-1], torch.device("cpu")) in device.on_device


# The kernels are the same however they came, and each number of rows takes milliseconds.
@pytest.mark.parametrize(
    ("how", "step"),
    [("warm_up", 10), ("gemm", 10), ("background", 10), pytest.param("warm_up", 1, marks=pytest.mark.slow)],
)
def test_after_warming_up_no_number_of_rows_compiles_anything(op, device, how, step):
    if how == "warm_up":
        assert op.warm_up(rows(1), B, BIAS) == len(device.loaded)
    elif how == "gemm":
        assert co.warm_up(co.gemm, rows(1), B, epilogue=op.epilogue, bias=BIAS) == len(device.loaded)
    else:
        op(rows(1), B, BIAS)
        device.kernels(device.guessed)
    device.closed = True
    # What a call does before it launches: a launch computes, which takes long here.
    for m in [*range(1, 300, step), *range(300, 8193, 37 * step), 8192]:
        assert op._served(call.check_call(op.graph, rows(m), B, {"bias": BIAS}, None, None)).plan is not None
    assert 1 < len(device.loaded) <= 32


def test_a_setting_has_calls_wait_for_the_best_kernel(op, device, specs, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    op(rows(M), B, BIAS)
    assert device.launches[0].spec == best().spec
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "perhaps")
    with pytest.raises(ValueError, match="CUTLASS_OPS_STAND_IN"):
        op(rows(40 * M), B, BIAS)


def test_where_no_choice_may_change_a_bit_calls_wait(op, device, specs, monkeypatch):
    kernels = tuple(c for c in policies.policy(signature(), H100).kernels if c.whole_k)
    point = Point(
        Problem(M, N, K), "2026-11-26", tuple(Measured(c, 10.0 + i, i / 10) for i, c in enumerate(kernels[:3]))
    )
    table = Table(H100.name, 132, signature(), (point,), kernels=kernels, deterministic=True)
    policy = policies.Policy.of([table], signature(), H100, kernels)
    monkeypatch.setattr(policies, "policy", lambda *_: policy)
    monkeypatch.setattr(dispatch, "_may_be_tuned", lambda *_: True)
    monkeypatch.setattr(policies, "has_tables_of_its_own", lambda *_: True)
    op(rows(M), B, BIAS)
    assert op.served_by_pytorch == 0
    (launch,) = device.launches
    assert launch.spec.config == kernels[0]


@pytest.mark.parametrize("error", [CompileError("too complex"), ToolchainError("no nvcc"), MissingKernelError("JIT=0")])
def test_what_cannot_be_had_pytorch_goes_on_serving_with_one_warning(op, device, specs, error):
    device.failed.update(dict.fromkeys(specs, error))
    a = rows(M)
    with pytest.warns(RuntimeWarning, match=f"{error}.*CUTLASS_OPS_STAND_IN=0") as caught:
        found = [(x, op(x, B, BIAS)) for x in (a, a, rows(M + 1), rows(2000))]
    assert len(caught) == 1
    for each in found:
        right(*each)
    assert device.launches == []
    assert op.served_by_pytorch == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops.Op("again", builtin.bias_relu)(a, B, BIAS)


def test_a_kernel_that_could_not_be_had_is_tried_again_if_each_shape_has_a_plan_of_its_own(device):
    op, a, b = ops.Op("gemm", builtin.identity), torch.randn(2, M, K).to(BF16), torch.randn(2, N, K).to(BF16).mT
    device.absent, spec = Everything(), op.plan(a, b).spec
    device.failed[spec] = ToolchainError("a full disk")
    with pytest.warns(RuntimeWarning, match="a full disk"):
        op(a, b)
    for _ in range(2):
        op(a, b)
    assert (op.served_by_pytorch, op.served_warm) == (3, 2)
    device.failed.clear()
    device.wanted.pop(spec).again_at = 0.0
    op(a, b)
    assert device.needed.count(spec) == 2
    device.built(spec)
    op(a, b)
    assert [launch.spec for launch in device.launches] == [spec]


def test_a_captured_call_waits_for_its_best_kernel(op, device, specs, captured, monkeypatch, caplog):
    monkeypatch.setattr(supply, "_A_LINE", 0.01)
    wanted = best().spec
    threading.Timer(0.1, lambda: device.built(wanted)).start()
    a = rows(M)
    right(a, op(a, B, BIAS))
    assert [launch.spec for launch in device.launches] == [wanted]
    assert op.served_by_pytorch == 0
    assert f"waits for {wanted.slug} to be compiled" in caplog.text


@pytest.mark.parametrize("what", ["undecided", "batches"])
def test_a_call_that_pytorch_served_is_captured_with_its_kernel(device, monkeypatch, what):
    op, a, b = ops.Op("gemm", builtin.identity), torch.randn(2, M, K).to(BF16), torch.randn(2, N, K).to(BF16).mT
    if what == "undecided":
        monkeypatch.setattr(supply, "_A_LOAD", 0.0)
        a, b, device.decides = a[0], b[0], False
        policies.forget(shipped=True)
    device.absent = Everything()
    for _ in range(2):
        op(a, b)
    assert (op.served_by_pytorch, op.served_warm) == (2, 1)
    wanted = op.plan(a, b).spec
    monkeypatch.setattr(supply, "is_captured", lambda: True)
    threading.Timer(0.1, lambda: device.built(wanted)).start()
    op(a, b)
    assert op.served_by_pytorch == 2
    assert [launch.spec for launch in device.launches] == [wanted]


def test_a_captured_call_takes_pytorch_where_no_kernel_can_be_had(op, device, specs, captured, monkeypatch, caplog):
    device.failed.update(dict.fromkeys(specs, ToolchainError("no nvcc")))
    a = rows(M)
    with pytest.warns(RuntimeWarning, match="no nvcc"):
        right(a, op(a, B, BIAS))
    assert op.served_by_pytorch == 1
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    with pytest.raises(ToolchainError, match="no nvcc"):
        op(rows(M + 1), B, BIAS)


def test_a_captured_call_gives_up_after_some_minutes(op, device, specs, captured, monkeypatch, caplog):
    monkeypatch.setattr(supply, "_LONGEST", 0.02)
    monkeypatch.setattr(supply, "_A_LINE", 0.01)
    a = rows(M)
    right(a, op(a, B, BIAS))
    assert op.served_by_pytorch == 1
    assert "is captured without" in caplog.text


def test_explain_says_who_serves(device, specs):
    found = explaining.explain(co.gemm_bias_relu, rows(M), B, BIAS)
    assert found.served_by == best().spec.slug
    assert "until it is, PyTorch serves" in str(found)
    device.built(best().spec)
    device.kernel(best().spec)
    assert "PyTorch" not in str(explaining.explain(co.gemm_bias_relu, rows(M), B, BIAS))
