"""docs/performance.md says what the raw results say."""

from pathlib import Path

import pytest
from processes import run_with_pytorch

from tests.scripts import BENCHMARKS, script

pytest.importorskip("tomllib", reason="the report needs Python 3.11")

ROOT = Path(__file__).resolve().parents[2]

results, aims, report = (script(name) for name in ("report_results", "report_aims", "report"))


@pytest.fixture(scope="module")
def committed():
    return results.read_all(report.RESULTS, report.PARTS)


def test_everything_is_up_to_date():
    assert report.stale() == [], "run python benchmarks/report.py"


def test_the_document_needs_no_matplotlib():
    """In a process of its own: another test may have imported it here."""
    code = """
import importlib.util, sys
sys.path[:0] = sys.argv[2:]
sys.modules["matplotlib"] = None
spec = importlib.util.spec_from_file_location("report", sys.argv[1])
report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(report)
assert report.stale() == []
"""
    done = run_with_pytorch(code, BENCHMARKS / "report.py", ROOT, BENCHMARKS)
    assert done.returncode == 0, done.stderr


def test_no_cause_is_stale(committed):
    """An entry that is printed at no loss speaks of results that are gone."""
    entries = results.read_causes(report.CAUSES)
    lost = [shape for case in committed for shape in case.losses()]
    printed = {next((n for n, e in enumerate(entries) if results.matches(e, shape)), None) for shape in lost}
    assert [entry for n, entry in enumerate(entries) if n not in printed] == []


def test_the_readme_says_what_ships(committed):
    """Of one chip and one day, and of kernels that dispatch still chooses."""
    found = [case for case in committed if case.result in report.README_CASES]
    assert [case.result for case in found] == list(report.README_CASES)
    assert len({(case.chip, case.date) for case in found}) == 1
    assert [case.result for case in found if report.others(case.result)] == []
    assert all(report.README.read_text().count(mark) == 1 for mark in report.MARKS)


@pytest.mark.parametrize("aim", aims.AIMS, ids=lambda aim: aim.what)
def test_an_aim_is_about_something_that_was_measured(aim):
    assert aims.measured(aim, report.RESULTS)
    assert (aim.least is None) != (aim.most is None)
    reached, (_, _, cause, _) = aims.cells(aim, report.RESULTS)
    assert bool(cause) is not reached
    assert not (reached and aim.missed), "its cause is stale"
