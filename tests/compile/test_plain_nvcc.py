"""A rendered file is an ordinary CUDA source: one nvcc makes the whole library of it, without a word."""

import pytest

from cutlass_ops.compilation.toolchain import find_toolchain
from tests.scripts import script

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def test_nvcc_alone_compiles_a_rendered_file(tmp_path, capfd):
    bench = script("bench_compile")
    bench.plain(bench.kernels()[0], find_toolchain(), tmp_path)
    assert (tmp_path / "kernel.so").read_bytes()[:4] == b"\x7fELF"
    assert "warning" not in capfd.readouterr().err
