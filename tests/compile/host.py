"""Programs by the host's compiler that include the library's headers, for tests without a GPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

from cutlass_ops.base import resources
from cutlass_ops.compilation.toolchain import find_toolchain

# CUTLASS names what only nvcc declares; nothing of that is called.
LENIENT = ("-w", "-fpermissive")
# What is not called, a stream and a device, needs no library: only the functions that are called are linked.
UNLINKED = (*LENIENT, "-ffunction-sections", "-Wl,--gc-sections")
UNRESOLVED = ("-O1", *LENIENT, "-Wl,--unresolved-symbols=ignore-all")


def program(folder: Path, source: Path | str, *flags: str, standard: str = "c++17") -> Path:
    """Compile a source, a file beside this one or a text, and return the path of the program."""
    found, path = find_toolchain(), folder / "program"
    if isinstance(source, str):
        (folder / "program.cpp").write_text(source)
        source = folder / "program.cpp"
    cutlass = [found.cutlass_dir / "include", found.cutlass_dir / "tools/util/include"]
    include = [f"-I{each}" for each in (resources.include(), *cutlass, found.tvm_ffi_dir / "include")]
    include += [f"-isystem{each}" for each in found.include_dirs]
    # Flags come last, since those of libraries must follow the source.
    command = [found.host_compiler, f"-std={standard}", *include, source, "-o", path, *flags]
    subprocess.run([str(part) for part in command], check=True)
    return path


def tvm_ffi() -> tuple[str, ...]:
    """Return the flags with which a program finds tvm-ffi's library."""
    folder = find_toolchain().tvm_ffi_dir / "lib"
    return f"-L{folder}", "-ltvm_ffi", f"-Wl,-rpath,{folder}"
