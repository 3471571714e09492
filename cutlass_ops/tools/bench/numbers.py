"""The numbers of a comparison: for each problem, each way's time, and its ratio to ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cutlass_ops.declare.roofline import Roofline
from cutlass_ops.tuner.comparing import geomean

OURS = "ours"
# How launches follow each other: one after another in a graph, or single ones between other kernels.
METHODS = {"graph": "in graphs", "between": "single launches between other kernels"}


@dataclass(frozen=True)
class Rival:
    """One way's times at one problem, by one method.

    Attributes
    ----------
    microseconds : float
        Median time of a call.
    ratio : float
        Its time over ours, the median over the rounds: above 1, ours is faster.
    least, most : float
        The range of that ratio over the rounds.
    """

    microseconds: float
    ratio: float
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """One problem.

    Attributes
    ----------
    problem : tuple of int
        M, N and K.
    flops, bytes : int
        Operations, and bytes of all operands, inputs and outputs.
    roofline : Roofline or None
        Lower bounds of the time; None if the chip's peaks are unknown.
    kernel : str
        What serves our call.
    error_over_eager : float
        Our error over eager PyTorch's, both against FP64.
    times : mapping of str to (mapping of str to Rival)
        By method and by way; ours is one of the ways.
    missing : mapping of str to str
        Ways that could not be timed, and why.
    """

    problem: tuple[int, int, int]
    flops: int
    bytes: int
    roofline: Roofline | None
    kernel: str
    error_over_eager: float
    times: Mapping[str, Mapping[str, Rival]]
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The problem as a text."""
        return "x".join(map(str, self.problem))

    @property
    def tflops(self) -> float:
        """What ours reaches in graphs, in TFLOP/s."""
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
class Numbers:
    """A comparison of one op.

    Attributes
    ----------
    op, dtype, a, b : str
        The op, the dtype of A and B, and their majors.
    environment : mapping
        Chip, date, versions of driver, PyTorch and library.
    rows : tuple of Row
        The problems.
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
