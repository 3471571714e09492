"""The benchmark of training, as far as it runs without a device: that its variants compute the same."""

import json

import pytest
import torch

from tests.scripts import script

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def bench():
    return script("bench_training")


@pytest.mark.parametrize("layer", ["linear_gelu", "mlp", "swiglu", "decoder"])
def test_a_layer_s_variants_agree(layer, bench):
    found = bench.variants(layer, 64, 32, ["recompute", "eager"], dtype=BF16)
    assert list(found.layers) == ["ours", "recompute", "eager"]
    rows = (1, 16) if layer == "decoder" else (16,)
    x = torch.randn(*rows, 32).to(BF16).requires_grad_()
    grad = torch.randn(found.module(x).shape).to(BF16)
    assert bench.error(found, x, grad) <= 2
    parameters = list(found.module.parameters())
    wanted = bench.step(found.layers["eager"], parameters, x, grad)
    assert len(wanted) == 2 + len(parameters)
    for name in ("ours", "recompute"):
        for a, b in zip(bench.step(found.layers[name], parameters, x, grad), wanted, strict=True):
            assert (a - b).float().norm() <= 0.03 * b.float().norm(), name


def test_a_wrong_gradient_is_found(bench):
    found = bench.variants("mlp", 64, 32, [], dtype=BF16)
    x, grad = torch.randn(16, 32).to(BF16).requires_grad_(), torch.randn(16, 32).to(BF16)
    plain = found.plain
    with pytest.raises(AssertionError, match="times eager's"):
        bench.error(found._replace(plain=lambda m, x: plain(m, x) + 0.05 * x), x, grad)


def test_rows_that_are_there_are_kept(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")  # so that what main() sets does not stay
    monkeypatch.setattr(bench.harness, "environment", lambda: {"chip": "none"})
    ran, built = [], []
    monkeypatch.setattr(bench, "build_ahead", built.extend)
    monkeypatch.setattr(
        bench, "run_case", lambda *case: ran.append(case) or dict(zip(("layer", "m", "n", "k"), case[:4], strict=True))
    )
    first, both = tmp_path / "first.json", tmp_path / "both.json"
    script_arguments = ["bench_training", "--layers", "mlp", "--skip", "liger", "compile"]
    monkeypatch.setattr("sys.argv", [*script_arguments, "--shapes", "4096x14336x4096", "--out", str(first)])
    bench.main()
    assert ran == [("mlp", 4096, 14336, 4096, ["recompute", "ours_compiled", "eager"])]
    monkeypatch.setattr("sys.argv", [*script_arguments, "--resume", str(first), "--out", str(both)])
    bench.main()
    assert [tuple(case[1:4]) for case in ran] == list(bench.SHAPES["mlp"])
    assert [case[:4] for case in ran] == built
    assert len(json.loads(both.read_text())["rows"]) == len(bench.SHAPES["mlp"])


def test_the_gemms_of_a_step_are_found_without_data(bench):
    found = bench.calls("mlp", 4096, 8192, 2048)
    # Two forward, two gradients of weights, the gradient of what lies between, and that of x.
    assert sorted((c.a.shape[-2], c.b.shape[-1], c.a.shape[-1]) for c in found) == sorted(
        [
            (4096, 8192, 2048),
            (4096, 2048, 8192),
            (2048, 8192, 4096),
            (8192, 2048, 4096),
            (4096, 8192, 2048),
            (4096, 2048, 8192),
        ]
    )
    assert {c.a.device.type for c in found} == {"meta"}
