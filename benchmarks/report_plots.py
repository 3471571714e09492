"""The report's picture, as plain data and as SVG."""

from __future__ import annotations

import hashlib
import io
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from report_results import Case


class Figure(NamedTuple):
    """The picture as plain data, so that a test can tell a stale one without matplotlib: the ratios of each line."""

    title: str
    lines: list[tuple[str, list[float]]]

    def digest(self) -> str:
        """Return a hash of all that is plotted; it is written into the SVG."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


def overview(cases: Iterable[Case]) -> Figure:
    """Return every ratio of these cases, one line for each."""
    lines = [(case.name, sorted(shape.ratio for shape in case.shapes)) for case in cases]
    return Figure("Peer's time / ours: every shape, and the geometric mean (bar)", lines)


def draw(figure: Figure, path: Path) -> None:
    """Draw a figure as SVG: the same bytes from the same data and version of matplotlib."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    with mpl.rc_context({"svg.hashsalt": "cutlass_ops", "svg.fonttype": "none"}):
        canvas = Canvas(figsize=(9, 5), layout="constrained")
        canvas.get_layout_engine().set(w_pad=0.2)  # fonts of readers are wider
        axes = canvas.add_subplot()
        for place, (_, ratios) in enumerate(figure.lines):
            colours = ["C3" if ratio < 1 else "C0" for ratio in ratios]
            axes.scatter(ratios, [-float(place)] * len(ratios), s=14, alpha=0.5, color=colours, linewidths=0)
            mean = statistics.geometric_mean(ratios)
            axes.plot([mean, mean], [-place - 0.35, -place + 0.35], color="black", linewidth=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        ticks = (0.9, 1.0, 1.1, 1.2, 1.4, 1.7, 2.0, 2.5)
        axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_yticks(
            [-float(place) for place in range(len(figure.lines))], labels=[name for name, _ in figure.lines]
        )
        axes.set(xlabel="ratio, above 1 ours is faster; losses are red")
        axes.set_title(figure.title)
        axes.grid(alpha=0.3)
        canvas.savefig(io.BytesIO(), format="svg")  # lays the plot out
        # The last bits of the layout differ between machines, and names in the SVG are hashes of them.
        axes.set_position([round(part, 4) for part in axes.get_position().bounds])
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, format="svg", metadata={"Date": None, "Creator": None, "Description": figure.digest()})
