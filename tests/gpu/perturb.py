"""Delay single instructions of kernels, and look for results that change: a race shows, which chance would hide.

    python -m tests.gpu.perturb --state perturb.jsonl                  # one piece; call it again to go on
    python -m tests.gpu.perturb --state perturb.jsonl --plant          # with waits taken away: does it find a race?
    python -m tests.gpu.perturb --state perturb.jsonl --report

Kernels are those that the tables choose for calls of :mod:`tests.gpu.fuzz`, whose results have one right value each.
Some instructions of each name are delayed, one at a time (:mod:`tests.gpu.edits`), for so long that a copy from memory
ends meanwhile. Each edited kernel computes problems of several tiles for each multiprocessor, and of less than one.

With --plant, a wait is taken away from a kernel first, at several places one after the other. A race is planted if
results stay right nevertheless. It is found if they change once an instruction is delayed. A wait without which results
are wrong at once is no race, but it shows that the oracle sees it; one whose loss never shows may be redundant.

The state has a line for each edit: {"family", "kernel" (its key), "slug", "without" and "delayed" (null, or an
instruction's name and place), "most" (nanoseconds), "why" (null if results are right), "commit", "chip", "date",
versions}. A process computes the edits of one kernel. If it ends early or hangs, that edit's line says so, and the next
process goes on.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.declare.device import Device
from cutlass_ops.operand.call import device_of
from tests.gpu import edits
from tests.gpu.campaign import ROOT, about, read
from tests.gpu.edits import Site
from tests.gpu.fuzz import exact
from tests.gpu.fuzz.case import Case, Kernels
from tests.gpu.fuzz.dense import Family
from tests.gpu.fuzz.grouped import Rows, Weights

FAMILIES = (
    *(
        f
        for f in exact.SIXTEEN_BITS
        if f.name in ("BF16, B across K", "BF16, reductions", "BF16, gated", "BF16, RMSNorm")
    ),
    *(f for f in exact.FP8 if f.name in ("row scales, promoted", "row scales, to FP32", "blocks")),
    *(f for f in exact.TYPES if f.name == "TF32, fused"),
    *(f for f in exact.INT8 if f.name == "INT8, scales"),
    *(f for f in exact.GROUPS if f.name in ("BF16, routed", "FP8, promoted", "BF16, room")),
    *(f for f in exact.BACKWARD if f.name in ("of B", "weights' gradients")),
)
_EACH = 4  # sites of each name
_PLANTED, _NEAR = 3, 10  # waits of each name that are taken away, and delays around each
_MOST = (0xFFF, 0xFFFF)  # nanoseconds
_CALLS = 3  # one after the other, so that they overlap
_LIMIT = 30.0  # seconds of an edit
_ENDED = "its process ended, or it took too long"


def problems(family: Any, device: str) -> list[Case]:
    """Return two calls of a family, with outputs that are poisoned and checked all around."""
    found = []
    for m, n, k in ((2304, 2064, 528), (200, 272, 1040)):
        for seed in range(100):
            torch.manual_seed(seed)
            k = 1024 if isinstance(family, Family) and family.exact and family.exact.eps else k
            memory = family.exact.memory(device, random.Random(seed), k)
            case = _case(family, memory, m, n, k)
            if case.out:
                found.append(case)
                break
    return found


def _case(family: Any, memory: Any, m: int, n: int, k: int) -> Case:
    if isinstance(family, Family):
        found = family._case(memory, (m, n, k))
    elif isinstance(family, Rows):
        found = family._case(memory, [m // 4, 0, m // 2 - 1, 1, m // 4], 3, n, k)
    else:
        assert isinstance(family, Weights)
        found = family._case(memory, [k // 2, 0, k // 4, k // 4], 0, n, 264)
    return found


def spread(all_of: Sequence[Site], count: int) -> list[Site]:
    """Return some of each name, from the first to the last."""
    found = []
    for name in dict.fromkeys(site.name for site in all_of):
        mine = [site for site in all_of if site.name == name]
        found += [mine[at * len(mine) // count] for at in range(count)] if len(mine) > count else mine
    return found


def planned(library: bytes, *, plant: bool) -> Iterator[tuple[Site | None, Site | None, int]]:
    """Yield which wait is taken away, which instruction is delayed, and for how long at most; first nothing."""
    every = list(edits.sites(library))
    delayed = [site for site in every if site.name != "branch"]
    if not plant:
        yield None, None, 0
        yield from ((None, site, most) for site in spread(delayed, _EACH) for most in _MOST)
        return
    for wait in spread([site for site in every if site.name in edits.WAITS], _PLANTED):
        yield wait, None, 0
        others = [site for site in delayed if site.at != wait.at and site.start == wait.start]
        near = sorted(others, key=lambda site: abs(site.at - wait.at))[: 4 * _NEAR]
        chosen = near[:: max(1, len(near) // _NEAR)]
        yield from ((wait, site, _MOST[0]) for site in chosen)


def edited(library: bytes, wait: Site | None, site: Site | None, most: int) -> bytes:
    """Return a library without a wait, in which an instruction is delayed."""
    found = library if wait is None else edits.without(library, wait)
    return found if site is None else edits.delayed(found, site, most)


def why_wrong(kernel: Any, cases: Sequence[tuple[Case, Any]]) -> str | None:
    """Say what is wrong with a kernel's results; None if nothing is."""
    for case, wanted in cases:
        asked = case.request()
        for placed in case.out.values():
            placed.refill()
        for _ in range(_CALLS):
            results = kernel(*asked.arguments, **{**asked.named, **case.given()})
        why = case.why_wrong(results, wanted)
        if why is not None:
            return f"{case.about}: {why}"
    return None


