import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.entry import Compiled, identity_key
from cutlass_ops.artifacts.loader import Reason, load, refusal
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import LoadError
from cutlass_ops.compilation.identity import kernel_identity

# What templates/include/cutlass_ops/binding.h exports, without a kernel behind it.
EXPORTS = r"""
#include <tvm/ffi/c_api.h>
#define EXPORT extern "C" __attribute__((visibility("default"), externally_visible)) int
static int integer(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = value;
  return 0;
}
EXPORT __tvm_ffi_launch(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {
  return integer(result, count == 1 ? 16 * args[0].v_int64 + 3 : 0);
}
EXPORT __tvm_ffi_workspace_size(void*, TVMFFIAny const* args, int32_t, TVMFFIAny* result) {
  return integer(result, args[0].v_int64 * args[1].v_int64 + args[2].v_int64);
}
EXPORT __tvm_ffi_prepare(void*, TVMFFIAny const* args, int32_t count, TVMFFIAny* result) {
  auto const* const api = reinterpret_cast<DLPackExchangeAPI const*>(args[count - 1].v_int64);
  return integer(result, api->header.version.major);
}
// The number of the device is the error.
EXPORT __tvm_ffi_load(void*, TVMFFIAny const* args, int32_t, TVMFFIAny* result) {
  if (args[0].v_int64 == 0) return result->type_index = kTVMFFINone, 0;
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", "out of memory");
  return -1;
}
#ifndef NO_DESCRIBE
EXPORT __tvm_ffi_describe(void*, TVMFFIAny const*, int32_t, TVMFFIAny* result) {
  static char const text[] = "{\"stages\": 3, \"threads\": 128, \"shared_memory\": 49152}";
  TVMFFIByteArray const bytes{text, sizeof(text) - 1};
  return TVMFFIStringFromByteArray(&bytes, result);
}
#endif
"""


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory):
    return FakeToolkit(tmp_path_factory.mktemp("kit") / "toolkit").find()


@pytest.fixture(scope="session")
def host_library(tmp_path_factory, toolchain):
    """Compile the exports with the host compiler alone."""
    made = {}

    def make(*flags):
        if flags not in made:
            folder = tmp_path_factory.mktemp("host")
            (folder / "kernel.cpp").write_text(EXPORTS)
            include = toolchain.tvm_ffi_dir / "include"
            links = [f"-L{toolchain.tvm_ffi_dir / 'lib'}", "-ltvm_ffi"]
            command = ["g++", "-std=c++17", "-shared", "-fPIC", f"-I{include}", *flags, "-o", "out.so", "kernel.cpp"]
            subprocess.run([*command, *links], cwd=folder, check=True)
            made[flags] = (folder / "out.so").read_bytes()
        return made[flags]

    return make


@pytest.fixture
def put(tmp_path, toolchain):
    def _put(data, stages=3, **said):
        store = KernelStore(tmp_path / "store")
        # Every test loads a kernel of its own: what is loaded stays.
        identity = kernel_identity(sm80_spec(stages), f"// {tmp_path}", toolchain)
        identity["toolchain"] = identity["toolchain"] | said
        folder = store.workspace(identity_key(identity), "source")
        (folder / "kernel.so").write_bytes(data)
        resources = ({"function": "f", "registers": 128, "static_shared_memory": 0},)
        return store.publish(folder, identity, {"HMMA": 1}, Compiled(1.0, resources))

    return _put


@pytest.fixture
def _cudart(monkeypatch):
    """These libraries need no CUDA runtime, and this machine may have none."""
    monkeypatch.setattr(loader, "_provide_cudart", lambda *_: None)


@pytest.mark.usefixtures("_cudart")
def test_a_kernel_is_callable(put, host_library):
    artifact = put(host_library())
    kernel = load(artifact)
    assert kernel.artifact == artifact
    assert kernel.launch() == 0
    assert refusal(kernel.launch(5)) == (5, Reason.DTYPE)
    assert kernel.workspace_size(4, 5, 6) == 26
    assert kernel.describe() == {"stages": 3, "threads": 128, "shared_memory": 49152}
    assert kernel.prepare(loader.stream_api()) == 1  # the major version of DLPack's interface
    assert load(artifact) is kernel


@pytest.mark.slow
@pytest.mark.usefixtures("_cudart")
def test_a_driver_loads_a_kernel_where_cuda_is_used(put, host_library, monkeypatch):
    kernel = load(put(host_library()))
    devices = [torch.device("cuda", number) for number in (0, 3)]
    asked = []
    object.__setattr__(kernel, "load", lambda number, load=kernel.load: (asked.append(number), load(number)))
    kernel.load_on(devices[0])  # CUDA is not used here, as in a forked process
    assert asked == []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    kernel.load_on(devices[0])
    assert asked == [0]
    with pytest.raises(LoadError, match=r"cannot be loaded on cuda:3: out of memory"):
        kernel.load_on(devices[1])


