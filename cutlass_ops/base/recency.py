"""Which folders were used when, and which of them go when there are too many."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Use(NamedTuple):
    """One folder: when it was last used, in nanoseconds since 1970, and the bytes of its files."""

    folder: Path
    last: int
    size: int


def touch(folder: Path) -> None:
    """Note that a folder is used now. Where that cannot be written, nothing is noted."""
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(folder, ns=(now, now), follow_symlinks=False)


def last_use(folder: Path) -> int:
    """Return when a folder was last used, in nanoseconds since 1970.

    Raises
    ------
    OSError
        If it is not there.
    """
    return folder.lstat().st_mtime_ns


def uses(folders: Iterable[Path]) -> list[Use]:
    """Look at folders, the one that was not used for longest first; what is gone meanwhile is left out."""
    found = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            found.append(Use(folder, last_use(folder), _size(folder)))
    return sorted(found, key=lambda use: use.last)


def excess(ordered: Sequence[Use], size: int, count: int | None = None) -> list[Use]:
    """Return those of :func:`uses` that go, so that at most so many bytes and folders stay."""
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
