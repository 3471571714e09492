"""A comparison as HTML with its pictures inside: no script, no other file, nothing from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from cutlass_ops.declare.chips import Chip
from cutlass_ops.tools.bench.numbers import METHODS, OURS, Numbers

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


def whole(found: Numbers, chip: Chip | None) -> str:
    """Return a whole page.

    Parameters
    ----------
    found : Numbers
        The comparison.
    chip : Chip or None
        The chip, for the roofline; None if its peaks are unknown.
    """
    title = escape(f"{found.op}, {found.dtype}")
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n</head>\n<body>\n'
        f"{body(found, chip)}\n</body>\n</html>\n"
    )


def body(found: Numbers, chip: Chip | None) -> str:
    """Return the part that a notebook shows. Parameters as for :func:`whole`."""
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


def _table(found: Numbers, method: str) -> str:
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


def _ratios(found: Numbers, method: str) -> str:
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


def _roofline(found: Numbers, chip: Chip) -> str:
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


def _legend(found: Numbers, names: Sequence[str]) -> list[str]:
    left = _WIDTH - _RIGHT + 14
    return [
        f'<circle cx="{left}" cy="{_TOP + 8 + 18 * i}" r="4" fill="{_colour(found, name)}"/>'
        f'<text x="{left + 10}" y="{_TOP + 12 + 18 * i}">{escape(name)}</text>'
        for i, name in enumerate(names)
    ]


def _colour(found: Numbers, name: str) -> str:
    """Return the colour of a way, which it has in every picture."""
    return _COLOURS[found.ways.index(name) % len(_COLOURS)]
