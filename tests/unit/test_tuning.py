"""The tuner compiles what may win, measures all it can, keeps every result, and goes on where it stopped."""

import random
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from signatures import H100, signature

import cutlass_ops as co
from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.base import resources
from cutlass_ops.base.errors import CompileError, MeasuringError, NoDeviceError, ToolchainError
from cutlass_ops.choose import dispatch, policies, pool, space, tables
from cutlass_ops.choose.tables import Measured
from cutlass_ops.declare.config import ClusterShape, Means, Sm80Config, Sm90Config, ThreadblockShape
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.run import norms, scaled
from cutlass_ops.run.call import check_call, signature_of
from cutlass_ops.tuner import tuning
from cutlass_ops.tuner.measuring import Outcome
from cutlass_ops.tuner.tuning import Effort, Place, plan, run, signature_at

PROBLEMS = [
    Problem(1, 4096, 4096),
    Problem(64, 4096, 4096),
    Problem(512, 6144, 4096),
    Problem(2048, 4096, 4096),
    Problem(8192, 8192, 8192),
]
SMALL = Effort(kernels=10, candidates=4, rounds=3)


@pytest.fixture
def place(tmp_path):
    return Place("NVIDIA H100 80GB HBM3", H100, tmp_path / "tuning")


class Chip:
    """Builds and measures as told."""

    def __init__(self, seed=0):
        self.rng = random.Random(seed)
        self.built, self.measured = [], []
        self.refuse, self.fail, self.wrong = (), (), ()

    @contextmanager
    def building(self, specs, *, executor=None):
        futures = {}
        for spec in specs:
            self.built.append(spec)
            futures[spec] = Future()
            if spec.config in self.refuse:
                futures[spec].set_exception(CompileError(f"{spec.slug}: error: too complex"))
            else:
                futures[spec].set_result(Artifact(spec.slug, spec.slug, "", {}))
        yield futures

    def measure(self, signature, problem, kernels):
        self.measured.append(problem)
        if problem in self.fail:
            raise MeasuringError("it does not end")
        failed = {c: "D is wrong" for c in kernels if c.config in self.wrong}
        right = [c for c in kernels if c not in failed]
        times = {c: pool.predict(c.config, problem, H100) * self.rng.uniform(1, 1.05) for c in right}
        order = sorted(right, key=times.__getitem__)
        best = times[order[0]] if order else 0
        return Outcome(
            tuple(Measured(c.config, times[c], times[c] / best - 1, c.order) for c in order), {"eager": 99.0}, failed
        )


@pytest.fixture
def chip(monkeypatch):
    chip = Chip()
    monkeypatch.setattr(tuning, "building", chip.building)
    return chip


def tasks(effort=SMALL, problems=PROBLEMS):
    return plan({signature(): problems}, H100, effort)


def test_few_kernels_cover_every_problem_and_the_likeliest_race():
    planned = tasks()
    assert [t.problem for t in planned] == PROBLEMS
    assert len({e.config for t in planned for e in t.entrants}) <= 10
    for task in planned:
        assert 1 <= len({e.config for e in task.entrants}) <= 4
        assert len(set(task.entrants)) == len(task.entrants)
        (best,) = space.ranked(signature(), task.problem, 1, H100)
        *times, of_best = expected([*(e.config for e in task.entrants), best], task.problem)
        assert times == sorted(times)
        assert times[0] <= 1.1 * of_best


def test_what_serves_untuned_races_so_that_tuning_makes_no_call_slower():
    problems = [Problem(345, 2560, 9344), Problem(8, 4096, 14336), Problem(898, 3712, 832)]
    serving = {p: dispatch.choose(signature(), H100, p)[0].config for p in problems}
    for task in tasks(SMALL, problems):
        assert serving[task.problem] in {e.config for e in task.entrants}


def test_what_serves_races_however_slow_it_is_expected_to_be(monkeypatch):
    usual = {e.config for t in tasks() for e in t.entrants}
    slow = next(c for c in reversed(policies.policy(signature(), H100).kernels) if c not in usual)
    monkeypatch.setattr(dispatch, "choose", lambda *_: (H100.spec(signature(), slow), TileOrder()))
    for task in tasks():
        assert slow in {e.config for e in task.entrants}
        assert task.entrants[0].config != slow


