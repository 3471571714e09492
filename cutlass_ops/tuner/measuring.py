"""Measuring in a process of its own, of which nothing is believed unread and nothing is waited for without a limit.

It starts programs: see :class:`Measurer`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError, MeasuringError
from cutlass_ops.base.programs import Program
from cutlass_ops.choose.tables import Measured, Table
from cutlass_ops.declare.config import Ordered, config_to_json
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import signature_to_json
from cutlass_ops.run.registry import OpSignature

WORKER = (sys.executable, "-m", "cutlass_ops.tuner.worker")

# A worker imports PyTorch and starts CUDA before it says anything.
_START = 120.0
_KILLED = 10.0  # seconds that the system may take to end a process that was killed
_MAX_LINE = 4 << 20  # bytes; the last event has a row for each kernel and order of tiles
_CHUNK = 1 << 16
# Events of a job besides two for each kernel, and more than there are for each round: there are two races, and those of
# long kernels take longer.
_FEW_EVENTS = 16
_EVENTS_OF_A_ROUND = 20

# A worker's messages: the fields of each event.
_EVENTS = {
    "ready": "event",
    "preparing": "event",
    "checking": "event kernel",
    "wrong": "event kernel why",
    "peers": "event",
    "racing": "event",
    "impossible": "event why",
    "done": "event table",
}


@dataclass
class Outcome:
    """The result of measuring a problem's kernels."""

    measured: tuple[Measured, ...] = ()  # the kernels that are right, the fastest first
    peers: Mapping[str, float] = field(default_factory=dict)  # microseconds of PyTorch's ways to compute the same
    failed: dict[Ordered, str] = field(default_factory=dict)  # the other kernels, with what is wrong with each


class Measurer:
    """A worker process, restarted if a kernel brings it down.

    A worker that says nothing for `silence` seconds is ended: long enough for the slowest step, one kernel at the
    largest problem. The device's index is added to `command`.
    """

    def __init__(self, device: int = 0, silence: float = 60.0, command: Sequence[str] = WORKER) -> None:
        self._silence = silence
        self._command = (*command, str(device))
        self._worker: _Worker | None = None

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end()

    def measure(
        self,
        signature: OpSignature,
        problem: Problem,
        kernels: Mapping[Ordered, Path],
        *,
        rounds: int,
        spreads: Sequence[str] = (),
    ) -> Outcome:
        """Check and race kernels, given as configurations and their artifacts' folders, at a problem."""
        outcome = Outcome()
        left = list(kernels)
        job = {
            "signature": signature_to_json(signature),
            "problem": problem.to_json(),
            "spreads": list(spreads),
            "rounds": rounds,
        }
        while left:
            blamed = self._attempt(problem, job, {c: kernels[c] for c in left}, outcome)
            if blamed is None:
                return outcome
            left = [c for c in left if c not in outcome.failed]
        return outcome

    def _attempt(
        self, problem: Problem, job: Mapping[str, Any], kernels: Mapping[Ordered, Path], outcome: Outcome
    ) -> Ordered | None:
        """Try once; return the kernel that brought the worker down, or None when the outcome is complete."""
        worker, rounds = self._start(), job["rounds"]
        named = [
            {"config": config_to_json(entrant.config), "order": entrant.order.to_json(), "folder": str(folder)}
            for entrant, folder in kernels.items()
        ]
        reading = _Reading(list(kernels), outcome)
        try:
            worker.send(json.dumps({**job, "kernels": named}).encode() + b"\n", self._silence)
            for _ in range(_FEW_EVENTS + 2 * len(kernels) + _EVENTS_OF_A_ROUND * rounds):
                if reading.takes(_event(worker.line(self._silence))):
                    return None
            raise ConfigError("its events do not end")
        except _StoppedError as exc:
            self.close()
            if reading.suspect is None:
                raise MeasuringError(f"measuring {problem} stopped, and no kernel is to blame: {exc}") from None
            outcome.failed[reading.suspect] = exc.of_kernel
            return reading.suspect
        except _ImpossibleError as exc:
            raise MeasuringError(f"{problem} cannot be measured: {exc}") from None
        except ConfigError as exc:
            self.close()
            raise MeasuringError(
                f"measuring {problem} stopped: the process that measures printed unexpected text: "
                f"{checked_json.said(exc)}"
            ) from None
        except BaseException:
            # Its answer to this job must not be taken for that to the next one.
            self.close()
            raise

    def _start(self) -> _Worker:
        if self._worker is not None:
            return self._worker
        try:
            self._worker = _Worker(self._command)
            first = _event(self._worker.line(_START))
            why = "" if first == {"event": "ready"} else f"its first event is {checked_json.shown(first)}"
        except (_StoppedError, ConfigError, OSError) as exc:
            why = checked_json.said(exc)
        if why:
            self.close()
            raise MeasuringError(
                f"no process to measure in: `{' '.join(self._command)}` did not start: {why}; see above"
            )
        assert self._worker is not None
        return self._worker


