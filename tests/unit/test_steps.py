"""What is found once for a weight: the kernels that tables and model choose, in little memory."""

import itertools
import pickle
import random
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from processes import WITHOUT_PYTORCH
from signatures import A100, H100, H200, signature

from cutlass_ops.base import resources
from cutlass_ops.base.errors import UnsupportedError
from cutlass_ops.choose import dispatch, knowledge, policies, steps, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.config import ClusterShape, Sm90Config, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds.arrays import Extents
from cutlass_ops.tuner.tuning import signature_at
from tests.sampling import in_turn

pytestmark = pytest.mark.usefixtures("session")

PCIE = replace(H100, multiprocessors=114, name="NVIDIA H100 PCIe")
SIGNATURES = {
    "bias_relu": (signature(), H100),
    "bias_gelu of a smaller chip": (signature(builtin.bias_gelu), PCIE),
    "rms_norm": (
        signature_at(composed.rms_norm.graph, Problem(64, 4096, 4096), "bf16", "row", "col", None, H200),
        H200,
    ),
    "swiglu": (signature_at(composed.swiglu.graph, Problem(64, 4096, 4096), "f16", "row", "col", None, H100), H100),
    "lines of A along M": (signature(builtin.identity, majors=("col", "row")), H100),
    "a norm of such lines": (signature(composed.rms_norm, majors=("col", "col")), H100),
    "misaligned": (signature(a=1, b=1, d=1), H100),
    "mma.sync": (signature(), A100),
}


def weights(seed, count):
    """Weights of all sizes."""
    rng = random.Random(seed)
    units = [rng.choice((8, 64, 512)) for _ in range(2 * count)]
    extents = [max(1, round(2 ** rng.uniform(6, 15.5) / unit)) * unit for unit in units]
    return list(zip(extents[::2], extents[1::2], strict=True))


@pytest.mark.parametrize(("name", "seed"), in_turn(SIGNATURES, range(6)))
def test_the_steps_have_the_fastest_kernel_at_every_number_of_rows(name, seed):
    (weight,) = weights(f"{name} {seed}", 1)
    policy = policies.policy(*SIGNATURES[name])
    found = policy.weight_of(*weight, 1)
    rows = np.arange(1, steps.MOST_ROWS + 1)
    known = policy.knowledge.foretold(Extents.of_rows(rows, *weight, 1))
    kept = [policy.kernels.index(c) for c in found.kept]
    times, by_gpc = known.times[:, kept], known.by_gpc[:, kept]
    losses = []
    for at, m in enumerate(rows.tolist()):
        kernel, prefers_gpc = found.steps.at(m)  # at each number of rows, so that no call has to read tables
        losses.append(times[at, kernel] / times[at].min() - 1)
        assert by_gpc[at, kernel] == prefers_gpc
    # What is interpolated hides a tie now and then. Times of so many problems are good to FP32.
    assert max(losses) < 1e-4
    assert sum(loss > 1e-6 for loss in losses) < 0.001 * len(rows)


def test_kernels_that_are_equally_fast_serve_as_the_policy_chooses(monkeypatch):
    policy = policies.policy(signature(), H200)
    n, k = 152064, 8192
    decided = anew(policy).weight_of(n, k, 1).steps
    monkeypatch.setattr(steps, "_MOST_TIES", 0)
    left = anew(policy).weight_of(n, k, 1).steps
    tied = [m for m in range(1, steps.MOST_ROWS + 1) if left.at(m) is None]
    assert tied
    kept = policy.weight_of(n, k, 1).kept
    assert [kept[decided.at(m)[0]] for m in tied] == [policy.choose(Problem(m, n, k)).config for m in tied]


