import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import typer.main
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fake_toolkit import HMMA, FakeToolkit, library, sm80_spec, sm90_spec
from fleet import name_store
from processes import ended
from signatures import H100, signature

from cutlass_ops import __version__
from cutlass_ops.base import env
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.compilation import toolchain
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.run.call import call_at
from cutlass_ops.ship import catalog
from cutlass_ops.tools import cli, commands
from cutlass_ops.tools.explaining import explain_call
from tests.sampling import sampled


@pytest.fixture
def kit(tmp_path, monkeypatch):
    """A machine with a compiler that takes no time, an empty store and no GPU."""
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    kit = FakeToolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(kit.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(kit.host))
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return kit


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command; return its exit code, and what it wrote to standard output and to standard error."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["cutlass-ops", *map(str, args)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return run


@pytest.fixture
def spec_file(tmp_path):
    def write(spec, name="spec.json"):
        path = tmp_path / name
        path.write_text(json.dumps(spec.to_json()))
        return path

    return write


# ---- Where kernels come from --------------------------------------------------------------------------------------


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
    assert "1 kernels, 1 of them fetched, " in run("doctor")[1]


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


# ---- doctor --------------------------------------------------------------------------------------------------------


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


def test_doctor_without_a_compiler(kit, run, monkeypatch, tmp_path):
    monkeypatch.delenv("CUTLASS_OPS_NVCC")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toolchain, "_wheel_bins", lambda: iter(()))
    code, out, _ = run("doctor")
    assert code == 1
    assert "no CUDA compiler" in out
    assert "Can compile a kernel: no. Can run one: no." in out


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("CUTLASS_OPS_JIT", "0", "CUTLASS_OPS_JIT=0 switches compilation off"),
        ("CUTLASS_OPS_JIT", "maybe", "must be one of 0, 1"),
        ("CUTLASS_OPS_NVCC", "/nowhere/nvcc", "names /nowhere/nvcc"),
        ("CUTLASS_OPS_CACHE_DIR", "relative", "must be an absolute path"),
        ("CUTLASS_OPS_CACHE_SIZE", "much", "CUTLASS_OPS_CACHE_SIZE is 'much'"),
    ],
)
def test_doctor_says_what_stands_in_the_way(kit, run, monkeypatch, variable, value, problem):
    monkeypatch.setenv(variable, value)
    code, out, _ = run("doctor")
    assert code == 1
    assert problem in out


