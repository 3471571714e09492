"""examples/precision.py: its arithmetics on the CPU, against what their numbers of bits say, and its report."""

import math
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


def test_fp8_takes_operands_of_any_size():
    a, b = operands(64)
    small, large = (mean_error(precision.fp8, a * scale, b * scale) for scale in (1e-6, 1e6))
    assert small == pytest.approx(large, rel=1e-3)


# The report.


def test_the_document_is_of_the_committed_results(tmp_path, monkeypatch):
    document = tmp_path / "precision.md"
    document.write_text(precision.DOCUMENT.read_text())
    monkeypatch.setattr(precision, "DOCUMENT", document)
    monkeypatch.setattr(precision, "draw", lambda *_: None)
    precision.write()
    assert document.read_text() == (ROOT / "docs" / "precision.md").read_text(), (
        "run python -m examples.precision --write"
    )
