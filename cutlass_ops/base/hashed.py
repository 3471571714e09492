"""Frozen values that are looked up often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# Where an object keeps its hash: whoever copies an object for another value leaves it out.
KEPT_HASH = "_hash"


def hashed_once(cls: type[T]) -> type[T]:
    """Have each object of a frozen dataclass keep its hash, which is computed from all its fields otherwise."""
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
