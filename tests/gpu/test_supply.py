"""With an empty store: PyTorch serves a call, and its best kernel does once that is compiled."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.run import ops
from cutlass_ops.run.registry import Registry
from tests.gpu import tensors

pytestmark = [pytest.mark.gpu, pytest.mark.background]

M, N, K = 512, 1024, 512


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """Have nothing compiled, nothing loaded, and no guesses compiled beside what calls need."""
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")
    monkeypatch.setattr(Background, "guess", lambda *_: None)
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
def test_a_cold_call_is_right_by_pytorch_and_then_by_the_best_kernel(operands):
    op = ops.Op("relu", co.gemm_bias_relu.epilogue)
    out = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert near(op(*operands, out=out), *operands)
    assert near(op(*operands), *operands)
    assert Registry.current().entries() == ()
    assert op.served_by_pytorch == 2
    assert Background.current().wait(300, needed=True)
    out.fill_(float("nan"))
    assert near(op(*operands, out=out), *operands)
    assert [entry.spec for entry in Registry.current().entries()] == [op.plan(*operands).spec]
    assert near(op(*operands), *operands)
    assert op.served_by_pytorch == 2


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
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_captured_call_waits_for_its_kernel_and_the_graph_keeps_it(operands, mode):
    op, graph = ops.Op("relu", co.gemm_bias_relu.epilogue), torch.cuda.CUDAGraph()
    op(*operands)
    torch.cuda.synchronize()
    out = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    with torch.cuda.graph(graph, capture_error_mode=mode):
        op(*operands, out=out)
    assert [entry.spec for entry in Registry.current().entries()] == [op.plan(*operands).spec]
    graph.replay()
    torch.cuda.synchronize()
    assert near(out, *operands)
    assert op.served_by_pytorch == 1


@pytest.mark.usefixtures("cold")
def test_the_first_call_of_all_may_be_captured(operands):
    op, graph = ops.Op("relu", co.gemm_bias_relu.epilogue), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(*operands)
    graph.replay()
    torch.cuda.synchronize()
    assert near(out, *operands)
    assert op.served_by_pytorch == 0


@pytest.mark.usefixtures("cold")
def test_the_kernel_of_what_torch_compile_traces_is_there_before_the_first_call(operands):
    def backend(module, _):
        assert Background.current().wait(300, needed=True)
        return module.forward

    before = co.gemm_bias_relu.served_by_pytorch
    d = torch.compile(lambda a, b, bias: co.gemm_bias_relu(a, b, bias), backend=backend)(*operands)
    assert near(d, *operands)
    assert [entry.spec for entry in Registry.current().entries()] == [co.gemm_bias_relu.plan(*operands).spec]
    assert co.gemm_bias_relu.served_by_pytorch == before


@pytest.mark.usefixtures("cold")
def test_a_region_that_is_warmed_up_needs_no_further_kernel(operands, monkeypatch):
    layer = co.nn.MLP(K, N, dtype=torch.bfloat16, device="cuda")

    def step():
        layer(operands[0]).float().square().mean().backward()

    count = co.warm_up(step)
    assert len(Registry.current().entries()) == count > 2
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    step()
    assert len(Registry.current().entries()) == count


@pytest.mark.usefixtures("cold")
def test_without_a_compiler_pytorch_serves_and_is_captured_with_one_warning(operands, monkeypatch):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    op, graph = ops.Op("relu", co.gemm_bias_relu.epilogue), torch.cuda.CUDAGraph()
    with pytest.warns(RuntimeWarning, match="CUTLASS_OPS_STAND_IN=0") as caught:
        out = _served_and_captured(op, operands, graph)
    assert len(caught) == 1
    graph.replay()
    torch.cuda.synchronize()
    assert near(out, *operands)


def _served_and_captured(op, operands, graph):
    for _ in range(50):
        assert near(op(*operands), *operands)
        time.sleep(0.1)
    with torch.cuda.graph(graph):
        return op(*operands)
