"""Races configurations with the tile and clusters of cuBLAS's kernel at a problem, if the space has them.

    python benchmarks/race_twins.py --op bias_relu --folder /tmp/tables
    python benchmarks/race_twins.py --op gemm --layout row-row --shapes majors --part 1/2 --folder /tmp/tables
    python benchmarks/race_twins.py --problems 418x4864x11776 --first 14 --folder /tmp/tables    # why a result loses

Dispatch's choice races beside them. At new problems, the cost model's first kernels race too. At problems of the
shipped table, the two best race, and only if a peer is within 3% of the best. ship_table.py ships the folder's tables.
cuBLAS's choice is read from its kernels' names, which may change: a name that is not understood has no twin.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import shapes
import torch
from bench_gemm import BENCHMARKS, DTYPES, LAYOUTS, make_inputs
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tune_tables import SHAPES

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import dispatch, policies
from cutlass_ops.choose.tables import Point
from cutlass_ops.declare.config import ClusterShape, Config, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spelling import problems_of
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config
from cutlass_ops.operand.call import device_of
from cutlass_ops.tuner import tuning
from cutlass_ops.tuner.measuring import Measurer

# nvjet_sm90_tst_128x216_64x4_2x1_v_bz_coopA_relubias_TNT: tile, K and stages, clusters, order, schedule, epilogue.
_NAME = re.compile(r"nvjet_sm90_[a-z]+_(\d+)x(\d+)_\d+x\d+_(\d)x(\d)_[a-z]_[a-z]+(?:_(coop))?")
# If a peer's time over the best kernel's is below this, better kernels may not have raced.
_NEAR = 1.03
_TILE_M = (64, 128, 192, 256)
# Tiles this narrow are as often faster with K steps of 128.
_SHORT = 96
_ROUNDS = 11


@dataclass(frozen=True)
class Entry:
    """The possible racers at a problem.

    Attributes
    ----------
    usual : tuple of Config
        Without cuBLAS's tiles, dispatch's choice first.
    twins : tuple of Sm90Config
        With cuBLAS's tile and clusters, if not among the usual ones and not raced yet.
    raced : bool
        Whether the usual ones have raced, so that they need not race again without twins.
    """

    problem: Problem
    usual: tuple[Config, ...]
    twins: tuple[Sm90Config, ...]
    raced: bool


def twins(name: str) -> Iterator[Sm90Config]:
    """Yield the configurations with the tile and clusters of one of cuBLAS's kernels, by its name."""
    found = _NAME.search(name)
    if found is None or "splitK" in name:
        return
    first, second, along_first, along_second = map(int, found.groups()[:4])
    # Its first extent is along N of a row-major product.
    for swap_ab, (m, n), cluster in (
        (True, (first, second), ClusterShape(along_first, along_second)),
        (False, (second, first), ClusterShape(along_second, along_first)),
    ):
        if m not in _TILE_M:
            continue
        small = m == 64
        schedules: tuple[Schedule, ...] = ("warp_specialized", "pingpong") if small else ("pingpong",)
        steps = (64, 128) if small and n <= _SHORT else (64,)
        for schedule, k in product(("cooperative",) if found[5] else schedules, steps):
            with suppress(ConfigError):
                yield Sm90Config(ThreadblockShape(m, n, k), cluster, schedule=schedule, swap_ab=swap_ab)


def cublas_kernels(op: str, dtype: str, layout: str, problems: Sequence[Problem]) -> dict[Problem, str]:
    """Return the name of cuBLAS's kernel at each problem; of several, the longest-running."""
    bench, found = BENCHMARKS[op], {}
    call = bench.cublaslt or bench.eager
    for problem in problems:
        inputs = make_inputs(*problem.extents, DTYPES[dtype], layout)[0]
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            call(inputs)
            torch.cuda.synchronize()
        kernels = [e for e in profiled.events() if e.device_type == DeviceType.CUDA]
        found[problem] = max(kernels, key=lambda e: e.time_range.elapsed_us()).name
    return found


def near(points: Iterable[Point]) -> list[Problem]:
    """Return the problems at which a peer is nearly as fast as the best kernel, or faster, except reported ones."""
    reported = {*shapes.GRID, *shapes.UNSEEN, *shapes.LAST}
    return [
        p.problem
        for p in points
        if p.problem.extents not in reported
        and p.peers
        and min(time for _, time in p.peers) < _NEAR * p.measured[0].microseconds
    ]