def test_of_many_kernels_that_serve_those_that_serve_most_race():
    """Among so few kernels that model and what serves now share them."""
    serving = Counter(dispatch.choose(signature(), H100, p)[0].config for p in PROBLEMS)
    raced_now = {e.config for t in tasks(Effort(kernels=4, candidates=4)) for e in t.entrants}
    assert len(raced_now) == 4
    assert len(raced_now & {*serving}) >= 2


def test_a_pool_is_all_there_is_to_choose_from():
    pool = tuple(space.ranked(signature(), PROBLEMS[0], 3, H100))
    planned = tasks(Effort(kernels=10, candidates=4, pool=pool))
    assert {e.config for t in planned for e in t.entrants} == set(pool)


def test_what_the_model_puts_far_ahead_does_not_race_alone():
    """On few rows tiles of 256 rows are far behind, and yet some race."""
    narrow = Sm90Config(ThreadblockShape(64, 16, 256), schedule="warp_specialized", swap_ab=True)
    wide = [
        Sm90Config(ThreadblockShape(256, n, 64), schedule="cooperative", swap_ab=swap)
        for n in (128, 192)
        for swap in (False, True)
    ]
    assert min(pool.predict(c, Problem(8, 4096, 14336), H100) for c in wide) > 1.15 * pool.predict(
        narrow, Problem(8, 4096, 14336), H100
    )
    (task,) = tasks(Effort(kernels=10, candidates=12, pool=(narrow, *wide)), [Problem(8, 4096, 14336)])
    raced = list(dict.fromkeys(e.config for e in task.entrants))
    assert raced[0] == narrow
    assert len(raced) == 4


def test_the_model_promises_no_more_of_what_is_not_known_than_of_what_is(monkeypatch):
    """Where all that was measured takes twice what the model says, an unknown kernel will as well."""
    problem, shipped = Problem(4096, 4096, 4096), tables.load(tables.path_of(resources.tuned(), H100.name, signature()))

    def slower(point):
        return replace(point, measured=tuple(replace(m, microseconds=2 * m.microseconds) for m in point.measured))

    table = replace(shipped, points=tuple(map(slower, shipped.points)))
    policy = policies.Policy.of([table], signature(), H100, table.kernels)
    monkeypatch.setattr(policies, "policy", lambda *_: policy)
    point = next(p for p in table.points if p.problem == problem)
    best = next(m.config for m in point.measured if m.config in table.kernels)
    limit = 1.1 * pool.predict(best, problem, H100)
    ranked = space.ranked(signature(), problem, 4000, H100)
    unknown = next(c for c in ranked if c not in policy.kernels and pool.predict(c, problem, H100) > limit)
    (task,) = tasks(Effort(kernels=2, candidates=2, pool=(unknown, best)), [problem])
    assert task.entrants[0].config == best


def test_what_was_measured_counts_among_further_kernels_as_well():
    policy, problem = policies.policy(signature(), H100), Problem(4096, 4096, 4096)
    known = policy.expected([problem]).times[0].tolist()
    further = [c for c in space.ranked(signature(), problem, 400, H100) if c not in policy.kernels][:2]
    assert further
    wide = policy.with_further(further)
    assert wide.kernels == (*policy.kernels, *further)
    measured = {m.config for m in policy.own.at(problem).measured}
    times = dict(zip(wide.kernels, wide.expected([problem]).times[0].tolist(), strict=True))
    assert measured
    assert all(times[c] == known[policy.kernels.index(c)] for c in measured)


def expected(configs, problem):
    """Return the times that dispatch would expect of kernels."""
    wide = policies.policy(signature(), H100).with_further(c for c in configs)
    (times,) = wide.expected([problem]).times.tolist()
    return [times[wide.kernels.index(c)] for c in configs]


@pytest.mark.slow
def test_more_kernels_cover_better():
    def loss(effort):
        return sum(expected([t.entrants[0].config], t.problem)[0] for t in tasks(effort))

    assert loss(Effort(kernels=12)) <= loss(Effort(kernels=3))