def test_where_no_kernel_can_be_launched_nothing_is_decided(monkeypatch):
    kernel = Sm90Config(ThreadblockShape(64, 64, 64), schedule="warp_specialized")
    policy = policies.Policy.of((), signature(), H100, [kernel])
    looks, foretold = [], steps._foretold
    monkeypatch.setattr(steps, "_foretold", lambda *given: looks.append(given) or foretold(*given))
    assert policy.weight_of(4480000, 4096, 1).steps == steps.Steps((1,), (steps._UNDECIDED,))
    assert len(looks) == 2  # at all numbers of rows, and at the first one alone
    with pytest.raises(UnsupportedError, match="the grid would have more thread blocks"):
        policy.serves(Problem(64, 4480000, 4096))


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_serves_is_what_tables_and_model_choose(name):
    policy, rng = policies.policy(*SIGNATURES[name]), random.Random(name)
    for n, k in (*weights(name, 2), (4096, 4096)):
        tuned = [p.problem.m for t in policy.tables for p in t.points if (p.problem.n, p.problem.k) == (n, k)]
        drawn = [round(2 ** rng.uniform(0, 14)) for _ in range(40)]
        for m in {*drawn, *tuned}:
            problem = Problem(m, n, k)
            best, found = policy.serves(problem)
            assert best == policy.choose(problem).ordered
            assert best.config in found.kept


def anew(policy):
    """Return a policy that has not decided about any weight."""
    return replace(policy, knowledge=replace(policy.knowledge))


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_a_first_call_asks_for_is_what_is_decided_once_all_steps_are_known(name):
    shipped, rng = policies.policy(*SIGNATURES[name]), random.Random(name)
    (n, k), rows = weights(name, 1)[0], [1, 5, 31, *(round(2 ** rng.uniform(0, 14)) for _ in range(12))]
    first = []
    for m in rows:
        policy = anew(shipped)
        best, weight = policy.serves(Problem(m, n, k))
        assert not weight.so_far.whole
        first.append(best)
    weight.finish()
    assert [policy.serves(Problem(m, n, k))[0] for m in rows] == first
    # Which call came first has no influence on the steps, nor on what is kept.
    other = anew(shipped).weight_of(n, k, 1, rows[3])
    assert (other.kept, other.measured, other.steps) == (weight.kept, weight.measured, weight.steps)


def test_the_number_of_rows_of_the_first_call_needs_no_second_look(monkeypatch):
    policy = policies.policy(signature(), H100)
    monkeypatch.setattr(policies.Policy, "choose", lambda *_: pytest.fail("asked again"))
    for m in (7, 100, 3001, 7777):
        assert anew(policy).serves(Problem(m, 4096, 1536))


def test_without_a_thread_the_steps_are_searched_for_after_some_numbers_of_rows():
    policy = anew(policies.policy(signature(), H100))
    weight = policy.weight_of(4096, 1536, 1)
    known = [policy.serves(Problem(m, 4096, 1536))[0] for m in (2, 8, 64, 512, 4096) * 4]
    assert None not in known
    searched = []
    rows = (m for m in range(3001, 4000) if m % 8)  # none of them is foretold
    for m in itertools.islice(rows, 66):
        policy.serves(Problem(m, 4096, 1536))
        searched.append(weight.so_far.whole)
    assert searched == [False] * 64 + [True] * 2
    assert weight.finished


def test_threads_decide_alike_while_one_searches():
    policy, rows = anew(policies.policy(signature(), H100)), range(1, 8000, 97)
    weight = policy.weight_of(6144, 2560, 1)
    with ThreadPoolExecutor(8) as threads:
        left = [threads.submit(weight.finish) for _ in range(2)]
        found = list(threads.map(lambda m: policy.serves(Problem(m, 6144, 2560)), rows))
        assert all(each.result() is None for each in left)
    assert weight.finished
    assert [ordered for ordered, _ in found] == [policy.choose(Problem(m, 6144, 2560)).ordered for m in rows]
    assert all(of is weight for _, of in found)


