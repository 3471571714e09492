"""Coverage-guided fuzzing of the Python reader: whatever is read, it is a bundle or a BundleError, in bounded time.

Run by `run.sh`, with atheris. Digests are taken for right here, and only here: no mutation would get past them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import struct
import sys
from pathlib import Path
from typing import Any

import atheris
import torch  # noqa: F401 - before instrumentation: it takes minutes to instrument

with atheris.instrument_imports(include=["cutlass_ops"]):
    from cutlass_ops.artifacts import container, manifest
    from cutlass_ops.artifacts.bundle import _require_files
    from cutlass_ops.base import checked_json, elf, sass
    from cutlass_ops.base.errors import BundleError, CompileError, LoadError


class _NoDigest:
    """Stands for SHA-256: the digest that the seeds have."""

    def __init__(self, _: bytes) -> None:
        pass

    def hexdigest(self) -> str:
        return "0" * 64


class _NoHashes:
    sha256 = _NoDigest


checked_json.hashlib = _NoHashes  # type: ignore[assignment]


def _use(found: manifest.Manifest) -> None:
    """What a process does with a manifest that was accepted."""
    for record in found.kernels:
        found.identity(record)
        record.runs_on((9, 0))
    for group in found.groups:
        for choice in group.choices:
            choice.at(1)
            choice.at(1 << 40)


def of_manifest(data: bytes) -> None:
    """A manifest's text."""
    try:
        found = manifest.Manifest.from_bytes(data)
    except BundleError:
        return
    _use(found)


def of_archive(data: bytes) -> None:
    """An archive, and the manifest in it."""
    path = Path(os.environ["FUZZ_SCRATCH"], "input")
    path.write_bytes(data)
    try:
        found = container._Archive(path, None)
        contents = {name: found.read(name) for name in found.sizes}
        said = manifest.Manifest.from_bytes(contents.get("manifest.json", b""))
        _require_files(found, said)
    except BundleError:
        return
    _use(said)


def of_library(data: bytes) -> None:
    """A kernel's library, as `cutlass-ops verify` looks at it."""
    checks = (
        lambda: sass.opcodes(data, "it"),
        lambda: elf.exports(data, ("main", "_init")),
        lambda: elf.require_own_libraries(data, "it"),
        lambda: [*map(elf.sm_version, elf.gpu_images(data))],
    )
    for check in checks:
        with contextlib.suppress(CompileError, LoadError, struct.error, IndexError, UnicodeDecodeError):
            check()


_VALUES = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    1 << 31,
    1 << 63,
    10**400,
    0.5,
    [],
    {},
    [[]],
    "",
    "sm_80",
    "0" * 64,
    "\ud800",
)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [place for _, child in items for place in _places(child)]


def mutated(data: bytes, max_size: int, seed: int) -> bytes:
    """Change a manifest as a value, written in its one spelling again, or else as bytes."""
    rng = random.Random(seed)
    try:
        value = json.loads(data)
        places = _places(value)
    except (ValueError, RecursionError):
        places = []
    if not places or rng.random() < 0.3:
        return bytes(atheris.Mutate(data, max_size))
    parent, key = rng.choice(places)
    kind = rng.randrange(4)
    if kind == 0:
        parent[key] = rng.choice(_VALUES)
    elif kind == 1:
        other, there = rng.choice(places)
        parent[key] = json.loads(json.dumps(other[there]))
    elif kind == 2 or isinstance(parent, dict):
        del parent[key]
    else:
        parent.insert(key, json.loads(json.dumps(parent[key])))
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()[:max_size]


TARGETS = {"manifest": of_manifest, "archive": of_archive, "library": of_library}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    mutator = {"custom_mutator": mutated} if name == "manifest" else {}
    atheris.Setup(sys.argv, TARGETS[name], **mutator)
    atheris.Fuzz()
