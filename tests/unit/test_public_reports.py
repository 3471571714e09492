"""What users of other libraries reported in public about exports and containers, tried here on the CPU.

Each docstring names the reports. tests/gpu/reports has those that need a GPU.
"""

import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec
from processes import run_with_pytorch
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode

import cutlass_ops as co
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env
from cutlass_ops.base.errors import StoreError, ToolchainError
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.builder import build_artifact

BF16 = torch.bfloat16


def near(found, exact, most=0.01):
    error = (found.double() - exact.double()).norm() / exact.double().norm()
    return error.item() < most


def draw(*shape):
    return torch.randn(shape).to(BF16)


class Net(torch.nn.Module):
    """An MLP with a residual, a gate and a layer with an activation."""

    def __init__(self, **options):
        super().__init__()
        self.mlp = co.nn.MLP(64, 128, dtype=BF16, **options)
        self.gate = co.nn.GatedMLP(64, 128, dtype=BF16, **options)
        self.last = co.nn.Linear(64, 32, activation="relu", dtype=BF16, **options)

    def forward(self, x):
        return self.last(self.gate(self.mlp(x, residual=x)))

    def exact(self, x):
        """What it computes, in FP64 by PyTorch alone."""
        p = {name: value.double() for name, value in self.named_parameters()}
        x = x.double()

        def linear(name, x):
            return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))

        y = linear("mlp.fc2", F.gelu(linear("mlp.fc1", x))) + x
        y = linear("gate.down_proj", F.silu(linear("gate.gate_proj", y)) * linear("gate.up_proj", y))
        return F.relu(linear("last", y))


@pytest.fixture(autouse=True)
def _fresh():
    torch.manual_seed(0)
    torch._dynamo.reset()


@pytest.fixture
def net():
    return Net()


# ---- Exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_program_with_dynamic_rows_is_saved_and_loaded(net, tmp_path):
    """pytorch#136897, pytorch#133653: dynamic sizes are lost when a program is saved, or become constants."""
    rows = torch.export.Dim("rows", min=1, max=4096)
    program = torch.export.export(net, (draw(8, 64),), dynamic_shapes=({0: rows},))
    assert [str(each) for each in program.range_constraints.values()] == ["VR[1, 4096]"]
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    for count in (1, 5, 300):
        x = draw(count, 64)
        assert near(loaded(x), net.exact(x)), count


@pytest.mark.filterwarnings("ignore")
def test_a_program_is_unflattened_and_decomposed(net):
    """pytorch#160937: the modules that a program is unflattened into do not run."""
    x = draw(8, 64)
    program = torch.export.export(net, (x,))
    modules = torch.export.unflatten(program)
    assert sorted(modules.state_dict()) == sorted(net.state_dict())
    for again in (modules, program.run_decompositions().module()):
        assert torch.equal(again(x), net(x))


LOAD_PACKAGE = """
import sys, torch
import cutlass_ops
x, wanted = torch.load(sys.argv[1] + "/wanted.pt")
assert torch.equal(torch._inductor.aoti_load_package(sys.argv[1] + "/net.pt2")(x), wanted)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_package_needs_only_the_import(tmp_path):
    """pytorch#145394, pytorch#134581: elsewhere, a package of AOTInductor does not find its custom operator."""
    layer = co.nn.Linear(64, 32, activation="gelu", dtype=BF16).requires_grad_(False)
    x = draw(8, 64)
    program = torch.export.export(layer, (x,))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "net.pt2"))
    torch.save((x, layer(x)), tmp_path / "wanted.pt")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOAD_PACKAGE, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_other_numbers_of_rows_are_one_more_program(net):
    """pytorch#121080: torch.compile makes a program for each size that a custom operator gets."""
    counter = CompileCounter()
    compiled = torch.compile(net, backend=counter, fullgraph=True)
    with torch.no_grad():
        for rows in (8, 16, 24, 40, 72, 136):
            x = draw(rows, 64)
            assert near(compiled(x), net.exact(x)), rows
    assert counter.frame_count == 2


def test_a_compiled_net_is_one_graph_and_has_the_gradients(net):
    """TE#705, pytorch#107824: layers break graphs, or fail to compile where gradients are recorded."""
    x = draw(8, 64).requires_grad_()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(x).float().square().sum(), [x, *net.parameters()])
    exact = torch.autograd.grad(net.exact(x).square().sum(), [x, *net.parameters()])
    assert all(map(near, found, exact, [0.02] * len(exact)))


