"""Single kernels: ``generate``, ``build``, ``list``, ``inspect`` and ``clean``."""

import json
import os
import re
from pathlib import Path

from fake_toolkit import sm80_spec

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.ship import shipping

ROOT = Path(__file__).resolve().parents[3]


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
    for beside in (spec_file(sm80_spec(3), "another.json"), rows[0]["folder"] + "/.."):
        code, _, err = run("inspect", beside)
        assert code == 4
        assert "is not a kernel's folder" in " ".join(err.split())
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
    monkeypatch.setattr(KernelSpec, "from_json", _refuse)
    code, out, _ = run("list")
    assert code == 0
    assert "declared by another version" in out


def _refuse(*_):
    raise ConfigError("unknown field")


def test_the_declaration_in_the_documents_can_be_built(kit, run, tmp_path):
    page = (ROOT / "docs" / "deployment.md").read_text()
    (text,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "spec.json"
    path.write_text(text)
    assert run("generate", path, "--out", tmp_path / "sources")[0] == 0
    assert run("build", path)[0] == 0
    spec = shipping.read_spec(path)
    path.write_text(spec.canonical())  # as the page says
    assert shipping.read_spec(path) == spec
