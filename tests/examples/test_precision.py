"""examples/precision.py: its arithmetics on the CPU, against what their numbers of bits say, and its report."""

import contextlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from examples import precision

ROOT = Path(__file__).resolve().parents[2]


def operands(k, draw=precision.normal, side=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [draw((side, k), generator) for _ in range(2)]


def mean_error(product, a, b):
    return precision.errors(product(a, b), a.double() @ b.double().t())[1]


# Arithmetics.


def test_tf32_keeps_ten_bits_of_mantissa_and_rounds_to_nearest_even():
    last = 2.0**-10
    given = torch.tensor([1 + last / 2, 1 + 1.5 * last, 1 + last * 0.51, -1 - last * 0.51, 0.0, 3e38, 1e-40])
    found = precision.round_to_tf32(given)
    assert found[:6].tolist() == [1.0, 1 + 2 * last, 1 + last, -1 - last, 0.0, found[5].item()]
    assert found[5] == pytest.approx(3e38, rel=last)
    assert (found.view(torch.int32) & 0x1FFF == 0).all()
    assert torch.equal(precision.round_to_tf32(found), found)


def test_tf32_keeps_what_is_not_finite():
    given = torch.tensor([math.inf, -math.inf, math.nan])
    assert torch.equal(precision.round_to_tf32(given).nan_to_num(7.0), given.nan_to_num(7.0))


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("FP32", 1e-9, 1e-6),
        ("3xTF32", 1e-9, 1e-6),
        ("TF32", 5e-5, 5e-4),
        (precision.FP16_FP32_SUMS, 5e-5, 5e-4),
        (precision.FP16_SUMS, 4e-4, 3e-3),
        ("BF16", 5e-4, 4e-3),
        ("FP8", 5e-3, 6e-2),
    ],
)
def test_errors_are_those_of_an_arithmetics_bits(name, least, most):
    (arithmetic,) = (each for each in precision.ARITHMETICS if each.name == name)
    assert least < mean_error(arithmetic.product, *operands(1024)) < most


def test_fp16_sums_are_rounded_after_each_instruction():
    # From 2048 on, FP16's last bit is two: instructions that add one each are lost, and one that adds two is not.
    a, b = torch.zeros(1, 48), torch.ones(1, 48)
    a[0, :2] = 1024
    a[0, 16] = a[0, 32] = 1
    assert precision.fp16_sums(a, b).item() == 2048
    assert precision.fp16(a, b).item() == 2050
    a[0, 17], a[0, 32] = 1, 0
    assert precision.fp16_sums(a, b).item() == 2050


def test_fp16_sums_do_not_depend_on_how_many_are_emulated_at_a_time(monkeypatch):
    a, b = operands(1024, precision.positive)
    whole = precision.fp16_sums(a, b)
    monkeypatch.setattr(precision, "_BATCH", 48)
    assert torch.equal(precision.fp16_sums(a, b), whole)


def test_fp16_sums_stall():
    # Sixteen products of 0.5 add 8: no more than half of FP16's last bit from 16384 on.
    a, b = torch.full((1, 65536), 0.5), torch.ones(1, 65536)
    assert precision.fp16_sums(a, b).item() == 16384
    assert precision.fp16(a, b).item() == 32768


def test_fp8_takes_operands_of_any_size():
    a, b = operands(64)
    small, large = (mean_error(precision.fp8, a * scale, b * scale) for scale in (1e-6, 1e6))
    assert small == pytest.approx(large, rel=1e-3)


def test_settings_come_back_as_they_were():
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    with contextlib.suppress(KeyError), precision.settings(tf32=not before):
        assert matmul.allow_tf32 is not before
        raise KeyError
    assert matmul.allow_tf32 is before