def test_a_kernel_that_is_removed_before_it_is_measured_is_built_again(place, chip, monkeypatch):
    made = Artifact("key", Path("again"), "", {})

    @contextmanager
    def building(specs, *, executor=None):
        removed = Artifact("key", Path("removed"), "", {}, again=lambda use: use(made))
        futures = {spec: Future() for spec in specs}
        for future in futures.values():
            future.set_result(removed)
        yield futures

    seen = set()

    def measure(signature, problem, kernels):
        seen.update(kernels.values())
        return chip.measure(signature, problem, kernels)

    monkeypatch.setattr(tuning, "building", building)
    run(tasks(problems=PROBLEMS[:1]), place, SMALL, measure=measure)
    assert seen == {made.folder}


@pytest.mark.slow
def test_a_refinement_looks_around_what_was_best(place, chip):
    run(tasks(), place, SMALL, measure=chip.measure)
    before = tables.load(place.path(signature()))
    effort = Effort(kernels=20, candidates=6, rounds=3, refine=True)
    refined = plan({signature(): PROBLEMS}, H100, effort, {signature(): before})
    for task in refined:
        best = next(p for p in before.points if p.problem == task.problem).measured[0].config
        assert task.entrants[0].config == best
    new = {e.config for t in refined for e in t.entrants} - {m.config for p in before.points for m in p.measured}
    assert new
    report = run(refined, place, effort, measure=chip.measure)
    assert report.measured == len(PROBLEMS)
    after = tables.load(place.path(signature()))
    for old, now in zip(before.points, after.points, strict=True):
        assert {m.config for m in now.measured} >= {m.config for m in old.measured}


def test_neighbours_are_one_step_away():
    centre = Sm90Config(ThreadblockShape(128, 128, 64), ClusterShape(2, 1))
    found = space.neighbours(signature(), centre, H100)
    assert replace(centre, threadblock=ThreadblockShape(128, 144, 64)) in found
    assert replace(centre, threadblock=ThreadblockShape(128, 128, 128)) in found
    assert replace(centre, schedule="cooperative") in found
    assert replace(centre, cluster=ClusterShape(1, 1)) in found
    assert replace(centre, cluster=ClusterShape(1, 2), swap_ab=True) in found  # the same tiles, the other way round
    assert replace(centre, threadblock=ThreadblockShape(64, 256, 64)) not in found
    assert centre not in found


@pytest.mark.slow
@pytest.mark.parametrize("means", get_args(Means))
def test_the_other_ways_to_means_are_one_step_away(means):
    norm = signature(composed.rms_norm)
    centre = Sm90Config(ThreadblockShape(64, 128, 64), ClusterShape(2, 1), means=means)
    found = space.neighbours(norm, centre, H100)
    others = [way for way in get_args(Means) if way != means]
    for way in others:
        assert replace(centre, means=way) in found
        assert replace(centre, means=way, cluster=ClusterShape(1, 1)) not in found  # two steps
    assert replace(centre, cluster=ClusterShape(1, 1)) in found
    assert replace(centre, threadblock=ThreadblockShape(64, 144, 64)) in found
    assert not any(replace(centre, means=way, threadblock=ThreadblockShape(64, 144, 64)) in found for way in others)


@pytest.mark.slow
def test_ways_that_are_illegal_are_no_neighbours():
    norm = signature(composed.rms_norm)
    centre = Sm90Config(ThreadblockShape(128, 128, 64), means="beside")
    assert {c.means for c in space.neighbours(norm, centre, H100)} == {"beside", "ahead"}


def test_operands_that_tma_cannot_load_are_tuned_among_sm80_kernels():
    odd = signature_at(builtin.bias_relu.graph, Problem(64, 4097, 4097), "bf16", "row", "col", None, H100)
    assert odd.a == Operand.of("bf16.row.align1")
    configs = {type(e.config) for t in plan({odd: [Problem(64, 4097, 4097)]}, H100, SMALL) for e in t.entrants}
    assert configs == {Sm80Config}


def test_what_was_measured_is_kept_and_not_measured_again(place, chip):
    report = run(tasks(), place, SMALL, measure=chip.measure)
    assert (report.measured, report.known, report.left, report.failed) == (5, 0, 0, {})
    table = tables.load(place.path(signature()))
    assert [p.problem for p in table.points] == sorted(PROBLEMS)
    assert [p.problem for p in report.tables[signature()].points] == sorted(PROBLEMS)
    assert table.points[0].peers == (("eager", 99.0),)

    chip.built.clear()
    again = run(tasks(problems=[*PROBLEMS, Problem(3, 4096, 4096)]), place, SMALL, measure=chip.measure)
    assert (again.measured, again.known) == (1, 5)
    assert chip.measured[5:] == [Problem(3, 4096, 4096)]
    # Only what the new problem needs was compiled.
    assert len(chip.built) <= SMALL.candidates
    assert run(tasks(), place, SMALL, measure=chip.measure, again=True).measured == 5


