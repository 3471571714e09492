"""Kernel times by torch.profiler, in a process of its own: ``python -m cutlass_ops.tools.profile.tracing``.

It needs no rights and barely slows the program, and it counts nothing but time.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from cutlass_ops.base import programs
from cutlass_ops.base.errors import MeasuringError
from cutlass_ops.tools.profile.counters import Kernel, shortened


def trace(program: Sequence[str], timeout: float, env: Mapping[str, str] | None = None) -> list[Kernel]:
    """Run a Python program under torch.profiler; return its kernels' times, longest first."""
    with tempfile.TemporaryDirectory(prefix="cutlass-ops-") as folder:
        out = Path(folder) / "times.json"
        command = [sys.executable, "-m", "cutlass_ops.tools.profile.tracing", str(out), *program]
        status, said = programs.ask(command, timeout, env=env)
        if status != 0 or not out.exists():
            raise MeasuringError(
                f"the program failed under torch.profiler (exit status {status}):\n{programs.last_lines(said)}"
            )
        found = json.loads(out.read_text())
    kernels = [Kernel(x["name"], x["calls"], x["microseconds"], tuple(x["capability"])) for x in found]
    return sorted(kernels, key=lambda kernel: -kernel.microseconds)


def main() -> None:
    """Run a script or module under the profiler, and write its kernels' times as JSON."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    out, *program = sys.argv[1:]
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as found:
        _run(program)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in found.events() or ():
        if event.device_type.name == "CUDA" and event.device_time_total > 0:
            times[shortened(event.name)].append(event.device_time_total)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    rows = [
        {"name": name, "calls": len(each), "microseconds": sum(each), "capability": capability}
        for name, each in times.items()
    ]
    Path(out).write_text(json.dumps(rows))


def _run(program: list[str]) -> None:
    """Run it as Python would; a program that ends by sys.exit(0) has ended well."""
    try:
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path.insert(0, str(Path(program[0]).resolve().parent))
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as exc:
        if exc.code not in (None, 0):
            raise


if __name__ == "__main__":
    main()
