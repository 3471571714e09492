"""Measures how much the choice of a kernel loses at problems that no table has, against what else could be chosen.

    python benchmarks/regret.py --families fp8_rows fp8_blocks --each 15 --seed 7 --out benchmarks/results/regret.json
    python benchmarks/regret.py --families fp8_rows --problems 4081x10240x8192 2158x8192x28672 --out /tmp/two.json
    python benchmarks/regret.py --families fp8_rows --list    # counts what an H200 would compile, without a GPU

Problems are drawn: a weight of a public model, and a number of rows from 1 to 8192 with equal probability on each
scale. At each, the kernel that a call takes races the first `--first` of the whole space by the model and its errors
nearby, compiled here, all checked against FP64. Each row: {"family", "m", "n", "k", "chosen", "chosen_us", "best",
"best_us", "regret", "kernels": [[name, measured us, predicted us, bytes of spill stores], ...]}. The regret is
chosen / best, as a median over rounds.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_fp8
import harness
import torch

import cutlass_ops as co
from cutlass_ops.artifacts import loader
from cutlass_ops.choose import dispatch, policies, space
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.gpus import gpu_named
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spelling import problems_of
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.operand.call import call_at, device_of, signature_of
from cutlass_ops.run import named
from cutlass_ops.tuner.trial import Trial

# N and K of linear layers of public models that no table has.
WEIGHTS = (
    *((2816, 2048), (6912, 1152), (12288, 4096), (10240, 5120), (27648, 5120), (5120, 27648), (9216, 7168)),
    *((18432, 7168), (7168, 18432), (16384, 5376), (21504, 5376), (4608, 4608), (14336, 5120), (5120, 14336)),
)
_MOST_ROWS = 8192
_MOST = 2e13  # operations: larger problems only say the same for longer


def _scaled(scales: str, sums: str, problem: Problem, device: Device) -> OpSignature:
    asked = bench_fp8.request(bench_fp8.draw(scales, *problem.extents, "meta"), sums)  # type: ignore[arg-type]
    op, (a, b, *inputs) = asked.op, asked.arguments
    return signature_of(op.checked(a, b, op.positional(tuple(inputs), {}), {}, None, None), device)


def _plain(graph: Any, dtype: str, problem: Problem, device: Device) -> OpSignature:
    return signature_of(call_at(graph, problem, dtype, "row", "col"), device)


FAMILIES: dict[str, Callable[[Problem, Device], OpSignature]] = {
    "bf16": partial(_plain, co.gemm_bias_gelu.graph, "bf16"),
    "int8": partial(_plain, named.NAMED[0].graph, "i8"),
    "fp8_tensor": partial(_scaled, "tensor", "promoted"),
    "fp8_tensor_fast": partial(_scaled, "tensor", "fast"),
    "fp8_rows": partial(_scaled, "rows", "promoted"),
    "fp8_rows_fast": partial(_scaled, "rows", "fast"),
    "fp8_blocks": partial(_scaled, "blocks", "promoted"),
}


def drawn(seed: int, count: int) -> list[Problem]:
    """Draw problems."""
    rng = random.Random(seed)
    found: list[Problem] = []
    while len(found) < count:
        problem = Problem(round(_MOST_ROWS ** rng.random()), *rng.choice(WEIGHTS))
        if problem not in found and 2 * problem.m * problem.n * problem.k <= _MOST:
            found.append(problem)
    return found


def entrants(
    signature: OpSignature, problem: Problem, first: int, beside: Collection[str], device: Device
) -> tuple[Ordered, dict[Ordered, float]]:
    """Return what a call takes, and all that race with their predicted times, that included and those named."""
    decision = dispatch.decide(signature, device, problem)
    assert decision is not None, f"nothing serves {signature}"
    chosen = Ordered(decision.config, decision.order)
    every = policies.policy(signature, device).with_further(space.usual(signature, device).configs).every(problem)
    known = {c.config: c for c in every}
    general = [c for c in every if kind_of(c.config).general]
    others = [*general[:first], *(c for c in every if c.config.slug in beside)]
    found = {chosen: known[chosen.config].microseconds}
    return chosen, found | {c.ordered: c.microseconds for c in others if c.config != chosen.config}


def race(signature: OpSignature, problem: Problem, first: int, beside: Collection[str], rounds: int) -> dict[str, Any]:
    """Race a problem's kernels, which are in the store; return a row."""
    device = torch.device("cuda", 0)
    chosen, predicted = entrants(signature, problem, first, beside, device_of(device))
    trial, wrong, spills = Trial(signature, problem, device), {}, {}
    for ordered in predicted:
        spec = device_of(device).spec(signature, ordered.config)
        (artifact,) = build_many([spec])
        spills[ordered] = artifact.manifest["resources"][0]["spill_stores"]
        reason = trial.admit(ordered, loader.load(artifact))
        if reason is not None:
            wrong[spec.slug] = reason
    running = [o for o in predicted if o in trial._kernels]
    measure = trial._measurement(lambda: None)
    measure(running)
    times = [measure(running) if r % 2 else measure(running[::-1])[::-1] for r in range(rounds)]
    middle = {o: statistics.median(t[at] for t in times) for at, o in enumerate(running)}
    best = min(middle, key=middle.__getitem__)
    mine, of_best = running.index(chosen), running.index(best)
    return {
        "chosen": chosen.config.slug,
        "chosen_us": round(middle[chosen], 3),
        "best": best.config.slug,
        "best_us": round(middle[best], 3),
        "regret": round(statistics.median(t[mine] / t[of_best] for t in times), 4),
        "kernels": [
            [o.config.slug, round(middle[o], 3), round(predicted[o], 3), spills[o]]
            for o in sorted(running, key=middle.__getitem__)
        ],
        **({"wrong": wrong} if wrong else {}),
    }


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return each family's regret."""
    found = {}
    for family in dict.fromkeys(row["family"] for row in rows):
        each = [row["regret"] for row in rows if row["family"] == family]
        found[family] = {
            "problems": len(each),
            "geomean": round(statistics.geometric_mean(each), 4),
            "worst": max(each),
        }
    return found


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--each", type=int, default=12, help="problems of each family")
    parser.add_argument("--first", type=int, default=30, help="kernels of the space")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--problems", nargs="+", type=problems_of, help="these instead of drawn ones")
    parser.add_argument("--beside", type=Path, help="an earlier result, whose choices race too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=1e9, help="stop racing after this many seconds")
    parser.add_argument("--list", action="store_true", help="only count kernels, for an H200")
    parser.add_argument("--commit", help="where git does not know it")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    asked = [p for each in args.problems for p in each] if args.problems else drawn(args.seed, args.each)
    device = gpu_named("H200") if args.list else device_of(torch.device("cuda", 0))
    cases = [(family, p, FAMILIES[family](p, device)) for family in args.families for p in asked]
    before = json.loads(args.beside.read_text())["rows"] if args.beside else []
    named = collections.defaultdict(set)
    for row in before:
        named[row["family"], row["m"], row["n"], row["k"]].add(row["chosen"])
    beside = [named[(family, *p.extents)] for family, p, _ in cases]
    each = [entrants(s, p, args.first, b, device)[1] for (_, p, s), b in zip(cases, beside, strict=True)]
    wanted = [device.spec(s, o.config) for (_, _, s), found in zip(cases, each, strict=True) for o in found]
    wanted = list(dict.fromkeys(wanted))
    print(f"{len(cases)} problems, {len(wanted)} kernels", flush=True)
    if args.list:
        return
    environment = harness.begin() | ({"commit": args.commit} if args.commit else {})
    began = time.monotonic()
    build_many(wanted)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for (family, problem, signature), also in zip(cases, beside, strict=True):
        if time.monotonic() - began > args.limit:
            print(f"stopped at the limit: {len(rows)} of {len(cases)} problems")
            break
        m, n, k = problem.extents
        row = {"family": family, "m": m, "n": n, "k": k, **race(signature, problem, args.first, also, args.rounds)}
        rows.append(row)
        print({name: of for name, of in row.items() if name != "kernels"}, flush=True)
        torch.cuda.empty_cache()
        if args.out:
            harness.save(args.out, {**environment, "summary": summary(rows), "rows": rows})
    print(summary(rows))


if __name__ == "__main__":
    main()
