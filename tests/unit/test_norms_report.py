"""docs/norms.md says what the raw results say."""

import json

import pytest

from tests.scripts import script

pytest.importorskip("tomllib", reason="the report needs Python 3.11")

norms = script("report_norms")


def row(m, *, kernel="sm90_128x128x64_1x1_pp_beside", **over_ours):
    """Return a row as bench_rmsnorm.py writes it."""
    ratios = {name: {"median": x, "min": x - 0.01, "max": x + 0.02} for name, x in over_ours.items()}
    times = {"ours": 0.01, **{name: round(0.01 * x, 5) for name, x in over_ours.items()}}
    return {"dtype": "bf16", "m": m, "n": 512, "k": 256, "kernel": kernel, "ms": times, "over_ours": ratios}


def test_the_document_is_up_to_date():
    assert norms.OUT.read_text() == norms.document(norms.report.RESULTS), "run python benchmarks/report_norms.py"


def test_its_links_lead_somewhere():
    targets = [part.split(")")[0] for part in norms.OUT.read_text().split("](")[1:]]
    assert [target for target in targets if not (norms.OUT.parent / target).exists()] == []


def test_losses_are_those_against_any_peer_and_not_against_ones_own():
    rows = [row(1, gemm=0.9, eager=1.2, compile=0.98), row(2, gemm=0.9, two_gemms=0.8, eager=1.1), row(3, eager=0.5)]
    assert norms.losses(rows) == "A peer is faster at 1×512×256 (compile 0.980), 3×512×256 (eager 0.500)."
    assert norms.losses(rows[1:2]) == "No peer is faster at any of these shapes."


def test_ways_count_from_the_gemm_without_a_norm():
    text = norms.ways({"rows": [row(1, gemm=0.8, statistic=0.9, ahead=1.2)]})
    assert "| 1 | 512 | 256 | 1.125 | – | 1.250 | 1.500 |" in text


def test_what_was_not_measured_is_said(tmp_path):
    (tmp_path / "swiglu_h100.json").write_text(
        json.dumps({"chip": "NVIDIA H100", "date": "2026-01-02", "rows": [row(7, eager=1.5)]})
    )
    text = norms.document(tmp_path)
    assert text.count("Not measured yet.") == len(norms.PARTS) - 1
    assert "| 7 | 512 | 256 | 10.00 | – | 1.500 | – | – | 1.500 |" in text
