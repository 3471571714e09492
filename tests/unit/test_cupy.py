"""Ops for CuPy arrays, with NumPy in CuPy's place: both share memory by DLPack."""

import sys
import types
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import cutlass_ops as co


class Array(np.ndarray):
    """An array that says on which device it is, as CuPy's do."""

    device = types.SimpleNamespace(id=1)


def array(*shape):
    rng = np.random.default_rng(sum(shape))
    return rng.uniform(-1, 1, shape).astype(np.float16).view(Array)


@pytest.fixture
def cc(monkeypatch):
    """cutlass_ops.cupy, on a package that is NumPy; its stream has the address 5."""
    import importlib

    stream = types.SimpleNamespace(ptr=5)
    cuda = types.SimpleNamespace(Device=lambda _: nullcontext(), get_current_stream=lambda: stream)
    fake = types.ModuleType("cupy")
    fake.ndarray, fake.cuda = Array, cuda
    fake.from_dlpack = lambda x: np.from_dlpack(x).view(Array)
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "cutlass_ops.cupy", raising=False)
    module = importlib.import_module("cutlass_ops.cupy")
    streams = []
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda address, device: (address, device))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: (0, device))
    monkeypatch.setattr(torch.cuda, "stream", lambda s: streams.append(s) or nullcontext())
    yield types.SimpleNamespace(ops=module, streams=streams, stream=stream)
    sys.modules.pop("cutlass_ops.cupy", None)
    vars(co).pop("cupy", None)


def test_arrays_in_and_out(cc):
    a, b, bias = array(4, 16), array(16, 8), array(8)
    d = cc.ops.gemm_bias_relu(a, b, bias)
    assert type(d) is Array
    assert d.shape == (4, 8)
    wanted = co.gemm_bias_relu(*map(torch.from_numpy, (a, b, bias)))
    assert np.array_equal(d, wanted.numpy())
    # A transposed view needs no copy either.
    assert np.array_equal(
        cc.ops.gemm(a, array(8, 16).T), co.gemm(torch.from_numpy(a), torch.from_numpy(array(8, 16)).t())
    )


def test_it_runs_on_cupys_stream(cc):
    a = array(4, 16)
    cc.ops.gemm(a, array(16, 8))
    cc.stream.ptr = 0
    cc.ops.gemm(a, array(16, 8))
    device = torch.device("cuda", 1)
    assert cc.streams == [(5, device), (0, device)]


def test_messages_and_names_are_those_of_cupy(cc):
    with pytest.raises(ValueError, match=r"b looks like a weight of shape \(N, K\): pass b\.T$"):
        cc.ops.gemm(array(4, 16), array(8, 16))
    with pytest.raises(AttributeError, match=r"no attribute 'gemm_bais': did you mean gemm_bias"):
        cc.ops.gemm_bais  # noqa: B018


def test_memory_is_shared_and_what_is_given_comes_back(cc):
    a, b, out = array(4, 16), array(16, 8), np.zeros((4, 8), np.float16).view(Array)
    assert cc.ops.gemm(a, b, out=out) is out
    assert np.array_equal(out, cc.ops.gemm(a, b))

    @co.epilogue
    def with_top(acc, scale: co.Scalar):
        return {"d": acc * scale, "top": co.e.max(acc, dim=1)}

    top = np.zeros(4, np.float32).view(Array)
    found = cc.ops.gemm(a, b, epilogue=with_top, scale=2.0, out={"top": top})
    assert found.top is top
    assert np.allclose(found.d, 2 * out, atol=1e-2)
    assert np.allclose(top, (a.astype(np.float32) @ b.astype(np.float32)).max(1), atol=1e-2)


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "cutlass_ops.cupy", raising=False)
    with pytest.raises(ImportError, match="pip install cupy-cuda13x"):
        co.cupy  # noqa: B018
    assert {"cupy", "jax"}.isdisjoint(co.__all__)


def test_it_has_the_ops_it_says(cc):
    functions = {
        name: f for name, f in vars(cc.ops).items() if getattr(f, "__name__", "") == name and name in co.__all__
    }
    assert sorted(functions) == cc.ops.__all__
    for name, function in functions.items():
        assert function.__doc__.startswith(getattr(co, name).__doc__.splitlines()[0])
