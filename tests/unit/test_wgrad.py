"""Products of each group's rows, as a gradient of weights: calls, their reference, the choice and text of kernels."""

import itertools
import re

import pytest
import torch
from grouping import BF16, OFFSETS, clash, close, ends, mixed, normal, saved, summed
from hypothesis import given
from hypothesis import strategies as st
from op_table import as_call
from signatures import H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import RAGGED_K
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.operand.call import signature_of
from cutlass_ops.run.gemm import op_for
from tests.strategies import PATIENT


def exact(x, y, offsets):
    """Return D in float64."""
    bounds = [0, *offsets.tolist()]
    pairs = itertools.pairwise(bounds)
    return torch.stack([x[first:end].double().mT @ y[first:end].double() for first, end in pairs])


# ---- Calls -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offsets", OFFSETS, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_each_expert_has_the_product_of_its_rows(offsets, dtype):
    x, y, offsets = normal(12, 16, dtype=dtype), normal(12, 8, dtype=dtype), ends(*offsets)
    x[int(offsets[-1]) :] = torch.nan  # rows of nobody
    d = torch.full((3, 16, 8), torch.nan, dtype=dtype)
    assert co.gemm(x.mT, y, groups=co.Groups(offsets), out=d) is d
    close(d, exact(x, y, offsets))


@pytest.mark.slow
@PATIENT
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 4))
def test_any_groups(sizes, unused):
    offsets = torch.tensor(sizes).cumsum(0).int()
    x, y = normal(sum(sizes) + unused, 8), normal(sum(sizes) + unused, 16)
    close(co.gemm(x.mT, y, groups=co.Groups(offsets), out_dtype=torch.float32), exact(x, y, offsets))


@pytest.mark.parametrize("shared", [False, True])
def test_inputs_are_those_of_the_expert_or_of_all(shared):
    x, y, lead = normal(6, 16), normal(6, 8), () if shared else (2,)
    bias, scale, residual = normal(*lead, 8), normal(*lead, 16), normal(*lead, 16, 8)
    found = co.gemm(
        x.mT, y, groups=co.Groups(ends(2, 6)), epilogue=mixed, bias=bias, scale=scale, residual=residual, factor=2
    )
    for expert, rows in enumerate((slice(0, 2), slice(2, 6))):
        own = {"bias": bias, "scale": scale, "residual": residual}
        own = own if shared else {name: value[expert] for name, value in own.items()}
        torch.testing.assert_close(found[expert], co.gemm(x[rows].mT, y[rows], epilogue=mixed, factor=2, **own))


def test_further_outputs_are_stacked():
    x, y, bias = normal(6, 16), normal(6, 8), normal(2, 8)
    found = co.gemm(x.mT, y, groups=co.Groups(ends(2, 6)), epilogue=saved, bias=bias)
    close(found.pre, exact(x, y, ends(2, 6)))
    close(found.d, torch.relu(exact(x, y, ends(2, 6)) + bias.double()[:, None]))


def test_it_may_be_added_in_place():
    x, y, total = normal(6, 16), normal(6, 8), torch.randn(2, 16, 8)
    wanted = exact(x, y, ends(2, 6)) + total.double()
    assert co.gemm(x.mT, y, groups=co.Groups(ends(2, 6)), epilogue=builtin.residual, residual=total, out=total) is total
    close(total, wanted)


def test_there_may_be_no_rows_and_no_columns():
    found = co.gemm(normal(0, 16).mT, normal(0, 8), groups=co.Groups(ends(0, 0)))
    assert (found.shape, bool(found.any())) == ((2, 16, 8), False)
    assert co.gemm(normal(4, 0).mT, normal(4, 8), groups=co.Groups(ends(0, 4))).shape == (2, 0, 8)


def wrong(**changes):
    given = {"x": normal(6, 16), "b": normal(6, 8), "offsets": ends(2, 6), **changes}
    x = given.pop("x")
    return {"a": x.mT if isinstance(x, torch.Tensor) else x, **given}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": normal(2, 3, 16)}, ValueError, "a (2, 16, 3) and b (6, 8): a must be (M, T) and b (T, N)"),
        ({"offsets": ends()}, ValueError, "offsets has shape (0,): it must be (E,), with at least one expert"),
        ({"offsets": ends(4, 7)}, ValueError, "offsets[1] is 7, after 4, and there are 6 rows"),
        ({"x": normal(16, 6).t()}, ValueError, "groups are rows in memory: pass a.mT.contiguous().mT"),
        ({"b": normal(8, 6).t()}, ValueError, "groups are rows in memory: pass b.contiguous()"),
        (
            {"x": normal(6, 12)},
            ValueError,
            "a is torch.bfloat16 of shape (12, 6), strides (1, 12) and storage offset 0, and its lines",
        ),
        ({"b": normal(6, 9)}, ValueError, "pad N with zeros to a multiple of 8"),
        ({"out": normal(16, 8)}, ValueError, "out has shape (16, 8): it must have shape (2, 16, 8)"),
        ({"out": normal(1, 16, 8).expand(2, 16, 8)}, ValueError, "with which elements share memory"),
        ({"epilogue": summed}, ValueError, "the epilogue reduces D, and a kernel finishes the reductions of one GEMM"),
        ({"epilogue": clash}, ValueError, "the epilogue has an input offsets, as groups have"),
        ({"epilogue": composed.swiglu, "up": normal(6, 8)}, ValueError, "the epilogue has a further product"),
        ({"epilogue": builtin.bias, "bias": normal(3, 8)}, ValueError, "as a Row it must have shape (8,), or (2, 8)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_wrong_arguments_are_refused(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        co.gemm(**as_call(wrong(**changes)))


# ---- Choices ---------------------------------------------------------------------------------------------------------


def made(epilogue=None, rows=512, experts=4, m=64, n=72, **inputs):
    x, y = (torch.empty(rows, extent, dtype=BF16, device="meta") for extent in (m, n))
    offsets = torch.empty(experts, dtype=torch.int32, device="meta")
    return op_for(epilogue, "ragged_k").checked(x.mT, y, (offsets,), inputs, None, None)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("rows", [0, 1, 16, 512, 8192, 100_000])
@pytest.mark.parametrize(("m", "n"), [(64, 64), (136, 4096), (8, 512)])
def test_a_legal_kernel_is_chosen(rows, m, n):
    call = made(rows=rows, experts=8, m=m, n=n)
    signature = signature_of(call, H100)
    assert (signature.form, signature.majors) == (RAGGED_K, ("col", "row"))
    found = dispatch.decide(signature, H100, call.chosen_for)
    assert found is not None
    assert found.specs
    for spec in found.specs:
        assert legality.check(spec) == ()
    assert not found.order.by_gpc


def test_a_single_row_is_no_other_major(device):
    x, y = normal(1, 64), normal(1, 32)
    close(co.gemm(x.mT, y, groups=co.Groups(ends(0, 1))), exact(x, y, ends(0, 1)))
    (launch,) = device.launches
    assert (launch.spec.a.major, launch.spec.b.major) == ("col", "row")


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def test_no_kernel_sums_fp8_over_groups():
    config = co.Sm90Config(co.ThreadblockShape(128, 128, 128), schedule="pingpong")
    types = {"a": "e4m3.col", "b": "e4m3.row", "d": "bf16.row", "form": "ragged_k"}
    found = " ".join(map(str, co.check(co.KernelSpec(**types, epilogue=builtin.bias, config=config))))
    assert "form is ragged_k, and a is e4m3.col: use bf16 or f16" in found
