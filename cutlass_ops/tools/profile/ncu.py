"""Find and run Nsight Compute, and say what to do where it cannot count."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.base import programs
from cutlass_ops.tools.profile.counters import METRICS, SECTIONS

# Folders of CUDA's installers, in addition to PATH.
_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")

_PERMISSION = "ERR_NVGPUCTRPERM"
# What ncu prints when it cannot start on a machine, such as some virtual ones.
_UNUSABLE = ("Failed to initialize the profiler", "LibraryNotLoaded", "Profiling is not supported", "DriverNotLoaded")
_NO_KERNELS = "No kernels were profiled"

ADMINISTRATOR = (
    "hardware counters are for administrators on this machine. Ask the administrator for one of these:\n"
    "  - on the host: put 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' into a file of /etc/modprobe.d and\n"
    "    reload the nvidia module or reboot\n"
    "  - in a container: start it with --cap-add=SYS_ADMIN\n"
    "  - to run the command below as root: sudo -E"
)
INSTALL = (
    "Nsight Compute (ncu) is not installed, or not in PATH. It comes with the CUDA toolkit: apt install "
    "nsight-compute, or conda install -c nvidia nsight-compute"
)


@dataclass(frozen=True)
class Refusal:
    """Why there are no counters."""

    why: str  # the reason, and what to do
    command: tuple[str, ...]  # what to run once that is done

    def __str__(self) -> str:
        return f"no counters: {self.why}\nOn a machine with a GPU, run:\n  {shlex.join(self.command)}"


@dataclass(frozen=True)
class Request:
    """What to profile."""

    program: tuple[str, ...]  # with its arguments
    marked: bool = False  # whether the program marks what to profile by cudaProfilerStart and Stop
    launches: int | None = None  # how many to profile; this and ``skip`` count those that match ``kernels``
    skip: int | None = None  # how many to skip first
    kernels: str | None = None  # a regular expression that names of kernels must match

    def command(self, ncu: str, log: str | None) -> tuple[str, ...]:
        """Return ncu's command line. Clocks are not changed: that needs more rights, and slows others."""
        found = [ncu, "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
        found += ["--target-processes", "all"]
        for section in SECTIONS:
            found += ["--section", section]
        found += ["--metrics", ",".join(METRICS)]
        if self.marked:
            found += ["--profile-from-start", "off"]
        for option, value in (("--launch-skip", self.skip), ("--launch-count", self.launches)):
            if value is not None:
                found += [option, str(value)]
        if self.kernels is not None:
            found += ["--kernel-name", f"regex:{self.kernels}"]
        if log is not None:
            found += ["--log-file", log]
        return (*found, *self.program)


def find() -> str | None:
    """Return the path of ncu, or None."""
    return shutil.which("ncu") or next((place for place in _PLACES if os.access(place, os.X_OK)), None)


def count(request: Request, timeout: float, env: Mapping[str, str] | None = None) -> str | Refusal:
    """Run a program under ncu; return ncu's CSV, or why there is none."""
    ncu = find()
    if ncu is None:
        return Refusal(INSTALL, request.command("ncu", "counters.csv"))
    with tempfile.TemporaryDirectory(prefix="cutlass-ops-") as folder:
        log = Path(folder) / "counters.csv"
        status, said = programs.ask(request.command(ncu, str(log)), timeout, env=env)
        text = log.read_text(errors="replace") if log.exists() else ""
    return judged(request, ncu, status, text, said)


def judged(request: Request, ncu: str, status: int, text: str, said: str) -> str | Refusal:
    """Return the CSV if there is one, else why not, from what ncu and the program printed."""
    whole, command = f"{text}\n{said}", request.command(ncu, "counters.csv")
    if _PERMISSION in whole:
        return Refusal(ADMINISTRATOR, command)
    if any(sign in whole for sign in _UNUSABLE):
        return Refusal(f"ncu does not work on this machine: {programs.last_lines(whole)}\nUse another machine", command)
    if '"ID"' in text:
        return text
    if _NO_KERNELS in whole and status == 0:
        return Refusal("no kernel ran, or none that was asked for: check --kernels, --skip and --launches", command)
    return Refusal(f"the program failed (exit status {status}):\n{programs.last_lines(said or text)}", command)
