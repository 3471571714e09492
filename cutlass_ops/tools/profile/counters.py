"""Read the CSV of Nsight Compute: one record for each kernel.

ncu writes two forms. ``--page raw`` has a column for each metric and a second line of units; the other pages have a
line for each metric. Lines of ncu or of the program may come before. A metric that a chip lacks is empty or ``n/a``.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

# The request to ncu. Sections contain what the chip has; these metrics are on all chips since Volta.
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "Occupancy",
    "WarpStateStats",
    "LaunchStats",
)
TIME, TENSOR = "gpu__time_duration.sum", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
BYTES = "dram__bytes.sum"
METRICS = (TIME, TENSOR, BYTES)

_PERCENT = r"\.avg\.pct_of_peak_sustained_(active|elapsed)"
# By our name: the columns that may have it; the largest counts. Chips differ in how they divide their pipes.
_PATTERNS = {
    "tensor": rf"sm__(pipe_tensor\w*_cycles_active|inst_executed_pipe_tensor\w*){_PERCENT}",
    "gmma": rf"sm__inst_executed_pipe_tensor_op_gmma{_PERCENT}",
    "fma": rf"sm__(pipe_fma\w*_cycles_active|inst_executed_pipe_fma\w*){_PERCENT}",
    "dram": r"(gpu__dram|dram)__?throughput\.avg\.pct_of_peak_sustained_elapsed",
    "l2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "l2_hits": r"lts__t_sector_hit_rate\.pct",
    "occupancy": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
    "waves": r"launch__waves_per_multiprocessor",
    "registers": r"launch__registers_per_thread",
}
_COMPILED = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}
_STALL = re.compile(r"smsp__average_warps?_(?:issue_stalled|latency_issue_stalled)_(\w+?)(?:_per_issue_active)?\.ratio")
# Into nanoseconds and bytes; ncu scales values unless --print-units base is given.
_UNITS = {
    "": 1.0, "%": 1.0, "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9,
    "second": 1e9, "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9,
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """The counters of one kernel, averaged over its launches by time. None is an unknown value."""

    name: str  # without its parameters
    calls: int  # number of launches
    microseconds: float  # of all launches together
    capability: tuple[int, int]  # compute capability of the device
    tensor: float | None = None  # percent of the peak of the Tensor Core pipe
    fma: float | None = None  # percent of the peak of the FP32 pipe
    dram: float | None = None  # percent of the peak of device memory
    l2: float | None = None  # percent of the peak of the L2 cache
    l2_hits: float | None = None  # percent of accesses to the L2 cache that hit it
    occupancy: float | None = None  # resident warps in percent of the most that fit
    waves: float | None = None  # blocks in units of what the whole chip runs at the same time
    wgmma: bool | None = None  # whether the Tensor Core instructions were those of warpgroups
    bytes: float | None = None  # bytes of device memory that one launch read and wrote
    registers: int | None = None  # of a thread
    # reasons for which warps waited, with the average cycles between two instructions of a warp
    stalls: Mapping[str, float] = field(default_factory=dict)

    @property
    def counted(self) -> bool:
        """Whether it has hardware counters, not only a time."""
        return self.tensor is not None or self.dram is not None


def kernels(text: str) -> list[Kernel]:
    """Return the kernels of ncu's CSV, longest first. Raises ValueError if the text has no table."""
    by_name = sorted(_launches(text), key=lambda launch: launch[0])
    found = [_together(name, [metrics for _, metrics in group]) for name, group in groupby(by_name, lambda x: x[0])]
    return sorted(found, key=lambda kernel: -kernel.microseconds)


def launches(text: str) -> list[Kernel]:
    """Return the launches of ncu's CSV in their order. Raises ValueError if the text has no table."""
    return [_together(name, [metrics]) for name, metrics in _launches(text)]


def _launches(text: str) -> Iterator[tuple[str, Mapping[str, float]]]:
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no CSV of Nsight Compute in this text: its first column is ID. Use ncu --csv --page raw")
    header, *rows = csv.reader(line for line in lines[start:] if line.startswith('"'))
    return _long(header, rows) if "Metric Name" in header else _wide(header, rows)


