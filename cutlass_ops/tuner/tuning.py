"""Measures which kernels are the fastest, compiling them meanwhile, and keeps what it finds.

For each problem the model names the configurations that may win; a few kernels that cover all problems are compiled;
each is checked against FP64 and raced at the problems where it may win. Every finished problem is written at once, so
that a run that was stopped goes on where it was.
"""

from __future__ import annotations

import datetime
import math
import os
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.base import disk, env
from cutlass_ops.base.dtypes import dtype as element_named
from cutlass_ops.base.errors import CompileError, MeasuringError, NoDeviceError, StoreError, UnsupportedError
from cutlass_ops.base.frozen import plain, plain_field
from cutlass_ops.base.mma import OPERANDS, Math
from cutlass_ops.base.terminal import progress
from cutlass_ops.choose import dispatch, policies, space, tables
from cutlass_ops.choose.policies import Policy
from cutlass_ops.choose.tables import Point, Table
from cutlass_ops.compilation.builder import building
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED, DENSE, GROUPED, RAGGED_K, Form
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import nearest
from cutlass_ops.declare.spec import KernelSpec, Major
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.spreads import in_order as spreads_in_order
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.operand.call import call_at, device_of, signature_of
from cutlass_ops.operand.groups import require as require_groups
from cutlass_ops.run.gemm import op_for
from cutlass_ops.run.ops import Op
from cutlass_ops.run.registry import OpSignature
from cutlass_ops.run.requests import called
from cutlass_ops.tuner.measuring import Measurer, Outcome

# At least so many are measured all the same: what it puts far ahead of all others is often what it errs on.
_AT_LEAST = 4
# So many of each kind of kernel are, unless it is predicted to take so many times as long.
_OF_A_KIND, _FAR = 2, 2.0
# Among how many the few that cover all problems are sought.
_CONSIDERED = 40
# Around how many of the best a refinement looks.
_CENTRES = 2


