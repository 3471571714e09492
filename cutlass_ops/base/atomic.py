"""Files and folders that appear at once and whole."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new name beside a path; what is made there takes the path's place when the block ends without an error.

    A file of the path's name is replaced; a folder must not be there. Who opens the new name in mode ``"x"`` follows no
    link.

    Parameters
    ----------
    path : Path
        Its folder is made if it is not there.

    Raises
    ------
    OSError
        If the folder cannot be made, or the path not be replaced.
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
