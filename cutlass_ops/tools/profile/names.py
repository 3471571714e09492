"""Names of kernels as two profilers write them: which of the one is which of the other.

ncu and torch.profiler read C++ names by different demanglers, which leave out different namespaces and spell lambdas,
numbers and types that repeat differently.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable

# An identifier with its namespaces, or a number with its suffix.
_PART = re.compile(r"(?:\w+::)*(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)[ul]*")
_UNNAMED = re.compile(r"<unnamed>::|\(anonymous namespace\)::")
# How one of the two says what the other says by a sign, or not at all.
_SAID_OTHERWISE = {"instance", "void", "const", "unsigned", "long", "int", "templates"}


def shortened(name: str) -> str:
    """Return a kernel's name without its parameters: those of a function come last, and templates may have some too."""
    if not name.endswith(")"):
        return name
    depth = 0
    for place in range(len(name) - 1, -1, -1):
        depth += (name[place] == ")") - (name[place] == "(")
        if depth == 0:
            return name[:place].removeprefix("void ").strip() or name
    return name


def paired(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return which of the other names are the same kernels'.

    Parameters
    ----------
    names, others : iterable of str
        Kernels' names as two demanglers write them.

    Returns
    -------
    dict of str to str
        By name: the other name. Where it is not certain, nothing.
    """
    found: dict[str, str] = {}
    for key in (lambda name: name, _words, _function):
        left = [name for name in names if name not in found]
        free = [other for other in others if other not in found.values()]
        found |= _alone(left, free, key)
    return found


def _alone(names: list[str], others: list[str], key: Callable[[str], Hashable]) -> dict[str, str]:
    """Return the pairs whose key no second name has, on either side."""
    mine, theirs = (Counter(map(key, each)) for each in (names, others))
    once = {key(other): other for other in others if theirs[key(other)] == 1}
    return {name: once[key(name)] for name in names if mine[key(name)] == 1 and key(name) in once}


def _words(name: str) -> tuple[str, ...]:
    """Return a name's identifiers without namespaces and its numbers, in order."""
    parts = (match["name"] or match["number"] for match in _PART.finditer(_UNNAMED.sub("", name)))
    return tuple(part for part in parts if part not in _SAID_OTHERWISE)


def _function(name: str) -> str:
    """Return the name of the function itself, without namespaces and arguments of templates."""
    words = _words(_UNNAMED.sub("", name).partition("<")[0])
    return words[-1] if words else name
