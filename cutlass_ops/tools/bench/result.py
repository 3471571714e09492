"""What ``co.bench`` returns: a comparison that shows itself as text, JSON and HTML.

The HTML has its pictures inside: no script, no other file, nothing from elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from cutlass_ops.base import terminal
from cutlass_ops.base.units import counted
from cutlass_ops.declare.chips import CHIPS, Chip
from cutlass_ops.declare.roofline import Roofline
from cutlass_ops.tuner.comparing import geomean

OURS = "ours"
# How launches follow each other: one after another in a graph, or single ones between other kernels.
METHODS = {"graph": "in graphs", "between": "single launches between other kernels"}


@dataclass(frozen=True)
class Rival:
    """One way's times at one problem, by one method."""

    microseconds: float  # median time of a call
    ratio: float  # its time over ours, the median over the rounds: above 1, ours is faster
    least: float  # the least ratio of a round
    most: float  # the greatest ratio of a round


@dataclass(frozen=True)
class Row:
    """One problem."""

    problem: tuple[int, int, int]  # M, N and K
    flops: int  # operations
    bytes: int  # of all operands, inputs and outputs
    roofline: Roofline | None  # lower bounds of the time; None if the chip's peaks are unknown
    kernel: str  # what serves our call
    error_over_eager: float  # our error over eager PyTorch's, both against FP64
    times: Mapping[str, Mapping[str, Rival]]  # by method and by way; ours is one of the ways
    missing: Mapping[str, str] = field(default_factory=dict)  # ways that could not be timed, and why

    @property
    def name(self) -> str:
        """The problem as a text."""
        return "x".join(map(str, self.problem))

    @property
    def tflops(self) -> float:
        """Our throughput in graphs, in TFLOP/s."""
        return self.flops / self.times["graph"][OURS].microseconds / 1e6

    def best(self, method: str) -> str | None:
        """Return the fastest of the others, None if there is none."""
        others = {name: each.ratio for name, each in self.times[method].items() if name != OURS}
        return min(others, key=others.__getitem__, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values."""
        return {
            "problem": list(self.problem),
            "bound": None if self.roofline is None else self.roofline.bound,
            "tflops": round(self.tflops, 1),
            "gb_per_s": round(self.bytes / self.times["graph"][OURS].microseconds / 1e3, 1),
            "kernel": self.kernel,
            "error_over_eager": round(self.error_over_eager, 3),
            "times": {
                method: {
                    name: {"us": round(x.microseconds, 3), "ratio": x.ratio, "range": [x.least, x.most]}
                    for name, x in ways.items()
                }
                for method, ways in self.times.items()
            },
            "missing": dict(self.missing),
        }


@dataclass(frozen=True, repr=False)
class Benchmark:
    """A comparison of one op, returned by :func:`cutlass_ops.bench`. A notebook displays it as tables and a plot.

    Attributes
    ----------
    op, dtype, a, b : str
        The op, the dtype of A and B, and their majors.
    environment : mapping
        Chip, date, versions of driver, PyTorch and library.
    rows : tuple of Row
        The problems.

    Examples
    --------
    >>> found = co.bench("gemm_bias_relu", (4096, 4096, 4096))  # doctest: +SKIP
    >>> found.rows[0].times["graph"]["cublaslt"].ratio  # doctest: +SKIP
    1.04
    """

    op: str
    dtype: str
    a: str
    b: str
    environment: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def ways(self) -> tuple[str, ...]:
        """Ours and the others that were timed at any problem, ours first."""
        return tuple(dict.fromkeys(name for row in self.rows for name in row.times["graph"]))

    def geomean(self, name: str, method: str = "graph") -> float | None:
        """Return the geometric mean of another way's ratios, None if it was never timed."""
        found = [row.times[method][name].ratio for row in self.rows if name in row.times[method]]
        return geomean(found) if found else None

    def table(self, method: str) -> tuple[list[str], list[list[str]]]:
        """Return the columns and cells of a table of one method's times."""
        columns = ["problem", "ours, us", *(("TFLOP/s", "of roofline") if method == "graph" else ())]
        columns += [name for name in self.ways if name != OURS]
        rows = []
        for row in self.rows:
            ours = row.times[method][OURS].microseconds
            cells = [row.name, f"{ours:.1f}"]
            if method == "graph":
                bound = max(row.roofline.compute, row.roofline.memory) if row.roofline else None
                cells += [f"{row.tflops:.0f}", "" if bound is None else f"{100 * bound / ours:.0f}%"]
            others = [row.times[method].get(name) for name in self.ways if name != OURS]
            rows.append([*cells, *("" if x is None else f"{x.ratio:.3f}" for x in others)])
        means = [self.geomean(name, method) for name in self.ways if name != OURS]
        if len(self.rows) > 1:
            blank = [""] * (len(columns) - 1 - len(means))
            rows.append(["geometric mean", *blank, *("" if m is None else f"{m:.3f}" for m in means)])
        return columns, rows

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        means = {
            method: {n: round(m, 4) for n in self.ways if n != OURS and (m := self.geomean(n, method)) is not None}
            for method in METHODS
        }
        return {
            "op": self.op,
            "dtype": self.dtype,
            "a": self.a,
            "b": self.b,
            **self.environment,
            "geomean": means,
            "rows": [row.to_json() for row in self.rows],
        }

    def lines(self, styled: bool | None = None) -> list[str]:
        """Return the tables as text."""
        chip = self.environment.get("chip", "")
        lines = [
            f"{self.op}, {self.dtype}, A {self.a}, B {self.b}, on {chip}. Columns of others are their time over ours."
        ]
        for method, says in METHODS.items():
            lines += ["", f"{says}:", *terminal.table(*self.table(method), styled=styled)]
        missing = {f"{name}: {why}" for row in self.rows for name, why in row.missing.items()}
        return [*lines, *([""] if missing else []), *(f"not timed: {each}" for each in sorted(missing))]

    def html(self) -> str:
        """Return a page that needs no other file: tables, ratios and the roofline."""
        return _page(self, CHIPS.get(str(self.environment.get("chip"))))

    def _repr_html_(self) -> str:
        return _body(self, CHIPS.get(str(self.environment.get("chip"))))

    def __repr__(self) -> str:
        means = ", ".join(f"{n} {m:.3f}" for n in self.ways if n != OURS and (m := self.geomean(n)) is not None)
        return f"<benchmark of {self.op} at {counted(len(self.rows), 'problem')}; others over ours: {means or 'none'}>"

    def __str__(self) -> str:
        return "\n".join(self.lines(styled=False))


# ---- HTML -----------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 130, 20, 70
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b")
_STYLE = """
.co-bench { font: 14px/1.4 system-ui, sans-serif; color: #222; background: #fff; max-width: 60em; }
.co-bench table { border-collapse: collapse; margin: 0.5em 0 1em; }
.co-bench td, .co-bench th { padding: 0.15em 0.7em; text-align: right; border-bottom: 1px solid #ddd; }
.co-bench td:first-child, .co-bench th:first-child { text-align: left; }
.co-bench .slower { color: #b00; }
.co-bench svg { max-width: 100%; height: auto; }
.co-bench svg text { font: 11px system-ui, sans-serif; fill: #222; }
"""

Scale = Callable[[float], float]


def _page(found: Benchmark, chip: Chip | None) -> str:
    """Return a whole page. It has no roofline if ``chip`` is None."""
    title = escape(f"{found.op}, {found.dtype}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n</head>\n<body>\n'
        f"{_body(found, chip)}\n</body>\n</html>\n"
    )


def _body(found: Benchmark, chip: Chip | None) -> str:
    """Return the part that a notebook shows."""
    parts = [
        f"<style>{_STYLE}</style>",
        f"<h2>{escape(found.op)}, {escape(found.dtype)}, A {escape(found.a)}, B {escape(found.b)}</h2>",
        f"<p>{escape(', '.join(f'{k} {v}' for k, v in found.environment.items() if v is not None))}</p>",
    ]
    for method, says in METHODS.items():
        parts += [f"<h3>{escape(says.capitalize())}</h3>", _table(found, method), _ratios(found, method)]
    if chip is not None:
        parts += ["<h3>Roofline</h3>", _roofline(found, chip)]
    missing = sorted({f"{name}: {why}" for row in found.rows for name, why in row.missing.items()})
    if missing:
        parts.append("<p>Not timed:</p><ul>" + "".join(f"<li>{escape(each)}</li>" for each in missing) + "</ul>")
    return '<div class="co-bench">\n' + "\n".join(parts) + "\n</div>"


def _table(found: Benchmark, method: str) -> str:
    columns, rows = found.table(method)
    others = len([name for name in found.ways if name != OURS])
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = [f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>"]
    for row in rows:
        cells = []
        for i, cell in enumerate(row):
            slower = i >= len(row) - others and cell and float(cell) < 1
            cells.append(f'<td class="slower">{cell}</td>' if slower else f"<td>{escape(cell)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = "<p>Columns of others are their time over ours: above 1, ours is faster.</p>"
    return "\n".join([*lines, "</tbody>\n</table>", caption])


def _ratios(found: Benchmark, method: str) -> str:
    """Draw the ratio of each other way at each problem, with its range."""
    names = [name for name in found.ways if name != OURS]
    rows = [row for row in found.rows if len(row.times[method]) > 1]
    if not rows:
        return ""
    every = [x for row in rows for name, x in row.times[method].items() if name != OURS]
    y = _log(min(0.9, *(x.least for x in every)), max(1.1, *(x.most for x in every)), _HEIGHT - _BOTTOM, _TOP)
    step = (_WIDTH - _LEFT - _RIGHT) / len(rows)
    parts = [_axis_y(y, _ticks(min(0.9, *(x.least for x in every)), max(1.1, *(x.most for x in every)))), _one(y)]
    for i, row in enumerate(rows):
        middle = _LEFT + (i + 0.5) * step
        parts.append(_label(middle, _HEIGHT - _BOTTOM + 12, row.name, turned=len(rows) > 4))
        for j, name in enumerate(names):
            x = row.times[method].get(name)
            if x is None:
                continue
            at = middle + (j - (len(names) - 1) / 2) * min(12.0, step / (len(names) + 1))
            colour = _colour(found, name)
            said = f"{name} at {row.name}: {x.ratio:.3f} ({x.least:.3f} to {x.most:.3f})"
            ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{y(x.least):.1f}" y2="{y(x.most):.1f}"'
            parts += [f'<line {ends} stroke="{colour}"/>', _dot(at, y(x.ratio), colour, said)]
    return _svg("Time of others over ours", [*parts, *_legend(found, names)])


def _roofline(found: Benchmark, chip: Chip) -> str:
    """Draw TFLOP/s of every way over FLOP for each byte, below the chip's roofs."""
    points = [
        (name, row.name, row.flops / row.bytes, row.flops / x.microseconds / 1e6)
        for row in found.rows
        for name, x in row.times["graph"].items()
    ]
    low = min([1.0, *(p[2] for p in points)]) / 1.5
    ridge = chip.tflops * 1e3 / chip.gb_per_s
    high = max([ridge * 4, *(p[2] for p in points)]) * 1.5
    x = _log(low, high, _LEFT, _WIDTH - _RIGHT)
    bottom = min([low * chip.gb_per_s / 1e3, *(p[3] for p in points)]) / 1.5
    y = _log(bottom, chip.tflops * 1.5, _HEIGHT - _BOTTOM, _TOP)
    roof = [(low, low * chip.gb_per_s / 1e3), (ridge, chip.tflops), (high, chip.tflops)]
    path = " ".join(f"{x(i):.1f},{y(max(t, bottom)):.1f}" for i, t in roof)
    parts = [
        _axis_y(y, _ticks(bottom, chip.tflops * 1.5)),
        *(_label(x(tick), _HEIGHT - _BOTTOM + 14, f"{tick:g}") for tick in _ticks(low, high)),
        f'<polyline points="{path}" fill="none" stroke="#555"/>',
        _label(_WIDTH - _RIGHT - 70, y(chip.tflops) - 5, f"{chip.tflops:.0f} TFLOP/s"),
        _label(_LEFT - 20, _TOP - 6, "TFLOP/s"),
        _label((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 30, f"FLOP for each byte ({chip.gb_per_s:.0f} GB/s)"),
    ]
    for name, problem, intensity, tflops in points:
        colour = _colour(found, name)
        parts.append(_dot(x(intensity), y(tflops), colour, f"{name} at {problem}: {tflops:.0f} TFLOP/s"))
    return _svg(f"Roofline of {chip.name}", [*parts, *_legend(found, found.ways)])


def _dot(x: float, y: float, colour: str, says: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(says)}</title></circle>'


def _svg(title: str, parts: Iterable[str]) -> str:
    inside = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{escape(title)}">\n'
        f"<title>{escape(title)}</title>\n{inside}\n</svg>"
    )


def _log(low: float, high: float, start: float, end: float) -> Scale:
    """Return a logarithmic scale from values to places."""
    span = math.log(high / low)
    return lambda value: start + (end - start) * math.log(value / low) / span


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between two values: of one power of ten, tenths or halves; else 1, 2 and 5 of each."""
    if high / low < 4:
        step = 0.1 if high - low < 1 else 0.5
        first, last = math.ceil(low / step), math.floor(high / step)
        return [round(i * step, 1) for i in range(first, last + 1)]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 100 else (1,)
    return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def _axis_y(y: Scale, ticks: Sequence[float]) -> str:
    return "\n".join(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}" stroke="#e5e5e5"/>'
        f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>'
        for tick in ticks
    )


def _one(y: Scale) -> str:
    return f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="#555"/>'


def _label(x: float, y: float, text: str, *, turned: bool = False) -> str:
    anchor, turn = ("end", f' transform="rotate(-30 {x:.1f} {y:.1f})"') if turned else ("middle", "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'


def _legend(found: Benchmark, names: Sequence[str]) -> list[str]:
    left = _WIDTH - _RIGHT + 14
    return [
        f'<circle cx="{left}" cy="{_TOP + 8 + 18 * i}" r="4" fill="{_colour(found, name)}"/>'
        f'<text x="{left + 10}" y="{_TOP + 12 + 18 * i}">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]


def _colour(found: Benchmark, name: str) -> str:
    """Return the colour of a way, which it has in every picture."""
    return _COLOURS[found.ways.index(name) % len(_COLOURS)]
