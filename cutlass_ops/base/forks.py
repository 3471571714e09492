"""Reset locks in a forked process: threads that held them do not exist there.

Locks of Python and of other packages cannot be reset. A fork waits until no other thread imports a module, and until no
thread is in a context of :func:`held_off`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

_PACKAGE = __name__.partition(".")[0]

Reset = Callable[[], object]

# Seconds that a fork waits for imports. It may hold what they wait for: then the child does without those modules.
_PATIENCE = 5.0
_POLL = 0.001

_gate = threading.RLock()
_resets: list[Callable[[], Reset | None]] = []


def reset_in_child(reset: Reset) -> None:
    """Register a function that replaces locks. Every process forked from now on calls it first.

    A thread that forks inside a ``with`` on a lock releases the old lock, not the new one. A bound method does not keep
    its object alive.
    """
    _resets.append(weakref.WeakMethod(reset) if inspect.ismethod(reset) else lambda: reset)


@contextlib.contextmanager
def held_off() -> Iterator[None]:
    """Context in which no other thread forks this process: keep it short."""
    with _gate:
        yield


def _before() -> None:
    # The module's lock would be held in the child, and the module stay half imported.
    until = time.monotonic() + _PATIENCE
    while _others_import() and time.monotonic() < until:
        time.sleep(_POLL)
    _gate.acquire()


def _others_import() -> bool:
    """Whether another thread imports a module."""
    known: dict[str, Callable[[], Any]] = getattr(importlib, "_bootstrap")._module_locks  # noqa: B009
    owners = (getattr(reference(), "owner", None) for reference in list(known.values()))
    return any(owner not in (None, threading.get_ident()) for owner in owners)


def _in_child() -> None:
    global _gate
    _gate = threading.RLock()
    for reference in _resets:
        reset = reference()
        if reset is not None:
            reset()
    _reset_properties()


def _reset_properties() -> None:
    """Replace the locks of this package's cached properties. From Python 3.12 on, they have none."""
    if sys.version_info >= (3, 12):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for value in (value for each in classes for value in vars(each).values()):
                if isinstance(value, cached_property):
                    value.__dict__["lock"] = threading.RLock()


os.register_at_fork(before=_before, after_in_parent=lambda: _gate.release(), after_in_child=_in_child)
