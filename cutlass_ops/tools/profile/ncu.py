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

# Where CUDA's installers put it, besides PATH.
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
    """Why there are no counters.

    Attributes
    ----------
    why : str
        The reason, and what to do.
    command : tuple of str
        The command to run once that is done.
    """

    why: str
    command: tuple[str, ...]

    def __str__(self) -> str:
        return f"no counters: {self.why}\nOn a machine with a GPU, run:\n  {shlex.join(self.command)}"


@dataclass(frozen=True)
class Request:
    """What to profile.

    Attributes
    ----------
    program : tuple of str
        The program and its arguments.
    marked : bool
        Whether the program marks what to profile by cudaProfilerStart and Stop.
    launches, skip : int, optional
        How many launches to profile, after how many that match.
    kernels : str, optional
        A regular expression that names of kernels must match.
    """

    program: tuple[str, ...]
    marked: bool = False
    launches: int | None = None
    skip: int | None = None
    kernels: str | None = None

    def command(self, ncu: str, log: str | None) -> tuple[str, ...]:
        """Return ncu's command line. Clocks stay as they are: changing them needs more rights, and slows others."""
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
    """Run a program under ncu; return ncu's CSV, or why there is none.

    Parameters
    ----------
    request : Request
        The program.
    timeout : float
        Seconds until it is killed. ncu runs each kernel several times, so a program takes much longer.
    env : mapping of str to str, optional
        The program's environment.

    Raises
    ------
    TimeoutError
        If it took too long.
    """
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
