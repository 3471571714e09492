"""An index of a store's entries by source identity. A process reads each entry once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cutlass_ops.base import forks

# A folder that changed less than this ago may change again without a new mtime.
_SETTLED = 2.0  # seconds
_UNREAD = ""


class _Shard(NamedTuple):
    """One folder of entries, as last read.

    ``changed`` is its mtime, or None if it must be read again. ``read`` maps (name, inode) to the entry's source
    identity, or None if it is not an entry. ``names`` maps a source identity to the names of its entries.
    """

    changed: int | None
    read: dict[tuple[str, int], str | None]
    names: dict[str | None, list[str]]


class Index:
    """A store's entries by source identity.

    An entry is read once. A folder of entries is listed again only when it changed.

    Parameters
    ----------
    root : Path
        The folder that has the folders of entries.
    read : callable
        Takes an entry's folder and returns its source identity, or None if it is not an entry. If it raises OSError,
        the entry is tried again next time.
    """

    def __init__(self, root: Path, read: Callable[[Path], str | None]) -> None:
        self._root = root
        self._read = read
        self._shards: dict[str, _Shard] = {}
        self._reset()
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()

    def names(self, what: str) -> list[str]:
        """Return the sorted names of the entries with this source identity."""
        with self._lock:
            self._shards = {name: self._refreshed(name, info) for name, info in self._folders()}
            return sorted(name for shard in self._shards.values() for name in shard.names.get(what, ()))

    def _folders(self) -> Iterator[tuple[str, int]]:
        try:
            with os.scandir(self._root) as folders:
                for folder in folders:
                    if folder.is_dir(follow_symlinks=False):
                        yield folder.name, folder.stat(follow_symlinks=False).st_mtime_ns
        except FileNotFoundError:
            return

    def _refreshed(self, name: str, changed: int) -> _Shard:
        known = self._shards.get(name, _Shard(None, {}, {}))
        if known.changed == changed:
            return known
        settled = time.time() - changed / 1e9 > _SETTLED
        try:
            with os.scandir(self._root / name) as entries:
                there = [(entry.name, entry.inode()) for entry in entries]
        except OSError:
            return _Shard(None, {}, {})
        found = {e: known.read[e] if e in known.read else self._tried(self._root / name / e[0]) for e in there}
        read = {entry: what for entry, what in found.items() if what != _UNREAD}
        names: dict[str | None, list[str]] = {}
        for (entry, _), what in read.items():
            names.setdefault(what, []).append(entry)
        return _Shard(changed if settled and len(read) == len(found) else None, read, names)

    def _tried(self, folder: Path) -> str | None:
        try:
            return self._read(folder)
        except OSError:
            return _UNREAD
