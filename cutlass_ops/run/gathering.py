"""Regions that run once, only to find which kernels they need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutlass_ops.compilation.background import Wanted

# What each running region needs. Lists hold for all threads, since autograd's run the region's backward.
REGIONS: list[list[Wanted]] = []


@contextlib.contextmanager
def gathering() -> Iterator[list[Wanted]]:
    """Context in which no call waits for a compiler, so that all kernels of a region are compiled together.

    Its value is a list of the kernels that calls need meanwhile, if they are not loaded.
    """
    found: list[Wanted] = []
    REGIONS.append(found)
    try:
        yield found
    finally:
        REGIONS[:] = [each for each in REGIONS if each is not found]


def is_gathering() -> bool:
    """Whether a region runs only to find which kernels it needs."""
    return bool(REGIONS)
