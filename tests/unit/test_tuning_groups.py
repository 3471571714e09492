"""Tuning for groups of rows: by how their rows are spread, and in tables that calls read."""

import contextlib
import json
from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from signatures import H100

import cutlass_ops as co
from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.base import env
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.choose import dispatch, policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.chips import USUAL
from cutlass_ops.declare.config import Ordered
from cutlass_ops.declare.form import GROUPED, RAGGED_K
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import spreads
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.run.gemm import op_for
from cutlass_ops.tuner import trial, tuning
from cutlass_ops.tuner.measuring import Outcome
from cutlass_ops.tuner.tuning import Effort, Place, plan, run

pytestmark = pytest.mark.usefixtures("session")

PROBLEMS = [Problem(1, 2048, 4096, 64), Problem(16, 2048, 4096, 64), Problem(512, 2048, 4096, 8)]
SMALL = Effort(kernels=10, candidates=4, rounds=3)


@co.epilogue
def mixed(acc, bias: co.Row, scale: co.Col, residual: co.Tile, factor: co.Scalar):
    return co.e.relu(acc * scale + bias) * factor + residual


@co.epilogue
def accumulate(acc, before: co.Tile, bias: co.Row, scale: co.Col, factor: co.Scalar):
    return (acc + bias) * scale * factor + before


def signature(graph=builtin.identity.graph, problem=PROBLEMS[1], dtype="bf16", form=GROUPED):
    majors = ("col", "row") if form == RAGGED_K else ("row", "col")
    return signature_of(call_at(graph, problem, dtype, *majors, form=form), H100)


@pytest.fixture
def place(tmp_path):
    return Place(H100.name, H100, tmp_path / "tuning")


@pytest.fixture
def measured(monkeypatch):
    """Build every kernel, and measure the last ones of each task as the fastest."""
    asked = []

    @contextlib.contextmanager
    def building(specs, *, executor=None):
        futures = {spec: Future() for spec in specs}
        for spec, future in futures.items():
            future.set_result(Artifact(spec.slug, spec.slug, "", {}))
        yield futures

    def measure(signature, problem, kernels, **given):
        asked.append((problem, given.get("spreads")))
        ranked = list(kernels)[::-1]
        return Outcome(tuple(Measured(c.config, 10.0 + at, at / 10, c.order) for at, c in enumerate(ranked)))

    monkeypatch.setattr(tuning, "building", building)
    return SimpleNamespace(asked=asked, measure=measure)


# ---- Plans and tables ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_table_serves_calls(place, measured, monkeypatch):
    of, problem = signature(), PROBLEMS[1]
    before = dispatch.choose(of, H100, problem)[0].config
    run(plan({of: PROBLEMS}, H100, SMALL), place, SMALL, measure=measured.measure)
    best = tables.load(place.path(of)).at(problem).measured[0].config
    assert best != before
    monkeypatch.setenv(env.TUNING_DIR.name, str(place.folder))
    policies.forget()
    assert dispatch.choose(of, H100, problem)[0].config == best
    # Groups that follow each other, with about as many rows, and groups with room.
    x, w = torch.empty(64 * 16 + 5, 4096, device="meta"), torch.empty(64, 2048, 4096, device="meta")
    ends = torch.empty(64, dtype=torch.int32, device="meta")
    call = check_call(builtin.identity.graph, x.bfloat16(), w.bfloat16().mT, {}, None, None, offsets=ends, form=GROUPED)
    assert call.chosen_for == problem
    padded, op = torch.empty(64, 128, 4096, device="meta"), op_for(None, "masked", None, 16)
    room = op.checked(padded.bfloat16(), w.bfloat16().mT, (ends,), {}, None, None)
    assert room.chosen_for == problem
    assert signature_of(room, H100) == of


@pytest.mark.slow
def test_what_was_measured_of_other_spreads_is_measured_again(place, measured):
    of, some = signature(), PROBLEMS[:1]

    def tuned(*names):
        planned = plan({of: some}, H100, SMALL, spreads=names)
        return run(planned, place, SMALL, measure=measured.measure).measured

    assert [tuned(), tuned(), tuned("equal"), tuned("equal"), tuned("one")] == [1, 0, 1, 0, 1]
    (point,) = tables.load(place.path(of)).points
    assert point.spreads == ("one",)