def test_doctor_refuses_a_store_that_others_may_write(kit, run, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(0o777)
    code, out, _ = run("doctor")
    assert code == 1
    assert "unusable" in out


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
    assert "1 kernels" in out


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
        (
            {"CUTLASS_OPS_XYZ_ABC": "2"},
            "CUTLASS_OPS_XYZ_ABC is not a variable of this library: they are CUTLASS_OPS_",
        ),
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


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("CUTLASS_OPS_JOBS", "many"),
        ("CUTLASS_OPS_PROGRESS", "2"),
        ("CUTLASS_OPS_TUNING_DIR", "relative"),
        ("CUTLASS_OPS_BUNDLE_KEY", "relative"),
    ],
)
def test_doctor_says_which_values_a_call_would_stumble_over(kit, run, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    code, out, _ = run("doctor")
    assert code == 1
    assert re.search(rf"{variable} must be .*, not '{value}'", out.partition("\nProblems\n")[2])


# ---- generate ------------------------------------------------------------------------------------------------------


def test_generate_writes_once(kit, run, tmp_path):
    out_dir = tmp_path / "out"
    assert run("generate", "--check", "--out", out_dir)[0] == 1
    assert not out_dir.exists()
    code, out, _ = run("generate", "--out", out_dir)
    assert code == 0
    assert "updated: sm_90a/gemm_bias_relu_bf16.cu" in out
    assert run("generate", "--check", "--out", out_dir)[0] == 0
    code, out, _ = run("generate", "--out", out_dir, "--json")
    assert json.loads(out) == {"folder": str(out_dir), "changed": []}


# ---- build, list, inspect, clean -----------------------------------------------------------------------------------


def test_build_compiles_once_and_reports(kit, run, spec_file, tmp_path):
    code, out, _ = run("build", spec_file(sm80_spec()))
    assert code == 0
    assert sm80_spec().slug in out
    assert str(tmp_path / "store") in out
    assert "2 HMMA" in out
    assert "168 registers, 8 bytes of stack, spills: 4 bytes stored, 12 loaded" in out
    code, out, _ = run("build", spec_file(sm80_spec()), "--json")
    assert json.loads(out)[0]["sass"]["HMMA"] == 2
    assert kit.compilations == 1


def test_list_inspect_and_clean(kit, run, spec_file):
    specs = [spec_file(sm80_spec(stages), f"{stages}.json") for stages in (3, 4)]
    assert run("build", *specs)[0] == 0
    rows = json.loads(run("list", "--json")[1])
    assert {row["slug"] for row in rows} == {sm80_spec(3).slug, sm80_spec(4).slug}
    assert re.search(r"2 kernels$", run("list")[1].strip())
    for name in (rows[0]["folder"], rows[0]["folder"] + "/kernel.so", rows[0]["key"][:12], rows[0]["slug"]):
        code, out, _ = run("inspect", name, "--json")
        assert code == 0
        assert json.loads(out)[0]["key"] == rows[0]["key"]
    code, out, err = run("inspect", "gemm_")
    assert code == 1
    assert "matches 2 kernels" in err
    assert json.loads(run("clean", "--json")[1])["removed"] == 2
    assert run("list")[1].strip().endswith("0 kernels")
    code, _, err = run("inspect", "gemm_")
    assert code == 4
    assert "starts with it" in err


def test_clean_what_is_old_or_too_much(kit, run, spec_file, tmp_path):
    specs = [spec_file(sm80_spec(stages), f"{stages}.json") for stages in (3, 4)]
    assert run("build", *specs)[0] == 0
    rows = json.loads(run("list", "--json")[1])
    os.utime(rows[0]["folder"], (1000, 1000))
    assert json.loads(run("clean", "--older-than", "30d", "--json")[1])["removed"] == 1
    assert json.loads(run("list", "--json")[1]) == rows[1:]
    assert json.loads(run("clean", "--older-than", "30d", "--keep-size", "1MB", "--json")[1])["removed"] == 0
    assert json.loads(run("clean", "--keep-size", "1B", "--json")[1])["removed"] == 1
    for option in ("--older-than", "--keep-size"):
        code, _, err = run("clean", option, "much")
        assert code == 2
        assert f"{option} is 'much'" in " ".join(err.split())


def test_a_kernel_declared_by_another_version_is_listed(kit, run, spec_file, monkeypatch):
    assert run("build", spec_file(sm80_spec()))[0] == 0
    monkeypatch.setattr(commands.KernelSpec, "from_json", _refuse)
    code, out, _ = run("list")
    assert code == 0
    assert "declared by another version" in out


def _refuse(*_):
    raise commands.ConfigError("unknown field")


# ---- Errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "spec.json: it is not valid JSON: Expecting value"),
        ("[]", "spec.json: a kernel spec must be a JSON object"),
        ("{}", "spec.json: a kernel spec must have the fields"),
        (None, "spec.json cannot be used: No such file"),
    ],
)
def test_a_file_that_is_no_spec(kit, run, tmp_path, text, says):
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    code, out, err = run("build", path)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert says in err


