"""How far something long is: a bar on a terminal, a line for each step elsewhere, or nothing.

Only this module imports rich. Where that is not installed, a terminal gets lines as well.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from cutlass_ops.base import env

_BAR = 30  # characters
_REFRESH = 4  # times a second


class Progress:
    """Steps that are counted and not shown.

    Parameters
    ----------
    total : int
        How many steps there are.
    what : str
        What a finished one is, such as ``"kernels compiled"``.
    """

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self._what = what
        self._began = time.monotonic()
        self._done = 0
        self._failed = 0

    def finished(self, step: str, *, failed: bool = False, keep: bool = False) -> None:
        """Count a step.

        Parameters
        ----------
        step : str
            What was finished, in words.
        failed : bool
            Whether it failed.
        keep : bool
            Whether its words are a result, which a bar must not swallow.
        """
        self._done += not failed
        self._failed += failed
        self._show(f"{step} failed" if failed else step, keep or failed)

    @property
    def ended(self) -> int:
        """Steps that are over, well or not."""
        return self._done + self._failed

    def state(self) -> str:
        """Say how far it is and, once there is a pace, how long the rest will take."""
        seconds = time.monotonic() - self._began
        failed = f", {self._failed} failed" if self._failed else ""
        left = self.total - self.ended
        ahead = f", about {seconds / self.ended * left:.0f} s left" if self.ended and left else ""
        return f"{self._done} of {self.total} {self._what}{failed}, {seconds:.0f} s{ahead}"

    def _show(self, step: str, keep: bool) -> None:
        pass


class _Lines(Progress):
    """A line for each step."""

    def __init__(self, total: int, what: str, write: Callable[[str], None]) -> None:
        super().__init__(total, what)
        self._write = write

    def _show(self, step: str, keep: bool) -> None:
        self._write(f"{self.state()}: {step}")


class _Bar(Progress):
    """A bar that moves by itself while the context lasts; results scroll by above it."""

    def __init__(self, total: int, what: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(total, what)
        forgiving: Any = _Forgiving(stream)
        self._console = Console(file=forgiving, force_terminal=True, force_jupyter=False, highlight=False)
        # The caller's streams stay as they are: other threads may be writing to them.
        self._live = Live(
            get_renderable=self._rendered,
            console=self._console,
            refresh_per_second=_REFRESH,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> _Bar:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _show(self, step: str, keep: bool) -> None:
        if keep:
            self._console.print(step, markup=False, soft_wrap=True)

    def _rendered(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        row = Table.grid(padding=(0, 1))
        text = Text(self.state(), no_wrap=True, overflow="ellipsis")
        row.add_row(ProgressBar(self.total, self.ended, width=_BAR), text)
        return row


class _Forgiving:
    """A stream whose failures are nobody's: a closed or full one must not cost a kernel."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()


@contextlib.contextmanager
def progress(total: int, what: str, show: Callable[[str], None] | None = None) -> Iterator[Progress]:
    """Show how far something is, for as long as the context lasts.

    Parameters
    ----------
    total : int
        How many steps there are; without any, nothing is shown.
    what : str
        What a finished one is, such as ``"kernels compiled"``.
    show : callable, optional
        Takes a line for each step; by default they go to standard error, as a bar if that is a terminal, and
        ``CUTLASS_OPS_PROGRESS`` decides.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_PROGRESS`` is none of 0, 1 and auto.
    """
    if show is not None:
        yield _Lines(total, what, show)
        return
    wanted = env.progress()
    if wanted is False or not total:
        yield Progress(total, what)
    elif (wanted or _is_terminal(sys.stderr)) and _has_rich():
        with _Bar(total, what, sys.stderr) as bar:
            yield bar
    else:
        yield _Lines(total, what, _to_stderr)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # it is closed
        return False


def _has_rich() -> bool:
    try:
        import rich.live
    except ImportError:
        return False
    return rich.live is not None


def _to_stderr(line: str) -> None:
    forgiving = _Forgiving(sys.stderr)
    forgiving.write(f"cutlass_ops: {line}\n")
    forgiving.flush()
