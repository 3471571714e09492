"""A service as the library sees it: weights that stay, batches that do not. The device and its kernels are made up."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
from cutlass_ops.run import call, plan, serving
from cutlass_ops.run.registry import Registry

N, K = 520, 264


class Kernels:
    """Kernels that compute in PyTorch and count their launches; compiling is switched off once it is closed."""

    def __init__(self):
        self.loaded, self.launches, self.closed = {}, 0, False

    def kernel(self, spec):
        return self.kernels([spec])[0]

    def has(self, spec):
        return spec in self.loaded

    def those(self, specs):
        return self.loaded.keys() & specs

    def at_hand(self, spec, quickly=False):
        return self.kernel(spec)

    def ready(self, specs, device):
        return len(self.kernels(specs))

    def take(self, spec, artifact, device):
        pytest.fail("nothing is built here")

    def kernels(self, specs):
        for spec in specs:
            if spec not in self.loaded:
                assert not self.closed, f"{spec.slug} would have to be compiled"
                self.loaded[spec] = SimpleNamespace(launch=self.launch, workspace_size=lambda *_: 0)
        return [self.loaded[spec] for spec in specs]

    def launch(self, a, b, d, bias, raster, swizzle, workspace):
        self.launches += 1
        d.copy_(torch.relu(a.float() @ b.float() + bias.float()).to(d.dtype))
        return 0


@pytest.fixture
def service(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path))
    registry, queued = Kernels(), []
    monkeypatch.setattr(call.Call, "is_reference", False)
    monkeypatch.setattr(serving, "device_of", lambda device: H100)
    monkeypatch.setattr(plan.torch.cuda, "device", lambda device: contextlib.nullcontext())
    background = SimpleNamespace(
        add=lambda specs, first=False, then=None: queued.extend(specs),
        later=lambda do: None,
        pending=lambda spec: False,
        failure=lambda spec: None,
    )
    with Session({Registry: registry, Background: background}).active():
        yield SimpleNamespace(registry=registry, queued=queued, op=co.gemm_bias_relu)


@pytest.fixture
def weight():
    return torch.randn(N, K).bfloat16().t() / 16, torch.randn(N).bfloat16()


def rows(m):
    return torch.ones(m, K, dtype=torch.bfloat16)


def test_the_first_call_compiles_its_kernel_and_queues_the_others(service, weight):
    b, bias = weight
    d = service.op(rows(48), b, bias)
    torch.testing.assert_close(d, torch.relu(rows(48).float() @ b.float() + bias.float()).bfloat16())
    (loaded,) = service.registry.loaded
    assert loaded not in service.queued
    assert len(service.queued) > 5
    # Warm: no further kernel, no further look.
    queued = len(service.queued)
    assert torch.equal(service.op(rows(48), b, bias), d)
    assert (len(service.registry.loaded), len(service.queued), service.registry.launches) == (1, queued, 2)


# The kernels are the same however they came, and each number of rows takes milliseconds.
@pytest.mark.parametrize(
    ("how", "step"),
    [("warm_up", 10), ("gemm", 10), ("background", 10), pytest.param("warm_up", 1, marks=pytest.mark.slow)],
)
def test_after_warming_up_no_number_of_rows_compiles_anything(service, weight, how, step):
    b, bias = weight
    if how == "warm_up":
        assert service.op.warm_up(rows(1), b, bias) == len(service.registry.loaded)
    elif how == "gemm":
        count = co.warm_up(co.gemm, rows(1), b, epilogue=service.op.epilogue, bias=bias)
        assert count == len(service.registry.loaded)
    else:
        service.op(rows(1), b, bias)
        service.registry.kernels(service.queued)
    service.registry.closed = True
    # What a call does before it launches: a launch computes, which takes long here.
    for m in [*range(1, 300, step), *range(300, 8193, 37 * step), 8192]:
        values = {"bias": bias}
        service.op._plan(call.check_call(service.op.graph, rows(m), b, values, None, None))
    assert 1 < len(service.registry.loaded) <= 32


def test_nothing_is_queued_where_compilation_is_switched_off(service, weight, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    service.op(rows(48), *weight)
    assert service.queued == []
