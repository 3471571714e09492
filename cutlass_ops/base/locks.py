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

    After some seconds of waiting, the logger ``cutlass_ops`` warns who holds the lock.

    Parameters
    ----------
    path : Path
        The lock file, which exists while the lock is held. Its folder must exist.
    what : str
        What the lock protects, in words.
    advice : str
        What to do if the file system has no locks.
    cancel : threading.Event, optional
        Set it to stop waiting.

    Raises
    ------
    StoreError
        If the file system has no locks.
    OSError
        If the file cannot be created, or is a link.
    CancelledError
        If ``cancel`` is set while waiting.
    """
    handle = _acquired(path, what, advice, cancel)
    try:
        yield
    finally:
        handle.release()


@contextlib.contextmanager
def attempted(path: Path, what: str, advice: str) -> Iterator[bool]:
    """Hold a lock if it is free; yield whether it is held. Parameters and errors are those of :func:`held`."""
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
    """Lock the handle and return it; if that fails, close it and return None."""
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
            f"the file system of {handle.path.parent} has no file locks ({exc.strerror}), which concurrent processes "
            f"need: {advice}"
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
        # O_NONBLOCK: do not block if someone put a pipe there.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        with _gate:
            self.descriptor = os.open(path, flags, 0o600)
            _handles.add(self)
        if not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))

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
        except (OSError, ValueError, TypeError, KeyError):
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
        with _gate:
            if self in _handles:
                _handles.remove(self)
                os.close(self.descriptor)


# A forked process inherits the descriptors, and with them the locks. It closes all descriptors in _handles. Fork waits
# for _gate, so that it does not happen between opening a descriptor and adding it.
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
