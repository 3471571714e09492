"""Where compilers are, by a look at paths alone: a call asks before it is known whether anything is compiled at all."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.base import arch, env
from cutlass_ops.base.errors import ToolchainError

INSTALL = 'pip install "cutlass_ops[toolkit]"'


def can_compile() -> bool:
    """Whether there are an nvcc, a C++ compiler, CUTLASS and what renders sources. No program is started."""
    if arch.other_platform() or not can_render():
        return False
    if env.CUTLASS_DIR.text is None and importlib.util.find_spec("cutlass_library") is None:
        return False
    path = search_path()
    try:
        return bool(nvccs(path)) and bool(host_compiler(path))
    except ToolchainError:
        return False


def can_render() -> bool:
    """Whether kernels can be rendered to C++."""
    return importlib.util.find_spec("jinja2") is not None


def search_path() -> str:
    """Return the folders of PATH that do not depend on the working directory."""
    folders = (os.environ.get("PATH") or os.defpath).split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if os.path.isabs(folder))


def nvccs(path: str) -> tuple[tuple[Path, str], ...]:
    """Return every nvcc in the order of search, each with where it is: a variable, ``"PATH"`` or ``"PyPI wheels"``."""
    named = env.nvcc()
    if named is not None:
        if not os.access(named, os.X_OK):
            raise ToolchainError(f"{env.NVCC.name} names {named}, which is not an executable file")
        return ((named, env.NVCC.name),)
    found = [((home / "bin" / "nvcc").absolute(), name) for name, home in env.cuda_homes()]
    found += [(Path(folder, "nvcc"), "PATH") for folder in path.split(os.pathsep)]
    found += [(folder / "nvcc", "PyPI wheels") for folder in wheel_bins()]
    there = tuple((nvcc, source) for nvcc, source in found if shutil.which(nvcc) is not None)
    if not there:
        raise ToolchainError(
            f"no CUDA compiler: {env.NVCC.name} is not set, CUDA_HOME and CUDA_PATH have no bin/nvcc, PATH has none, "
            f"and the PyPI wheels are not installed. Install them with: {INSTALL}"
        )
    return there


def wheel_bins() -> Iterator[Path]:
    """Yield the folders of programs in NVIDIA's wheels, newest CUDA first."""
    for root in sys.path:
        if os.path.isabs(root):
            yield from sorted(Path(root).glob("nvidia/cu[0-9]*/bin"), reverse=True)


def host_compiler(path: str) -> Path:
    """Return the C++ compiler."""
    named = env.host_compiler()
    command = "g++" if named is None else os.path.join(named, "g++") if os.path.isdir(named) else named
    found = shutil.which(command, path=path)
    if found is None:
        hint = f"{env.NVCC_CCBIN.name} names {named!r}" if named else "install it (Debian: apt-get install g++)"
        raise ToolchainError(f"no C++ compiler: {command} is not found; {hint}")
    return Path(found).absolute()
