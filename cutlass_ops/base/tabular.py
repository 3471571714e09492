"""Tables for people: aligned text, and on a terminal with rich, with colours and rules."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

_WIDEST = 160


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, styled: bool | None = None) -> list[str]:
    """Return a table's lines: the first column to the left, the others to the right.

    Parameters
    ----------
    columns : sequence of str
        Names of the columns.
    rows : sequence of sequence of str
        The cells.
    styled : bool, optional
        Whether rich draws it, if it is installed. Default: on a terminal.
    """
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
