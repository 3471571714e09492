"""The tuner compiles what may win, measures all it can, keeps every result, and goes on where it stopped."""

import random
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from signatures import H100, signature

import cutlass_ops as co
from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.base.errors import CompileError, MeasuringError, NoDeviceError, ToolchainError
from cutlass_ops.choose import dispatch, policies, pool, space, tables
from cutlass_ops.choose.tables import Measured
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.operand.call import check_call, signature_of
from cutlass_ops.run import gemm, norms
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


def test_a_pool_is_all_there_is_to_choose_from():
    pool = tuple(space.ranked(signature(), PROBLEMS[0], 3, H100))
    planned = tasks(Effort(kernels=10, candidates=4, pool=pool))
    assert {e.config for t in planned for e in t.entrants} == set(pool)


def expected(configs, problem):
    """Return the times that dispatch would expect of kernels."""
    wide = policies.policy(signature(), H100).with_further(c for c in configs)
    (times,) = wide.expected([problem]).times.tolist()
    return [times[wide.kernels.index(c)] for c in configs]


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


@pytest.mark.slow
@pytest.mark.parametrize("math", ["fast", "promoted", None])
def test_an_op_is_tuned_in_the_arithmetic_that_it_names(math, chip, tmp_path, monkeypatch):
    """Of FP8 sums: they are promoted at this K, if nobody says."""
    monkeypatch.setattr(tuning, "Measurer", lambda *_: nullcontext())
    a_device(monkeypatch)
    op = (
        gemm.op_for(None, "dense", (False, False, False))
        if math is None
        else gemm.op_for(None, "dense", (False, False, False)).in_math(math)
    )
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


def a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H100.name)
    monkeypatch.setattr(tuning, "device_of", lambda _: H100)


@pytest.mark.parametrize(
    "op", [co.gemm, co.gemm_bias_relu, builtin.bias_relu, pytest.param(norms.rmsnorm_op(), marks=pytest.mark.slow)]
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


@pytest.mark.parametrize("op", [co.gemm_swiglu, co.rmsnorm_gemm, None, lambda acc: acc])
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
    with pytest.raises(TypeError, match=r"^effort must be a cutlass_ops\.types\.Effort, not 'high'"):
        tuning.tune(co.gemm, [(64, 512, 512)], effort="high")