def test_a_kernel_without_tensor_cores_is_an_error(kit, run, spec_file):
    kit.makes(library(HMMA))
    code, _, err = run("build", spec_file(sm90_spec()))
    assert code == 3
    assert "no HGMMA" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["build"], "Missing argument"),
        (["doctor", "--wrong"], "No such option"),
        (["build", "x.json", "--jobs", "0"], "--jobs"),
    ],
)
def test_wrong_usage(run, args, says):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert err
    code, out, _ = run(*args, "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["kind"] == "UsageError"
    assert says in error["message"]


_MODULES = """
import contextlib, io, json, sys
sys.argv = ["cutlass-ops"]
from cutlass_ops.tools import cli
for arguments in {every}:
    sys.argv = ["cutlass-ops", *arguments]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
            cli.main()
    except SystemExit as exc:
        loaded = sorted({{"torch", "numpy", "tvm_ffi", "jinja2", "rich"}} & set(sys.modules))
        print(json.dumps([arguments, exc.code, bool(out.getvalue()), loaded]))
"""


def test_help_version_and_wrong_usage_do_not_wait_for_pytorch():
    commands = sorted(typer.main.get_command(cli.app).commands)
    fine = [["--version"], ["--help"], *([command, "--help"] for command in commands)]
    wrong = [["explain", "gemm", "512x4096"], ["nothing"]]
    script = _MODULES.format(every=[*fine, *wrong])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [[each, 0, True, []] for each in fine] + [[each, 2, False, []] for each in wrong]


def test_the_module_is_a_command_too():
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cutlass_ops", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"cutlass_ops {__version__}\n"
    assert not re.search(r"\| +(torch|numpy)$", done.stderr, re.MULTILINE)


def test_help_names_what_a_run_takes_by_default(run):
    # The numbers are written there as well, since they lie in a module that imports PyTorch.
    out = " ".join(run("tune", "--help")[1].split())
    for name in ("kernels", "candidates", "rounds"):
        assert re.search(rf"--{name} .*?Default: {getattr(commands.Effort(), name)}\.", out)


def test_version(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, f"cutlass_ops {__version__}\n")


def test_a_mistake_of_this_library_is_json_too(kit, monkeypatch, capsys):
    def fail():
        raise RuntimeError("a mistake")

    monkeypatch.setattr(commands, "diagnose", fail)
    monkeypatch.setattr(sys, "argv", ["cutlass-ops", "doctor", "--json"])
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main()
    assert json.loads(capsys.readouterr().out)["error"] == {"kind": "RuntimeError", "message": "a mistake"}


@pytest.mark.parametrize(
    "command",
    [["list"], *(pytest.param(slow, marks=pytest.mark.slow) for slow in (["doctor"], ["doctor", "--json"]))],
)
def test_a_full_disk_behind_standard_output(kit, command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cutlass_ops", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_help_names_the_commands(run):
    code, out, _ = run("--help")
    assert code == 0
    for command in ("doctor", "generate", "build", "bundle", "verify", "list", "inspect", "clean", "tune", "explain"):
        assert command in out
    assert "cmakedir" in out


def test_the_catalogue_that_ships_is_generated_by_default(kit, run):
    code, out, _ = run("generate", "--check", "--json")
    assert json.loads(out)["folder"].endswith("generated")
    assert code == bool(catalog.stale(cli.resources.generated()))


# ---- tune and explain ----------------------------------------------------------------------------------------------


def test_explain_reads_every_combination_of_extents(kit, run):
    code, out, _ = run("explain", "gemm_bias_relu", "1,512x4096x4096,1024", "64x64x64")
    assert code == 0
    assert "no CUDA device here: explained for NVIDIA H100 80GB HBM3" in out
    assert re.findall(r"M=(\d+) N=(\d+) K=(\d+)", out) == [
        *(("1", "4096", "4096"), ("1", "4096", "1024"), ("512", "4096", "4096"), ("512", "4096", "1024")),
        ("64", "64", "64"),
    ]


def test_explain_says_first_what_serves_how_long_it_takes_and_why(kit, run):
    code, out, _ = run("explain", "gemm_bias_relu", "512X4096X4096", "--dtype", "torch.bfloat16", "--device", "h100")
    assert code == 0
    found = explain_call(
        "gemm_bias_relu", call_at(builtin.bias_relu.graph, Problem(512, 4096, 4096), "bf16", "row", "col"), H100
    )
    assert out == f"{found}\n"
    assert out.startswith(
        f"gemm_bias_relu, M=512 N=4096 K=4096, on {H100.name} is served by {found.served_by}, "
        f"expected to take {found.microseconds:.1f} us: measured fastest at exactly this shape"
    )
    (as_json,) = json.loads(run("explain", "gemm_bias_relu", "M=512", "N=4096", "K=4096", "--json")[1])
    assert as_json == json.loads(json.dumps(found.to_json()))
    assert (as_json["device"], as_json["verdict"]) == (H100.name, found.verdict)


@pytest.mark.parametrize(("device", "says"), [("H200", "on NVIDIA H200 is"), ("sm_80", "on NVIDIA A100-SXM4-80GB is")])
def test_explain_as_another_gpu_would(kit, run, device, says):
    code, out, _ = run("explain", "gemm", "64x512x512", "--device", device)
    assert code == 0
    assert says in out.splitlines()[0]
    assert "no CUDA device here" not in out


@pytest.mark.parametrize(
    ("op", "dtype", "served_by"),
    [
        ("rmsnorm_gemm", "bf16", "gemm_mean_square_of_a_eps_rsqrt_bf16row_bf16col_bf16row_"),
        ("layernorm_gemm", "fp16", "gemm_mean_of_a_column_sum_"),
        ("gemm_residual_rms", "fp16", "gemm_residual_f16_row_sum_square_f16row_f16col_f16row_"),
        ("gemm_swiglu", "bf16", "two GEMMs"),
    ],
)
def test_explain_norms_by_name(kit, run, op, dtype, served_by):
    code, out, _ = run("explain", op, "64x512x512", "--dtype", dtype, "--device", "sm_80", "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert found["op"] == op
    assert found["served_by"].startswith(served_by)
    assert found["microseconds"] > 0
    assert len(found["parts"]) == (2 if served_by == "two GEMMs" else 0)


def test_explain_as_json_of_a_users_epilogue(kit, run, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        'import cutlass_ops as co\n\n@co.epilogue\ndef twice(acc):\n    """D = 2 A @ B."""\n    return acc * 2\n'
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("explain", "mine:twice", "64x128x256", "--dtype", "f16", "--b", "row", "--json")
    assert code == 0
    (found,) = json.loads(out)
    assert found["problem"] == [64, 128, 256]
    assert found["contract"]["a, b"].startswith("f16.row and f16.row")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["gemm_bias_rule", "1x1x1"], "'gemm_bias_rule' is not the name of an op: did you mean gemm_bias_relu"),
        (["gemm", "1x1"], "'1x1' is not a problem size: it has 2 extents, not 3. Give MxNxK"),
        (["gemm", "1x0x1"], "is not a problem size"),
        (["gemm", "1xax1"], "'a' is not a positive integer"),
        (["gemm", "9999999999x9999999999x9999999999"], "more than"),
        (["gemm", "1x1x1", "--b", "diagonal"], "'diagonal' is not a major: use row or col"),
        (["gemm", "1x1x1", "--dtype", "f64"], "'f64' is not an element type of A and B: use bf16, f16, e4m3 or e5m2"),
        (["gemm", "1x1x1", "--dtype", "f32"], "A and B cannot be f32: use bf16, f16, e4m3 or e5m2"),
        (["gemm", "1x1x1", "--device", "sm_75"], "'sm_75' is not a known GPU: use sm_80, sm_86"),
    ],
)
def test_explain_refuses_what_it_cannot_read(run, args, why):
    code, out, err = run("explain", *args)
    assert (code, out) == (2, "")
    assert why in err
    error = json.loads(run("explain", *args, "--json")[1])["error"]
    assert error["kind"] == "UsageError"
    assert why in error["message"]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["no_such_module:f", "1x1x1"], "cannot be imported"),
        (["json:dumps", "1x1x1"], "must be decorated"),
    ],
)
def test_explain_refuses_an_import_path_that_leads_to_no_epilogue(kit, run, args, why):
    code, _, err = run("explain", *args)
    assert code == 1
    assert why in err
    assert err.startswith("error: ")


