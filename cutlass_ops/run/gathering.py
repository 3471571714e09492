"""Which kernels a region or a step needs that are not there yet."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from cutlass_ops.base.session import cached

if TYPE_CHECKING:
    from cutlass_ops.compilation.background import Wanted

# What each running region needs: it runs once, only to find that. Lists hold for all threads, since autograd's run the
# region's backward.
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


# ---- Steps of recorded calls -----------------------------------------------------------------------------------------

# What a step's calls wait for: kernels, and decisions about them.
Missed = dict[Future[Any], None]
_MOST_STEPS = 4096


class _Running(threading.local):
    steps: tuple[Missed, ...] = ()  # to which calls belong now
    following: tuple[Missed, ...] = ()  # to which the next recorded call belongs


_RUNNING = _Running()


@cached(maxsize=1)
def _steps() -> dict[Hashable, Missed]:
    return {}


def awaits(step: Hashable) -> bool:
    """Whether a kernel is still missed that a step's forward or backward asked for.

    If none is, this thread's next recorded call belongs to the step, and its backward.
    """
    known = _steps()
    if step not in known and len(known) >= _MOST_STEPS:
        known.clear()
    found = known.setdefault(step, {})
    if found:
        from cutlass_ops.compilation.background import is_missed  # late: most calls need nothing

        if any(is_missed(future) for future in tuple(found)):
            return True
        found.clear()
    # A layer asks, and then each of its ops.
    _RUNNING.following = (*_RUNNING.following[-1:], found)
    return False


def took() -> tuple[Missed, ...]:
    """Return the steps to which the call belongs that is recorded now."""
    steps, _RUNNING.following = _RUNNING.following, ()
    return steps


@contextlib.contextmanager
def steps(of: tuple[Missed, ...]) -> Iterator[None]:
    """Context in which this thread's calls belong to these steps."""
    before, _RUNNING.steps = _RUNNING.steps, of
    try:
        yield
    finally:
        _RUNNING.steps = before


def note(future: Future[Any]) -> None:
    """Note what this thread's call waits for."""
    for step in _RUNNING.steps:
        step[future] = None
