"""With an empty store: a call runs on a stand-in, and on its best kernel once that is compiled."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.choose import policies
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.config import GemvConfig
from cutlass_ops.run import ops
from cutlass_ops.run.registry import Registry
from tests.gpu import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.background]

M, N, K = 512, 1024, 512


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """Have nothing compiled, nothing loaded, and calls take stand-ins."""
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")
    with Session().active():
        yield
        Background.current().close()


@pytest.fixture
def operands():
    return tensors.matrix(M, K, "bf16"), tensors.matrix(N, K, "bf16").t(), tensors.vector(N, "bf16")


def near(d, a, b, bias):
    wanted = torch.relu(a.double() @ b.double() + bias.double())
    theirs = torch.relu(torch.addmm(bias, a, b)).double()
    return float((d.double() - wanted).norm()) <= 2 * float((theirs - wanted).norm())


@pytest.mark.usefixtures("cold")
def test_a_cold_call_is_right_on_the_kernel_that_compiles_fastest_and_then_on_the_best(operands):
    op = ops.Op("relu", co.gemm_bias_relu.epilogue)
    best = op.plan(*operands).spec
    out = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert near(op(*operands, out=out), *operands)
    loaded = [entry.spec for entry in Registry.current().entries()]
    assert [type(spec.config) for spec in loaded] == [GemvConfig]
    assert best not in loaded
    arrived = threading.Event()
    Background.current().when_built(best, lambda _: arrived.set())  # after what the call itself asked for
    assert arrived.wait(300)
    out.fill_(float("nan"))
    assert near(op(*operands, out=out), *operands)
    assert best in [entry.spec for entry in Registry.current().entries()]
    served = op.served_warm
    assert near(op(*operands, out=out), *operands)
    assert op.served_warm == served + 1


def test_a_weight_s_first_call_may_be_captured_while_a_thread_finds_its_other_steps(operands, monkeypatch):
    def decided():
        found = [op.plan(operands[0][:rows], *operands[1:]) for rows in (1, 77, 300, M)]
        return [(each.config, each.order) for each in found], found[-1].is_finished

    # No other kernel is compiled.
    monkeypatch.setattr(Background, "add", lambda *_, **__: None)
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    op, out = ops.Op("relu", co.gemm_bias_relu.epilogue), torch.full((M, N), float("nan"), device="cuda").bfloat16()
    Registry.current().ready([op.plan(*operands).spec], operands[0].device)
    policies.forget(shipped=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(*operands, out=out)
        before, finished = decided()
        assert not finished
        Background.current().wait()
        assert decided() == (before, True)
    graph.replay()
    assert near(out, *operands)


def some_of(configs):
    """Return a configuration for each orientation, schedule and depth of a tile."""
    found = {(c.swap_ab, c.schedule, c.threadblock.k): c for c in configs if c.wgmma and c.whole_k}
    return list(found.values())


@pytest.mark.parametrize("dtype", ["bf16", "f16", "e4m3"])
def test_kernels_that_may_serve_until_another_is_loaded_give_its_bits(dtype):
    if dtype == "e4m3":
        a, b = ((torch.randn(rows, K, device="cuda") * 8).to(torch.float8_e4m3fn) for rows in (M, N))
        bias = tensors.vector(N, "bf16")
    else:
        a, b, bias = tensors.matrix(M, K, dtype), tensors.matrix(N, K, dtype), tensors.vector(N, dtype)
    op, given = ops.Op("relu", co.gemm_bias_relu.epilogue), (a, b.t(), bias)
    decision = op.plan(*given)
    configs = some_of(policies.policy(decision.signature, decision.device).kernels)
    assert len(configs) > 3
    kernels = Registry.current().kernels([decision.device.spec(decision.signature, c) for c in configs])
    found = []
    for config, kernel in zip(configs, kernels, strict=True):
        d = torch.full((M, N), float("nan"), device="cuda", dtype=bias.dtype)
        raster, swizzle = config.usual_order(decision.problem).numbers
        workspace = torch.empty(kernel.workspace_size(M, N, K, 1, raster, swizzle), device="cuda", dtype=torch.uint8)
        assert kernel.launch(a, b.t(), d, bias, raster, swizzle, workspace) == 0
        found.append(d)
    assert near(found[0], a.to(bias.dtype), b.t().to(bias.dtype), bias)
    for config, d in zip(configs, found, strict=True):
        assert torch.equal(d, found[0]), config.slug


# A process counts the modules that the driver loads, by CUPTI's callbacks: PyTorch for GPUs has that library loaded.
COUNTED = """
import ctypes, threading
import torch
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.run.registry import Registry
from tests.gpu.test_supply import LOADED, N, K, M, launched