def test_a_run_that_is_interrupted_keeps_what_it_has(place, chip):
    def measure(*args):
        if len(chip.measured) == 2:
            raise KeyboardInterrupt
        return chip.measure(*args)

    with pytest.raises(KeyboardInterrupt):
        run(tasks(), place, SMALL, measure=measure)
    kept = tables.load(place.path(signature()))
    assert len(kept.points) == 2
    # Calls can use it as it is.
    assert {p.measured[0].config for p in kept.points} <= set(kept.kernels)
    assert run(tasks(), place, SMALL, measure=chip.measure).known == 2


def test_time_is_up(place, chip):
    report = run(tasks(), place, Effort(seconds=0.0), measure=chip.measure)
    assert (report.measured, report.left) == (0, 5)


def test_time_is_up_while_kernels_are_compiled(place, monkeypatch):
    @contextmanager
    def building(specs, *, executor):
        yield {spec: Future() for spec in specs}  # never done

    monkeypatch.setattr(tuning, "building", building)
    report = run(tasks(), place, Effort(seconds=0.05), measure=lambda *_: pytest.fail("nothing can be measured"))
    assert (report.measured, report.left) == (0, 5)


def test_a_kernel_that_cannot_be_compiled_or_is_wrong_leaves_the_others(place, chip):
    planned = tasks()
    kernels, task = next((k, t) for t in planned if len(k := list(dict.fromkeys(e.config for e in t.entrants))) >= 4)
    refused, wrong = kernels[:2]
    planned = [task]
    chip.refuse, chip.wrong = {refused}, {wrong}
    report = run(planned, place, SMALL, measure=chip.measure)
    assert report.measured == 1
    first = tables.load(place.path(signature())).points[0]
    assert not {refused, wrong} & {m.config for m in first.measured}
    reasons = {H100.spec(signature(), c).slug for c in (refused,)}
    assert reasons <= set(report.failed)
    assert any("too complex" in why for why in report.failed.values())
    assert any("D is wrong" in why for why in report.failed.values())


def test_a_problem_that_cannot_be_measured_is_reported(place, chip):
    chip.fail = {PROBLEMS[1]}
    report = run(tasks(), place, SMALL, measure=chip.measure)
    assert report.measured == 4
    assert report.failed == {"64x4096x4096": "it does not end"}


def test_without_a_compiler_nothing_is_tuned(place, chip, monkeypatch):
    @contextmanager
    def building(specs, *, executor=None):
        futures = {spec: Future() for spec in specs}
        for future in futures.values():
            future.set_exception(ToolchainError("no nvcc"))
        yield futures

    monkeypatch.setattr(tuning, "building", building)
    with pytest.raises(ToolchainError, match="no nvcc"):
        run(tasks(), place, SMALL, measure=chip.measure)


def test_problems_are_measured_in_the_order_in_which_their_kernels_are_there(place, chip, monkeypatch):
    planned = tasks(Effort(kernels=40, candidates=2))
    last = planned[-1]

    @contextmanager
    def building(specs, *, executor=None):
        futures = {spec: Future() for spec in specs}
        wanted = {H100.spec(signature(), e.config) for e in last.entrants}
        for spec, future in sorted(futures.items(), key=lambda item: item[0] not in wanted):
            if spec in wanted:
                future.set_result(Artifact(spec.slug, spec.slug, "", {}))
        yield futures
        assert chip.measured[0] == last.problem

    def measure(signature, problem, kernels):
        chip.measured.append(problem)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning, "building", building)
    with pytest.raises(KeyboardInterrupt):
        run(planned, place, SMALL, measure=measure)
    assert chip.measured == [last.problem]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_a_signature_is_that_of_a_call(dtype):
    found = signature_at(builtin.bias_relu_residual.graph, Problem(512, 4096, 4096), dtype, "row", "col", None, H100)
    assert (str(found.a), str(found.b), str(found.d)) == (f"{dtype}.row", f"{dtype}.col", f"{dtype}.row")
    assert [str(i.dtype) for i in found.inputs] == [dtype, dtype]
    assert Sm90Config in {type(c) for c in policies.policy(found, H100).kernels}


