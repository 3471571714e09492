"""TMA descriptors as kernels make them: what CuTe has no parameter for (``tma.h``) and a newer one could take back."""

import re
import subprocess

import pytest

from cutlass_ops import _resources
from cutlass_ops.toolchain import find_toolchain

pytestmark = pytest.mark.compile

CONSTANT = "CU_TENSOR_MAP_L2_PROMOTION_L2_{}B"


def preprocessed(source, tmp_path):
    toolchain, path = find_toolchain(), tmp_path / "source.cpp"
    path.write_text(source)
    folders = [_resources.templates() / "include", toolchain.cutlass_dir / "include", toolchain.tvm_ffi_dir / "include"]
    include = [*(f"-I{p}" for p in folders), *(f"-isystem{p}" for p in toolchain.include_dirs)]
    command = [toolchain.host_compiler, "-std=c++17", "-E", "-P", *include, path]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("header", ["sm90_gemm.h", "split_k.h", "mainloop.h"])
def test_reads_bring_256_bytes_into_the_l2_cache(tmp_path, header):
    done = preprocessed(f'#include "cutlass_ops/{header}"\n', tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"tma_l2Promotion\s*=\s*(\w+);", done.stdout) == [CONSTANT.format(256)]
    # The driver's own names are as they were.
    assert CONSTANT.format(128) in done.stdout


def test_cute_cannot_be_included_first(tmp_path):
    done = preprocessed('#include "cute/tensor.hpp"\n#include "cutlass_ops/sm90_gemm.h"\n', tmp_path)
    assert done.returncode != 0
    assert "before cutlass_ops/tma.h" in done.stderr
