"""``tune`` and ``explain``."""

import json
import re

import pytest
from signatures import H100, signature

from cutlass_ops.base import env
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.operand.call import call_at
from cutlass_ops.tools.explaining import explain_call
from cutlass_ops.tuner import tuning


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
        (
            ["gemm", "1x1x1", "--dtype", "f128"],
            "'f128' is not an element type of A and B: use bf16, f16, tf32, tf32x3, f64, i8, e4m3 or e5m2",
        ),
        (
            ["gemm", "1x1x1", "--dtype", "f32"],
            "A and B cannot be f32: use bf16, f16, tf32, tf32x3, f64, i8, e4m3 or e5m2",
        ),
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
        failed = {"1x2x3": "it does not end"}
        return tuning.Report(measured, measured=1, known=0, left=1, failed=failed, asked=len(problems))

    monkeypatch.setattr(tuning, "tune", tune)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run(
        *("tune", "gemm", "1,4x2x3", "--dtype", "f16", "--kernels", "5", "--seconds", "9", "--folder", "t", "--again")
    )
    assert code == 1  # one problem is left
    assert "failed: 1x2x3: it does not end" in out
    assert "1 problem measured, 0 known before, 1 left" in out
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
        asked = len(problems) * len(options["dtypes"])
        return tuning.Report(measured=asked, asked=asked)

    monkeypatch.setattr(tuning, "tune", tune)
    assert run("tune", "rmsnorm_gemm", "1x2x3", "--dtype", "fp16", "--dtype", "torch.bfloat16")[0] == 0
    assert run("tune", "layernorm_gemm", "1x2x3")[0] == 0
    assert run("tune", "gemm_residual_rms", "1x2x3", "--dtype", "bf16,f16")[0] == 0
    assert calls == [
        (composed.rms_norm, ["f16", "bf16"], None),
        (composed.layer_norm, ["bf16"], {"column_sum": "f32"}),
        (composed.residual_rms_bf16, ["bf16"], None),
        (composed.residual_rms_f16, ["f16"], None),
    ]


@pytest.mark.parametrize(
    ("options", "groups", "spreads", "op"),
    [
        ([], 64, (), builtin.bias),
        (["--spread", "Zipf", "--spread", "equal"], 64, ("equal", "Zipf"), builtin.bias),
        (["--spread", "one,random"], 64, ("random", "one"), builtin.bias),
        (["--wgrad"], 64, (), builtin.bias),
    ],
)
def test_tune_takes_groups(kit, run, monkeypatch, options, groups, spreads, op):
    calls = []

    def tune(op, problems, **given):
        calls.append((op, given["groups"], given["spreads"], given["wgrad"]))
        return tuning.Report(measured=1, asked=1)

    monkeypatch.setattr(tuning, "tune", tune)
    # Near means of rows are one problem: it is enough if that was measured.
    assert run("tune", "gemm_bias", "298,299x2048x4096", "--groups", "64", *options)[0] == 0
    assert calls == [(op, groups, spreads, "--wgrad" in options)]


def test_explain_of_groups(run):
    code, out, _ = run("explain", "gemm_bias", "32x4096x4096", "--groups", "16", "--device", "H100")
    assert code == 0
    assert "in 16 groups" in out
    assert "chosen for 16 with a mean of 32 rows" in out


def test_explain_says_no_where_nothing_serves(run, tmp_path, monkeypatch):
    (tmp_path / "two.py").write_text(
        "import cutlass_ops as co\n@co.epilogue\ndef two(acc, up: co.Product):\n    return acc * up\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("explain", "two:two", "64x64x64", "64x128x64", "--device", "A100")
    assert code == 1
    assert "NOTHING" in out.upper()


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("explain", ["1x64x64", "--dtype", "tf32"]),
        ("tune", ["1x64x64", "--dtype", "bf16,tf32"]),
        ("bench", ["1x64x64", "--dtype", "tf32"]),
        ("profile", ["1x64x64", "--dtype", "tf32"]),
    ],
)
def test_a_dtype_that_the_op_does_not_take_is_wrong_usage(run, command, arguments):
    code, out, err = run(command, "rmsnorm_gemm", *arguments)
    assert (code, out) == (2, "")
    assert "rmsnorm_gemm does not take tf32: use bf16 or f16" in err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--groups", "0"], "Invalid value for '--groups'"),
        (["--spread", "one"], "--spread needs --groups: say how many groups there are"),
        (["--wgrad"], "--wgrad needs --groups: say how many groups there are"),
        (["--groups", "4", "--spread", "zap"], "'--spread': 'zap' is not a spread of rows: use some of equal, random"),
        (["--groups", "4", "--batches", "4"], "--groups and --batches exclude each other"),
        (["--groups", "4", "--allow-fallback"], "PyTorch serves no groups"),
    ],
)
def test_tune_refuses_groups_that_it_cannot_tune(run, options, why):
    code, out, err = run("tune", "gemm", "1x2x3", *options)
    assert (code, out) == (2, "")
    assert why in err


@pytest.mark.parametrize("folder", ["file", "/dev/null", "/proc", "file/under"])
def test_tune_refuses_a_folder_that_cannot_be_written_before_it_measures(kit, run, monkeypatch, tmp_path, folder):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuning, "Measurer", lambda *_: pytest.fail("something was measured"))
    code, _, err = run("tune", "gemm", "1x2x3", "--folder", tmp_path / folder)
    assert code == 1
    assert "is not a folder" in err or "cannot be written" in err
    monkeypatch.setenv("CUTLASS_OPS_TUNING_DIR", str(tmp_path / folder))
    assert run("tune", "gemm", "1x2x3")[0] == 1
