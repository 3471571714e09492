"""Groups with room for as many rows each, of which the first are there: calls, their reference, and their kernels."""

import re

import pytest
import torch
from grouping import BF16, close, mixed, normal, saved, summed
from grouping import ends as counts_of
from op_table import as_call

import cutlass_ops as co
from cutlass_ops.declare.form import GROUPED, MASKED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import requests
from cutlass_ops.run.gemm import op_for
from cutlass_ops.run.grouped import GroupsOp

EXPERTS, ROOM, K, N = 3, 5, 16, 8


@co.epilogue
def clash(acc, counts: co.Row):
    return acc + counts


def poisoned(*shape, dtype=BF16):
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_rows(found, counts, wanted):
    """Require each group's rows, of (E, M, N) in float64, and that the others are still NaN."""
    for group, count in enumerate(counts.tolist()):
        close(found[group, :count], wanted[group, :count])
        assert found[group, count:].isnan().all()


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(3, 5, 1), (0, 0, 0), (5, 5, 5), (0, 5, 0), (0, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_each_group_has_its_first_rows_and_the_others_are_left(counts, dtype):
    x, w, counts = normal(EXPERTS, ROOM, K, dtype=dtype), normal(EXPERTS, N, K, dtype=dtype).mT, counts_of(*counts)
    for group, count in enumerate(counts.tolist()):
        x[group, count:] = torch.nan  # no result depends on these
    d = poisoned(EXPERTS, ROOM, N, dtype=dtype)
    assert co.gemm(x, w, groups=co.Groups(counts=counts), out=d) is d
    assert_rows(d, counts, x.double() @ w.double())


def test_further_outputs_have_the_same_rows():
    x, w, bias, counts = normal(2, 4, 16), normal(2, 16, 8), normal(2, 8), counts_of(4, 2)
    out = {"d": poisoned(2, 4, 8), "pre": poisoned(2, 4, 8)}
    found = co.gemm(x, w, groups=co.Groups(counts=counts), epilogue=saved, bias=bias, out=out)
    exact = x.double() @ w.double()
    assert_rows(found.pre, counts, exact)
    assert_rows(found.d, counts, torch.relu(exact + bias.double()[:, None]))


def test_the_rows_that_are_expected_change_no_result():
    x, w, counts = normal(2, 4, 16), normal(2, 16, 8), counts_of(4, 4)
    found = co.gemm(x, w, groups=co.Groups(counts=counts, expected=100))
    assert torch.equal(found, co.gemm(x, w, groups=co.Groups(counts=counts)))


def wrong(**changes):
    given = {"a": normal(2, 4, 16), "b": normal(2, 16, 8), "counts": counts_of(2, 4)}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a": normal(8, 16)}, ValueError, "a (8, 16) and b (2, 16, 8): a must be (E, M, K)"),
        ({"a": normal(3, 4, 16)}, ValueError, "a must be (E, M, K) and b (E, K, N) with the same E and K"),
        ({"counts": torch.tensor([2, 4])}, TypeError, "counts is torch.int64: pass counts.int()"),
        ({"counts": counts_of(1, 2, 3)}, ValueError, "counts has 3 elements and b has 2 experts: it must say how many"),
        ({"counts": counts_of(2, 0, 4, 0)[::2]}, ValueError, "counts has stride 2: call counts.contiguous() first"),
        ({"counts": counts_of(2, 5)}, ValueError, "counts[1] is 5, and a has room for 4 rows of each group"),
        ({"counts": counts_of(-1, 4)}, ValueError, "counts[0] is -1, and a has room for 4 rows of each group"),
        ({"a": normal(2, 8, 16)[:, :4]}, ValueError, "call a.contiguous() first"),
        ({"a": normal(2, 16, 4).mT}, ValueError, "a.contiguous()"),
        ({"out": normal(8, 8)}, ValueError, "out has shape (8, 8): it must have shape (2, 4, 8)"),
        ({"out": normal(2, 8, 8)[:, :4]}, ValueError, "pass a tensor from torch.empty, and copy it"),
        ({"out": normal(2, 8, 4).mT}, ValueError, "groups are rows in memory: pass a row-major tensor"),
        ({"epilogue": summed}, ValueError, "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"),
        ({"epilogue": clash}, ValueError, "the epilogue has an input counts, as groups have"),
        ({"epilogue": builtin.residual, "residual": normal(4, 8)}, ValueError, "it must have shape (2, 4, 8)"),
        ({"epilogue": builtin.residual, "residual": normal(2, 8, 8)[:, :4]}, ValueError, "call residual.contiguous()"),
        ({"expected": -1}, ValueError, "expected is -1: pass the rows"),
        ({"expected": 2.0}, TypeError, "expected is 2.0: pass an int, or omit it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    op_for(None, "masked", None, 2)  # equal to 2.0, and no reason to take that
    with pytest.raises(error, match=re.escape(message)):
        co.gemm(**as_call(wrong(**changes)))


# ---- Choices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("expected", "m"), [(None, 128), (8, 8), (128, 128), (500, 128)])
def test_a_kernel_is_chosen_for_the_rows_that_are_expected(expected, m):
    x, w, counts = normal(2, 128, 16), normal(2, 16, 8), counts_of(1, 1)
    call = op_for(None, "masked", None, expected).checked(x, w, (counts,), {}, None, None)
    assert call.chosen_for == Problem(m, 8, 16, 2)


def test_warm_calls_are_served_warm(device):
    op = GroupsOp(requests.called(mixed).epilogue, MASKED)
    w, bias = normal(3, 64, 32).mT.contiguous().mT, normal(3, 32)
    for counts in (counts_of(1, 16, 3), counts_of(0, 2, 16)):
        x, scale, residual, out = normal(3, 16, 64), normal(3, 16), normal(3, 16, 32), poisoned(3, 16, 32)
        op(x, w, counts, bias=bias, scale=scale, residual=residual, factor=2.0, out=out)
        wanted = (x.double() @ w.double()) * scale.double()[..., None] + bias.double()[:, None]
        assert_rows(out, counts, torch.relu(wanted) * 2 + residual)
    assert (op.served_warm, op.refused_warm) == (1, 0)
    assert {launch.spec.form for launch in device.launches} == {GROUPED}
    assert len(device.launches) == 2


def test_an_exact_kernel_takes_counts(device):
    config = co.Sm90Config(co.ThreadblockShape(64, 64, 64), schedule="pingpong")
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row"}
    kernel = co.build(co.KernelSpec(epilogue=builtin.bias_relu, config=config, form="grouped", **types))
    x, w, bias, out = normal(3, 16, 64), normal(3, 32, 64).mT, normal(3, 32), poisoned(3, 16, 32)
    for _ in range(2):
        kernel(x, w, counts_of(5, 0, 16), bias=bias, out=out)
        assert_rows(out, counts_of(5, 0, 16), torch.relu(x.double() @ w.double() + bias.double()[:, None]))
    assert kernel.served_warm == 1
    assert kernel(x.flatten(0, 1), w, counts_of(5, 5, 48), bias=bias).shape == (48, 32)
