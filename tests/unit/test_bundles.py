"""Calls served by bundles: which come first, what is picked, and what is said where there is no kernel."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from bundles import packed
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec, sm90_spec
from signatures import A100, H100, signature

import cutlass_ops as co
from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import BundleError, MissingKernelError
from cutlass_ops.base.session import Session
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin
from cutlass_ops.run.registry import Registry
from cutlass_ops.ship import packing, shipping

LINEAR = shipping.Kernels(ops=("gemm_bias_relu",), archs=("sm_80",), shapes=("16,512x4096x4096", "64x4100x4096"))


@pytest.fixture(autouse=True)
def own(session):
    """Each test has a session of its own."""


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(tmp_path / "no nvcc"))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "no store"))


@pytest.fixture
def loads(monkeypatch):
    """What a registry was asked to load; no library is."""
    seen = []
    monkeypatch.setattr(loader, "load", lambda artifact: seen.append(artifact) or artifact)
    return seen


@pytest.fixture
def write(tmp_path):
    def write(name, *stages, data=None):
        path = tmp_path / name
        packed(tmp_path, [sm80_spec(s) for s in stages], data).write(path)
        return path

    return write


# ---- Look-up order -------------------------------------------------------------------------------------------------


def test_loaded_then_bundle_then_store_then_build(write, loads, tmp_path, monkeypatch):
    kit = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(kit.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(kit.host))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "own store"))
    kernels = Registry.current()
    co.load_bundle(write("a", 3))
    kernels.kernels([sm80_spec(3), sm80_spec(4)])
    assert [type(a).__name__ for a in loads] == ["BundledKernel", "Artifact"]
    assert kit.compilations == 1
    kernels.kernels([sm80_spec(3), sm80_spec(4)])
    assert len(loads) == 2
    Session().part(Registry).kernels([sm80_spec(4)])
    assert len(loads) == 3
    assert kit.compilations == 1


@pytest.mark.slow
def test_the_last_loaded_comes_first_then_the_environment_in_its_order(write, monkeypatch):
    paths = [write(name, 3, *more, data=library(*[HMMA] * count)) for name, more, count in (
        ("env1", [4], 1), ("env2", [4, 5], 2), ("first", [], 3), ("last", [], 4)
    )]  # fmt: skip
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", os.pathsep.join(map(str, paths[:2])))
    for path in paths[2:]:
        co.load_bundle(path)
    assert [b.path.name for b in Bundles.current().all()] == ["last", "first", "env1", "env2"]
    for stages, count in ((3, 4), (4, 1), (5, 2)):
        assert Bundles.current().find(sm80_spec(stages)).manifest["sass"] == {"HMMA": count}
    co.load_bundle(paths[2])
    assert Bundles.current().find(sm80_spec(3)).manifest["sass"] == {"HMMA": 3}
    assert len(Bundles.current().all()) == 4


def test_a_bad_path_in_the_environment_is_an_error_when_a_kernel_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "none"))
    with pytest.raises(BundleError, match="none cannot be read"):
        Bundles.current().find(sm80_spec())
    with pytest.raises(ValueError, match="the path of the bundle is empty"):  # it would be the current folder
        co.load_bundle("")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", "relative.bundle")
    with pytest.raises(ValueError, match="must be an absolute path"):
        Bundles.current().find(sm80_spec())


# ---- What is said --------------------------------------------------------------------------------------------------


def test_a_missing_kernel_names_what_there_is(write, no_compiler, loads):
    co.load_bundle(write("a", 3))
    wanted = KernelSpec(a="f16.row", b="f16.col", d="f16.row", epilogue=sm80_spec().epilogue, config=sm80_spec().config)
    with pytest.raises(MissingKernelError) as error:
        Registry.current().kernel(wanted)
    text = str(error.value)
    assert "have no kernel for a f16.row, b f16.col, d f16.row on sm_80" in text
    assert "with this epilogue they have a bf16.row, b bf16.col, d bf16.row on sm_80" in text
    assert "Add it to their catalogue" in text
    other = KernelSpec(
        a="f16.row", b="f16.col", d="f16.row", epilogue=builtin.bias_relu.graph, config=sm80_spec().config
    )
    with pytest.raises(MissingKernelError, match="none has this epilogue"):
        Registry.current().kernel(other)


# ---- Which kernel --------------------------------------------------------------------------------------------------


@pytest.fixture
def linear(tmp_path):
    """A bundle for bias + ReLU on sm_80."""
    kit = FakeToolkit(tmp_path / "kit")
    contents = shipping.shipment(shipping.Catalogue(kernels=(LINEAR,)))
    made = packing.pack(
        shipping.Catalogue(kernels=(LINEAR,)), store=KernelStore(tmp_path / "made"), toolchain=kit.find()
    )
    made.write(tmp_path / "linear.bundle")
    return tmp_path / "linear.bundle", contents


@pytest.mark.slow
def test_only_kernels_in_the_bundle_are_picked(linear):
    path, contents = linear
    usual = dispatch.specs(signature(), A100)
    co.load_bundle(path)
    shipped = set(contents.specs)
    assert set(dispatch.specs(signature(), A100)) <= shipped
    assert len(shipped) < len(usual)
    for problem in (Problem(1, 4096, 4096), Problem(512, 4096, 4096), Problem(7, 1000, 64), Problem(8192, 8192, 8192)):
        spec, order = dispatch.choose(signature(), A100, problem)
        assert spec in shipped
        assert spec.config.refuses(order) is None
    assert set(dispatch.specs_for(signature(), A100, 4096, 4096)) <= shipped
    # Another signature has none in the bundle: what is picked is as without it.
    assert set(dispatch.specs(signature(dtype="f16"), A100)).isdisjoint(shipped)
    with Session().active():
        assert dispatch.specs(signature(), A100) == usual


def test_a_single_kernel_needs_no_choice(tmp_path, monkeypatch):
    spec = _with_bias_relu(sm80_spec())
    packed(tmp_path, [spec]).write(tmp_path / "a")
    co.load_bundle(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "_weight", None)
        assert dispatch.choose(signature(), A100, Problem(100, 300, 500)) == (spec, TileOrder())


def test_kernels_of_one_kind_are_chosen_among(monkeypatch):
    """Of those that run on a device, wgmma's before those of mma.sync, whichever bundle came first."""
    old, new = sm80_spec().config, sm90_spec().config
    for held, wanted in (((old, new), (new,)), ((old,), (old,)), ((), ())):
        monkeypatch.setattr(Bundles, "configs", lambda *_, held=held, **__: held)
        assert Bundles.current().of_one_kind(signature(), H100.capability) == wanted
    monkeypatch.setattr(Bundles, "configs", lambda *_, **__: (old, new))
    # Where wgmma's take copies of operands, few rows are served by those of mma.sync.
    assert Bundles.current().of_one_kind(signature(b=1), H100.capability) == (old, new)


