"""The benchmark of other types: its problems, its errors and its summary."""

import pytest
import torch

from tests.scripts import script

BENCH = script("bench_types")


@pytest.mark.parametrize("case", BENCH.CASES)
def test_errors_are_those_of_the_type(case, monkeypatch):
    for name in ("randn", "empty", "rand", "randint"):
        made = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *of, made=made, **named: made(*of, **named | {"device": "cpu"}))
    x = BENCH.draw(case, 77, 264, 1040)
    assert (x.a.stride(1) == 1) == case.split()[1].startswith("row")
    rows = torch.arange(5, 20)
    ours, theirs = (BENCH.error(by(x), x, rows) for by in (BENCH.by_us, BENCH.by_torch))
    if case.startswith("tf32"):
        assert 2**-13 < ours < 2**-10  # of operands in TF32
        assert theirs < 1e-5  # in FP32, on the CPU
        assert not torch.backends.cuda.matmul.allow_tf32
    else:
        assert ours == pytest.approx(theirs, rel=0.01)
        assert 2**-11 < ours < 2**-8  # of a result in BF16


def test_the_grid_has_each_weight_at_each_number_of_rows():
    found = BENCH.problems("tf32 row,col", None)
    assert len(found) == len(set(found)) == 2 * 6 + 5 - 1  # a square is one of the weights
    assert {m for m, _, _ in BENCH.problems("tf32 row,col", [1, 64])} == {1, 64}
    assert {m for m, _, _ in BENCH.problems("i8 row,col", [1, 16, 64])} == {64}


def test_the_summary_keeps_majors_apart():
    row = {"type": "tf32", "majors": "row,col", "m": 1, "n": 2, "k": 3, "ratio": 2.0}
    rows = [row, {**row, "ratio": 0.5, "m": 4}, {**row, "majors": "row,row"}]
    assert BENCH.summary(rows) == {
        "tf32 row,col": {"geomean": 1.0, "worst": 0.5, "worst_shape": [4, 2, 3], "losses": 1, "shapes": 2},
        "tf32 row,row": {"geomean": 2.0, "worst": 2.0, "worst_shape": [1, 2, 3], "losses": 0, "shapes": 1},
    }
