"""Check which libraries a kernel's library makes the dynamic linker load."""

from __future__ import annotations

import re
import struct

from cutlass_ops.base import elf
from cutlass_ops.base.errors import CutlassOpsError, LoadError

# The C and C++ runtimes, tvm-ffi and the CUDA runtime. A slash would make the name a path.
_LIBRARY = re.compile(r"libtvm_ffi\.so|(libcudart|libstdc\+\+|libgcc_s|libm|libc|ld-linux-x86-64)\.so\.[0-9]+")


def require_own_libraries(library: bytes, where: str, error: type[CutlassOpsError] = LoadError) -> None:
    """Reject a library with its own search paths, or that needs libraries other than the kernel runtime's.

    Parameters
    ----------
    library : bytes
        Contents of the file.
    where : str
        Its path, for messages.
    error : type
        Type of the error to raise.

    Raises
    ------
    LoadError, or ``error``
        If the library is rejected. The message names the paths or libraries.
    """
    try:
        paths, needed = elf.search_paths(library), elf.needed(library)
    except (struct.error, IndexError) as exc:
        raise error(f"{where} is not a shared library: {exc}") from None
    if paths:
        raise error(
            f"{where} makes the dynamic linker search {', '.join(map(repr, paths))} (RPATH or RUNPATH) for unchecked "
            f"libraries: compile it with a g++ that adds no -rpath"
        )
    foreign = [name for name in needed if not _LIBRARY.fullmatch(name)]
    if foreign:
        raise error(f"{where} needs {', '.join(foreign)}, which kernels must not load")
