"""docs/performance.md says what the raw results say, and its losses and summaries are counted right."""

import json
import math
from pathlib import Path

import pytest
from processes import run_with_pytorch

from tests.scripts import BENCHMARKS, script

pytest.importorskip("tomllib", reason="the report needs Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "run python benchmarks/report.py"


results, plots, report = script("report_results"), script("report_plots"), script("report")
NO_CAUSES = {"about": [], "cause": []}


def row(m, ratio, **other):
    """Return a row as bench_gemm.py wrote them before "layout" and "set"."""
    return {
        "op": "bias_relu", "dtype": "bf16", "m": m, "n": 512, "k": 256,
        "ours_ms": 0.01, "peers": {"cublaslt": round(0.01 * ratio, 5), "eager": 0.03}, "best_peer": "cublaslt",
        "ratio_to_best_peer": ratio, "ratio_range": [ratio - 0.01, ratio + 0.02], "error_over_eager": 1.0,
        "kernel": "sm90_128x128x64_2x1_pp", **other,
    }  # fmt: skip


def result(folder, rows, name="gemm_made_up", chip="NVIDIA H100 80GB HBM3"):
    """Write rows as a file of results and read it as the report does."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"chip": chip, "multiprocessors": 132, "date": "2026-01-02", "rows": rows}))
    return results.read(path)


@pytest.fixture(scope="module")
def committed():
    return [results.read(path) for path in sorted(report.RESULTS.glob("gemm*.json"))]


# ---- what is committed


def test_the_document_is_up_to_date(committed):
    hosts = sorted(report.RESULTS.glob("host*.json"))
    compiles = sorted(report.RESULTS.glob("compile*.json"))
    text = report.document(committed, hosts, compiles, results.read_causes(report.CAUSES), report.OUT)
    assert report.OUT.read_text() == text, AGAIN


def test_the_plots_are_up_to_date(committed):
    figures = [*plots.figures(committed), plots.overview_figure(report.readme_lines(committed))]
    expected = {plots.plot_path(figure, report.OUT): figure.digest() for figure in figures}
    assert set(report.OUT.with_suffix("").iterdir()) == set(expected), AGAIN
    assert [path.name for path, digest in expected.items() if digest not in path.read_text()] == [], AGAIN


def test_its_links_lead_somewhere():
    targets = [part.split(")")[0] for part in report.OUT.read_text().split("](")[1:]]
    assert [t for t in targets if not (report.OUT.parent / t.partition("#")[0]).exists()] == []


def test_the_document_needs_no_matplotlib(tmp_path):
    """In a process of its own: another test may have imported it here."""
    code = """
import importlib.util, sys
sys.path[:0] = sys.argv[2:]
sys.modules["matplotlib"] = None
spec = importlib.util.spec_from_file_location("report", sys.argv[1])
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)
result = report.read(report.RESULTS / "gemm_bf16_h100.json")
report.document([result], [], [], report.read_causes(report.CAUSES), report.OUT)
"""
    done = run_with_pytorch(code, BENCHMARKS / "report.py", ROOT, BENCHMARKS)
    assert done.returncode == 0, done.stderr


def test_no_cause_is_stale(committed):
    """An entry that matches no loss speaks of results that are gone."""
    entries = results.read_causes(report.CAUSES)
    lost = [(r.name, row) for r in committed for row in results.losses(r.rows)]
    # The first match is printed, so an entry that only later ones would need is stale as well.
    printed = {results.cause(entries["cause"], name, row) for name, row in lost}
    assert [e for e in entries["cause"] if e["text"].strip() not in printed] == []
    assert [e for e in entries["cause"] if not any(results.matches(e, name, row) for name, row in lost)] == []
    texts = [results.about(entries["about"], r) for r in committed]
    assert [e for e in entries["about"] if e["text"].strip() not in texts] == []


def test_the_readme_says_what_was_measured(committed):
    readme = report.README.read_text()
    assert report.with_speed(readme, report.readme_text(committed)) == readme, AGAIN
    assert all(readme.count(mark) == 1 for mark in report.MARKS)


def test_the_readme_says_what_ships(committed):
    """Of one chip and one day, and of kernels that dispatch still chooses."""
    found = report.readme_lines(committed)
    assert [line for line, _, _ in found] == list(report.LINES)
    assert len({(result.head["chip"], result.head["date"]) for _, result, _ in found}) == 1
    assert [line for line, result, _ in found if report.others(result.name)] == []
    assert all(len({results.case(row) for row in rows}) == 1 for _, _, rows in found)


# ---- made-up rows


def test_the_readmes_table_counts_losses(tmp_path):
    made = result(tmp_path, [row(1, 1.1), row(2, 0.9), row(4, 0.5, layout="row-row")], name="gemm_bf16_h100")
    lines = report.readme_text([made]).splitlines()
    assert lines[0].startswith("NVIDIA H100 80GB HBM3, 2026-01-02. ")
    assert lines[4] == "| bias + ReLU, BF16 | grid | cublaslt, eager | 2 | 0.9950 | 0.9000 (2×512×256) | 1 |"
    begin, end = report.MARKS
    assert report.with_speed(f"a\n{begin}\nold\n{end}\nz", "new") == f"a\n{begin}\nnew\n{end}\nz"


def test_an_anchor_is_that_of_github():
    assert report.anchor("gemm_a: NVIDIA H100, 2026-11-25") == "gemm_a-nvidia-h100-2026-11-25"
    assert report.anchor("From C++") == "from-c"


def test_a_summary():
    rows = [row(1, 2.0), row(2, 1.0), row(4, 0.995), row(8, 0.5)]
    found = results.summary(rows)
    assert found["shapes"] == 4
    assert math.isclose(found["geomean"], (2.0 * 0.995 * 0.5) ** 0.25)
    assert found["worst"] is rows[3]
    assert (found["from_1"], found["from_0.99"]) == (2, 3)


def test_what_a_free_epilogue_would_give():
    rows = [row(1, 1.2, plain_over_ours=0.8), row(2, 1.0, plain_over_ours=1.1)]  # one that is no slower is free already
    assert math.isclose(results.free(rows), (1.5 * 1.0) ** 0.5)
    assert results.free([*rows, row(4, 1.0)]) is None
    cases = {results.Case("grid", "bias_relu", "bf16", "row-col"): rows}
    assert "| 2 | 1.0954 | 1.2247 | 1.0000 at 2×512×256 |" in report.summary_table(cases)


def test_rows_without_optional_fields_have_the_defaults(tmp_path):
    made = result(tmp_path, [row(1, 1.1), row(1, 1.2, layout="col-row"), row(1, 1.3, set="decode")])
    assert list(made.cases()) == [
        ("grid", "bias_relu", "bf16", "row-col"),
        ("grid", "bias_relu", "bf16", "col-row"),
        ("decode", "bias_relu", "bf16", "row-col"),
    ]
    text = report.document([made], [], [], NO_CAUSES, tmp_path / "report.md")
    assert "| grid | bias_relu | bf16 | row-col | 1 | 1.1000 | – | 1.1000 at 1×512×256 | 1 of 1 (100%) |" in text
    assert text.count("![") == 1 + 3
    assert "0 of 3 (0%)" in text


def test_every_loss_is_listed_with_its_cause_or_none(tmp_path):
    made = result(tmp_path, [row(1, 0.9), row(2, 1.0), row(4, 0.9999), row(8, 0.7)])
    entries = [{"m": 1, "ratio": [0.8, 0.95], "text": "A made-up cause.\n"}, {"m": 1, "text": "A later one."}]
    lines = report.loss_table(made, entries).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["8×512×256", "1×512×256", "4×512×256"]
    case = "| bias_relu, bf16, row-col, grid | "
    assert lines[0] == case + "8×512×256 | cublaslt | 10.00 | 7.00 | 0.7000 | 0.6900 to 0.7200 | cause unknown |"
    assert lines[1].endswith("| 0.9000 | 0.8900 to 0.9200 | A made-up cause. |")
    assert lines[2].endswith("| cause unknown |")


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({}, True),
        ({"m": 1, "n": 512, "k": 256, "op": "bias_relu", "dtype": "bf16"}, True),
        ({"result": "gemm_made_up", "set": "grid", "layout": "row-col"}, True),
        ({"ratio": [0.9, 0.9]}, True),
        ({"m": 2}, False),
        ({"result": "gemm_other"}, False),
        ({"kernel": "sm90_64x128x64_2x1_ws"}, False),
        ({"ratio": [0.91, 1.0]}, False),
        ({"ratio": [0.8, 0.89]}, False),
    ],
)
def test_a_cause_matches_by_all_of_its_keys(tmp_path, condition, holds):
    made = result(tmp_path, [row(1, 0.9)])
    assert results.matches({"text": "", **condition}, made.name, made.rows[0]) is holds


def test_a_misspelt_key_of_a_cause_is_refused(tmp_path):
    path = tmp_path / "causes.toml"
    path.write_text('[[cause]]\nshape = [1, 2, 3]\ntext = "It would match everything."\n')
    with pytest.raises(SystemExit, match=r"unknown shape in \[\[cause\]\]"):
        results.read_causes(path)


def test_what_is_said_of_a_result_ends_when_it_is_measured_again(tmp_path):
    entries = [{"result": "gemm_made_up", "geomean": 1.1, "text": "Before a change."}]
    assert results.about(entries, result(tmp_path, [row(1, 1.1)])) == "Before a change."
    assert results.about(entries, result(tmp_path, [row(1, 1.2)])) is None


def test_a_shape_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="1×512×256 twice"):
        result(tmp_path, [row(1, 1.1), row(1, 1.2)])


def test_a_matrix_has_each_weight_over_m_and_losses_in_bold():
    rows = [row(16, 0.9999), row(1, 1.2), row(1, 1.0, n=64)]
    assert report.matrix(rows).splitlines()[0] == "| N×K \\ M | 1 | 16 |"
    assert report.matrix(rows).splitlines()[2:] == [
        "| 512×256 | 1.2000 | **0.9999** |",
        "| 64×256 | 1.0000 |  |",
    ]


def test_a_peer_that_was_not_measured_has_no_time():
    rows = [row(1, 1.2), row(2, 1.2, peers={"cublaslt": 0.012, "compile": 0.02})]
    lines = [line for line in report.times_table(rows).splitlines() if line.startswith("| `sm90")]
    assert lines[0].endswith("| 1 | 512 | 256 | 10.00 | 12.00 | 30.00 | – |")
    assert lines[1].endswith("| 2 | 512 | 256 | 10.00 | 12.00 | – | 20.00 |")


@pytest.mark.parametrize(("op", "elements"), [("bias_relu", 64), ("bias_gelu_residual", 64 + 128 * 64), ("relu", 0)])
def test_the_inputs_of_an_op_count_for_the_roofline(op, elements):
    of = row(128, 1.0, n=64, k=32, op=op)
    moved = 2 * (128 * 32 + 64 * 32 + 128 * 64 + elements)
    intensity, tflops = plots.roofline_point(of)
    assert math.isclose(intensity, 2 * 128 * 64 * 32 / moved)
    assert math.isclose(tflops, 2 * 128 * 64 * 32 / 10e-6 / 1e12)


def test_ceilings_are_only_those_of_a_chip_whose_peaks_are_known(tmp_path):
    compute, memory = plots.ceilings({"chip": "NVIDIA H100 80GB HBM3", "multiprocessors": 132})
    assert math.isclose(compute, 989, rel_tol=1e-3)
    assert math.isclose(memory, 3.352)
    assert plots.ceilings({"chip": "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "multiprocessors": 16}) is None
    other = result(tmp_path, [row(1, 1.1)], chip="another")
    assert "not known" in plots.roofline_text(other)
    assert plots.roofline_figure(other).ceilings is None


def test_a_figure_with_other_points_has_another_digest(tmp_path):
    digests = {figure.digest() for ratio in (1.1, 1.2) for figure in plots.figures([result(tmp_path, [row(1, ratio)])])}
    # Two plots of ratios, and one roofline: our time is the same in both.
    assert len(digests) == 3


def test_a_drawing_does_not_depend_on_the_last_bits_of_the_layout(tmp_path, monkeypatch):
    """They differ between machines."""
    engines = pytest.importorskip("matplotlib.layout_engine")
    (figure, *_) = plots.figures([result(tmp_path, [row(1, 1.1), row(2, 1.2)])])
    plots.draw(figure, tmp_path / "here.svg")
    lays_out = engines.ConstrainedLayoutEngine.execute

    def elsewhere(engine, canvas):
        found = lays_out(engine, canvas)
        for axes in canvas.axes:
            if axes.get_in_layout():
                axes._set_position([part + 1e-15 for part in axes.get_position(original=True).bounds])
        return found

    monkeypatch.setattr(engines.ConstrainedLayoutEngine, "execute", elsewhere)
    plots.draw(figure, tmp_path / "elsewhere.svg")
    assert (tmp_path / "here.svg").read_bytes() == (tmp_path / "elsewhere.svg").read_bytes()
