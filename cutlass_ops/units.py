"""Sizes and durations as people write them."""

from __future__ import annotations

import math
import re

_BYTES = {
    "": 1, "B": 1,
    **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMGT", 1)},
    **{f"{prefix}IB": 1024**i for i, prefix in enumerate("KMGT", 1)},
}  # fmt: skip
_SECONDS = {"S": 1, "M": 60, "H": 3600, "D": 86400, "W": 7 * 86400}
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z]*)", re.ASCII)


def size(text: str) -> int:
    """Return the bytes that a text such as ``"2GB"``, ``"1.5 GiB"`` or ``"4096"`` names.

    Raises
    ------
    ValueError
        If it names none, or less than one byte.
    """
    found = _quantity(text, _BYTES)
    if not found >= 1:
        raise ValueError(f"{text!r} is no size: write one such as 2GB, 500MB or 1.5GiB")
    return int(found)


def duration(text: str) -> float:
    """Return the seconds that a text such as ``"30d"``, ``"12h"`` or ``"1.5w"`` names.

    Raises
    ------
    ValueError
        If it names none.
    """
    found = _quantity(text, _SECONDS)
    if math.isnan(found):
        raise ValueError(f"{text!r} is no duration: write one such as 30d, 12h, 90m or 2w")
    return found


def _quantity(text: str, units: dict[str, int]) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    unit = None if match is None else units.get(match[2].upper())
    return math.nan if match is None or unit is None else float(match[1]) * unit
