"""Compiled kernels on disk: their identity, one compilation across processes, and nothing loaded that is not whole.

Layout of a store, which is safe to delete at any time::

    v1/<first two of key>/<key>/   kernel.so, kernel.cu, manifest.json: published by one rename, never changed
    locks/<key>                    held while a kernel is built; the system drops it with the process
    tmp/<key>/                     a build in progress; belongs to who holds the lock
    failed/<key>/                  the last failed build: source, log, and links to run its command again
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import hashlib
import json
import logging
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlass_ops import _env, _resources
from cutlass_ops.errors import LoadError, StoreError
from cutlass_ops.private import read_private, require_private
from cutlass_ops.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.compiler import Compiled

FORMAT = 1  # of the manifest

LIBRARY = "kernel.so"
SOURCE = "kernel.cu"
MANIFEST = "manifest.json"

_KEY = "[0-9a-f]" * 64
_MAX_MANIFEST = 1 << 20  # bytes
_POLL = 0.05  # seconds between looks at a lock that another process holds

_log = logging.getLogger("cutlass_ops")


def identity_key(identity: Mapping[str, Any]) -> str:
    """Return the key that belongs to an identity: the SHA-256 of its canonical JSON.

    Raises
    ------
    TypeError, ValueError
        If the identity holds anything that has no canonical JSON.
    """
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _sha256(text.encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Artifact:
    """One compiled kernel on disk, found whole when it was looked up.

    Attributes
    ----------
    key : str
        Hash of everything that changes the binary.
    folder : Path
        Where its files lie.
    sha256 : str
        Of the library; checked again before it is loaded.
    manifest : mapping
        ``identity`` (what the key hashes), ``files``, ``sass`` (opcode counts), ``resources``, ``created``,
        ``compile_seconds``, ``library_version``.
    """

    key: str
    folder: Path
    sha256: str
    manifest: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def library(self) -> Path:
        """The shared library."""
        return self.folder / LIBRARY

    @property
    def where(self) -> str:
        """Where the library lies, in words."""
        return str(self.library)

    @property
    def size(self) -> int:
        """Bytes of the library."""
        return int(self.manifest["files"][LIBRARY]["size"])

    def read_library(self) -> bytes:
        """Read the library, and check again that it is what the manifest says.

        Raises
        ------
        LoadError
            If it is not.
        """
        try:
            data = read_private(self.library, limit=self.size)
        except OSError as exc:
            raise LoadError(f"{self.where} cannot be read: {exc}") from None
        if _sha256(data) != self.sha256:
            raise LoadError(f"{self.where} changed since it was looked up: its SHA-256 is not the manifest's")
        return data

    @property
    def source(self) -> Path:
        """The C++ source that it was compiled from."""
        return self.folder / SOURCE

    @property
    def target(self) -> str:
        """The machine-code target."""
        return str(self.manifest["identity"]["target"])

    @property
    def spec(self) -> KernelSpec:
        """The declaration.

        Raises
        ------
        ConfigError
            If this version of the library cannot read it.
        """
        return KernelSpec.from_json(self.manifest["identity"]["spec"])


def open_entry(folder: Path) -> Artifact:
    """Read one entry and check it: manifest, owner, sizes, hashes.

    Raises
    ------
    LoadError
        If it is not whole; the message says in what way.
    """
    try:
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise LoadError(f"{folder} is not a folder of its own")
        require_private(info, folder)
        manifest = _read_manifest(folder)
        for name in (LIBRARY, SOURCE):
            expected = manifest["files"][name]
            data = read_private(folder / name, limit=expected["size"])
            if len(data) != expected["size"] or _sha256(data) != expected["sha256"]:
                raise LoadError(f"{folder / name} is not what its manifest says: {len(data)} bytes")
    except OSError as exc:
        raise LoadError(f"{folder} cannot be read: {exc}") from None
    return Artifact(folder.name, folder, manifest["files"][LIBRARY]["sha256"], manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    text = read_private(path, limit=_MAX_MANIFEST)
    if len(text) > _MAX_MANIFEST:
        raise LoadError(f"{path} is larger than a manifest can be")
    try:
        data = json.loads(text)
        key = identity_key(data["identity"])
        files = data["files"]
        good = (
            data["format"] == FORMAT
            and key == data["key"] == folder.name
            and isinstance(data["identity"]["target"], str)
            and isinstance(data["identity"]["toolchain"]["nvcc"], str)
            and isinstance(data["sass"], dict)
            and isinstance(data["resources"], list)
            and set(files) == {LIBRARY, SOURCE}
            and all(type(f["size"]) is int and f["size"] >= 0 and isinstance(f["sha256"], str) for f in files.values())
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise LoadError(f"{path} is no manifest: {exc!r}") from None
    if not good:
        raise LoadError(f"{path} is not the manifest of this kernel, or of another format")
    return dict(data)


class KernelStore:
    """A folder of compiled kernels, shared by all processes of one user.

    Nothing is created before the first kernel is built.

    Parameters
    ----------
    root : Path
        The store's folder. It must belong to this user (or root), and nobody else may be able to write it.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def default(cls) -> KernelStore:
        """Return the user's own store: ``CUTLASS_OPS_CACHE_DIR``, else in the user's cache folder.

        Raises
        ------
        StoreError
            If there is no folder for it.
        ValueError
            If the variable is relative.
        """
        try:
            return cls(_env.cache_dir())
        except _env.NoHomeError as exc:
            raise StoreError(f"there is no kernel store: {exc}") from None

    def __repr__(self) -> str:
        return f"KernelStore({str(self.root)!r})"

    def lookup(self, key: str) -> Artifact | None:
        """Return the kernel with this key if a whole one is there. Anything else is a miss.

        Raises
        ------
        StoreError
            If others may write the store.
        """
        self._require_private_root()
        folder = self._entry(key)
        if not os.path.lexists(folder):
            return None
        try:
            return open_entry(folder)
        except LoadError as exc:
            _log.warning("a stored kernel is ignored: %s", exc)
            return None

    def entries(self) -> Iterator[Artifact]:
        """Yield every whole kernel in the store, in the order of their keys.

        Raises
        ------
        StoreError
            If it is no folder, or others may write it.
        """
        self._require_private_root()
        for folder in sorted((self.root / f"v{FORMAT}").glob(f"??/{_KEY}")):
            artifact = self.lookup(folder.name)
            if artifact is not None:
                yield artifact

    def find(self, identity: Mapping[str, Any]) -> Artifact | None:
        """Return a kernel with this :func:`source_identity`, whichever compiler made it.

        Raises
        ------
        StoreError
            If others may write the store.
        """
        for artifact in self.entries():
            if {k: v for k, v in artifact.manifest["identity"].items() if k != "toolchain"} == identity:
                return artifact
        return None

    @contextlib.contextmanager
    def lock(self, key: str, cancel: threading.Event | None = None) -> Iterator[None]:
        """Hold the right to build one kernel, among all threads and processes; it ends with the process.

        Raises
        ------
        StoreError
            If the store cannot be written.
        CancelledError
            If ``cancel`` is set while another holds the lock.
        """
        descriptor = self._open_lock(key)
        try:
            with self.writing():
                while not _try_lock(descriptor):
                    if cancel is not None and cancel.is_set():
                        raise CancelledError
                    time.sleep(_POLL)
            yield
        finally:
            _unlock(descriptor)

    def workspace(self, key: str, source: str) -> Path:
        """Return a fresh folder to build one kernel in, its source written. The caller holds the kernel's lock.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        with self.writing():
            folder = self._folder("tmp") / key
            self.discard(folder)
            self._sweep(held=key)
            folder.mkdir(mode=0o700)
            (folder / SOURCE).write_text(source)
        return folder

    def publish(
        self, folder: Path, identity: Mapping[str, Any], sass: Mapping[str, int], compiled: Compiled
    ) -> Artifact:
        """Make a built kernel visible, at once and whole. The caller holds the kernel's lock.

        Parameters
        ----------
        folder : Path
            From :meth:`workspace`, with the library in it. It is gone afterwards.
        identity : mapping
            From :func:`cutlass_ops.identity.kernel_identity`.
        sass : mapping
            Opcode counts that prove what the kernel uses.
        compiled : Compiled
            What the compiler reported.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        key = identity_key(identity)
        files = {name: (folder / name).read_bytes() for name in (LIBRARY, SOURCE)}
        manifest = {
            "format": FORMAT,
            "key": key,
            "identity": dict(identity),
            "files": {name: {"sha256": _sha256(data), "size": len(data)} for name, data in files.items()},
            "sass": dict(sass),
            "resources": list(compiled.resources),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "compile_seconds": round(compiled.seconds, 3),
            "library_version": _resources.library_version(),
        }
        with self.writing():
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
            _keep_only(folder, (LIBRARY, SOURCE, MANIFEST))
            entry = self._entry(key)
            self._folder(f"v{FORMAT}", entry.parent.name)
            # What is there is not whole, or nothing would have been built.
            self.discard(entry)
            folder.rename(entry)
            _sync(entry.parent)
        return open_entry(entry)

    def keep_failed(self, folder: Path) -> Path:
        """Move a failed build to where a person can look at it, in place of that kernel's last failure.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        with self.writing():
            kept = self._folder("failed") / folder.name
            self.discard(kept)
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            folder.rename(kept)
        return kept

    def discard(self, folder: Path) -> None:
        """Remove a folder so that nobody sees it half removed.

        Raises
        ------
        OSError
            If it cannot be moved away.
        """
        aside = self._folder("tmp") / f"{folder.name}.{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
            _remove(aside)

    def clean(self) -> int:
        """Remove every kernel, failure and abandoned build; return how many kernels there were.

        Builds in progress go on, and processes keep what they have loaded.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        if not self.root.exists():
            return 0
        self._require_private_root()
        entries = list((self.root / f"v{FORMAT}").glob("*/*"))
        with self.writing():
            for folder in (*entries, *(self.root / "failed").glob("*")):
                self.discard(folder)
            self._sweep()
        return len(entries)

    def _entry(self, key: str) -> Path:
        if not fnmatch.fnmatchcase(key, _KEY):
            raise ValueError(f"a kernel's key is a SHA-256 in hexadecimal, not {key!r}")
        return self.root / f"v{FORMAT}" / key[:2] / key

    def _require_private_root(self) -> None:
        try:
            info = self.root.stat()
            require_private(info, self.root)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StoreError(
                f"the kernel store {self.root} cannot be used: {exc}. {_env.CACHE_DIR.name} names another folder"
            ) from None
        except LoadError as exc:
            raise StoreError(
                f"the kernel store is not private: {exc}. Compiled code would be loaded from it: correct it with "
                f"chown and chmod go-w, or set {_env.CACHE_DIR.name} to a folder of your own"
            ) from None
        if not stat.S_ISDIR(info.st_mode):
            raise StoreError(
                f"the kernel store {self.root} cannot be used: it is no folder. Remove it, or set "
                f"{_env.CACHE_DIR.name} to a folder"
            )

    def _folder(self, *names: str) -> Path:
        """Return a folder of the store, made if it is not there."""
        folder = self.root
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._require_private_root()
        for name in names:
            folder /= name
            folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def _open_lock(self, key: str) -> int:
        with self.writing():
            path = self._folder("locks") / self._entry(key).name
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def _sweep(self, held: str | None = None) -> None:
        """Remove what builders left that are no more: whose locks nobody, or this caller, holds."""
        for folder in self._folder("tmp").glob(f"{_KEY}*"):
            key = folder.name[:64]
            if key == held:
                _remove(folder)
                continue
            descriptor = self._open_lock(key)
            try:
                if _try_lock(descriptor):
                    _remove(folder)
            finally:
                _unlock(descriptor)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Put what goes wrong with files of the store into words.

        Raises
        ------
        StoreError
            In place of any OSError.
        """
        try:
            yield
        except OSError as exc:
            where = f"{_env.CACHE_DIR.name} names another folder for compiled kernels"
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(f"no space is left in the kernel store {self.root}; {where}") from exc
            if exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise StoreError(
                    f"the kernel store {self.root} cannot be written ({exc}): kernels in it can be used, but new ones "
                    f"must be built elsewhere; {where}"
                ) from exc
            raise StoreError(f"the kernel store {self.root} cannot be used: {exc}") from exc


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    # Closing alone would leave it to a process that was forked meanwhile, and has the descriptor too.
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _keep_only(folder: Path, names: Sequence[str]) -> None:
    """Remove everything else, and make what stays private and durable."""
    for path in folder.iterdir():
        if path.name not in names:
            _remove(path)
    for name in names:
        (folder / name).chmod(0o600)
        _sync(folder / name)
    _sync(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
