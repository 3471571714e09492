"""Commands that time programs and ops.

Each function prints its answer, as one JSON value or as lines, and returns the exit code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cutlass_ops.base import writable
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Major
from cutlass_ops.tools.bench import benching, rivals
from cutlass_ops.tools.commands.common import show
from cutlass_ops.tools.profile import plotting, profiling
from cutlass_ops.tuner import comparing


def profile(
    target: str | None,
    arguments: list[str],
    *,
    dtype: str,
    kernels: str | None,
    launches: int | None,
    skip: int | None,
    counters: Path | None,
    device: str | None,
    save: Path | None,
    plots: Sequence[Path],
    ncu: bool,
    traced: bool,
    timeout: float,
    as_json: bool,
) -> int:
    """Print what a program's kernels do; 4 without counters."""
    for path in plots:
        plotting.require(path)
    if counters is not None or target is None:
        report, refusal = profiling.read(counters or Path(), device), None
    else:
        asked = profiling.Asked(target, tuple(arguments), dtype, kernels, launches, skip, ncu, traced, timeout)
        report, refusal = profiling.run(asked, save)
    for path in plots:
        if report.chip is None or not report.points():
            raise ConfigError(f"{path} was not drawn: a roofline needs counters of ncu, and a known GPU (--device)")
        plotting.roofline(report.points(), report.chip, path)
    value = report.to_json() | ({"refusal": refusal.why, "command": list(refusal.command)} if refusal else {})
    show(as_json, value, *report.lines(), *(["", str(refusal)] if refusal else []))
    return 4 if refusal else 0


def bench(
    op: str,
    problems: Sequence[Problem],
    dtype: str,
    a: Major,
    b: Major,
    *,
    against: Sequence[str] | None,
    rounds: int | None,
    out: Path | None,
    html: Path | None,
    as_json: bool,
) -> int:
    """Time an op against other ways, and print tables."""
    for path in (out, html):
        if path is not None:
            writable.require_file(path)
    found = benching.bench(
        op, [p.extents for p in problems], dtype=dtype, a=a, b=b, against=against or rivals.NAMES,
        rounds=comparing.ROUNDS if rounds is None else rounds,
    )  # fmt: skip
    value = found.to_json()
    if out is not None:
        out.write_text(json.dumps(value, indent=1) + "\n")
    if html is not None:
        html.write_text(found.html())
    show(as_json, value, *found.lines())
    return 0
