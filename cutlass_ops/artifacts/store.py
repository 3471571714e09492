"""The kernel store: compiled kernels on disk, built once among all processes, and checked before use.

Layout of a store, which is safe to delete at any time::

    v2/<first two of key>/<key>/   kernel.so, kernel.cu, manifest.json: published by one rename, never changed
    locks/<key>                    exists while a kernel is built; the system releases the lock with the process
    tmp/<key>.<random>/            a build in progress; belongs to one builder, which holds the lock
    failed/<key>/                  the last failed build: source, log, and links to run its command again
    keys/, choices/                what saves later processes work (:mod:`cutlass_ops.artifacts.kept`)

A kernel's folder is touched on use. If the store grows too large, the least recently used kernels are removed.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import json
import logging
import math
import os
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cutlass_ops.artifacts.entry import (
    FORMAT,
    LIBRARY,
    MANIFEST,
    SOURCE,
    Artifact,
    identity_key,
    open_entry,
    sha256,
    source_key,
)
from cutlass_ops.artifacts.index import Index
from cutlass_ops.base import env, locks, recency, resources
from cutlass_ops.base.atomic import DELETIONS
from cutlass_ops.base.errors import LoadError, StoreError
from cutlass_ops.base.private import require_private
from cutlass_ops.base.recency import Use
from cutlass_ops.base.session import cached

if TYPE_CHECKING:
    from cutlass_ops.artifacts.compiled import Compiled

_KEY_LENGTH = 64
_KEY = "[0-9a-f]" * _KEY_LENGTH
_FOLDERS = (f"v{FORMAT}", "locks", "tmp", "failed")
# Limits on the failed builds that are kept: their number and their bytes.
_MOST_FAILED = 100
_MAX_FAILED = 100_000_000
# A process measures the store at its first published kernel, then again each time it has added 1/64 of the limit.
_MEASURED_PARTS = 64

_log = logging.getLogger("cutlass_ops")


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
        """Return the user's store: ``CUTLASS_OPS_CACHE_DIR``, or else in the user's cache folder.

        Raises
        ------
        StoreError
            If the user has no home folder and no variable names another.
        ValueError
            If the variable is relative.
        """
        try:
            return cls(env.cache_dir())
        except env.NoHomeError as exc:
            raise StoreError(f"there is no kernel store: {exc}") from None

    def __repr__(self) -> str:
        return f"KernelStore({str(self.root)!r})"

    def lookup(self, key: str) -> Artifact | None:
        """Return the kernel with this key and mark it as used; return None if it is missing or incomplete.

        Raises
        ------
        StoreError
            If others may write the store.
        """
        self._require_private_root()
        artifact = self._whole(self._entry(key))
        if artifact is not None:
            recency.touch(artifact.folder)
        return artifact

    def _whole(self, folder: Path) -> Artifact | None:
        inode = _inode(folder)
        if inode is None:
            return None
        try:
            return open_entry(folder)
        except LoadError as exc:
            # Another process may have removed and rebuilt it meanwhile.
            if _inode(folder) != inode:
                return self._whole(folder)
            _log.warning("a stored kernel is ignored: %s", exc)
            return None

    def entries(self) -> Iterator[Artifact]:
        """Yield every complete kernel in the store, sorted by key.

        Raises
        ------
        StoreError
            If the store is not a folder, or others may write it.
        """
        self._require_private_root()
        with self.reading():
            folders = sorted((self.root / f"v{FORMAT}").glob(f"??/{_KEY}"))
        for folder in folders:
            artifact = self._whole(folder)
            if artifact is not None:
                yield artifact

    def is_empty(self) -> bool:
        """Whether no kernel was ever published here, or all were removed together with their folder.

        Raises
        ------
        StoreError
            If the folder cannot be read.
        """
        with self.reading():
            return not any((self.root / f"v{FORMAT}").glob("??"))

    def find(self, identity: Mapping[str, Any]) -> Artifact | None:
        """Return a kernel with this :func:`source_identity`, from any compiler, and mark it as used.

        Raises
        ------
        StoreError
            If others may write the store.
        """
        self._require_private_root()
        with self.reading():
            keys = _index(self.root / f"v{FORMAT}").names(identity_key(identity))
        return next((artifact for key in keys if (artifact := self.lookup(key)) is not None), None)

    @contextlib.contextmanager
    def lock(self, key: str, cancel: threading.Event | None = None, name: str | None = None) -> Iterator[None]:
        """Hold the lock to build one kernel, exclusive among all threads and processes.

        Parameters
        ----------
        key : str
            The kernel's key.
        cancel : threading.Event, optional
            Set it to stop waiting.
        name : str, optional
            The kernel's name, shown to other waiting processes; the default is the key.

        Raises
        ------
        StoreError
            If the store cannot be written, or its file system has no locks.
        CancelledError
            If ``cancel`` is set while waiting.
        """
        what = f"the build of {name or key}"
        with contextlib.ExitStack() as stack:
            with self.writing():
                for attempt in range(DELETIONS + 1):
                    try:
                        stack.enter_context(locks.held(self._lock_file(key), what, _ADVICE, cancel))
                        break
                    except FileNotFoundError:
                        # The store was deleted while waiting. Create its folders again.
                        if attempt == DELETIONS:
                            raise
            yield

    def workspace(self, key: str, source: str) -> Path:
        """Create an empty folder to build one kernel in, and write the source. The caller holds the kernel's lock.

        No other builder has the same folder: if the store is deleted, locks go with it, and two may build one kernel.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        env.cache_size()  # report a wrong value before compiling
        with self.writing():
            self._sweep(held=key)
            folder = self.folder("tmp") / f"{key}.{uuid.uuid4().hex}"
            folder.mkdir(mode=0o700)
            (folder / SOURCE).write_text(source, encoding="utf-8")
        return folder

    def publish(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        sass: Mapping[str, int],
        compiled: Compiled,
        fetched_from: str | None = None,
    ) -> Artifact:
        """Publish a built kernel atomically. The caller holds the kernel's lock.

        Parameters
        ----------
        folder : Path
            The folder from :meth:`workspace`, with the library in it. It is moved into the store.
        identity : mapping
            From :func:`cutlass_ops.compilation.identity.kernel_identity`.
        sass : mapping
            The kernel's opcode counts.
        compiled : Compiled
            The compiler's report.
        fetched_from : str, optional
            URL of the remote store that it was fetched from.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        key = identity_key(identity)
        with self.writing():
            files = {name: (folder / name).read_bytes() for name in (LIBRARY, SOURCE)}
        manifest = {
            "format": FORMAT,
            "key": key,
            "identity": dict(identity),
            "files": {name: {"sha256": sha256(data), "size": len(data)} for name, data in files.items()},
            "sass": dict(sass),
            "resources": list(compiled.resources),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "compile_seconds": round(compiled.seconds, 3),
            "library_version": resources.library_version(),
            **({} if fetched_from is None else {"fetched_from": fetched_from}),
        }
        entry = self._entry(key)
        with self.writing():
            (folder / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            _keep_only(folder, (LIBRARY, SOURCE, MANIFEST))
            # Open it before the rename: afterwards, a process that shrinks the store may remove it at any time.
            artifact = replace(open_entry(folder, key), folder=entry)
            self.folder(f"v{FORMAT}", entry.parent.name)
            # An existing entry is incomplete, otherwise nothing would have been built.
            self.discard(entry)
            recency.touch(folder)
            folder.rename(entry)
            _sync(entry.parent)
        try:
            self._keep_small(artifact)
        except (OSError, StoreError) as exc:
            # The kernel itself is published.
            _log.warning("cannot limit the size of the kernel store %s: %s", self.root, exc)
        return artifact

    def keep_failed(self, folder: Path) -> Path:
        """Keep a failed build for inspection, in place of that kernel's last failure.

        If there are too many failures, the oldest are removed.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        with self.writing():
            kept = self.folder("failed") / folder.name[:_KEY_LENGTH]
            self.discard(kept)
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            recency.touch(folder)
            folder.rename(kept)
            failures = [use for use in recency.uses(kept.parent.iterdir()) if use.folder != kept]
            for use in recency.excess(failures, _MAX_FAILED, _MOST_FAILED - 1):
                self.discard(use.folder)
        return kept

    def discard(self, folder: Path) -> None:
        """Remove a folder atomically.

        Raises
        ------
        OSError
            If it cannot be moved away.
        """
        aside = self.folder("tmp") / f"{folder.name}.{uuid.uuid4().hex}"
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
            _remove(aside)

    def clean(self, *, unused_for: float | None = None, keep: int | None = None) -> int:
        """Remove kernels, abandoned builds and abandoned locks; return the number of removed kernels.

        Without arguments, remove every kernel and every failed build. Builds in progress continue, and processes keep
        the kernels that they have loaded.

        Parameters
        ----------
        unused_for : float, optional
            Remove kernels that were not looked up, and failed builds that happened, for this many seconds.
        keep : int, optional
            Remove the least recently used kernels until at most this many bytes are left.

        Raises
        ------
        StoreError
            If the store cannot be written.
        """
        if not self.root.exists():
            return 0
        self._require_private_root()
        with self.writing():
            kernels, failures = self._uses(), recency.uses((self.root / "failed").glob("*"))
            if unused_for is None and keep is None:
                unused_for = -math.inf
            if unused_for is not None:
                before = (time.time() - unused_for) * 1e9
                old = [use for use in (*kernels, *failures) if use.last < before]
            else:
                old = []
            gone = dict.fromkeys(old)
            if keep is not None:
                gone |= dict.fromkeys(recency.excess([use for use in kernels if use not in gone], keep))
            self._sweep_locks()
            self._sweep()
            removed = {use for use in gone if self._remove_unlocked(use.folder)}
        return sum(use in removed for use in kernels)

    def size(self) -> int:
        """Return the total size of all kernels in bytes.

        Raises
        ------
        StoreError
            If the store cannot be read.
        """
        with self.writing():
            return sum(use.size for use in self._uses())

    def _uses(self) -> list[Use]:
        return recency.uses((self.root / f"v{FORMAT}").glob("*/*"))

    def _keep_small(self, published: Artifact) -> None:
        """Remove the least recently used kernels if a new one makes the store too large."""
        limit = env.cache_size()
        if limit is None:
            return
        added = _added().get(self.root, limit) + sum(f["size"] for f in published.manifest["files"].values())
        if added * _MEASURED_PARTS < limit:
            _added()[self.root] = added
            return
        _added()[self.root] = 0
        kernels = self._uses()
        kept = [use for use in kernels if use.folder == published.folder]
        others = [use for use in kernels if use.folder != published.folder]
        for use in recency.excess(others, limit - sum(use.size for use in kept)):
            with contextlib.suppress(FileNotFoundError):
                # Another process may have used or rebuilt it meanwhile.
                if recency.last_use(use.folder) == use.last:
                    self._remove_unlocked(use.folder)

    def _remove_unlocked(self, folder: Path) -> bool:
        """Remove a kernel or a failed build, unless its lock is held: the holder may be about to read it."""
        if not fnmatch.fnmatchcase(folder.name, _KEY):
            self.discard(folder)
            return True
        with self._unlocked(folder.name) as free:
            if free:
                self.discard(folder)
        return free

    @contextlib.contextmanager
    def _unlocked(self, key: str) -> Iterator[bool]:
        """Yield whether a kernel's lock is free, and hold it during the context if it is."""
        path = self._lock_file(key)
        with contextlib.ExitStack() as stack:
            try:
                free = stack.enter_context(locks.attempted(path, f"the removal of {key}", _ADVICE))
            except StoreError:
                # The file system has no locks, so nobody can build there.
                free = True
            yield free

    def _entry(self, key: str) -> Path:
        if not fnmatch.fnmatchcase(key, _KEY):
            raise ValueError(f"a kernel's key must be a SHA-256 in lower-case hexadecimal, not {key!r}")
        return self.root / f"v{FORMAT}" / key[:2] / key

    def _require_private_root(self) -> None:
        try:
            info = self.root.stat()
            require_private(info, self.root)
        except FileNotFoundError:
            return
        except OSError as exc:
            raise StoreError(
                f"the kernel store {self.root} cannot be used: {exc}. Set {env.CACHE_DIR.name} to another folder"
            ) from None
        except LoadError as exc:
            raise StoreError(
                f"the kernel store is not private: {exc}. Compiled code would be loaded from it: fix it with "
                f"chown and chmod go-w, or set {env.CACHE_DIR.name} to a folder of your own"
            ) from None
        if not stat.S_ISDIR(info.st_mode):
            raise StoreError(
                f"the kernel store {self.root} cannot be used: it is not a folder. Remove it, or set "
                f"{env.CACHE_DIR.name} to a folder"
            )

    def folder(self, *names: str) -> Path:
        """Return a folder of the store; create it if missing.

        Raises
        ------
        StoreError
            If others may write it.
        OSError
            If it cannot be created.
        """
        folder = self.root
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError as exc:
            if not os.path.islink(exc.filename):
                raise
            raise StoreError(
                f"the kernel store {self.root} cannot be used: {exc.filename} is a link to "
                f"{os.readlink(exc.filename)}, which does not exist or is not a folder. Create that folder, or set "
                f"{env.CACHE_DIR.name} to another one"
            ) from None
        self._require_private_root()
        for name in names:
            folder /= name
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            self._require_own(folder)
        return folder

    def _require_own(self, folder: Path) -> None:
        """Require a folder of the store: nothing is written through a link, or where other users can replace files."""
        mode = folder.lstat().st_mode
        if not stat.S_ISDIR(mode):
            what = "a link" if stat.S_ISLNK(mode) else "not a folder"
            raise StoreError(f"the kernel store {self.root} cannot be used: {folder} is {what}. Remove it")
        try:
            require_private(folder.lstat(), folder)
        except LoadError as exc:
            raise StoreError(f"the kernel store is not private: {exc}. Fix it with chown, chmod go-w") from None

    def require_writable(self) -> None:
        """Check that kernels can be built into the store. Nothing stays changed, and no folder is created.

        Raises
        ------
        StoreError
            If they cannot.
        """
        self._require_private_root()
        with self.writing():
            here = next(folder for folder in (self.root, *self.root.parents) if os.path.lexists(folder))
            own = [self.root / name for name in _FOLDERS if os.path.lexists(self.root / name)]
            for folder in own:
                self._require_own(folder)
            for folder in (here, *own):
                # A real attempt: permission bits are not enough, since even root cannot write everywhere.
                tempfile.TemporaryFile(dir=folder).close()

    def _lock_file(self, key: str) -> Path:
        return self.folder("locks") / self._entry(key).name

    def _sweep(self, held: str | None = None) -> None:
        """Remove abandoned builds: those whose lock is free or held by this caller."""
        for folder in self.folder("tmp").glob(f"{_KEY}*"):
            key = folder.name[:_KEY_LENGTH]
            if key == held:
                _remove(folder)
                continue
            with self._unlocked(key) as free:
                if free:
                    _remove(folder)

    def _sweep_locks(self) -> None:
        """Remove the files of free locks, by taking and releasing each."""
        for path in self.folder("locks").glob(_KEY):
            if path.is_symlink() or not path.is_file():
                _remove(path)
                continue
            with self._unlocked(path.name):
                pass  # releasing a lock removes its file

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn a refusal to read into a StoreError that says what to do, and other OSErrors as :meth:`writing` does.

        Raises
        ------
        StoreError
            If the block raises OSError.
        """
        with self.writing():
            try:
                yield
            except PermissionError as exc:
                raise StoreError(
                    f"the kernel store {self.root} cannot be read by this user ({exc}): its owner can run "
                    f"chmod -R a+rX on it, or set {env.CACHE_DIR.name} to another folder"
                ) from exc

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn any OSError into a StoreError that says what to do.

        Raises
        ------
        StoreError
            If the block raises OSError.
        """
        try:
            yield
        except OSError as exc:
            remedy = f"set {env.CACHE_DIR.name} to another folder for compiled kernels"
            if exc.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreError(f"no space is left in the kernel store {self.root}: {remedy}") from exc
            if exc.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise StoreError(
                    f"the kernel store {self.root} cannot be written ({exc}). Its kernels can be used; to build new "
                    f"ones, {remedy}"
                ) from exc
            raise StoreError(f"the kernel store {self.root} cannot be used: {exc}. To build kernels, {remedy}") from exc


_ADVICE = f"existing kernels can be used, but to build new ones set {env.CACHE_DIR.name} to a folder on a local disk"


@cached(maxsize=None)
def _added() -> dict[Path, int]:
    """Return how many bytes were published in each store since it was last measured."""
    return {}


@cached(maxsize=8)
def _index(folder: Path) -> Index:
    return Index(folder, source_key)


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def _keep_only(folder: Path, names: Sequence[str]) -> None:
    """Remove all other files, and make these private and durable."""
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