def _with_bias_relu(spec):
    return KernelSpec(a=spec.a, b=spec.b, d=spec.d, epilogue=builtin.bias_relu.graph, config=spec.config)


@pytest.mark.slow
def test_a_table_travels_along(tmp_path):
    """With a bundle's table the choice is by its measurements."""
    of = signature(builtin.bias_gelu)
    usual = policies.policy(of, A100).kernels
    slow, fast = usual[0], usual[-1]
    point = Point(Problem(300, 400, 512), "2026-01-01", (Measured(fast, 1.0, 0.0), Measured(slow, 9.0, 8.0)))
    table = Table(A100.name, A100.multiprocessors, of, (point,), kernels=(slow, fast))
    wanted = shipping.Catalogue(tuned=(shipping.Tuned(table, "sm_80"),))
    kit = FakeToolkit(tmp_path / "kit")
    made = packing.pack(wanted, store=KernelStore(tmp_path / "made"), toolchain=kit.find()).write(tmp_path / "a")
    assert len(made.manifest.tables) == 1
    assert tables.parse(made.read_table(made.manifest.tables[0]), "it") == table
    co.load_bundle(tmp_path / "a")
    assert policies.policy(of, A100).own == table
    assert dispatch.choose(of, A100, Problem(300, 400, 512))[0].config == fast
    assert set(policies.policy(of, A100).kernels) == {slow, fast}