class _StoppedError(Exception):
    """A worker stopped; `of_kernel` says what is wrong with the kernel that it ran."""

    of_kernel = "it does not end"


class _EndedError(_StoppedError):
    """A worker ended."""

    of_kernel = "it brought the process down"


class _ImpossibleError(Exception):
    """A worker says that a problem cannot be measured, and why."""


class _Worker:
    """A worker's process: lines to it and from it, each within a time."""

    def __init__(self, command: Sequence[str]) -> None:
        # An interrupt from the terminal is for this process, which ends the worker.
        self._process = Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._streams = self._process.stdin, self._process.stdout
        self._to, self._from = (stream.fileno() for stream in self._streams)
        self._said = bytearray()
        for descriptor in (self._to, self._from):
            os.set_blocking(descriptor, False)

    def send(self, line: bytes, limit: float) -> None:
        """Write a line within `limit` seconds, while the worker says nothing."""
        if self._said or (self._ready(self._from, select.POLLIN, 0.0) and self._read()):
            raise ConfigError(f"{checked_json.shown(bytes(self._said[:100]))}, before it has a job")
        end, left = time.monotonic() + limit, memoryview(line)
        while left:
            if not self._ready(self._to, select.POLLOUT, end - time.monotonic()):
                raise _StoppedError("the process does not take its job")
            try:
                left = left[os.write(self._to, left) :]
            except BlockingIOError:
                continue
            except OSError:
                raise _EndedError("the process has ended") from None

    def line(self, limit: float) -> bytes:
        """Return the next whole line, within `limit` seconds."""
        end, seen = time.monotonic() + limit, 0
        while (at := self._said.find(b"\n", seen)) < 0:
            seen = len(self._said)
            if seen > _MAX_LINE:
                raise ConfigError(f"a line of more than {_MAX_LINE} bytes")
            if not self._ready(self._from, select.POLLIN, end - time.monotonic()):
                raise _StoppedError("the process says nothing")
            if not self._read():
                raise _EndedError("the process has ended, or closed its output")
        line = bytes(self._said[:at])
        del self._said[: at + 1]
        return line

    def end(self) -> None:
        """End the process, and those that it started."""
        self._process.end()
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()

    def _read(self) -> bool:
        """Take in what there is to read; False at its end."""
        chunk = os.read(self._from, _CHUNK)
        self._said += chunk
        return bool(chunk)

    @staticmethod
    def _ready(descriptor: int, events: int, limit: float) -> bool:
        poll = select.poll()
        poll.register(descriptor, events)
        return bool(poll.poll(max(0.0, limit) * 1000))


class _Reading:
    """The state of a job according to a worker's events."""

    def __init__(self, kernels: Sequence[Ordered], outcome: Outcome) -> None:
        self._kernels = kernels
        self._outcome = outcome
        # Whose fault it would be if the worker stopped now.
        self.suspect: Ordered | None = None

    def takes(self, event: Mapping[str, Any]) -> bool:
        """Take in an event; return whether it is the last."""
        kind = event["event"]
        if kind == "checking":
            self.suspect = self._kernel(event)
        elif kind == "wrong":
            self._outcome.failed[self._kernel(event)] = _why(event)
        elif kind == "peers":
            self.suspect = None
        elif kind == "impossible":
            raise _ImpossibleError(_why(event))
        elif kind == "done":
            self._take_times(event["table"])
        elif kind == "ready":
            raise ConfigError("that it is ready, in the middle of a job")
        return bool(kind == "done")

    def _kernel(self, event: Mapping[str, Any]) -> Ordered:
        return self._kernels[checked_json.integer(event["kernel"], "kernel", 0, len(self._kernels) - 1)]

    def _take_times(self, data: object) -> None:
        points = Table.from_json(data).points
        measured = points[0].measured if points else ()
        if len({m.ordered for m in measured}) != len(measured):
            raise ConfigError("a kernel's times, twice")
        if list(measured) != sorted(measured, key=lambda m: m.behind):
            raise ConfigError("times in another order than the fastest first")
        right = {entrant.config for entrant in self._kernels if entrant not in self._outcome.failed}
        if {m.config for m in measured} != right:
            raise ConfigError("times of other kernels than those that are right")
        self._outcome.measured = measured
        self._outcome.peers = dict(points[0].peers) if points else {}


def _event(line: bytes) -> Mapping[str, Any]:
    try:
        event = checked_json.mapping(checked_json.parsed(line, "it", _MAX_LINE), "it", None)
        kind = event.get("event")
        if not isinstance(kind, str) or kind not in _EVENTS:
            raise ConfigError("it is no event")
        return checked_json.mapping(event, kind, _EVENTS[kind])
    except ConfigError as exc:
        raise ConfigError(f"{checked_json.shown(line)}: {exc}") from None


def _why(event: Mapping[str, Any]) -> str:
    why = event["why"]
    if not isinstance(why, str):
        raise ConfigError(f"why is {checked_json.shown(why)}: a text is needed")
    return checked_json.printable(why)