def test_a_table_says_how_rows_were_spread():
    config = plan({signature(): PROBLEMS[:1]}, H100, SMALL)[0].entrants[0].config
    times = (Measured(config, 10.0, 0.0),)
    table = Table(H100.name, 132, signature(), (Point(PROBLEMS[0], "2026-11-27", times, (), ("equal", "one")),))
    plain = json.loads(json.dumps(table.to_json()))
    assert plain["points"][0]["spreads"] == ["equal", "one"]
    assert Table.from_json(plain) == Table.of_ours(plain) == table
    usual = Table(H100.name, 132, signature(), (Point(PROBLEMS[0], "2026-11-27", times),))
    assert "spreads" not in usual.to_json()["points"][0]
    assert table.merged(usual).points == usual.points
    for wrong in (["one", "equal"], [], ["all"], ["equal", "random", "Zipf", "one"], 3):
        with pytest.raises(ConfigError, match="spreads"):
            Table.from_json({**plain, "points": [{**plain["points"][0], "spreads": wrong}]})
    dense = signature_of(call_at(builtin.identity.graph, Problem(16, 64, 64), "bf16", "row", "col"), H100)
    with pytest.raises(ConfigError, match="has spreads, but form dense has no groups"):
        Table(H100.name, 132, dense, (Point(Problem(16, 64, 64), "2026-11-27", times, (), ("one",)),))