def test_autocast_goes_through_the_compiler():
    """pytorch#114693: a function with a backward of its own computes otherwise in autocast, once it is compiled."""
    layer, x = co.nn.Linear(64, 32), torch.randn(8, 64)
    weight = layer.weight.detach().double()
    exact = x.double() @ weight.t() + layer.bias.detach().double()
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=BF16):
            y = run(x)
        y.float().square().sum().backward()
        assert y.dtype == BF16
        assert layer.weight.grad.dtype == torch.float32
        assert near(y, exact)
        assert near(layer.weight.grad, 2 * exact.t() @ x.double())


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_a_view_of_a_cache_is_written_by_a_compiled_call(backend):
    """pytorch#153389, pytorch#131192: compiled, an operator that writes an argument misses views of an input."""
    x, w = draw(8, 64), draw(32, 64)
    caches = [torch.zeros(3, 8, 32, dtype=BF16) for _ in range(2)]

    def step(x, cache):
        co.gemm(x, w.t(), out=cache[1])
        co.gemm(-x, w.t(), out=cache[2])
        return cache[1] * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    found = [step(x, caches[0]), compiled(x, caches[1])]
    product = x.double() @ w.double().t()
    for result, cache in zip(found, caches, strict=True):
        assert near(result, 2 * product)
        assert near(cache, torch.stack((0 * product, product, -product)))


@pytest.mark.parametrize("m", [1, 8])
@pytest.mark.parametrize("n", [30, 32])
def test_made_up_tensors_have_the_strides_of_real_ones(m, n):
    """pytorch#182328, cuEquivariance#223, vllm#6917: the compiler is told other strides than an operator returns."""
    mode = FakeTensorMode()
    calls = {
        "rows": (draw(m, 64), draw(n, 64).t()),
        "columns": (draw(64, m).t(), draw(64, n)),
        "batches": (draw(3, m, 64).transpose(0, 1).contiguous().transpose(0, 1), draw(3, n, 64).mT),
        "slice": (draw(m, 72)[:, :64], draw(64, n)),
    }
    for name, (a, b) in calls.items():
        real = co.gemm(a, b)
        with mode:
            fake = co.gemm(mode.from_tensor(a), mode.from_tensor(b))
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype), name
        assert near(real, a.double() @ b.double()), name


@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_trace_is_saved_with_operators_and_modules(net):
    """pytorch#13564, pytorch#75935: custom operators cannot be traced, or a trace of them cannot be saved."""
    w, bias, x = draw(32, 64), draw(32), draw(8, 64)
    for run, exact in (
        (lambda x: co.gemm_bias_gelu(x, w.t(), bias), lambda x: F.gelu(x.double() @ w.double().t() + bias.double())),
        (net, net.exact),
    ):
        saved = io.BytesIO()
        torch.jit.save(torch.jit.trace(run, (x,)), saved)
        saved.seek(0)
        loaded = torch.jit.load(saved)
        for rows in (3, 8):
            y = draw(rows, 64).requires_grad_()
            assert near(loaded(y), exact(y))
            found, wanted = (torch.autograd.grad(f(y).float().sum(), y)[0] for f in (loaded, exact))
            assert near(found, wanted, 0.02)


def test_vmap_is_refused_in_words_and_modules_go_on(net):
    """xformers#768: under vmap, an error only says that there is no batching rule."""
    w = draw(32, 64)
    x = draw(3, 8, 64)
    with pytest.raises(NotImplementedError, match=r"Instead of vmap, use leading dimensions of a"):
        torch.vmap(lambda x: co.gemm(x, w.t()))(x)
    assert near(co.gemm(x, w.t()), x.double() @ w.double().t())
    assert near(torch.vmap(net)(x), net.exact(x))
    # An ensemble.
    nets = [net, Net(), Net()]
    state = torch.func.stack_module_state(nets)
    found = torch.vmap(lambda *state: torch.func.functional_call(net, state, (x[0],)))(*state)
    assert all(near(y, each.exact(x[0])) for y, each in zip(found, nets, strict=True))


def test_a_symbolic_trace_holds_ops_and_layers():
    """pytorch#84515: torch.fx cannot trace through a function with a backward of its own."""

    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = co.nn.Linear(64, 32, dtype=BF16)
            self.weight = torch.nn.Parameter(draw(16, 32))

        def forward(self, x):
            return co.gemm(self.layer(x), self.weight.t())

    layers, x = Layers(), draw(8, 64)
    traced = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(layers)))
    weight, bias = layers.layer.weight.double(), layers.layer.bias.double()
    assert near(traced(x), (x.double() @ weight.t() + bias) @ layers.weight.double().t())