def test_a_process_forked_while_a_thread_searches_decides_alike():
    script = """
import os, sys, threading
sys.path.insert(0, "tests/unit")
from signatures import H100, signature
from cutlass_ops.choose import dispatch, steps
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.problem import Problem

def decided():
    found = [dispatch.decide(signature(), H100, Problem(m, 4096, 2560)) for m in (1, 33, 100, 3001, 7777)]
    return found[-1], [(each.config, each.order) for each in found]

search, begun, go = steps._all_steps, threading.Event(), threading.Event()

def slow(*arguments):
    begun.set()
    go.wait(60)
    return search(*arguments)

first, wanted = decided()
first._weight.so_far._search = lambda of=first._weight.so_far._search: slow(*of.args)
Background.current().later(first.finish)
begun.wait(60)
child = os.fork()
if child == 0:
    go.set()  # the thread that waits is not here
    last, found = decided()
    same = found == wanted and not last.is_finished
    Background.current().later(last.finish)
    Background.current().wait()
    last, found = decided()
    os._exit(0 if same and found == wanted and last.is_finished else 1)
go.set()
Background.current().wait()
assert decided()[1] == wanted
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_PYTORCH + script], check=True, timeout=120)


def test_a_decision_needs_no_specification_twice():
    first, second = (dispatch.decide(signature(), H100, Problem(m, 4096, 4096)) for m in (100, 3000))
    assert first.spec is next(s for s in first.specs if s.config == first.config)
    assert all(a is b for a, b in zip(first.specs, second.specs, strict=True))


def test_steps_of_eight_weights_take_little_memory():
    policy = policies.policy(signature(), H100)
    policy.weight_of(64, 64, 1)
    tracemalloc.start()
    try:
        found = [policy.weight_of(4096 + 128 * at, 4096, 1) for at in range(8)]
        for weight in found:
            weight.finish()
        assert all(w.serves(Problem(m, 4096, 4096)) or w.steps.at(m) is None for w in found for m in range(1, 8193))
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


def test_without_a_kernel_that_can_be_launched_there_is_no_step():
    # A block for each tile, along the grid's second extent.
    config = Sm90Config(ThreadblockShape(64, 64, 64), ClusterShape(1, 1), schedule="warp_specialized")
    policy = policies.Policy.of((), signature(), H100, (config,))
    problem = Problem(640, 1 << 23, 64)
    assert policy.weight_of(problem.n, problem.k, 1).steps.at(problem.m) is None
    with pytest.raises(UnsupportedError):
        policy.serves(problem)


def test_a_measured_number_of_rows_is_its_own():
    fast, slow = (Sm90Config(ThreadblockShape(128, n, 64), ClusterShape(2, 1)) for n in (128, 192))
    problem = Problem(1000, 4096, 4096)
    point = Point(problem, "2026-11-21", (Measured(fast, 10.0, 0.0), Measured(slow, 20.0, 1.0)))
    policy = policies.Policy.of([Table(H100.name, 132, signature(), (point,))], signature(), H100, (slow, fast))
    assert policy.weight_of(4096, 4096, 1).measured.keys() == {1000}
    assert policy.serves(problem)[0].config == fast


@pytest.mark.parametrize("path", sorted(resources.tuned().glob("*.json")), ids=lambda path: path.stem)
def test_a_table_that_ships_would_pass_all_checks(path):
    assert tables.load_ours(path) == tables.load(path)


def test_of_many_problems_notes_and_times_are_those_of_each():
    policy = policies.policy(signature(), H100)
    known, rows = policy.knowledge, np.array([1, 7, 100, 1000, 5000] * 5)
    problems = Extents.of_rows(rows, 6144, 4096, 1)
    where = knowledge.Where.of(problems, known.pool)
    together = known.notes.near(where)
    for at in range(5):
        one = knowledge.Where(where.problems[at : at + 1], where.tiles[at : at + 1])
        for many, few in zip(together, known.notes.near(one), strict=True):
            assert np.allclose(many[at], few[0], rtol=3e-5, atol=1e-5)
    places = np.arange(25) * 7
    times, by_gpc = known.pool.times_and_order(problems, H100)
    of_each = known.pool.times_of(places, problems, H100)
    assert np.array_equal(times[np.arange(25), places], of_each[0])
    assert np.array_equal(by_gpc[np.arange(25), places], of_each[1])
    errors, weight = known.notes.near_one(places, knowledge.Where(where.problems, where.tiles[np.arange(25), places]))
    assert np.allclose(errors, together[0][np.arange(25), places], rtol=3e-5, atol=1e-5)
    assert np.allclose(weight, together[1][np.arange(25), places], rtol=3e-5, atol=1e-5)


def test_a_kept_hash_does_not_leave_the_process():
    config = Sm90Config(ThreadblockShape(128, 128, 64))
    for value in (config, signature().spec(config)):
        assert hash(value) == hash(value)
        assert "_hash" in vars(value)
        again = pickle.loads(pickle.dumps(value))
        assert "_hash" not in vars(again)
        assert (again, hash(again)) == (value, hash(value))
