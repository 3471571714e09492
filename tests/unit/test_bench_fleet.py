"""A cold fleet of processes and an S3 server: nothing is lost, nothing wrong is loaded, nothing waits too long."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, KERNELS = 16, 3
# Scenarios in which every kernel is compiled once, although all clients are cold.
ONCE = ("all clients sign", "garbage", "truncated kernels", "another signature")


def _require(row: dict) -> None:
    assert row["wrong_or_missing"] == 0, row
    assert row["errors"] == []
    assert row["compiled"] + row["fetched"] == (row["clients"] - row["killed"]) * row["kernels"]
    assert row["longest_wait_seconds"] < row["limit_seconds"]
    if row["scenario"] in ONCE:
        assert row["compilations"] == row["compiled"] == row["kernels"]
    if row["scenario"] == "every kernel is there":
        assert row["compilations"] == 0
    if row["scenario"] == "the first builder is killed":
        assert row["compilations"] == row["kernels"] + 1
    if row["scenario"].startswith("the server"):
        assert row["most_warnings_of_a_client"] <= 1
        assert row["fetched"] > 0


@pytest.mark.slow
def test_a_cold_fleet(tmp_path):
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    out = tmp_path / "fleet.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_fleet.py"), "--out", str(out)]
    subprocess.run([*command, "--clients", str(CLIENTS), "--kernels", str(KERNELS)], check=True, timeout=1200)
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 9
    for row in rows:
        _require(row)


def test_the_recorded_run_of_a_larger_fleet():
    """Also, the document has its numbers."""
    result = json.loads((ROOT / "benchmarks" / "results" / "fleet.json").read_text())
    text = (ROOT / "docs" / "deployment.md").read_text()
    assert {row["clients"] for row in result["rows"]} == {64}
    for row in result["rows"]:
        _require(row)
        cells = (row["compilations"], row["fetched"], row["wrong_or_missing"], row["longest_wait_seconds"])
        assert f"| {row['scenario']} | {' | '.join(map(str, cells))} |" in text