def test_a_symbolic_trace_of_one_layer_without_a_residual():
    """pytorch#84515: torch.fx cannot trace a layer that is the root itself."""
    layer, x = co.nn.Linear(64, 32, dtype=BF16), draw(8, 64)
    traced = torch.fx.symbolic_trace(layer, concrete_args={"residual": None})
    assert torch.equal(traced(x), layer(x))


@pytest.mark.parametrize("name", ["mlp", "gate"])
def test_a_symbolic_trace_keeps_the_parameters(net, name):
    """pytorch#99407, torchdynamo#203: parameters are constants of a trace, and are missing in its state_dict."""
    model, other = (torch.nn.Sequential(getattr(each, name)) for each in (net, Net()))
    traced, x = torch.fx.symbolic_trace(model), draw(8, 64)
    assert torch.equal(traced(x), model(x))
    assert sorted(traced.state_dict()) == sorted(model.state_dict())
    traced.load_state_dict(other.state_dict())
    assert torch.equal(traced(x), other(x))


def test_a_symbolic_trace_is_copied(net):
    """pytorch#48448: a deepcopy is refused, because a module holds what was computed from its parameters."""
    traced, x = torch.fx.symbolic_trace(torch.nn.Sequential(net.mlp)), draw(8, 64)
    assert torch.equal(copy.deepcopy(traced)(x), net.mlp(x))


def onnx_error(module, x):
    with pytest.raises(Exception, match="ONNX") as raised:
        torch.onnx.export(module, (x,), io.BytesIO(), dynamo=False)
    return str(raised.value)


class Op(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(draw(32, 64))

    def forward(self, x):
        return co.gemm(x, self.weight.t())


@pytest.mark.filterwarnings("ignore")  # it is deprecated
def test_the_older_onnx_exporter_names_the_operator_that_it_refuses():
    """Model-Optimizer#15: the export to ONNX fails at some other operator, far from what has no ONNX form."""
    assert "cutlass_ops::fused_gemm" in onnx_error(Op(), draw(8, 64))


@pytest.mark.filterwarnings("ignore")
def test_the_onnx_exporter_names_the_operator_of_a_module(net):
    """TE#2588, Model-Optimizer#15: which part of a layer cannot be exported to ONNX is not said."""
    pytest.importorskip("onnxscript")
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"No ONNX function found for .*cutlass_ops\.fused"):
        torch.onnx.export(net, (draw(8, 64),), dynamo=True, verbose=False)


def test_copies_of_scaled_operands_and_patched_models_compute_the_same():
    """optimum-quanto#358: a quantised model cannot be copied by deepcopy."""
    a, b = (co.Scaled.quantize(draw(n, 64), block=None) for n in (8, 32))
    wanted = co.gemm(a, b.t())
    exact = (a.values.double() * a.scale.double()[:, None]) @ (b.values.double() * b.scale.double()[:, None]).t()
    assert near(wanted, exact)
    assert torch.equal(co.gemm(copy.deepcopy(a), copy.deepcopy(b).t()), wanted)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=BF16), torch.nn.ReLU())
    x, state = draw(8, 64), list(model.state_dict())
    again = copy.deepcopy(co.patch(model, verbose=False))
    assert "fused" in repr(again)
    assert list(again.state_dict()) == state
    assert torch.equal(again(x), model(x))
    weight, bias = (each.double() for each in again.parameters())
    assert near(again(x), torch.relu(x.double() @ weight.t() + bias))


def test_scaled_operands_are_saved_and_loaded_without_trust():
    """pytorch#114634, float8_experimental#288, optimum-quanto#93: torch.load refuses operands in FP8."""
    a, b = (co.Scaled.quantize(draw(n, 64), block=None) for n in (8, 32))
    saved = io.BytesIO()
    torch.save({"a": a, "b": b}, saved)
    saved.seek(0)
    found = torch.load(saved, weights_only=True)
    assert torch.equal(co.gemm(found["a"], found["b"].t()), co.gemm(a, b.t()))


