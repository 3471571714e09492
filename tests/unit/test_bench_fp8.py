"""The FP8 benchmark: its quantiser, its problems and its summary."""

import os

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


@pytest.mark.parametrize("scales", ["blocks", "blocks_1d"])
@pytest.mark.parametrize("m", [1, 3, 64, 200])
def test_peers_get_scales_of_blocks_as_they_read_them(scales, m):
    x = BENCH.draw(scales, m, 256, 1024, "meta")
    for name in ("scaled_mm", "recipes"):  # PyTorch checks the layout on "meta" too
        assert BENCH.peers(scales, "promoted")[name](x).shape == (m, 256)
    # DeepGEMM copies scales first that lie otherwise: get_mn_major_tma_aligned_tensor.
    assert x.padded_scale_a.shape == x.scale_a.shape == (m, 8)
    assert x.padded_scale_a.stride() == (1, -(-m // 4) * 4)


@pytest.mark.parametrize(("multiple", "stride"), [(1, 7), (4, 8)])
def test_scales_by_columns_are_the_same(multiple, stride):
    scale = torch.randn(7, 5)
    found = BENCH.by_columns(scale, multiple)
    assert torch.equal(found, scale)
    assert found.stride() == (1, stride)


def test_deep_gemm_is_called_in_place_or_said_to_be_missing(monkeypatch, capsys):
    seen = []

    class DeepGemm:
        @staticmethod
        def fp8_gemm_nt(a, b, d):
            seen.append((a[0].shape, a[1].stride(), b[0].shape, b[1].shape))
            d.copy_(a[0].float() @ b[0].float().t())

    x = BENCH.draw("blocks", 6, 256, 1024, "cpu")
    peer = BENCH.peers("blocks", "promoted")["deep_gemm"]
    monkeypatch.setattr(BENCH, "deep_gemm", lambda: DeepGemm)
    assert peer(x) is x.out
    assert seen == [((6, 1024), (1, 8), (256, 1024), (2, 8))]
    assert "deep_gemm" not in BENCH.peers("blocks_1d", "promoted")

    def missing():
        raise ImportError("no module named deep_gemm")

    monkeypatch.setattr(BENCH, "deep_gemm", missing)
    assert not BENCH.prepare_deep_gemm([(1, 256, 1024)])
    assert capsys.readouterr().out == "without DeepGEMM: no module named deep_gemm\n"


def die(_):
    os._exit(1)


def test_a_peer_that_ends_its_process_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(BENCH, "deep_gemm", lambda: None)
    monkeypatch.setattr(BENCH, "call_deep_gemm", die)
    assert not BENCH.prepare_deep_gemm([(1, 256, 1024)])
    assert capsys.readouterr().out == "without DeepGEMM: a call ended its process\n"
