"""While a program is compiled or exported, the kernels of its calls are asked for. Tensors are fake, on a GPU."""

import pytest
import torch
from fake_device import Everything, fake_device
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.run import cold

BF16 = torch.bfloat16
M, N, K = 32, 128, 64


@pytest.fixture
def device(monkeypatch):
    torch._dynamo.reset()
    with fake_device(monkeypatch) as fake:
        fake.absent = Everything()
        yield fake
    torch._dynamo.reset()


@pytest.fixture
def mode():
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


class Layer(torch.nn.Module):
    def forward(self, x, weight, bias):
        return co.gemm_bias_relu(x, weight.t(), bias)


def arguments(rows=M, where="cuda"):
    return tuple(torch.empty(shape, dtype=BF16, device=where) for shape in ((rows, K), (N, K), (N,)))


def best(rows=M):
    x, weight, bias = arguments(rows, "cpu")
    return co.gemm_bias_relu.plan(x, weight.t(), bias).spec


def compiled(arguments, **options):
    """Compile a layer for arguments; return the guards of its symbols as texts."""
    guards = []

    def backend(module, inputs):
        guards.extend(str(guard.expr) for guard in torch._guards.TracingContext.get().fake_mode.shape_env.guards)
        return module.forward

    torch.compile(Layer(), backend=backend, **options)(*arguments)
    return guards


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile_asks_for_the_kernel_of_the_traced_shape(device, mode, dynamic):
    with mode:
        compiled(arguments(), dynamic=dynamic)
    assert set(device.needed) == {best()}
    assert best(4096) in device.guessed
    assert device.launches == []


def test_torch_export_asks_for_the_kernel_of_the_example(device, mode):
    rows = {0: torch.export.Dim.DYNAMIC}
    with mode:
        torch.export.export(Layer(), arguments(), dynamic_shapes=(rows, None, None))
    assert set(device.needed) == {best()}


def test_no_guard_follows_from_it(device, mode, monkeypatch):
    with mode:
        found = compiled(arguments(), dynamic=True)
    assert device.needed
    torch._dynamo.reset()
    monkeypatch.setattr(cold, "announce", lambda *_: None)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        assert found == compiled(arguments(), dynamic=True)


@pytest.mark.parametrize(("rows", "where"), [(0, "cuda"), (M, "cpu")])
def test_nothing_is_asked_for_where_no_kernel_will_run(device, mode, rows, where):
    with mode:
        co.gemm_bias_relu(*(x.t() if at == 1 else x for at, x in enumerate(arguments(rows, where))))
    assert (device.needed, device.guessed) == ([], [])


def test_an_error_is_the_call_s_and_not_the_compiler_s(device, mode, monkeypatch):
    monkeypatch.setattr(dispatch, "decide", lambda *_: 1 / 0)
    with mode:
        compiled(arguments())
    assert device.needed == []
