"""``profile``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_profile import HEALTHY, raw

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def csv(tmp_path):
    path = tmp_path / "counters.csv"
    path.write_text(raw(HEALTHY))
    return path


def test_counters_of_another_machine(kit, run, csv):
    code, out, _ = run("profile", "--csv", csv)
    assert code == 0
    assert "81%" in out
    assert "healthy" in out
    code, out, _ = run("profile", "--csv", csv, "--device", "H200", "--json")
    assert (code, json.loads(out)["chip"]) == (0, "NVIDIA H200")


def test_without_a_gpu(kit, run):
    code, _, err = run("profile", "gemm", "512x512x512")
    assert code == 4
    assert "ncu --csv --page raw" in err


@pytest.mark.parametrize("args", [(), ("--csv", "x.csv", "gemm"), ("--no-ncu", "--no-trace", "gemm", "64x64x64")])
def test_wrong_usage(kit, run, args):
    assert run("profile", *args)[0] == 2


_OP = ("gemm", "64x64x64")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--plot", "x.gif", *_OP), "'--plot': the plot's name must end in .svg or .png, not x.gif"),
        (("--kernels", "gemm(", *_OP), "'--kernels': 'gemm(' is not a regular expression"),
        (("--kernels", f"a{{{'9' * 30}}}", *_OP), "is not a regular expression"),
        (("--csv", "x.csv", "--device", "nothing"), "'nothing' is not a known GPU"),
        (("--device", "H200", *_OP), "--device has no effect without --csv"),
        (("--csv", "x.csv", "--kernels", "gemm"), "--kernels has no effect with --csv"),
        (("--csv", "x.csv", "--no-ncu", "--timeout", "3"), "--no-ncu and --timeout have no effect with --csv"),
        (("--no-ncu", "--kernels", "gemm", *_OP), "--kernels has no effect with --no-ncu"),
        (("--no-ncu", "--plot", "x.svg", *_OP), "--plot has no effect with --no-ncu"),
        (("--dtype", "f16", "train.py"), "--dtype has no effect on a script"),
    ],
)
def test_a_wrong_value_or_one_without_effect_is_wrong_usage(kit, run, args, says):
    code, _, err = run("profile", *args)
    assert (code, says in err) == (2, True), err


def test_a_script_gets_its_own_options(kit, run, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    code, out, err = run("profile", "--launches", "3", script, "--json", "--dtype", "f64")
    assert (code, out) == (4, "")
    assert "--launch-count 3" in err
    assert err.splitlines()[2].endswith(f"{script} --json --dtype f64")
    code, out, err = run("profile", "--json", script, "--", "--json", "")
    assert (code, "error" in json.loads(out)) == (4, True)
    assert err.splitlines()[2].endswith(f"{script} -- --json ''")


def test_only_the_target_is_a_script(kit, run, tmp_path):
    code, out, err = run("profile", "gemm", "64x64x64", "--save", tmp_path / "counters.py", "--json")
    assert (code, "error" in json.loads(out)) == (4, True)
    code, out, err = run("profile", "--save", tmp_path / "counters.py", "gemm", "64x64x64", "--json")
    assert (code, "error" in json.loads(out)) == (4, True)
    code, _, err = run("profile", "--save", "", "train.py")
    assert (code, "an argument is empty" in err) == (2, True)


def test_json_behind_two_dashes_is_no_option(kit, run):
    code, out, _ = run("verify", "--", "--json")
    assert (code, "{" in out) == (5, False)


def test_an_op_has_no_options_of_its_own(kit, run):
    code, out, err = run("profile", "gemm", "512x512x512", "--launches", "3", "--dtype", "f16", "--json")
    assert code == 4
    said = out + err
    assert "--launch-count 3" in said
    assert "gemm 512x512x512 f16" in said
    assert run("profile", "gemm", "512x512x512", "--lunches", "3")[0] == 2
    for wrong in (["gemm"], ["gemm", "1x1x1", "2x2x2"], ["gemmm", "1x1x1"]):
        assert run("profile", *wrong)[0] == 2


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named():
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pathlib import Path\n"
        "from cutlass_ops.tools.profile import plotting\n"
        "plotting.require(Path('r.svg'))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert "pip install 'cutlass_ops[plot]'" in done.stderr