def entries(policy: policies.Policy, names: dict[Problem, str], first: int) -> list[Entry]:
    """Return the possible racers at each problem."""
    signature, known = policy.signature, {p.problem: p for p in policy.own.points} if policy.own else {}
    found = []
    for problem, name in names.items():
        chosen = dispatch.choose(signature, policy.device, problem)[0].config
        point = known.get(problem)
        others = [m.config for m in point.measured] if point else [c.config for c in policy.ranked(problem)]
        ranked = list(dict.fromkeys((chosen, *others)))
        usual = ranked[: 1 + (2 if point else first)]
        skipped = {*(ranked if point else usual)}
        new = [c for c in twins(name) if c not in skipped and not legality.check(signature.spec(c))]
        found.append(Entry(problem, tuple(usual), tuple(new), point is not None))
    return found


def limited(found: Iterable[Entry], known: Iterable[Config], most: int) -> list[Entry]:
    """Return the racers with at most this many unknown kernels: those that are twins most often."""
    listed, pool = list(found), set(known)
    uses = Counter(c for e in listed for c in e.twins if c not in pool)
    allowed = pool | {c for c, _ in uses.most_common(most)}
    racing = [replace(e, twins=tuple(c for c in e.twins if c in allowed)) for e in listed]
    return [e for e in racing if e.twins or not e.raced]


def line(entry: Entry, name: str, point: Point) -> str:
    """Return a problem's result: cuBLAS's kernel, the peers, the choice, the best twin, the best of all."""
    best: dict[Config, float] = {}
    for measured in point.measured:
        best.setdefault(measured.config, measured.microseconds)

    def time(title: str, configs: Iterable[Config]) -> list[str]:
        each = [(best[c], c.slug) for c in configs if c in best]
        return [f"{title} {min(each)[0]:.1f} us {min(each)[1]}"] if each else []

    parts = [f"{peer} {each:.1f} us" for peer, each in point.peers]
    parts += [*time("chosen", entry.usual[:1]), *time("twin", twins(name)), *time("best", best)]
    return f"{entry.problem}: {name}; {', '.join(parts)}"


def main() -> None:
    """Race, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=list(BENCHMARKS), default="bias_relu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16")
    parser.add_argument("--layout", choices=LAYOUTS, default="row-col", help="majors of A and B")
    parser.add_argument("--shapes", choices=list(SHAPES), default="tuning")
    parser.add_argument(
        "--problems", nargs="+", type=problems_of, help="these problems instead, such as 418x4864x11776"
    )
    parser.add_argument("--first", type=int, default=3, help="number of the model's kernels at a new problem")
    parser.add_argument("--most", type=int, default=100, help="most kernels that the table does not have")
    parser.add_argument("--part", default="0/1", help="1/2: the second half of the races, for another GPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no race after this many seconds")
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    place = tuning.Place(torch.cuda.get_device_name(device), device_of(device), args.folder.absolute())
    a, b = args.layout.split("-")
    graph = BENCHMARKS[args.op].op.graph
    signature = tuning.signature_at(graph, Problem(1024, 1024, 1024), args.dtype, a, b, None, place.device)
    policy = policies.policy(signature, place.device)
    own: Sequence[Point] = policy.own.points if policy.own else ()
    wanted = [Problem(*shape) for shape in SHAPES[args.shapes]]
    new = set(wanted) - {p.problem for p in own}
    given = [problem for each in args.problems or () for problem in each]
    problems = given or [*near(own), *(p for p in wanted if p in new)]
    names = cublas_kernels(args.op, args.dtype, args.layout, problems)
    part, parts = map(int, args.part.split("/"))
    racing = limited(entries(policy, names, args.first), policy.kernels, args.most)[part::parts]
    print(f"{len(problems)} problems, {len(racing)} races")
    tasks = [
        tuning.Task(
            signature,
            e.problem,
            tuple(o for c in (*e.usual, *e.twins) for o in tuning.entrants(c, e.problem, place.device)),
        )
        for e in racing
    ]
    with Measurer() as measurer:
        measure = partial(measurer.measure, rounds=_ROUNDS)
        report = tuning.run(tasks, place, tuning.Effort(seconds=args.seconds), measure=measure, show=print)
    points = {p.problem: p for p in place.table(signature).points}
    for entry in racing:
        if point := points.get(entry.problem):
            print(line(entry, names[entry.problem], point))
    print(f"{report.measured} measured, {report.left} left, failed: {report.failed}")


if __name__ == "__main__":
    main()
