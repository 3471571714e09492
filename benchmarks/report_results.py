"""Results of bench_gemm.py, read for the report: their rows, summaries and losses."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

UNKNOWN = "cause unknown"

Row = dict[str, Any]
Extents = tuple[int, int, int]

_DEFAULTS = {"set": "grid", "layout": "row-col"}
_EXACT = ("result", "set", "op", "dtype", "layout", "m", "n", "k", "kernel")


class Line(NamedTuple):
    """A line of README.md's table: its title, its file of results, and the majors of A and B."""

    title: str
    result: str
    layout: str = "row-col"


class Case(NamedTuple):
    """The common properties of a table's rows."""

    set: str
    op: str
    dtype: str
    layout: str

    def __str__(self) -> str:
        return f"{self.op}, {self.dtype}, {self.layout}, {self.set}"


class Result(NamedTuple):
    """One file of GEMM results: its path, its top level without the rows, and the rows with all fields."""

    path: Path
    head: dict[str, Any]
    rows: list[Row]

    @property
    def name(self) -> str:
        """The file's name without its ending, as causes.toml and the plots use it."""
        return self.path.stem

    def cases(self) -> dict[Case, list[Row]]:
        """Return the rows of each case, in the file's order."""
        found: dict[Case, list[Row]] = {}
        for row in self.rows:
            found.setdefault(case(row), []).append(row)
        return found


def read(path: Path) -> Result:
    """Read a file of GEMM results and complete its rows.

    Raises
    ------
    SystemExit
        If a case has a shape twice, since a matrix would hide one of them.
    """
    data = json.loads(path.read_text())
    rows = [{**_DEFAULTS, **row} for row in data.pop("rows")]
    seen = set()
    for row in rows:
        if (key := (case(row), problem(row))) in seen:
            raise SystemExit(f"{path} has {key[0]}, {shape(row)} twice")
        seen.add(key)
    return Result(path, data, rows)


def read_causes(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of causes.toml, under "about" and "cause".

    Raises
    ------
    SystemExit
        If a key is unknown, since a misspelt condition would match too much.
    """
    entries = {"about": [], "cause": [], **tomllib.loads(path.read_text())}
    keys = {"about": {"result", "geomean", "text"}, "cause": {*_EXACT, "ratio", "text"}}
    for kind, members in entries.items():
        for entry in members:
            if unknown := set(entry) - keys.get(kind, set()):
                raise SystemExit(f"{path}: unknown {', '.join(sorted(unknown))} in [[{kind}]]")
    return entries


def case(row: Row) -> Case:
    """Return the case that a row belongs to."""
    return Case(row["set"], row["op"], row["dtype"], row["layout"])


def problem(row: Row) -> Extents:
    """Return M, N and K."""
    return row["m"], row["n"], row["k"]


def shape(row: Row) -> str:
    """Return M, N and K as text."""
    return "×".join(map(str, problem(row)))


def ratios(rows: Iterable[Row]) -> list[float]:
    """Return the rows' ratios."""
    return [row["ratio_to_best_peer"] for row in rows]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the number of shapes, geometric mean, worst row, and how many ratios are at least 1 and 0.99."""
    each = ratios(rows)
    return {
        "shapes": len(rows),
        "geomean": statistics.geometric_mean(each),
        "worst": min(rows, key=lambda row: row["ratio_to_best_peer"]),
        "from_1": sum(ratio >= 1 for ratio in each),
        "from_0.99": sum(ratio >= 0.99 for ratio in each),
    }


def free(rows: Sequence[Row]) -> float | None:
    """Return the geometric mean, had ours taken no longer than our GEMM alone; None if that was not measured."""
    if any("plain_over_ours" not in row for row in rows):
        return None
    return statistics.geometric_mean(row["ratio_to_best_peer"] / min(1.0, row["plain_over_ours"]) for row in rows)


def losses(rows: Iterable[Row]) -> list[Row]:
    """Return the rows with a ratio below 1, worst first."""
    return sorted((row for row in rows if row["ratio_to_best_peer"] < 1), key=lambda row: row["ratio_to_best_peer"])


def matches(entry: dict[str, Any], name: str, row: Row) -> bool:
    """Whether a cause's conditions hold for a row of the result of this name."""
    facts = {**row, "result": name}
    low, high = entry.get("ratio", (0.0, 1.0))
    return low <= row["ratio_to_best_peer"] <= high and all(facts[key] == entry[key] for key in _EXACT if key in entry)


def cause(entries: Sequence[dict[str, Any]], name: str, row: Row) -> str:
    """Return the text of the first cause that matches a loss, or that there is none."""
    return next((entry["text"].strip() for entry in entries if matches(entry, name, row)), UNKNOWN)


def about(entries: Sequence[dict[str, Any]], result: Result) -> str | None:
    """Return causes.toml's text on a result's circumstances, if there is one."""
    geomean = round(statistics.geometric_mean(ratios(result.rows)), 3)
    texts = [e["text"].strip() for e in entries if e["result"] == result.name and e["geomean"] == geomean]
    return texts[0] if texts else None


def weights(rows: Iterable[Row]) -> list[tuple[int, int]]:
    """Return each (N, K) once, in order."""
    return list(dict.fromkeys((row["n"], row["k"]) for row in rows))
