"""Kernels that will be needed, compiled while the caller goes on."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import env, forks
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.spec import KernelSpec

# How long the interpreter's end waits for compilers to be gone.
_PATIENCE = 5.0
# Nice value of the compilers: a kernel that a call waits for is compiled first.
_NICE = 10


class Background(Part):
    """Builds kernels in daemon threads, each once, and gives up when the interpreter ends.

    A kernel that cannot be built is left alone: the call that needs it tries again and has the error.

    Parameters
    ----------
    session : Session
        What it builds for.
    build : callable, optional
        Builds one kernel; takes the specification and an event that cancels it. By default, what no bundle of the
        session has goes to the store.
    """

    def __init__(self, session: Session, build: Callable[[KernelSpec, threading.Event], object] | None = None) -> None:
        super().__init__(session)
        self._build = build or self._found_or_built
        self._reset()
        # Threads do not survive a fork.
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._queue: queue.Queue[KernelSpec] = queue.Queue()
        self._cancel = threading.Event()
        self._threads: list[threading.Thread] = []
        self._known: set[KernelSpec] = set()

    def add(self, specs: Iterable[KernelSpec]) -> None:
        """Have kernels built, those that were not added before."""
        with self._lock:
            if self._cancel.is_set():
                return
            fresh = [s for s in dict.fromkeys(specs) if s not in self._known]
            self._known.update(fresh)
            for spec in fresh:
                self._queue.put(spec)
            for _ in range(min(len(fresh), env.jobs() - len(self._threads))):
                if not self._threads:
                    atexit.register(self.close)
                thread = threading.Thread(target=self._work, name="cutlass_ops_background", daemon=True)
                self._threads.append(thread)
                thread.start()

    def wait(self) -> None:
        """Wait until all that was added is done."""
        self._queue.join()

    def close(self) -> None:
        """Cancel what is running, and wait a little for its end."""
        self._cancel.set()
        with self._queue.all_tasks_done:
            self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, _PATIENCE)

    def _work(self) -> None:
        work, cancel = self._queue, self._cancel
        # On Linux a thread has a priority of its own, and the processes that it starts inherit it.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while True:
            spec = work.get()
            try:
                if not cancel.is_set():
                    with contextlib.suppress(Exception):
                        self._build(spec, cancel)
            finally:
                work.task_done()

    def _found_or_built(self, spec: KernelSpec, cancel: threading.Event) -> object:
        from cutlass_ops.compilation.builder import build_artifact

        return self.session.part(Bundles).find(spec) or build_artifact(spec, cancel=cancel)
