"""The end of the interpreter: functions of atexit still run, and so may threads, but no further thread is started."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, thread
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")


def is_ending() -> bool:
    """Whether the interpreter ends: executors take nothing then, and from Python 3.12 on no thread can be started."""
    # Executors end first, and wait for their threads meanwhile. For that, Python has no public question.
    return not threading.main_thread().is_alive() or getattr(thread, "_shutdown", False)


class Threads(ThreadPoolExecutor):
    """A pool of threads. Once the interpreter ends, the thread that submits something does it itself, at once."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:  # noqa: D102
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if not is_ending():
                raise
        done: Future[_T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as exc:
            done.set_exception(exc)
        return done