def test_safetensors_takes_operands_in_fp8(net):
    """safetensors#515: quantised weights cannot be written by safetensors."""
    safetensors = pytest.importorskip("safetensors.torch")
    w = co.Scaled.quantize(draw(32, 64), block=None)
    found = safetensors.load(safetensors.save({**net.state_dict(), "w": w.values, "scale": w.scale}))
    again, a = co.Scaled(found.pop("w"), found.pop("scale")), co.Scaled.quantize(draw(8, 64), block=None)
    assert torch.equal(co.gemm(a, again.t()), co.gemm(a, w.t()))
    other, x = Net(), draw(8, 64)
    other.load_state_dict(found)
    assert torch.equal(other(x), net(x))


def test_tied_weights_go_through_a_file(tmp_path):
    """AutoFP8#28: shared weights cannot be written by safetensors."""
    safetensors = pytest.importorskip("safetensors.torch")

    def tied():
        layers = torch.nn.Sequential(*(co.nn.Linear(64, 64, bias=False, dtype=BF16) for _ in range(2)))
        layers[1].weight = layers[0].weight
        return layers

    first, second, x = tied(), tied(), draw(8, 64)
    safetensors.save_model(first, str(tmp_path / "tied.safetensors"))
    safetensors.load_model(second, str(tmp_path / "tied.safetensors"))
    assert second[0].weight is second[1].weight
    weight = second[0].weight.double()
    assert near(second(x), x.double() @ weight.t() @ weight.t())
    assert torch.equal(second(x), first(x))


def test_checkpoints_of_fused_and_plain_layers_are_the_same(net):
    """torchtitan#3569: a fused gate has other names in a checkpoint than the plain layers."""

    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, sizes in {"gate_proj": (64, 128), "up_proj": (64, 128), "down_proj": (128, 64)}.items():
                self.add_module(name, torch.nn.Linear(*sizes, bias=False, dtype=BF16))

        def forward(self, x):
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    plain, x = Plain(), draw(8, 64)
    net.gate.load_state_dict(plain.state_dict())
    assert near(net.gate(x), plain.double()(x.double()))
    assert list(Plain().load_state_dict(net.gate.state_dict())) == [[], []]


def test_a_net_without_memory_gets_its_weights_later(net):
    """TE#596: layers cannot be made on the meta device and filled later."""
    with torch.device("meta"):
        later = Net()
    assert later(torch.empty(8, 64, dtype=BF16, device="meta")).shape == (8, 32)
    later.to_empty(device="cpu").load_state_dict(net.state_dict())
    x = draw(8, 64)
    assert near(later(x), net.exact(x))
    assert torch.equal(later(x), net(x))


@pytest.mark.parametrize("pickler", [pickle.dumps, ForkingPickler.dumps], ids=["pickle", "between processes"])
def test_what_a_spawned_process_gets_computes_the_same(net, pickler):
    """HALOs#18, pytorch#57352, sentence-transformers#1342: layers do not go through pickle to spawned processes."""
    x = draw(8, 64)
    net(x)  # whatever calls leave in a module
    model = co.patch(torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=BF16)), verbose=False)
    for module in (net, model, torch.nn.Sequential(Op(), torch.nn.ReLU())):
        assert torch.equal(pickle.loads(pickler(module))(x), module(x))
    assert pickle.loads(pickler(co.gemm_bias_gelu)) is co.gemm_bias_gelu


def test_scaled_operands_go_to_other_processes():
    """sentence-transformers#1342: quantised tensors do not go through the queues of torch.multiprocessing."""
    a, b = (co.Scaled.quantize(draw(n, 64), block=None) for n in (8, 32))
    found = pickle.loads(ForkingPickler.dumps((a, b)))
    assert torch.equal(co.gemm(found[0], found[1].t()), co.gemm(a, b.t()))


