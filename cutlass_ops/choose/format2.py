"""Reading tuning tables of format 2, which users may have in their folders.

There, an order of tiles was a part of its configuration, and most fields were written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutlass_ops.base import checked_json
from cutlass_ops.base.errors import ConfigError

FIELDS = "format device multiprocessors signature fallback deterministic configs kernels points"

# The order of tiles that a configuration had by default.
_USUAL = {"raster": "heuristic", "swizzle": 1, "by_gpc": False}


def upgraded(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of format 2 as one of format 3, with every measurement.

    Raises
    ------
    ConfigError
        If it has no such fields, or refers to a configuration that it does not have. The reader of format 3 checks the
        rest.
    """
    fields = checked_json.mapping(data, "a tuning table", FIELDS)
    configs, orders = _Values(), _Values()
    places = []
    for given in checked_json.sequence(fields["configs"], "configs"):
        config, order = parted(given)
        places.append((configs.place(config), orders.place(order)))

    def of(value: object) -> tuple[int, int]:
        at = checked_json.integer(value, "a configuration's place", 0, 1 << 20)
        if at >= len(places):
            raise ConfigError(f"the table refers to configuration {at} of {len(places)}")
        return places[at]

    def point(given: object) -> dict[str, Any]:
        found = dict(checked_json.mapping(given, "a point", "problem date measured peers"))
        rows = (
            checked_json.sequence(row, "measured", 3) for row in checked_json.sequence(found["measured"], "measured")
        )
        return found | {"measured": [[*of(row[0]), *row[1:]] if row else [] for row in rows]}

    return {
        **fields,
        "format": 3,
        "kernels": list(dict.fromkeys(of(k)[0] for k in checked_json.sequence(fields["kernels"], "kernels"))),
        "points": [point(p) for p in checked_json.sequence(fields["points"], "points")],
        "configs": configs.all,
        "orders": orders.all,
    }


def parted(data: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a configuration that has an order of tiles without it, and the order.

    Raises
    ------
    ConfigError
        If it is no object.
    """
    config = checked_json.mapping(data, "a configuration", None)
    order = {name: config[name] for name in _USUAL if name in config and config[name] != _USUAL[name]}
    return {name: value for name, value in config.items() if name not in _USUAL}, order


class _Values:
    """Plain values, each once."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self._places: dict[bytes, int] = {}

    def place(self, value: dict[str, Any]) -> int:
        """Return the place of a value, which is added if it is new."""
        key = checked_json.canonical(value)
        if key not in self._places:
            self._places[key] = len(self.all)
            self.all.append(value)
        return self._places[key]
