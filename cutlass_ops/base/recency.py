"""Track when folders were last used, and choose which to evict."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


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
    """Return when a folder was last used, in nanoseconds since 1970.

    Raises
    ------
    OSError
        If it does not exist.
    """
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
