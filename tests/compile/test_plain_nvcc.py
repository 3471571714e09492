"""A rendered file is an ordinary CUDA source: one nvcc makes the whole library of it, without a word."""

import inspect

import pytest

from cutlass_ops.compilation import identity
from cutlass_ops.compilation.toolchain import find_toolchain
from tests import ledger
from tests.scripts import script

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def test_nvcc_alone_compiles_a_rendered_file(tmp_path, capfd, request):
    bench = script("bench_compile")
    spec = bench.kernels()[0]
    with ledger.once(request, identity.identify(spec).key, inspect.getsource(bench.plain)):
        bench.plain(spec, find_toolchain(), tmp_path)
        assert (tmp_path / "kernel.so").read_bytes()[:4] == b"\x7fELF"
        assert "warning" not in capfd.readouterr().err
