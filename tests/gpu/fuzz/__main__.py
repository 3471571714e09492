"""Make many drawn calls, and judge each by the bound of the tests.

    python -m tests.gpu.fuzz --what fp8 --calls 20000 --out benchmarks/results/fuzz_fp8_h100.json
    python -m tests.gpu.fuzz --what types --again 1234    # one call of an earlier run, by its seed
    python -m tests.gpu.fuzz --what exact_16 --kernels 8 --seconds 200 --out exact_16.json   # again and again

Calls have odd, empty, tiny and long extents, views at odd addresses with any strides, unusual scales and groups, and
arguments that must be refused. All that surrounds a tensor, and outputs before the call, are poisoned. A family of
calls has one signature. Each has a few kernels, which are compiled side by side before. The first serves calls as those
of a bundle do; all are called as exact kernels too. Where extents of 1 or 0 make another signature, only an exact
kernel may serve. On the CPU, the reference computes.

Families of "exact_" have whole numbers for operands, and no tolerance. With --kernels, each piece takes so many further
kernels of each family, those that the tables choose first, and goes on with the seeds and the sums of --out: many
pieces make many calls of many kernels. A file of another commit or GPU is refused.

The result has a row for each family: {"family", "calls", "exact" (by exact kernels), "again" (repeated with the same
tensors), "warm", "refused" (as they must be), "unserved" (of other signatures), "alike"
(of which relations with other calls were tried), "wrong", "kernels" (calls of each, by
its key)}.
Its "wrong" has {"seed", "family", "why", "about"} of the first calls that failed. The exit status is 1 if any did.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks import harness
from cutlass_ops.base.errors import MissingKernelError
from cutlass_ops.compilation.background import Background
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.operand.call import device_of
from tests.gpu.fuzz import dense, exact, grouped
from tests.gpu.fuzz.case import Case, Kernels

_EXACT, _AGAIN, _ALIKE = 0.6, 0.25, 0.3  # parts of all calls, and of those by exact kernels
_KEPT = 100  # wrong calls of which a result has the description


class Family(Protocol):
    """Calls of one signature."""

    @property
    def name(self) -> str:
        """In results."""

    @property
    def problems(self) -> tuple[tuple[int, int, int], ...]:
        """For which kernels are chosen."""

    @property
    def few_rows(self) -> bool:
        """Whether drawn kernels are those for few rows."""

    def usual(self) -> Case:
        """Return a case without data."""

    def draw(self, rng: random.Random, device: str) -> Case:
        """Draw a call."""


WHAT: Mapping[str, Sequence[Family]] = {
    "fp8": dense.FP8,
    "types": dense.TYPES,
    "dense": dense.DENSE,
    "grouped": grouped.FAMILIES,
    "exact_16": exact.SIXTEEN_BITS,
    "exact_fp8": exact.FP8,
    "exact_types": exact.TYPES,
    "exact_int8": exact.INT8,
    "exact_groups": exact.GROUPS,
    "exact_backward": exact.BACKWARD,
}


@dataclass
class Tally:
    """What came of a family's calls."""

    calls: int = 0
    exact: int = 0
    again: int = 0
    warm: int = 0
    refused: int = 0
    unserved: int = 0
    alike: int = 0
    wrong: int = 0
    kernels: collections.Counter[str] = field(default_factory=collections.Counter)

    def row(self, family: str) -> dict[str, Any]:
        """Return it as plain values."""
        return {"family": family, **vars(self), "kernels": dict(self.kernels)}


def judge(case: Case, kernels: Kernels | None, rng: random.Random, tally: Tally) -> str | None:
    """Make a call and say what is wrong with it; None if nothing is."""
    tally.calls += 1
    if case.refused is not None:
        return _why_not_refused(case, tally)
    by = rng.choice(kernels.specs) if kernels is not None and rng.random() < _EXACT else None
    wanted = case.wanted()
    for number in range(2 if rng.random() < _AGAIN else 1):
        for placed in case.out.values():
            placed.refill()
        op = case.request().op
        before = op.served_warm
        try:
            results = case.call() if by is None else case.by(by)
        except MissingKernelError:
            if kernels is None:
                raise
            by = kernels.specs[0]
            try:
                results = case.by(by)
            except ValueError:
                tally.unserved += 1
                return None
        tally.again += number
        tally.warm += op.served_warm - before
        tally.exact += by is not None
        if kernels is not None:
            tally.kernels[kernels.key(by or kernels.specs[0])] += 1
        why = case.why_wrong(results, wanted)
        if why is not None:
            return why
    if by is not None and by.config.whole_k and case.of_any_values is not None and rng.random() < _ALIKE:
        tally.alike += 1
        return case.of_any_values().why_not_alike(by)
    return None


def _why_not_refused(case: Case, tally: Tally) -> str | None:
    pattern = case.refused or ""
    try:
        case.call()
    except (TypeError, ValueError) as error:
        tally.refused += 1
        return None if re.search(pattern, str(error)) else f"refused without {pattern!r}: {error}"
    return f"not refused, where {pattern!r} was expected"


