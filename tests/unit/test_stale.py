"""Which results have kernels that dispatch would no longer choose."""

import json
from functools import lru_cache

import pytest

from tests.sampling import sampled
from tests.scripts import script

pytest.importorskip("tomllib", reason="the report needs Python 3.11")

stale = script("stale")
report = script("report")
AGAIN = "run python benchmarks/stale.py"
COUNTED = json.loads(stale.OUT.read_text())


NAMES = sampled(3, ("gemm_bf16_h200", "rmsnorm_h200", "swiglu_h100", "gemm_held_out_h100"))
# Both tests ask for those of the results that are committed.
others = lru_cache(maxsize=None)(stale.others)


def rows(path):
    return json.loads(path.read_text())["rows"]


def test_every_result_was_counted():
    assert {name: count["rows"] for name, count in COUNTED.items()} == {p.stem: len(rows(p)) for p in stale.RESULTS}, (
        AGAIN
    )


@pytest.mark.parametrize("name", NAMES)
def test_what_was_counted_is_so_still(name):
    assert COUNTED[name]["others"] == len(others(report.RESULTS / f"{name}.json")), AGAIN


def problems(path):
    return {(row["m"], row["n"], row["k"], row.get("op")) for row, _ in others(path)}


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_is_not_chosen_is_found(name, tmp_path):
    measured = report.RESULTS / f"{name}.json"
    result = json.loads(measured.read_text())
    # In another order: what counts as tuned for a row does not depend on its place in the file.
    result["rows"].reverse()
    wrong = result["rows"][3]
    wrong["kernel"] = "sm90_64x64x64_1x1_ws"
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(result))
    assert problems(path) == problems(measured) | {(wrong["m"], wrong["n"], wrong["k"], wrong.get("op"))}


def test_reports_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(report, "STALE", tmp_path / "stale.json")
    report.STALE.write_text(json.dumps({"a": {"rows": 8, "others": 2}, "b": {"rows": 8, "others": 0}}))
    assert report.others("a") == "Dispatch now chooses another kernel at 2 of 8 (25%) of these shapes."
    assert report.others("b") is None
    assert report.others("c") is None