modules = 0
@ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
def noticed(user, domain, which, data):
    global modules
    modules += 1

a = torch.randn(M, K, device="cuda").bfloat16()
paths = {line.split()[-1] for line in open("/proc/self/maps") if "libcupti.so" in line}
cupti, subscriber = ctypes.CDLL(paths.pop()), ctypes.c_void_p()
assert cupti.cuptiSubscribe(ctypes.byref(subscriber), noticed, None) == 0
RESOURCE, MODULE_LOADED = 3, 6
assert cupti.cuptiEnableCallback(1, subscriber, RESOURCE, MODULE_LOADED) == 0

def count(do):
    before = modules
    result = do()
    torch.cuda.synchronize()
    return modules - before, result

b, bias = torch.randn(N, K, device="cuda").bfloat16().t(), torch.randn(N, device="cuda").bfloat16()
wanted = torch.relu(torch.addmm(bias, a, b))
d = torch.empty_like(wanted)
registry, (ahead, at_launch, captured) = Registry.current(), LOADED
artifacts = {spec: build_artifact(spec) for spec in LOADED}
launched(registry.kernel(at_launch), a, b, d.zero_(), bias)  # whatever any first launch loads, and PyTorch's zeros

loads, _ = count(lambda: registry.take(ahead, artifacts[ahead], a.device))
assert loads > 0, "CUPTI does not say what is loaded"
loads, _ = count(lambda: launched(registry.kernel(ahead), a, b, d.zero_(), bias))
assert loads == 0, f"the first launch loads {loads} modules"
torch.testing.assert_close(d, wanted)

# While this thread captures a graph, which that thread has no part in.
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    launched(registry.kernel(ahead), a, b, d, bias)
    failed = []
    def take():
        try:
            registry.take(captured, artifacts[captured], a.device)
        except Exception as exc:
            failed.append(exc)
    thread = threading.Thread(target=take)
    thread.start(), thread.join()
assert not failed, failed
d.zero_()
graph.replay()
torch.cuda.synchronize()
torch.testing.assert_close(d, wanted)
loads, _ = count(lambda: launched(registry.kernel(captured), a, b, d.zero_(), bias))
assert loads == 0, f"the first launch loads {loads} modules"
torch.testing.assert_close(d, wanted)
print("counted")
"""

LOADED = [
    co.KernelSpec(
        a="bf16.row",
        b="bf16.col",
        d="bf16.row",
        inputs={"bias": "bf16"},
        epilogue=co.gemm_bias_relu.epilogue.graph,
        config=config,
        target="sm_90",
    )
    for config in (GemvConfig(rows=16), GemvConfig(rows=8), GemvConfig(rows=16, warps=4))
]


def launched(kernel, a, b, d, bias):
    assert kernel.launch(a, b, d, bias, 0, 0, None) == 0


def test_the_first_launch_of_a_kernel_that_came_in_the_background_loads_nothing():
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n{COUNTED}"
    environment = os.environ | {"CUDA_MODULE_LOADING": "LAZY"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "counted\n"), done.stderr


@pytest.mark.usefixtures("cold")
def test_a_captured_call_raises_where_nothing_is_loaded_and_takes_a_stand_in_where_something_is(operands):
    op, graph = ops.Op("relu", co.gemm_bias_relu.epilogue), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(MissingKernelError, match="warm_up before"):
            op(*operands)
        operands[0].clone()  # PyTorch warns of a graph with nothing in it
    torch.cuda.synchronize()
    few = operands[0][:1]
    op(few, *operands[1:])  # some kernel of the signature
    torch.cuda.synchronize()
    graph, out = torch.cuda.CUDAGraph(), torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph):
        op(*operands, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert near(out, *operands)
