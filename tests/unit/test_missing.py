"""Kernels that tests without a compiler lack, read from pytest's log."""

import pytest
from fake_toolkit import sm80_spec, sm90_spec

from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.compilation.builder import build_artifact
from tests.gpu.missing import missing


def test_a_log_names_each_missing_kernel_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_JIT", "0")
    monkeypatch.setenv("CUTLASS_OPS_CACHE_DIR", str(tmp_path))
    specs, log = [sm80_spec(), sm90_spec()], ""
    for spec in (*specs, specs[0]):
        with pytest.raises(MissingKernelError) as refused:
            build_artifact(spec)
        log += f"E   {type(refused.value).__name__}: {refused.value}\n1 failed\n"
    assert list(missing(log)) == specs