def test_tune_needs_a_device(kit, run):
    code, _, err = run("tune", "gemm_bias_relu", "512x4096x4096")
    assert code == 4
    assert "tune on a machine with one" in err


def test_tune_passes_on_what_it_was_told_and_says_what_came_of_it(kit, run, monkeypatch, tmp_path):
    calls = []
    config = policies.policy(signature(), H100).kernels[0]
    found = Table(H100.name, 132, signature(), (Point(Problem(1, 2, 3), "2026-01-01", (Measured(config, 1.0, 0.0),)),))

    def tune(op, problems, **options):
        calls.append((op, problems, options))
        measured = {found.signature: found}
        return commands.tuning.Report(measured, measured=1, known=0, left=1, failed={"1x2x3": "it does not end"})

    monkeypatch.setattr(commands.tuning, "tune", tune)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(
        *("tune", "gemm", "1,4x2x3", "--dtype", "f16", "--kernels", "5", "--seconds", "9", "--folder", "t", "--again")
    )
    assert code == 1  # one problem is left
    assert "failed: 1x2x3: it does not end" in out
    assert "1 problems measured, 0 known before, 1 left" in out
    assert f"table: {tmp_path}/t/nvidia-h100" in out
    ((op, problems, options),) = calls
    assert op is builtin.identity
    assert problems == [Problem(1, 2, 3), Problem(4, 2, 3)]
    assert (options["dtypes"], options["again"], options["folder"]) == (["f16"], True, tmp_path / "t")
    assert (options["effort"].kernels, options["effort"].seconds) == (5, 9.0)
    code, out, _ = run("tune", "gemm", "1x2x3", "--json")
    assert code == 0
    (file,) = json.loads(out)["tables"]
    assert file == str(tables.path_of(env.tuning_dir(), found.device, found.signature))
    assert json.loads(out) == {
        "measured": 1, "known": 0, "left": 1, "tables": [file], "failed": {"1x2x3": "it does not end"}
    }  # fmt: skip


