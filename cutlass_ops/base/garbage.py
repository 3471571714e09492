"""Work without collections of garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Let Python collect no garbage for as long as the context lasts.

    It is for work that makes many objects and keeps them. They bring about collections of all generations, each of
    which visits every object of the process: with PyTorch imported, some take 0.1 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
