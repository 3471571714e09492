"""What ``doctor`` finds and says, and where ``list`` and ``doctor`` say that kernels come from."""

import json
import re

import pytest
import torch
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fake_toolkit import sm80_spec
from fleet import name_store

from cutlass_ops import __version__
from cutlass_ops.base import env
from cutlass_ops.compilation import finding


@pytest.fixture
def remote(kit, tmp_path, monkeypatch, session):
    """A remote store that machines share, for which this one has all keys."""
    private, public = write_keys(tmp_path, "fleet", Ed25519PrivateKey.generate())
    name_store(monkeypatch, f"file://{tmp_path}/shared", public, private)
    return f"file://{tmp_path}/shared"


def test_list_and_doctor_say_where_kernels_come_from(kit, remote, run, spec_file, tmp_path, monkeypatch):
    path = spec_file(sm80_spec())
    assert "Remote store\n  " + remote + ": answers; kernels compiled here are published there" in run("doctor")[1]
    assert run("build", path)[0] == 0
    assert run("list")[1].splitlines()[0].endswith("  compiled here")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "another"))
    assert run("build", path)[0] == 0
    assert kit.compilations == 1
    assert run("list")[1].splitlines()[0].endswith(f"  fetched from {remote}")
    assert [row["origin"] for row in json.loads(run("list", "--json")[1])] == [f"fetched from {remote}"]
    found = json.loads(run("doctor", "--json")[1])
    assert (found["store"]["kernels"], found["store"]["fetched"]) == (1, 1)
    assert found["remote"] == {"url": remote, "answers": True, "publishes": True}
    assert "1 kernel, 1 of them fetched, " in run("doctor")[1]


def test_doctor_says_what_is_wrong_with_a_remote_store(kit, remote, run, monkeypatch):
    monkeypatch.delenv(env.REMOTE_STORE_KEY.name)
    code, out, _ = run("doctor")
    assert code == 1
    assert "CUTLASS_OPS_REMOTE_STORE needs CUTLASS_OPS_REMOTE_STORE_KEY" in out
    assert "Can compile a kernel: no." in out
    monkeypatch.delenv(env.REMOTE_STORE.name)
    code, out, _ = run("doctor")
    assert code == 0
    assert "Remote store\n  none" in out
    assert "CUTLASS_OPS_REMOTE_STORE_SIGNING_KEY is ignored: CUTLASS_OPS_REMOTE_STORE names no remote store" in out


def test_doctor_asks_a_remote_store(kit, remote, run, monkeypatch):
    monkeypatch.delenv(env.REMOTE_STORE_SIGNING_KEY.name)
    monkeypatch.setenv(env.REMOTE_STORE.name, "http://127.0.0.1:9/kernels")
    code, out, _ = run("doctor")
    assert code == 0
    assert "http://127.0.0.1:9/kernels: does not answer; kernels compiled here are not published there" in out
    assert "the remote store http://127.0.0.1:9/kernels does not answer: kernels are compiled here" in out


def test_doctor_names_everything_that_it_found(kit, run):
    code, out, _ = run("doctor")
    assert code == 0
    assert f"cutlass_ops {__version__}" in out
    assert f"13.0.88, {kit.nvcc} (from CUTLASS_OPS_NVCC)" in out
    assert "Can compile a kernel: yes. Can run one: no." in out
    assert [v.name for v in env.VARIABLES if v.name not in out] == []


def test_doctor_as_json(kit, run):
    code, out, _ = run("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["toolchain"]["nvcc"] == str(kit.nvcc)
    assert found["environment"]["CUTLASS_OPS_NVCC"] == str(kit.nvcc)
    assert found["environment"]["CUTLASS_OPS_JIT"] is None
    assert found["can_compile"]
    assert not found["can_run"]
    assert found["gpus"] == found["problems"] == []
    assert found["toolchain"]["include_dirs"]
    parts = dict(found["toolchain"]["parts"])
    assert {type(number) for number in parts[str(kit.nvcc)]} == {int}
    assert "Path(" not in out


def test_doctor_without_a_compiler(kit, run, monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_OPS_NVCC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(finding, "wheel_bins", lambda: iter(()))
    code, out, _ = run("doctor")
    assert code == 1
    assert "no CUDA compiler" in out
    assert "Can compile a kernel: no. Can run one: no." in out


# Values that a call would refuse.
STUMBLES = (
    *(("JOBS", "many"), ("PROGRESS", "2"), ("TUNING_DIR", "relative"), ("BUNDLE_KEY", "relative"), ("NVTX", "yes")),
    *(("BUNDLE_VERSION", "x"), ("LINEINFO", "on"), ("EXECUTOR_TIMEOUT", "soon"), ("STAND_IN", "yes")),
    ("CHOICES", "no"),
)


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("CUTLASS_OPS_JIT", "0", "CUTLASS_OPS_JIT=0 switches compilation off"),
        ("CUTLASS_OPS_JIT", "maybe", "must be one of 0, 1"),
        ("CUTLASS_OPS_NVCC", "/nowhere/nvcc", "names /nowhere/nvcc"),
        ("CUTLASS_OPS_CACHE_DIR", "relative", "must be an absolute path"),
        ("CUTLASS_OPS_CACHE_SIZE", "much", "CUTLASS_OPS_CACHE_SIZE is 'much'"),
        *((f"CUTLASS_OPS_{name}", value, f", not '{value}'") for name, value in STUMBLES),
    ],
)
def test_doctor_says_what_stands_in_the_way(kit, run, monkeypatch, variable, value, problem):
    monkeypatch.setenv(variable, value)
    code, out, _ = run("doctor")
    assert code == 1
    assert problem in out
    assert variable in out.partition("\nProblems\n")[2]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["locks", "tmp", "failed", "v2"])
