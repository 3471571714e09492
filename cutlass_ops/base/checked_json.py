"""Plain values that came from outside, such as parsed JSON, checked where they are read."""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from cutlass_ops.base.errors import ConfigError

T = TypeVar("T")

# More characters than any number needs that is one of 64 bits.
_MAX_DIGITS = 50
_MAX_MESSAGE = 1000


def read(text: bytes, what: str, most: int, build: Callable[[Any], T]) -> T:
    """Return what a function makes of the value of a JSON text from outside, as :func:`parsed` reads it.

    Raises
    ------
    ConfigError
        If it is none, or the function says so.
    """
    try:
        return build(parsed(text, what, most))
    except RecursionError:  # parsed by a hair, and shown or written again by less
        raise ConfigError(f"{what} is nested too deeply") from None


def parsed(text: bytes, what: str, most: int) -> Any:
    """Return the value of a JSON text from outside, of at most so many bytes.

    It is UTF-8, no name stands twice in an object, integers have 64 bits with a sign, and other numbers are finite.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if len(text) > most:
        raise ConfigError(f"{what} has more than {most} bytes, which none has")
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise ConfigError(f"{what} is not JSON that is read here: it is nested too deeply") from None
    except ValueError as exc:
        raise ConfigError(f"{what} is not JSON that is read here: {said(exc)}") from None


def said(error: Exception) -> str:
    """Return an error's message as :func:`printable` does."""
    return printable(str(error))


def printable(text: str) -> str:
    """Return a text as one that can be printed, and is not too long, whatever from outside stands in it."""
    short = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def shown(value: object) -> str:
    """Return a short text that shows a value, whatever it is."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer of more digits than Python writes
        return f"a value of type {type(value).__name__} that is too long to be shown"


def canonical(value: object) -> bytes:
    """Return the one JSON text of a value: equal values give equal bytes.

    Raises
    ------
    TypeError, ValueError
        If it has no JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def mapping(data: object, what: str, names: str | None) -> Mapping[str, Any]:
    """Return an object that has just these fields, given as words of one text; None allows any.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{what} is an object, not {type(data).__name__}")
    if names is not None and set(data) != set(names.split()):
        raise ConfigError(f"{what} has the fields {names}, not {shown(' '.join(sorted(map(str, data))))}")
    return data


def sequence(data: object, what: str, most: int | None = None) -> list[Any]:
    """Return a list of at most so many values.

    Raises
    ------
    ConfigError
        If it is none, or longer.
    """
    if not isinstance(data, list):
        raise ConfigError(f"{what} is a list, not {type(data).__name__}")
    if most is not None and len(data) > most:
        raise ConfigError(f"{what} has {len(data)} values: at most {most} are allowed")
    return data


def text(data: object, what: str, most: int = 100, *, ascii_only: bool = True) -> str:
    """Return a printable text of at most so many characters, of ASCII alone where C++ reads it as well.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if not isinstance(data, str) or not data.isprintable() or not 0 < len(data) <= most:
        raise ConfigError(f"{what} is {shown(data)}: a short printable text is needed")
    if ascii_only and not data.isascii():
        raise ConfigError(f"{what} is {shown(data)}: a text of ASCII is needed")
    return data


def integer(data: object, what: str, low: int, high: int) -> int:
    """Return an integer within bounds.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if type(data) is not int or not low <= data <= high:
        raise ConfigError(f"{what} holds {shown(data)}: an integer from {low} to {high} is needed")
    return data


def number(data: object, what: str, low: float, high: float) -> float:
    """Return a number within bounds.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if type(data) not in (int, float) or not isinstance(data, int | float) or not low <= data <= high:
        raise ConfigError(f"{what} holds {shown(data)}: a number from {low:g} to {high:g} is needed")
    return float(data)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{shown(twice)} stands twice in an object")
    return found


def _integer(text: str) -> int:
    # Python itself refuses thousands of digits, with advice that is none here.
    value = int(text) if len(text) <= _MAX_DIGITS else None
    if value is None or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{shown(text)} is not an integer of 64 bits")
    return value


def _number(text: str) -> float:
    value = float(text) if len(text) <= _MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is too large a number, or too long")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
