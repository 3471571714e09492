"""Environment variables, and where the library's own files are."""

import os
from pathlib import Path

import pytest

from cutlass_ops.base import env, resources

HOME = "/home/someone"


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setenv("HOME", HOME)


@pytest.mark.parametrize(
    ("read", "name", "values"),
    [
        (env.jit_enabled, "CUTLASS_OPS_JIT", {"": True, "0": False, "1": True}),
        (env.stand_in, "CUTLASS_OPS_STAND_IN", {"": True, "0": False, "1": True}),
        (env.remembers_choices, "CUTLASS_OPS_CHOICES", {"": True, "0": False, "1": True}),
        (env.lineinfo_enabled, "CUTLASS_OPS_LINEINFO", {"": False, "0": False, "1": True}),
        (env.nvtx_enabled, "CUTLASS_OPS_NVTX", {"": False, "0": False, "1": True}),
        (env.progress, "CUTLASS_OPS_PROGRESS", {"": None, "0": False, "1": True, "auto": None}),
        (env.jobs, "CUTLASS_OPS_JOBS", {"": len(os.sched_getaffinity(0)), "7": 7}),
        (env.nvcc, "CUTLASS_OPS_NVCC", {"": None, "/bin/nvcc": Path("/bin/nvcc")}),
        (env.cutlass_dir, "CUTLASS_OPS_CUTLASS_DIR", {"": None, "~": Path(HOME)}),
        (env.host_compiler, "NVCC_CCBIN", {"": None, "g++": "g++"}),
        (env.cache_size, "CUTLASS_OPS_CACHE_SIZE", {"": 2_000_000_000, "none": None, "1KB": 1000}),
        (env.executor_timeout, "CUTLASS_OPS_EXECUTOR_TIMEOUT", {"": 1800, "2.5": 2.5}),
        (env.cuda_homes, "CUDA_HOME", {"": (), "/a": (("CUDA_HOME", Path("/a")),)}),
    ],
)
def test_values_and_defaults_are_read_at_each_call(monkeypatch, read, name, values):
    assert read() == values[""]
    for text, value in values.items():
        monkeypatch.setenv(name, text)
        assert read() == value


def test_cuda_home_comes_before_cuda_path(monkeypatch):
    monkeypatch.setenv("CUDA_PATH", "/b")
    monkeypatch.setenv("CUDA_HOME", "/a")
    assert env.cuda_homes() == (("CUDA_HOME", Path("/a")), ("CUDA_PATH", Path("/b")))


def test_cache_folder(monkeypatch):
    assert env.cache_dir() == Path(HOME, ".cache/cutlass_ops")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert env.cache_dir() == Path(HOME, ".cache/cutlass_ops")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert env.cache_dir() == Path("/xdg/cutlass_ops")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", "~/kernels")
    assert env.cache_dir() == Path(HOME, "kernels")


def test_no_home_folder(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ValueError, match="CUTLASS_OPS_CACHE_DIR"):
        env.cache_dir()


@pytest.mark.parametrize(
    ("name", "read", "bad"),
    [
        ("CUTLASS_OPS_CACHE_DIR", env.cache_dir, "here"),
        ("CUTLASS_OPS_JIT", env.jit_enabled, "yes"),
        ("CUTLASS_OPS_NVCC", env.nvcc, "nvcc"),
        ("CUTLASS_OPS_NVCC", env.nvcc, "~nobody-of-this-name/nvcc"),
        ("CUTLASS_OPS_CUTLASS_DIR", env.cutlass_dir, "./cutlass"),
        ("CUTLASS_OPS_JOBS", env.jobs, "0"),
        ("CUTLASS_OPS_JOBS", env.jobs, "-2"),
        ("CUTLASS_OPS_JOBS", env.jobs, "²"),
        ("CUTLASS_OPS_JOBS", env.jobs, "9" * 20),
        ("CUTLASS_OPS_BUNDLE_KEY", env.bundle_keys, "key.pub"),
        ("CUTLASS_OPS_BUNDLE_KEY", env.bundle_keys, "/a:"),
        ("CUTLASS_OPS_BUNDLE_VERSION", env.bundle_version, "v1"),
        ("CUTLASS_OPS_PROGRESS", env.progress, "2"),
        ("CUTLASS_OPS_LINEINFO", env.lineinfo_enabled, "yes"),
        ("CUTLASS_OPS_NVTX", env.nvtx_enabled, "true"),
        ("CUTLASS_OPS_CACHE_SIZE", env.cache_size, "much"),
        ("CUTLASS_OPS_CACHE_SIZE", env.cache_size, "0"),
        ("CUTLASS_OPS_EXECUTOR_TIMEOUT", env.executor_timeout, "soon"),
    ],
)
def test_bad_values_name_the_variable(monkeypatch, name, read, bad):
    monkeypatch.setenv(name, bad)
    with pytest.raises(ValueError, match=f"{name}.*{bad}"):
        read()


@pytest.mark.parametrize("read", [env.jobs, env.bundle_version])
def test_thousands_of_digits_are_a_mistake_in_our_words(monkeypatch, read):
    for name in ("CUTLASS_OPS_JOBS", "CUTLASS_OPS_BUNDLE_VERSION"):
        monkeypatch.setenv(name, "9" * 5000)
    with pytest.raises(ValueError, match="must be a positive integer of at most 15 digits") as error:
        read()
    assert len(str(error.value)) < 200


def test_resources_in_a_checkout_and_in_a_wheel(monkeypatch, tmp_path):
    assert list(resources.templates().glob("*.j2"))
    assert list(resources.include().rglob("*.h"))
    assert resources.generated().is_dir()
    package = tmp_path / "cutlass_ops"
    package.mkdir()
    (tmp_path / "templates").mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", package)
    with pytest.raises(FileNotFoundError, match="incomplete"):
        resources.templates()  # another package's folder in site-packages
    (tmp_path / "pyproject.toml").touch()
    assert resources.templates() == tmp_path / "templates"
    (package / "_data" / "templates").mkdir(parents=True)
    assert resources.include() == package / "_data" / "templates" / "include"
