"""The benchmark of other types: its problems, its errors and its summary."""

import pytest
import torch

from tests.scripts import script

BENCH = script("bench_types")


@pytest.mark.parametrize("majors", BENCH.MAJORS)
def test_errors_are_those_of_the_type(majors, monkeypatch):
    randn, empty = torch.randn, torch.empty
    monkeypatch.setattr(BENCH.torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(BENCH.torch, "empty", lambda *shape, device, **of: empty(*shape, device="cpu", **of))
    x = BENCH.draw(majors, 77, 264, 1040)
    assert (x.a.stride(1) == 1) == majors.startswith("row")
    rows = torch.arange(5, 20)
    assert 2**-13 < BENCH.error(BENCH.by_us(x), x, rows) < 2**-10  # of operands in TF32
    before = torch.backends.cuda.matmul.allow_tf32
    assert BENCH.error(BENCH.by_torch(x), x, rows) < 1e-5  # in FP32, on the CPU
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_grid_has_each_weight_at_each_number_of_rows():
    found = BENCH.problems(None)
    assert len(found) == len(set(found)) == 2 * 6 + 5 - 1  # a square is one of the weights
    assert {m for m, _, _ in BENCH.problems([1, 64])} == {1, 64}


def test_the_summary_keeps_majors_apart():
    row = {"type": "tf32", "majors": "row,col", "m": 1, "n": 2, "k": 3, "ratio": 2.0}
    rows = [row, {**row, "ratio": 0.5, "m": 4}, {**row, "majors": "row,row"}]
    assert BENCH.summary(rows) == {
        "tf32 row,col": {"geomean": 1.0, "worst": 0.5, "worst_shape": [4, 2, 3], "losses": 1, "shapes": 2},
        "tf32 row,row": {"geomean": 2.0, "worst": 2.0, "worst_shape": [1, 2, 3], "losses": 0, "shapes": 1},
    }
