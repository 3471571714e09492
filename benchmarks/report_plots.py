"""Plots of the report, as plain data and as SVG."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from report_results import (
    Case,
    Line,
    Result,
    Row,
    problem,
    ratios,
    weights,
)

from cutlass_ops.declare.chips import CHIPS

ELEMENT_BYTES = {"bf16": 2, "f16": 2}
OVERVIEW = "overview"


class Figure(NamedTuple):
    """A plot as plain data, so that a test can tell a stale one without matplotlib."""

    name: str
    kind: str
    title: str
    series: dict[str, list[tuple[float, float]]]
    ceilings: tuple[float, float] | None = None

    def digest(self) -> str:
        """Return a hash of all that is plotted; it is written into the SVG."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


def moved_bytes(row: Row) -> int:
    """Return the bytes of operands, inputs and D, each once. D has the operands' type, as in bench_gemm.py."""
    m, n, k = problem(row)
    elements = m * k + n * k + m * n
    # An op's name lists its inputs.
    elements += n if "bias" in row["op"] else 0
    elements += m * n if "residual" in row["op"] else 0
    return elements * ELEMENT_BYTES[row["dtype"]]


def roofline_point(row: Row) -> tuple[float, float]:
    """Return FLOP per byte and achieved TFLOP/s."""
    m, n, k = problem(row)
    flop = 2 * m * n * k
    return flop / moved_bytes(row), flop / row["ours_ms"] / 1e9


def ceilings(head: dict[str, Any]) -> tuple[float, float] | None:
    """Return TFLOP/s of the Tensor Cores and TB/s of device memory, or None for an unknown chip."""
    peaks = CHIPS.get(head["chip"])
    return (peaks.tflops, peaks.gb_per_s / 1e3) if peaks else None


def roofline_text(result: Result) -> str:
    """Return the description of the roofline plot."""
    text = "TFLOP/s of ours over arithmetic intensity. Operands, inputs and D are counted once."
    if (found := ceilings(result.head)) is None:
        return f"{text} Ceilings of this chip are not known to `cutlass_ops/declare/roofline.py`."
    compute, memory = found
    return (
        f"{text} The ceilings come from `cutlass_ops/declare/roofline.py`: {compute:.0f} TFLOP/s is the peak of the "
        f"Tensor Cores at their highest clock, {memory:.2f} TB/s the peak of device memory."
    )


def roofline_figure(result: Result) -> Figure:
    """Return the roofline plot of a file."""
    series = {str(of): [roofline_point(row) for row in rows] for of, rows in result.cases().items()}
    title = f"Roofline: {result.head['chip']}, {result.name}"
    return Figure(f"{result.name}_roofline", "roofline", title, series, ceilings(result.head))


def ratio_figure(result: Result, of: Case, rows: Sequence[Row]) -> Figure:
    """Return the plot of a case's ratios over M, one line for each weight."""
    series = {
        f"{n}×{k}": sorted((row["m"], row["ratio_to_best_peer"]) for row in rows if (row["n"], row["k"]) == (n, k))
        for n, k in weights(rows)
    }
    return Figure("_".join((result.name, *of)), "ratio", f"Peer's time / ours: {of}", series)


def overview_figure(found: Iterable[tuple[Line, Result, list[Row]]]) -> Figure:
    """Return README.md's plot: every ratio of its lines over the line's number, the first at the top."""
    series = {
        f"{line.title}, {rows[0]['set']}": [(ratio, float(-number)) for ratio in sorted(ratios(rows))]
        for number, (line, _, rows) in enumerate(found)
    }
    return Figure(OVERVIEW, "overview", "Peer's time / ours: every shape, and the geometric mean (bar)", series)


def figures(results: Iterable[Result]) -> list[Figure]:
    """Return all plots of a document, but README.md's."""
    found = []
    for result in results:
        found.append(roofline_figure(result))
        found += [ratio_figure(result, of, rows) for of, rows in result.cases().items()]
    return found


def plot_path(figure: Figure, out: Path) -> Path:
    """Return the path of a document's plot, in a folder with the document's name."""
    return out.with_suffix("") / f"{figure.name}.svg"


def draw(figure: Figure, path: Path) -> None:
    """Draw a figure as SVG: the same bytes from the same data and version of matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context({"svg.hashsalt": "cutlass_ops", "svg.fonttype": "none"}):
        canvas = Canvas(figsize=(9, 5), layout="constrained")
        axes = canvas.add_subplot()
        painters: dict[str, Callable[[Any, Figure], None]] = {
            "ratio": _draw_ratios,
            "roofline": _draw_roofline,
            "overview": _draw_overview,
        }
        painters[figure.kind](axes, figure)
        axes.set_title(figure.title)
        axes.grid(alpha=0.3)
        if figure.kind != "overview":
            canvas.legend(loc="outside right upper", fontsize="small")
        canvas.savefig(io.BytesIO(), format="svg")  # lays the plot out
        # The last bits of the layout differ between machines, and names in the SVG are hashes of them.
        axes.set_position([round(part, 10) for part in axes.get_position().bounds])
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": figure.digest()})


def _draw_ratios(axes: Any, figure: Figure) -> None:
    # Thirty lines that can be told apart.
    styles = itertools.cycle((f"C{colour}", style) for style in ("-", "--", ":") for colour in range(10))
    for (name, points), (colour, style) in zip(figure.series.items(), styles, strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, marker="o", markersize=4, label=name)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    largest = int(max(m for points in figure.series.values() for m, _ in points))
    powers = [2**p for p in range((largest - 1).bit_length() + 1)]
    axes.set_xticks(powers, labels=map(str, powers))
    axes.set(xlabel="M", ylabel="ratio, above 1 ours is faster")


def _draw_overview(axes: Any, figure: Figure) -> None:
    for number, points in enumerate(figure.series.values()):
        values = [x for x, _ in points]
        colours = ["C3" if x < 1 else "C0" for x in values]
        axes.scatter(values, [y for _, y in points], s=14, alpha=0.5, color=colours, linewidths=0)
        mean = statistics.geometric_mean(values)
        axes.plot([mean, mean], [-number - 0.35, -number + 0.35], color="black", linewidth=2)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    ticks = (0.9, 1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks([-float(number) for number in range(len(figure.series))], labels=list(figure.series))
    axes.set(xlabel="ratio, above 1 ours is faster; losses are red")


def _draw_roofline(axes: Any, figure: Figure) -> None:
    for name, points in figure.series.items():
        axes.scatter(*zip(*points, strict=True), s=12, alpha=0.7, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    if figure.ceilings is not None:
        compute, memory = figure.ceilings
        low = min(x for points in figure.series.values() for x, _ in points)
        high = max(x for points in figure.series.values() for x, _ in points)
        ridge = compute / memory
        axes.plot([low, ridge], [low * memory, compute], color="black", label=f"{memory:.2f} TB/s")
        axes.plot(
            [ridge, max(high, ridge)], [compute, compute], color="black", linestyle="--", label=f"{compute:.0f} TFLOP/s"
        )
    axes.set(xlabel="arithmetic intensity, FLOP/byte", ylabel="TFLOP/s")