def test_tune_takes_norms_by_name_and_types_as_people_write_them(kit, run, monkeypatch):
    calls = []

    def tune(op, problems, **options):
        calls.append((op, options["dtypes"], options["input_dtypes"]))
        return commands.tuning.Report(measured=len(problems) * len(options["dtypes"]))

    monkeypatch.setattr(commands.tuning, "tune", tune)
    assert run("tune", "rmsnorm_gemm", "1x2x3", "--dtype", "fp16", "--dtype", "torch.bfloat16")[0] == 0
    assert run("tune", "layernorm_gemm", "1x2x3")[0] == 0
    assert run("tune", "gemm_residual_rms", "1x2x3", "--dtype", "bf16,f16")[0] == 0
    assert calls == [
        (builtin.rms_norm, ["f16", "bf16"], None),
        (builtin.layer_norm, ["bf16"], {"column_sum": "f32"}),
        (builtin.residual_rms_bf16, ["bf16"], None),
        (builtin.residual_rms_f16, ["f16"], None),
    ]


@pytest.mark.parametrize("folder", ["file", "/dev/null", "/proc", "file/under"])
def test_tune_refuses_a_folder_that_cannot_be_written_before_it_measures(kit, run, monkeypatch, tmp_path, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(commands.tuning, "Measurer", lambda *_: pytest.fail("something was measured"))
    code, _, err = run("tune", "gemm", "1x2x3", "--folder", tmp_path / folder)
    assert code == 1
    assert "is not a folder" in err or "cannot be written" in err
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path / folder))
    assert run("tune", "gemm", "1x2x3")[0] == 1


# ---- Catalogues and bundles ----------------------------------------------------------------------------------------

CATALOGUE = """
format = 1
[[kernels]]
ops = ["gemm_bias_relu", "gemm"]
archs = ["sm_80"]
shapes = ["16,512x4096x4096"]
"""


@pytest.fixture
def catalogue(tmp_path):
    (tmp_path / "catalogue.toml").write_text(CATALOGUE)
    return tmp_path / "catalogue.toml"


def test_from_a_catalogue_to_a_verified_bundle(kit, run, catalogue, tmp_path):
    code, out, _ = run("generate", catalogue, "--out", tmp_path / "sources")
    assert code == 0
    sources = list((tmp_path / "sources").rglob("*.cu"))
    assert all("CUTLASS_OPS_EXPORT" in path.read_text() for path in sources)
    code, out, _ = run("build", catalogue, "--json")
    assert code == 0
    assert len(json.loads(out)) == len(sources) == kit.compilations
    target = tmp_path / "kernels.bundle"
    code, out, _ = run("bundle", catalogue, "--out", target, "--json")
    assert code == 0
    about = json.loads(out)
    assert (about["kernels"], about["targets"], about["signed"]) == (len(sources), ["sm_80"], False)
    assert about["bytes"] == target.stat().st_size
    assert 0 < about["seconds"] < 60
    assert kit.compilations == len(sources)
    code, out, _ = run("verify", target)
    assert code == 0
    assert f"{len(sources)} kernels for sm_80 match the manifest; no signature was required" in out
    code, out, _ = run("list", "--bundle", target, "--json")
    rows = json.loads(out)
    assert len(rows) == len(sources)
    code, out, _ = run("inspect", rows[0]["slug"], "--bundle", target)
    assert code == 0
    assert f"kernels/{rows[0]['key']}.so" in out
    assert "2 HMMA" in out


