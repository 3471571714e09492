"""What people see: progress as a bar on a terminal or as lines elsewhere, and tables. Without rich, both are text."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from cutlass_ops.base import env

_BAR = 30  # characters
_REFRESH = 4  # times a second


class Progress:
    """Count steps without showing them. ``what`` is the name of finished steps, such as ``"kernels compiled"``."""

    def __init__(self, total: int, what: str) -> None:
        self.total = total
        self._what = what
        self._began = time.monotonic()
        self._done = 0
        self._failed = 0

    def finished(self, step: str, *, failed: bool = False, keep: bool = False) -> None:
        """Count a step. With ``keep``, the description is a result, which must stay visible above a bar."""
        self._done += not failed
        self._failed += failed
        self._show(f"{step} failed" if failed else step, keep or failed)

    @property
    def ended(self) -> int:
        """Number of finished steps, successful or failed."""
        return self._done + self._failed

    def state(self) -> str:
        """Return the progress as text, with the estimated remaining time after the first step."""
        seconds = time.monotonic() - self._began
        failed = f", {self._failed} failed" if self._failed else ""
        left = self.total - self.ended
        ahead = f", about {seconds / self.ended * left:.0f} s left" if self.ended and left else ""
        return f"{self._done} of {self.total} {self._what}{failed}, {seconds:.0f} s{ahead}"

    def _show(self, step: str, keep: bool) -> None:
        pass


class _Lines(Progress):
    """Print a line per step."""

    def __init__(self, total: int, what: str, write: Callable[[str], None]) -> None:
        super().__init__(total, what)
        self._write = write

    def _show(self, step: str, keep: bool) -> None:
        self._write(f"{self.state()}: {step}")


class _Bar(Progress):
    """A bar that refreshes itself during the context. Results scroll above it."""

    def __init__(self, total: int, what: str, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(total, what)
        forgiving: Any = _Forgiving(stream)
        self._console = Console(file=forgiving, force_terminal=True, force_jupyter=False, highlight=False)
        # Do not redirect the caller's streams: other threads may be writing to them.
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
    """A stream that ignores write errors: a closed or full stream must not stop a build."""

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
    """Show progress during the context.

    ``what`` is the name of finished steps, such as ``"kernels compiled"``. ``show`` takes a line per step: by default,
    ``CUTLASS_OPS_PROGRESS`` decides, and progress goes to standard error. Raises ValueError if ``CUTLASS_OPS_PROGRESS``
    is none of 0, 1 and auto.
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


# ---- Tables ----------------------------------------------------------------------------------------------------------


_WIDEST = 160


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, styled: bool | None = None) -> list[str]:
    """Return a table's lines, the first column to the left; drawn by rich if `styled`, by default on a terminal."""
    if (sys.stdout.isatty() if styled is None else styled) and (drawn := _drawn(columns, rows)) is not None:
        return drawn
    every = [tuple(columns), *map(tuple, rows)]
    widths = [max(len(row[i]) for row in every) for i in range(len(columns))]
    lines = []
    for first, *others in every:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str] | None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return None
    drawn = Table(header_style="bold")
    for i, name in enumerate(columns):
        drawn.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
    out = io.StringIO()
    Console(file=out, width=_WIDEST, force_terminal=True).print(drawn)
    return out.getvalue().rstrip("\n").split("\n")
