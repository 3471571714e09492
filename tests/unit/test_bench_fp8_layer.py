"""The benchmark of the FP8 layer, as far as it runs without a device: that its variants compute the same."""

import sys

import pytest
import torch

from tests.scripts import script

pytest.importorskip("transformers")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds the examples' folder
    return script("bench_fp8_layer")


@pytest.fixture
def layers(bench):
    torch.manual_seed(0)
    with torch.no_grad():
        yield bench.Layers.draw(bench.block.configuration(bench.block.SMALL), "cpu", 64)


@pytest.mark.parametrize("m", [3, 80])
def test_the_variants_agree(bench, layers, m, monkeypatch):
    def compiled(function, **_):
        return torch.compile(function, backend="aot_eager", dynamic=False)

    monkeypatch.setattr(bench.harness, "compiled", compiled)
    monkeypatch.setattr(bench.torch, "compile", lambda function, **_: function)
    x = bench.draw(layers, m, 12, "cpu")
    found = bench.errors(layers, x)
    assert 0.01 < found["error"] < 0.1
    runs = bench.variants(layers, x, list(bench.PEERS))
    assert list(runs) == ["ours", *bench.PEERS]
    y = x.stream.y.double()
    wanted = layers.exact(x.stream.y, None, None, x.cache, position_embeddings=x.rope).double() - y
    results = {name: run(0) for name, run in runs.items()}
    for name, result in results.items():
        stream = result if isinstance(result, torch.Tensor) else result[0]
        limit = 0.02 if name.startswith("bf16") else 0.1
        assert bench.block.error(stream.double() - y, wanted) <= limit, name
    assert torch.equal(results["plain"].y, results["ours"].y)


def test_a_wrong_scale_would_be_seen(bench, layers):
    layers.fp8.hidden.scale.mul_(1 / 64)  # most of the hidden values are cut off
    with pytest.raises(AssertionError, match="with dynamic scales of rows"):
        bench.errors(layers, bench.draw(layers, 16, 12, "cpu"))


def test_scales_are_static_after_calibration(layers):
    assert {state.scaling for state in (*layers.fp8.states, layers.state)} == {"static"}
    assert all(state.scale != 1 for state in layers.fp8.states)