def test_a_key_in_the_environment_holds_for_every_command(kit, run, catalogue, tmp_path, monkeypatch):
    """No command loads, lists or approves of a bundle that the key did not sign."""
    private, public = write_keys(tmp_path, "mine", Ed25519PrivateKey.generate())
    unsigned, signed = tmp_path / "unsigned.bundle", tmp_path / "signed.bundle"
    assert run("bundle", catalogue, "--out", unsigned)[0] == 0
    assert run("bundle", catalogue, "--out", signed, "--sign", private)[0] == 0
    monkeypatch.setattr(
        "cutlass_ops.artifacts.loader.load", lambda artifact: pytest.fail(f"{artifact.where} was loaded")
    )
    key = json.loads(run("list", "--bundle", unsigned, "--json")[1])[0]["key"]
    commands = (("list", "--bundle", unsigned), ("inspect", key, "--bundle", unsigned), ("verify", unsigned))
    for command in commands:
        code, out, err = run(*command, "--key", public)
        assert (code, "is not signed" in out + err) == (5, True)
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", str(public))
    for command in commands:
        code, out, err = run(*command)
        assert (code, "is not signed" in out + err) == (5, True)
    assert run("list", "--bundle", signed)[0] == 0
    assert f"signed by {public}" in run("verify", signed)[1]
    for command in (("list",), ("inspect", tmp_path)):
        code, _, err = run(*command, "--key", public)
        assert (code, "kernels in the store are not signed" in err) == (2, True)


def test_several_keys_and_a_least_version_hold_for_every_command(kit, run, catalogue, tmp_path, monkeypatch):
    (private, public), (_, other) = (write_keys(tmp_path, n, Ed25519PrivateKey.generate()) for n in ("mine", "other"))
    target = tmp_path / "kernels.bundle"
    catalogue.write_text(f"version = 3\n{CATALOGUE}")
    code, out, _ = run("bundle", catalogue, "--out", target, "--sign", private, "--json")
    assert (code, json.loads(out)["version"]) == (0, 3)
    key = json.loads(run("list", "--bundle", target, "--json")[1])[0]["key"]
    keys = ("--key", other, "--key", public)
    commands = (("list", "--bundle", target), ("inspect", key, "--bundle", target), ("verify", target))
    for command in commands:
        assert run(*command, *keys, "--minimum-version", 3)[0] == 0
        for wrong, why in (
            ((*keys, "--minimum-version", 4), "its version is 3"),
            (("--key", other), "not from the key"),
        ):
            code, out, err = run(*command, *wrong)
            assert (code, why in out + err) == (5, True)
        code, _, err = run(*command, "--key", "")
        assert (code, "not a regular file" in err) == (1, True)
        code, _, err = run(*command, "--minimum-version", 0)
        assert (code, "minimum_version must be an integer from 1" in err) == (1, True)
        for name, value, why in (("KEY", "", "has an empty path"), ("VERSION", "", "must be a positive integer")):
            with monkeypatch.context() as patch:
                patch.setenv(f"CUTLASS_OPS_BUNDLE_{name}", value)
                code, _, err = run(*command)
                assert (code, why in err) == (1, True)
    assert f"version 3: 4 kernels for sm_80 match the manifest; signed by {public}" in run("verify", target, *keys)[1]
    verdict = json.loads(run("verify", target, *keys, "--json")[1])
    assert (verdict["signed"], verdict["signed_by"], verdict["version"]) == (True, str(public), 3)
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_KEY", f"{other}:{public}")
    monkeypatch.setenv("CUTLASS_OPS_BUNDLE_VERSION", "4")
    for command in commands:
        code, out, err = run(*command)
        assert (code, "its version is 3" in out + err) == (5, True)
    for command in (("list",), ("inspect", tmp_path)):
        code, _, err = run(*command, "--minimum-version", 3)
        assert (code, "kernels in the store have no version" in " ".join(err.split())) == (2, True)


def test_an_executor_of_the_command_line(kit, run, catalogue):
    code, out, _ = run("build", catalogue, "--executor", "processes:2", "--json")
    assert code == 0
    assert len(json.loads(out)) == kit.compilations > 1


def test_bundle_says_what_it_made_and_makes_a_wheel(kit, run, catalogue, tmp_path):
    code, out, _ = run("bundle", catalogue, "--out", tmp_path / "a.bundle", "--wheel", "my-kernels")
    assert code == 0
    assert re.search(
        r"a\.bundle: \d+ kernels for sm_80, [\d,]+ bytes of libraries, the largest [\d,]+, [\d,]+ in all; not signed",
        out,
    )
    (wheel,) = tmp_path.glob("my_kernels-*.whl")
    assert f"wheel: {wheel}" in out
    code, _, err = run("bundle", catalogue, "--folder", "--wheel", "x")
    assert code == 2
    assert "exclude each other" in err


