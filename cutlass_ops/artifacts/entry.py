"""One compiled kernel in a store: its key, its files, and the checks that it is whole."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cutlass_ops.artifacts.container import MAX_FILE
from cutlass_ops.base import checked_json, disk, env
from cutlass_ops.base.disk import DELETIONS, read_private, require_private
from cutlass_ops.base.errors import ConfigError, LoadError
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json

FORMAT = 2  # of the manifest, and of what was checked before it was written

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
MANIFEST = "manifest.json"

_MAX_MANIFEST = 1 << 20  # bytes

KEEP = f"Stop whatever removes its files, or set {env.CACHE_DIR.name} to a folder that nothing cleans up meanwhile"


def identity_key(identity: Mapping[str, Any]) -> str:
    """Return the key of an identity: the SHA-256 of its canonical JSON."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(text.encode())


def source_part(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an identity that is known without a compiler."""
    return {name: value for name, value in identity.items() if name != "toolchain"}


def sha256(data: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


class Compiled(NamedTuple):
    """Result of one compilation."""

    seconds: float  # compile time
    # The compiler's report. For each `__global__` function: name, registers per thread, and static shared memory,
    # stack, spill stores and spill loads in bytes.
    resources: tuple[dict[str, str | int], ...]


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel on disk. It was complete when it was looked up."""

    key: str  # hash of everything that changes the binary
    folder: Path  # folder of its files
    sha256: str  # SHA-256 of the library, checked again before loading
    # `identity` (what the key hashes), `files`, `sass` (opcode counts), `resources`, `created`,
    # `compile_seconds`, `library_version`; and `fetched_from`, a URL, if another machine compiled it.
    manifest: Mapping[str, Any] = field(compare=False, repr=False)
    # Rebuilds a kernel that was removed from the store. It takes a function, calls it with the new artifact before
    # another process can remove that, and returns the result.
    again: Callable[[Callable[[Artifact], Any]], Any] | None = field(
        default=None, compare=False, repr=False, kw_only=True
    )

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / LIBRARY

    @property
    def where(self) -> str:
        """The library's location, for messages."""
        return str(self.library)

    @property
    def origin(self) -> str:
        """Where the kernel comes from, in words."""
        url = self.manifest.get("fetched_from")
        return "compiled here" if url is None else f"fetched from {url}"

    @property
    def size(self) -> int:
        """Size of the library in bytes."""
        return int(self.manifest["files"][LIBRARY]["size"])

    def read_library(self) -> bytes:
        """Read the library and check it against the manifest again."""
        return self._read(LIBRARY)

    def read_source(self) -> bytes:
        """Read and check the source. Errors are those of :meth:`read_library`."""
        return self._read(SOURCE)

    def present(self) -> Artifact:
        """Mark the kernel as used and return it; rebuild it first if it was removed."""
        if self.again is None:
            return self
        if os.path.lexists(self.folder):
            disk.touch(self.folder)
            return self
        found: Artifact = self.again(lambda artifact: artifact)
        return found

    def _read(self, name: str) -> bytes:
        data: bytes | None = self._read_here(name)
        for _ in range(DELETIONS):
            if data is not None or self.again is None:
                break
            data = self.again(lambda artifact: artifact._read_here(name))
        if data is None:
            often = "" if self.again is None else f", and {DELETIONS} times after it was built again. {KEEP}"
            raise LoadError(f"{self.folder / name} cannot be read: it was removed since it was looked up{often}")
        return data

    def _read_here(self, name: str) -> bytes | None:
        """Read a file and check it; return None if it is missing."""
        expected, path = self.manifest["files"][name], self.folder / name
        try:
            data = read_private(path, limit=expected["size"])
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise LoadError(f"{path} cannot be read: {exc}") from None
        if sha256(data) != expected["sha256"]:
            raise LoadError(f"{path} changed since it was looked up: its SHA-256 does not match the manifest")
        return data

    @property
    def source(self) -> Path:
        """Path of the C++ source."""
        return self.folder / SOURCE

    @property
    def target(self) -> str:
        """The machine-code target."""
        return str(self.manifest["identity"]["target"])

    @property
    def spec(self) -> Declaration:
        """The declaration."""
        return declaration_from_json(self.manifest["identity"]["spec"])


def open_entry(folder: Path, key: str | None = None) -> Artifact:
    """Read one entry and check its manifest, owner, sizes and hashes."""
    try:
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise LoadError(f"{folder} is not a folder, or is a link")
        require_private(info, folder)
        manifest = _read_manifest(folder, key or folder.name)
        for name in (LIBRARY, SOURCE):
            expected = manifest["files"][name]
            data = read_private(folder / name, limit=expected["size"])
            if len(data) != expected["size"] or sha256(data) != expected["sha256"]:
                raise LoadError(f"{folder / name} ({len(data)} bytes) does not match its manifest")
    except OSError as exc:
        raise LoadError(f"{folder} cannot be read: {exc}") from None
    return Artifact(manifest["key"], folder, manifest["files"][LIBRARY]["sha256"], manifest)


def _read_manifest(folder: Path, expected: str) -> dict[str, Any]:
    path = folder / MANIFEST
    text = read_private(path, limit=_MAX_MANIFEST)
    if len(text) > _MAX_MANIFEST:
        raise LoadError(f"{path} is too large for a manifest")
    try:
        data = checked_json.parsed(text, "it", _MAX_MANIFEST)
        key = identity_key(data["identity"])
        files = data["files"]
        good = (
            data["format"] == FORMAT
            and key == data["key"] == expected
            and isinstance(data["identity"]["target"], str)
            and isinstance(data["identity"]["toolchain"]["nvcc"], str)
            and isinstance(data["sass"], dict)
            and isinstance(data["resources"], list)
            and set(files) == {LIBRARY, SOURCE}
            and all(type(f["size"]) is int and 0 <= f["size"] <= MAX_FILE for f in files.values())
            and all(isinstance(f["sha256"], str) for f in files.values())
            and all(isinstance(data.get(name, ""), str) for name in ("created", "fetched_from"))
        )
    except KeyError as exc:
        raise LoadError(f"{path} is not the manifest of a kernel: it has no field {exc}") from None
    except ConfigError as exc:
        raise LoadError(f"{path} is not the manifest of a kernel: {exc}") from None
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise LoadError(f"{path} is not the manifest of a kernel: a field has the wrong type") from None
    if not good:
        raise LoadError(f"{path} is the manifest of another kernel or of another format")
    return dict(data)


def source_key(folder: Path) -> str | None:
    """Return the key of an entry's source identity; None if it has no manifest of this format."""
    try:
        identity = _read_manifest(folder, folder.name)["identity"]
    except LoadError:
        return None
    return identity_key(source_part(identity))