def one(families: Sequence[Family], seed: int, device: str) -> tuple[Family, random.Random, Case]:
    """Return the call of a seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    family = rng.choice(families)
    return family, rng, family.draw(rng, device)


def run(
    families: Sequence[Family], kernels: Mapping[str, Kernels], seeds: range, device: str, seconds: float
) -> tuple[dict[str, Tally], list[dict[str, Any]]]:
    """Make the calls of seeds; return a tally for each family, and the wrong calls."""
    tallies, wrong = {family.name: Tally() for family in families}, []
    begin = time.monotonic()
    for seed in seeds:
        if time.monotonic() - begin > seconds:
            print(f"stopped at the limit before seed {seed}")
            break
        family, rng, case = one(families, seed, device)
        tally = tallies[family.name]
        why, is_over = None, False
        try:
            why = judge(case, kernels.get(family.name), rng, tally)
        except Exception as error:  # whatever it is, the next call is worth making, unless the device is lost
            why, is_over = f"{type(error).__name__}: {error}", "CUDA error" in str(error)
        if why is not None:
            tally.wrong += 1
            about = f"{case.about}, {'out' if case.out else 'no out'}"
            found = {"seed": seed, "family": family.name, "why": why[:500], "about": about}
            print(json.dumps(found), flush=True)
            wrong += [found] if len(wrong) < _KEPT else []
        if is_over:
            print(f"stopped at seed {seed}: the device takes no further calls")
            break
    return tallies, wrong


def together(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sum of two pieces."""
    rows = []
    for before, row in zip(first["rows"], second["rows"], strict=True):
        sums = {name: before[name] + row[name] for name in row if name not in ("family", "kernels")}
        kernels = collections.Counter(before["kernels"]) + collections.Counter(row["kernels"])
        rows.append({"family": row["family"], **sums, "kernels": dict(kernels)})
    wrong = [*first["wrong"], *second["wrong"]][:_KEPT]
    sums = {name: round(first[name] + second[name], 1) for name in ("seconds", "pieces")}
    return {**second, "seed": first["seed"], **sums, "wrong": wrong, "rows": rows}


def earlier(path: Path | None, now: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the earlier pieces of a file; None if there is none.

    Raises
    ------
    SystemExit
        If they are of another commit, GPU or version.
    """
    if path is None or not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    same = [name for name in now if name != "date"]
    differs = [name for name in same if found.get(name) != now[name]]
    if differs:
        raise SystemExit(f"{path} has another {', '.join(differs)}: write another file")
    return found


def main() -> int:
    """Fuzz, print and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=list(WHAT), required=True)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this many, compilation apart")
    parser.add_argument("--seed", type=int, default=0, help="that of the first call; each has the next one")
    parser.add_argument("--again", type=int, default=None, help="make the call of this seed alone")
    parser.add_argument("--kernels", type=int, default=0, help="further kernels of each family; the pieces of --out")
    parser.add_argument("--out", type=Path, default=None, help="write the result as JSON")
    args = parser.parse_args()
    families, device = WHAT[args.what], "cuda" if torch.cuda.is_available() else "cpu"
    now = {**harness.about(device), "commit": harness.commit(), "what": args.what, "count": args.kernels}
    before = earlier(args.out, now) if args.kernels else None
    pieces, calls = (before["pieces"], sum(row["calls"] for row in before["rows"])) if before else (0, 0)
    start = (args.seed if before is None else before["seed"]) + calls
    seeds = range(start, start + args.calls) if args.again is None else range(args.again, args.again + 1)
    kernels: dict[str, Kernels] = {}
    serving: AbstractContextManager[None] = nullcontext()
    if device == "cuda":
        Background.current().close()
        of = device_of(torch.device("cuda", 0))
        first = pieces * args.kernels
        for family in families:
            case = family.usual()
            chosen = (
                Kernels.drawn(case, of, first, args.kernels, few_rows=family.few_rows)
                if args.kernels
                else Kernels.of(case, of, family.problems)
            )
            kernels[family.name] = chosen
        build_many(dict.fromkeys(spec for each in kernels.values() for spec in each.specs))
        serving = harness.serve_only(each.specs[0] for each in kernels.values())
    with torch.no_grad(), serving:
        begin = time.monotonic()
        tallies, wrong = run(families, kernels, seeds, device, args.seconds)
        took = round(time.monotonic() - begin, 1)
    rows = [tally.row(name) for name, tally in tallies.items()]
    found = {**now, "seed": seeds.start, "seconds": took, "pieces": 1, "wrong": wrong, "rows": rows}
    found = found if before is None else together(before, found)
    for row in found["rows"]:
        print(json.dumps({**row, "kernels": len(row["kernels"])}))
    made, of_kernels = (
        sum(f(row) for row in found["rows"]) for f in (lambda r: r["calls"], lambda r: len(r["kernels"]))
    )
    print(f"{made} calls of {of_kernels} kernels in {found['seconds']:.0f} s, {len(found['wrong'])} wrong")
    if args.out is not None:
        harness.save(args.out, found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
