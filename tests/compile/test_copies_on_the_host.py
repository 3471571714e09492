"""Copies of operands along K by the host's compiler: every element, none from outside, and zeros at the end."""

import subprocess
from pathlib import Path

import pytest

from cutlass_ops.base import resources
from cutlass_ops.compilation.toolchain import find_toolchain

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def test_every_matrix_is_copied_along_k(tmp_path):
    found, program = find_toolchain(), tmp_path / "program"
    folders = [resources.templates() / "include", found.tvm_ffi_dir / "include", found.cutlass_dir / "include"]
    folders += [found.cutlass_dir / "tools/util/include", *found.include_dirs]
    # CUTLASS names what only nvcc declares; nothing of that is called. A read beyond a matrix ends the program.
    flags = ["-std=c++17", "-O1", "-DNDEBUG", "-w", "-fpermissive", "-Wl,--unresolved-symbols=ignore-all"]
    flags += ["-fsanitize=address", "-no-pie"]
    source = Path(__file__).with_name("copies_on_the_host.cpp")
    command = [found.host_compiler, *flags, *(f"-I{folder}" for folder in folders), source, "-o", program]
    subprocess.run([str(part) for part in command], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[-2000:]
