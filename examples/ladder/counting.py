"""What Nsight Compute counts of each rung's kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cutlass_ops.tools.profile import counters, ncu

from .problem import Shape

TIMEOUT = 600.0  # seconds


class NotCounted(Exception):
    """There are no counters. The message says why, and what to do."""


def count(names: Sequence[str], shape: Shape, folder: Path, timeout: float = TIMEOUT) -> dict[str, dict[str, Any]]:
    """Run each rung once under ncu; return the counters of its kernel by the rung's name.

    Parameters
    ----------
    names : sequence of str
        The rungs, which must launch one kernel each at this shape.
    shape : Shape
        The problem.
    folder : Path
        Where the rungs are compiled already: nothing is compiled under ncu.
    timeout : float
        Seconds until ncu is ended.

    Raises
    ------
    NotCounted
        If ncu is not installed or may not count, or a rung launches more than one kernel.
    """
    program = (sys.executable, "-m", "examples.ladder", "--once", "--folder", str(folder))
    program += ("--shapes", str(shape), "--rungs", *names)
    found = ncu.count(ncu.Request(program, marked=True), timeout, os.environ | {"CUTLASS_OPS_JIT": "0"})
    if isinstance(found, ncu.Refusal):
        raise NotCounted(str(found))
    launches = counters.launches(found)
    if len(launches) != len(names):
        raise NotCounted(
            f"{len(names)} rungs launched {len(launches)} kernels, so it is not clear which is whose: "
            f"{', '.join(launch.name[:40] for launch in launches)}"
        )
    return {name: asdict(launch) for name, launch in zip(names, launches, strict=True)}
