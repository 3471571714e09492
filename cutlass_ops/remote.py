"""A compilation in another process, on this machine or another: what goes there, and what comes back.

A worker has this library and the compilers, and needs no store: the library travels back as bytes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_ops import arch
from cutlass_ops.compiler import Compiled, compile_kernel
from cutlass_ops.errors import CompileError, ToolchainError
from cutlass_ops.identity import kernel_identity
from cutlass_ops.spec import KernelSpec
from cutlass_ops.store import LIBRARY, SOURCE
from cutlass_ops.toolchain import find_toolchain


@dataclass(frozen=True)
class Product:
    """A compiled kernel: its library's bytes, and what the compiler reported."""

    library: bytes
    compiled: Compiled


def compile_source(declaration: Mapping[str, Any], source: str, identity: Mapping[str, Any]) -> Product:
    """Compile one kernel with the compilers that are here.

    Parameters
    ----------
    declaration : mapping
        The specification, as JSON values.
    source : str
        What it renders to.
    identity : mapping
        What :func:`cutlass_ops.identity.kernel_identity` gave where the kernel is wanted.

    Raises
    ------
    ToolchainError
        If another compiler, another version of this library or other headers are here: the kernel would be another.
    CompileError
        If the compiler refuses the source.
    """
    spec, toolchain = KernelSpec.from_json(declaration), find_toolchain()
    here = kernel_identity(spec, source, toolchain)
    if here != identity:
        names = sorted(name for name in {*here, *identity} if here.get(name) != identity.get(name))
        raise ToolchainError(
            f"a worker would build another kernel than is wanted: its {', '.join(names)} differ. Install the same "
            f"versions of this library and of the compilers there; its compilers are {here['toolchain']}"
        )
    with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
        place = Path(folder)
        (place / SOURCE).write_text(source, encoding="utf-8")
        try:
            compiled = compile_kernel(place, SOURCE, LIBRARY, arch.target(spec.target), toolchain)
        except CompileError as exc:
            # The folder that the command names will be gone.
            raise CompileError(str(exc).partition("\n  command: ")[0]) from None
        return Product((place / LIBRARY).read_bytes(), compiled)