@pytest.mark.parametrize("name", precision.DISTRIBUTIONS)
def test_distributions_repeat_and_differ_by_seed(name):
    draw = precision.DISTRIBUTIONS[name]
    first, again, other = (operands(64, draw, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert bool((first > 0).all()) == (name in ("positive", "lognormal"))


def test_outliers_are_rare_and_large():
    a, _ = operands(4096, precision.outliers)
    assert 1 / 1024 < (a.abs() > 16).float().mean() < 1 / 128


# Errors.


def test_errors_are_relative_to_the_results_size():
    exact = torch.tensor([[3.0, -4.0], [0.0, 5.0]], dtype=torch.float64)
    size = math.sqrt(50 / 4)
    assert precision.errors(exact + torch.tensor([[0.0, 1.0], [0.0, 0.0]]), exact) == pytest.approx(
        (1 / size, 0.25 / size)
    )
    assert precision.errors(torch.tensor([[3.0, math.inf], [0.0, 5.0]]), exact) == (math.inf, math.inf)


def test_measured_rows_are_json_without_infinity():
    rows = precision.measure([16, 64], "cpu")
    names = [each.name for each in precision.ARITHMETICS if each.emulated]
    assert len(rows) == len(precision.DISTRIBUTIONS) * 2 * len(names)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    assert precision._plain(math.inf, math.inf) == {"largest": None, "mean": None}


# The report.


def _rows(**means):
    """Rows of the normal distribution, of the mean errors at K of 64, 128, and so on."""
    names = {"good": precision.FP16_FP32_SUMS, "sums": precision.FP16_SUMS}
    return [
        {"distribution": "normal", "arithmetic": names[name], "k": 64 << place, "mean": mean, "largest": mean}
        for name, each in means.items()
        for place, mean in enumerate(each)
    ]


def test_where_fp16_sums_break():
    rows = _rows(good=[1e-4] * 4, sums=[5e-4, 1e-3, 2e-2, None])
    assert precision.loses_a_digit_at(rows, "normal") == 128
    assert precision.breaks_at(rows, "normal") == 256
    assert precision.breaks_at(_rows(good=[1e-4] * 2, sums=[1e-4, None]), "normal") == 128
    assert precision.breaks_at(_rows(good=[1e-4], sums=[1e-4]), "normal") is None
    lines = precision.break_table({"here": {"rows": rows}})
    assert lines[2] == "| normal | 128 | 256 |"


def test_tables_say_what_overflows():
    lines = precision.error_table(_rows(sums=[5e-4, None, 1e-3]), "normal")
    assert lines[0] == "| Arithmetic | K = 64 | K = 256 |"
    assert lines[2] == "| FP16, FP16 sums | 5.0e-04 (5.0e-04) | 1.0e-03 (1.0e-03) |"
    assert "overflows" in precision.error_table(_rows(sums=[None]), "normal")[2]


def test_a_pipeline_pays_if_it_is_faster_with_its_conversions():
    us = dict.fromkeys(precision.PIPELINES, 100.0) | {"FP32": 300.0, "TF32": 90.0, "FP16, A converted": 50.0}
    assert precision.pays(us, "FP32")["FP16, A and B converted"] == 3.0
    assert precision.pays(us, "TF32") == {name: 1.8 if name == "FP16, A converted" else 0.9 for name in precision.MIXED}
    lines = precision.pipeline_table([{"shape": [1, 2, 3], "us": us}])
    assert lines[2].startswith("| 1×2×3 | 300.0 | 100.0 | 90.0 |")
    assert lines[-1] == "| 1×2×3 | TF32 | 0.90 | 1.80 | 0.90 |"


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    result = {"where": "here", "rows": precision.measure([16, 64], "cpu")}
    precision.draw(result, tmp_path / "precision.svg")
    assert (tmp_path / "precision.svg").read_text().startswith("<?xml")


def test_the_document_is_of_the_committed_results(tmp_path, monkeypatch):
    document = tmp_path / "precision.md"
    document.write_text(precision.DOCUMENT.read_text())
    monkeypatch.setattr(precision, "DOCUMENT", document)
    monkeypatch.setattr(precision, "draw", lambda *_: None)
    precision.write()
    assert document.read_text() == (ROOT / "docs" / "precision.md").read_text(), (
        "run python -m examples.precision --write"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ks", "code", "says"), [(["32"], 0, "was not timed: that needs a GPU"), (["17"], 2, "multiples of 16")]
)
def test_the_command(ks, code, says):
    command = [sys.executable, "-m", "examples.precision", "--ks", *ks]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == code
    assert says in done.stdout + done.stderr
