"""Inputs of batches and groups whose meaning must not depend on whether extents happen to be equal, on the CPU."""

import re

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.operand import groups

BF16 = torch.bfloat16


@co.epilogue
def added(acc, row: co.Row):
    return acc + row


@co.epilogue
def scaled(acc, column: co.Col):
    return acc * column


def normal(*shape):
    return torch.randn(shape).to(BF16)


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("heads", [2, 4])
def test_a_row_with_a_1_before_n_is_what_pytorch_would_broadcast(heads):
    q, k, row = normal(2, heads, 5, 16), normal(2, heads, 16, 9), normal(heads, 1, 9)
    close(co.gemm(q, k, epilogue=added, row=row), q.double() @ k.double() + row)
    close(co.gemm(q, k, epilogue=added, row=row[None].expand(2, -1, -1, -1)), q.double() @ k.double() + row)


def test_a_row_of_the_first_batches_needs_all_dimensions():
    q, k, row = normal(2, 4, 5, 16), normal(2, 4, 16, 9), normal(2, 1, 9)
    with pytest.raises(ValueError, match=re.escape("With a 1 before N it is what PyTorch would broadcast")):
        co.gemm(q, k, epilogue=added, row=row)
    close(co.gemm(q, k, epilogue=added, row=row[:, None]), q.double() @ k.double() + row[:, None])


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize(
    ("lead", "column"),
    [
        ((2, 3), (2, 1, "M")),
        ((2, 3), (3, "M")),
        ((2, 3), (2, 3, "M")),
        ((2, 3), (3, "M", 1)),
        ((2, 3), (2, 1, "M", 1)),
        ((2, 2), (2, 1, "M", 1)),
        ((3, 1), (3, 1, "M")),
        ((2, 3), ("M", 1)),
        ((2,), (2, "M")),
    ],
    ids=str,
)
def test_columns_mean_the_same_for_one_row(lead, column, m):
    a, b = normal(*lead, m, 16), normal(*lead, 16, 7)
    shape = [m if extent == "M" else extent for extent in column]
    value = normal(*shape)
    full = value if column[-1] == 1 else value[..., None]
    close(co.gemm(a, b, epilogue=scaled, column=value), a.double() @ b.double() * full.double())


def test_a_column_of_one_row_that_could_be_of_two_dimensions_is_refused():
    a, b = normal(2, 2, 1, 16), normal(2, 2, 16, 7)
    message = "column has shape (2, 1, 1), and with M = 1 it could be of two dimensions of the batches (2, 2): pass it"
    with pytest.raises(ValueError, match=re.escape(message)):
        co.gemm(a, b, epilogue=scaled, column=normal(2, 1, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, g: co.gemm(x, w.mT, groups=co.Groups(None)),
        lambda x, w, g: co.gemm(x.mT, g, groups=co.Groups(None)),
        lambda x, w, g: co.gemm(x[None].expand(4, -1, -1).contiguous(), w.mT, groups=co.Groups(counts=None)),
    ],
    ids=["rows", "of a weight", "masked"],
)
def test_groups_without_ends_are_refused(call):
    x, w, gradient = normal(20, 16), normal(4, 24, 16), normal(20, 24)
    with pytest.raises(TypeError, match=r"^groups has neither offsets nor counts: pass"):
        call(x, w, gradient)


@pytest.mark.parametrize(
    ("offsets", "error", "message"),
    [
        ([0, 5, 9, 12, 20], ValueError, "A first 0 is left out: pass offsets[1:]"),
        ([True, False, True, True], TypeError, "pass numbers of rows, as torch.int32"),
    ],
)
def test_advice_about_offsets_is_right(offsets, error, message):
    offsets = torch.tensor(offsets)
    with pytest.raises(error, match=re.escape(message)):
        co.gemm(
            normal(20, 16),
            normal(4, 24, 16).mT,
            groups=co.Groups(offsets if offsets.dtype == torch.bool else offsets.int()),
        )


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_may_be_dynamic_in_compiled_calls(dynamic):
    run = torch.compile(lambda a, b, row: co.gemm(a, b, epilogue=added, row=row), backend="eager", dynamic=dynamic)
    for batches in (3, 4, 1, 5):
        a, b, row = normal(batches, 5, 16), normal(batches, 16, 7), normal(7)
        close(run(a, b, row), a.double() @ b.double() + row)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [None, True])
def test_expected_rows_may_change_in_compiled_calls(dynamic):
    torch._dynamo.reset()  # the limit of compilations counts those of the other case
    x, w, counts = normal(4, 6, 16), normal(4, 24, 16), torch.tensor([1, 2, 3, 6], dtype=torch.int32)
    run = torch.compile(
        lambda rows: co.gemm(x, w.mT, groups=co.Groups(counts=counts, expected=rows)),
        fullgraph=True, backend="eager", dynamic=dynamic,
    )  # fmt: skip
    for rows in (3, 5, 0, 40, 100):
        assert run(rows).shape == (4, 6, 24)


def test_a_trace_settles_expected_rows_as_an_eager_call_does(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    for rows in (*range(1200), *range(1200, 16500, 7), 16384, 16385, 20000, 2**26, 2**26 + 1):
        assert groups.expected(groups.settled(rows)) == groups.expected(rows), rows


def test_no_expected_rows_are_one_row():
    x, w, counts = normal(4, 6, 16), normal(4, 24, 16), torch.zeros(4, dtype=torch.int32)
    assert co.gemm(x, w.mT, groups=co.Groups(counts=counts, expected=0)).shape == (4, 6, 24)
    with pytest.raises(ValueError, match=r"^expected is -1: pass the rows"):
        co.gemm(x, w.mT, groups=co.Groups(counts=counts, expected=-1))


@pytest.mark.parametrize(
    "call",
    [
        lambda ends: co.gemm(normal(0, 16), normal(4, 24, 16).mT, groups=co.Groups(ends)),
        lambda ends: co.gemm(normal(4, 0, 16), normal(4, 24, 16).mT, groups=co.Groups(counts=ends)),
        lambda ends: co.gemm(normal(0, 16).mT, normal(0, 24), groups=co.Groups(ends)),
    ],
    ids=["rows", "masked", "of a weight"],
)
def test_ends_beyond_no_rows_are_refused(call):
    with pytest.raises(ValueError, match=r"^(offsets|counts)\[\d\] is \d"):
        call(torch.tensor([0, 5, 5, 6], dtype=torch.int32))
    call(torch.zeros(4, dtype=torch.int32))