# ---- The function ----------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: H100.name)
    monkeypatch.setattr(tuning, "device_of", lambda _: H100)


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_groups_are_tuned_for_their_mean_and_their_spread(measured, tmp_path, monkeypatch):
    measurer = SimpleNamespace(measure=measured.measure)
    monkeypatch.setattr(tuning, "Measurer", lambda *_: nullcontext(measurer))
    shapes = [(16, 2048, 4096), (298, 2048, 4096), (299, 2048, 4096)]
    given = {"groups": 64, "spreads": ["Zipf", "equal"], "effort": SMALL, "folder": tmp_path}
    report = co.tune(builtin.bias, shapes, input_dtypes={"bias": "f32"}, **given)
    ((found, table),) = report.tables.items()
    assert (found.form, str(found.inputs[0])) == (GROUPED, "f32.row.align1")
    # 298 and 299 rows are one: kernels are chosen for 296.
    assert sorted(measured.asked) == [(Problem(m, 2048, 4096, 64), ("equal", "Zipf")) for m in (16, 296)]
    assert {p.spreads for p in table.points} == {("equal", "Zipf")}


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_gradients_are_tuned_for_the_mean_that_they_add_up(measured, tmp_path, monkeypatch):
    measurer = SimpleNamespace(measure=measured.measure)
    monkeypatch.setattr(tuning, "Measurer", lambda *_: nullcontext(measurer))
    given = {"groups": 64, "spreads": ["equal"], "effort": SMALL, "folder": tmp_path}
    report = co.tune(co.gemm, [(4096, 1536, 298), (4096, 1536, 299)], wgrad=True, **given)
    ((found, table),) = report.tables.items()
    assert (found.form, found.a.major, found.b.major) == (RAGGED_K, "col", "row")
    (problem,) = [p.problem for p in table.points]
    assert measured.asked == [(problem, ("equal",))] == [(Problem(4096, 1536, 296, 64), ("equal",))]
    assert all(m.config.schedule in ("pingpong", "cooperative") for m in table.points[0].measured)
    # A call is served by what was fastest.
    best = table.at(problem).measured[0].config
    assert dispatch.choose(found, H100, problem)[0].config != best
    monkeypatch.setenv(env.TUNING_DIR.name, str(tmp_path))
    policies.forget()
    x, gradient = (torch.empty(64 * 299, n, device="meta").bfloat16() for n in (4096, 1536))
    ends = torch.empty(64, dtype=torch.int32, device="meta")
    call = op_for(None, "ragged_k").checked(x.mT, gradient, (ends,), {}, None, None)
    assert (signature_of(call, H100), call.chosen_for) == (found, problem)
    assert dispatch.choose(found, H100, call.chosen_for)[0].config == best
    # One with an epilogue has a table of its own.
    (other,) = co.tune(op_for(accumulate, "ragged_k"), [problem.extents], **given).tables
    assert (other.form, other.epilogue) == (RAGGED_K, accumulate.graph)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("op", "options", "why"),
    [
        (co.gemm, {"groups": 0}, "groups is 0: give a number of groups, 1 or more"),
        (co.gemm, {"groups": 4, "batches": 4}, "batches and groups are given"),
        (co.gemm, {"spreads": ("one",)}, "spreads say how rows are spread over groups: pass groups= as well"),
        (co.gemm, {"groups": 4, "spreads": ("zap",)}, "'zap' is not a spread of rows: use some of equal"),
        (co.gemm, {"groups": 4, "spreads": "Zipf"}, "spreads is 'Zipf': pass a sequence of names"),
        (co.gemm, {"groups": 4, "allow_fallback": True}, "PyTorch serves no calls with groups"),
        (op_for(None, "grouped"), {}, "gemm multiplies groups of rows: say how many, as groups=64"),
        (op_for(None, "ragged_k"), {}, "gemm multiplies groups of rows: say how many, as groups=64"),
        (co.gemm, {"wgrad": True, "groups": 4, "allow_fallback": True}, "PyTorch serves no calls with groups"),
        (co.gemm, {"wgrad": True}, "wgrad sums over the rows of groups: say how many, as groups=64"),
        (composed.rms_norm, {"groups": 4}, "statistics of A's rows"),
    ],
)
def test_mistakes_are_named(op, options, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        co.tune(op, [(16, 64, 64)], folder=tmp_path, **options)


# ---- Trials ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def host(monkeypatch):
    cached = SimpleNamespace(L2_cache_size=USUAL.l2_bytes)
    monkeypatch.setattr(trial.torch.cuda, "get_device_properties", lambda device: cached)
    monkeypatch.setattr(trial.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(trial.torch.cuda, "synchronize", lambda device: None)


class Watch:
    """Takes as long as told for each way to launch an entrant."""

    def __init__(self, *_):
        self.runs = {}
        self.us = {}

    def add(self, name, run):
        self.runs[name] = run

    def round(self, names):
        return [self.us[name] for name in names]


def kernel_of(graph, off=1.0, form=GROUPED):
    """Return a kernel that computes groups by the reference, so many times too large."""
    asked, sizes = [], []

    def launch(a, b, d, ends, *inputs):
        *inputs, _, _, _ = inputs
        named = dict(zip((i.name for i in graph.inputs), inputs, strict=True))
        asked.append(ends.tolist())
        check_call(graph, a, b, named, d, None, offsets=ends, form=form).run_reference()
        d.mul_(off)
        return 0

    def workspace_size(*size):
        sizes.append(size)
        return 0

    return SimpleNamespace(launch=launch, workspace_size=workspace_size, asked=asked, sizes=sizes)


CASES = {
    "inputs": (mixed.graph, "bf16", Problem(5, 24, 64, 7), GROUPED, (35, 24, 64, 7)),
    "product": (composed.swiglu.graph, "f16", Problem(5, 24, 64, 7), GROUPED, (35, 24, 64, 7)),
    "blocks": (composed.scaled_blocks.graph, "e4m3", Problem(3, 136, 400, 4), GROUPED, (12, 136, 400, 4)),
    "gradient": (accumulate.graph, "bf16", Problem(24, 40, 5, 7), RAGGED_K, (24, 40, 35, 7)),
}


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(("graph", "dtype", "problem", "form", "launched"), CASES.values(), ids=CASES)
def test_a_kernel_is_checked_for_rows_that_are_spread_in_every_way(graph, dtype, problem, form, launched, monkeypatch):
    monkeypatch.setattr(trial, "Stopwatch", Watch)
    of = signature(graph, problem, dtype, form)
    found = trial.Trial(of, problem, torch.device("cpu"))
    entrant = Ordered(policies.policy(of, H100).kernels[0])
    kernel = kernel_of(graph, form=form)
    assert found.admit(entrant, kernel) is None
    assert {size[:4] for size in kernel.sizes} == {launched}
    assert len(kernel.asked) == len(spreads.ASSUMED)
    assert {ends[-1] for ends in kernel.asked} == {35 if problem.count == 7 else 12}
    assert len({tuple(np.diff([0, *ends])) for ends in kernel.asked}) == len(spreads.ASSUMED)
    assert found.admit(entrant, kernel_of(graph, 1.2, form)).startswith("d is wrong")
    found.admit_peers()
    assert found._peers == []


@pytest.mark.usefixtures("host")
def test_a_time_is_the_geometric_mean_over_spreads(monkeypatch):
    monkeypatch.setattr(trial, "Stopwatch", Watch)
    problem = Problem(5, 24, 64, 7)
    found = trial.Trial(signature(), problem, torch.device("cpu"), spreads=("equal", "one"))
    first, second = (Ordered(c) for c in policies.policy(signature(), H100).kernels[:2])
    for entrant in (first, second):
        assert found.admit(entrant, kernel_of(builtin.identity.graph)) is None
    # Two thirds of the weight are those of equal groups.
    found._watch.us = {(first, 0): 8.0, (first, 1): 64.0, (second, 0): 10.0, (second, 1): 20.0}
    rounds = []
    measured, peers = found.race(3, lambda: rounds.append(1))
    assert [m.config for m in measured] == [second.config, first.config]
    assert measured[0].microseconds == pytest.approx((10.0**2 * 20.0) ** (1 / 3))
    assert measured[1].microseconds == pytest.approx((8.0**2 * 64.0) ** (1 / 3), rel=1e-6)
    assert (peers, len(rounds)) == ((), 3)
    assert {m.order for m in measured} == {first.order}
    found.rehearse(first)
