"""Read untrusted JSON and check its values."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from cutlass_ops.base.errors import ConfigError

T = TypeVar("T")

# No 64-bit number needs more characters.
_MAX_DIGITS = 50
_MAX_MESSAGE = 1000
# It may not fit into 64 bits. In a string it does no harm.
_LONG_INTEGER = re.compile(rb"[\[:,]-?[0-9]{19}")


def read(text: bytes, what: str, most: int, build: Callable[[Any], T]) -> T:
    """Parse untrusted JSON with :func:`parsed` and return ``build(value)``.

    Raises
    ------
    ConfigError
        If the text is not valid, or ``build`` raises it.
    """
    return read_value(parsed(text, what, most), what, build)


def parsed(text: bytes, what: str, most: int) -> Any:
    """Parse untrusted JSON of at most ``most`` bytes.

    The text must be UTF-8. Object keys must be unique, integers must fit into 64 signed bits, and other numbers must be
    finite.

    Raises
    ------
    ConfigError
        If the text breaks one of these rules.
    """
    if len(text) > most:
        raise ConfigError(f"{what} has more than {most} bytes, the limit")
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_number,
            parse_constant=_no_constant,
        )
    except RecursionError:
        raise ConfigError(f"{what} is not valid JSON: it is nested too deeply") from None
    except ValueError as exc:
        raise ConfigError(f"{what} is not valid JSON: {said(exc)}") from None


def written(text: bytes, what: str, most: int, write: Callable[[Any], bytes], build: Callable[[Any], T]) -> T:
    """Read untrusted JSON that must be what ``write(value)`` gives for its value, and return ``build(value)``.

    As long as ``write`` gives :func:`canonical` JSON, such text breaks no rule of :func:`parsed`, unless an integer is
    too long. So it is parsed without functions in Python, in a third of the time.

    Raises
    ------
    ConfigError
        If it is another text, or ``build`` raises it.
    """
    try:
        is_plain = len(text) <= most and not _LONG_INTEGER.search(text)
        value = json.loads(text) if is_plain else None
        is_own = is_plain and write(value) == text
    except (AttributeError, RecursionError, TypeError, ValueError):
        is_own = False
    if is_own:
        return read_value(value, what, build)
    # Either something is wrong, and the checks below say what; or an integer is long.
    value = parsed(text, what, most)
    found = read_value(value, what, build)
    if write(value) != text:
        raise ConfigError("its text is not the canonical one of what it says, or was changed")
    return found


def read_value(value: Any, what: str, build: Callable[[Any], T]) -> T:
    """Return ``build(value)`` of a value that was parsed.

    Raises
    ------
    ConfigError
        If ``build`` raises it, or the value is nested too deeply.
    """
    try:
        return build(value)
    except RecursionError:  # a value that was just shallow enough to parse may be too deep to print or write
        raise ConfigError(f"{what} is nested too deeply") from None


def said(error: Exception) -> str:
    """Return an error's message, made :func:`printable`."""
    return printable(str(error))


def printable(text: str) -> str:
    """Escape the unprintable characters of an untrusted text, and shorten it."""
    short = text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]}..."
    return short if short.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in short)


def shown(value: object) -> str:
    """Return a short repr of any value."""
    try:
        return reprlib.repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"a value of type {type(value).__name__} that is too long to show"


def canonical(value: object) -> bytes:
    """Return the canonical JSON of a value: equal values give equal bytes.

    Raises
    ------
    TypeError, ValueError
        If JSON cannot hold the value.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def mapping(data: object, what: str, names: str | None) -> Mapping[str, Any]:
    """Return ``data`` if it is an object with exactly these fields.

    Parameters
    ----------
    data : object
        The parsed value.
    what : str
        Its name, for messages.
    names : str or None
        Names of the fields, separated by spaces. None allows any.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be an object, not {type(data).__name__}")
    if names is not None and set(data) != set(names.split()):
        raise ConfigError(f"{what} must have the fields {names}: {difference(data, names.split())}")
    return data


def difference(found: Iterable[object], wanted: Iterable[str]) -> str:
    """Say which fields an object lacks, and which it should not have. They differ from those that are wanted."""
    wanted, given = set(wanted), set(map(str, found))
    missing = f"it lacks {', '.join(sorted(wanted - given))}" if wanted - given else ""
    unknown = f"it may not have {shown(', '.join(sorted(given - wanted)))}" if given - wanted else ""
    return " and ".join(filter(None, (missing, unknown)))


def sequence(data: object, what: str, most: int | None = None) -> list[Any]:
    """Return ``data`` if it is a list of at most ``most`` values.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if not isinstance(data, list):
        raise ConfigError(f"{what} must be a list, not {type(data).__name__}")
    if most is not None and len(data) > most:
        raise ConfigError(f"{what} has {len(data)} values: at most {most} are allowed")
    return data


def text(data: object, what: str, most: int = 100, *, ascii_only: bool = True) -> str:
    """Return ``data`` if it is a printable string of 1 to ``most`` characters. Strings that C++ also reads are ASCII.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if not isinstance(data, str) or not data.isprintable() or not 0 < len(data) <= most:
        raise ConfigError(f"{what} must be a printable string of 1 to {most} characters, not {shown(data)}")
    if ascii_only and not data.isascii():
        raise ConfigError(f"{what} must be ASCII, not {shown(data)}")
    return data


def integer(data: object, what: str, low: int, high: int) -> int:
    """Return ``data`` if it is an integer from ``low`` to ``high``.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if type(data) is not int or not low <= data <= high:
        raise ConfigError(f"{what} must be an integer from {low} to {high}, not {shown(data)}")
    return data


def number(data: object, what: str, low: float, high: float) -> float:
    """Return ``data`` as a float if it is a number from ``low`` to ``high``.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if type(data) not in (int, float) or not isinstance(data, int | float) or not low <= data <= high:
        raise ConfigError(f"{what} must be a number from {low:g} to {high:g}, not {shown(data)}")
    return float(data)


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"an object has the key {shown(twice)} twice")
    return found


def _integer(text: str) -> int:
    # Python refuses thousands of digits with advice that does not apply here.
    value = int(text) if len(text) <= _MAX_DIGITS else None
    if value is None or not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{shown(text)} is not a 64-bit integer")
    return value


def _number(text: str) -> float:
    value = float(text) if len(text) <= _MAX_DIGITS else math.inf
    if not math.isfinite(value):
        raise ValueError(f"the number {shown(text)} is too large or too long")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
