"""A session: all that the library finds out and keeps, such as loaded kernels, bundles, background builds and choices.

The process has one. A test makes its own, which begins with nothing::

    with Session().active():
        ...

What is kept is declared where it is used: as a class, a :class:`Part`, or as a function that is :func:`cached`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self

# When the process imported this library, in nanoseconds: files that changed since are not what it runs.
IMPORTED = time.time_ns()

T = TypeVar("T")
P = ParamSpec("P")


class Session:
    """One object of each part, made when it is first asked for. Not public: users have the process's.

    Parameters
    ----------
    parts : mapping, optional
        What a test puts in place of parts, by their class.
    """

    def __init__(self, parts: Mapping[Callable[[Session], Any], Any] | None = None) -> None:
        self._parts: dict[Callable[[Session], Any], Any] = dict(parts or {})

    def part(self, make: Callable[[Session], T]) -> T:
        """Return what a class, or another function of a session, made for this one."""
        found: T | None = self._parts.get(make)
        # Where two threads make one at the same time, both have the first.
        return self._parts.setdefault(make, make(self)) if found is None else found

    @contextlib.contextmanager
    def active(self) -> Iterator[Session]:
        """Have the whole process use this session for as long as the context lasts.

        Threads use it too: when it begins and ends, none may be in a call.
        """
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
    """Have a function called whenever the process goes over to another session.

    It is for what is kept outside of sessions, because to look for it there would take too long.
    """
    _forgets.append(forget)


class Part:
    """What a session has one object of. Other parts that it needs it takes from its own session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    @classmethod
    def current(cls) -> Self:
        """Return that of the session that the process uses."""
        return _current.part(cls)


class Cached(Generic[P, T]):
    """A function whose results a session keeps, as :func:`functools.lru_cache` does for a process."""

    def __init__(self, function: Callable[P, T], maxsize: int | None) -> None:
        functools.update_wrapper(self, function)
        self._make: Callable[[Session], Any] = lambda session: functools.lru_cache(maxsize)(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the session has kept, else what the function returns now."""
        found: T = _current.part(self._make)(*args, **kwargs)
        return found

    def cache_clear(self) -> None:
        """Forget all results of the current session."""
        _current.part(self._make).cache_clear()

    def has_any(self) -> bool:
        """Whether the current session has kept a result."""
        return bool(_current.part(self._make).cache_info().currsize)


def cached(maxsize: int | None) -> Callable[[Callable[P, T]], Cached[P, T]]:
    """Have a session keep a function's results, so many at most."""
    return lambda function: Cached(function, maxsize)
