"""Run a call of kernels of each sort under the tools of compute-sanitizer, in pieces of a few minutes.

    python -m tests.gpu.sanitizer --state sanitizer.jsonl            # one piece; call it again to go on
    python -m tests.gpu.sanitizer --state sanitizer.jsonl --tools memcheck synccheck --only grouped
    python -m tests.gpu.sanitizer --state sanitizer.jsonl --report   # what the tools reported, and what is left

The kernels are one for each family of :mod:`tests.gpu.fuzz.exact`, those of :mod:`tests.gpu.exact_calls`, and one of
each sort that GPU tests know by name: of each form, kind, schedule, type and way to load, and with a second product or
without. A process of a tool makes the
calls of a few kernels at edges of their tiles, compares them with float64, and looks at our kernels alone, except for
initcheck, which must see who wrote what they read. Its kernels are compiled just before it, without the tool.

The state has a line for each such process: {"tool", "kernels", "status" (0, 99 if the tool reported something, 124 if
it took too long), "errors", "known" (how many of them are known to be false, by their cause), "text" (what the tool
printed, with the instruction at each place that it names), "seconds", "commit", "chip", "date", versions}. Kernels that
a tool has seen at this commit on this GPU do not run again. Where a process takes too long, halves of its kernels do.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.base import elf, env, sass
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.spec import KernelSpec
from tests.gpu import edits, exact_calls
from tests.gpu.campaign import ROOT, about, read

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Whole and partial tiles, and several steps of K.
SHAPE = (131, 200, 328)
# What cases of other forms have besides.
FORMS: dict[str, list[dict[str, Any]]] = {
    "batched": [{"lead": (2,)}],
    "grouped": [{"sizes": (70, 0, 61)}, {"sizes": (70, 0, 61), "room": 70}],
    "ragged_k": [{"sizes": (64, 0, 136)}],
}
# What is known to be false: a tool, what its report says, and the cause. Others found the first one in their own
# kernels: racecheck takes a bulk copy to be a write by the thread that issues it, and knows no order by the mbarrier
# that the copy completes. It is silent about copies by a tensor map, which no thread issues in its view.
KNOWN = (("racecheck", r"Race reported between .*\(UBLKCP\)", "a bulk copy, whose mbarrier racecheck does not follow"),)
_EACH = 12  # kernels of a process: importing takes a tool half a minute
_LIMIT, _TEXT = 240.0, 20_000  # seconds and characters
_ERRORS = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_PLACE = re.compile(r"\b(\w+)(?:\([^()]*\))?\+0x([0-9a-f]+)")
_REPORTED, _LATE = 99, 124


@functools.cache
def targets() -> dict[str, list[KernelSpec]]:
    """Return kernels by the names of their tests, one of each sort."""
    from tests.gpu import kernels

    found: dict[Any, tuple[str, list[KernelSpec]]] = {}
    for name, specs in kernels.named().items():
        found.setdefault(frozenset(map(sort, specs)), (name, specs))
    return dict(found.values())


def sort(spec: KernelSpec) -> tuple[Any, ...]:
    """Return what a kernel has in common with those that a tool would see the same in."""
    config = spec.config
    ways = ("schedule", "scheduler", "means", "realign", "stream_k", "by_tile")
    options = (*(getattr(config, way, None) for way in ways), getattr(config, "split_k", 1) > 1)
    scaled = spec.a.scaling is not None
    return (spec.form.name, config.arch, *options, spec.a.dtype.name, scaled, bool(spec.epilogue.products))


@functools.cache
def families() -> dict[str, Any]:
    """Return families of drawn calls by name."""
    from tests.gpu.fuzz import __main__ as fuzz

    return {
        f"{what}: {each.name}": each
        for what, all_of in fuzz.WHAT.items()
        for each in all_of
        if what.startswith("exact_")
    }


def specs_of(name: str) -> list[KernelSpec]:
    """Return the kernels of a name."""
    from cutlass_ops.operand.call import device_of
    from tests.gpu.fuzz.case import Kernels

    family = families().get(name)
    if family is None:
        return targets()[name]
    return list(Kernels.drawn(family.usual(), device_of(torch.device("cuda", 0)), 0, 1, few_rows=family.few_rows).specs)


def calls(names: Iterable[str]) -> None:
    """Make a call of each kernel of some names: what a tool watches."""
    from tests.gpu import cases

    for name in names:
        if name in exact_calls.CALLS:
            exact_calls.check(name, 0)
            continue
        family = families().get(name)
        for spec in specs_of(name):
            if family is None:
                for more in FORMS.get(spec.form.name, [{}]):
                    cases.check(spec, SHAPE, **more)
                continue
            case = next(case for seed in range(100) if (case := drawn(family, seed)).refused is None)
            why = case.why_wrong(case.by(spec), case.wanted())
            assert why is None, f"{name}: {why}"


def drawn(family: Any, seed: int) -> Any:
    """Return a drawn call."""
    torch.manual_seed(seed)
    return family.draw(random.Random(seed), "cuda")


def command(tool: str, names: Sequence[str]) -> list[str]:
    """Return the command that has a tool watch calls."""
    options = ["--error-exitcode", str(_REPORTED), "--print-limit", "100", "--check-api-memory-access", "no"]
    # A part of the names of our kernels. For initcheck, PyTorch's kernels must be seen to write what ours read.
    ours = [] if tool == "initcheck" else ["--kernel-regex", "kns=_sm_"]
    python = [sys.executable, "-m", __spec__.name, "--calls", *names]
    return ["compute-sanitizer", "--tool", tool, *options, *ours, *python]


def run(tool: str, names: Sequence[str]) -> dict[str, Any]:
    """Have a tool watch the calls of some kernels; return what it reported."""
    began = time.monotonic()
    libraries = compiled(names)
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
    text = with_instructions(text, libraries)
    known = Counter(
        cause for line in text.splitlines() for of, said, cause in KNOWN if of == tool and re.search(said, line)
    )
    found = {"tool": tool, "kernels": list(names), "status": status, "errors": errors, "known": dict(known)}
    return found | {"text": text[:_TEXT] + text[_TEXT:][-2000:], "seconds": round(time.monotonic() - began, 1)}


def with_instructions(text: str, libraries: Iterable[bytes]) -> str:
    """Return a report with the names of the instructions at the places that it names, as far as they are known."""
    code = {
        section.name.removeprefix(".text."): section.data
        for library in libraries
        for image in elf.gpu_images(library)
        for section in elf.sections(image)
        if section.executable
    }
    names = edits.NAMES | sass.OPCODES

    def named(place: re.Match[str]) -> str:
        at, instructions = int(place[2], 16), code.get(place[1], b"")
        if at + 8 > len(instructions):
            return place[0]
        (low,) = struct.unpack_from("<Q", instructions, at)
        return f"{place[0]} ({names.get(low & 0x1FF, 'another')})"

    return _PLACE.sub(named, text)


def left(
    tools: Iterable[str], names: Sequence[str], lines: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield tools with the kernels that each has still to see, a few at a time."""
    lines = list(lines)
    for tool in tools:
        mine = [line for line in lines if line["tool"] == tool]
        # One kernel that takes too long alone is not tried again.
        done = [line for line in mine if line["status"] != _LATE or len(line["kernels"]) == 1]
        seen = {name for line in done for name in line["kernels"]}
        late = {name: len(line["kernels"]) // 2 for line in mine if line["status"] == _LATE for name in line["kernels"]}
        rest = [name for name in names if name not in seen]
        while rest:
            count = min(late.get(name, _EACH) for name in rest[:_EACH])
            yield tool, rest[:count]
            rest = rest[count:]


def report(lines: Sequence[Mapping[str, Any]]) -> int:
    """Print what each tool reported; return how many processes did not end well."""
    for tool in dict.fromkeys(line["tool"] for line in lines):
        mine = [line for line in lines if line["tool"] == tool]
        count = len({name for line in mine for name in line["kernels"]})
        print(
            f"{tool}: {count} kernels, {sum(line['errors'] for line in mine)} errors, {sum(map(is_bad, mine))} failed"
        )
        known = sum((Counter(line["known"]) for line in mine), Counter[str]())
        for cause, often in known.items():
            print(f"    {often} known to be false: {cause}")
        for line in filter(is_bad, mine):
            print(f"    {' '.join(line['kernels'])}: status {line['status']}\n{line['text'][:3000]}")
    return sum(map(is_bad, lines))


def is_bad(line: Mapping[str, Any]) -> bool:
    """Return whether a process did not end well, for another cause than reports that are known to be false."""
    return line["status"] not in (0, _REPORTED) or line["errors"] > sum(line["known"].values())


def compiled(names: Iterable[str]) -> list[bytes]:
    """Compile the kernels of some names side by side; return their libraries."""
    specs = dict.fromkeys(spec for name in names if name not in exact_calls.CALLS for spec in specs_of(name))
    for name in filter(exact_calls.CALLS.__contains__, names):
        exact_calls.check(name, 0)  # compiles them
    return [artifact.read_library() for artifact in build_many(specs)]


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
    os.environ[env.STAND_IN.name] = "0"  # calls wait for their kernels
    here, ends = about(), time.monotonic() + args.seconds
    mine = [line for line in read(args.state) if (line["commit"], line["chip"]) == (here["commit"], here["chip"])]
    names = [name for name in (*exact_calls.CALLS, *families(), *targets()) if args.only in name]
    for tool, some in left(args.tools, names, mine):
        if time.monotonic() + _LIMIT / 2 > ends:
            break
        mine.append(run(tool, some) | here)
        with args.state.open("a") as state:
            state.write(json.dumps(mine[-1]) + "\n")
    return min(1, report(mine))


if __name__ == "__main__":
    sys.exit(main())
