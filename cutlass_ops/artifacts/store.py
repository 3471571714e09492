"""The kernel store: compiled kernels on disk, built once among all processes, and checked before use.

Layout of a store, which is safe to delete at any time::

    v2/<first two of key>/<key>/   kernel.so, kernel.cu, manifest.json: published by one rename, never changed
    locks/<key>                    exists while a kernel is built; the system releases the lock with the process
    tmp/<key>.<boot>.<random>/     a build in progress on one machine; belongs to one builder, which holds the lock
    failed/<key>/                  the last failed build: source, log, and links to run its command again
    memo/                          what saves later processes work (:mod:`cutlass_ops.compilation.memo`)

A kernel's folder is touched on use. If the store grows too large, the least recently used kernels are removed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fnmatch
import functools
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
from cutlass_ops.base import disk, env, locks, resources
from cutlass_ops.base.disk import DELETIONS, Use, require_private
from cutlass_ops.base.errors import LoadError, StoreError
from cutlass_ops.base.session import Part, Session, cached, warn_once

if TYPE_CHECKING:
    from cutlass_ops.artifacts.entry import Compiled

_KEY_LENGTH = 64
_KEY = "[0-9a-f]" * _KEY_LENGTH
_FOLDERS = (f"v{FORMAT}", "locks", "tmp", "failed")
# Limits on the failed builds that are kept: their number and their bytes.
_MOST_FAILED = 100
_MAX_FAILED = 100_000_000
_ABANDONED = 86_400.0  # seconds after which another machine's build is abandoned

_log = logging.getLogger("cutlass_ops")


class KernelStore:
    """A folder of compiled kernels, shared by all processes of one user.

    Nothing is created before the first kernel is built. The folder must belong to this user (or root), and nobody else
    may be able to write it. ``spare`` is the store that takes what cannot be built into this one, and is looked into.
    """

    _may_be_link = True

    def __init__(self, root: Path, spare: KernelStore | None = None) -> None:
        self.root = root
        self.spare = spare

    @classmethod
    def of_user(cls) -> KernelStore:
        """Return the user's store: ``CUTLASS_OPS_CACHE_DIR``, or else in the user's cache folder."""
        try:
            return cls(env.cache_dir())
        except env.NoHomeError as exc:
            raise StoreError(f"there is no kernel store: {exc}") from None

    @classmethod
    def default(cls) -> KernelStore:
        """Return the store that serves calls: the user's, or a temporary one of this process, with one warning."""
        spare = Temporary.current().store
        try:
            user = cls.of_user()
            user.require_private()
        except StoreError as exc:
            _warn_of_spare(exc)
            return spare
        user.spare = spare
        return user

    def to_build_in(self) -> KernelStore:
        """Return the store that takes what is built now: this one if it can be written, else its spare."""
        if self.spare is not None:
            try:
                self.require_writable()
            except StoreError as exc:
                _warn_of_spare(exc)
                return self.spare
        return self

    def __repr__(self) -> str:
        return f"KernelStore({str(self.root)!r})"

    def lookup(self, key: str) -> Artifact | None:
        """Return the kernel with this key and mark it as used; return None if it is missing or incomplete."""
        self.require_private()
        artifact = self._whole(self._entry(key))
        if artifact is not None:
            disk.touch(artifact.folder)
        elif self.spare is not None:
            return self.spare.lookup(key)
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
        """Yield every complete kernel in the store, sorted by key."""
        self.require_private()
        with self.reading():
            folders = sorted((self.root / f"v{FORMAT}").glob(f"??/{_KEY}"))
        for folder in folders:
            artifact = self._whole(folder)
            if artifact is not None:
                yield artifact

    def is_empty(self) -> bool:
        """Whether no kernel was ever published here, or all were removed together with their folder."""
        with self.reading():
            return not any((self.root / f"v{FORMAT}").glob("??"))

    def find(self, identity: Mapping[str, Any]) -> Artifact | None:
        """Return a kernel with this :func:`source_identity`, from any compiler, and mark it as used."""
        self.require_private()
        source, keys = identity_key(identity), []
        with self.reading(), contextlib.suppress(FileNotFoundError):
            for folder in os.scandir(self.root / f"v{FORMAT}"):
                with contextlib.suppress(OSError):  # no folder, or it was removed
                    for entry in os.scandir(folder.path):
                        with contextlib.suppress(OSError):  # it is tried again next time
                            keys += [entry.name] if _source_of(entry.path, entry.inode()) == source else []
        found = next((artifact for key in sorted(keys) if (artifact := self.lookup(key)) is not None), None)
        return self.spare.find(identity) if found is None and self.spare is not None else found

    @contextlib.contextmanager
    def lock(self, key: str, cancel: threading.Event | None = None, name: str | None = None) -> Iterator[None]:
        """Hold the lock to build one kernel, exclusive among all threads and processes."""
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

    @contextlib.contextmanager
    def lock_if_free(self, key: str, name: str) -> Iterator[bool]:
        """Hold a kernel's lock during the context if nobody does; yield whether it is held. Errors as :meth:`lock`."""
        with contextlib.ExitStack() as stack:
            with self.writing():
                free = stack.enter_context(locks.attempted(self._lock_file(key), f"the build of {name}", _ADVICE))
            yield free

    def workspace(self, key: str, source: str) -> Path:
        """Create an empty folder to build one kernel in, and write the source. The caller holds the kernel's lock."""
        env.cache_size()  # report a wrong value before compiling
        with self.writing():
            self._sweep(held=key)
            # If the store is deleted, locks go with it, and two may build one kernel: each in a folder of its own.
            folder = self._aside(key)
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
        """Publish a built kernel atomically. The caller holds the kernel's lock."""
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
            disk.touch(folder)
            try:
                folder.rename(entry)
            except OSError:
                if not os.path.lexists(entry):
                    raise
                # An incomplete one, or that of a machine whose locks do not reach this one.
                there = self._whole(entry)
                if there is not None:
                    self.discard(folder)
                    return there
                self.discard(entry)
                folder.rename(entry)
            _sync(entry.parent)
        try:
            self._keep_small(artifact)
        except (OSError, StoreError) as exc:
            # The kernel itself is published.
            _log.warning("cannot limit the size of the kernel store %s: %s", self.root, exc)
        return artifact

    def keep_failed(self, folder: Path) -> Path:
        """Keep a failed build for inspection, in place of that kernel's last failure."""
        with self.writing():
            kept = self.folder("failed") / folder.name[:_KEY_LENGTH]
            self.discard(kept)
            shutil.rmtree(folder / "tmp", ignore_errors=True)
            disk.touch(folder)
            folder.rename(kept)
            failures = [use for use in disk.uses(kept.parent.iterdir()) if use.folder != kept]
            for use in disk.excess(failures, _MAX_FAILED, _MOST_FAILED - 1):
                self.discard(use.folder)
        return kept

    def discard(self, folder: Path) -> None:
        """Remove a folder atomically."""
        aside = self._aside(folder.name)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
            _remove(aside)

    def _aside(self, name: str) -> Path:
        return self.folder("tmp") / f"{name}.{_machine()}.{uuid.uuid4().hex}"

    def clean(self, *, unused_for: float | None = None, keep: int | None = None) -> int:
        """Remove kernels, abandoned builds and abandoned locks; return the number of removed kernels.

        Without arguments, remove every kernel and every failed build. ``unused_for`` removes what
        was not looked up for this many seconds, ``keep`` the least recently used until this many bytes are left.
        """
        if not self.root.exists():
            return 0
        self.require_private()
        with self.writing():
            kernels, failures = self._uses(), disk.uses((self.root / "failed").glob("*"))
            if unused_for is None and keep is None:
                unused_for = -math.inf
            if unused_for is not None:
                before = (time.time() - unused_for) * 1e9
                old = [use for use in (*kernels, *failures) if use.last < before]
            else:
                old = []
            gone = dict.fromkeys(old)
            if keep is not None:
                gone |= dict.fromkeys(disk.excess([use for use in kernels if use not in gone], keep))
            self._sweep_locks()
            self._sweep()
            removed = {use for use in gone if self._remove_unlocked(use.folder)}
        return sum(use in removed for use in kernels)

    def size(self) -> int:
        """Return the total size of all kernels in bytes."""
        with self.writing():
            return sum(use.size for use in self._uses())

    def _uses(self) -> list[Use]:
        return disk.uses((self.root / f"v{FORMAT}").glob("*/*"))

    def _keep_small(self, published: Artifact) -> None:
        """Remove the least recently used kernels if a new one makes the store too large."""
        limit = env.cache_size()
        if limit is None:
            return
        kernels = self._uses()
        kept = [use for use in kernels if use.folder == published.folder]
        others = [use for use in kernels if use.folder != published.folder]
        for use in disk.excess(others, limit - sum(use.size for use in kept)):
            with contextlib.suppress(FileNotFoundError):
                # Another process may have used or rebuilt it meanwhile.
                if disk.last_use(use.folder) == use.last:
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

    def require_private(self, *names: str) -> None:
        """Check that nobody else can write to the store, if it exists, nor to a folder of it, which must exist."""
        try:
            info = self.root.stat(follow_symlinks=self._may_be_link)
            require_private(info, self.root)
        except FileNotFoundError:
            if not names:
                return
            raise
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
        folder = self.root
        for name in names:
            folder /= name
            self._require_own(folder)

    def folder(self, *names: str) -> Path:
        """Return a folder of the store; create it if missing."""
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
        self.require_private()
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
        """Check that kernels can be built into the store. Nothing stays changed, and no folder is created."""
        self.require_private()
        with self.writing():
            here = next(folder for folder in (self.root, *self.root.parents) if os.path.lexists(folder))
            own = [self.root / name for name in _FOLDERS if os.path.lexists(self.root / name)]
            for folder in own:
                self._require_own(folder)
            for folder in (here, *own):
                # A real attempt: permission bits are not enough, since even root cannot write everywhere.
                with tempfile.TemporaryFile(dir=folder) as file:
                    locks.require(file, folder, _ADVICE)

    def _lock_file(self, key: str) -> Path:
        return self.folder("locks") / self._entry(key).name

    def _sweep(self, held: str | None = None) -> None:
        """Remove abandoned builds: those whose lock is free or held by this caller."""
        for folder in self.folder("tmp").glob(f"{_KEY}*"):
            key = folder.name[:_KEY_LENGTH]
            # On a network file system, another machine may have locks of its own.
            if f".{_machine()}." not in folder.name:
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - folder.lstat().st_mtime > _ABANDONED:
                        _remove(folder)
                continue
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
        """Turn a refusal to read into a StoreError that says what to do, and other OSErrors as :meth:`writing` does."""
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
        """Turn any OSError into a StoreError that says what to do."""
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


