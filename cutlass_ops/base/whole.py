"""Whole numbers of users: NumPy's are as good as Python's."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def plain(value: Any) -> Any:
    """Return NumPy's whole numbers as Python's. Anything else is returned as it is, for the caller to judge.

    Examples
    --------
    >>> import numpy
    >>> plain(numpy.int64(3)), plain(2.0), plain(True)
    (3, 2.0, True)
    """
    # Declarations become JSON and keys, which know no other type.
    if type(value) is not int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    return value


def plain_field(frozen: Any, name: str) -> Any:
    """Replace NumPy's whole number in a field of a frozen object that is being made, and return the field's value."""
    found = plain(getattr(frozen, name))
    object.__setattr__(frozen, name, found)
    return found
