"""The FP8 benchmark: its quantiser, its problems and its summary."""

import pytest
import torch

import cutlass_ops as co
from tests.scripts import script

BENCH = script("bench_fp8")


@pytest.mark.parametrize(("rows", "along_k"), [(1, 128), (128, 128), (1, 300), (200, 300)])
def test_what_is_quantised_stands_for_the_matrix(rows, along_k):
    x = torch.randn(200, 300) * torch.linspace(1, 100, 300)
    x[:128, :128] = 0  # a block of zeros has a scale of 0
    narrow, scale = BENCH.quantised(x, rows, along_k)
    assert scale.shape == (-(-200 // rows), -(-300 // along_k))
    spread = scale.repeat_interleave(rows, 0)[:200].repeat_interleave(along_k, 1)[:, :300]
    assert (narrow.float() * spread - x).norm() <= 0.03 * x.norm()


@pytest.mark.parametrize("scales", BENCH.SCALES)
def test_calls_are_as_exact_as_their_rounding(scales, monkeypatch):
    randn, empty = torch.randn, torch.empty
    monkeypatch.setattr(BENCH.torch, "randn", lambda *shape, device: randn(*shape))
    monkeypatch.setattr(BENCH.torch, "empty", lambda *shape, device, dtype: empty(*shape, dtype=dtype))
    x = BENCH.draw(scales, 77, 264, 1040)
    rows = torch.arange(5, 20)
    wanted = BENCH.exact(scales, x, rows)
    found = co.scaled_gemm(x.a, x.b, x.scale_a, x.scale_b, out=x.out)
    assert BENCH.error(found[rows], wanted) <= 2 * BENCH.error(wanted.bfloat16(), wanted)


def test_the_grid_has_each_weight_at_each_number_of_rows():
    found = BENCH.problems(None)
    assert len(found) == len(set(found)) == 4 * 14 + 4  # a square is one of the weights
    assert {m for m, _, _ in BENCH.problems([1, 64])} == {1, 64}


@pytest.mark.parametrize("scales", BENCH.SCALES)
def test_each_way_to_add_up_is_compared_with_what_adds_up_so(scales):
    blocks = scales.startswith("blocks")
    assert BENCH.sums_of(scales) == (("promoted",) if blocks else ("fast", "promoted"))
    for sums in BENCH.sums_of(scales):
        x = BENCH.draw(scales, 64, 256, 2048, "cpu")
        op, arguments, _ = BENCH.request(x, sums)
        assert op.math == sums
        assert ("scaled_mm_fast" in BENCH.peers(scales, sums)) == (sums == "fast")
        assert torch.equal(op(*arguments), co.scaled_gemm(x.a, x.b, x.scale_a, x.scale_b, math=sums))


def test_rows_without_a_peer_do_not_count():
    row = {"scales": "blocks", "sums": "promoted", "m": 1, "n": 2, "k": 3, "ratio_to_best_peer": 2.0}
    rows = [row, {**row, "ratio_to_best_peer": 0.5, "m": 4}, {**row, "ratio_to_best_peer": None}]
    assert BENCH.summary(rows) == {
        "blocks, promoted": {"geomean": 1.0, "worst": 0.5, "worst_shape": [4, 2, 3], "losses": 1, "shapes": 2}
    }
