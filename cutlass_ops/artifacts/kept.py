"""Small files in the store's folder that save later processes work, such as choices and keys.

Each folder of such files is named after everything that the files follow from. If a file is missing, damaged or not
private, the work is done again. Old folders are removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import resources, session
from cutlass_ops.base.atomic import replacing
from cutlass_ops.base.errors import StoreError

# Number of folders for other versions that are kept.
_OTHERS = 4


@functools.cache
def package() -> str | None:
    """Return a name for the code and the tables of this package, by their paths, sizes and times.

    None if one of these files changed after the import: this process still runs the old code.
    """
    files = list(_files(resources.package(), (".py", ".json", ".gz")))
    if any(max(info.st_mtime_ns, info.st_ctime_ns) > session.IMPORTED for _, info in files):
        return None
    about = [resources.library_version(), *(stamp(name, info) for name, info in files)]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:32]


def stamps(place: Path) -> str:
    """Return the path, size and time of each file in a folder and below."""
    return "\n".join(stamp(name, info) for name, info in _files(place))


def _files(place: Path, endings: tuple[str, ...] = ("",)) -> Iterator[tuple[str, os.stat_result]]:
    for each in sorted(os.scandir(place), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _files(Path(each.path), endings)
        elif each.name.endswith(endings):
            yield each.path, each.stat()


def stamp(name: str, info: os.stat_result) -> str:
    """Return a file's path, size and time as text."""
    return f"{name} {info.st_size} {info.st_mtime_ns}"


def keep(store: Path, path: Path, text: str) -> None:
    """Write a file at most two folders below a store's folder, if it can be written.

    If its folder is new, older ones beside it are removed.
    """
    with contextlib.suppress(OSError, StoreError):
        is_new = not path.parent.is_dir()
        KernelStore(store).folder(*path.parent.relative_to(store).parts)  # private, as the store has to be
        with replacing(path) as aside, open(aside, "x", opener=_private, encoding="utf-8") as file:
            file.write(text)
        if is_new:
            _forget_others(path.parent)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _forget_others(mine: Path) -> None:
    """Remove the folders of other versions, but for the latest."""
    others = [each for each in os.scandir(mine.parent) if each.name != mine.name]
    others.sort(key=lambda each: each.stat().st_mtime_ns)
    for each in others[:-_OTHERS]:
        shutil.rmtree(each.path, ignore_errors=True)
