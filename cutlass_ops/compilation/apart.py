"""Kernels built by a process apart.

To render, check and prove kernels is work in Python. In threads of this process it would hold the interpreter's lock,
for which a call would wait 5 ms at a time. A process of its own costs calls nothing.

Requests and answers are lines of JSON on its standard input and output. Kernels that a call needs come first there, and
kernels that wait together are compiled together (:class:`Waiting`). It ends with this process, and so do its compilers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.artifacts.store import KernelStore, Temporary
from cutlass_ops.base import env, errors, forks
from cutlass_ops.base.programs import PIPE, Program
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json

_log = logging.getLogger("cutlass_ops")

# Nice value of the process and its compilers: a kernel that a call waits for is compiled first.
_NICE = 10
# Variables on which it depends what is built, and where: a process serves one setting of these.
_SETTINGS = ("CUTLASS_OPS_", "CUDA_", "NVCC_", "XDG_CACHE_HOME", "HOME", "PATH", "TMPDIR", "AWS_", "FSSPEC_")

# Bytes of requests that a pipe holds while the process starts: whoever asks does not wait for it.
_PIPE = 1 << 20

# Four kernels in one file take half of the time that they take alone. More would save little, and take longer to come.
MOST = 4
# Seconds without a request after which those that came together are divided, and the most that this may take. A kernel
# takes half a minute to compile.
_QUIET, _LONGEST = 0.05, 0.5

# Other output is no answer. Nothing is imported from the folder where it is started. It is known as the command line,
# which imports no PyTorch.
_PROGRAM = """
import os, sys
answers = os.dup(1)
os.dup2(2, 1)
path, temporary = sys.argv[1:]
sys.path[:] = path.split(os.pathsep)
sys.argv[:] = ["cutlass-ops"]
from cutlass_ops.compilation.apart import serve
serve(answers, temporary)
"""


class Lost(Exception):
    """The process cannot be started, or has ended."""


class Apart(Part):
    """The process that builds kernels for a session, started when it is first asked."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._reset()
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._processes: dict[frozenset[tuple[str, str]], _Builder] = {}

    def submit(self, spec: Declaration, *, urgent: bool) -> Future[str]:
        """Ask the process to build a kernel into the user's store, and return at once.

        The future gives the kernel's key. It cannot be cancelled, and while a declaration waits, there is one.
        """
        try:
            return self._process().submit(spec, urgent)
        except Lost as exc:
            lost: Future[str] = Future()
            lost.set_exception(exc)
            return lost

    def close(self) -> None:
        """End the process and its compilers."""
        with self._lock:
            for process in self._processes.values():
                process.close()

    def _process(self) -> _Builder:
        # It may be a program that embeds Python, and takes other options.
        if not os.path.basename(sys.executable or "").startswith("python"):
            raise Lost("no Python interpreter can be started")
        setting = settings()
        with self._lock:
            if setting not in self._processes:
                KernelStore.default().to_build_in()  # a warning comes from this process, and not from that one
                temporary = self.session.part(Temporary).store.root
                self._processes[setting] = _Builder(os.environ, temporary)
            return self._processes[setting]


def settings() -> frozenset[tuple[str, str]]:
    """Return the variables on which it depends what is built."""
    return frozenset((name, text) for name, text in os.environ.items() if name.startswith(_SETTINGS))


class _Asked(NamedTuple):
    """A kernel that the process was asked for, and has not answered."""

    spec: Declaration
    key: Future[str]


class _Builder:
    """A process that runs :func:`serve`."""

    def __init__(self, environment: Mapping[str, str], temporary: Path) -> None:
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._waiting: dict[Declaration, int] = {}
        self._urgent: set[int] = set()
        self._ended = False
        root = Path(__file__).parents[2]
        path = os.pathsep.join(dict.fromkeys([str(root), *(folder for folder in sys.path if os.path.isabs(folder))]))
        command = [sys.executable, "-c", _PROGRAM, path, str(temporary)]
        try:
            self._program = Program(command, stdin=PIPE, stdout=PIPE, pipesize=_PIPE, env=dict(environment))
        except OSError as exc:
            raise Lost(str(exc)) from None
        threading.Thread(target=self._read, name="cutlass_ops_apart", daemon=True).start()

    def submit(self, spec: Declaration, urgent: bool) -> Future[str]:
        """Ask for a kernel, or for one that waits to come earlier; return its key's future."""
        with self._lock:
            if self._ended:
                raise Lost("it has ended")
            number = self._waiting.get(spec)
            if number is None:
                number = next(self._numbers)
                asked = self._asked[number] = _Asked(spec, Future())
                asked.key.set_running_or_notify_cancel()
                self._waiting[spec] = number
                self._write({"number": number, "spec": spec.to_json(), "urgent": urgent})
            elif urgent and number not in self._urgent:
                self._write({"number": number, "urgent": True})
            if urgent:
                self._urgent.add(number)
            return self._asked[number].key

    def _write(self, request: Mapping[str, Any]) -> None:
        assert self._program.stdin is not None
        # Requests that are lost with the process are answered once its end is noticed.
        with contextlib.suppress(OSError, ValueError):
            self._program.stdin.write(json.dumps(request).encode() + b"\n")
            self._program.stdin.flush()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError, ValueError):
            assert self._program.stdin is not None
            self._program.stdin.close()

    def _read(self) -> None:
        assert self._program.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._program.stdout:
                if not line.startswith(b"{"):  # printed at its start
                    continue
                found = json.loads(line)
                if "level" in found:
                    _log.log(found["level"], "%s", found["message"])
                    continue
                with self._lock:
                    answer = self._answered(found["number"])
                if "key" in found:
                    answer.set_result(found["key"])
                else:
                    answer.set_exception(_error(found["error"], found["message"]))
        with self._lock:
            self._ended = True
            left = [self._answered(number) for number in list(self._asked)]
        for answer in left:
            answer.set_exception(Lost("it has ended"))
        self._program.end()
        self.close()
        self._program.stdout.close()

    def _answered(self, number: int) -> Future[str]:
        spec, key = self._asked.pop(number)
        del self._waiting[spec]
        self._urgent.discard(number)
        return key


