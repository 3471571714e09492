"""The benchmark of bundles: that it times what the command makes, and that the document says what it found."""

import json
from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).resolve().parents[2]


def test_runs_that_differ_in_more_than_their_time_are_refused():
    bench = script("bench_bundle")
    runs = [{"seconds": 2.0, "manifest_sha256": "a", "bytes": 3}, {"seconds": 1.5, "manifest_sha256": "a", "bytes": 3}]
    wanted = {"manifest_sha256": "a", "bytes": 3, "rows": [{"seconds": 2.0}, {"seconds": 1.5}]}
    assert bench.summarize(runs) == wanted
    with pytest.raises(RuntimeError, match="different bundles"):
        bench.summarize([*runs, {"seconds": 1.5, "manifest_sha256": "b", "bytes": 3}])


def test_the_document_has_the_measured_numbers():
    text = (ROOT / "docs" / "deployment.md").read_text()
    for processors in (2, 16):
        name = f"bundle_{processors}_processors.json"
        result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        assert result["processors"] == processors
        assert result["library_bytes"] <= 300_000 * result["kernels"]
        assert f"{result['kernels']} kernels for {' and '.join(result['targets'])}" in text
        seconds = ", ".join(str(row["seconds"]) for row in result["rows"])
        line = next(line for line in text.splitlines() if name in line)
        assert f"| {seconds} |" in line
        assert line.endswith(f"| g++ {result['toolchain']['host_compiler'].split()[-1]} |")
        assert f"{result['bytes'] / 1e6:.2f} MB: {result['library_bytes'] / 1e6:.2f} MB of libraries" in text
        mean, largest = result["library_bytes"] / result["kernels"] / 1e3, result["largest_library"] / 1e3
        assert f"{mean:.0f} KB a kernel, the largest {largest:.0f} KB" in text
