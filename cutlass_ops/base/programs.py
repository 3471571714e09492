"""Start programs so that neither they nor their children outlive this process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Any

# A shell leads a process group with two processes: the program, and a watcher that reads from a pipe. Only this process
# has the pipe's other end. However this process ends, even by SIGKILL, the pipe closes and the watcher kills the group.
# (PR_SET_PDEATHSIG depends on the thread that started the program, and does not reach the compilers that nvcc starts.)
# $0 is the pipe's descriptor. Descriptors 3 and 4 are the program's stdin and stderr: sh gives background jobs an empty
# stdin, and may print "Killed" on its own stderr, which must not look like the program's. The shell closes its stdout,
# so that the program can close the last copy. On SIGTERM it waits for the program: there may be no init to reap it.
_SUPERVISOR = """
exec 3<&0 4>&2 2>/dev/null
{ read -r _ <"/proc/self/fd/$0"; kill -KILL 0; } <&- >/dev/null 3<&- 4>&- &
watch=$!
trap 'kill -KILL $!; wait $!; kill -KILL 0' TERM
"$@" <&3 2>&4 3<&- 4>&- &
exec >/dev/null
wait $!
status=$?
kill -KILL $watch
wait $watch
exit $status
"""

PIPE = subprocess.PIPE
_PATIENCE = 0.5  # seconds until SIGKILL; the shell ignores SIGTERM if this process does
_SHOWN = 12  # lines
_SHELLS = 10  # the shell uses descriptors below this

# The pipe ends that keep programs alive, and their programs. A fork of this process must close its copies.
_held: dict[int, Program] = {}


def _let_go_of_all() -> None:
    while _held:
        os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_let_go_of_all)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _waiting() -> dict[str, Any]:
    """Return options of Popen with which a shell can wait for its children.

    A program inherits the signals that its starter blocks. A shell that SIGCHLD does not reach would wait forever.
    Others block it to take it by sigwait or signalfd, so that it must stay blocked in this process.
    """
    blocked = signal.SIGCHLD in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return {"preexec_fn": _unblock} if blocked else {}


class Program:
    """A running program in its own process group. Options are those of Popen. Raises OSError if it does not start."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        # The shell would report these errors only as an exit status.
        if not os.path.isfile(command[0]):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        if not os.access(command[0], os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), command[0])
        reader, self._hold = os.pipe()
        _held[self._hold] = self
        end = fcntl.fcntl(reader, fcntl.F_DUPFD_CLOEXEC, _SHELLS)
        os.close(reader)
        try:
            self._shell: subprocess.Popen[Any] = subprocess.Popen(
                ("/bin/sh", "-c", _SUPERVISOR, str(end), *command),
                pass_fds=(end,),
                start_new_session=True,
                **_waiting(),
                **options,
            )
        except BaseException:
            self._let_go()
            raise
        finally:
            os.close(end)

    @property
    def stdin(self) -> IO[Any] | None:
        """The program's standard input, if that is a pipe."""
        return self._shell.stdin

    @property
    def stdout(self) -> IO[Any] | None:
        """The program's standard output, if that is a pipe."""
        return self._shell.stdout

    @property
    def status(self) -> int | None:
        """The exit status, the negative number of the signal that ended it, or None while it runs."""
        code = self._shell.poll()
        if code is None:
            return None
        self._let_go()
        # The shell reports a signal as 128 + its number.
        return 128 - code if code - 128 in signal.valid_signals() else code

    def end(self) -> bool:
        """End the program and its children. Return whether it was still running."""
        if self.status is not None:
            return False
        try:
            self._shell.terminate()
            self._shell.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self._shell.poll() is None:
                os.killpg(self._shell.pid, signal.SIGKILL)
                self._shell.wait()
            self._let_go()
        return True

    def _let_go(self) -> None:
        # Once closed, the number may belong to another file.
        if _held.get(self._hold) is self:
            del _held[self._hold]
            os.close(self._hold)


def ask(command: Sequence[str], timeout: float, **options: Any) -> tuple[int, str]:
    """Run a short program; return its exit status and output. Raises OSError, or TimeoutError if it takes too long."""
    # Without a watcher as Program has: starting one takes longer than the program.
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        **_waiting(),
        **options,
    )
    try:
        said, _ = program.communicate(timeout=timeout)
    except BaseException as exc:
        os.killpg(program.pid, signal.SIGKILL)
        program.communicate()
        if isinstance(exc, subprocess.TimeoutExpired):
            raise TimeoutError(f"it did not end within {timeout:.0f} s") from None
        raise
    return program.returncode, said.decode(errors="replace")


def last_lines(said: str) -> str:
    """Return the last lines of an output, which say why a program failed."""
    return "\n".join([line for line in said.splitlines() if line.strip()][-_SHOWN:])
