"""Run a call of each declared kernel under the tools of compute-sanitizer, in pieces of a few minutes.

    python -m tests.gpu.sanitizer --state sanitizer.jsonl            # one piece; call it again to go on
    python -m tests.gpu.sanitizer --state sanitizer.jsonl --tools memcheck synccheck --only grouped
    python -m tests.gpu.sanitizer --state sanitizer.jsonl --report   # what the tools reported, and what is left

The kernels are those that GPU tests know by name, of each form, kind and type. A process of a tool makes the calls of a
few kernels at edges of their tiles, and compares them with float64. It looks at our kernels alone. The state has a line
for each such process: {"tool", "kernels", "status" (0, or 99 if the tool reported something), "errors", "text" (the end
of what it printed), "seconds", "commit", "chip", "date", versions}. Kernels that a tool has seen at this commit on this
GPU do not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cutlass_ops.declare.spec import KernelSpec
from tests.gpu.campaign import ROOT, about, read

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Whole and partial tiles, and several steps of K.
SHAPE = (131, 200, 328)
# What cases of other forms have besides.
FORMS: dict[str, dict[str, Any]] = {
    "batched": {"lead": (2,)},
    "grouped": {"sizes": (70, 0, 61)},
    "ragged_k": {"sizes": (64, 0, 136)},
}
_EACH = 12  # kernels of a process: importing takes a tool half a minute
_LIMIT, _TEXT = 240.0, 3000  # seconds and characters
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_REPORTED, _LATE = 99, 124


def calls(names: Iterable[str]) -> None:
    """Make a call of each kernel of some names: what a tool watches."""
    from tests.gpu import cases, kernels

    known = kernels.named()
    for name in names:
        for spec in known[name]:
            cases.check(spec, SHAPE, **FORMS.get(spec.form.name, {}))


def command(tool: str, names: Sequence[str]) -> list[str]:
    """Return the command that has a tool watch calls."""
    options = ["--error-exitcode", str(_REPORTED), "--print-limit", "20", "--check-api-memory-access", "no"]
    ours = ["--kernel-regex", "kns=_sm_"]  # a part of the names of our kernels
    return [
        "compute-sanitizer",
        "--tool",
        tool,
        *options,
        *ours,
        sys.executable,
        "-m",
        __spec__.name,
        "--calls",
        *names,
    ]


def run(tool: str, names: Sequence[str]) -> dict[str, Any]:
    """Have a tool watch the calls of some kernels; return what it reported."""
    began = time.monotonic()
    # With memory of its own for each tensor, a tool sees where each ends.
    around = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command(tool, names), cwd=ROOT, env=around, capture_output=True, text=True, timeout=_LIMIT, errors="replace"
        )
        status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as exc:
        said = exc.stdout or b""
        status, text = _LATE, said if isinstance(said, str) else said.decode(errors="replace")
    errors = sum(int(a or b) for a, b in _ERRORS.findall(text))
    found = {"tool": tool, "kernels": list(names), "status": status, "errors": errors, "text": text[-_TEXT:]}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def left(
    tools: Iterable[str], names: Sequence[str], lines: Iterable[dict[str, Any]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield tools with the kernels that each has still to see, a few at a time."""
    seen = {(line["tool"], name) for line in lines if line["status"] != _LATE for name in line["kernels"]}
    for tool in tools:
        rest = [name for name in names if (tool, name) not in seen]
        for at in range(0, len(rest), _EACH):
            yield tool, rest[at : at + _EACH]


def report(lines: Sequence[dict[str, Any]]) -> int:
    """Print what each tool reported; return how many processes did not end well."""
    for tool in dict.fromkeys(line["tool"] for line in lines):
        mine = [line for line in lines if line["tool"] == tool]
        bad = [line for line in mine if line["status"]]
        count = sum(len(line["kernels"]) for line in mine)
        print(f"{tool}: {count} kernels, {sum(line['errors'] for line in mine)} errors, {len(bad)} processes failed")
        for line in bad:
            print(f"    {' '.join(line['kernels'])}: status {line['status']}\n{line['text'][-1000:]}")
    return sum(bool(line["status"]) for line in lines)


def compiled(names: Iterable[str]) -> list[KernelSpec]:
    """Compile the kernels of some names side by side; return them."""
    from cutlass_ops.compilation.builder import build_many
    from tests.gpu import kernels

    known = kernels.named()
    specs = list(dict.fromkeys(spec for name in names for spec in known[name]))
    build_many(specs)
    return specs


def main() -> int:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="file of JSON lines, which a piece goes on with")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--only", default="", help="a part of the names of kernels")
    parser.add_argument("--seconds", type=float, default=480.0, help="how long this piece may take")
    parser.add_argument("--report", action="store_true", help="print the state, and run nothing")
    parser.add_argument("--calls", nargs="+", metavar="NAME", help="make the calls of these kernels, and nothing else")
    args = parser.parse_args()
    if args.calls:
        calls(args.calls)
        return 0
    if args.state is None:
        parser.error("pass --state")
    if args.report:
        return min(1, report(read(args.state)))
    from tests.gpu import kernels

    here, ends = about(), time.monotonic() + args.seconds
    mine = [line for line in read(args.state) if (line["commit"], line["chip"]) == (here["commit"], here["chip"])]
    names = [name for name in kernels.named() if args.only in name]
    compiled(names)
    for tool, some in left(args.tools, names, mine):
        if time.monotonic() + _LIMIT / 2 > ends:
            break
        mine.append(run(tool, some) | here)
        with args.state.open("a") as state:
            state.write(json.dumps(mine[-1]) + "\n")
    return min(1, report(mine))


if __name__ == "__main__":
    sys.exit(main())
