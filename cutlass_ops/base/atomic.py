"""Write files and folders atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

# How many times in a row a folder may be deleted while something is written or read there: each time, it is done again.
DELETIONS = 3


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to ``path`` if the block succeeds, else remove it.

    An existing file at ``path`` is replaced; an existing folder is an error. Open the temporary path in mode ``"x"``,
    which follows no link.

    Parameters
    ----------
    path : Path
        Final path. Its folder is created if missing.

    Raises
    ------
    OSError
        If the folder cannot be created, or ``path`` cannot be replaced.
    """
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
