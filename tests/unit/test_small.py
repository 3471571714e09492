"""Small kernels: what is rendered, how much memory they take, and where they are chosen."""

import itertools

import pytest
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch, space
from cutlass_ops.declare.config import ThreadblockShape
from cutlass_ops.declare.form import BATCHED, DENSE
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.kinds.small.kind import UNTUNED, shared_memory
from cutlass_ops.operand.call import call_at, signature_of


@co.epilogue
def mixed(acc, bias: co.Row, scale: co.Col, residual: co.Tile, factor: co.Scalar):
    return {"d": co.e.relu(acc * scale + bias) * factor + residual, "pre": acc}


ONE = SmallConfig(ThreadblockShape(32, 64, 16))


def spec(config=ONE, **changes):
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "epilogue": mixed, "form": "batched"}
    return co.KernelSpec(config=config, **types | changes)


def signature(problem, device, form=BATCHED, majors=("row", "row")):
    call = call_at(builtin.identity.graph, problem, "f16", *majors, form=form)
    return signature_of(call, device)


@pytest.mark.parametrize("majors", list(itertools.product(("row", "col"), repeat=2)))
def test_shared_memory_is_that_of_each_warp(majors):
    one = SmallConfig(ThreadblockShape(64, 32, 16), stages=2, warps=1)
    a, b = (f"bf16.{major}" for major in majors)
    lines = {"row": 64 * 24, "col": 16 * 72}[majors[0]] + {"row": 16 * 40, "col": 32 * 24}[majors[1]]
    assert shared_memory(spec(one, a=a, b=b), one) == 2 * lines * 2 + 16 * 36 * 4
    four = SmallConfig(ThreadblockShape(64, 32, 16), stages=2, warps=4)
    assert shared_memory(spec(four, a=a, b=b), four) == 4 * shared_memory(spec(one, a=a, b=b), one)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90"])
@pytest.mark.parametrize("config", UNTUNED, ids=lambda c: c.slug)
def test_the_usual_kernels_are_legal_everywhere(config, target):
    assert legality.check(spec(config, target=target)) == ()
    assert legality.check(spec(config, a="bf16.col.align1", b="bf16.row.align1", target=target)) == ()


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("device", [H100, A100], ids=lambda d: d.name)
@pytest.mark.parametrize("side", [8, 16, 32, 63])
def test_they_serve_many_small_matrices(device, side):
    problem = Problem(side, side, side, 4096)
    found = dispatch.decide(signature(problem, device), device, problem)
    assert isinstance(found.config, SmallConfig)
    # No tile of several times the size.
    assert found.config.threadblock.m <= max(16, 2 * side)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("device", [H100, A100], ids=lambda d: d.name)
@pytest.mark.parametrize("problem", [Problem(2048, 2048, 2048, 8), Problem(1024, 1024, 128, 64)], ids=str)
def test_they_serve_no_large_ones(device, problem):
    found = dispatch.decide(signature(problem, device), device, problem)
    assert not isinstance(found.config, SmallConfig)


@pytest.mark.usefixtures("session")
def test_one_gemm_is_none_of_theirs():
    problem = Problem(64, 64, 64)
    of = signature(problem, A100, DENSE)
    assert not any(isinstance(s.config, SmallConfig) for s in dispatch.specs(of, A100))
    assert not any(isinstance(c, SmallConfig) for c in space.fitting(of, problem, A100))


def test_a_race_has_tiles_of_about_the_size():
    problem = Problem(32, 64, 64, 1000)
    found = space.fitting(signature(problem, H100), problem, H100)
    assert found
    assert {c.threadblock.m for c in found} == {16, 32}
    assert {c.threadblock.n for c in found} == {16, 32, 64}
    assert space.fitting(signature(problem, H100), Problem(256, 64, 64, 1000), H100) == []
