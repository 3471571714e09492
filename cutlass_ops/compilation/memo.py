"""What later processes need not find out again: small values in files of a store's folder.

A value is named by a table and a key. Its folder is named by a stamp of all else that values follow from: this package,
its templates, the settings and the compilers, by paths, sizes and times. If a compiler is replaced by one with the same
path, size and time, the store's kernels are the old compiler's, which compute the same.

A file begins with a digest of its path in the store and of its text. A file that is missing, damaged, or in a folder
that others may write to counts as none: the value is found out again, and written again.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import checked_json, env, resources, session
from cutlass_ops.base.disk import read_private, replacing
from cutlass_ops.base.errors import ConfigError, LoadError, StoreError, ToolchainError
from cutlass_ops.compilation import finding
from cutlass_ops.declare.quantizing import Declaration

FOLDER = "memo"

_OTHERS = 4  # number of folders of other stamps that are kept
_LIMIT = 1 << 20  # bytes; a value has a few thousand
_DIGEST = 64  # characters

_log = logging.getLogger("cutlass_ops")


def place(store: Path, table: str, key: object, stamped: str | None = None) -> Path | None:
    """Return the file of a value in a store's folder; None if nothing can be kept. The key is any JSON value.

    Ask for it before the value is found out: what it follows from may change meanwhile. The default stamp is today's.
    """
    found = stamped or stamp()
    name = hashlib.sha256(checked_json.canonical(key)).hexdigest()
    return None if found is None else store / FOLDER / found / f"{table}-{name}"


def place_of_key(spec: Declaration, store: KernelStore, stamped: str | None = None) -> Path | None:
    """Return the file for the key of a declaration's kernel in a store, as :func:`place` does."""
    return place(store.root, "keys", spec.canonical(), stamped)


def recall(path: Path | None) -> Any:
    """Return the value that :func:`keep` wrote; None if the file is missing, damaged or not private."""
    if path is None:
        return None
    store = path.parents[2]
    try:
        KernelStore(store).require_private(*path.parent.relative_to(store).parts)
        data = read_private(path, _LIMIT)
        text = data[_DIGEST + 1 :]
        if data == _sealed(path, text):
            return checked_json.parsed(text, str(path), _LIMIT)
        _log.info("%s is damaged, so that what it has is found out again", path)
    except FileNotFoundError:
        pass
    except (OSError, ConfigError, LoadError, StoreError) as exc:
        _log.info("%s is not read, so that what it has is found out again: %s", path, exc)
    return None


def keep(path: Path | None, value: object) -> None:
    """Write a value to its file, if that is possible. If the stamp is new, the oldest other ones are removed."""
    if path is None:
        return
    store = path.parents[2]
    with contextlib.suppress(OSError, StoreError):
        is_new = not path.parent.is_dir()
        KernelStore(store).folder(*path.parent.relative_to(store).parts)  # private, as the store has to be
        with replacing(path) as aside, open(aside, "xb", opener=_private) as file:
            file.write(_sealed(path, checked_json.canonical(value)))
        if is_new:
            others = [each for each in os.scandir(path.parents[1]) if each.name != path.parent.name]
            others.sort(key=lambda each: each.stat().st_mtime_ns)
            for each in others[:-_OTHERS]:
                shutil.rmtree(each.path, ignore_errors=True)


def _sealed(path: Path, text: bytes) -> bytes:
    where = path.relative_to(path.parents[2]).as_posix()
    return hashlib.sha256(f"{where}\n".encode() + text).hexdigest().encode() + b"\n" + text


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def stamp() -> str | None:
    """Return a name for all that values follow from besides their keys. A look at all files takes a millisecond.

    None if that is not known: a file of this package changed after its import, or the user named CUTLASS's headers,
    which may be edited. With ``CUTLASS_OPS_JIT=0``, any compiler's kernels will do.
    """
    package, jit = _package(), env.jit_enabled()
    if package is None or (jit and env.cutlass_dir() is not None):
        return None
    about = [package, str(env.lineinfo_enabled()), str(jit)]
    try:
        about += (_stamp(*each) for each in _files(resources.templates()))
    except OSError:
        return None
    if jit:
        about += _compilers()
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:32]


@functools.cache
def _package() -> str | None:
    """Return a name for the package's code and tables; None if one changed after the import: the old code runs."""
    files = list(_files(resources.package(), (".py", ".json", ".gz")))
    if any(max(info.st_mtime_ns, info.st_ctime_ns) > session.IMPORTED for _, info in files):
        return None
    return "\n".join([resources.library_version(), *(_stamp(*each) for each in files)])


def _compilers() -> list[str]:
    """Describe what compiles, by a look at files alone; nothing of it if a part is missing."""
    path = finding.search_path()
    about = [path]
    try:
        files = [*(nvcc for nvcc, _ in finding.nvccs(path)), finding.host_compiler(path)]
        for name, version in (("cutlass_library", "source/include/cutlass/version.h"), ("tvm_ffi", "_version.py")):
            found = importlib.util.find_spec(name)
            files.append(Path((found and found.origin) or "").parent / version)
            about.append(files[-1].read_text(errors="replace"))  # some packers give all files one time
        return [*about, *(_stamp(str(each), os.stat(each)) for each in files)]
    except (OSError, ToolchainError, ValueError):  # the last of a module that was made up
        return about


def _files(folder: Path, endings: tuple[str, ...] = ("",)) -> Iterator[tuple[str, os.stat_result]]:
    for each in sorted(os.scandir(folder), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _files(Path(each.path), endings)
        elif each.name.endswith(endings):
            yield each.path, each.stat()


def _stamp(name: str, info: os.stat_result) -> str:
    return f"{name} {info.st_size} {info.st_mtime_ns}"
