"""Files on disk: written atomically, read only if they are private, checked to be writable, evicted by last use."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cutlass_ops.base.errors import LoadError

# How many times in a row a folder may be deleted while something is written or read there: each time, it is done again.
DELETIONS = 3


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to open in mode ``"x"``; rename it to ``path`` if the block succeeds, else remove it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield aside
        os.replace(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


# ---- Files that no other user can have written. Code is loaded from such files only ----------------------------------


class NotPrivateError(LoadError):
    """Another user owns a file or folder, or may write to it."""


def read_private(path: Path, limit: int, *, folder: int | None = None) -> bytes:
    """Read at most ``limit + 1`` bytes of a file of :func:`open_private`: the one more shows that a file is larger."""
    with open(open_private(path, folder=folder), "rb") as file:
        return file.read(limit + 1)


def open_private(path: Path, *, folder: int | None = None, beside: Path | None = None) -> int:
    """Open a file that only this user or root can have written, by its name in ``folder`` if that is a descriptor."""
    # O_NONBLOCK: do not block if someone put a pipe there.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    descriptor = os.open(path if folder is None else path.name, flags, dir_fd=folder)
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise LoadError(f"{path} is not a regular file")
        require_private(info, path, beside)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def require_private(info: os.stat_result, path: Path, beside: Path | None = None) -> None:
    """Reject a file or folder that another user owns or may write.

    ``beside`` is a folder that this process imports code from anyway. If its group may write to it, the same group may
    write the file too: installers leave such files under a umask of 002. Raises NotPrivateError if it is rejected. The
    message has the reason.
    """
    # Root can do anything anyway, and often installs read-only stores.
    if info.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} belongs to user {info.st_uid}, not to this one ({os.geteuid()})")
    writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if beside is not None:
        code = beside.stat()
        writable &= ~(code.st_mode & stat.S_IWGRP if code.st_gid == info.st_gid else 0)
    if writable:
        raise NotPrivateError(f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):03o})")


# ---- Checks of an output path before long work -----------------------------------------------------------------------


# replacing() adds this to a name: a dot in front, a dot and 32 digits behind.
_LONGER = 34


def require_file(path: Path) -> None:
    """Raise ValueError, with the reason and what to do, if a file cannot be written or replaced at a path."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
        raise ValueError(f"{path} is a device, a pipe or a socket: name a file")
    _require_place(path)


def require_new(path: Path) -> None:
    """Raise ValueError if a path exists, or a folder cannot be created there."""
    if os.path.lexists(path):
        raise ValueError(f"{path} already exists: remove it, or name another folder")
    _require_place(path)


def require_folder(path: Path) -> None:
    """Raise ValueError if a path is no folder in which files can be written, and cannot become one."""
    if os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"{path} is not a folder: name a folder")
    _require_place(path, path / "file")


def _require_place(path: Path, file: Path | None = None) -> None:
    """Check that a file can be created at a path, or as a file of this folder."""
    whole = (file or path).absolute()
    above = next(folder for folder in whole.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written: {above} is not a folder")
    longest = os.pathconf(above, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest - _LONGER for part in whole.relative_to(above).parts):
        raise ValueError(f"{path} cannot be written: its name is too long, choose a shorter one")
    try:
        # A real attempt: permission bits are not enough, since even root cannot write everywhere.
        tempfile.TemporaryFile(dir=above).close()
    except OSError as exc:
        # Others than a refusal are such as a full disk, or a file system of the kernel's.
        refused = exc.errno in (errno.EACCES, errno.EPERM)
        why = f"this user may not create files in {above}" if refused else f"no file can be created in {above}"
        raise ValueError(f"{path} cannot be written: {why} ({exc.strerror}). Name another path") from None


# ---- When folders were last used, and which to evict -----------------------------------------------------------------


class Use(NamedTuple):
    """One folder: its last use, in nanoseconds since 1970, and the size of its files in bytes."""

    folder: Path
    last: int
    size: int


def touch(folder: Path) -> None:
    """Mark a folder as used now, if it is writable."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(folder, ns=(now, now), follow_symlinks=False)


def last_use(folder: Path) -> int:
    """Return when a folder was last used, in nanoseconds since 1970. Raises OSError if it does not exist."""
    return folder.lstat().st_mtime_ns


def uses(folders: Iterable[Path]) -> list[Use]:
    """Return the folders' uses, least recently used first. Skip folders that no longer exist."""
    found = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            found.append(Use(folder, last_use(folder), _size(folder)))
    return sorted(found, key=lambda use: use.last)


def excess(ordered: Sequence[Use], size: int, count: int | None = None) -> list[Use]:
    """Return which of :func:`uses` to evict so that at most ``size`` bytes and ``count`` folders stay."""
    total, left = sum(use.size for use in ordered), len(ordered)
    gone = []
    for use in ordered:
        if total <= size and (count is None or left <= count):
            break
        gone.append(use)
        total -= use.size
        left -= 1
    return gone


def _size(folder: Path) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(
                _size(Path(entry.path)) if entry.is_dir(follow_symlinks=False)
                else entry.stat(follow_symlinks=False).st_size
                for entry in entries
            )  # fmt: skip
    except NotADirectoryError:
        return folder.lstat().st_size
