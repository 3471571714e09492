"""What is said of a name that this library does not have."""

from __future__ import annotations

from collections.abc import Iterable

from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.epilogue.values import TRACER

_LISTS = "docs/epilogues.md lists the operations of epilogues, docs/usage.md everything else"


class UnknownNameError(EpilogueError, AttributeError):
    """An epilogue function uses a name that this library does not have."""


def alike(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6) -> str:
    """Return a question for the known names that a name is closest to, or an empty string if it is close to none."""
    import difflib

    spelled = {each.lower(): each for each in known}
    close = [spelled[each] for each in difflib.get_close_matches(name.lower(), spelled, count, cutoff)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def unknown_name(name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that the package does not have; in an epilogue function it shows the line.

    Parameters
    ----------
    name : str
        What was asked for.
    known : iterable of str
        All public names.
    """
    problem = f"module 'cutlass_ops' has no attribute {name!r}"
    # Python and its tools ask every module for names like these.
    if name.startswith("_"):
        return AttributeError(problem)
    problem = " ".join(part for part in (f"{problem}:", alike(name, known), _LISTS) if part)
    tracer = TRACER.get()
    return AttributeError(problem) if tracer is None else UnknownNameError(str(tracer.error(problem)))