def _error(name: str, message: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.CutlassOpsError):
        return kind(message)
    return RuntimeError(f"{name}: {message}")


class _Told(logging.Handler):
    """Tells the process that asked what is logged here."""

    def __init__(self, answer: Callable[..., None]) -> None:
        super().__init__(logging.INFO)
        self._answer = answer

    def emit(self, record: logging.LogRecord) -> None:
        """Answer without a number."""
        self._answer(level=record.levelno, message=record.getMessage())


@dataclass(frozen=True)
class Request:
    """A kernel that was asked for: its number, its declaration, and what else can be in a file with it."""

    number: int
    spec: Declaration
    alike: Hashable


def alike(spec: Declaration) -> Hashable:
    """Return what is the same for kernels that can be compiled in one file: the target, and how their sources begin."""
    from cutlass_ops.compilation.compiler import beginning
    from cutlass_ops.kinds import render

    return spec.target, beginning(render.source(spec))


class Waiting:
    """Kernels that wait for some workers.

    Those that a call needs come first; no guess is taken while one of these waits. If there are more of a sort than
    workers, each worker takes several that are alike, at most :data:`MOST`.
    """

    def __init__(self, workers: int) -> None:
        self._workers = self._free = workers
        self._changed = threading.Condition()
        self._arrived: list[Mapping[str, Any]] = []
        self._last = 0.0
        self._closed = False
        self._needed: dict[int, Request] = {}
        self._guessed: dict[int, Request] = {}

    def add(self, request: Mapping[str, Any]) -> None:
        """Add a request: its number, its declaration as JSON values, and whether it is urgent."""
        with self._changed:
            self._arrived.append(request)
            self._last = time.monotonic()
            self._changed.notify_all()

    def finished(self) -> None:
        """Note that a worker is free again."""
        with self._changed:
            self._free += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End :meth:`groups`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def groups(self) -> Iterator[list[Request]]:
        """Yield the kernels for one worker after the other, each as soon as it is free. One thread may ask for them."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._free and self._any()))
            end = time.monotonic() + _LONGEST
            while not self._closed and (left := min(self._last + _QUIET, end) - time.monotonic()) > 0:
                time.sleep(left)
            with self._changed:
                if self._closed:
                    return
                arrived, self._arrived = self._arrived, []
            self._sort(arrived)
            workers = self._workers
            while self._free and (self._needed or self._guessed):
                with self._changed:
                    self._free -= 1
                yield self._take(workers)
                workers = max(1, workers - 1)

    def _any(self) -> bool:
        return bool(self._arrived or self._needed or self._guessed)

    def _sort(self, arrived: list[Mapping[str, Any]]) -> None:
        for request in arrived:
            number = request["number"]
            if "spec" not in request:
                if number in self._guessed:
                    self._needed[number] = self._guessed.pop(number)
                continue
            spec = declaration_from_json(request["spec"])
            try:
                key = alike(spec)
            except Exception as exc:  # whoever builds it has the error again
                _log.debug("%s is compiled alone: %s", spec.slug, exc)
                key = number
            (self._needed if request["urgent"] else self._guessed)[number] = Request(number, spec, key)

    def _take(self, workers: int) -> list[Request]:
        """Take the next kernel, and those that are compiled with it if all are divided among some workers."""
        waiting = self._needed or self._guessed
        first = next(iter(waiting.values()))
        size = min(MOST, -(-len(waiting) // workers))
        group = [request for request in waiting.values() if request.alike == first.alike][:size]
        for request in group:
            del waiting[request.number]
        return group


def serve(number: int, temporary: str) -> None:
    """Build what standard input asks for, until it ends: what the process does. It answers on a file descriptor."""
    warnings.simplefilter("ignore", RuntimeWarning)
    Temporary.current().use(Path(temporary))
    answers = os.fdopen(number, "w", encoding="utf-8")
    os.set_inheritable(number, False)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    cancel, lock = threading.Event(), threading.Lock()
    waiting = Waiting(env.jobs())
    pool = ThreadPoolExecutor(env.jobs())

    def answer(**found: Any) -> None:
        with lock, contextlib.suppress(OSError, ValueError):
            print(json.dumps(found), file=answers, flush=True)

    _log.setLevel(logging.INFO)
    _log.addHandler(_Told(answer))
    _log.propagate = False

    def build(group: Sequence[Request]) -> None:
        from cutlass_ops.compilation.builder import build_together

        try:
            for request, built in zip(group, build_together([r.spec for r in group], cancel=cancel), strict=True):
                if isinstance(built, Artifact):
                    answer(number=request.number, key=built.key)
                elif not isinstance(built, CancelledError):
                    answer(number=request.number, error=type(built).__name__, message=str(built))
        finally:
            waiting.finished()

    def start() -> None:
        for group in waiting.groups():
            pool.submit(build, group)

    threading.Thread(target=start, name="cutlass_ops_groups", daemon=True).start()
    for line in sys.stdin.buffer:
        waiting.add(json.loads(line))
    cancel.set()
    waiting.close()
    pool.shutdown(cancel_futures=True)
