"""What a forked process has to make anew: locks that threads held which are not there."""

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
    """Have a function called in every process that is forked from now on, before anything else runs there.

    It puts new locks in place of the old ones. Who forks within a lock leaves the one that it entered.

    Parameters
    ----------
    reset : callable
        A method does not keep its object alive.
    """
    _resets.append(weakref.WeakMethod(reset) if inspect.ismethod(reset) else lambda: reset)


def _in_child() -> None:
    for reference in _resets:
        reset = reference()
        if reset is not None:
            reset()
    _reset_properties()


def _reset_properties() -> None:
    """Open the locks of this package's cached properties, which they have before Python 3.12."""
    if sys.version_info >= (3, 12):
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            classes = [value for value in vars(module).values() if isinstance(value, type)]
            for value in (value for each in classes for value in vars(each).values()):
                if isinstance(value, cached_property):
                    value.__dict__["lock"] = threading.RLock()


os.register_at_fork(after_in_child=_in_child)
