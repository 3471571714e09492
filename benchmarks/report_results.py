"""Results of benchmarks in one form: for each measured shape, our time and that of the fastest other implementation."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

UNKNOWN = "cause unknown"

Row = dict[str, Any]


class Part(NamedTuple):
    """Results that are told in the same way.

    Attributes
    ----------
    group : str
        The heading under which they stand.
    files : str
        Pattern of their names in benchmarks/results, without the ending.
    title : str
        How a case begins.
    fields : tuple of str
        The fields of a row that make a case.
    peers : tuple of str
        The other implementations, where a row has more than these.
    where : tuple or None
        A field and its value in the rows that count.
    """

    group: str
    files: str
    title: str = ""
    fields: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    where: tuple[str, Any] | None = None


class Shape(NamedTuple):
    """One measured shape: times in microseconds, and the peer's over ours with its range over the rounds."""

    result: str
    case: str
    shape: str
    kernel: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    low: float
    high: float
    row: Row


class Case(NamedTuple):
    """The shapes of a line of a table, where and when they were measured, and against what."""

    part: Part
    result: str
    name: str
    chip: str
    date: str
    shapes: list[Shape]
    peers: tuple[str, ...]

    @property
    def geomean(self) -> float:
        """The geometric mean of the ratios."""
        return statistics.geometric_mean(shape.ratio for shape in self.shapes)

    @property
    def worst(self) -> Shape:
        """The shape with the lowest ratio."""
        return min(self.shapes, key=lambda shape: shape.ratio)

    def losses(self, below: float = 1.0) -> list[Shape]:
        """Return the shapes with a lower ratio, worst first."""
        return sorted((s for s in self.shapes if s.ratio < below), key=lambda shape: shape.ratio)


# What fields of rows are called in a table. None is left out.
WORDS: dict[object, str | None] = {
    "gemm": "plain GEMM", "bias_relu": "bias + ReLU", "bias_silu": "bias + SiLU",
    "bias_gelu_residual": "bias + GELU + residual", "bf16": "BF16", "f16": "FP16",
    "tf32": "TF32", "3xtf32": "3xTF32", "i8": "INT8", "f64": "FP64", "plain": None, "scaled": "scales",
    "row,col": None, "row,row": "B row-major", "col,row": "A column-major, B row-major",
    "row-col": None, "row-row": "B row-major", "col-row": "A column-major, B row-major", "col-col": "A column-major",
    "tensor": "scales of tensors", "rows": "scales of rows", "blocks": "scales of blocks", "none": None, None: None,
    "balanced": "equal groups", "zipf": "groups by Zipf's law", "one_hot": "all rows in one group",
    "linear_gelu": "Linear + GELU", "mlp": "MLP", "swiglu": "GatedMLP", "decoder": "decoder block",
    "qwen3": "Qwen3", "mixtral": "Mixtral", "dropout_residual": "dropout + residual",
    "cross_entropy": "cross-entropy statistics", "gpt_oss_gate": "gate of gpt-oss",
}  # fmt: skip


def words(row: Row, fields: Iterable[str]) -> list[str]:
    """Return what these fields of a row are called, without what goes without saying. "case" has several words."""
    values = [each for field in fields for each in (row[field].split() if field == "case" else [row.get(field)])]
    return [text for value in values if (text := WORDS.get(value, str(value))) is not None]


def read(path: Path, part: Part) -> list[Case]:
    """Read a file of results: a case for each combination of the part's fields, in the file's order."""
    data = json.loads(path.read_text())
    found: dict[str, list[Shape]] = {}
    named: dict[str, dict[str, None]] = {}
    for row in data["rows"]:
        if part.where is None or row.get(part.where[0]) == part.where[1]:
            name = ", ".join([*([part.title] if part.title else []), *words(row, part.fields)])
            if not (theirs := _peers(row, part)):  # PyTorch has no way to compute it
                continue
            found.setdefault(name, []).append(_shape(path.stem, name, row, theirs))
            named.setdefault(name, {}).update(dict.fromkeys(theirs))
    return [
        Case(part, path.stem, name, data["chip"], data["date"], shapes, tuple(named[name]))
        for name, shapes in found.items()
    ]


def read_all(folder: Path, parts: Sequence[Part]) -> list[Case]:
    """Read all files of these parts."""
    return [case for part in parts for path in sorted(folder.glob(f"{part.files}.json")) for case in read(path, part)]


def _peers(row: Row, part: Part) -> dict[str, tuple[float, float, float, float]]:
    """Return each peer's time in ms, and the median, least and greatest ratio: of the fastest alone, where files do."""
    if "over_ours" not in row:
        low, high = row["ratio_range"]
        best = row["best_peer"]
        ratios = {best: (row["ratio_to_best_peer"], low, high)}
        return {name: (ms, *ratios.get(name, (float("inf"),) * 3)) for name, ms in row["peers"].items()}
    return {
        name: (row["ms"][name], over["median"], over["min"], over["max"])
        for name, over in row["over_ours"].items()
        if name in part.peers
    }


def _shape(result: str, case: str, row: Row, peers: dict[str, tuple[float, float, float, float]]) -> Shape:
    peer = min(peers, key=lambda name: peers[name][1])
    theirs, ratio, low, high = peers[peer]
    ours = row["ours_ms"] if "ours_ms" in row else row["ms"]["ours"]
    kernel = row.get("kernel") or ""
    return Shape(result, case, size(row), kernel, ours * 1e3, peer, theirs * 1e3, ratio, low, high, row)


def size(row: Row) -> str:
    """Return a row's sizes as text."""
    parts = [f"{row['batches']} ×"] if "batches" in row else []
    if "experts" in row:
        return f"{row['experts']} experts, {row['tokens']} rows, {row['n']}×{row['k']}"
    if "model" in row:
        return f"{WORDS[row['model']]}, {row['tokens']} token{'' if row['tokens'] == 1 else 's'}"
    if "phase" in row:
        return f"{row['phase']}, {row['m']} rows"
    return " ".join([*parts, "×".join(str(row[name]) for name in "mnk" if name in row)])


def read_causes(path: Path) -> list[Row]:
    """Read the causes of losses: each has conditions on a row, its result's name and its ratio, and a text."""
    found: list[Row] = tomllib.loads(path.read_text())["cause"]
    return found


def matches(entry: Row, shape: Shape) -> bool:
    """Whether a cause's conditions hold for a shape. A condition on a field that a row lacks does not."""
    facts = {**shape.row, "result": shape.result}
    low, high = entry.get("ratio", (0.0, 1.0))
    conditions = {key: value for key, value in entry.items() if key not in ("ratio", "text")}
    return low <= shape.ratio <= high and all(facts.get(key) == value for key, value in conditions.items())


def cause(entries: Sequence[Row], shape: Shape) -> str:
    """Return the text of the first cause that matches a loss, or that there is none."""
    return next((str(entry["text"]).strip() for entry in entries if matches(entry, shape)), UNKNOWN)
