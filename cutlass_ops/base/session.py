"""A session: all that the library finds out and keeps, such as loaded kernels, bundles, background builds and choices.

The process has one. A test makes its own, which begins with nothing::

    with Session().active():
        ...

What is kept is declared where it is used: as a class, a :class:`Part`, or as a function that is :func:`cached`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

# When the process imported this library, in nanoseconds: files that changed since are not what it runs.
IMPORTED = time.time_ns()

T = TypeVar("T")
P = ParamSpec("P")


class Session:
    """One object of each part, made when it is first asked for. A test can pass others, by their class."""

    def __init__(self, parts: Mapping[Callable[[Session], Any], Any] | None = None) -> None:
        self._parts: dict[Callable[[Session], Any], Any] = dict(parts or {})

    def part(self, make: Callable[[Session], T]) -> T:
        """Return the object that a class, or another function of a session, made for this session."""
        found: T | None = self._parts.get(make)
        # If two threads make one at the same time, both get the first.
        return self._parts.setdefault(make, make(self)) if found is None else found

    @contextlib.contextmanager
    def active(self) -> Iterator[Session]:
        """Context in which the whole process uses this session: when it begins and ends, no thread may be in a call."""
        before = _current
        _activate(self)
        try:
            yield self
        finally:
            _activate(before)


_current = Session()
_forgets: list[Callable[[], object]] = []


def current() -> Session:
    """Return the session that the process uses."""
    return _current


def _activate(session: Session) -> None:
    global _current
    _current = session
    for forget in _forgets:
        forget()


def forget_at_change(forget: Callable[[], object]) -> None:
    """Call a function whenever the session changes, to reset values kept outside of sessions for speed."""
    _forgets.append(forget)


class Part:
    """Base of classes of which a session has one object. It takes other parts from its own session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    def current(cls) -> Self:
        """Return this part of the session that the process uses."""
        return _current.part(cls)


class Cached(Generic[P, T]):
    """A function whose results a session keeps, as :func:`functools.lru_cache` does for a process."""

    def __init__(self, function: Callable[P, T], maxsize: int | None) -> None:
        functools.update_wrapper(self, function)
        self._make: Callable[[Session], Any] = lambda session: functools.lru_cache(maxsize)(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the cached result, or the function's result now."""
        found: T = _current.part(self._make)(*args, **kwargs)
        return found

    def cache_clear(self) -> None:
        """Forget all results of the current session."""
        _current.part(self._make).cache_clear()


def cached(maxsize: int | None) -> Callable[[Callable[P, T]], Cached[P, T]]:
    """Cache a function's results per session, at most `maxsize`."""
    return lambda function: Cached(function, maxsize)


@cached(maxsize=1024)
def warn_once(message: str) -> None:
    """Give a RuntimeWarning, once in a session."""
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        # If warnings are errors, print it instead of failing the call.
        print(f"cutlass_ops: {message}", file=sys.stderr)