@pytest.mark.usefixtures("_cudart")
def test_many_threads_load_one_kernel(put, host_library):
    artifact = put(host_library())
    with ThreadPoolExecutor(8) as pool:
        assert len({id(kernel) for kernel in pool.map(load, [artifact] * 32)}) == 1


def spoil_bytes(path):
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def spoil_by_link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_bytes, "changed since it was looked up"),
        (lambda path: os.truncate(path, 10), "changed since it was looked up"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "changed since it was looked up"),
        (lambda path: path.unlink(), "cannot be read"),
        (spoil_by_link, "cannot be read"),
        (lambda path: path.chmod(0o666), "can be written by others"),
    ],
)
def test_what_changed_after_the_lookup_is_never_opened(put, monkeypatch, spoil, message):
    def never():
        raise AssertionError("opened")

    monkeypatch.setattr(loader, "_import_tvm_ffi", never)
    artifact = put(library(HMMA))
    spoil(artifact.library)
    with pytest.raises(LoadError, match=message):
        load(artifact)


@pytest.mark.usefixtures("_cudart")
@pytest.mark.parametrize("wrong", [{"search": {15: "/opt/lib"}}, {"search": {29: ""}}, {"needed": ("libopt.so",)}])
def test_a_library_that_has_others_loaded_is_never_opened(put, monkeypatch, wrong):
    monkeypatch.setattr(loader, "_import_tvm_ffi", lambda: pytest.fail("it was opened"))
    with pytest.raises(LoadError, match=r"RPATH or RUNPATH|needs libopt\.so"):
        load(put(library(HMMA, **wrong)))


def test_a_missing_function(put, host_library):
    with pytest.raises(LoadError, match="describe"):
        load(put(host_library("-DNO_DESCRIBE")))


def test_cudart_is_looked_for(monkeypatch, tmp_path):
    data = library(HMMA)
    opened = []

    def only(good):
        def cdll(name):
            opened.append(name)
            if name != good:
                raise OSError(name)

        monkeypatch.setattr(loader.ctypes, "CDLL", cdll)

    def nowhere(name):
        raise AssertionError(f"{name} was looked for")
        yield

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    only("libcudart.so.13")  # PyTorch's own, already there: no folder is looked into
    with monkeypatch.context() as patch:
        patch.setattr(loader, "_cudart_files", nowhere)
        loader._provide_cudart(data, "it")
    assert opened == ["libcudart.so.13"]
    only(str(tmp_path / "lib" / "libcudart.so.13"))
    loader._provide_cudart(data, "it")
    nvcc = tmp_path / "toolkit" / "bin" / "nvcc"
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(nvcc))
    only(str(tmp_path / "toolkit" / "lib64" / "libcudart.so.13"))  # beside the compiler, which is not started
    loader._provide_cudart(data, "it")
    only(None)
    with pytest.raises(LoadError, match=r"needs libcudart\.so\.13"):
        loader._provide_cudart(data, "it")


def test_what_a_manifest_says_of_its_compiler_is_no_place_of_a_library(put, monkeypatch, tmp_path):
    nvcc, opened = tmp_path / "kit" / "bin" / "nvcc", []
    for folder in ("bin", "lib64", "lib"):
        (nvcc.parents[1] / folder).mkdir(parents=True)
        (nvcc.parents[1] / folder / "libcudart.so.13").touch()

    def cdll(name, *_, **__):
        opened.append(name)
        raise OSError(name)

    monkeypatch.setattr(loader.ctypes, "CDLL", cdll)
    artifact = put(library(HMMA), nvcc=str(nvcc))
    assert str(nvcc) in str(artifact.manifest)
    with pytest.raises(LoadError, match=r"needs libcudart\.so\.13"):
        load(artifact)
    assert opened
    assert not [name for name in opened if str(tmp_path) in name]


@pytest.mark.slow
@pytest.mark.usefixtures("_cudart")
def test_a_kernel_is_mapped_from_sealed_memory_and_leaves_no_descriptor(put, host_library):
    before = set(os.listdir("/proc/self/fd"))
    for number in range(3):
        kernel = load(put(host_library(f"-DNAME={10 + number}"), stages=10 + number))
        assert kernel.launch() == 0
    assert set(os.listdir("/proc/self/fd")) == before
    assert "memfd:cutlass_ops" in Path("/proc/self/maps").read_text()


@pytest.mark.usefixtures("_cudart")
def test_where_memory_cannot_be_mapped_a_private_file_stands_in(put, host_library, monkeypatch, tmp_path):
    def refuse(*_):
        raise PermissionError("memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(tmp_path.iterdir())
    kernel = load(put(host_library("-DNAME=20"), stages=20))
    assert kernel.launch() == 0
    assert {p.name for p in set(tmp_path.iterdir()) - before} <= {"store"}
