"""Keys of kernels, kept in files from one process to the next.

A kernel's key is the hash of its source, of the headers and of the compilers. To compute it, a process renders the
source and examines the compilers. Its first calls would wait for that (``benchmarks/bench_lookup.py`` measures it).
With a key from a file, a process only looks into the store.

A file is named after the declaration. Its folder is named after the paths, sizes and times of all else that the key
follows from: this package, its templates and the compilers. If a compiler is replaced by one with the same path, size
and time, the store's kernel is the old compiler's, which computes the same.

A look at all of these takes a millisecond. What looks for many kernels does it once (:func:`one_situation`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.artifacts import kept
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import env, resources
from cutlass_ops.base.errors import LoadError, StoreError, ToolchainError
from cutlass_ops.base.private import read_private
from cutlass_ops.compilation import finding
from cutlass_ops.declare.quantizing import Declaration

_LENGTH = 64
_KEY = re.compile(rb"[0-9a-f]{64}")


class _Found(threading.local):
    """The situation that a thread has found in :func:`one_situation`; empty if it has not looked yet."""

    known: list[str | None] | None = None


_FOUND = _Found()


@contextlib.contextmanager
def one_situation(known: list[str | None] | None = None) -> Iterator[None]:
    """Context in which this thread looks once at templates and compilers, for all keys that it asks for.

    A call may look for dozens of kernels. What changes meanwhile is noticed by the next call.

    Parameters
    ----------
    known : list, optional
        What such a context has found, to be used again: an empty list for the first one.
    """
    before = _FOUND.known
    _FOUND.known = known if known is not None else [] if before is None else before
    try:
        yield
    finally:
        _FOUND.known = before


def recalled(store: KernelStore, spec: Declaration) -> str | None:
    """Return the key of a declaration's kernel that a store has or had; None if it is not known."""
    return _read(place(store, spec))


def place(store: KernelStore | None, spec: Declaration) -> Path | None:
    """Return the file for a declaration's key in a store, by default the user's; None if none is kept.

    Ask for it before the key is computed: a header or a compiler may change while a kernel is compiled.
    """
    try:
        store, situation = store or KernelStore.default(), _known_situation()
    except (OSError, StoreError):
        return None
    if situation is None:
        return None
    return store.root / "keys" / situation / hashlib.sha256(spec.canonical().encode()).hexdigest()


def note(path: Path | None, key: str) -> None:
    """Write the key of a stored kernel to its file, which :func:`place` returned, if that is possible.

    The key must be of a source that this package rendered, and of the compilers that it finds by itself.
    """
    if path is not None and _read(path) != key:
        kept.keep(path.parents[2], path, key)


def _read(path: Path | None) -> str | None:
    try:
        key = b"" if path is None else read_private(path, _LENGTH)
    except (OSError, LoadError):
        return None
    return key.decode() if _KEY.fullmatch(key) else None


def _known_situation() -> str | None:
    known = _FOUND.known
    if known is None:
        return _situation()
    if not known:
        known.append(_situation())
    return known[0]


def _situation() -> str | None:
    """Return a name for all that a key follows from besides the declaration; None if no key can be kept.

    With ``CUTLASS_OPS_JIT=0``, any compiler's kernel will do, if it was compiled with the same flags.
    """
    package = kept.package()
    if package is None:
        return None
    about = [package, kept.stamps(resources.templates()), str(env.lineinfo_enabled())]
    if env.jit_enabled():
        if env.cutlass_dir() is not None:
            return None  # its headers may be edited: each process hashes them
        path = finding.search_path()
        try:
            files = [finding.nvcc(path)[0], finding.host_compiler(path)]
        except ToolchainError:
            return None
        for name, version in (("cutlass_library", "source/include/cutlass/version.h"), ("tvm_ffi", "_version.py")):
            try:
                found = importlib.util.find_spec(name)
            except ValueError:  # a module that was made up
                found = None
            if found is None or found.origin is None:
                return None
            files.append(Path(found.origin).parent / version)
            about.append(files[-1].read_text(errors="replace"))  # some packers give all files one time
        about += [path, *(kept.stamp(str(each), os.stat(each)) for each in files)]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:32]
