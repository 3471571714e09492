"""A kernel's identity, which is everything that its binary depends on, and its key."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.artifacts.entry import identity_key
from cutlass_ops.base import arch, env, resources
from cutlass_ops.compilation.compiler import IMAGE, compile_flags
from cutlass_ops.compilation.toolchain import Toolchain, find_toolchain
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds import legality, render


@dataclass(frozen=True)
class Identity:
    """A declaration with everything that its kernel's binary depends on: made once, and passed along."""

    spec: Declaration
    source: str  # its rendered source
    toolchain: Toolchain | None  # the compilers; None if nothing may be compiled, so that any compiler's kernel will do
    parts: Mapping[str, Any]  # all of it as JSON values without paths, as the kernel's manifest has it
    key: str  # their hash: the kernel's key, or the key of its source if there are no compilers


def identify(spec: Declaration, source: str | None = None, toolchain: Toolchain | None = None) -> Identity:
    """Render a declaration, find the compilers unless they are given, and return the kernel's identity."""
    if isinstance(spec, KernelSpec):
        legality.require_legal(spec)
    source = render.render(spec) if source is None else source
    if not env.jit_enabled():
        parts = source_identity(spec, source)
        return Identity(spec, source, None, parts, identity_key(parts))
    toolchain = toolchain or find_toolchain()
    parts = kernel_identity(spec, source, toolchain)
    return Identity(spec, source, toolchain, parts, identity_key(parts))


def kernel_identity(spec: Declaration, source: str, toolchain: Toolchain) -> dict[str, Any]:
    """Return everything that changes a kernel's binary, as JSON values without paths."""
    return source_identity(spec, source) | {"toolchain": toolchain.identity}


def source_identity(spec: Declaration, source: str) -> dict[str, Any]:
    """Return the part of :func:`kernel_identity` that is known without a compiler."""
    return {
        "templates": TEMPLATE_VERSION,
        "spec": spec.to_json(),
        "source": hashlib.sha256(source.encode()).hexdigest(),
        "headers": headers_digest(source),
        "flags": {step: list(flags) for step, flags in compile_flags(arch.target(spec.target)).items()},
        "target": spec.target,
    }


_INCLUDE = re.compile(r'^\s*#\s*include\s*["<](cutlass_ops/[^">]+)[">]', re.MULTILINE)


@lru_cache(maxsize=256)
def _included(header: bytes) -> list[str]:
    """Return the names of this library's headers that a header includes: looking for them takes longer than reading."""
    return _INCLUDE.findall(header.decode())


def headers_digest(source: str) -> str:
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
