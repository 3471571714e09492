"""Reset locks in a forked process: threads that held them do not exist there."""

from __future__ import annotations

import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cached_property

_PACKAGE = __name__.partition(".")[0]

Reset = Callable[[], object]

_resets: list[Callable[[], Reset | None]] = []


def reset_in_child(reset: Reset) -> None:
    """Register a function that replaces locks. Every process forked from now on calls it first.

    A thread that forks inside a ``with`` on a lock releases the old lock, not the new one.

    Parameters
    ----------
    reset : callable
        A bound method does not keep its object alive.
    """
    _resets.append(weakref.WeakMethod(reset) if inspect.ismethod(reset) else lambda: reset)


def _in_child() -> None:
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


os.register_at_fork(after_in_child=_in_child)
