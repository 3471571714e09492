"""What is said of a name that this library does not have."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from opcode import opname

from cutlass_ops.base.errors import EpilogueError
from cutlass_ops.epilogue import otherwise
from cutlass_ops.epilogue.values import TRACER

_LISTS = "docs/epilogues.md lists the operations of epilogues, docs/usage.md everything else"


class UnknownNameError(EpilogueError, AttributeError):
    """An epilogue function uses a name that this library does not have."""


def alike(name: str, known: Iterable[str], count: int = 3, cutoff: float = 0.6) -> str:
    """Return a question that names the closest known names, or an empty string if none is close."""
    import difflib

    spelled = {each.lower(): each for each in known}
    close = [spelled[each] for each in difflib.get_close_matches(name.lower(), spelled, count, cutoff)]
    return f"did you mean {' or '.join(close)}?" if close else ""


def unknown_name(module: str, name: str, known: Iterable[str]) -> Exception:
    """Return the error for a name that a module does not have; in an epilogue function it shows the line.

    It is an ImportError for ``from module import name``, where Python replaces an AttributeError by its own, shorter
    error; else it is an AttributeError.
    """
    problem = f"module {module!r} has no attribute {name!r}"
    # Python and its tools ask every module for names like these.
    if name.startswith("_"):
        return AttributeError(problem)
    advice = " ".join(part for part in (_meant(name, known), _LISTS) if part)
    # A module that is being imported is found in sys.modules after an AttributeError.
    if _imports_from() and f"{module}.{name}" not in sys.modules:
        return ImportError(f"cannot import name {name!r} from {module!r}: {advice}", name=module)
    tracer = TRACER.get()
    problem = f"{problem}: {advice}"
    return AttributeError(problem) if tracer is None else UnknownNameError(str(tracer.error(problem)))


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the meaning of another library's name, and the known names that begin with it or are close."""
    elsewhere = [each for each in known if each.endswith(f".{name}")]
    if elsewhere:
        return f"it is {' or '.join(elsewhere)}."
    hint = otherwise.hint(name)
    if not hint:
        return alike(name, known)
    longer = [each for each in known if each.lower().startswith(name.lower()) and each != name]
    meant = f"did you mean {' or '.join(longer)}?" if longer else ""
    return meant if hint == meant else " ".join(filter(None, (hint if hint.endswith("?") else f"{hint}.", meant)))


def _imports_from() -> bool:
    """Whether ``from module import name`` asks a module for a name, not ``hasattr`` or the like."""
    # From here up: unknown_name, the module's __getattr__, what asks.
    frame = sys._getframe(2).f_back if hasattr(sys, "_getframe") else None
    if frame is None:
        return False
    operations = (opname[code] for code in frame.f_code.co_code[frame.f_lasti :: 2])
    return next(name for name in operations if name != "EXTENDED_ARG") == "IMPORT_FROM"