def gpu() -> Device:
    """Return the GPU."""
    return device_of(torch.device("cuda", 0))


def run(name: str, number: int, skipped: int, *, plant: bool, seconds: float) -> None:
    """Try the edits of one kernel, from one of them on; print a line of JSON for each."""
    from cutlass_ops.artifacts import loader
    from cutlass_ops.compilation.builder import build_many
    from cutlass_ops.run.kernels import Kernel

    ends = time.monotonic() + seconds
    family = next(family for family in FAMILIES if family.name == name)
    (spec,) = Kernels.drawn(family.usual(), gpu(), number, 1).specs
    (artifact,) = build_many([spec])
    library = artifact.read_library()
    found = {"family": name, "number": number, "kernel": artifact.key, "slug": spec.config.slug, "plant": plant}
    steps = list(planned(library, plant=plant))
    cases = [(case, case.wanted()) for case in problems(family, "cuda")]
    # A wait without which results are wrong at once needs no delays. In the step before the first one, a process ended.
    wrong = {steps[skipped - 1][0]} if skipped else set()
    for at, (wait, site, most) in enumerate(steps):
        if at < skipped or (wait is not None and wait in wrong):
            continue
        if time.monotonic() > ends:
            return
        line = found | {"at": at, "of": len(steps), "without": _said(wait), "delayed": _said(site), "most": most}
        print(json.dumps(line | {"why": _ENDED}), flush=True)
        faulthandler.dump_traceback_later(_LIMIT, exit=True)
        with tempfile.TemporaryDirectory() as folder:
            other = edits.written(artifact, edited(library, wait, site, most), Path(folder))
            why = why_wrong(Kernel(spec, loader.load(other)), cases)
        faulthandler.cancel_dump_traceback_later()
        if why is not None and site is None:
            wrong.add(wait)
        print(json.dumps(line | {"why": why}), flush=True)


def _said(site: Site | None) -> list[Any] | None:
    return None if site is None else [site.name, hex(site.at - site.start)]


def last(said: str) -> dict[int, dict[str, Any]]:
    """Return the last line of each edit, which is the one that counts."""
    return {line["at"]: line for line in map(json.loads, said.splitlines())}


