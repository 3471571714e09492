"""Instructions alone: readings of clocks, rows, and the part of docs/types.md."""

import pytest
import torch

from tests.scripts import script

BENCH = script("bench_instructions")


def test_the_document_has_the_committed_result():
    written = (BENCH.ROOT / BENCH.REPORT.document).read_text()
    assert written == BENCH.REPORT.written(), f"run python {BENCH.REPORT.script} --write"


def test_a_reading_is_the_median_of_the_blocks():
    reading = BENCH.Reading.of(torch.tensor([[2000, 1000], [1800, 1000], [9999, 5000]]))
    assert (reading.clocks, reading.nanoseconds) == (2000, 1000)
    assert reading.mhz == 2000
    # 132 multiprocessors that do 1024 products a clock, at 2 GHz.
    assert reading.tflops(1024 * 2000, 132) == pytest.approx(2 * 132 * 1024 * 2e9 / 1e12)


def test_a_row_has_medians_over_rounds():
    readings = [
        (BENCH.Reading(1500.0, 1000.0), BENCH.Reading(1500.0, 750.0)),
        (BENCH.Reading(1500.0, 1200.0), BENCH.Reading(1500.0, 800.0)),
        (BENCH.Reading(1500.0, 1100.0), BENCH.Reading(1500.0, 760.0)),
    ]
    assert BENCH.row_of("mma", 1_500_000, 100, readings) == {
        "loop": "mma",
        "clocks": 1000.0,
        "sustained_tflops": round(2e-3 * 1_500_000 * 100 / 1100, 1),
        "sustained_mhz": 1364,
        "rested_tflops": round(2e-3 * 1_500_000 * 100 / 760, 1),
        "rested_mhz": 1974,
    }


def loop(name, sustained, rested):
    return {
        "loop": name,
        "clocks": 0.49,
        "sustained_tflops": sustained,
        "sustained_mhz": 1500,
        "rested_tflops": rested,
        "rested_mhz": 1900,
    }


GEMM = {
    "gemm": "128x256x64 cooperative, 2x1",
    "m": 4096,
    "n": 4096,
    "k": 256,
    "f32_ms": 0.05,
    "f16_ms": 0.04,
    "ratio": 1.25,
    "ratio_range": [1.2, 1.3],
    "f32_error": 2e-4,
    "f16_error": 3e-3,
}


def test_the_document_compares_sums():
    rows = [loop("wgmma.m64n256k16.f32.f16.f16", 700.0, 900.0), loop("wgmma.m64n256k16.f16.f16.f16", 770.0, 909.0)]
    said = BENCH.text(
        {"chip": "a GPU", "date": "2026-01-02", "rows": [*rows, loop("mma.m16n8k4.f64", 55.0, 60.0), GEMM]}
    )
    assert "| `mma.m16n8k4.f64` | 0.49 | 55.0 | 1500 | 60.0 |" in said
    assert "`wgmma` m64n256k16 1.100 at the power limit and 1.010 after a rest." in said
    assert "`mma.sync` m16n8k16" not in said  # not measured
    assert "| 4096×4096×256 | 40.0 | 50.0 | 1.250 | 3.0e-03 | 2.0e-04 |" in said
    alone = BENCH.text({"chip": "a GPU", "date": "2026-01-02", "rows": rows})
    assert "CUTLASS" not in alone
