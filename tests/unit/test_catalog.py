import json
import os

import pytest

from cutlass_ops.base.errors import ToolchainError
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import named
from cutlass_ops.ship import catalog


def test_every_named_op_is_there_for_both_architectures():
    assert {op.name: op.epilogue for op in named.NAMED} == builtin.BY_OP
    shipped = {(e.op, e.spec.a.dtype.name, e.spec.target) for e in catalog.default()}
    assert {(op, "bf16", target) for op in builtin.BY_OP for target in ("sm_80", "sm_90a")} <= shipped
    assert {("gemm_bias_relu", "f16", target) for target in ("sm_80", "sm_90a")} <= shipped


def test_without_cutlass_the_package_is_named(tmp_path, monkeypatch):
    def absent(name):
        raise catalog.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(catalog.importlib.metadata, "version", absent)
    with pytest.raises(ToolchainError, match=r"nvidia-cutlass.*pip install \"cutlass_ops\[build\]\""):
        catalog.write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_write_brings_a_folder_up_to_date(tmp_path):
    folder = tmp_path / "new"
    wanted = catalog.files()
    assert catalog.stale(folder) == sorted(wanted)
    assert not folder.exists()
    assert catalog.write(folder) == sorted(wanted)
    assert catalog.stale(folder) == catalog.write(folder) == []
    (folder / "sm_80" / "gemm_bf16.cu").write_text("edited")
    assert catalog.stale(folder) == ["sm_80/gemm_bf16.cu"]
    assert catalog.write(folder) == ["sm_80/gemm_bf16.cu"]
    assert {p.relative_to(folder).as_posix(): p.read_text() for p in folder.rglob("*") if p.is_file()} == wanted


def test_a_write_that_is_stopped_leaves_whole_files_and_can_be_repeated(tmp_path, monkeypatch):
    catalog.write(tmp_path)
    manifest = json.loads((tmp_path / catalog.MANIFEST).read_text())
    manifest["kernels"] += [{"file": "sm_80/old.cu"}]
    (tmp_path / catalog.MANIFEST).write_text(json.dumps(manifest))
    for name in ("old", "gemm_bf16", "gemm_bias_bf16"):
        (tmp_path / "sm_80" / f"{name}.cu").write_text("old")
    wanted, calls = catalog.files(), []
    replace = os.replace

    def stop(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        with pytest.raises(KeyboardInterrupt):
            catalog.write(tmp_path)
    found = {p.relative_to(tmp_path).as_posix(): p.read_text() for p in tmp_path.rglob("*") if p.is_file()}
    assert {found[name] for name in found if wanted.get(name) not in (found[name], None)} == {
        "old",
        found[catalog.MANIFEST],
    }
    assert set(found) == {*wanted, "sm_80/old.cu"}
    assert "sm_80/old.cu" in catalog.write(tmp_path)
    assert catalog.stale(tmp_path) == []
    assert not (tmp_path / "sm_80" / "old.cu").exists()


def test_files_that_the_catalogue_dropped_are_removed_and_no_others(tmp_path):
    catalog.write(tmp_path)
    manifest = json.loads((tmp_path / catalog.MANIFEST).read_text())
    outside = tmp_path.parent / "precious.cu"
    (tmp_path / "sm_80" / "mine.cu").write_text("mine")
    (tmp_path / "sm_80" / "old.cu").write_text("old")
    outside.write_text("precious")
    manifest["kernels"] += [
        {"file": f} for f in ("sm_80/old.cu", "sm_80/../../precious.cu", str(outside), "sm_80/a.cu")
    ]
    (tmp_path / catalog.MANIFEST).write_text(json.dumps(manifest))
    assert catalog.write(tmp_path) == [catalog.MANIFEST, "sm_80/old.cu"]
    assert outside.exists()
    assert (tmp_path / "sm_80" / "mine.cu").exists()


@pytest.mark.parametrize("text", ["", "[]", '{"kernels": 3}', '{"kernels": [1]}', '{"kernels": [{}]}', "{"])
def test_a_damaged_manifest_is_replaced(tmp_path, text):
    catalog.write(tmp_path)
    (tmp_path / catalog.MANIFEST).write_text(text)
    assert catalog.write(tmp_path) == [catalog.MANIFEST]
