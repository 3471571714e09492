"""Read only files that no other user can have written. Code is loaded from such files only."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cutlass_ops.base.errors import LoadError


class NotPrivateError(LoadError):
    """Another user owns a file or folder, or may write to it."""


def read_private(path: Path, limit: int, *, folder: int | None = None) -> bytes:
    """Read at most ``limit + 1`` bytes of a file that only this user or root can have written.

    Parameters
    ----------
    path : Path
        The file.
    limit : int
        Maximum size in bytes. One byte more is read, to detect larger files.
    folder : int, optional
        Descriptor of the folder that has the file; the default is the path's own folder.

    Raises
    ------
    LoadError
        If it is not a regular file, or other users may write it.
    OSError
        If it cannot be opened, or is a link.
    """
    with open(open_private(path, folder=folder), "rb") as file:
        return file.read(limit + 1)


def open_private(path: Path, *, folder: int | None = None, beside: Path | None = None) -> int:
    """Open a file that only this user or root can have written, and return its descriptor.

    Parameters
    ----------
    path, folder
        As for :func:`read_private`.
    beside : Path, optional
        As for :func:`require_private`.
    """
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

    Parameters
    ----------
    info : os.stat_result
        Status of the file or folder.
    path : Path
        Its path, for the message.
    beside : Path, optional
        A folder that this process imports code from anyway. If its group may write to it, the same group may write the
        file too. Installers leave such files under a umask of 002.

    Raises
    ------
    NotPrivateError
        If it is rejected. The message has the reason.
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
