"""Make many drawn calls, and judge each by the bound of the tests.

    python -m tests.gpu.fuzz --what fp8 --calls 20000 --out benchmarks/results/fuzz_fp8_h100.json
    python -m tests.gpu.fuzz --what types --again 1234    # one call of an earlier run, by its seed

Calls have odd, empty, tiny and long extents, views at odd addresses with any strides, unusual scales and groups, and
arguments that must be refused. All that surrounds a tensor, and outputs before the call, are poisoned. A family of
calls has one signature. Each has a few kernels, which are compiled side by side before. The first serves calls as those
of a bundle do; all are called as exact kernels too. Where extents of 1 or 0 make another signature, only an exact
kernel may serve. On the CPU, the reference computes.

The result has a row for each family: {"family", "calls", "exact" (by exact kernels), "again" (repeated with the same
tensors), "warm", "refused" (as they must be), "unserved" (of other signatures), "wrong", "kernels" (calls of each)}.
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
from tests.gpu.fuzz import dense, grouped
from tests.gpu.fuzz.case import Case, Kernels

_EXACT, _AGAIN = 0.4, 0.25  # parts of all calls
_KEPT = 100  # wrong calls of which a result has the description


class Family(Protocol):
    """Calls of one signature."""

    @property
    def name(self) -> str:
        """In results."""

    @property
    def problems(self) -> tuple[tuple[int, int, int], ...]:
        """For which kernels are chosen."""

    def usual(self) -> Case:
        """Return a case without data."""

    def draw(self, rng: random.Random, device: str) -> Case:
        """Draw a call."""


WHAT: Mapping[str, Sequence[Family]] = {
    "fp8": dense.FP8,
    "types": dense.TYPES,
    "dense": dense.DENSE,
    "grouped": grouped.FAMILIES,
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
            tally.kernels[(by or kernels.specs[0]).config.slug] += 1
        why = case.why_wrong(results, wanted)
        if why is not None:
            return why
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
    parser.add_argument("--out", type=Path, default=None, help="write the result as JSON")
    args = parser.parse_args()
    families, device = WHAT[args.what], "cuda" if torch.cuda.is_available() else "cpu"
    seeds = range(args.seed, args.seed + args.calls) if args.again is None else range(args.again, args.again + 1)
    about = harness.about(device)
    kernels: dict[str, Kernels] = {}
    serving: AbstractContextManager[None] = nullcontext()
    if device == "cuda":
        Background.current().close()
        of = device_of(torch.device("cuda", 0))
        kernels = {family.name: Kernels.of(family.usual(), of, family.problems) for family in families}
        build_many(dict.fromkeys(spec for each in kernels.values() for spec in each.specs))
        serving = harness.serve_only(each.specs[0] for each in kernels.values())
    with torch.no_grad(), serving:
        begin = time.monotonic()
        tallies, wrong = run(families, kernels, seeds, device, args.seconds)
        took = time.monotonic() - begin
    rows = [tally.row(name) for name, tally in tallies.items()]
    for row in rows:
        print(json.dumps(row))
    print(f"{sum(row['calls'] for row in rows)} calls in {took:.0f} s, {sum(row['wrong'] for row in rows)} wrong")
    if args.out is not None:
        head = {**about, "what": args.what, "seed": seeds.start, "seconds": round(took, 1), "wrong": wrong}
        harness.save(args.out, {**head, "rows": rows})
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
