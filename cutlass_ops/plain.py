"""Plain values that came from outside, such as parsed JSON, checked where they are read."""

from __future__ import annotations

import json
import reprlib
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

from cutlass_ops.errors import ConfigError


def parsed(text: bytes, what: str) -> Any:
    """Return the value of a JSON text.

    Raises
    ------
    ConfigError
        If it is none, or has numbers that are not.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{what} is no JSON: {exc}") from None


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
        raise ConfigError(f"{what} has the fields {names}, not {reprlib.repr(' '.join(sorted(map(str, data))))}")
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


def text(data: object, what: str, most: int = 100) -> str:
    """Return a text that can be printed, of at most so many characters.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if not isinstance(data, str) or not data.isprintable() or not 0 < len(data) <= most:
        raise ConfigError(f"{what} is {reprlib.repr(data)}: a short printable text is needed")
    return data


def integer(data: object, what: str, low: int, high: int) -> int:
    """Return an integer within bounds.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if type(data) is not int or not low <= data <= high:
        raise ConfigError(f"{what} holds {reprlib.repr(data)}: an integer from {low} to {high} is needed")
    return data


def positive(data: object, what: str, most: float = sys.float_info.max) -> float:
    """Return a finite number above 0, of at most so much.

    Raises
    ------
    ConfigError
        If it is none.
    """
    if type(data) not in (int, float) or not isinstance(data, int | float) or not 0 < data <= most:
        raise ConfigError(f"{what} holds {reprlib.repr(data)}: a finite number above 0 is needed")
    return float(data)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