@pytest.mark.parametrize("kind", ["a link", "not a folder"])
def test_doctor_says_why_nothing_can_be_built(kit, run, spec_file, tmp_path, name, kind):
    (tmp_path / "store").mkdir(mode=0o700)
    path = tmp_path / "store" / name
    path.symlink_to(tmp_path) if kind == "a link" else path.touch()
    code, out, _ = run("doctor")
    assert code == 1
    assert f"{path} is {kind}. Remove it" in out.partition("\nProblems\n")[2]
    assert "Can compile a kernel: no." in out
    code, _, err = run("build", spec_file(sm80_spec()))
    assert code == 4 or name == "failed"  # which nothing needs that succeeds
    assert name == "failed" or f"{path} is {kind}. Remove it" in err


def test_doctor_leaves_no_trace(kit, run, tmp_path):
    assert run("doctor")[0] == 0
    assert not (tmp_path / "store").exists()


class _Properties:
    def __init__(self, name, major, minor):
        self.name, self.major, self.minor = name, major, minor


@pytest.mark.parametrize(
    ("capability", "says", "code"),
    [
        ((9, 0), "compute capability 9.0: runs kernels for sm_90a", 0),
        ((8, 6), "compute capability 8.6: runs kernels for sm_86", 0),
        ((7, 0), "no kernel of this library runs on it", 1),
    ],
)
def test_doctor_with_a_gpu_and_a_filled_store(kit, run, monkeypatch, spec_file, capability, says, code):
    assert run("build", spec_file(sm80_spec()))[0] == 0
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties("Some GPU", *capability))
    found, out, _ = run("doctor")
    assert found == code
    assert f"Some GPU, {says}" in out or says in out
    assert ": 1 kernel, " in out


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("variables", "remark"),
    [
        ({"CUDA_HOME": "/nowhere"}, "CUDA_HOME is '/nowhere', which is not a folder and is ignored"),
        ({"CUDA_PATH": "/nowhere"}, "CUDA_PATH is '/nowhere', which is not a folder and is ignored"),
        ({"CUDA_HOME": "/"}, "CUDA_HOME is '/', which has no executable bin/nvcc and is ignored"),
        ({"CUDA_HOME": "{kit}"}, "CUDA_HOME is ignored: CUTLASS_OPS_NVCC takes precedence"),
        (
            {"CUDA_HOME": "{kit}", "CUDA_PATH": "{kit}", "CUTLASS_OPS_NVCC": ""},
            "CUDA_PATH is ignored: CUDA_HOME takes precedence",
        ),
        (
            {"CUTLASS_OPS_JITT": "0"},
            "CUTLASS_OPS_JITT is not a variable of this library: did you mean CUTLASS_OPS_JIT?",
        ),
        ({"CUTLASS_OPS_CACHE": "/x"}, "is not a variable of this library: did you mean CUTLASS_OPS_CACHE_DIR?"),
        (
            {"cutlass_ops_jobs": "2"},
            "cutlass_ops_jobs is not a variable of this library: did you mean CUTLASS_OPS_JOBS?",
        ),
        ({"CUTLASS_OPS_XYZ_ABC": "2"}, "CUTLASS_OPS_XYZ_ABC is not a variable of this library: they are CUTLASS_OPS_"),
        ({"CUTLASS_OPS_PROGRESS": ""}, "CUTLASS_OPS_PROGRESS is empty, which counts as unset"),
        ({"XDG_CACHE_HOME": "relative"}, "XDG_CACHE_HOME is 'relative', which is ignored"),
        ({"XDG_CACHE_HOME": "/tmp"}, "XDG_CACHE_HOME is ignored: CUTLASS_OPS_CACHE_DIR takes precedence"),
        ({"NVCC_APPEND_FLAGS": "-G"}, "NVCC_APPEND_FLAGS is ignored: kernels are compiled without it"),
        ({"CUTLASS_OPS_JIT": "0", "CUTLASS_OPS_JOBS": "3"}, "CUTLASS_OPS_JOBS is ignored: with CUTLASS_OPS_JIT=0"),
        (
            {"CUTLASS_OPS_BUNDLE_KEY": "/nowhere.pem"},
            "CUTLASS_OPS_BUNDLE_KEY names '/nowhere.pem', which is not a file",
        ),
    ],
)
def test_doctor_remarks_on_what_does_nothing(kit, run, monkeypatch, variables, remark):
    assert json.loads(run("doctor", "--json")[1])["remarks"] == []
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(kit=kit.nvcc.parent.parent))
    _, out, _ = run("doctor")
    assert remark in out.partition("\nRemarks\n")[2]
    assert any(remark in each for each in json.loads(run("doctor", "--json")[1])["remarks"])


@pytest.mark.slow
def test_doctor_counts_bundles(kit, run, catalogue, tmp_path, monkeypatch):
    assert run("bundle", catalogue, "--out", tmp_path / "a.bundle")[0] == 0
    assert run("clean")[0] == 0
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: _Properties("Some GPU", 8, 0))
    assert run("doctor")[0] == 1
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "a.bundle"))
    code, out, _ = run("doctor")
    assert code == 0
    assert re.search(r"a\.bundle: \d+ kernels for sm_80", out)
    assert "Can compile a kernel: no. Can run one: yes." in out
    monkeypatch.setenv("CUTLASS_OPS_BUNDLES", str(tmp_path / "none"))
    code, out, _ = run("doctor")
    assert code == 1
    assert "none cannot be read" in out
