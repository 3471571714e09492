"""What a kernel's library may ask of the dynamic linker."""

from __future__ import annotations

import re
import struct

from cutlass_ops.base import elf
from cutlass_ops.base.errors import CutlassOpsError, LoadError

# The C and C++ runtimes, tvm-ffi and the CUDA runtime. No name has a slash: it would be a path.
_LIBRARY = re.compile(r"libtvm_ffi\.so|(libcudart|libstdc\+\+|libgcc_s|libm|libc|ld-linux-x86-64)\.so\.[0-9]+")


def require_own_libraries(library: bytes, where: str, error: type[CutlassOpsError] = LoadError) -> None:
    """Refuse a library that says where libraries are to be looked for, or needs one that no kernel does.

    Parameters
    ----------
    library : bytes
        What the file holds.
    where : str
        Where it lies, for messages.
    error : type
        What is raised.

    Raises
    ------
    LoadError, or ``error``
        With the folders or the libraries.
    """
    try:
        paths, needed = elf.search_paths(library), elf.needed(library)
    except (struct.error, IndexError) as exc:
        raise error(f"{where} is not a shared library: {exc}") from None
    if paths:
        raise error(
            f"{where} has the dynamic linker search {', '.join(map(repr, paths))} (RPATH or RUNPATH) for libraries "
            f"that nobody checked: compile it with a g++ that adds no -rpath"
        )
    foreign = [name for name in needed if not _LIBRARY.fullmatch(name)]
    if foreign:
        raise error(f"{where} needs {', '.join(foreign)}, which no kernel does")
