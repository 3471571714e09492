"""Which GPCs thread block clusters land on, by the host's compiler and a runtime that places them itself."""

import subprocess
from pathlib import Path

import pytest

from cutlass_ops.base import resources
from cutlass_ops.compilation.toolchain import find_toolchain

pytestmark = pytest.mark.compile


def test_clusters_of_one_gpc_are_told_from_those_of_another(tmp_path):
    found, program = find_toolchain(), tmp_path / "program"
    folders = [resources.templates() / "include", found.tvm_ffi_dir / "include", found.cutlass_dir / "include"]
    folders += found.include_dirs
    flags = ["-std=c++17", "-O1", "-DNDEBUG", "-w", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = Path(__file__).with_name("placement_on_the_host.cpp")
    include = [f"-I{folder}" for folder in folders]
    command = [found.host_compiler, *flags, *include, source, f"-L{found.tvm_ffi_dir / 'lib'}", "-ltvm_ffi"]
    command += [f"-Wl,-rpath,{found.tvm_ffi_dir / 'lib'}", "-o", program]
    subprocess.run([str(part) for part in command], check=True)
    done = subprocess.run(
        [program], capture_output=True, text=True, check=False, env={"ASAN_OPTIONS": "detect_leaks=0"}
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
