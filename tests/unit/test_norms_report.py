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


def test_the_summary_counts_losses(tmp_path, monkeypatch):
    monkeypatch.setattr(norms.report, "STALE", tmp_path / "stale.json")
    norms.report.STALE.write_text(json.dumps({"swiglu_h100": {"rows": 2, "others": 1}}))
    written(tmp_path, "swiglu_h100.json", row(1, two_gemms=0.5, eager=0.9), row(2, eager=1.6, compile=0.8))
    line = norms.overview(tmp_path).splitlines()[2]
    assert line == "| SwiGLU | eager, compile | 2 | 0.8485 | 0.8000 (2×512×256) | 2 | 1 of 2 |"


def written(folder, name, *rows):
    (folder / name).write_text(json.dumps({"chip": "NVIDIA H100", "date": "2026-01-02", "rows": list(rows)}))


def test_targets_are_reached_or_missed_by_what_was_measured(tmp_path, monkeypatch):
    def target(file, bound, why=""):
        return norms.Target("ours", file, lambda r: r["m"] > 1, norms.best, lambda x: x >= bound, why)

    written(tmp_path, "a.json", row(1, eager=0.5), row(2, eager=1.09, compile=1.2), row(3, eager=1.3))
    monkeypatch.setattr(norms, "TARGETS", [target("a.json", 1.05), target("a.json", 1.1, "Why."), target("b.json", 1)])
    assert norms.targets(tmp_path).splitlines()[2:] == [
        "| ours | **reached** | 2 of 2 |  |  |",
        "| ours | **missed** | 1 of 2 | 2×512×256 (1.0900) | Why. |",
        "| ours | not measured yet |  |  |  |",
    ]


def test_every_target_is_about_something_that_was_measured():
    for target in norms.TARGETS:
        rows = json.loads((norms.report.RESULTS / target.file).read_text())["rows"]
        assert any(map(target.concerns, rows)), target.what
    missed = [line for line in norms.targets(norms.report.RESULTS).splitlines() if "**missed**" in line]
    assert not any("No cause is known" in line for line in missed)


def test_a_layers_kernels_are_those_that_take_long():
    kernels = [("long", 98.5), ("short", 1.2), ("shortest", 0.3)]
    rows = [
        {"phase": "decode", "m": 1, "variant": v, "kind": "gemm", "kernel": name, "count": 2.0, "us": us}
        for v in ("ours", "compile")
        for name, us in kernels
    ]
    text = norms.layer_kernels({"rows": rows})
    assert "| decode | 1 | ours | all | 6 | 100.0 |" in text
    assert "| decode | 1 | compile | `short` | 2 | 1.2 |" in text
    assert "shortest" not in text


def test_what_was_not_measured_is_said(tmp_path):
    (tmp_path / "swiglu_h100.json").write_text(
        json.dumps({"chip": "NVIDIA H100", "date": "2026-01-02", "rows": [row(7, eager=1.5)]})
    )
    text = norms.document(tmp_path)
    assert text.count("Not measured yet.") == len(norms.PARTS) - 1
    assert "| 7 | 512 | 256 | 10.00 | – | 1.500 | – | – | 1.500 |" in text
