"""Kernels that tests without a compiler lack, read from pytest's log."""

import pytest
from fake_toolkit import sm80_spec, sm90_spec

from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.compilation.builder import build_artifact
from tests.gpu.missing import missing, run


def test_a_log_names_each_missing_kernel_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path))
    specs, log = [sm80_spec(), sm90_spec()], ""
    for spec in (*specs, specs[0]):
        with pytest.raises(MissingKernelError) as refused:
            build_artifact(spec)
        log += f"E   {type(refused.value).__name__}: {refused.value}\n1 failed\n"
    assert list(missing(log)) == specs


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_what_failed_without_a_compiler_runs_once_more_with_one(tmp_path, monkeypatch, broken):
    ran = tmp_path / "ran"
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib\n"
        "def note(what):\n"
        f"    pathlib.Path({str(ran)!r}).open('a').write(what + os.environ.get('CUTLASS_OPS_JIT', '1') + ' ')\n"
        "def test_fine(): note('fine')\n"
        f"def test_compiles(): note('compiles'); assert os.environ.get('CUTLASS_OPS_JIT') != '0' and not {broken}\n"
    )
    monkeypatch.delenv("CUTLASS_OPS_JIT", raising=False)
    assert (run([str(tmp_path)]) != 0) == broken
    assert ran.read_text().split() == ["fine0", "compiles0", "compiles1"]
