"""From catalogues to bundles: ``bundle`` and ``verify``."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from bundles import write_keys
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from processes import ended


@pytest.mark.slow
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
    assert about["seconds"] > 0
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


@pytest.mark.slow
def test_several_keys_and_a_least_version_hold_for_every_command(kit, run, catalogue, tmp_path, monkeypatch):
    (private, public), (_, other) = (write_keys(tmp_path, n, Ed25519PrivateKey.generate()) for n in ("mine", "other"))
    target = tmp_path / "kernels.bundle"
    catalogue.write_text(f"version = 3\n{catalogue.read_text()}")
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
        assert (code, "an argument is empty" in err) == (2, True)
        assert run(*command, "--minimum-version", 0)[0] == 2
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
        (["verify", "none", "--key", "none.pem"], 5, "BundleError"),
        (["verify", "catalogue.toml"], 5, None),
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
        assert "catalogue.toml" in json.loads(out)["problems"][0]
        return
    assert json.loads(out)["error"]["kind"] == kind
    assert json.loads(out)["error"]["message"] in err


def test_a_kernel_that_cannot_be_compiled_is_exit_code_3(kit, run, catalogue, tmp_path):
    kit.does("echo 'kernel.cu(1): error: no'; exit 1")
    code, out, _ = run("bundle", catalogue, "--out", tmp_path / "a.bundle", "--json")
    assert code == 3
    assert json.loads(out)["error"]["kind"] == "CompileError"
    assert not (tmp_path / "a.bundle").exists()


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--out", "folder"], "folder is a folder: name a file in it"),
        (["--out", "file/under"], "file is not a folder"),
        (["--out", "/dev/null"], "/dev/null is a device"),
        (["--out", "/proc/a.bundle"], "no file can be created in /proc"),
        (["--out", "/proc/a/b.bundle"], "no file can be created in /proc"),
        (["--out", "n" * 250], "its name is too long"),
        (["--out", "pipe"], "is a device, a pipe or a socket"),
        (["--out", "notes.txt"], "exists and is not a bundle"),
        (["--folder", "--out", "folder"], "already exists"),
        (["--folder", "--out", "file"], "already exists"),
        (["--folder", "--out", "/proc/a"], "no file can be created in /proc"),
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
    (tmp_path / "notes.txt").write_text("not to be lost")
    (tmp_path / "name-1.0-py3-none-linux_x86_64.whl").mkdir()
    os.mkfifo(tmp_path / "pipe")
    code, out, err = run("bundle", catalogue, *options)
    assert (code, out) == (1, "")
    assert why in err
    assert kit.compilations == 0
