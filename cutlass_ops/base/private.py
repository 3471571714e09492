"""Files that nobody but this user can have written: the only ones that code may come from."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cutlass_ops.base.errors import LoadError


class NotPrivateError(LoadError):
    """Somebody else owns a file or folder, or may write it."""


def read_private(path: Path, limit: int, *, folder: int | None = None) -> bytes:
    """Read a file that nobody but this user (or root) can have written, up to one byte more than ``limit``.

    Parameters
    ----------
    path : Path
        The file.
    limit : int
        Bytes.
    folder : int, optional
        Descriptor of the folder in which the file's name is looked up, in place of the path's own.

    Raises
    ------
    LoadError
        If it is no regular file, or others may write it.
    OSError
        If it cannot be opened, or is a link.
    """
    with open(open_private(path, folder=folder), "rb") as file:
        return file.read(limit + 1)


def open_private(path: Path, *, folder: int | None = None, beside: Path | None = None) -> int:
    """Open a file as :func:`read_private` does, and return its descriptor.

    Parameters
    ----------
    path, folder
        As there.
    beside : Path, optional
        As for :func:`require_private`.
    """
    # O_NONBLOCK: opening a pipe that somebody put there must not wait for a writer.
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
    """Refuse what belongs to another user, or can be written by others.

    Parameters
    ----------
    info : os.stat_result
        Of the file or folder.
    path : Path
        Its name, for the message.
    beside : Path, optional
        A folder of code that this process imports anyway: a group that may write there may write the file too, as an
        installer leaves it under a umask of 002.

    Raises
    ------
    NotPrivateError
        With the reason.
    """
    # Root could do anything anyway; read-only stores are often installed by it.
    if info.st_uid not in (os.geteuid(), 0):
        raise NotPrivateError(f"{path} belongs to user {info.st_uid}, not to this one ({os.geteuid()})")
    writable = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if beside is not None:
        code = beside.stat()
        writable &= ~(code.st_mode & stat.S_IWGRP if code.st_gid == info.st_gid else 0)
    if writable:
        raise NotPrivateError(f"{path} can be written by others (mode {stat.S_IMODE(info.st_mode):03o})")
