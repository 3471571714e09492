"""Values of frozen declarations: whole numbers of users in their fields, and hashes that are computed once."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Where an object keeps its hash: whoever copies an object for another value leaves it out.
KEPT_HASH = "_hash"


def hashed_once(cls: type[T]) -> type[T]:
    """Cache the hash of each object of a frozen dataclass, which is otherwise computed from all its fields."""
    compute: Any = cls.__hash__

    def kept(self: Any) -> int:
        found: int | None = self.__dict__.get(KEPT_HASH)
        if found is None:
            found = self.__dict__[KEPT_HASH] = compute(self)
        return found

    def state(self: Any) -> dict[str, Any]:
        # Another process has other hashes.
        return {name: value for name, value in self.__dict__.items() if name != KEPT_HASH}

    cls.__hash__ = kept  # type: ignore[method-assign]
    cls.__getstate__ = state  # type: ignore[attr-defined]
    return cls


@dataclass(frozen=True, eq=False)
class Itself(Generic[T]):
    """An object as a key that equals no other object's, however alike: for values that take long to hash or compare."""

    value: T

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


# ---- Whole numbers of users: NumPy's are as good as Python's ---------------------------------------------------------


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
