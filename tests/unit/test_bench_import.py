"""The benchmark of the import: that it measures the packages that it was given, apart."""

import shutil
from pathlib import Path

import pytest

from tests.scripts import script

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_each_process_imports_the_copy_that_it_was_given(tmp_path):
    bench = script("bench_import")
    (tmp_path / "this").mkdir()
    copy = bench.install(ROOT, tmp_path / "this", byte_code=False)
    times = bench.run(copy)
    assert 0 < times["import"] <= times["op"] <= times["call"] <= times["norm"]
    shutil.rmtree(copy / "cutlass_ops")
    with pytest.raises(RuntimeError, match="in place of the package"):
        bench.run(copy)


def test_the_summary_has_the_medians_of_each():
    rows = [
        {"which": which, "import": ms} for which, ms in (("this", 1.0), ("other", 5.0), ("this", 3.0), ("this", 2.0))
    ]
    assert script("bench_import").summary(rows) == {"this": {"import": 2.0}, "other": {"import": 5.0}}
