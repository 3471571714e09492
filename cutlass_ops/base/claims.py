"""Claims: files at a URL by which one machine does a piece of work, and others wait for its result.

A claim is a hint, not a lock: if it fails, work is done twice. Its holder rewrites it every few seconds. A claim that
no longer changes is dead, and who sees that makes the claim with the next number. So machines need not agree on the
time, and no claim is ever taken from a holder that lives.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.base.remote_files import RemoteFiles, TooLarge, Unreachable

T = TypeVar("T")

_BEAT = 4.0  # seconds between changes by the holder
_EXPIRES = 20.0  # seconds without a change until a claim is dead
_FIRST_POLL, _LAST_POLL = 0.1, 2.0  # seconds between two looks at a claim
_GRACE = 2.0  # seconds in which a claim may appear, for who makes none: many machines begin at the same time
_MOST = 16  # holders that die, one after the other, before nobody claims any more
_MAX_CLAIM = 4096  # bytes

_Outcome: TypeAlias = Literal["gone", "never there", "failed", "dead", "late"]

_log = logging.getLogger("cutlass_ops")


class Limits(NamedTuple):
    """Limits on a claim."""

    request: float  # seconds that a request may take
    until: float  # monotonic time at which the first requests must be done
    # Seconds to wait for another machine, from when its claim is seen; it takes the place of ``until`` then.
    wait: float


class Claim:
    """A claim that this process holds, until :meth:`end`."""

    def __init__(self, files: RemoteFiles, path: str, number: int, limit: float) -> None:
        self._files = files
        self._path = path
        self._number = number
        self._limit = limit
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="cutlass_ops_claim", daemon=True)
        self._thread.start()

    def end(self, until: float, *, failed: bool) -> None:
        """Remove the claim, or mark it as failed, until a monotonic time. One that stays dies by itself."""
        self._ended.set()
        if self._files.down:
            return
        # A late beat must not come after the end.
        self._thread.join(max(until - time.monotonic(), 0.0))
        with contextlib.suppress(Unreachable):
            if failed:
                self._files.write(self._name(self._number), _text(0, "failed"), until - time.monotonic())
            # The dead ones first: who waits looks at the last.
            for number in range(self._number + (not failed)):
                self._files.remove(self._name(number), until - time.monotonic())

    def _name(self, number: int) -> str:
        return f"{self._path}.{number}"

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(_BEAT):
            count += 1
            with contextlib.suppress(Unreachable):
                self._files.write(self._name(self._number), _text(count, "working"), self._limit)


@dataclass
class Turns(Generic[T]):
    """One wait for another machine's result, which may end with a claim of our own."""

    files: RemoteFiles
    path: str  # of the claims, without their number
    what: str  # is made, for the log
    look: Callable[[float], T | None]  # takes a limit in seconds, and returns the result if it is there
    limits: Limits
    cancel: threading.Event | None = None
    _waits: bool = False

    def __post_init__(self) -> None:
        self._until = self.limits.until

    def taken(self, *, claim: bool) -> tuple[T | None, Claim | None]:
        """Wait for the result, or make a claim. Return the result, or the claim; neither if it is too late.

        Without ``claim``, wait only for a claim that is there, or appears soon. Raises Unreachable if a request fails
        or takes too long. No claim is held then, except one that dies by itself. Raises CancelledError if ``cancel`` is
        set while waiting.
        """
        number = 0
        while number < _MOST:
            if claim and self.files.create(f"{self.path}.{number}", _text(0, "working"), self._left()):
                return self._claimed(number)
            outcome = self._watched(number, 0.0 if claim or number else _GRACE)
            # In the grace period a claim may have come and gone.
            found = self.look(self._left())
            if found is not None or outcome in ("failed", "late"):
                return found, None
            if not claim and outcome != "dead":
                return None, None
            number = number + 1 if outcome == "dead" else 0
        return None, None

    def _claimed(self, number: int) -> tuple[T | None, Claim | None]:
        mine = Claim(self.files, self.path, number, self.limits.request)
        try:
            # The last holder may have finished since the last look.
            found = self.look(self._left())
        except BaseException:
            mine.end(self._until, failed=False)
            raise
        if found is None:
            return None, mine
        mine.end(self._until, failed=False)
        return found, None

    def _watched(self, number: int, grace: float) -> _Outcome:
        """Wait while a claim lives. If there is none, wait until it appears, for a grace period."""
        changed = began = time.monotonic()
        seen, pause, grace = None, _FIRST_POLL, min(grace, self.limits.wait, self._left() / 2)
        while True:
            text = self._read(number)
            if text is None and seen is None and time.monotonic() < began + grace:
                self._sleep(_FIRST_POLL)
                continue
            if text is None:
                return "never there" if seen is None else "gone"
            if _state(text) == "failed":
                return "failed"
            now = time.monotonic()
            if not self._waits:
                self._waits, self._until = True, now + self.limits.wait
                _log.info("waiting for %s, which compiles %s", _holder(text), self.what)
            if text != seen:
                seen, changed = text, now
            if now - changed > _EXPIRES:
                return "dead"
            pause = min(pause * 1.5, _LAST_POLL) * random.uniform(0.8, 1.0)
            if now + pause >= self._until:
                return "late"
            self._sleep(pause)

    def _read(self, number: int) -> bytes | None:
        try:
            return self.files.read(f"{self.path}.{number}", _MAX_CLAIM, self._left())
        except TooLarge:
            return b"not a claim"  # which never changes

    def _sleep(self, seconds: float) -> None:
        if self.cancel is None:
            time.sleep(seconds)
        elif self.cancel.wait(seconds):
            raise CancelledError

    def _left(self) -> float:
        return max(min(self.limits.request, self._until - time.monotonic()), 0.0)


def _text(count: int, state: str) -> bytes:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "count": count, "state": state}).encode()


def _fields(text: bytes) -> dict[str, Any]:
    try:
        return dict(checked_json.mapping(checked_json.parsed(text, "a claim", _MAX_CLAIM), "a claim", None))
    except ConfigError:
        return {}


def _state(text: bytes) -> object:
    return _fields(text).get("state")


def _holder(text: bytes) -> str:
    fields = _fields(text)
    return f"process {checked_json.shown(fields.get('pid'))} on {checked_json.shown(fields.get('host'))}"
