"""Read untrusted JSON and check its values."""

from __future__ import annotations

import hashlib
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
    """Parse untrusted JSON and return ``build(value)``. Raises ConfigError if it is invalid, or ``build`` raises it."""
    return read_value(parsed(text, what, most), what, build)


def parsed(text: bytes, what: str, most: int) -> Any:
    """Parse JSON in UTF-8 with unique keys, 64-bit integers and finite numbers. Raises ConfigError for other text."""
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

    If ``write`` gives :func:`canonical` JSON, such text breaks no rule of :func:`parsed`, unless an integer is too
    long. So it is parsed without functions in Python, in a third of the time. Raises ConfigError if it is another text,
    or ``build`` raises it.
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
    """Return ``build(value)``. Raises ConfigError if ``build`` does, or the value is nested too deeply."""
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
    """Return a value's canonical JSON: equal bytes for equal values. Raises TypeError or ValueError if it has none."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def sealed(fields: Mapping[str, Any]) -> bytes:
    """Return the canonical JSON of some fields and of their SHA-256, by which an accidental change is noticed."""
    # As canonical() of them all, whose largest value then is written once.
    parts = {name: canonical(value) for name, value in fields.items()}

    def whole() -> bytes:
        return b"{" + b",".join(b'"%s":%s' % (name.encode(), parts[name]) for name in sorted(parts)) + b"}"

    parts["sha256"] = canonical(hashlib.sha256(whole()).hexdigest())
    return whole()


def mapping(data: object, what: str, names: str | None) -> Mapping[str, Any]:
    """Return an object that has exactly the fields ``names``, or any if None. Raises ConfigError if it has others."""
    if not isinstance(data, dict):
        raise ConfigError(f"{what} must be an object, not {type(data).__name__}")
    if names is not None and set(data) != set(names.split()):
        raise ConfigError(f"{what} must have the fields {names}: {difference(data, names.split())}")
    return data


def difference(found: Iterable[object], wanted: Iterable[str]) -> str:
    """Say which fields an object lacks, and which it should not have. Its fields differ from the wanted ones."""
    wanted, given = set(wanted), set(map(str, found))
    missing = f"it lacks {', '.join(sorted(wanted - given))}" if wanted - given else ""
    unknown = f"it may not have {shown(', '.join(sorted(given - wanted)))}" if given - wanted else ""
    return " and ".join(filter(None, (missing, unknown)))


def sequence(data: object, what: str, most: int | None = None) -> list[Any]:
    """Return ``data`` if it is a list of at most ``most`` values; else raise ConfigError."""
    if not isinstance(data, list):
        raise ConfigError(f"{what} must be a list, not {type(data).__name__}")
    if most is not None and len(data) > most:
        raise ConfigError(f"{what} has {len(data)} values: at most {most} are allowed")
    return data


def text(data: object, what: str, most: int = 100, *, ascii_only: bool = True) -> str:
    """Return a printable string of 1 to ``most`` characters; ASCII if C++ reads it too. Raises ConfigError."""
    if not isinstance(data, str) or not data.isprintable() or not 0 < len(data) <= most:
        raise ConfigError(f"{what} must be a printable string of 1 to {most} characters, not {shown(data)}")
    if ascii_only and not data.isascii():
        raise ConfigError(f"{what} must be ASCII, not {shown(data)}")
    return data


def integer(data: object, what: str, low: int, high: int) -> int:
    """Return ``data`` if it is an integer from ``low`` to ``high``; else raise ConfigError."""
    if type(data) is not int or not low <= data <= high:
        raise ConfigError(f"{what} must be an integer from {low} to {high}, not {shown(data)}")
    return data


def number(data: object, what: str, low: float, high: float) -> float:
    """Return ``data`` as a float if it is a number from ``low`` to ``high``; else raise ConfigError."""
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
