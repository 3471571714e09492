"""Programs that this library starts: each with all that it starts in turn, and none of them outlives this process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Any

# A shell leads a process group. In it runs the program, and beside it a process that waits for the end of a pipe whose
# other end only this process has. However this process ends, by SIGKILL too, the pipe ends as well, and the group is
# killed. (PR_SET_PDEATHSIG goes with the thread that started a program, and reaches no compiler that nvcc starts.)
# $0 is the pipe's descriptor. In 3 and 4 are the program's streams: sh gives what runs beside it an empty input, and
# may say on its own standard error that a program was killed, which the program did not say. It keeps no output open
# that the program closes. Told to end, it waits for the program, so that nothing of that is left to an init which may
# not be there.
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

_PATIENCE = 0.5  # seconds, where this process ignores SIGTERM and the shell therefore does
_SHELLS = 10  # descriptors below are the shell's own

# The ends of pipes that keep programs alive, and whose they are. A fork of this process must not have them as well.
_held: dict[int, Program] = {}


def _let_go_of_all() -> None:
    while _held:
        os.close(_held.popitem()[0])


os.register_at_fork(after_in_child=_let_go_of_all)


class Program:
    """A program that runs, in a process group of its own.

    Parameters
    ----------
    command : sequence of str
        Path of the program, and its arguments.
    **options
        As for :class:`subprocess.Popen`: ``cwd``, ``env``, streams.

    Raises
    ------
    OSError
        If it cannot be started.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        # The shell would say so too, but only in its status.
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
                ("/bin/sh", "-c", _SUPERVISOR, str(end), *command), pass_fds=(end,), start_new_session=True, **options
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
        """How it ended: its exit status, or a signal's number below zero; None while it runs."""
        code = self._shell.poll()
        if code is None:
            return None
        self._let_go()
        # The shell says it as a number above 128.
        return 128 - code if code - 128 in signal.valid_signals() else code

    def end(self) -> bool:
        """End it and all that it started; say whether there was anything to end."""
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
        # Once it is closed its number may be another's.
        if _held.get(self._hold) is self:
            del _held[self._hold]
            os.close(self._hold)


def ask(command: Sequence[str], timeout: float, **options: Any) -> tuple[int, str]:
    """Run a program that answers at once; return its status and what it said.

    It has no process beside it that would end it with this one: that takes longer than the answer.

    Parameters
    ----------
    command, **options
        As for :class:`Program`.
    timeout : float
        Seconds after which it is ended, with all that it started.

    Raises
    ------
    OSError
        If it cannot be started.
    TimeoutError
        If it took too long.
    """
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
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