@pytest.mark.parametrize("math", ["fast", "promoted", None])
def test_an_op_is_tuned_in_the_arithmetic_that_it_names(math, chip, tmp_path, monkeypatch):
    """Of FP8 sums: they are promoted at this K, if nobody says."""
    monkeypatch.setattr(tuning, "Measurer", lambda *_: nullcontext())
    a_device(monkeypatch)
    op = scaled.scaled_op() if math is None else scaled.scaled_op().in_math(math)
    options = {"input_dtypes": dict.fromkeys(op.names, "f32"), "effort": Effort(seconds=0), "folder": tmp_path}
    (found,) = tuning.tune(op, [(64, 512, 4096)], dtypes="e4m3", **options).tables
    a, w = (torch.empty(rows, 4096, dtype=torch.float8_e4m3fn) for rows in (64, 512))
    scales = {name: torch.empty(()) for name in op.names}
    call = check_call(op.graph, a, w.t(), scales, None, None, math=math)
    assert found == signature_of(call, H100)
    assert found.promoted == (math != "fast")


def test_inputs_may_have_dtypes_of_their_own():
    graph = norms.rmsnorm_op(given="sums").graph
    x, w = torch.empty(64, 256, dtype=torch.bfloat16), torch.empty(128, 256, dtype=torch.bfloat16)
    values = {"row_sum_square": torch.empty(64), "inverse_count": 1 / 256, "eps": 1e-5}
    called = signature_of(check_call(graph, x, w.t(), values, None, None), H100)
    arguments = (graph, Problem(64, 128, 256), "bf16", "row", "col", None, H100)
    assert signature_at(*arguments, {"row_sum_square": "f32"}) == called
    assert signature_at(*arguments) != called
    with pytest.raises(ValueError, match="input_dtypes names sums: the epilogue's inputs are"):
        signature_at(*arguments, {"sums": "f32"})
    with pytest.raises(ValueError, match="f64"):
        signature_at(*arguments, {"eps": "f32", "row_sum_square": "f64"})


# ---- Deterministic -----------------------------------------------------------------------------------------------

# Few tiles and much K: whoever may split K does.
LONG = Problem(64, 512, 28672)


def raced(planned):
    return [e for task in planned for e in task.entrants]


def test_only_kernels_that_take_all_of_k_race_where_results_must_not_depend_on_the_choice(place, chip):
    effort = Effort(kernels=40, candidates=12, rounds=3)
    free = plan({signature(): [LONG]}, H100, effort)
    assert not free[0].entrants[0].config.whole_k
    assert run(free, place, effort, measure=chip.measure).measured == 1

    bound = plan({signature(): [LONG]}, H100, effort, {signature(): place.table(signature())}, deterministic=True)
    assert raced(bound)
    assert all(e.config.whole_k for e in raced(bound))
    # What won before may not serve, so the problem is measured again, but not a third time.
    report = run(bound, place, effort, measure=chip.measure, deterministic=True)
    assert (report.measured, report.known) == (1, 0)
    assert run(bound, place, effort, measure=chip.measure, deterministic=True).known == 1
    table = tables.load(place.path(signature()))
    assert table.deterministic
    assert table.kernels
    assert all(c.whole_k for c in table.kernels)

    run(free, place, effort, measure=chip.measure)
    table = tables.load(place.path(signature()))
    assert not table.deterministic


def test_a_refinement_looks_around_no_kernel_that_may_not_serve(place, chip):
    effort = Effort(kernels=40, candidates=12, rounds=3, refine=True)
    run(plan({signature(): [LONG]}, H100, effort), place, effort, measure=chip.measure)
    known = {signature(): place.table(signature())}
    assert any(not e.config.whole_k for e in raced(plan({signature(): [LONG]}, H100, effort, known)))
    assert all(e.config.whole_k for e in raced(plan({signature(): [LONG]}, H100, effort, known, deterministic=True)))


