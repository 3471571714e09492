"""Check that an output path is writable before starting long work."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

# atomic.replacing adds this to a name: a dot in front, a dot and 32 digits behind.
_LONGER = 34


def require_file(path: Path) -> None:
    """Check that a file can be written or replaced at a path.

    Raises
    ------
    ValueError
        If not. The message has the reason and what to do.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
        raise ValueError(f"{path} is a device, a pipe or a socket: name a file")
    _require_place(path)


def require_new(path: Path) -> None:
    """Check that a path does not exist and that a folder can be created there.

    Raises
    ------
    ValueError
        As for :func:`require_file`.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} already exists: remove it, or name another folder")
    _require_place(path)


def require_folder(path: Path) -> None:
    """Check that a path is a folder in which files can be written, or can become one.

    Raises
    ------
    ValueError
        As for :func:`require_file`.
    """
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