def _wide(header: list[str], rows: list[list[str]]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Read ``--page raw``: the first row has units."""
    if not rows:
        return
    units, *launches = rows
    name, cc = header.index("Kernel Name"), header.index("CC") if "CC" in header else None
    for row in launches:
        values = {
            metric: number
            for metric, unit, value in zip(header, units, row, strict=False)
            if (number := _number(value, unit)) is not None and "__" in metric
        }
        yield shortened(row[name]), values | _capability(row[cc] if cc is not None else "")


def _long(header: list[str], rows: list[list[str]]) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Read the other pages: a row for each metric of a launch."""
    records = [dict(zip(header, row, strict=False)) for row in rows]
    for _, group in groupby(records, key=lambda record: record.get("ID")):
        mine = list(group)
        values = {
            r["Metric Name"]: number
            for r in mine
            if (number := _number(r.get("Metric Value", ""), r.get("Metric Unit", ""))) is not None
        }
        yield shortened(mine[0]["Kernel Name"]), values | _capability(mine[0].get("CC", ""))


def _number(value: str, unit: str) -> float | None:
    """Return a value in base units; None for ``n/a`` and texts."""
    try:
        return float(value.replace(",", "")) * _UNITS.get(unit.strip().lower(), 1.0)
    except ValueError:
        return None


def _capability(text: str) -> dict[str, float]:
    major, _, minor = text.partition(".")
    return {"major": float(major), "minor": float(minor or 0)} if major.isdigit() else {}


def _together(name: str, metrics: list[Mapping[str, float]]) -> Kernel:
    times = [launch.get(TIME, 0.0) for launch in metrics]

    def mean(values: Iterable[float | None]) -> float | None:
        known = [(v, max(t, 1e-9)) for v, t in zip(values, times, strict=True) if v is not None]
        return sum(v * t for v, t in known) / sum(t for _, t in known) if known else None

    def counted(which: str) -> float | None:
        return mean(
            max((v for metric, v in launch.items() if _COMPILED[which].fullmatch(metric)), default=None)
            for launch in metrics
        )

    stalls = sorted({match[1] for launch in metrics for metric in launch if (match := _STALL.fullmatch(metric))})
    cycles = {reason: mean(_stalled(launch, reason) for launch in metrics) for reason in stalls}
    gmma, registers = counted("gmma"), counted("registers")
    # Where it is measured, the pipe's own cycles over the whole time are the number; instructions are a substitute.
    tensor = mean(launch.get(TENSOR) for launch in metrics)
    return Kernel(
        name,
        len(metrics),
        sum(times) / 1e3,
        (int(metrics[0].get("major", 0)), int(metrics[0].get("minor", 0))),
        counted("tensor") if tensor is None else tensor,
        counted("fma"),
        counted("dram"),
        counted("l2"),
        counted("l2_hits"),
        counted("occupancy"),
        counted("waves"),
        None if gmma is None else gmma > 0,
        mean(launch.get(BYTES) for launch in metrics),
        None if registers is None else round(registers),
        {reason: value for reason, value in cycles.items() if value},
    )


def _stalled(launch: Mapping[str, float], reason: str) -> float | None:
    return next((v for metric, v in launch.items() if (m := _STALL.fullmatch(metric)) and m[1] == reason), None)


# ---- Names of kernels ------------------------------------------------------------------------------------------------

# ncu and torch.profiler read C++ names by different demanglers, which leave out different namespaces and spell lambdas,
# numbers and types that repeat differently.
# An identifier with its namespaces, or a number with its suffix.
_PART = re.compile(r"(?:\w+::)*(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)[ul]*")
_UNNAMED = re.compile(r"<unnamed>::|\(anonymous namespace\)::")
# How one of the two says what the other says by a sign, or not at all.
_SAID_OTHERWISE = {"instance", "void", "const", "unsigned", "long", "int", "templates"}


def shortened(name: str) -> str:
    """Return a kernel's name without its parameters: those of a function come last, and templates may have some too."""
    if not name.endswith(")"):
        return name
    depth = 0
    for place in range(len(name) - 1, -1, -1):
        depth += (name[place] == ")") - (name[place] == "(")
        if depth == 0:
            return name[:place].removeprefix("void ").strip() or name
    return name


def paired(names: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Map the names of kernels to other names of the same kernels, as two demanglers write them; no uncertain pairs."""
    found: dict[str, str] = {}
    for key in (lambda name: name, _words, _function):
        left = [name for name in names if name not in found]
        free = [other for other in others if other not in found.values()]
        found |= _alone(left, free, key)
    return found


def _alone(names: list[str], others: list[str], key: Callable[[str], Hashable]) -> dict[str, str]:
    """Return the pairs whose key no second name has, on either side."""
    mine, theirs = (Counter(map(key, each)) for each in (names, others))
    once = {key(other): other for other in others if theirs[key(other)] == 1}
    return {name: once[key(name)] for name in names if mine[key(name)] == 1 and key(name) in once}


def _words(name: str) -> tuple[str, ...]:
    """Return a name's identifiers without namespaces and its numbers, in order."""
    parts = (match["name"] or match["number"] for match in _PART.finditer(_UNNAMED.sub("", name)))
    return tuple(part for part in parts if part not in _SAID_OTHERWISE)


def _function(name: str) -> str:
    """Return the name of the function itself, without namespaces and arguments of templates."""
    words = _words(_UNNAMED.sub("", name).partition("<")[0])
    return words[-1] if words else name
