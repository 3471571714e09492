"""Executors that can be named on the command line. Only this module imports distributed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, thread
from functools import partial
from multiprocessing.process import BaseProcess
from typing import ParamSpec, TypeVar, cast

from cutlass_ops.base import env
from cutlass_ops.base.errors import ToolchainError

_PATIENCE = 10  # seconds
_PAUSE = 0.5  # seconds for a job to end its compilers and remove its folder
_P = ParamSpec("_P")
_T = TypeVar("_T")
FORMS = "processes, processes:N, or dask://HOST:PORT of a scheduler"

_PROCESSES = re.compile(r"processes(:([1-9][0-9]{0,3}))?")
_DASK = re.compile(r"dask://([^/\s]+:[0-9]+)")


@contextlib.contextmanager
def named(text: str) -> Iterator[Executor]:
    """Yield an executor by name; shut it down at the end.

    The name is ``"processes"`` or ``"processes:N"`` for processes on this machine, or ``"dask://HOST:PORT"`` for a Dask
    scheduler. Dask workers need this library and the compilers. Raises ValueError if the name is not one of these.
    Raises ToolchainError if the package distributed is not installed, or no scheduler answers.
    """
    require_named(text)
    processes, dask = _PROCESSES.fullmatch(text), _DASK.fullmatch(text)
    if processes:
        with _processes(int(processes[2]) if processes[2] else env.jobs()) as pool:
            yield pool
    elif dask:
        with _dask(dask[1]) as executor:
            yield executor


def require_named(text: str) -> None:
    """Check an executor's name. Raises ValueError if it is not valid."""
    if not _PROCESSES.fullmatch(text) and not _DASK.fullmatch(text):
        raise ValueError(f"{text!r} is not an executor: write {FORMS}")


@contextlib.contextmanager
def _processes(count: int) -> Iterator[Executor]:
    others = set(multiprocessing.active_children())
    pool = _Pool(count, mp_context=multiprocessing.get_context("spawn"), initializer=_obey)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        _end(set(multiprocessing.active_children()) - others)
        raise
    finally:
        pool.shutdown()


class _Pool(ProcessPoolExecutor):
    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        return super().submit(cast(Callable[_P, _T], partial(_job, fn)), *args, **kwargs)


def _job(fn: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    # A pool's worker would report SystemExit as the job's result, and start the next job.
    try:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
            raise SystemExit
        return fn(*args, **kwargs)
    except SystemExit:
        os._exit(1)


def _end(workers: set[BaseProcess]) -> None:
    """Terminate workers and their compilers. Kill workers that do not end in time."""
    deadline = time.monotonic() + _PATIENCE
    while workers:
        for worker in workers:
            worker.terminate() if time.monotonic() < deadline else worker.kill()
        next(iter(workers)).join(_PAUSE)
        workers = {worker for worker in workers if worker.is_alive()}


def _obey() -> None:
    """Make a worker stop, with its compilers, on SIGTERM or when its parent ends, but not on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _quit)
    threading.Thread(target=_end_with_starter, daemon=True).start()


def _end_with_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    starter.join()
    os._exit(1)


def _quit(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would stop what removes temporary folders
    raise SystemExit


@contextlib.contextmanager
def _dask(address: str) -> Iterator[Executor]:
    try:
        from distributed import Client
    except ImportError:
        raise ToolchainError('dask:// needs the package distributed: pip install "cutlass_ops[dask]"') from None
    try:
        client = Client(f"tcp://{address}", timeout=_PATIENCE)
    except OSError as exc:
        raise ToolchainError(f"no Dask scheduler answers at {address}: {exc}") from None
    with client:
        yield cast(Executor, client.get_executor())


# ---- The end of the interpreter --------------------------------------------------------------------------------------


def is_ending() -> bool:
    """Whether the interpreter ends. Then executors take nothing, and no thread can start from Python 3.12 on."""
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
