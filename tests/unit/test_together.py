"""Several kernels in one file: what is shared, and what becomes of each."""

from pathlib import Path

import pytest
from fake_toolkit import FFMA, FakeToolkit, library, sm80_spec, sm90_spec

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base.errors import CompileError, ConfigError, MissingKernelError
from cutlass_ops.compilation.builder import build_artifact, build_together
from cutlass_ops.kinds import render

SPECS = [sm80_spec(stages) for stages in (2, 3, 4)]


@pytest.fixture(autouse=True)
def toolkit(tmp_path, monkeypatch):
    found = FakeToolkit(tmp_path / "kit")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path / "store"))
    monkeypatch.setenv("CUTLASS_OPS_NVCC", str(found.nvcc))
    monkeypatch.setenv("NVCC_CCBIN", str(found.host))
    return found


def names(outcomes):
    return [getattr(each, "spec", each) for each in outcomes]


def test_kernels_are_compiled_in_one_file_and_stored_one_by_one(toolkit):
    toolkit.makes((toolkit.root / "library").read_bytes(), before='cp kernel.cu "$here/file"; ')
    found = list(build_together(SPECS))
    assert names(found) == SPECS
    assert toolkit.compilations == 1
    assert [each.read_source().decode() for each in found] == [render.source(spec) for spec in SPECS]
    assert list(build_together(SPECS)) == found
    assert [build_artifact(spec) for spec in SPECS] == found
    assert toolkit.compilations == 1
    assert not [*Path(KernelStore.default().root, "tmp").iterdir()]


def test_where_one_cannot_be_compiled_each_is_compiled_alone(toolkit):
    # Alone, a folder is named after its key; the file of several has another one.
    bad = build_artifact(SPECS[1]).key
    KernelStore.default().clean()
    toolkit.makes(
        (toolkit.root / "library").read_bytes(),
        before=f'case "$PWD" in *{bad}*|*/cutlass_ops.*) echo "error: no"; exit 1;; esac; ',
    )
    first, second, third = build_together(SPECS)
    assert names([first, third]) == [SPECS[0], SPECS[2]]
    assert isinstance(second, CompileError)
    failed = KernelStore.default().root / "failed"
    assert [folder.name for folder in failed.iterdir()] == [bad]
    assert f"source: {failed / bad}" in str(second)


def test_where_one_is_not_proved_the_others_are_there(toolkit):
    bad = build_artifact(SPECS[1]).key
    KernelStore.default().clean()
    before = toolkit.compilations
    (toolkit.root / "bad").write_bytes(library(FFMA))
    good = 'cat "$here/library" > "$out"'
    toolkit.does(f'case "$PWD" in *{bad}*) cat "$here/bad" > "$out";; *) {good};; esac')
    first, second, third = build_together(SPECS)
    assert names([first, third]) == [SPECS[0], SPECS[2]]
    assert isinstance(second, CompileError)
    assert toolkit.compilations == before + 2  # one file, and the bad one alone


def test_errors_are_those_of_each_alone(monkeypatch):
    good, bad = build_together([SPECS[0], sm90_spec("bf16.col.align2")])
    assert good.spec == SPECS[0]
    assert isinstance(bad, ConfigError)
    KernelStore.default().clean()
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    assert [type(each) for each in build_together(SPECS)] == [MissingKernelError] * 3
