"""Parse sizes and durations such as ``2GB`` and ``30d``, and print numbers of things."""

from __future__ import annotations

import math
import re

_BYTES = {
    "": 1, "B": 1,
    **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)},
}  # fmt: skip
_SECONDS = {"S": 1, "M": 60, "H": 3600, "D": 86400, "W": 7 * 86400}
# Compiled when it is first needed, as re does with texts.
_QUANTITY = r"([0-9]{1,15}(?:\.[0-9]{1,15})?) ?([A-Za-z]*)"


def counted(number: int, one: str, several: str | None = None) -> str:
    """Return a number of things, such as ``"1 kernel"`` and ``"2 kernels"``. By default, the plural ends in s."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def size(text: str, name: str) -> int:
    """Parse a size such as ``"2GB"``, ``"1.5 GiB"`` or ``"4096"`` into bytes. Raises ValueError if it is none."""
    found = _quantity(text, _BYTES)
    if not found >= 1:
        raise ValueError(f"{name} is {text!r}: a size such as 2GB, 500MB or 1.5GiB is needed")
    return int(found)


def duration(text: str, name: str) -> float:
    """Parse a duration such as ``"30d"``, ``"12h"`` or ``"1.5w"`` into seconds. Raises ValueError if it is none."""
    found = _quantity(text, _SECONDS)
    if math.isnan(found):
        raise ValueError(f"{name} is {text!r}: a time such as 30d, 12h, 90m or 2w is needed")
    return found


def _quantity(text: str, units: dict[str, int]) -> float:
    match = re.fullmatch(_QUANTITY, text.strip())
    unit = None if match is None else units.get(match[2].upper())
    return math.nan if match is None or unit is None else float(match[1]) * unit
