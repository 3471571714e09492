"""File locks between processes.

The system releases a lock when its process ends. A forked process does not share the lock. The holder removes the lock
file, so a process that gets a lock checks that the path still names the same file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from cutlass_ops.base import forks
from cutlass_ops.base.errors import StoreError

_POLL = 0.05  # seconds between attempts
_PATIENCE = 5.0  # seconds of waiting before the first warning
_AGAIN = 60.0  # seconds between warnings
_MAX_NOTE = 4096  # bytes
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger("cutlass_ops")


@contextlib.contextmanager
def held(path: Path, what: str, advice: str, cancel: threading.Event | None = None) -> Iterator[None]:
    """Hold a lock, exclusive among all threads and processes, during the context.

    After some seconds of waiting, the logger ``cutlass_ops`` warns who holds the lock. The file exists while the lock
    is held, and its folder must exist. ``what`` says what the lock protects, and ``advice`` what to do if the file
    system has no locks. Set ``cancel`` to stop waiting. Raises StoreError if the file system has no locks. Raises
    OSError if the file cannot be created, or is a link. Raises CancelledError if ``cancel`` is set while waiting.
    """
    said = time.monotonic() - _AGAIN + _PATIENCE
    while True:
        handle = _Handle(path)
        note = handle.note()
        if handle.attempt(what, advice):
            break
        if cancel is not None and cancel.is_set():
            raise CancelledError
        if time.monotonic() - said > _AGAIN:
            said = time.monotonic()
            _log.warning("waiting for %s: %s", what, note or "another process has the lock")
        time.sleep(_POLL)
    try:
        yield
    finally:
        handle.release()


@contextlib.contextmanager
def attempted(path: Path, what: str, advice: str) -> Iterator[bool]:
    """Hold a lock if it is free; yield whether it is held. Parameters and errors are those of :func:`held`."""
    handle = _Handle(path)
    held = handle.attempt(what, advice)
    try:
        yield held
    finally:
        handle.release()


def require(file: IO[bytes], folder: Path, advice: str) -> None:
    """Check, with an open file of its own, that a folder's file system has locks. Raises StoreError if not."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
        raise _no_locks(folder, exc, advice) from None


def _no_locks(folder: Path, exc: OSError, advice: str) -> StoreError:
    return StoreError(
        f"the file system of {folder} has no file locks ({exc.strerror}), which concurrent processes need: {advice}"
    )


class _Handle:
    """An open lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: do not block if someone put a pipe there.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with forks.held_off():
            self.descriptor = os.open(path, flags, 0o600)
            _handles.add(self)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

    def attempt(self, what: str, advice: str) -> bool:
        """Lock the file and return True; if that fails, close it and return False."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self.is_current():
                self.sign(what)
                return True
        except BlockingIOError:
            pass
        except OSError as exc:
            self.close()
            if exc.errno == errno.ESTALE:  # on a network file system: its holder has removed it
                return False
            if exc.errno not in _UNSUPPORTED:
                raise
            raise _no_locks(self.path.parent, exc, advice) from None
        except BaseException:
            self.close()
            raise
        self.close()
        return False

    def is_current(self) -> bool:
        """Return whether the path still names this file."""
        try:
            there, mine = os.lstat(self.path), os.fstat(self.descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def sign(self, what: str) -> None:
        """Write the holder into the file."""
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "what": what}
        # The lock works without the note, for example on a full disk.
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(note).encode()[:_MAX_NOTE], 0)

    def note(self) -> str | None:
        """Return who holds the lock, if the file says so."""
        try:
            note = json.loads(os.pread(self.descriptor, _MAX_NOTE, 0))
            return f"process {note['pid']} on {note['host']} has had the lock since {note['since']}"
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None

    def release(self) -> None:
        """Release the lock and remove its file. Do nothing in a forked process, which does not own the lock."""
        if self not in _handles:
            return
        with contextlib.suppress(OSError):
            if self.is_current():
                self.path.unlink()
        with contextlib.suppress(OSError):
            # Closing is not enough: a process forked outside Python may still hold the descriptor.
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        with forks.held_off():
            if self in _handles:
                _handles.remove(self)
                os.close(self.descriptor)


# A forked process inherits the descriptors, and with them the locks. It closes all descriptors in _handles. No fork
# happens between opening a descriptor and adding it.
_handles: set[_Handle] = set()


def _in_child() -> None:
    for handle in _handles:
        with contextlib.suppress(OSError):
            os.close(handle.descriptor)
    _handles.clear()


forks.reset_in_child(_in_child)
