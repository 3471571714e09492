"""The benchmark of batches: its cases, its tensors and its summary."""

from dataclasses import replace

import pytest
import torch

from tests.scripts import script

BENCH = script("bench_batched")


def smaller(case):
    """Return a case with the same layout, as large as a test needs."""
    m, n, k, _ = case.problem
    return replace(case, problem=case.problem._replace(m=min(m, 24), n=min(n, 16), k=min(k, 32), count=3))


@pytest.mark.parametrize("epilogue", BENCH.EPILOGUES)
@pytest.mark.parametrize("name", BENCH.CASES)
def test_all_ways_compute_the_same(monkeypatch, name, epilogue):
    monkeypatch.setattr(BENCH.harness, "compiled", lambda function: function)
    x = BENCH.draw(smaller(BENCH.CASES[name]), "cpu")
    batches = torch.tensor([0, 2])
    wanted = BENCH.exact(epilogue, x, batches)
    x.out.fill_(torch.nan)
    rounding = BENCH.error(wanted.to(x.out.dtype), wanted)
    assert BENCH.error(BENCH.ours(epilogue, x)[batches], wanted) <= 2 * rounding
    for peer, function in BENCH.peers(epilogue).items():
        assert BENCH.error(function(x)[batches], wanted) <= 4 * rounding, peer


def test_small_kernels_are_measured_where_matrices_are_small():
    tiles = {name: [str(c.threadblock) for c in BENCH.small_kernels(case)] for name, case in BENCH.CASES.items()}
    assert tiles["small"] == ["64x64x64", "32x64x64", "64x32x64", "32x32x32", "16x16x16"]
    assert tiles["tiny"] == ["16x16x16"]
    assert tiles["wide"] == tiles["large"] == []


def test_heads_are_views():
    case = smaller(BENCH.CASES["scores"])
    x = BENCH.draw(case, "cpu")
    assert (x.a.stride(), x.b.stride()) == ((32, 96, 1), (32, 1, 96))
    assert BENCH.draw(smaller(BENCH.CASES["values"]), "cpu").out.stride() == (16, 48, 1)


def test_sizes_of_attention_and_of_many_small_matrices_are_there():
    problems = {(c.problem.count, *c.problem.extents) for c in BENCH.CASES.values()}
    assert problems >= {
        (1000, 64, 64, 64),
        (64, 1024, 1024, 128),
        (8, 2048, 2048, 2048),
        (32, 4096, 4096, 128),
        (32, 128, 4096, 4096),
    }


def test_a_summary_has_each_epilogue():
    row = {"case": "small", "epilogue": "none", "ratio_to_best_peer": 2.0}
    found = BENCH.summary([row, {**row, "case": "large", "ratio_to_best_peer": 0.5}])
    assert found == {"none": {"geomean": 1.0, "worst": 0.5, "worst_case": "large", "losses": 1, "cases": 2}}
