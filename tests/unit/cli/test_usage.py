"""Wrong usage, errors, help, and arguments of every kind."""

import json
import logging
import subprocess
import sys

import pytest
import typer.main
from fake_toolkit import sm80_spec

from cutlass_ops import __version__
from cutlass_ops.ship import catalog
from cutlass_ops.tools import cli
from tests.sampling import sampled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "spec.json: it is not valid JSON: Expecting value"),
        ("[]", "spec.json: a kernel spec must be a JSON object"),
        ("{}", "spec.json: a kernel spec must have the fields a, b, config, d, epilogue, inputs, outputs, target: it"),
        ('{"z": 1}', "it lacks a, b, config, d, epilogue, inputs, outputs, target and it may not have 'z'"),
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


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("ep.py", "x = 1", "ep.py defines no `catalogue`: set catalogue = Catalogue(...) of cutlass_ops.ship.shipping"),
        ("ep.py", "catalogue = 1", "`catalogue` in ep.py must be a cutlass_ops.ship.shipping.Catalogue, not int"),
        ("notes", "{}", "notes is a file of another kind: use a TOML file, a Python file, or MODULE:NAME"),
        (".", None, ". is a folder: use a TOML file, a Python file, or MODULE:NAME of a catalogue; `build` and"),
        ("nothing", None, "unknown name 'nothing': use a TOML file, a Python file"),
    ],
)
def test_what_is_neither_a_declaration_nor_a_catalogue(kit, run, tmp_path, monkeypatch, name, text, says):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = run("build", name)
    assert (code, says in err) == (1, True), err


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"identity": 1, "files": {}}'])
def test_a_corrupt_manifest_is_named_in_words(kit, run, spec_file, tmp_path, caplog, text):
    assert run("build", spec_file(sm80_spec()))[0] == 0
    (manifest,) = (tmp_path / "store").glob("v2/*/*/manifest.json")
    manifest.write_text(text)
    code, out, _ = run("list")
    assert (code, ": 0 kernels" in out) == (0, True)
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{manifest} is not the manifest of a kernel: " in said
    assert "Error(" not in said


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nothing"], "No such command 'nothing'"),
        (["build"], "Missing argument"),
        (["doctor", "--wrong"], "No such option"),
        (["build", "x.json", "--jobs", "0"], "--jobs"),
        (["explain", "gemm", "64x64x64", "--groups", "4", "--dtype", "f64"], "groups do not take f64"),
        (["tune", "rmsnorm_gemm", "64x64x64", "--groups", "4"], "has no groups"),
        (["contract", "64x64x64", "--a", "f16.row.align0"], "aligned to 0 elements: use a power of two"),
        (["contract", "64x64x64", "--b", "f16.align12"], "aligned to 12 elements"),
        (["contract", "64x64x64", "--block", "64x64x64", "--num-stages", "99999999"], "--num-stages"),
        # Variables of a shell that are not set.
        (["generate", "--out", ""], "an argument is empty"),
        (["verify", ""], "an argument is empty"),
        (["profile", "gemm"], "give M, N and K of gemm, such as"),
        (["list", "--bundle", ""], "an argument is empty"),
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


@pytest.mark.slow
def test_help_version_and_wrong_usage_do_not_wait_for_pytorch():
    commands = sorted(typer.main.get_command(cli.app).commands)
    fine = [["--version"], ["--help"], *([command, "--help"] for command in commands)]
    wrong = [["explain", "gemm", "512x4096"], ["nothing"]]
    script = _MODULES.format(every=[*fine, *wrong])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found == [[each, 0, True, []] for each in fine] + [[each, 2, False, []] for each in wrong]


def test_version(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, f"cutlass_ops {__version__}\n")


def test_a_mistake_of_this_library_is_json_too(kit, monkeypatch, capsys):
    def fail():
        raise RuntimeError("a mistake")

    monkeypatch.setattr("cutlass_ops.tools.doctor.diagnose", fail)
    monkeypatch.setattr(sys, "argv", ["cutlass-ops", "doctor", "--json"])
    with pytest.raises(RuntimeError, match="a mistake"):
        cli.main()
    assert json.loads(capsys.readouterr().out)["error"] == {"kind": "RuntimeError", "message": "a mistake"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["list"], *(pytest.param(slow, marks=pytest.mark.slow) for slow in (["doctor"], ["doctor", "--json"]))]
)
def test_a_full_disk_behind_standard_output(kit, command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cutlass_ops", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "error: [Errno 28] No space left on device\n"


@pytest.mark.slow
def test_json_is_alone_on_standard_output_if_a_module_prints(tmp_path):
    (tmp_path / "epilogues.py").write_text(
        "import cutlass_ops as co\nprint('hello')\n@co.epilogue\ndef mine(acc, bias: co.Row):\n    return acc + bias\n"
    )
    command = [sys.executable, "-m", "cutlass_ops", "explain", "epilogues:mine", "64x256x256", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert json.loads(done.stdout)
    assert "hello" in done.stderr


def test_json_has_no_number_for_what_cannot_run(run):
    code, out, _ = run("explain", "gemm", f"{2**31 - 1}x16x16", "--json")

    def refuse(name):
        raise ValueError(name)

    assert json.loads(out, parse_constant=refuse)
    assert code == 0


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


@pytest.mark.sample(2)
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
