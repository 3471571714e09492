"""CMake projects built for tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from cutlass_ops.base import resources


def build(source: Path, folder: Path, *options: str) -> None:
    """Configure and build a project that finds the library's CMake package, or fail with what CMake says."""
    configure = ["-S", source, "-B", folder, f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", *options]
    places = [f"-Dcutlass_ops_DIR={resources.cmake()}", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in ([_tool("cmake"), "-G", "Ninja", *configure, *places], [_tool("cmake"), "--build", folder]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def _tool(name: str) -> str:
    """Return a program that is on the path or beside this Python: without it, nothing here may pass."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found, f'there is no {name}: pip install "cutlass_ops[cpp]"'
    return found
