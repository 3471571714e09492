"""What became of processes that a test had started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

# The beginning of a script that needs no PyTorch, which takes two seconds to import: the command line does without too.
WITHOUT_PYTORCH = 'import sys; sys.argv[0] = "cutlass-ops"\n'


def alive(group: int) -> Iterator[int]:
    """The processes of a group. What is dead and waits for init to take notice of it is none."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found = stat.read_text(errors="replace").rpartition(") ")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX" and int(found) == group:
            yield int(stat.parent.name)


def ended(pid: int) -> bool:
    """Whether a process ends soon."""
    return _soon(lambda: not _runs(pid))


def group_ended(group: int) -> bool:
    """Whether all processes of a group end soon."""
    return _soon(lambda: not list(alive(group)))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _soon(holds) -> bool:
    # On a busy machine even what was killed takes its time. What these wait for would go on for ten minutes.
    deadline = time.monotonic() + 120
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
