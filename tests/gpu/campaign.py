"""Run files of GPU tests one by one, in pieces of a few minutes, and go on where the last piece stopped.

    python -m tests.gpu.campaign --state gpu_tests.jsonl             # one piece of all files; call it again to go on
    python -m tests.gpu.campaign --state gpu_tests.jsonl --seconds 480 tests/gpu/test_types.py tests/gpu/test_fp8.py
    python -m tests.gpu.campaign --state gpu_tests.jsonl --report    # what has passed and what is left

Before a file's first test, the kernels that it needs are listed without the GPU and compiled side by side
(``foreseen.py``). The state has one JSON line for each part of a file that ran: {"file", "ran" (tests so far), "done",
"passed", "failed", "skipped", "failures": {test: the end of what it said}, "seconds", "status", "commit", "chip",
"date", versions}. Files that are done at this commit on this GPU do not run again. A test that ends its process, or
takes a minute longer than the piece, counts as failed, and the next piece goes on after it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_LEAST, _PATIENCE = 20.0, 60.0  # seconds that must be left for a file to begin, and that its last test may take longer
_LINES, _CHARACTERS = 15, 1500  # the most that is kept of what a failed test said
_UNFINISHED = "it did not end: it ended its process, or the time was over (status 124)"


class Part:
    """A plugin that runs the tests of a file from one of them on, until the time is over."""

    def __init__(self, skipped: int, seconds: float, notes: Path) -> None:
        self.ran, self.ends, self.notes = skipped, time.monotonic() + seconds, notes
        self.counts, self.failures, self.left = Counter[str](), dict[str, str](), 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what ran before."""
        items[:] = items[self.ran :]
        self.left = len(items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note which test runs, should it end the process."""
        unfinished = self.failures | {nodeid: _UNFINISHED}
        self._write(unfinished, failed=self.counts["failed"] + 1, ran=self.ran + 1)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a result."""
        if report.failed:
            text = "\n".join(report.longreprtext.splitlines()[-_LINES:])
            self.failures[report.nodeid] = text[-_CHARACTERS:]
        if report.failed or report.skipped or report.when == "call":
            self.counts[report.outcome] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Stop after a test if the time is over."""
        found = yield
        self.ran, self.left = self.ran + 1, self.left - 1
        self._write(self.failures)
        if time.monotonic() > self.ends and self.left:
            item.session.shouldstop = "the piece is over"
        return found

    def _write(self, failures: dict[str, str], **changed: int) -> None:
        counts = {name: self.counts[name] for name in ("passed", "failed", "skipped")}
        found = {"ran": self.ran, "done": not self.left, **counts, **changed, "failures": failures}
        self.notes.write_text(json.dumps(found))


def part(path: str, skipped: int, seconds: float, notes: Path) -> int:
    """Run a part of a file in this process."""
    return pytest.main(["-q", "--tb=short", "-p", "no:cacheprovider", path], [Part(skipped, seconds, notes)])


def compile_ahead(path: str, chip: str, seconds: float) -> None:
    """Compile what the tests of a file need, as far as the time goes."""
    with tempfile.TemporaryDirectory() as folder:
        kernels, ends = f"{folder}/kernels.json", time.monotonic() + seconds
        pytest_command = ["-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "tests.gpu.foreseen", path]
        commands = (
            ([*pytest_command, "--foreseen", kernels, "--gpu", chip], os.environ | {"CUDA_VISIBLE_DEVICES": ""}),
            (["-m", "tests.gpu.foreseen", kernels], dict(os.environ)),
        )
        for command, environment in commands:
            left = max(1.0, ends - time.monotonic())
            try:
                run = [sys.executable, *command]
                subprocess.run(run, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, timeout=left)
            except subprocess.TimeoutExpired:
                print(f"{path}: its kernels are not all compiled", flush=True)


def run(path: str, skipped: int, seconds: float, chip: str | None = None) -> dict[str, Any]:
    """Run a file from a test on in a process of its own; return what came of it."""
    began = time.monotonic()
    if not skipped and chip is not None:
        compile_ahead(path, chip, seconds)
    with tempfile.TemporaryDirectory() as folder:
        notes, left = Path(folder, "notes.json"), max(1.0, seconds - (time.monotonic() - began))
        command = [sys.executable, "-m", "tests.gpu.campaign", "--part", path, str(skipped), str(left), str(notes)]
        try:
            status = subprocess.run(command, cwd=ROOT, timeout=left + _PATIENCE).returncode
        except subprocess.TimeoutExpired:
            status = 124
        nothing = {"ran": skipped, "done": status in (0, 5), "passed": 0, "failed": 0, "skipped": 0, "failures": {}}
        found = json.loads(notes.read_text()) if notes.exists() else nothing
    return {"file": path, **found, "status": status, "seconds": round(time.monotonic() - began, 1)}


def about() -> dict[str, Any]:
    """Return what results depend on."""
    import torch

    from benchmarks import harness

    return {"commit": harness.commit(), **harness.about("cuda" if torch.cuda.is_available() else "cpu")}


def read(state: Path) -> list[dict[str, Any]]:
    """Return the lines of a state."""
    return [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []


def report(lines: Sequence[dict[str, Any]]) -> int:
    """Print the sum of each file, and why tests failed; return how many did, or how many files are not done."""
    bad = 0
    for path in dict.fromkeys(line["file"] for line in lines):
        mine = [line for line in lines if line["file"] == path]
        sums = {name: sum(line[name] for line in mine) for name in ("passed", "failed", "skipped", "seconds")}
        print(path, "done" if mine[-1]["done"] else f"to go on after {mine[-1]['ran']}", sums)
        for line in mine:
            for name, text in line["failures"].items():
                print(f"    failed: {name}", textwrap.indent(text, " " * 8), sep="\n")
        bad += sums["failed"] + (not mine[-1]["done"])
    return bad


def main() -> int:
    """Run one piece of a campaign."""
    if sys.argv[1:2] == ["--part"]:
        path, skipped, seconds, notes = sys.argv[2:]
        return part(path, int(skipped), float(seconds), Path(notes))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of tests, by default all of tests/gpu")
    parser.add_argument("--state", type=Path, required=True, help="file of JSON lines, which a piece goes on with")
    parser.add_argument("--seconds", type=float, default=480.0, help="how long this piece may take")
    parser.add_argument("--report", action="store_true", help="print the state, and run nothing")
    args = parser.parse_args()
    if args.report:
        return min(1, report(read(args.state)))
    files = args.files or [str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests/gpu").glob("test_*.py"))]
    here, ends = about(), time.monotonic() + args.seconds
    chip = None if here["chip"].startswith("CPU") else here["chip"]
    mine = [line for line in read(args.state) if (line["commit"], line["chip"]) == (here["commit"], here["chip"])]
    for path in files:
        last = next((line for line in reversed(mine) if line["file"] == path), {"ran": 0, "done": False})
        left = ends - time.monotonic()
        if not last["done"] and left > _LEAST:
            mine.append(run(path, last["ran"], left, chip) | here)
            with args.state.open("a") as state:
                state.write(json.dumps(mine[-1]) + "\n")
    return min(1, report([line for line in mine if line["file"] in files]))


if __name__ == "__main__":
    sys.exit(main())
