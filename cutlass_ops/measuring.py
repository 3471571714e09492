"""Measuring in a process of its own, with a limit on how long it may be silent (it starts programs: see its class)."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from cutlass_ops.config import Config, config_from_json, config_to_json
from cutlass_ops.errors import MeasuringError
from cutlass_ops.programs import Program
from cutlass_ops.registry import OpSignature
from cutlass_ops.tables import Measured, Problem, signature_to_json

WORKER = (sys.executable, "-m", "cutlass_ops.worker")

# A worker imports PyTorch and starts CUDA before it says anything.
_START = 120.0


@dataclass
class Outcome:
    """What came of a problem's kernels.

    Attributes
    ----------
    measured : tuple of Measured
        The kernels that are right, the fastest first.
    peers : mapping of str to float
        Microseconds of PyTorch's ways to compute the same.
    failed : dict of Config to str
        The other kernels, with what is wrong with each.
    """

    measured: tuple[Measured, ...] = ()
    peers: Mapping[str, float] = field(default_factory=dict)
    failed: dict[Config, str] = field(default_factory=dict)


class Measurer:
    """A worker process, restarted when a kernel brings it down.

    Parameters
    ----------
    device : int
        Index of the CUDA device.
    silence : float
        Seconds after which a worker that says nothing is ended: long enough for the slowest step, one kernel at the
        largest problem.
    command : sequence of str
        What to start, to which the device's index is added.
    """

    def __init__(self, device: int = 0, silence: float = 60.0, command: Sequence[str] = WORKER) -> None:
        self._device = device
        self._silence = silence
        self._command = (*command, str(device))
        self._process: Program | None = None
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def __enter__(self) -> Measurer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        process, self._process = self._process, None
        if process is None:
            return
        process.end()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def measure(
        self, signature: OpSignature, problem: Problem, kernels: Mapping[Config, Path], *, rounds: int
    ) -> Outcome:
        """Check and race kernels at a problem.

        Parameters
        ----------
        signature : OpSignature
            Epilogue and operand types.
        problem : tuple of int
            M, N and K.
        kernels : mapping of Config to Path
            Configurations with the order of their tiles, and their artifacts' folders.
        rounds : int
            Of the race.

        Raises
        ------
        MeasuringError
            If the worker does not start, the problem does not fit into memory, or the worker fails at something that is
            no kernel's fault.
        """
        outcome = Outcome()
        left = list(kernels)
        while left:
            blamed = self._attempt(signature, problem, {c: kernels[c] for c in left}, rounds, outcome)
            if blamed is None:
                return outcome
            left = [c for c in left if c not in outcome.failed]
        return outcome

    def _attempt(
        self, signature: OpSignature, problem: Problem, kernels: Mapping[Config, Path], rounds: int, outcome: Outcome
    ) -> Config | None:
        """Try once; return the kernel that brought the worker down, or None when the outcome is complete."""
        self._start()
        configs = list(kernels)
        job = {
            "signature": signature_to_json(signature),
            "problem": list(problem),
            "kernels": [{"config": config_to_json(c), "folder": str(kernels[c])} for c in configs],
            "rounds": rounds,
        }
        self._send(job)
        suspect: Config | None = None
        while True:
            event = self._next(self._silence)
            if event is None or event == {}:
                why = "it does not end" if event == {} else "it brought the process down"
                self.close()
                if suspect is None:
                    raise MeasuringError(f"measuring {problem} stopped, and no kernel is to blame: {why}")
                outcome.failed[suspect] = why
                return suspect
            kind = event["event"]
            if kind == "checking":
                suspect = configs[event["kernel"]]
            elif kind == "wrong":
                outcome.failed[configs[event["kernel"]]] = event["why"]
            elif kind == "peers":
                suspect = None
            elif kind == "impossible":
                raise MeasuringError(f"{problem} cannot be measured: {event['why']}")
            elif kind == "done":
                outcome.measured = tuple(
                    Measured(config_from_json(c), us, behind) for c, us, behind in event["measured"]
                )
                outcome.peers = event["peers"]
                return None

    def _start(self) -> None:
        if self._process is not None:
            return
        self._events = queue.SimpleQueue()
        # An interrupt from the terminal is for this process, which ends the worker.
        try:
            self._process = Program(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", bufsize=1
            )
        except OSError as exc:
            raise MeasuringError(f"no process to measure in: {exc}") from None
        assert self._process.stdout is not None
        threading.Thread(target=_forward, args=(self._process.stdout, self._events), daemon=True).start()
        if self._next(_START) != {"event": "ready"}:
            self.close()
            raise MeasuringError(f"no process to measure in: `{' '.join(self._command)}` did not start; see above")

    def _send(self, job: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # If it is gone, the silence behind it says so.
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(job) + "\n")

    def _next(self, limit: float) -> dict[str, Any] | None:
        """Return the next event; None if the worker ended, and {} if it said nothing for too long."""
        try:
            return self._events.get(timeout=limit)
        except queue.Empty:
            return {}


def _forward(stream: IO[str], events: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    with contextlib.suppress(ValueError, OSError):
        for line in stream:
            events.put(json.loads(line))
    events.put(None)
