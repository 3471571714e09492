"""``co.warm_up`` of a region: it runs once, PyTorch serves its calls, and all its kernels are compiled together."""

import threading

import pytest
import torch
from fake_device import Everything, fake_device

import cutlass_ops as co
from cutlass_ops.base.errors import CompileError, ToolchainError
from cutlass_ops.choose import policies
from cutlass_ops.compilation.background import Wanted
from cutlass_ops.run.gathering import is_gathering

BF16 = torch.bfloat16
M, N, K = 32, 64, 48


@pytest.fixture
def device(monkeypatch):
    """A made-up device for which nothing is compiled before a region's end."""
    with fake_device(monkeypatch) as fake:
        fake.absent = Everything()
        yield fake


@pytest.fixture
def waits(device, monkeypatch):
    """The kernels that had been asked for when each wait began. Then they are there."""
    found, result = [], Wanted.result

    def wait(wanted, timeout=None):
        asked = set(device.needed)
        found.append(asked)
        for spec in asked:
            device.built(spec)
        return result(wanted, 0)

    monkeypatch.setattr(Wanted, "result", wait)
    return found


X, W, BIAS = (torch.randn(M, K) / 8).to(BF16), (torch.randn(N, K) / 8).to(BF16).t(), torch.randn(N).to(BF16)


def region(x, w=W):
    hidden = co.gemm_bias_relu(x, w, BIAS)
    co.gemm(hidden[:8], w.t())
    return co.gemm(hidden, w.t())


def test_a_region_runs_once_and_all_its_kernels_are_asked_for_before_any_wait(device, waits):
    results = []
    count = co.warm_up(lambda x, *, w: results.append(region(x, w)), X, w=W)
    (result,) = results
    assert device.launches == []  # PyTorch computed it
    torch.testing.assert_close(result, torch.relu(X @ W + BIAS) @ W.t(), rtol=0.02, atol=0.02)
    assert len(waits[0]) == count == len(set(device.needed)) > 1
    assert all(asked == waits[0] for asked in waits)
    region(X)
    assert len(device.launches) == 3
    assert co.warm_up(region, X) == 0


@pytest.mark.parametrize("setting", ["CUTLASS_OPS_STAND_IN=0", "deterministic tuning"])
def test_where_calls_wait_a_region_s_do_not_wait_one_by_one(device, waits, monkeypatch, setting):
    if setting == "deterministic tuning":
        monkeypatch.setattr("cutlass_ops.choose.dispatch.Decision.is_deterministic", True)
    else:
        monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    assert co.warm_up(region, X) == len(waits[0]) > 1
    assert device.launches == []
    monkeypatch.setattr(device, "closed", True)
    region(X)  # all are there: else the device would have to compile one
    assert len(device.launches) == 3
    assert not is_gathering()


def test_a_step_of_training_has_its_backward_s_kernels_too(device, waits):
    layer = co.nn.MLP(K, N, dtype=BF16)

    def step(x):
        layer(x).float().square().sum().backward()

    assert co.warm_up(step, X) > 2  # those of the backward too
    assert all(p.grad is not None for p in layer.parameters())
    assert device.launches == []
    device.closed = True
    step(X)
    assert len(device.launches) > 3


def test_calls_of_other_threads_count(device, waits, monkeypatch):
    """As those of a backward do: autograd has a thread for each device."""
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")

    def elsewhere(x):
        thread = threading.Thread(target=region, args=(x,))
        thread.start()
        thread.join()

    assert co.warm_up(elsewhere, X) == len(waits[0]) > 1
    assert device.launches == []


def test_the_decisions_about_a_region_s_weights_are_made_in_it(device, waits):
    device.decides = False  # another thread would, some time
    policies.forget(shipped=True)
    assert co.warm_up(region, X) == len(waits[0]) > 1
    assert device.undecided == []


def test_what_cannot_be_had_is_an_error_each_time(device, waits):
    device.failed[co.gemm_bias_relu.plan(X, W, BIAS).spec] = ToolchainError("no nvcc")
    with pytest.warns(RuntimeWarning, match="no nvcc"), pytest.raises(ToolchainError, match="no nvcc"):
        co.warm_up(region, X)
    with pytest.raises(ToolchainError, match="no nvcc"):
        co.warm_up(region, X)
    assert not is_gathering()


def test_the_error_of_another_kernel_is_not_the_region_s(device, waits):
    device.failed[co.gemm_bias.plan(X, W, BIAS).spec] = CompileError("too complex")
    with pytest.warns(RuntimeWarning, match="too complex"):
        co.gemm_bias(X, W, BIAS)
    assert co.warm_up(region, X) > 1


def test_a_region_s_own_errors_are_raised_and_leave_nothing_behind(device, waits):
    with pytest.raises(ValueError, match=r"\(N, K\)"):
        co.warm_up(region, X, W.t())
    with pytest.raises(ZeroDivisionError):
        co.warm_up(lambda: 1 / 0)
    assert not is_gathering()
    assert waits == []


def test_on_the_cpu_nothing_is_compiled():
    assert co.warm_up(region, X) == 0


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"pass cutlass_ops\.gemm"):
        co.warm_up(7, X)
