"""Whether a file or folder can be written, asked before much is done for what goes there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# What is written goes by a longer name until it is whole: a dot before, a dot and 32 digits behind.
_LONGER = 34


def require_file(path: Path) -> None:
    """Refuse a path at which no file can be written, or replaced.

    Raises
    ------
    ValueError
        With the reason, and what to do.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a file in it")
    if os.path.lexists(path) and not path.is_file() and not path.is_symlink():
        raise ValueError(f"{path} is a device, a pipe or a socket: name a file")
    _require_place(path)


def require_new(path: Path) -> None:
    """Refuse a path at which no folder can be made, or something is.

    Raises
    ------
    ValueError
        As for :func:`require_file`.
    """
    if os.path.lexists(path):
        raise ValueError(f"{path} is there already: remove it, or name another folder")
    _require_place(path)


def require_folder(path: Path) -> None:
    """Refuse a path that is not a folder in which files can be written, and cannot be made one.

    Raises
    ------
    ValueError
        As for :func:`require_file`.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise ValueError(f"{path} is not a folder: name one")
    _require_place(path / "file")


def _require_place(path: Path) -> None:
    whole = path.absolute()
    above = next(folder for folder in whole.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise ValueError(f"{path} cannot be written: {above} is not a folder")
    longest = os.pathconf(above, "PC_NAME_MAX")
    if any(len(os.fsencode(part)) > longest - _LONGER for part in whole.relative_to(above).parts):
        raise ValueError(f"{path} cannot be written: its name is too long, choose a shorter one")
    try:
        # Leaves nothing behind, and asks the file system itself: root, too, cannot write everywhere.
        tempfile.TemporaryFile(dir=above).close()
    except OSError as exc:
        raise ValueError(
            f"{path} cannot be written: this user may not make files in {above} ({exc.strerror}). Name another place"
        ) from None