# ---- Where there is nothing but Python, PyTorch and tvm-ffi --------------------------------------------------------

_BARE = """
import sys, tempfile

tempfile.gettempdir()  # Python looks for that folder by writing into it

FORBIDDEN = {"jinja2", "cutlass_library", "cuda", "typer", "rich", "cryptography"}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


import torch

seen = []
sys.meta_path.insert(0, Absent())
sys.addaudithook(
    lambda event, args: seen.append((event, args))
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.mkdir", "os.rename", "os.fork")
    or event == "open" and isinstance(args[2], int) and args[2] & 0x43
    else None
)
import cutlass_ops as co
from cutlass_ops.artifacts import loader

loader._provide_cudart = lambda *_: None
loaded = co.load_bundle(sys.argv[1])
(kernel,) = loaded.kernels()
print(co.registry.kernel(kernel.spec).describe()["threads"])
try:
    spec = kernel.spec
    co.build(co.KernelSpec(a="f16.row", b="f16.col", d="f16.row", epilogue=spec.epilogue, config=spec.config))
except co.errors.MissingKernelError as exc:
    print("no kernel for a f16.row" in str(exc))
x = torch.ones(4, 8, dtype=torch.bfloat16)
print(float(co.gemm(x, x.t()).sum()))
spec = kernel.spec
try:
    co.build(spec)(x, x.t())
except co.errors.NoDeviceError as exc:
    print(exc)
print(seen)
"""


@pytest.mark.slow
def test_a_bundle_loads_where_nothing_is_installed_that_compiles(tmp_path):
    """Neither jinja2 nor CUTLASS nor a compiler; nothing is started and nothing written."""
    folder = Path(__file__).parent
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA", "CUTLASS_OPS", "NVCC"))}
    make = textwrap.dedent("""
        import subprocess, sys
        from pathlib import Path
        import tvm_ffi
        from bundles import packed
        from fake_toolkit import sm80_spec
        from test_loader import EXPORTS

        root = Path(sys.argv[1])
        size = '__attribute__((section(".cutlass_ops.kernel"), used)) static unsigned const size = 528;'
        (root / "kernel.cpp").write_text(EXPORTS + size)
        package = Path(tvm_ffi.__file__).parent
        command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{package}/include", "-o", "out.so", "kernel.cpp"]
        subprocess.run([*command, f"-L{package}/lib", "-ltvm_ffi"], cwd=root, check=True)
        from fake_toolkit import HMMA, library
        data = (root / "out.so").read_bytes()
        made = packed(root, [sm80_spec()], data + library(HMMA))
        made.write(root / "a.bundle")
    """)
    paths = os.pathsep.join([str(folder), str(folder.parents[1])])
    run = {"check": True, "capture_output": True, "text": True}
    subprocess.run([sys.executable, "-c", make, tmp_path], env=environment | {"PYTHONPATH": paths}, **run)
    bare = environment | {"PYTHONPATH": str(folder.parents[1]), "PATH": "/nowhere", "HOME": "/nowhere"}
    done = subprocess.run([sys.executable, "-B", "-c", _BARE, tmp_path / "a.bundle"], env=bare, **run)
    threads, missing, total, device, seen = done.stdout.splitlines()
    assert threads == "128"
    assert missing == "True"
    assert float(total) == 4 * 4 * 8
    assert "runs only on CUDA devices" in device
    assert json.loads(seen.replace("'", '"')) == []
