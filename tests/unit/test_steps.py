"""What is found once for a weight: the kernels that tables and model choose, in little memory."""

import random
from dataclasses import replace

import pytest
from signatures import A100, H100, H200, signature

from cutlass_ops.base import resources
from cutlass_ops.choose import policies, tables
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.choose.weight import MOST_ROWS
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.tuner.tuning import signature_at

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


def serves(policy, problem):
    """Return the kernel that serves a problem, and what is decided for its weight."""
    weight = policy.weight_of(problem.n, problem.k, problem.count)
    return weight.serves(problem) or policy.choose(problem, weight.kept).ordered, weight


def test_kernels_that_are_equally_fast_serve_as_the_policy_chooses(monkeypatch):
    policy = policies.policy(signature(), H200)
    n, k = 152064, 8192
    decided = anew(policy).weight_of(n, k, 1).steps
    monkeypatch.setattr("cutlass_ops.choose.weight._MOST_TIES", 0)
    left = anew(policy).weight_of(n, k, 1).steps
    tied = [m for m in range(1, MOST_ROWS + 1) if left.at(m) is None]
    assert tied
    kept = policy.weight_of(n, k, 1).kept
    assert [kept[decided.at(m)[0]] for m in tied] == [policy.choose(Problem(m, n, k)).config for m in tied]


@pytest.mark.sample(7)
@pytest.mark.parametrize("name", SIGNATURES)
def test_what_serves_is_what_tables_and_model_choose(name):
    policy, rng = policies.policy(*SIGNATURES[name]), random.Random(name)
    for n, k in (*weights(name, 2), (4096, 4096)):
        tuned = [p.problem.m for t in policy.tables for p in t.points if (p.problem.n, p.problem.k) == (n, k)]
        drawn = [round(2 ** rng.uniform(0, 14)) for _ in range(40)]
        for m in {*drawn, *tuned}:
            problem = Problem(m, n, k)
            best, found = serves(policy, problem)
            assert best == policy.choose(problem).ordered
            assert best.config in found.kept


def anew(policy):
    """Return a policy that has not decided about any weight."""
    return replace(policy, knowledge=replace(policy.knowledge))


def test_a_measured_number_of_rows_is_its_own():
    fast, slow = (Sm90Config(ThreadblockShape(128, n, 64), ClusterShape(2, 1)) for n in (128, 192))
    problem = Problem(1000, 4096, 4096)
    point = Point(problem, "2026-11-21", (Measured(fast, 10.0, 0.0), Measured(slow, 20.0, 1.0)))
    policy = policies.Policy.of([Table(H100.name, 132, signature(), (point,))], signature(), H100, (slow, fast))
    assert policy.weight_of(4096, 4096, 1).measured.keys() == {1000}
    assert serves(policy, problem)[0].config == fast


@pytest.mark.sample(5)
@pytest.mark.parametrize("path", sorted(resources.tuned().glob("*.json")), ids=lambda path: path.stem)
def test_a_table_that_ships_would_pass_all_checks(path):
    assert tables.load_ours(path) == tables.load(path)
