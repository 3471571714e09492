"""The benchmark of groups of rows: its cases, its tensors and its summary."""

import json
from pathlib import Path

import pytest
import torch

from cutlass_ops.choose import policies
from cutlass_ops.declare.device import Device
from tests.scripts import script

BENCH = script("bench_grouped")
EVALUATE = script("evaluate_grouped")


@pytest.mark.parametrize("groups", BENCH.GROUPS)
@pytest.mark.parametrize("experts", BENCH.WEIGHTS)
@pytest.mark.parametrize("tokens", BENCH.TOKENS)
def test_all_tokens_have_an_expert(experts, tokens, groups):
    sizes = BENCH.Case(experts, tokens, groups).sizes
    assert (len(sizes), sum(sizes)) == (experts, tokens)
    assert min(sizes) >= 0
    if groups == "balanced":
        assert max(sizes) - min(sizes) <= 1
    if groups == "one_hot":
        assert max(sizes) == tokens
    if groups == "zipf" and tokens >= 8192:
        assert max(sizes) == sizes[0] > 2 * tokens / experts


@pytest.mark.parametrize("epilogue", BENCH.EPILOGUES)
@pytest.mark.parametrize("groups", BENCH.GROUPS)
def test_all_ways_compute_the_same(monkeypatch, groups, epilogue):
    monkeypatch.setattr(BENCH.harness, "compiled", lambda function: function)
    for x in BENCH.draw(BENCH.Case(6, 40, groups), 16, 32, 3, "cpu"):
        x.out.fill_(torch.nan)
        results = {"ours": BENCH.ours(epilogue, x)}
        results |= {name: peer(x) for name, peer in BENCH.peers(epilogue).items()}
        errors = BENCH.exact_errors(epilogue, x, results)
        assert len(errors) == (2 if epilogue == "none" else 3)
        assert max(errors.values()) <= 2.0**-7, errors


@pytest.mark.parametrize("groups", BENCH.GROUPS)
def test_the_gradient_is_checked_against_float64(groups):
    first, second = BENCH.draw_gradients(BENCH.Case(6, 40, groups), 16, 32, 2, "cpu")
    assert first.out is second.out
    assert int(first.offsets[-1]) == int(second.offsets[-1]) == 40
    assert groups == "balanced" or first.offsets.tolist() != second.offsets.tolist()
    first.out.fill_(torch.nan)
    found = BENCH.our_gradient(first)
    assert not found.isnan().any()
    assert BENCH.gradient_errors(first, {"ours": found})["ours"] <= 2.0**-7
    assert BENCH.gradient_errors(first, {"other": found * 1.5})["other"] == pytest.approx(0.5, abs=0.01)
    one = int((first.offsets > 0).int().argmax())  # of an expert that has tokens
    found[one] += 1
    assert BENCH.gradient_errors(first, {"ours": found})["ours"] > 2.0**-5


@pytest.mark.parametrize("groups", BENCH.GROUPS)
def test_fp8_is_checked_against_float64(groups):
    first, second = BENCH.draw_narrow(BENCH.Case(6, 40, groups), 16, 32, 2, "cpu")
    assert (first.x.dtype, first.w.dtype) == (torch.float8_e4m3fn,) * 2
    assert first.w is not second.w or first.w.data_ptr() == second.w.data_ptr()
    plain = BENCH.draw(BENCH.Case(6, 40, groups), 16, 32, 1, "cpu")[0]
    assert plain.x.shape == first.x.shape
    found = BENCH.our_narrow(first)
    assert BENCH.narrow_errors(first, {"ours": found})["ours"] <= 2.0**-7
    found[3] += 1
    assert BENCH.narrow_errors(first, {"ours": found})["ours"] > 2.0**-5
    matrix = torch.randn(4, 32)
    narrow, scale = BENCH.quantised(matrix)
    torch.testing.assert_close(narrow.float() * scale[:, None], matrix, rtol=2**-3, atol=1e-2)


@pytest.mark.parametrize("groups", BENCH.GROUPS)
def test_blocks_are_checked_against_float64(groups):
    first, _ = BENCH.draw_blocks(BENCH.Case(6, 40, groups), 200, 272, 2, "cpu")
    assert (first.scale_a.shape, first.scale_b.shape) == ((40, 3), (6, 2, 3))
    found = BENCH.our_narrow(first)
    assert BENCH.narrow_errors(first, {"ours": found})["ours"] <= 2.0**-7
    other = BENCH.Narrow(first.x, first.w, first.offsets, first.scale_a, first.scale_b.flip(1), first.out)
    assert BENCH.narrow_errors(other, {"ours": found})["ours"] > 2.0**-7
    matrix = torch.randn(200, 272)
    narrow, scale = BENCH.in_blocks(matrix, 128)
    torch.testing.assert_close(BENCH.stands_for(narrow, scale).float(), matrix, rtol=2**-3, atol=1e-2)


@pytest.mark.parametrize("groups", BENCH.GROUPS)
def test_experts_with_room_have_the_same_rows(groups):
    case = BENCH.Case(6, 40, groups)
    first, second = BENCH.draw_padded(case, 16, 32, 2, "cpu")
    assert (first.x.shape, int(first.counts.sum())) == ((6, BENCH.room(case), 32), 40)
    assert first.rows.w.data_ptr() == second.rows.w.data_ptr()
    first.out.fill_(torch.nan)
    found = BENCH.without_room(first, BENCH.our_padded(first))
    assert BENCH.exact_errors("none", first.rows, {"ours": found})["ours"] <= 2.0**-7
    assert int((~first.out.isnan()).sum()) == found.numel()


def test_rooms_that_no_memory_has_are_left_out():
    assert BENCH.fits(BENCH.Case(8, 32768, "balanced"))
    assert not BENCH.fits(BENCH.Case(256, 32768, "one_hot"))


def test_sets_rotate_through_the_experts():
    sets = BENCH.draw(BENCH.Case(6, 40, "one_hot"), 16, 32, 3, "cpu")
    assert len({tuple(x.offsets.tolist()) for x in sets}) == 3
    assert len({x.w.data_ptr() for x in sets}) == 1


def test_a_summary_has_each_way_to_spread_tokens():
    row = {"experts": 8, "tokens": 64, "groups": "zipf", "epilogue": "none", "ratio_to_best_peer": 2.0}
    found = BENCH.summary([row, {**row, "tokens": 1024, "ratio_to_best_peer": 0.5}])
    worst = {"worst": 0.5, "worst_case": "8 experts, 1024 tokens", "losses": 1}
    assert found == {"none, zipf": {"geomean": 1.0, **worst, "cases": 2}}


# ---- What the time model says of the results -------------------------------------------------------------------------


def test_the_model_knows_groups_of_several_sizes():
    result = json.loads((Path(BENCH.__file__).parent / "results" / "grouped_h100.json").read_text())
    device = Device((9, 0), result["multiprocessors"], result["chip"])
    kernels = policies.policy(EVALUATE.signature(device), device).kernels
    # Times below are those of the launch itself, and of one expert with everything no kernel is chosen for its time.
    rows = [r for r in result["rows"] if r["epilogue"] == "none" and r["groups"] != "one_hot" and r["ours_ms"] > 0.03]
    assert len(rows) >= 24
    for row in rows:
        times = EVALUATE.predicted(kernels, row, device)
        assert 0.85 < row["ours_ms"] / times[row["kernel"]] < 1.15, row
