"""A kernel's identity, which is everything that its binary depends on, and its key."""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from typing import Any

from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.artifacts.entry import identity_key
from cutlass_ops.base import arch, resources
from cutlass_ops.compilation.compiler import IMAGE, compile_flags
from cutlass_ops.compilation.toolchain import Toolchain
from cutlass_ops.declare.quantizing import Declaration


def kernel_identity(spec: Declaration, source: str, toolchain: Toolchain) -> dict[str, Any]:
    """Return everything that changes a kernel's binary, as JSON values without paths.

    Parameters
    ----------
    spec : KernelSpec or QuantizeSpec
        The declaration.
    source : str
        Its rendered source.
    toolchain : Toolchain
        The compilers.
    """
    return source_identity(spec, source) | {"toolchain": toolchain.identity}


def source_identity(spec: Declaration, source: str) -> dict[str, Any]:
    """Return the part of :func:`kernel_identity` that is known without a compiler."""
    return {
        "templates": TEMPLATE_VERSION,
        "spec": spec.to_json(),
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "headers": _headers_digest(source),
        "flags": {step: list(flags) for step, flags in compile_flags(arch.target(spec.target)).items()},
        "target": spec.target,
    }


def kernel_key(spec: Declaration, source: str, toolchain: Toolchain) -> str:
    """Return a kernel's key: the hash of everything that changes its binary.

    Parameters
    ----------
    spec, source, toolchain
        As for :func:`kernel_identity`.

    Raises
    ------
    TypeError, ValueError
        If JSON cannot hold the identity.
    """
    return identity_key(kernel_identity(spec, source, toolchain))


_INCLUDE = re.compile(r'^\s*#\s*include\s*["<](cutlass_ops/[^">]+)[">]', re.MULTILINE)


@lru_cache(maxsize=256)
def _included(header: bytes) -> list[str]:
    """Return the names of this library's headers that a header includes: looking for them takes longer than reading."""
    return _INCLUDE.findall(header.decode())


def _headers_digest(source: str) -> str:
    """Return the digest of this library's headers that a source includes, directly or indirectly."""
    root = resources.include()
    texts: dict[str, bytes] = {}
    left = [IMAGE, *_INCLUDE.findall(source)]
    while left:
        name = left.pop()
        path = root / name
        # Skip a missing header: the compiler reports it.
        if name not in texts and path.is_file():
            texts[name] = path.read_bytes()
            left += _included(texts[name])
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        digest.update(f"{name}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()
