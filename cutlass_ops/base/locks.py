"""Locks among processes, as files: each has one holder at a time, and none that is dead.

The system drops a lock with the process that holds it, and a forked one has no part in it. A file is removed by its
holder, so that whoever gets a lock looks whether the file is still the one of that name.
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

from cutlass_ops.base.errors import StoreError

_POLL = 0.05  # seconds between looks at a lock that another holds
_PATIENCE = 5.0  # seconds until a waiter says whom it waits for
_AGAIN = 60.0  # seconds until it says so again
_MAX_NOTE = 4096  # bytes
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger("cutlass_ops")


@contextlib.contextmanager
def held(path: Path, what: str, advice: str, cancel: threading.Event | None = None) -> Iterator[None]:
    """Hold a lock among all threads and processes for as long as the context lasts.

    Who waits for more than some seconds says for whom, as a warning of the logger ``cutlass_ops``.

    Parameters
    ----------
    path : Path
        Its file, which is there while somebody holds the lock. The folder has to exist.
    what : str
        What the lock is for, in words.
    advice : str
        What to do where the file system has no locks.
    cancel : threading.Event, optional
        Ends the wait when set.

    Raises
    ------
    StoreError
        If the file system has no locks.
    OSError
        If the file cannot be made, or is a link.
    CancelledError
        If ``cancel`` is set while another holds the lock.
    """
    handle = _acquired(path, what, advice, cancel)
    try:
        yield
    finally:
        handle.release()


@contextlib.contextmanager
def attempted(path: Path, what: str, advice: str) -> Iterator[bool]:
    """Hold a lock if nobody else does, and say whether it is held; as :func:`held` otherwise."""
    handle = _attempt(_Handle(path), what, advice)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            handle.release()


def _acquired(path: Path, what: str, advice: str, cancel: threading.Event | None) -> _Handle:
    said = time.monotonic() - _AGAIN + _PATIENCE
    while True:
        handle = _Handle(path)
        note = handle.note()
        got = _attempt(handle, what, advice)
        if got is not None:
            return got
        if cancel is not None and cancel.is_set():
            raise CancelledError
        if time.monotonic() - said > _AGAIN:
            said = time.monotonic()
            _log.warning("waiting for %s: %s", what, note or "another process has the lock")
        time.sleep(_POLL)


def _attempt(handle: _Handle, what: str, advice: str) -> _Handle | None:
    """Return the handle if it has the lock now; close it otherwise."""
    try:
        fcntl.flock(handle.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if handle.is_current():
            handle.sign(what)
            return handle
    except BlockingIOError:
        pass
    except OSError as exc:
        handle.close()
        if exc.errno not in _UNSUPPORTED:
            raise
        raise StoreError(
            f"the file system of {handle.path.parent} has no file locks ({exc.strerror}), and without them processes "
            f"would get into each other's way: {advice}"
        ) from None
    except BaseException:
        handle.close()
        raise
    handle.close()
    return None


class _Handle:
    """An open lock file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK: opening a pipe that somebody put there must not wait.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with _gate:
            self.descriptor = os.open(path, flags, 0o600)
            _handles.add(self)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

    def is_current(self) -> bool:
        """Whether the path still names this file."""
        try:
            there, mine = os.lstat(self.path), os.fstat(self.descriptor)
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def sign(self, what: str) -> None:
        """Write down who holds the lock."""
        since = datetime.now(timezone.utc).isoformat(timespec="seconds")
        note = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "what": what}
        # A full disk must not cost the lock.
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, json.dumps(note).encode()[:_MAX_NOTE], 0)

    def note(self) -> str | None:
        """Say who holds the lock, if that was written down."""
        try:
            note = json.loads(os.pread(self.descriptor, _MAX_NOTE, 0))
            return f"process {note['pid']} on {note['host']} has had the lock since {note['since']}"
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def release(self) -> None:
        """Give the lock back and remove its file, unless this is a forked process, to which it does not belong."""
        if self not in _handles:
            return
        with contextlib.suppress(OSError):
            if self.is_current():
                self.path.unlink()
        with contextlib.suppress(OSError):
            # Closing alone would leave it to a process that was forked behind Python's back.
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        self.close()

    def close(self) -> None:
        with _gate:
            if self in _handles:
                _handles.remove(self)
                os.close(self.descriptor)


# A forked process has the descriptors as well, and with them the locks, for as long as it lives. It closes those that
# it knows of; so no process is forked between opening one and writing that down.
_gate = threading.RLock()
_handles: set[_Handle] = set()


def _in_child() -> None:
    global _gate
    _gate = threading.RLock()
    for handle in _handles:
        with contextlib.suppress(OSError):
            os.close(handle.descriptor)
    _handles.clear()


os.register_at_fork(before=lambda: _gate.acquire(), after_in_parent=lambda: _gate.release(), after_in_child=_in_child)