def piece(name: str, number: int, skipped: int, *, plant: bool, seconds: float) -> list[dict[str, Any]]:
    """Have a process try the edits of a kernel from one of them on; return its lines."""
    command = [sys.executable, "-m", "tests.gpu.perturb", "--run", name, str(number), str(skipped), str(seconds)]
    command += ["--plant"] if plant else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = last(done.stdout)
    if not lines and done.returncode:
        raise SystemExit(f"{name}, kernel {number}: {done.stderr[-2000:]}")
    return list(lines.values())


def report(lines: Sequence[dict[str, Any]]) -> int:
    """Print what came of each kernel's edits; return how many delays alone changed results."""
    for name, number, plant in dict.fromkeys((line["family"], line["number"], line["plant"]) for line in lines):
        mine = [line for line in lines if (line["family"], line["number"], line["plant"]) == (name, number, plant)]
        print(f"{name}, {mine[0]['slug']}: {len(mine)} edits, {sum(bool(line['why']) for line in mine)} wrong")
        if plant:
            _report_planted(mine)
        for line in mine if not plant else []:
            if line["why"]:
                print("   ", line["delayed"], line["most"], line["why"][:300])
    return sum(bool(line["why"]) for line in lines if not line["plant"])


def _report_planted(mine: Sequence[dict[str, Any]]) -> None:
    for wait in dict.fromkeys(tuple(line["without"]) for line in mine if line["without"]):
        of_it = [line for line in mine if line["without"] and tuple(line["without"]) == wait]
        at_once = any(line["why"] for line in of_it if line["delayed"] is None)
        by = Counter(line["delayed"][0] for line in of_it if line["delayed"] and line["why"])
        how = "wrong at once" if at_once else f"found by delays of {dict(by)}" if by else "never wrong"
        print(f"    without {' at '.join(wait)}: {how}")


def main() -> int:
    """Run one piece."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, help="file of JSON lines, which a piece goes on with")
    parser.add_argument("--kernels", type=int, default=3, help="of each family")
    parser.add_argument("--only", default="", help="a part of the names of families")
    parser.add_argument("--plant", action="store_true", help="take waits away")
    parser.add_argument("--seconds", type=float, default=420.0, help="how long this piece may take")
    parser.add_argument("--report", action="store_true", help="print the state, and run nothing")
    parser.add_argument(
        "--run", nargs=4, metavar=("FAMILY", "NUMBER", "SKIPPED", "SECONDS"), help="a process of a piece"
    )
    args = parser.parse_args()
    if args.run:
        name, number, skipped, seconds = args.run
        run(name, int(number), int(skipped), plant=args.plant, seconds=float(seconds))
        return 0
    if args.state is None:
        parser.error("pass --state")
    if args.report:
        return min(1, report(read(args.state)))
    from cutlass_ops.compilation.builder import build_many

    here, ends = about(), time.monotonic() + args.seconds
    mine = [line for line in read(args.state) if (line["commit"], line["chip"]) == (here["commit"], here["chip"])]
    device, families = gpu(), [f for f in FAMILIES if args.only in f.name]
    drawn = {f.name: Kernels.drawn(f.usual(), device, 0, args.kernels).specs for f in families}
    build_many(dict.fromkeys(spec for specs in drawn.values() for spec in specs))
    for number in range(args.kernels):
        for name in drawn:
            while time.monotonic() < ends:
                before = [x for x in mine if (x["family"], x["number"], x["plant"]) == (name, number, args.plant)]
                skipped = max((line["at"] + 1 for line in before), default=0)
                lines = piece(name, number, skipped, plant=args.plant, seconds=ends - time.monotonic())
                mine += [line | here for line in lines]
                with args.state.open("a") as state:
                    state.writelines(json.dumps(line | here) + "\n" for line in lines)
                if not lines or lines[-1]["why"] != _ENDED:
                    break
    return min(1, report(mine))


if __name__ == "__main__":
    sys.exit(main())
