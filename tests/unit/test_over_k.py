"""Errors over K, of FP8 and of the other types: problems, kernels, what is compared, and the documents."""

import json
from fractions import Fraction

import pytest
import torch
from signatures import H100

from cutlass_ops.kinds import legality
from tests.scripts import script

FP8, TYPES = script("accuracy_fp8"), script("accuracy_types")
OVER_K = FP8.over_k


@pytest.mark.parametrize("measured", [FP8, TYPES], ids=["fp8", "types"])
def test_the_document_has_the_committed_result(measured):
    report = measured.REPORT
    written = (OVER_K.ROOT / report.document).read_text()
    assert written == report.written(), f"run python {report.script} --write"


@pytest.mark.parametrize("measured", [FP8, TYPES], ids=["fp8", "types"])
def test_one_kernel_of_each_signature_takes_all_of_k(measured):
    specs = list(measured.kernels(H100, OVER_K.SIDE["cuda"]))
    assert len(set(specs)) == len(specs)
    assert len({spec.epilogue.title + str((spec.a, spec.b, spec.d)) for spec in specs}) == len(specs)
    for spec in specs:
        assert legality.check(spec) == ()
        assert spec.config.whole_k


def test_kernels_of_fp8_add_up_in_both_ways():
    found = [(spec.a.promoted, spec.config.accumulation) for spec in FP8.kernels(H100, 4096)]
    assert found == [(False, "fast"), (True, "promoted")] * 6


def test_fp8_errors_are_those_of_the_rounding():
    rows = list(FP8.measure([64, 256], 32, "cpu"))
    assert [(row["types"], row["k"], row["d"]) for row in rows[:5]] == [
        ("e4m3,e4m3", 64, "bf16"),
        ("e4m3,e4m3", 64, "f32"),
        ("e4m3,e4m3", 256, "bf16"),
        ("e4m3,e4m3", 256, "f32"),
        ("e4m3,e5m2", 64, "bf16"),
    ]
    for row in rows:
        errors = row["errors"]
        assert errors["fast"] == errors["promoted"]  # on the CPU
        assert set(errors) | set(row["absent"]) == {"fast", "promoted", "scaled_mm", "scaled_mm_fast"}
        low, high = (2.0**-11, 2.0**-8) if row["d"] == "bf16" else (0, 2.0**-20)
        assert low < errors["fast"] < high
    result = {"chip": "a CPU", "date": "2026-01-02", "torch": "3", "rows": rows}
    assert "| e5m2 × e5m2 | F32 |" in FP8.text(json.loads(json.dumps(result)))


def test_the_bound_is_that_of_pytorchs_best():
    errors = {"fast": 1.15, "promoted": 1.05, "scaled_mm_fast": 1.2, "scaled_mm": 1.0}
    assert FP8.within(errors, "fast", FP8.PEERS) is False
    assert FP8.within(errors, "promoted", FP8.PEERS) is True
    assert FP8.within(errors, "fast", ("promoted",)) is True
    assert FP8.within({"fast": 1.0, "promoted": 1.0}, "fast", FP8.PEERS) is None
    rows = [
        {"types": types, "d": d, "k": k, "errors": {**errors, "fast": fast}}
        for types in FP8.TYPES
        for d in FP8.DS
        for k, fast in ((64, 1.0), (128, 1.0), (256, 1.3))
    ]
    for row in rows:
        if row["types"] == "e5m2,e5m2":
            row["errors"] = {name: row["errors"][name] for name in ("fast", "promoted")}
    lines = FP8.bounds(rows).splitlines()
    assert lines[2] == "| e4m3 × e4m3 | BF16 | up to 128 | all, up to 256 | up to 128 |"
    assert lines[-1] == "| e5m2 × e5m2 | F32 | PyTorch has none | PyTorch has none | up to 128 |"


@pytest.mark.parametrize(
    ("holds", "text"),
    [
        ({64: True, 128: True}, "all, up to 128"),
        ({64: True, 128: False, 256: False}, "up to 64"),
        ({64: False, 128: True}, "128"),
        ({64: True, 128: False, 256: True}, "64, 256"),
        ({64: False}, "none"),
    ],
)
def test_where_it_holds(holds, text):
    assert OVER_K.where(holds) == text


def test_errors_of_types():
    rows = list(TYPES.measure([64, 4096], 32, "cpu"))
    assert len(rows) == len(TYPES.ARITHMETICS) * 4
    for row in rows:
        if row["type"] == "INT8":
            assert row["exact"]
            assert row["pytorch"] == 0
            assert (row["error"] > 0) == (row["values"] == "positive" and row["k"] == 4096)  # sums beyond 2^24
        elif row["type"] == "TF32":
            assert row["error"] > 10 * row["pytorch"]  # PyTorch on the CPU multiplies in FP32
        elif row["d"] in ("FP16", "BF16"):
            assert row["error"] == pytest.approx(row["pytorch"], rel=0.02)
        else:
            assert 0 < row["error"] < (1e-14 if row["d"] == "FP64" else 1e-6)
    result = {"chip": "a CPU", "date": "2026-01-02", "torch": "3", "rows": rows}
    lines = TYPES.text(result).splitlines()
    assert "| INT8 to FP32 | exact | exact | – |" in lines
    assert sum("one rounding" in line for line in lines) == 1


def test_the_plot_is_the_same_each_time(tmp_path, monkeypatch):
    rows = list(TYPES.measure([64, 4096], 32, "cpu"))
    found = []
    for name in ("a.svg", "b.svg"):
        monkeypatch.setattr(TYPES, "PLOT", tmp_path / "new" / name)
        TYPES.draw({"chip": "a CPU", "rows": rows})
        found.append(TYPES.PLOT.read_bytes())
    assert found[0] == found[1]
    assert b"INT8 to FP32" in found[0]


def test_sums_of_fp64_are_exact():
    spread = 10.0 ** torch.randint(-8, 8, (2, 333))
    a, b = torch.randn(2, 333, dtype=torch.float64) * spread, torch.randn(333, 3, dtype=torch.float64)
    large, lacks = TYPES.exact_in_fp64(a, b)
    for i, j in ((0, 0), (1, 2)):
        exact = sum(Fraction(x) * Fraction(y) for x, y in zip(a[i].tolist(), b[:, j].tolist(), strict=True))
        found = Fraction(large[i, j].item()) + Fraction(lacks[i, j].item())
        assert abs(found - exact) < abs(exact) / 2**80
