"""From what a user asks to a report: which program runs, by which profilers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from cutlass_ops.base import env, programs
from cutlass_ops.base.errors import ConfigError, MeasuringError, NoDeviceError
from cutlass_ops.declare import spelling
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.tools.profile import ncu
from cutlass_ops.tools.profile.counters import Kernel, kernels, paired
from cutlass_ops.tools.profile.ncu import Refusal, Request
from cutlass_ops.tools.profile.report import Report, chip_of
from cutlass_ops.tools.profile.tracing import trace

# Launches of an op that are counted.
_CALLS = 3


@dataclass(frozen=True)
class Asked:
    """What to run and how."""

    target: str  # a script, or an op
    arguments: tuple[str, ...]  # the script's, or the op's problem
    dtype: str = "bf16"  # of an op's A and B
    kernels: str | None = None  # a regular expression of names
    launches: int | None = None  # how many to count
    skip: int | None = None  # how many to skip first
    ncu: bool = True  # whether to run it under ncu
    traced: bool = True  # whether to run it under torch.profiler
    timeout: float = 1800.0  # seconds until a run is ended

    @property
    def is_script(self) -> bool:
        """Whether the target is a script, not an op."""
        return spelling.is_script(self.target)

    def program(self) -> tuple[str, ...]:
        """Return what Python runs. Raises ValueError for a missing script, an unknown op, or an op without problem."""
        if self.is_script:
            if not Path(self.target).is_file():
                raise ConfigError(f"{self.target} is not a file: give a Python script, or an op and MxNxK")
            return (self.target, *self.arguments)
        op = spelling.op_of(self.target)
        problem = spelling.problem_of(self.arguments)
        return ("-m", "cutlass_ops.tools.workload", op, str(problem), self.dtype, str(_CALLS))

    def request(self, python: str) -> Request:
        """Return what ncu runs, by this Python. For an op, only the marked launches count."""
        program = (python, *self.program())
        return Request(program, not self.is_script, self.launches, self.skip, self.kernels)


def run(asked: Asked, save: Path | None = None) -> tuple[Report, Refusal | None]:
    """Run a program under the profilers; return a report, and why it has no counters if it has none."""
    if not torch.cuda.is_available():
        here = Refusal("there is no CUDA device here", asked.request("python").command("ncu", "counters.csv"))
        raise NoDeviceError(f"{here}\non a machine with a GPU, and here: cutlass-ops profile --csv counters.csv")
    request = asked.request(sys.executable)
    chip = torch.cuda.get_device_properties(0).name
    waiting = os.environ | {env.STAND_IN.name: "0"}  # what counts are the kernels that serve a warm program
    times = _first_run(asked, waiting)
    # ncu would wait for compilers, and for what they leave running: all that the program needs is compiled by now.
    counted = ncu.count(request, asked.timeout, waiting | {env.JIT.name: "0"}) if asked.ncu else None
    if not isinstance(counted, str):
        times = times or trace(asked.program(), asked.timeout, waiting)
        return Report(tuple(times), "torch.profiler", {}, chip_of(times, _known(chip))), counted
    if save is not None:
        save.write_text(counted)
    found, traced = kernels(counted), {kernel.name: kernel.microseconds for kernel in times}
    same = paired([kernel.name for kernel in found], traced)
    return Report(
        tuple(found), "ncu", {name: traced[other] for name, other in same.items()}, chip_of(found, _known(chip))
    ), None


def _first_run(asked: Asked, environment: Mapping[str, str]) -> list[Kernel]:
    """Run the program unchanged, under torch.profiler if that is wanted; return its kernels' times."""
    if asked.traced:
        return trace(asked.program(), asked.timeout, environment)
    status, said = programs.ask((sys.executable, *asked.program()), asked.timeout, env=environment)
    if status != 0:
        raise MeasuringError(f"the program failed (exit status {status}):\n{programs.last_lines(said)}")
    return []


def read(path: Path, device: str | None = None) -> Report:
    """Return the report of ncu's CSV that was recorded elsewhere."""
    found = kernels(path.read_text(errors="replace"))
    return Report(tuple(found), "ncu", {}, chip_of(found, device))


def _known(name: str) -> str | None:
    return name if name in CHIPS else None