class Temporary(Part):
    """The temporary store of this process, for where the user's cannot be used."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        try:
            place = tempfile.gettempdir()
        except FileNotFoundError:  # no folder can be written: who builds there has the error
            place = "/tmp"
        # Nobody can guess the name. A folder of another user with this name would be refused.
        self.use(Path(place, f"cutlass_ops.{uuid.uuid4().hex}"))
        atexit.register(_remove_at_end, self.store.root, os.getpid())

    def use(self, root: Path) -> None:
        """Use the folder of the process that started this one."""
        self.store: KernelStore = _TemporaryStore(root)


class _TemporaryStore(KernelStore):
    _may_be_link = False  # somebody else could have put one there after a cleaner removed the folder


def _remove_at_end(root: Path, process: int) -> None:
    if os.getpid() == process:  # and not a fork of it
        shutil.rmtree(root, ignore_errors=True)


def _warn_of_spare(why: StoreError) -> None:
    warn_once(f"{why}. Until then, each process compiles its kernels anew, into a temporary folder")


_ADVICE = f"existing kernels can be used, but to build new ones set {env.CACHE_DIR.name} to a folder on a local disk"


@cached(maxsize=None)
def _source_of(entry: str, inode: int) -> str | None:
    """Return the key of an entry's source. A session reads each entry once: its inode tells it from a later one."""
    return source_key(Path(entry))


@functools.cache
def _machine() -> str:
    """Return what all processes have in common among which a lock holds on any file system."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a sandbox without /proc
        return os.uname().nodename


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
    except OSError as exc:
        if exc.errno != errno.EINVAL or not path.is_dir():  # CIFS and FUSE may not know it of folders
            raise
    finally:
        os.close(descriptor)