SPAWN = """
import sys
import torch
import torch.multiprocessing
import cutlass_ops as co

def work(rank, net, x, wanted):
    assert torch.equal(net(x), wanted), rank

if __name__ == "__main__":
    net, x = co.nn.MLP(64, 128, dtype=torch.bfloat16).requires_grad_(False), torch.randn(8, 64).bfloat16()
    wanted = net(x)
    torch.multiprocessing.start_processes(work, (net, x, wanted), nprocs=1, start_method=sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_net_in_a_process_that_is_started_anew(method, tmp_path):
    """pytorch#51836, pytorch#43513: with spawn or forkserver, what a worker gets cannot be pickled."""
    (tmp_path / "program.py").write_text(SPAWN)
    around = {**os.environ, "PYTHONPATH": str(Path(co.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", method], env=around, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ---- Containers ------------------------------------------------------------------------------------------------------

CALL = """
import sys, warnings
import torch
import cutlass_ops as co
torch.set_num_threads(1)
x, w, bias = (torch.randn(shape).bfloat16() for shape in ((8, 64), (32, 64), (32,)))
exact = torch.relu(x.double() @ w.double().t() + bias.double())
def check():
    error = (co.gemm_bias_relu(x, w.t(), bias).double() - exact).norm() / exact.norm()
    assert error < 0.01, error
check()
"""

# As in an image that has no user of this number.
WITHOUT_A_NAME = """
import getpass, os, pwd
for name in ("HOME", "USER", "LOGNAME", "USERNAME", "LNAME", "XDG_CACHE_HOME", "CUTLASS_OPS_CACHE_DIR"):
    os.environ.pop(name, None)
def unknown(uid):
    raise KeyError(f"getpwuid(): uid not found: {uid}")
pwd.getpwuid = unknown
try:
    getpass.getuser()
except (KeyError, OSError):
    pass
else:
    raise AssertionError
"""


def run(before, after=""):
    done = run_with_pytorch(textwrap.dedent(before) + CALL + textwrap.dedent(after))
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_user_that_the_image_does_not_know():
    """hindsight#3934, tao-skill-bank#150, h2o-llmstudio#974: a cache folder is named after a user without a name."""
    done = run(
        WITHOUT_A_NAME,
        """
        from cutlass_ops.artifacts.store import KernelStore
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            KernelStore.default()
        print(*(each.message for each in said))
        """,
    )
    assert "this user has no home folder: set CUTLASS_OPS_CACHE_DIR" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("home", ["/nonexistent", "/dev/null", "/proc"])
def test_a_home_that_cannot_be_written_is_not_touched_by_import_and_calls(home):
    """composio#4150, openml-python#883, mem0#6965: an import fails, because it makes a folder in the home."""
    done = run(
        f"""
        import os, sys
        os.environ["HOME"] = {home!r}
        os.environ.pop("CUTLASS_OPS_CACHE_DIR", None)
        def refuse(event, arguments):
            assert event != "os.mkdir", arguments
        sys.addaudithook(refuse)
        """
    )
    assert done.stderr == ""


def test_users_without_a_home_do_not_share_a_temporary_folder(tmp_path):
    """triton#518: two users share a cache in /tmp, and the second may not open the files of the first."""
    roots = set()
    for _ in range(2):
        done = run(
            WITHOUT_A_NAME + f"import tempfile\ntempfile.tempdir = {str(tmp_path)!r}\n",
            """
            warnings.simplefilter("ignore")
            from cutlass_ops.artifacts.store import KernelStore
            store = KernelStore.default()
            store.folder("v2")
            print(store.root, oct(store.root.stat().st_mode & 0o777))
            """,
        )
        root, mode = done.stdout.split()
        assert mode == "0o700"
        assert Path(root).is_relative_to(tmp_path)
        roots.add(root)
    assert len(roots) == 2


def test_the_drivers_library_is_missing():
    """sglang#4778, cudf#14385: without libcuda.so.1, the import fails on a machine that needs none."""
    done = run(
        """
        import sys
        def refuse(event, arguments):
            if event == "ctypes.dlopen" and "libcuda." in str(arguments[0]):
                raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        sys.addaudithook(refuse)
        """,
        """
        print(co.explain(co.gemm_bias_relu, x, w.t(), bias))
        assert not torch.cuda.is_initialized()
        """,
    )
    assert "on the CPU is served by PyTorch" in done.stdout


def test_children_of_a_server_whose_threads_call_ops():
    """pytorch#75147, modelforge#7, parallelformers#32: after an import, forked workers hang or cannot use CUDA."""
    run(
        "",
        """
        import os, signal, threading, time
        stop = threading.Event()
        def go():
            while not stop.is_set():
                check()
        threads = [threading.Thread(target=go) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            time.sleep(0.01)
            if (child := os.fork()) == 0:
                signal.alarm(60)
                check()
                co.gemm_residual(x, w.t(), torch.zeros(8, 32, dtype=torch.bfloat16))
                os._exit(torch.cuda._is_in_bad_fork())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        for thread in threads:
            thread.join()
        """,
    )


@pytest.fixture
def kit(tmp_path, monkeypatch, session):
    made = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv(env.NVCC.name, str(made.nvcc))
    monkeypatch.setenv(env.NVCC_CCBIN.name, str(made.host))
    monkeypatch.setenv(env.PROGRESS.name, "0")
    monkeypatch.setenv(env.CACHE_DIR.name, str(tmp_path / "store"))
    return made


def test_the_named_folder_takes_all_kernels_and_the_package_none(kit, tmp_path):
    """flashinfer#2976, flashinfer#2834: kernels go into the package's folder, whatever the variable says."""
    package = Path(co.__file__).parent

    def files():
        return {path for path in package.rglob("*") if path.suffix != ".pyc" and path.name != "__pycache__"}

    before = files()
    built = build_artifact(sm80_spec())
    assert built.folder.is_relative_to(tmp_path / "store")
    assert files() == before


@pytest.mark.parametrize("missing", ["nvcc", "g++"])
def test_an_image_without_compilers(kit, monkeypatch, missing):
    """sglang#1067, dynamo#2298: in an image without compilers, the first call fails with an error of the system."""
    if missing == "nvcc":
        monkeypatch.setenv(env.NVCC.name, "/nonexistent/nvcc")
    else:
        monkeypatch.delenv(env.NVCC_CCBIN.name)
        monkeypatch.setenv("PATH", "/nonexistent")
    words = {"nvcc": r"/nonexistent/nvcc, which is not an executable file", "g++": r"apt-get install g\+\+"}
    with pytest.raises(ToolchainError, match=words[missing]):
        build_artifact(sm80_spec())
    x, w = draw(8, 64), draw(32, 64)
    assert near(co.gemm(x, w.t()), x.double() @ w.double().t())


def test_a_full_disk_is_named_and_is_no_lasting_failure(kit):
    """rust#20438: when the disk is full, a compiler only says that something was wrong."""
    kit.does('echo "error writing to $TMPDIR/a.s: No space left on device" >&2; exit 1')
    with pytest.raises(StoreError, match=r"no space is left .* set CUTLASS_OPS_CACHE_DIR to another folder"):
        build_artifact(sm80_spec())
    kit.makes(library(HMMA))
    assert build_artifact(sm80_spec()).read_library() == (kit.root / "library").read_bytes()


def test_a_kernel_of_an_older_toolkit_is_not_taken(kit):
    """triton#37: after an upgrade, what was compiled before it is loaded, and fails."""
    before = build_artifact(sm80_spec())
    kit.says_version("13.0.99")
    kit.makes(library(HMMA, HMMA))
    with Session().active():
        after = build_artifact(sm80_spec())
    assert after.key != before.key
    assert kit.compilations == 2
    assert after.read_library() != before.read_library()


def test_kernels_of_two_architectures_lie_apart(kit):
    """flashdreams#216: on a shared file system, a GPU gets what was compiled for another one."""
    specs = [replace(sm80_spec(), target=target) for target in ("sm_80", "sm_86", "sm_89")]
    first = build_artifact(specs[0])
    for sm, spec in ((86, specs[1]), (89, specs[2])):
        kit.makes(library(HMMA, sm=sm))
        built = build_artifact(spec)
        assert built.folder != first.folder
        assert built.read_library() != first.read_library()


BUILD = """
import sys; sys.argv[0] = "cutlass-ops"
from fake_toolkit import sm80_spec
from cutlass_ops.compilation.builder import build_artifact
print(build_artifact(sm80_spec()).key)
"""


def building():
    paths = os.pathsep.join((str(Path(co.__file__).parents[1]), str(Path(__file__).parent)))
    return subprocess.Popen(
        [sys.executable, "-B", "-c", BUILD],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_killed_build_leaves_no_lock(kit):
    """pytorch#189245, nvdiffrast#190: a killed build leaves its lock, and all later processes wait for ever."""
    kit.does('echo > "$here/started"; exec sleep 600')
    process = building()
    try:
        while not (kit.root / "started").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    kit.makes(library(HMMA))
    assert build_artifact(sm80_spec()).read_library() == (kit.root / "library").read_bytes()


@pytest.mark.slow
def test_processes_that_need_the_same_kernel_compile_it_once(kit):
    """GPTQModel#3015: processes of one machine that compile the same at once hang."""
    kit.makes(library(HMMA), before="sleep 0.5\n")
    processes = [building() for _ in range(3)]
    keys = {process.communicate(timeout=120)[0] for process in processes}
    assert keys == {build_artifact(sm80_spec()).key + "\n"}
    assert kit.compilations == 1
    assert KernelStore.default().root.stat().st_mode & 0o077 == 0
