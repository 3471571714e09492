import os
from pathlib import Path

import pytest

from cutlass_ops import _env, _resources


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for variable in _env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def test_defaults(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert _env.cache_dir() == Path("/home/someone/.cache/cutlass_ops")
    assert _env.jit_enabled()
    assert _env.nvcc() is None
    assert _env.cuda_homes() == ()
    assert _env.host_compiler() is None
    assert _env.cutlass_dir() is None
    assert _env.jobs() == len(os.sched_getaffinity(0))
    assert _env.progress() is None
    assert not _env.lineinfo_enabled()
    assert not _env.nvtx_enabled()
    assert _env.cache_size() == 2_000_000_000
    assert _env.executor_timeout() == 1800


def test_values_are_read_at_each_call(monkeypatch):
    for text, value in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("CUTLASS_OPS_JIT", text)
        assert _env.jit_enabled() is value
    for text, value in (("0", False), ("1", True), ("auto", None), ("", None)):
        monkeypatch.setenv("CUTLASS_OPS_PROGRESS", text)
        assert _env.progress() is value
    for name, read in (("CUTLASS_OPS_LINEINFO", _env.lineinfo_enabled), ("CUTLASS_OPS_NVTX", _env.nvtx_enabled)):
        for text, value in (("0", False), ("1", True), ("", False)):
            monkeypatch.setenv(name, text)
            assert read() is value
    monkeypatch.setenv("CUTLASS_OPS_JOBS", "7")
    assert _env.jobs() == 7
    monkeypatch.setenv("CUDA_PATH", "/b")
    monkeypatch.setenv("CUDA_HOME", "/a")
    assert _env.cuda_homes() == (("CUDA_HOME", Path("/a")), ("CUDA_PATH", Path("/b")))


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert _env.cache_dir() == Path("/home/someone/.cache/cutlass_ops")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert _env.cache_dir() == Path("/xdg/cutlass_ops")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", "~/kernels")
    assert _env.cache_dir() == Path("/home/someone/kernels")


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ValueError, match="CUTLASS_OPS_CACHE_DIR"):
        _env.cache_dir()


@pytest.mark.parametrize(
    ("name", "read", "bad"),
    [
        ("CUTLASS_OPS_CACHE_DIR", _env.cache_dir, "here"),
        ("CUTLASS_OPS_JIT", _env.jit_enabled, "yes"),
        ("CUTLASS_OPS_NVCC", _env.nvcc, "nvcc"),
        ("CUTLASS_OPS_CUTLASS_DIR", _env.cutlass_dir, "./cutlass"),
        ("CUTLASS_OPS_JOBS", _env.jobs, "0"),
        ("CUTLASS_OPS_JOBS", _env.jobs, "-2"),
        ("CUTLASS_OPS_JOBS", _env.jobs, "²"),
        ("CUTLASS_OPS_JOBS", _env.jobs, "9" * 20),
        ("CUTLASS_OPS_BUNDLE_KEY", _env.bundle_keys, "key.pub"),
        ("CUTLASS_OPS_BUNDLE_KEY", _env.bundle_keys, "/a:"),
        ("CUTLASS_OPS_BUNDLE_VERSION", _env.bundle_version, "v1"),
        ("CUTLASS_OPS_PROGRESS", _env.progress, "2"),
        ("CUTLASS_OPS_LINEINFO", _env.lineinfo_enabled, "yes"),
        ("CUTLASS_OPS_NVTX", _env.nvtx_enabled, "true"),
        ("CUTLASS_OPS_CACHE_SIZE", _env.cache_size, "much"),
        ("CUTLASS_OPS_CACHE_SIZE", _env.cache_size, "0"),
        ("CUTLASS_OPS_EXECUTOR_TIMEOUT", _env.executor_timeout, "soon"),
    ],
)
def test_bad_values_name_the_variable(monkeypatch, name, read, bad):
    monkeypatch.setenv(name, bad)
    with pytest.raises(ValueError, match=f"{name}.*{bad}"):
        read()


@pytest.mark.parametrize("read", [_env.jobs, _env.bundle_version])
def test_thousands_of_digits_are_a_mistake_in_our_words(monkeypatch, read):
    for name in ("CUTLASS_OPS_JOBS", "CUTLASS_OPS_BUNDLE_VERSION"):
        monkeypatch.setenv(name, "9" * 5000)
    with pytest.raises(ValueError, match="must be a positive integer of at most 15 digits") as error:
        read()
    assert len(str(error.value)) < 200


def test_every_variable_is_documented():
    assert all(v.name and v.default and v.doc for v in _env.VARIABLES)


def test_resources_in_a_checkout_and_in_a_wheel(monkeypatch, tmp_path):
    package = tmp_path / "cutlass_ops"
    package.mkdir()
    (tmp_path / "templates").mkdir()
    monkeypatch.setattr(_resources, "_PACKAGE", package)
    with pytest.raises(FileNotFoundError, match="incomplete"):
        _resources.templates()  # another package's folder in site-packages
    (tmp_path / "pyproject.toml").touch()
    assert _resources.templates() == tmp_path / "templates"
    (package / "_data" / "templates").mkdir(parents=True)
    assert _resources.include() == package / "_data" / "templates" / "include"


def test_resources_of_this_installation():
    assert list(_resources.templates().glob("*.j2"))
    assert list(_resources.include().rglob("*.h"))
    assert _resources.generated().is_dir()
