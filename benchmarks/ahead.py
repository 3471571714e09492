"""Compiles what a campaign's jobs need before there is a GPU, so that the GPU's time goes into running.

    python benchmarks/ahead.py --device "NVIDIA H200" --only training fp8_blocks backward_tests

Each job begins as it would beside the GPU that is named, in a process that pretends to have it. It compiles its kernels
into the user's store, and ends where it first needs the GPU itself. For tests, these are the kernels that
`tests/gpu/kernels.py` knows. A kernel that a job compiles only later is not known here.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import campaign
import torch

from tests.gpu import foreseen

_TESTS = re.compile(r"tests/gpu/(test_\w+)\.py")
ROOT = Path(__file__).parents[1]


def begin(words: list[str]) -> None:
    """Compile what a command of Python needs, and return where it would need the GPU."""
    tests = [found[1] for word in words for found in _TESTS.finditer(word)]
    if tests:
        from tests.gpu import kernels

        kernels.compile_known(tests)
        return
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    try:
        runpy.run_path(words[0], run_name="__main__")
    except (AssertionError, RuntimeError) as exc:
        where = traceback.extract_tb(exc.__traceback__)
        if not any(frame.filename.startswith(str(Path(torch.__file__).parent)) for frame in where):
            raise
        ours = next(frame for frame in reversed(where) if frame.filename.startswith(str(ROOT)))
        print(f"needs the GPU at {Path(ours.filename).name}:{ours.lineno}", flush=True)


def main() -> None:
    """Compile for jobs, one after the other; each has all processors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="NVIDIA H200")
    parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="jobs of campaign.toml, in this order")
    parser.add_argument("--command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.command:
        pretend(args.device)
        begin(args.command)
        return
    with tempfile.TemporaryDirectory() as out:
        for job in campaign.jobs(campaign.PLAN, args.only):
            program, *words = shlex.split(job.command.format(out=out))
            known = program == "python" and (words[0].endswith(".py") or _TESTS.search(job.command))
            print(f"== {job.name}{'' if known else ': what it needs is not known before'}", flush=True)
            if known:
                command = [sys.executable, __file__, "--device", args.device, "--command", *words]
                path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
                subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})


if __name__ == "__main__":
    main()
