"""Kernels built by a process apart.

To render, check and prove kernels is work in Python. In threads of this process it would hold the interpreter's lock,
for which a call would wait 5 ms at a time. A process of its own costs calls nothing.

Requests and answers are lines of JSON on its standard input and output. It ends with this process, and so do its
compilers.
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
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.base import env, errors, forks
from cutlass_ops.base.programs import PIPE, Program
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.spec import KernelSpec

_log = logging.getLogger("cutlass_ops")

# Nice value of the process and its compilers: a kernel that a call waits for is compiled first.
_NICE = 10
# Variables on which it depends what is built, and where: a process serves one setting of these.
_SETTINGS = ("CUTLASS_OPS_", "CUDA_", "NVCC_", "XDG_CACHE_HOME", "HOME", "PATH", "TMPDIR", "AWS_", "FSSPEC_")

# Seconds. A weight's kernels are looked for together. For all that come so soon, templates and compilers are examined
# once: that takes most of a look. In another environment they are other ones.
_BURST = 0.1

# What else prints is no answer. The folder where it is started is none to import from. It is known as the command line,
# which imports no PyTorch.
_PROGRAM = """
import os, sys
answers = os.dup(1)
os.dup2(2, 1)
sys.path[:] = sys.argv[1].split(os.pathsep)
sys.argv[:] = ["cutlass-ops"]
from cutlass_ops.compilation.apart import serve
serve(answers)
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
        self._looking = threading.Lock()
        self._situation, self._looked, self._looked_in = list[str | None](), 0.0, frozenset[tuple[str, str]]()
        self._processes: dict[frozenset[tuple[str, str]], _Builder] = {}
        self._lost = False

    def build(self, spec: KernelSpec, cancel: threading.Event) -> Callable[[], Artifact]:
        """Have the kernel for a declaration built by the process, unless the store is known to have it.

        It is built in this process if there is no other.

        Returns a function that finds it: of most kernels nobody asks for it soon.

        The errors are those of :func:`cutlass_ops.compilation.builder.build_artifact`.
        """
        from cutlass_ops.compilation import lookup

        known = self._recalled(spec)
        if known is not None:
            return lambda: known

        def build() -> Artifact:
            # What compiles is half of this package, and calls wait while threads import it.
            from cutlass_ops.compilation.builder import build_artifact

            return build_artifact(spec, cancel=cancel)

        try:
            key = self._process().build(spec)
        except Lost as exc:
            if cancel.is_set():
                raise CancelledError from None
            if not self._lost:
                _log.warning("kernels are built in this process, since the one for them is lost: %s", exc)
            self._lost = True
            # On Linux a thread has a priority of its own, and the compilers that it starts inherit it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            built = build()
            return lambda: built
        # Whatever was removed meanwhile is built again.
        return lambda: lookup.with_key(spec, key) or build()

    def _recalled(self, spec: KernelSpec) -> Artifact | None:
        """Return the kernel if the store has it and its key is known."""
        from cutlass_ops.compilation import keys, lookup

        with self._looking:  # one thread at a time: a call would wait for the interpreter's lock behind each
            settings = _settings()
            if time.monotonic() - self._looked > _BURST or settings != self._looked_in:
                self._situation, self._looked, self._looked_in = [], time.monotonic(), settings
            with keys.one_situation(self._situation):
                return lookup.recalled(spec)

    def close(self) -> None:
        """Have the process end, and its compilers with it."""
        with self._lock:
            for process in self._processes.values():
                process.close()

    def _process(self) -> _Builder:
        if self._lost or not _is_python(sys.executable):
            raise Lost("no Python interpreter can be started")
        settings = _settings()
        with self._lock:
            if settings not in self._processes:
                self._processes[settings] = _Builder(os.environ)
            return self._processes[settings]


def _settings() -> frozenset[tuple[str, str]]:
    """Return the variables on which it depends what is built."""
    return frozenset((name, text) for name, text in os.environ.items() if name.startswith(_SETTINGS))


def _is_python(path: str | None) -> bool:
    """Whether a program takes Python's options: it may be one that embeds Python."""
    return bool(path) and os.path.basename(str(path)).startswith("python")


class _Builder:
    """A process that runs :func:`serve`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._answers: dict[int, Future[str]] = {}
        self._ended = False
        root = Path(__file__).parents[2]
        path = os.pathsep.join(dict.fromkeys([str(root), *(folder for folder in sys.path if os.path.isabs(folder))]))
        command = [sys.executable, "-c", _PROGRAM, path]
        try:
            self._program = Program(command, stdin=PIPE, stdout=PIPE, env=dict(environment))
        except OSError as exc:
            raise Lost(str(exc)) from None
        threading.Thread(target=self._read, name="cutlass_ops_apart", daemon=True).start()

    def build(self, spec: KernelSpec) -> str:
        """Return the key of a kernel that it builds."""
        answer: Future[str] = Future()
        with self._lock:
            if self._ended:
                raise Lost("it has ended")
            number = next(self._numbers)
            self._answers[number] = answer
            request = json.dumps({"number": number, "spec": spec.to_json()})
            assert self._program.stdin is not None
            try:
                self._program.stdin.write(request.encode() + b"\n")
                self._program.stdin.flush()
            except (OSError, ValueError) as exc:
                self._answers.pop(number)
                raise Lost(str(exc)) from None
        return answer.result()

    def close(self) -> None:
        """Have it end."""
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
                answer = self._answers.pop(found["number"])
                if "key" in found:
                    answer.set_result(found["key"])
                else:
                    answer.set_exception(_error(found["error"], found["message"]))
        with self._lock:
            self._ended = True
            left, self._answers = list(self._answers.values()), {}
        for answer in left:
            answer.set_exception(Lost("it has ended"))
        self._program.end()
        self.close()
        self._program.stdout.close()


def _error(name: str, message: str) -> Exception:
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, errors.CutlassOpsError):
        return kind(message)
    return RuntimeError(f"{name}: {message}")


def serve(number: int) -> None:
    """Build what standard input asks for, until it ends: what the process does. It answers on a file descriptor."""
    from cutlass_ops.compilation.builder import build_artifact

    answers = os.fdopen(number, "w", encoding="utf-8")
    os.set_inheritable(number, False)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    cancel, lock = threading.Event(), threading.Lock()
    pool = ThreadPoolExecutor(env.jobs())

    def answer(**found: Any) -> None:
        with lock, contextlib.suppress(OSError, ValueError):
            print(json.dumps(found), file=answers, flush=True)

    def build(number: int, declaration: Mapping[str, Any]) -> None:
        try:
            key = build_artifact(KernelSpec.from_json(declaration), cancel=cancel).key
        except CancelledError:
            return
        except Exception as exc:
            answer(number=number, error=type(exc).__name__, message=str(exc))
        else:
            answer(number=number, key=key)

    for line in sys.stdin.buffer:
        request = json.loads(line)
        pool.submit(build, request["number"], request["spec"])
    cancel.set()
    pool.shutdown(cancel_futures=True)
