"""Processes that tests start, and what became of them."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

# The beginning of a script that needs no PyTorch, which takes two seconds to import: the command line does without too.
WITHOUT_PYTORCH = 'import sys; sys.argv[0] = "cutlass-ops"\n'

# Scripts run in forks of this process, which has PyTorch and nothing of this library.
_WITH_PYTORCH = """
import json, os, sys, traceback
import torch

def run(script, arguments, out, err):
    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.argv[1:] = arguments
    try:
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    except SystemExit as exc:
        return int(exc.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        status = run(*json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@lru_cache(maxsize=1)
def _with_pytorch() -> subprocess.Popen[str]:
    # Without byte code files: writing those is Python's own habit. PyTorch warns of that one version of Python.
    quiet = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
    command = [sys.executable, "-B", "-W", quiet, "-c", _WITH_PYTORCH]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.stdin.close)
    return server


def run_with_pytorch(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own that has imported PyTorch, and nothing of this library.

    All share one import of PyTorch, which takes two seconds. The environment is that of the first.
    """
    server = _with_pytorch()
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder, name) for name in ("out", "err"))
        server.stdin.write(json.dumps([script, list(map(str, arguments)), str(out), str(err)]) + "\n")
        server.stdin.flush()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess([script], status, out.read_text(), err.read_text())


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
