"""Races two builds of the same kernels, such as before and after a change of a template.

    python benchmarks/race_builds.py --build /tmp/before.json    # in the older checkout, with a store of its own
    python benchmarks/race_builds.py --build /tmp/after.json     # in the newer one, with another store
    python benchmarks/race_builds.py --race /tmp/before.json /tmp/after.json --out /tmp/race.json

The kernels are dispatch's choices at problems of the shipped tables, `--each` of every signature. Both builds are
checked against FP64 and timed in alternating rounds of one process, on the same tensors. Each row: {"signature",
"kernel", "m", "n", "k", "count", "before_us", "after_us", "ratio"}; a ratio, the median over rounds of before / after,
above one says that the newer build is faster. A row of a wrong kernel has "wrong" instead of times.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import torch

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.entry import open_entry
from cutlass_ops.choose import dispatch, tables
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.operand.call import device_of
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.tuner.trial import Trial

_TABLES = Path(tables.__file__).parents[1] / "tuned"
_LARGEST = 4e12  # multiplications and additions: larger problems only say the same for longer


class Build(Ordered):
    """One build of a kernel: equal to itself alone."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def cases(each: int) -> Iterator[tuple[OpSignature, Problem]]:
    """Yield problems of every signature that has a shipped table."""
    seen = set()
    for path in sorted(_TABLES.glob("*.json")):
        table = tables.load_ours(path)
        if table.signature in seen:
            continue
        seen.add(table.signature)
        problems = [p.problem for p in table.points if 2 * math.prod(p.problem.extents) * p.problem.count <= _LARGEST]
        for problem in random.Random(0).sample(problems, min(each, len(problems))):
            yield table.signature, problem


def chosen(each: int) -> list[tuple[OpSignature, Problem, KernelSpec, Ordered]]:
    """Return what dispatch chooses here at the cases."""
    device = device_of(torch.device("cuda", 0))
    found = []
    for signature, problem in cases(each):
        spec, order = dispatch.choose(signature, device, problem)
        found.append((signature, problem, spec, Ordered(spec.config, order)))
    return found


def build(each: int, out: Path) -> None:
    """Compile all kernels and note where they lie, by their names."""
    specs = list(dict.fromkeys(spec for _, _, spec, _ in chosen(each)))
    out.write_text(json.dumps({s.slug: str(a.folder) for s, a in zip(specs, build_many(specs), strict=True)}))


def rows(each: int, before: dict[str, str], after: dict[str, str], rounds: int) -> Iterator[dict[str, Any]]:
    """Race both builds at each case."""
    device = torch.device("cuda", 0)
    for signature, problem, spec, ordered in chosen(each):
        m, n, k = problem.extents
        row: dict[str, Any] = {"signature": str(signature), "kernel": spec.slug, "m": m, "n": n, "k": k}
        row["count"] = problem.count
        trial = Trial(signature, problem, device)
        builds = [Build(ordered.config, ordered.order) for _ in range(2)]
        for which, entrant, folders in zip(("before", "after"), builds, (before, after), strict=True):
            wrong = trial.admit(entrant, loader.load(open_entry(Path(folders[spec.slug]))))
            if wrong is not None:
                row["wrong"] = f"{which}: {wrong}"
        if "wrong" not in row:
            measure = trial._measurement(lambda: None)
            measure(builds)
            times = [measure(builds) if r % 2 else measure(builds[::-1])[::-1] for r in range(rounds)]
            row["before_us"], row["after_us"] = (statistics.median(t[i] for t in times) for i in range(2))
            row["ratio"] = statistics.median(t[0] / t[1] for t in times)
        yield row
        del trial
        torch.cuda.empty_cache()


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=4, help="problems of each signature")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--build", type=Path, help="compile the kernels and note them in this file")
    parser.add_argument("--race", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.build:
        build(args.each, args.build)
    if not args.race:
        return
    environment = harness.begin()
    done: list[dict[str, Any]] = []
    for row in rows(args.each, *(json.loads(p.read_text()) for p in args.race), rounds=args.rounds):
        print(row, flush=True)
        done.append(row)
    ratios = [row["ratio"] for row in done if "ratio" in row]
    mean = statistics.geometric_mean(ratios)
    print(f"{len(ratios)} of {len(done)} right; geomean {mean:.4f}, worst {min(ratios):.3f}")
    if args.out:
        harness.save(args.out, {**environment, "rows": done})


if __name__ == "__main__":
    main()