def test_pytorch_and_one_order_of_additions_exclude_each_other():
    with pytest.raises(ValueError, match="exclude each other"):
        tuning.tune(builtin.bias_relu, [LONG], allow_fallback=True, deterministic=True)


def a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H100.name)
    monkeypatch.setattr(tuning, "device_of", lambda _: H100)


@pytest.mark.parametrize(
    "op",
    [co.gemm, co.gemm_bias_relu, builtin.bias_relu, pytest.param(norms.rmsnorm_op(), marks=pytest.mark.slow)],
)
def test_what_a_call_can_be_made_of_can_be_tuned(op, chip, tmp_path, monkeypatch):
    """With a folder by its name, as a path has it."""
    monkeypatch.setattr(tuning, "Measurer", lambda *_: nullcontext(SimpleNamespace(measure=measure)))
    a_device(monkeypatch)

    def measure(signature, problem, kernels, *, rounds, spreads):
        assert (rounds, spreads) == (SMALL.rounds, ())
        return chip.measure(signature, problem, kernels)

    report = tuning.tune(op, [LONG], effort=SMALL, folder=str(tmp_path / "mine"))
    ((signature, table),) = report.tables.items()
    assert signature.epilogue == (builtin.identity.graph if op is co.gemm else op.graph)
    assert [p.problem for p in table.points] == [LONG]
    assert [tables.load(path).signature for path in (tmp_path / "mine").glob("*.json")] == [signature]


@pytest.mark.parametrize(
    ("dtypes", "found"),
    [
        pytest.param("f16", ["f16"], marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, ["bf16"], marks=pytest.mark.slow),
        (["bfloat16"], ["bf16"]),
        (("f16", torch.bfloat16), ["bf16", "f16"]),
    ],
)
def test_dtypes_have_several_names(dtypes, found, chip, tmp_path, monkeypatch):
    a_device(monkeypatch)
    monkeypatch.setattr(tuning, "Measurer", lambda *_: nullcontext())
    report = tuning.tune(co.gemm, [(64, 512, 512)], dtypes=dtypes, effort=Effort(seconds=0), folder=tmp_path)
    assert sorted(s.a.dtype.name for s in report.tables) == found


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"a": "rows"}, ValueError, "a is 'rows': use 'row' or 'col'"),
        ({"b": None}, ValueError, "b is None: use 'row' or 'col'"),
        ({"dtypes": "int4"}, ValueError, "unknown dtype 'int4': use one of"),
        ({"dtypes": [torch.uint8]}, ValueError, "unknown dtype 'uint8': use one of"),
        ({"device": 7}, NoDeviceError, "there is no device 7: this process sees 1"),
    ],
)
def test_mistakes_are_named(options, error, why, tmp_path, monkeypatch):
    a_device(monkeypatch)
    with pytest.raises(error, match=why):
        tuning.tune(co.gemm, [LONG], folder=tmp_path, **options)


@pytest.mark.parametrize("op", [co.gemm_swiglu, co.rmsnorm_gemm, "gemm", None, lambda acc: acc])
def test_what_is_no_op_is_said_to_be_none(op):
    with pytest.raises(TypeError, match=r"pass cutlass_ops\.gemm, a named op .*rmsnorm_op\(\)"):
        tuning.tune(op, [LONG])


@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("kernels", (0, -1), ValueError),
        ("candidates", (0,), ValueError),
        ("rounds", (-(10**30),), ValueError),
        ("kernels", (1.5, "8", None, True, float("nan")), TypeError),
        ("seconds", (-1, float("nan")), ValueError),
        ("seconds", ("60", None, [60]), TypeError),
        ("within", (0.5, float("nan")), ValueError),
        ("refine", (1, None), TypeError),
        ("pool", (5, "sm80", ("sm80",)), TypeError),
    ],
)
def test_an_effort_that_means_nothing_is_refused_where_it_is_made(name, values, error):
    for value in values:
        with pytest.raises(error, match=f"^{name} must be "):
            Effort(**{name: value})


def test_an_effort_takes_numpys_numbers_and_lists():
    assert tuning.Effort(kernels=np.int64(3), pool=[]) == tuning.Effort(kernels=3)
    with pytest.raises(TypeError, match=r"^effort must be a cutlass_ops\.Effort, not 'high'"):
        tuning.tune(co.gemm, [(64, 512, 512)], effort="high")