@dataclass(frozen=True)
class Task:
    """One problem and the configurations, with tile orders, that may win there, the likeliest first."""

    signature: OpSignature
    problem: Problem
    entrants: tuple[Ordered, ...]
    spreads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Effort:
    """How much :func:`cutlass_ops.tune` compiles and measures.

    Attributes
    ----------
    kernels : int
        The most kernels that are compiled for each signature.
    candidates : int
        The most kernels that are timed against each other at each problem.
    rounds : int
        Rounds in which these kernels are timed, in random order. Slow kernels are timed in more rounds.
    refine : bool
        Whether to search around the fastest kernels of earlier runs, instead of those that the model expects to be
        fastest.
    seconds : float
        Seconds after which no further problem is started, and no kernel is waited for.
    pool : tuple of Config
        Configurations to choose from. If empty, the model chooses among all legal ones.
    within : float
        A kernel is timed only if the model predicts at most this many times the time of its first choice. The model
        errs by 3%, and seldom by 15%, at the problems to which it was fitted (benchmarks/NOTES.md), and by more at
        others.

    Raises
    ------
    TypeError, ValueError
        If a value has the wrong type, or is a limit with which nothing could be measured.

    Examples
    --------
    >>> effort = co.types.Effort(kernels=16, seconds=600)  # ten minutes at most
    >>> effort.candidates, effort.refine
    (12, False)
    """

    kernels: int = 48
    candidates: int = 12
    rounds: int = 11
    refine: bool = False
    seconds: float = math.inf
    pool: tuple[Config, ...] = ()
    within: float = 1.15

    def __post_init__(self) -> None:
        for name in ("kernels", "candidates", "rounds"):
            value: object = plain_field(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an integer, not {reprlib.repr(value)}")
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, not {reprlib.repr(value)}")
        for name, least in (("seconds", 0), ("within", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} must be a number, not {reprlib.repr(value)}")
            if not value >= least:  # NaN is none
                raise ValueError(f"{name} must be {least} or more, not {reprlib.repr(value)}")
        if not isinstance(self.refine, bool):
            raise TypeError(f"refine must be True or False, not {reprlib.repr(self.refine)}")
        if not isinstance(self.pool, list | tuple) or not all(isinstance(each, Config) for each in self.pool):
            raise TypeError(f"pool must be a tuple of configurations, not {reprlib.repr(self.pool)}")
        object.__setattr__(self, "pool", tuple(self.pool))


@dataclass
class Report:
    """What a run did.

    Attributes
    ----------
    tables : dict of OpSignature to Table
        All that is known now.
    measured, known, left : int
        Problems measured by this run, measured before, and left for the next.
    failed : dict of str to str
        Kernels that cannot be used and problems that cannot be measured, by name, with the reason.
    asked : int
        Problems that the run was for, of each signature. Of groups, some of those given may be one.
    """

    tables: dict[OpSignature, Table] = field(default_factory=dict)
    measured: int = 0
    known: int = 0
    left: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    asked: int = 0


def plan(
    problems: Mapping[OpSignature, Iterable[Problem]],
    device: Device,
    effort: Effort,
    known: Mapping[OpSignature, Table] | None = None,
    *,
    deterministic: bool = False,
    spreads: tuple[str, ...] = (),
) -> list[Task]:
    """Choose what to measure, signature by signature.

    `known` is what was measured before; a refinement looks around it. With `deterministic`, only kernels are measured
    that add up a tile's K as a whole. By default rows are spread over groups in all ways that are assumed. The kernels
    of a signature are chosen together: first what dispatch chooses now at most problems, up to half of them, then those
    that help most according to the model. What dispatch chooses races at the problems that it serves.
    """
    tasks: list[Task] = []
    for signature, each in problems.items():
        table = (known or {}).get(signature) if effort.refine else None
        best = {p.problem: [m.config for m in p.measured] for p in table.points} if table else {}
        planned = _plan(signature, {p: _centres(best.get(p, ())) for p in each}, device, effort, deterministic)
        tasks += [replace(task, spreads=spreads) for task in planned]
    return tasks


def _centres(measured: Sequence[Config]) -> list[Config]:
    return list(dict.fromkeys(measured))[:_CENTRES]


def _plan(
    signature: OpSignature,
    problems: Mapping[Problem, Sequence[Config]],
    device: Device,
    effort: Effort,
    deterministic: bool,
) -> list[Task]:
    """Plan for one signature, given the configurations around which to look at each problem."""
    policy = policies.policy(signature, device)
    pool = [c for c in effort.pool if not legality.check(device.spec(signature, c))]
    among: dict[tuple[Config, ...], list[Problem]] = {}
    for problem, centres in problems.items():
        configs = pool or _considered(policy, problem, centres, device)
        among.setdefault(tuple(c for c in configs if c.whole_k or not deterministic), []).append(problem)
    predicted: dict[Problem, dict[Config, float]] = {}
    for allowed, each in among.items():
        predicted |= _predicted(policy, each, allowed)
    now = {} if pool else {p: dispatch.choose(signature, device, p)[0].config for p in predicted}
    usual = Counter(c for p, c in now.items() if c in predicted[p])
    kept = set(_cover(predicted, effort.kernels, [c for c, _ in usual.most_common(effort.kernels // 2)]))
    tasks = []
    for problem, times in predicted.items():
        ranked = sorted(kept & times.keys(), key=times.__getitem__)
        close = sum(times[c] <= effort.within * times[ranked[0]] for c in ranked)
        # What was the best is what the others have to beat, and what their times can be compared by; what serves now
        # races too, so that tuning makes no call slower. Kinds of kernels have models of their own, which err apart.
        best = [c for c in problems[problem][:1] if c in times]
        first = [*best, *(c for c in ranked if c == now.get(problem))]
        room = max(min(max(close, _AT_LEAST), effort.candidates), len(first))
        near = list(dict.fromkeys([*first, *ranked]))[:room]
        kinds = [c for kind in dict.fromkeys(map(kind_of, ranked)) for c in _first(ranked, kind)]
        near += [c for c in kinds if c not in near and times[c] <= _FAR * times[ranked[0]]]
        near.sort(key=lambda c: (c not in best, times[c]))
        ordered = [o for c in near for o in entrants(c, problem, device)]
        if signature.form.operands:  # whose tiles have one order
            ordered = [Ordered(c, c.usual_order(problem)) for c in near]
        tasks.append(Task(signature, problem, tuple(ordered)))
    return tasks


def _first(ranked: Sequence[Config], kind: Kind[Any]) -> list[Config]:
    return [c for c in ranked if kind_of(c) is kind][:_OF_A_KIND]


def _predicted(
    policy: Policy, problems: Sequence[Problem], configs: tuple[Config, ...]
) -> dict[Problem, dict[Config, float]]:
    """Return configurations' times, as dispatch would predict them if they were among its kernels."""
    wide = policy.with_further(configs)
    place = {c: at for at, c in enumerate(wide.kernels)}
    times = wide.expected(problems).times[:, [place[c] for c in configs]].tolist()
    return {p: dict(zip(configs, row, strict=True)) for p, row in zip(problems, times, strict=True)}


def entrants(config: Config, problem: Problem, device: Device) -> list[Ordered]:
    """Return a kernel as it enters a race: in the usual tile order, and by GPC if that may gain much."""
    orders = config.usual_order(problem), *kind_of(config).orders_by_gpc(config, problem, device)[:1]
    return [Ordered(config, order) for order in orders]


def _considered(policy: Policy, problem: Problem, centres: Sequence[Config], device: Device) -> list[Config]:
    """Return the configurations that may be worth measuring at a problem, and those that would be picked now."""
    special = space.fitting(policy.signature, problem, device)
    usual = (*(c for c in special if c.few_rows), *policy.kernels)
    if not centres:
        usual = (*(c for c in special if not c.few_rows), *usual)
        return list(dict.fromkeys([*space.ranked(policy.signature, problem, _CONSIDERED, device), *usual]))
    around = [c for centre in centres for c in (centre, *space.neighbours(policy.signature, centre, device))]
    return list(dict.fromkeys([*around, *usual]))


# In choosing what to compile: what a problem that no kernel covers loses, as a logarithm (it would be twice as slow);
# up to where a second kernel at a problem counts, and what part of a loss that is worth.
_UNCOVERED = math.log(2.0)
_CLOSE = 0.05
_SECOND = 0.1


def _cover(
    predicted: Mapping[Problem, Mapping[Config, float]], limit: int, first: Sequence[Config] = ()
) -> list[Config]:
    """Return the first kernels and those that with them are predicted to lose least: each next one helps most."""
    losses = [{c: math.log(t / min(times.values())) for c, t in times.items()} for times in predicted.values()]
    candidates = list(dict.fromkeys(c for loss in losses for c in loss))
    if len(candidates) <= limit:
        return candidates
    reached = [min((loss[c] for c in first if c in loss), default=_UNCOVERED) for loss in losses]
    chosen = list(first)
    candidates = [c for c in candidates if c not in chosen]
    while candidates and len(chosen) < limit:
        # What is already covered still counts a little: the model errs, and the second best may be the best.
        after = {c: [min(r, loss.get(c, r)) for r, loss in zip(reached, losses, strict=True)] for c in candidates}
        second = {c: sum(max(0.0, _CLOSE - loss.get(c, 1.0)) for loss in losses) for c in candidates}
        best = min(candidates, key=lambda c: sum(after[c]) - _SECOND * second[c])
        chosen.append(best)
        candidates.remove(best)
        reached = after[best]
    return chosen


DTypes = str | torch.dtype | Sequence[str | torch.dtype]
Measure = Callable[[OpSignature, Problem, Mapping[Ordered, Path]], Outcome]


@dataclass(frozen=True)
class Place:
    """The device of a run, and the folder of its results."""

    name: str  # the device's name, as the driver gives it
    device: Device
    folder: Path  # of the tables

    def path(self, signature: OpSignature) -> Path:
        """Return the path of a signature's table."""
        return tables.path_of(self.folder, self.name, signature)

    def table(self, signature: OpSignature) -> Table:
        """Return the known measurements of a signature."""
        try:
            return tables.load(self.path(signature))
        except FileNotFoundError:
            return Table(self.name, self.device.multiprocessors, signature)


def run(
    tasks: Sequence[Task],
    place: Place,
    effort: Effort,
    *,
    measure: Measure,
    again: bool = False,
    allow_fallback: bool = False,
    deterministic: bool = False,
    executor: Executor | None = None,
    show: Callable[[str], None] | None = None,
) -> Report:
    """Compile, measure and record."""
    began = time.monotonic()
    report = Report({task.signature: place.table(task.signature) for task in tasks}, asked=len(tasks))
    known = {s: _known(t, deterministic) for s, t in report.tables.items()}

    def flagged(table: Table) -> Table:
        return replace(table, fallback=allow_fallback, deterministic=deterministic)

    todo = [t for t in tasks if again or effort.refine or (t.problem, t.spreads) not in known[t.signature]]
    report.known = len(tasks) - len(todo)
    specs = [[place.device.spec(task.signature, e.config) for e in task.entrants] for task in todo]
    with (
        building(dict.fromkeys(spec for each in specs for spec in each), executor=executor) as builds,
        progress(len(todo), "problems measured", show) as steps,
    ):
        jobs = [_Job(t, tuple(each), tuple(builds[s] for s in each)) for t, each in zip(todo, specs, strict=True)]
        report.left = len(jobs)
        try:
            while (job := _next(jobs, effort.seconds - (time.monotonic() - began))) is not None:
                jobs.remove(job)
                report.left = len(jobs)
                point = _attempt(job, measure, report)
                if point is not None:
                    _keep(point, job.task.signature, place, report, flagged)
                steps.finished(_line(job.task.problem, point), failed=point is None, keep=True)
        finally:
            # An interrupted run's results count as well.
            for signature, table in report.tables.items():
                if table.points and (report.measured or table != flagged(table)):
                    report.tables[signature] = tables.update(place.path(signature), flagged(table).select())
            policies.forget()
    return report


def _attempt(job: _Job, measure: Measure, report: Report) -> Point | None:
    """Measure a job's problem; what went wrong is in the report."""
    name = str(job.task.problem)
    try:
        point = _measure(job, measure, report)
    except MeasuringError as exc:
        report.failed[name] = str(exc)
        return None
    if point is None:
        report.failed[name] = "none of its kernels can be used"
    return point


def _known(table: Table, deterministic: bool) -> set[tuple[Problem, tuple[str, ...]]]:
    """Return the problems that need no measurement, with how rows were spread over groups."""
    return {(p.problem, p.spreads) for p in table.points if not deterministic or p.measured[0].config.whole_k}


def _keep(
    point: Point, signature: OpSignature, place: Place, report: Report, flagged: Callable[[Table], Table]
) -> None:
    table = Table(place.name, place.device.multiprocessors, signature, (point,))
    report.tables[signature] = tables.update(place.path(signature), flagged(table))
    report.measured += 1


@dataclass(frozen=True, eq=False)
class _Job:
    """A task with its kernels, which are compiled or being compiled."""

    task: Task
    specs: tuple[KernelSpec, ...]
    builds: tuple[Future[Artifact], ...]

    @property
    def ready(self) -> bool:
        return all(build.done() for build in self.builds)


def _next(jobs: Sequence[_Job], seconds: float) -> _Job | None:
    """Return a job whose kernels are all there, after waiting if needed; None if no job or no time is left."""
    until = time.monotonic() + seconds
    while jobs and (left := until - time.monotonic()) > 0:
        ready = next((job for job in jobs if job.ready), None)
        if ready is not None:
            return ready
        waiting = [build for build in jobs[0].builds if not build.done()]
        wait(waiting, timeout=None if math.isinf(left) else left, return_when=FIRST_COMPLETED)
    return None


def _measure(job: _Job, measure: Measure, report: Report) -> Point | None:
    task, folders, slugs = job.task, {}, {}
    for entrant, spec, build in zip(task.entrants, job.specs, job.builds, strict=True):
        error = build.exception()
        slugs[entrant] = spec.slug
        if error is None:
            folders[entrant] = build.result().present().folder
        elif isinstance(error, CompileError):
            report.failed[spec.slug] = str(error)
        else:
            raise error
    if not folders:
        return None
    outcome = measure(task.signature, task.problem, folders)
    report.failed.update({slugs[entrant]: why for entrant, why in outcome.failed.items()})
    if not outcome.measured:
        return None
    today = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")
    return Point(task.problem, today, outcome.measured, tuple(outcome.peers.items()), task.spreads)


def _line(problem: Problem, point: Point | None) -> str:
    if point is None:
        return str(problem)
    best = point.measured[0]
    peer = min(point.peers, key=lambda p: p[1], default=None)
    against = f", {peer[0]} {peer[1]:.1f} us, ratio {peer[1] / best.microseconds:.3f}" if peer else ""
    return f"{problem}: {best.microseconds:.1f} us{against}, {best.ordered}"


@Bundles.aside()
def tune(
    op: object,
    shapes: Iterable[tuple[int, int, int] | Problem],
    *,
    dtypes: DTypes = ("bf16",),
    a: Major = "row",
    b: Major = "col",
    batches: int | None = None,
    groups: int | None = None,
    spreads: Sequence[str] = (),
    wgrad: bool = False,
    out_dtype: torch.dtype | None = None,
    input_dtypes: Mapping[str, str] | None = None,
    device: int = 0,
    effort: Effort | None = None,
    folder: str | os.PathLike[str] | None = None,
    again: bool = False,
    allow_fallback: bool = False,
    deterministic: bool = False,
    executor: Executor | None = None,
    silence: float = 60.0,
    show: Callable[[str], None] | None = None,
) -> Report:
    """Find the fastest kernels for an op at some shapes, and keep the results for this user and kind of device.

    Parameters
    ----------
    op : Op, Epilogue, cutlass_ops.gemm or str
        A named op such as ``cutlass_ops.gemm_bias_relu``, a function decorated with :func:`cutlass_ops.epilogue`, or
        ``cutlass_ops.gemm`` for D = A @ B, or the name of one.
    shapes : iterable of (M, N, K)
        The problems. Calls with similar shapes also use the results.
    dtypes : str, torch.dtype, or sequence of such
        Dtypes of A and B, such as ``"bf16"`` or ``"f16"``. The epilogue's inputs and outputs have the same dtype by
        default, or BF16 if A and B are FP8. Kernels are measured with these types: if your calls use others, pass
        `out_dtype` and `input_dtypes`.
    a, b : {"row", "col"}
        Majors of A (M, K) and B (K, N). ``weight.t()`` of a weight (N, K) is ``"col"``. `wgrad` ignores them.
    batches : int, optional
        Tune calls with this number of batches, A (batches, M, K) and B (batches, K, N). Default: a single B.
    groups : int, optional
        Tune calls with this number of :class:`cutlass_ops.Groups`. M of a shape is then the mean number of rows of a
        group, slightly rounded.
    spreads : sequence of str
        How rows are spread over the groups: ``"equal"``, ``"random"`` (each row goes to a random group), ``"Zipf"``
        (Zipf's law) or ``"one"`` (all rows belong to one group). Default: all four. A kernel's time is the geometric
        mean over them, with the weights in ``cutlass_ops/kinds/spreads.py``.
    wgrad : bool
        Whether to tune sums over each group's rows, as for the gradient of weights. M and N of a shape are then the
        size of the gradient, and K is the mean number of rows.
    out_dtype : torch.dtype, optional
        D's dtype. Default: that of A.
    input_dtypes : mapping of str to str, optional
        Dtypes of some of the epilogue's inputs by name: ``{"scale": "f32"}``.
    device : int
        Index of the CUDA device.
    effort : Effort, optional
        How much to compile and measure.
    folder : str or path, optional
        Where to keep the tables. Default: ``CUTLASS_OPS_TUNING_DIR``, where calls look for them.
    again : bool
        Whether to repeat earlier measurements.
    allow_fallback : bool
        Whether PyTorch (cuBLASLt, followed by elementwise kernels if it has no such epilogue) may serve calls of these
        signatures, at exactly the shapes at which it was faster than every kernel. ``explain`` says if it does. By
        default, kernels of this library serve every call.
    deterministic : bool
        Whether calls of these signatures may only run kernels that do not split K. Then the bits of a row's result
        depend neither on the number of rows nor on the chosen kernel. Every kernel gives the same bits at every call,
        but kernels that split K (split-K, stream-K) may differ from the others in the last bit.
    executor : concurrent.futures.Executor, optional
        Compiles the kernels; its workers need the same compilers. By default, this process compiles. Kernels are
        measured here in any case.
    silence : float
        Seconds after which a kernel that does not end is abandoned.
    show : callable, optional
        Called with each line of progress. By default, a bar or lines go to standard error; see
        ``CUTLASS_OPS_PROGRESS``.

    Returns
    -------
    Report
        The tables, and what could not be compiled or measured, with reasons.

    Raises
    ------
    TypeError
        If `op` is not an op.
    NoDeviceError
        If the device does not exist.
    ValueError
        If a shape, number of batches or groups, spread, dtype, major or input is not valid; if both `allow_fallback`
        and `deterministic` are given, or `allow_fallback` with groups; or if tables cannot be written in the folder.
    UnsupportedError
        If no kernel serves the op on the device.
    ConfigError
        If a file in the folder is not a tuning table.
    ToolchainError, StoreError
        If kernels cannot be compiled, or kernels or tables cannot be stored.

    Examples
    --------
    >>> report = co.tune(co.gemm_bias_relu, [(512, 4096, 4096)])  # doctest: +SKIP
    >>> report.measured, report.failed  # doctest: +SKIP

    A longer run, for all weights of a network and several numbers of rows:

    >>> weights = [(4096, 4096), (11008, 4096)]  # N and K
    >>> shapes = [(m, n, k) for n, k in weights for m in (1, 16, 256, 4096)]
    >>> effort = co.types.Effort(kernels=96, seconds=3600)
    >>> report = co.tune(co.gemm_bias_relu, shapes, dtypes=("bf16", "f16"), effort=effort)  # doctest: +SKIP

    A layer of 64 experts with 16 rows each on average, spread at random or by Zipf's law:

    >>> co.tune(co.gemm, [(16, 2048, 4096)], groups=64, spreads=("random", "Zipf"))  # doctest: +SKIP
    """
    if allow_fallback and deterministic:
        raise ValueError("allow_fallback and deterministic exclude each other, since PyTorch's bits differ: pass one")
    for name, major in (("a", a), ("b", b)):
        if major not in get_args(Major):
            raise ValueError(f"{name} is {major!r}: use 'row' or 'col', the major of {name.upper()}")
    asked, effort = called(op), effort or Effort()
    if wgrad:
        if groups is None:
            raise ValueError("wgrad sums over the rows of groups: say how many, as groups=64")
        asked = op_for(asked.epilogue, RAGGED_K.name)
    if not isinstance(effort, Effort):
        raise TypeError(f"effort must be a cutlass_ops.types.Effort, not {reprlib.repr(effort)}")
    batches, groups = plain(batches), plain(groups)
    form, ways = _form(asked, batches, groups, spreads), spreads_in_order(spreads)
    if form.operands and allow_fallback:
        raise ValueError("allow_fallback lets PyTorch serve calls, and PyTorch serves no calls with groups: omit it")
    graph = asked.graph
    place = _place(device, folder)
    problems: dict[OpSignature, list[Problem]] = {}
    wanted = [Problem.of(shape)._replace(count=batches or groups or 1) for shape in shapes]
    if form == GROUPED:
        wanted = list(dict.fromkeys(problem._replace(m=nearest(problem.m)) for problem in wanted))
    if form == RAGGED_K:
        wanted = list(dict.fromkeys(problem._replace(k=nearest(problem.k)) for problem in wanted))
        a, b = "col", "row"  # groups are lines in memory
    for dtype in [dtypes] if isinstance(dtypes, str | torch.dtype) else dtypes:
        for problem in wanted:
            name = element_named(dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch."), OPERANDS).name
            signature = signature_at(
                graph, problem, name, a, b, out_dtype, place.device, input_dtypes, form, math=asked.math
            )
            problems.setdefault(signature, []).append(problem)
    for signature in problems:
        if not dispatch.specs(signature, place.device):
            what = f"a {signature.a}, b {signature.b}, d {signature.d}"
            raise UnsupportedError(dispatch.unserved(what, signature, place.device, place.name))
    known = {s: place.table(s) for s in problems}
    tasks = plan(problems, place.device, effort, known, deterministic=deterministic, spreads=ways)
    with Measurer(device, silence) as measurer:

        def measure(signature: OpSignature, problem: Problem, kernels: Mapping[Ordered, Path]) -> Outcome:
            return measurer.measure(signature, problem, kernels, rounds=effort.rounds, spreads=ways)

        return run(
            tasks, place, effort, measure=measure, again=again, allow_fallback=allow_fallback,
            deterministic=deterministic, executor=executor, show=show,
        )  # fmt: skip


def _form(asked: Op, batches: int | None, groups: int | None, spreads: Sequence[str]) -> Form:
    """Return the form of the tuned calls. Raises ValueError if the op has none, or an argument does not fit."""
    for name, count in (("batches", batches), ("groups", groups)):
        if count is not None and (type(count) is not int or count < 1):
            raise ValueError(f"{name} is {count!r}: give a number of {name}, 1 or more")
    if batches is not None and groups is not None:
        raise ValueError("batches and groups are given, and a call has one of them: omit the other")
    if asked.form.operands and groups is None:
        raise ValueError(f"{asked.name} multiplies groups of rows: say how many, as groups=64")
    if groups is None:
        if spreads:
            raise ValueError("spreads say how rows are spread over groups: pass groups= as well")
        return DENSE if batches is None else BATCHED
    form = RAGGED_K if asked.form == RAGGED_K else GROUPED
    require_groups(asked.graph, form)
    return form


def signature_at(
    graph: Graph,
    problem: Problem,
    dtype: str,
    a: Major,
    b: Major,
    out_dtype: torch.dtype | None,
    device: Device,
    input_dtypes: Mapping[str, str] | None = None,
    form: Form = DENSE,
    *,
    math: Math | None = None,
) -> OpSignature:
    """Return the signature of a call with contiguous tensors of these extents; see :func:`call_at`."""
    return signature_of(call_at(graph, problem, dtype, a, b, out_dtype, input_dtypes, form, math), device)


def _place(device: int, folder: str | os.PathLike[str] | None) -> Place:
    kept = Path(folder) if folder else _folder()
    # Before kernels are compiled and measured for hours.
    disk.require_folder(kept)
    if not torch.cuda.is_available():
        raise NoDeviceError("tuning measures on a CUDA device, and this process sees none: tune on a machine with one")
    if device not in range(torch.cuda.device_count()):
        raise NoDeviceError(f"there is no device {device}: this process sees {torch.cuda.device_count()}, from 0 on")
    name = torch.cuda.get_device_name(device)
    tables.prepare(kept)
    return Place(name, device_of(torch.device("cuda", device)), kept)


def _folder() -> Path:
    """Return the folder in which calls look for tables."""
    try:
        return env.tuning_dir()
    except env.NoHomeError as exc:
        raise StoreError(f"tuning tables cannot be kept: {exc}") from None
