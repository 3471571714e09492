"""Kernels that will be needed, compiled and loaded while the caller goes on."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import env, forks
from cutlass_ops.base.ending import is_ending
from cutlass_ops.base.errors import CompileError
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    from cutlass_ops.artifacts.entry import Artifact
    from cutlass_ops.compilation.apart import Apart

_log = logging.getLogger("cutlass_ops")


class _Built(NamedTuple):
    """A kernel that was built, and how it is found."""

    find: Callable[[], Artifact]


# What becomes of a kernel. An exception is why it cannot be built.
_State: TypeAlias = Literal["queued", "building"] | _Built | Exception

# How long the interpreter's end waits for compilers to be gone.
_PATIENCE = 5.0
# Seconds without a weight's first call after which there is time for what these left. Such calls follow each other,
# take ten milliseconds, and took twice as long beside that.
_CALM = 0.05
# Seconds that are given to it at the interpreter's end: what a short process decided, the next one finds in files.
_AT_THE_END = 0.1


class Background(Part):
    """Has kernels built, each once, and gives up when the interpreter ends.

    Its daemon threads wait for the process that builds them (:mod:`cutlass_ops.compilation.apart`). One more gives what
    is built to those who asked for it, one kernel after the other: to load kernels at the same time would keep the
    interpreter's lock from calls. For that reason, one more does what calls left until there is time (:meth:`later`).

    A kernel that cannot be built is left alone: the call that needs it tries again and has the error.

    Parameters
    ----------
    session : Session
        What it builds for.
    build : callable, optional
        Builds one kernel; takes the specification and an event that cancels it, and returns a function that finds it.
        By default, what no bundle of the session has goes to the store.
    """

    def __init__(
        self, session: Session, build: Callable[[KernelSpec, threading.Event], Callable[[], Artifact]] | None = None
    ) -> None:
        super().__init__(session)
        self._build = build or self._found_or_built
        self._reset()
        # Threads do not survive a fork.
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.PriorityQueue[tuple[int, int, KernelSpec]] = queue.PriorityQueue()
        self._arrivals: queue.PriorityQueue[tuple[int, int, KernelSpec]] = queue.PriorityQueue()
        self._count = itertools.count()
        self._cancel = threading.Event()
        self._threads: list[threading.Thread] = []
        self._others: set[str] = set()  # threads that build nothing
        self._left: queue.Queue[Callable[[], object]] = queue.Queue()
        self._calm_at = self._end_at = 0.0
        self._known: dict[KernelSpec, _State] = {}
        self._waiting: dict[KernelSpec, list[Callable[[Artifact], object]]] = {}
        self._first: set[KernelSpec] = set()
        self._apart: Apart | None = None

    def add(
        self,
        specs: Iterable[KernelSpec],
        *,
        first: bool = False,
        then: Callable[[KernelSpec, Artifact], object] | None = None,
    ) -> None:
        """Have kernels built, those that were not added before.

        Parameters
        ----------
        specs : iterable of KernelSpec
            The kernels, in this order.
        first : bool
            Whether they come before those that wait, as a call runs on another kernel until they are there.
        then : callable, optional
            Is given each of these kernels that was not added before, once it is built, in a thread of its own.
        """
        # Read first: what was noted as queued before an error would never be built.
        jobs = env.jobs()
        with self._lock:
            if self._cancel.is_set() or is_ending():
                return
            wanted = dict.fromkeys(specs)
            fresh = [s for s in wanted if s not in self._known]
            self._known.update(dict.fromkeys(fresh, "queued"))
            if then is not None:
                for spec in fresh:
                    self._waiting.setdefault(spec, []).append(functools.partial(then, spec))
            if first:
                self._first.update(wanted)
            # One that waits already is queued once more: whoever takes it second finds that it is done.
            earlier = [s for s in wanted if s not in fresh and self._known[s] == "queued"] if first else []
            for spec in (*earlier, *fresh):
                self._queue.put((0 if first else 1, next(self._count), spec))
            for _ in range(min(len(fresh), jobs - len(self._threads))):
                self._begin("arrivals", self._deliver)
                thread = threading.Thread(target=self._work, name="cutlass_ops_background", daemon=True)
                self._threads.append(thread)
                thread.start()

    def later(self, do: Callable[[], object]) -> None:
        """Have something done that takes milliseconds and that nobody waits for, once no more of that comes.

        Beside it, calls would wait for the interpreter's lock.
        """
        with self._lock:
            if not self._cancel.is_set() and not is_ending():
                self._calm_at = time.monotonic() + _CALM
                self._left.put(do)
                self._begin("left", self._do_what_is_left)

    def when_built(self, spec: KernelSpec, do: Callable[[Artifact], object]) -> None:
        """Give a kernel that was added to a function once it is built, in another thread. If it cannot be, never."""
        with self._lock:
            self._waiting.setdefault(spec, []).append(do)
            if isinstance(self._known.get(spec), _Built):
                self._arrivals.put((0, next(self._count), spec))

    def pending(self, spec: KernelSpec) -> bool:
        """Whether a kernel that was added is not built yet, so that to look for it in the store is no use."""
        return self._known.get(spec) in ("queued", "building")

    def failure(self, spec: KernelSpec) -> Exception | None:
        """Return why a kernel could not be built, if it was tried."""
        state = self._known.get(spec)
        return state if isinstance(state, Exception) else None

    def wait(self) -> None:
        """Wait until all that was added is done, and given to those who asked for it."""
        for work in (self._queue, self._arrivals, self._left):
            work.join()

    def close(self) -> None:
        """Cancel what is running, and wait a little for its end."""
        self._end_at = time.monotonic() + _AT_THE_END
        self._cancel.set()
        if self._apart is not None:
            self._apart.close()
        for work in (self._queue, self._arrivals, self._left):
            with work.all_tasks_done:
                work.all_tasks_done.wait_for(lambda work=work: not work.unfinished_tasks, _PATIENCE)  # type: ignore[misc]

    def _begin(self, name: str, work: Callable[[], None]) -> None:
        """Start one of the other threads, if it does not run."""
        if name in self._others:
            return
        if not self._others:
            atexit.register(self.close)
        self._others.add(name)
        threading.Thread(target=work, name=f"cutlass_ops_{name}", daemon=True).start()

    def _work(self) -> None:
        # Its priority is the callers': a thread that has to wait for a processor may hold the interpreter's lock.
        work, cancel = self._queue, self._cancel
        while True:
            _, _, spec = work.get()
            try:
                if not cancel.is_set() and self._begins(spec):
                    self._ended(spec, self._outcome(spec, cancel))
            finally:
                work.task_done()

    def _begins(self, spec: KernelSpec) -> bool:
        """Note that a kernel is being built; False if another thread has taken it."""
        with self._lock:
            queued = self._known.get(spec) == "queued"
            if queued:
                self._known[spec] = "building"
        return queued

    def _outcome(self, spec: KernelSpec, cancel: threading.Event) -> _State:
        try:
            return _Built(self._build(spec, cancel))
        except Exception as exc:
            return exc

    def _ended(self, spec: KernelSpec, outcome: _State) -> None:
        with self._lock:
            self._known[spec] = outcome
            if not isinstance(outcome, _Built):
                self._waiting.pop(spec, None)
            elif spec in self._waiting:
                self._arrivals.put((0 if spec in self._first else 1, next(self._count), spec))
        if isinstance(outcome, _Built):
            _log.info("built in the background: %s", spec.slug)
        else:
            # Without a compiler all fail alike, and the call that needs one says so.
            level = logging.WARNING if isinstance(outcome, CompileError) else logging.INFO
            _log.log(level, "cannot be compiled in the background: %s: %s", spec.slug, outcome)

    def _deliver(self) -> None:
        work, cancel = self._arrivals, self._cancel
        while True:
            _, _, spec = work.get()
            try:
                with self._lock:
                    waiting, built = self._waiting.pop(spec, []), self._known[spec]
                if waiting and isinstance(built, _Built) and not cancel.is_set():
                    found = built.find()
                    for do in waiting:
                        do(found)
            except Exception as exc:
                # The thread must live on, whatever is wrong there.
                _log.warning("cannot be loaded in the background: %s: %s", spec.slug, exc)
            finally:
                work.task_done()

    def _do_what_is_left(self) -> None:
        left, cancel = self._left, self._cancel
        while True:
            do = left.get()
            try:
                while (pause := self._calm_at - time.monotonic()) > 0 and not cancel.wait(pause):
                    pass
                if not cancel.is_set() or time.monotonic() < self._end_at:
                    do()
            except Exception as exc:
                _log.warning("failed in the background: %s", exc, exc_info=True)
            finally:
                left.task_done()

    def _found_or_built(self, spec: KernelSpec, cancel: threading.Event) -> Callable[[], Artifact]:
        bundled = self.session.part(Bundles).find(spec)
        if bundled is not None:
            return lambda: bundled
        # Imported late: where a bundle has every kernel, none is built.
        from cutlass_ops.compilation.apart import Apart

        self._apart = self.session.part(Apart)
        return self._apart.build(spec, cancel)