def test_a_folder(kit, run, catalogue, tmp_path):
    assert run("bundle", catalogue, "--folder", "--out", tmp_path / "a")[0] == 0
    assert run("verify", tmp_path / "a")[0] == 0
    code, _, err = run("bundle", catalogue, "--folder", "--out", tmp_path / "a")
    assert code == 1
    assert "already exists" in err


def test_what_is_wrong_with_a_bundle_is_exit_code_5(kit, run, catalogue, tmp_path):
    target = tmp_path / "a.bundle"
    assert run("bundle", catalogue, "--out", target)[0] == 0
    data = bytearray(target.read_bytes())
    data[data.index(b"\x7fELF") + 100] ^= 1
    target.write_bytes(data)
    code, out, _ = run("verify", target)
    assert code == 5
    assert re.search(r"wrong: kernels/.*its SHA-256 differs", out)
    code, out, _ = run("verify", target, "--json")
    assert code == 5
    assert len(json.loads(out)["problems"]) == 1
    code, _, err = run("list", "--bundle", tmp_path / "none")
    assert code == 5
    assert "cannot be read" in err


@pytest.mark.parametrize(
    ("args", "code", "kind"),
    [
        (["bundle", "none.toml"], 1, "FileNotFoundError"),
        (["bundle", "none.py"], 1, "FileNotFoundError"),
        (["bundle", "json:dumps"], 1, "ConfigError"),
        (["inspect", "none"], 4, "LoadError"),
        (["tune", "gemm", "1x1x1"], 4, "NoDeviceError"),
        (["build", "catalogue.toml", "--executor", "threads"], 2, "UsageError"),
        (["bundle", "none"], 1, "ConfigError"),
        (["bundle", "--out", "/dev/null/a"], 1, "ValueError"),
        (["bundle", "--wheel", "x", "--folder"], 2, "UsageError"),
        (["bundle", "--wheel", "no/name"], 2, "UsageError"),
        (["bundle", "--wheel", "x", "--wheel-version", "one"], 2, "UsageError"),
        (["bundle", "--wheel-version", "1.0"], 2, "UsageError"),
        (["bundle", "--out", "."], 1, "ValueError"),
        (["bundle", "--folder", "--out", "."], 1, "ValueError"),
        (["bundle", "--sign", "none.pem"], 1, "FileNotFoundError"),
        (["bundle", "--sign", "catalogue.toml"], 1, "ValueError"),
        (["verify", "none", "--key", "none.pem"], 5, None),
        (["generate", "catalogue.toml"], 2, "UsageError"),
        (["list", "--bundle", "none"], 5, "BundleError"),
        (["build", "catalogue.toml"], 4, "ToolchainError"),
    ],
)
def test_errors_as_json(kit, run, catalogue, monkeypatch, tmp_path, args, code, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUTLASS_OPS_NVCC", "/nowhere/nvcc")
    found, out, err = run(*args, "--json")
    assert found == code
    if kind is None:  # the answer itself says what is wrong
        assert "cannot be read" in json.loads(out)["problems"][0]
        return
    assert json.loads(out)["error"]["kind"] == kind
    assert json.loads(out)["error"]["message"] in err


def test_a_kernel_that_cannot_be_compiled_is_exit_code_3(kit, run, catalogue, tmp_path):
    kit.does("echo 'kernel.cu(1): error: no'; exit 1")
    code, out, _ = run("bundle", catalogue, "--out", tmp_path / "a.bundle", "--json")
    assert code == 3
    assert json.loads(out)["error"]["kind"] == "CompileError"
    assert not (tmp_path / "a.bundle").exists()


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_the_compilers_and_leaves_nothing_half_written(kit, catalogue, tmp_path, number):
    kit.does('echo $$ > "$here/pid.new"; mv "$here/pid.new" "$here/pid"; exec sleep 600')
    command = [sys.executable, "-m", "cutlass_ops", "bundle", catalogue, "--json", "--out", tmp_path / "a.bundle"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (kit.root / "pid").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert json.loads(out)["error"]["kind"] == "KeyboardInterrupt"
    assert "interrupted: finished kernels stay in the store; nothing is left half-written" in err
    left = [p.name for p in tmp_path.iterdir()]
    assert sorted(left) == ["catalogue.toml", "store", "toolkit"]
    assert not list((tmp_path / "store").rglob("kernel.so"))
    assert not list((tmp_path / "store" / "tmp").iterdir())
    assert ended(int((kit.root / "pid").read_text()))


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


# ---- Arguments of every kind ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--out", "folder"], "folder is a folder: name a file in it"),
        (["--out", "file/under"], "file is not a folder"),
        (["--out", "/dev/null"], "/dev/null is a device"),
        (["--out", "/proc/a.bundle"], "may not create files in /proc"),
        (["--out", "/proc/a/b.bundle"], "may not create files in /proc"),
        (["--out", "n" * 250], "its name is too long"),
        (["--out", "pipe"], "is a device, a pipe or a socket"),
        (["--folder", "--out", "folder"], "already exists"),
        (["--folder", "--out", "file"], "already exists"),
        (["--folder", "--out", "/proc/a"], "may not create files in /proc"),
        (["--wheel", "name", "--wheel-version", "1.0"], "whl is a folder"),
        (["--sign", "folder"], "is not a regular file"),
        (["--sign", "/dev/zero"], "is not a regular file"),
        (["--sign", "file"], "has no usable private key"),
    ],
)
def test_bundle_compiles_nothing_for_a_place_that_cannot_be_written(
    kit, run, catalogue, tmp_path, monkeypatch, options, why
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    (tmp_path / "name-1.0-py3-none-linux_x86_64.whl").mkdir()
    os.mkfifo(tmp_path / "pipe")
    code, out, err = run("bundle", catalogue, *options)
    assert (code, out) == (1, "")
    assert why in err
    assert kit.compilations == 0


@pytest.mark.parametrize("out", ["file", "/dev/null", "/proc", "file/under"])
def test_generate_renders_nothing_for_a_place_that_cannot_be_written(kit, run, catalogue, tmp_path, monkeypatch, out):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(catalog, "write", lambda *_: pytest.fail("something was rendered"))
    code, _, err = run("generate", catalogue, "--out", tmp_path / out)
    assert code == 1
    assert "is not a folder" in err or "cannot be written" in err


_GOOD = {
    "build": ["catalogue.toml"],
    "bundle": ["catalogue.toml"],
    "explain": ["gemm", "1x64x64"],
    "inspect": ["none"],
    "tune": ["gemm", "1x64x64"],
    "verify": ["none"],
    "generate": ["catalogue.toml", "--out", "sources"],
}
_ODD = (
    *("", " ", "-", "-1", "0", "1.5", "nan", "inf", "1e999", "9" * 40, "x" * 300, "é×", "\udcff", "a:b", "[", "{}"),
    *("./no/such", "/dev/null", "."),
)


def _cases():
    for name, command in typer.main.get_command(cli.app).commands.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        yield from ((name, str(at)) for at in range(len(arguments)))
        yield from ((name, p.opts[0]) for p in command.params if p not in arguments and not p.is_flag)


@pytest.mark.parametrize("place", sampled(4, _cases()), ids="-".join)
def test_no_value_of_any_argument_ends_in_a_traceback(kit, run, spec_file, tmp_path, monkeypatch, place):
    """Each ends with one of the documented codes and one message; anything that is raised fails this test."""
    monkeypatch.chdir(tmp_path)
    spec_file(sm80_spec())
    (tmp_path / "catalogue.toml").write_text('format = 1\nspecs = ["spec.json"]\n')
    command, at = place
    for value in _ODD:
        arguments = list(_GOOD.get(command, []))
        if at.isdigit():
            arguments[int(at) : int(at) + 1] = [value]
        else:
            arguments += [at, value]
        code, out, err = run(command, *arguments)
        assert code in (0, 1, 2, 4, 5), (arguments, code)
        assert code != 2 or "Usage: " in err or err.startswith("Error: "), (arguments, err)
        assert code == 0 or out or err, arguments
        assert "Traceback" not in err
        assert not any(message in err for message in ("is no ", "no problem")), err


def test_what_is_missing_or_too_much_is_wrong_usage(run):
    commands_ = typer.main.get_command(cli.app).commands
    for command in commands_:
        assert run(command, "--no-such-option")[0] == 2
        assert (
            run(
                command, *(["x"] * 3 if command in ("doctor", "list", "clean", "cmakedir", "verify") else []), "--jobs"
            )[0]
            == 2
        )
    for command in ("build", "verify", "tune", "explain", "inspect"):
        assert run(command)[0] == 2
    assert run("tune", "gemm")[0] == run("explain", "gemm")[0] == 2
    assert run("tune", "gemm", "1x1x1", "--allow-fallback", "--deterministic")[0] == 2
    assert run("list", "--key", "key.pem")[0] == 2
