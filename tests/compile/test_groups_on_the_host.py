"""Groups of rows by the host's compiler: what TMA loads and stores, where it cuts off, and which tiles there are."""

import subprocess
from pathlib import Path

import pytest

from cutlass_ops.base import resources
from cutlass_ops.compilation.toolchain import find_toolchain

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def test_each_group_has_its_tiles_and_their_elements_go_where_it_lies(tmp_path):
    found, program = find_toolchain(), tmp_path / "program"
    folders = [resources.templates() / "include", found.tvm_ffi_dir / "include", found.cutlass_dir / "include"]
    folders += [found.cutlass_dir / "tools/util/include", *found.include_dirs]
    flags = ["-std=c++17", "-O1", "-DNDEBUG", "-w", "-fpermissive"]
    source = Path(__file__).with_name("groups_on_the_host.cpp")
    command = [found.host_compiler, *flags, *(f"-I{folder}" for folder in folders), source, "-o", program]
    subprocess.run([str(part) for part in command], check=True)
    assert subprocess.run([program], check=True, capture_output=True, text=True).stdout == "ok\n"
