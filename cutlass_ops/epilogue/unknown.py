"""What is said of a name that this library does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from opcode import opname

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


def unknown_name(module: str, name: str, known: Iterable[str]) -> Exception:
    """Return the error for a name that a module does not have; in an epilogue function it shows the line.

    Parameters
    ----------
    module : str
        The module's name.
    name : str
        What was asked for.
    known : iterable of str
        All public names.

    Returns
    -------
    AttributeError or ImportError
        The latter for ``from module import name``, where Python replaces an AttributeError by its own, shorter error.
    """
    problem = f"module {module!r} has no attribute {name!r}"
    # Python and its tools ask every module for names like these.
    if name.startswith("_"):
        return AttributeError(problem)
    advice = " ".join(part for part in (alike(name, known), _LISTS) if part)
    # A module that is being imported is found in sys.modules after an AttributeError.
    if _imports_from() and f"{module}.{name}" not in sys.modules:
        return ImportError(f"cannot import name {name!r} from {module!r}: {advice}", name=module)
    tracer = TRACER.get()
    problem = f"{problem}: {advice}"
    return AttributeError(problem) if tracer is None else UnknownNameError(str(tracer.error(problem)))


def _imports_from() -> bool:
    """Whether what asks a module for a name is ``from module import name``, and not ``hasattr`` or the like."""
    # From here up: unknown_name, the module's __getattr__, what asks.
    frame = sys._getframe(2).f_back if hasattr(sys, "_getframe") else None
    if frame is None:
        return False
    operations = (opname[code] for code in frame.f_code.co_code[frame.f_lasti :: 2])
    return next(name for name in operations if name != "EXTENDED_ARG") == "IMPORT_FROM"
