"""Kernels that are not loaded yet: looked for, compiled and loaded while the caller goes on.

One thread does all that is work in Python: it decides, looks into the store and loads, one thing after the other, so
that calls wait for the interpreter's lock as little as possible. It never waits for a compiler: a process apart
compiles (:mod:`cutlass_ops.compilation.apart`).
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import env, forks
from cutlass_ops.base.errors import CompileError, ConfigError
from cutlass_ops.base.executors import is_ending
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.artifacts.entry import Artifact

_log = logging.getLogger("cutlass_ops")

# What comes first: what a call waits for, before guesses about other calls.
_NEEDED, _GUESSED = range(2)

# How long the interpreter's end waits for compilers to be gone.
_PATIENCE = 5.0
# Seconds after which this thread gives the interpreter's lock to a call that waits for it. By Python's own 5 ms, each
# operator of a call would wait that long for a thread that decides or imports.
_TURN = 0.0005
# Seconds after which a kernel is tried again whose failure says nothing about it, as that of a full disk.
_AGAIN = 60.0
# Nice value of compilers in this process: a kernel that a call waits for is compiled first.
_NICE = 10


class Wanted(Future["Artifact"]):
    """A kernel that was asked for: done once it is loaded, or with the reason why it cannot be had."""

    def __init__(self, load: Callable[[Artifact], object], needed: bool) -> None:
        super().__init__()
        self.looked = threading.Event()  # set once it is done, or once it is known that the kernel must be compiled
        self.load, self.needed = load, needed  # `needed`: a call waits for it
        self.again_at = math.inf  # when another attempt may succeed
        self.ended = False  # as done(), which takes a lock: each call asks that PyTorch serves
        self.add_done_callback(self._end)

    def _end(self, _: object) -> None:
        self.ended = True
        self.looked.set()


def may_be_tried(failed: Wanted) -> bool:
    """Whether a kernel that could not be had may be there after another attempt."""
    return time.monotonic() > failed.again_at


def is_missed(future: Future[Any]) -> bool:
    """Whether a kernel, or the decision about it, is still not there, and no call should ask for it again."""
    if not isinstance(future, Wanted):
        return not future.done()
    return not future.ended or (future.exception() is not None and not may_be_tried(future))


class Background(Part):
    """Has kernels compiled and loaded, each once, and gives up when the interpreter ends."""

    def __init__(self, session: Session, build: Callable[[Declaration, bool], Future[Artifact]] | None = None) -> None:
        super().__init__(session)
        self._build = build or self._built_apart
        self._reset()
        # Threads do not survive a fork.
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._work: list[tuple[int, int, Callable[[], object]]] = []
        self._count = itertools.count()
        self._is_busy = self._ends = False
        self._thread: threading.Thread | None = None
        self._wanted: dict[Declaration, Wanted] = {}
        self._building: dict[Declaration, Future[Artifact]] = {}
        self._here: ThreadPoolExecutor | None = None

    # ---- What callers ask for ----

    def need(self, spec: Declaration, load: Callable[[Artifact], object]) -> Wanted:
        """Find or compile a kernel for a call, before all guesses, and load it.

        ``load`` runs in the background's thread. If it returns False, the kernel is looked for once more.
        """
        return self._want(spec, load, needed=True)

    def needed(self, spec: Declaration) -> Wanted | None:
        """Return a kernel that :meth:`need` was called for; None if it was not."""
        wanted = self._wanted.get(spec)
        return wanted if wanted is not None and wanted.needed and time.monotonic() <= wanted.again_at else None

    def guess(self, specs: Iterable[Declaration], load: Callable[[Declaration, Artifact], object]) -> None:
        """Compile and load kernels that later calls may need, in this order, once no call waits for others."""
        for spec in specs:
            self._want(spec, lambda artifact, spec=spec: load(spec, artifact), needed=False)  # type: ignore[misc]

    def soon(self, do: Callable[[], object]) -> None:
        """Do something that a call waits for."""
        self._add(_NEEDED, do)

    def wait(self, timeout: float | None = None, *, needed: bool = False) -> bool:
        """Wait until all that was asked for is done, or only what calls need. Return whether it is."""

        def is_done() -> bool:
            if any(at == _NEEDED or not needed for at, _, _ in self._work) or self._is_busy:
                return False
            return all(each.done() for each in self._wanted.values() if each.needed or not needed)

        with self._changed:
            return self._changed.wait_for(is_done, timeout)

    def close(self) -> None:
        """Cancel what is running, and wait a little for its end."""
        from cutlass_ops.compilation.apart import Apart

        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self.session.part(Apart).close()
        if self._here is not None:
            self._here.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            self._changed.wait_for(lambda: not (self._is_busy or self._work), _PATIENCE)

    # ---- The thread ----

    def _add(self, priority: int, do: Callable[[], object]) -> None:
        with self._changed:
            if self._ends or is_ending():
                return
            if self._thread is None:
                atexit.register(self.close)
                self._thread = threading.Thread(target=self._run, name="cutlass_ops_background", daemon=True)
                self._thread.start()
            heapq.heappush(self._work, (priority, next(self._count), do))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            do = self._next()
            if do is None:
                return
            try:
                with _short_turns():
                    do()
            except Exception as exc:
                # The thread must live on, whatever is wrong there.
                _log.warning("failed in the background: %s", exc, exc_info=True)
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        """Wait for what is to be done next; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._work or self._ends)
            if self._ends:
                self._work.clear()
                self._changed.notify_all()
                return None
            self._is_busy = True
            return heapq.heappop(self._work)[2]

    # ---- A kernel's way ----

    def _want(self, spec: Declaration, load: Callable[[Artifact], object], *, needed: bool) -> Wanted:
        with self._changed:
            wanted = self._wanted.get(spec)
            if wanted is not None and time.monotonic() > wanted.again_at:
                self._building.pop(spec, None)
                wanted = None
            if wanted is not None and (wanted.needed or not needed or wanted.done()):
                return wanted
            if wanted is None:
                wanted = self._wanted[spec] = Wanted(load, needed)
                wanted.add_done_callback(self._notify)
            wanted.needed = needed
        if self._ends or is_ending():  # nobody may wait for what nobody does
            self._fail(spec, wanted, CancelledError())
            return wanted
        self._add(_NEEDED if needed else _GUESSED, lambda: self._look(spec, wanted))
        return wanted

    def _notify(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()

    def _look(self, spec: Declaration, wanted: Wanted) -> None:
        """Load a kernel that a bundle or the store has; else have it built."""
        from cutlass_ops.compilation import lookup

        if wanted.done():
            return
        try:
            if spec not in self._building:
                # Bundles have kernels of GEMMs alone.
                bundled = self.session.part(Bundles).find(spec) if isinstance(spec, KernelSpec) else None
                found = bundled or lookup.recalled(spec)
                if found is not None:
                    self._load(spec, wanted, found)
                    return
            wanted.looked.set()
            building = self._build(spec, wanted.needed)
        except Exception as exc:
            self._fail(spec, wanted, exc)
            return
        if self._building.get(spec) is not building:
            self._building[spec] = building
            building.add_done_callback(lambda future: self._built(spec, wanted, future))

    def _built(self, spec: Declaration, wanted: Wanted, building: Future[Artifact]) -> None:
        error = CancelledError() if building.cancelled() else building.exception()
        if error is not None:
            self._fail(spec, wanted, error)
            return
        self._add(_NEEDED if wanted.needed else _GUESSED, lambda: self._load(spec, wanted, building.result()))

    def _load(self, spec: Declaration, wanted: Wanted, found: Artifact) -> None:
        if wanted.done():
            return
        try:
            is_refused = wanted.load(found) is False
        except Exception as exc:
            _log.warning("cannot be loaded in the background: %s: %s", found.where, exc)
            wanted.set_exception(exc)
            return
        if is_refused:
            self._look(spec, wanted)
        else:
            wanted.set_result(found)

    def _fail(self, spec: Declaration, wanted: Wanted, error: BaseException) -> None:
        if wanted.done():
            return
        # Without a compiler all fail alike, and the op says so once.
        level = logging.WARNING if isinstance(error, CompileError) else logging.INFO
        _log.log(level, "cannot be compiled in the background: %s: %s", spec.slug, error)
        if not isinstance(error, CompileError | ConfigError):
            wanted.again_at = time.monotonic() + _AGAIN
        wanted.set_exception(error)

    def _built_apart(self, spec: Declaration, needed: bool) -> Future[Artifact]:
        from cutlass_ops.compilation import lookup
        from cutlass_ops.compilation.apart import Apart, Lost

        found: Future[Artifact] = Future()
        if not env.jit_enabled():  # nothing is compiled: a look into the stores needs no process
            self._built_here(spec, found)
            return found

        def ended(key: Future[str]) -> None:
            error = key.exception()
            if isinstance(error, Lost) and not self._ends:
                self._built_here(spec, found)
            elif error is not None:
                found.set_exception(error)
            elif (built := lookup.with_key(spec, key.result())) is not None:
                found.set_result(built)
            else:  # it was removed since
                self._built_here(spec, found)

        self.session.part(Apart).submit(spec, urgent=needed).add_done_callback(ended)
        return found

    def _built_here(self, spec: Declaration, found: Future[Artifact]) -> None:
        from cutlass_ops.compilation.builder import build_artifact

        def build() -> None:
            # On Linux a thread has a priority of its own, and the compilers that it starts inherit it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            try:
                found.set_result(build_artifact(spec))
            except BaseException as exc:
                found.set_exception(exc)

        if self._here is None:
            self._here = ThreadPoolExecutor(env.jobs(), thread_name_prefix="cutlass_ops_builder")
        self._here.submit(build)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Context in which threads that wait for the interpreter's lock have it sooner, also from another thread."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(usual, _TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
