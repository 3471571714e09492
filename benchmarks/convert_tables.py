"""Carries measurements over from tables of format 2, where the order of tiles was a part of a configuration.

    python benchmarks/convert_tables.py    # tables that ship, and the tuner's pool

Files of format 3 stay as they are. Each table is compared with what it was: no number may change, and none be lost.
Users' own tables need no script: they are read as they are (`cutlass_ops/choose/format2.py`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cutlass_ops.base import resources
from cutlass_ops.choose import format2, tables
from cutlass_ops.declare.config import config_from_json, config_to_json

POOL = Path(__file__).with_name("pool_h100.json")


def table(path: Path) -> int:
    """Rewrite a table; return how many measurements it has."""
    before = json.loads(path.read_text())
    if before["format"] != 2:
        return 0
    found = tables.load(path)
    if (
        _numbers(before, 2) != _numbers(found.to_json(), 3)
        or tables.path_of(path.parent, found.device, found.signature) != path
    ):
        raise SystemExit(f"{path} would change")
    path.write_text(json.dumps(found.to_json(), separators=(",", ":")) + "\n")
    return sum(len(point.measured) for point in found.points)


def _numbers(data: dict[str, Any], format: int) -> list[Any]:
    """Return every number of a table's points, and its date and peers."""
    first = format - 1
    points = sorted(data["points"], key=lambda point: point["problem"])
    return [(p["problem"], p["date"], p["peers"], [row[first:] for row in p["measured"]]) for p in points]


def main() -> None:
    """Convert all files."""
    paths = sorted(resources.tuned().glob("*.json"))
    print(f"{sum(map(table, paths))} measurements carried over, in {len(paths)} tables")
    configs = [config_from_json(format2.parted(c)[0]) for c in json.loads(POOL.read_text())]
    POOL.write_text(json.dumps([config_to_json(c) for c in configs]) + "\n")


if __name__ == "__main__":
    main()
