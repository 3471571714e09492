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


@pytest.fixture
def ran(bench, monkeypatch):
    """What the script measures, without a GPU: the layer, its extents, and the variants besides ours."""
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "1")  # so that what main() sets does not stay
    monkeypatch.setattr(bench.harness, "environment", lambda: {"chip": "none"})
    monkeypatch.setattr(bench, "build_ahead", lambda cases: None)
    ran = []

    def run_case(layer, m, n, k, peers):
        ran.append((layer, m, n, k, peers))
        # Each value tells the run.
        each = dict.fromkeys(["ours", *peers], len(ran))
        beside = {name: {"median": x} for name, x in each.items() if name != "ours"}
        row = {"layer": layer, "m": m, "n": n, "k": k, "error_over_eager": len(ran)}
        return {**row, "ms": each, "over_ours": beside, "peak_mib": each, "launches": each}

    monkeypatch.setattr(bench, "run_case", run_case)
    return ran


def measured(bench, monkeypatch, out, *arguments):
    monkeypatch.setattr("sys.argv", ["bench_training", "--layers", "mlp", *arguments, "--out", str(out)])
    bench.main()
    return json.loads(out.read_text())["rows"]


def test_rows_that_are_there_are_kept(bench, ran, monkeypatch, tmp_path):
    skipped, first = ["--skip", "liger", "compile"], tmp_path / "first.json"
    measured(bench, monkeypatch, first, *skipped, "--shapes", "4096x14336x4096")
    assert ran == [("mlp", 4096, 14336, 4096, ["recompute", "ours_compiled", "eager"])]
    rows = measured(bench, monkeypatch, tmp_path / "both.json", *skipped, "--resume", str(first))
    assert [tuple(case[1:4]) for case in ran] == list(bench.SHAPES["mlp"])
    assert [row["error_over_eager"] for row in rows] == [1, 2, 3, 4]


def test_a_variant_that_a_row_lacks_is_measured_beside_ours(bench, ran, monkeypatch, tmp_path):
    shape, first = ["--shapes", "4096x14336x4096"], tmp_path / "first.json"
    measured(bench, monkeypatch, first, *shape, "--skip", "compile", "ours_compiled")
    (row,) = measured(bench, monkeypatch, tmp_path / "all.json", *shape, "--resume", str(first))
    assert ran[1] == ("mlp", 4096, 14336, 4096, ["ours_compiled", "compile"])
    assert row["error_over_eager"] == 1
    of_runs = {"ours": 1, "recompute": 1, "eager": 1, "ours_compiled": 2, "compile": 2}
    assert row["ms"] == row["peak_mib"] == row["launches"] == of_runs
    assert row["over_ours"] == {name: {"median": x} for name, x in of_runs.items() if name != "ours"}
    second = tmp_path / "second.json"
    measured(bench, monkeypatch, second, *shape, "--skip", "recompute", "eager")
    assert ran[2][4] == ["ours_compiled", "compile"]
    (row,) = measured(bench, monkeypatch, tmp_path / "all.json", *shape, "--resume", str(first), str(second))
    assert len(ran) == 3  # the two results have everything
    assert row["ms"] == {name: 1 if x == 1 else 3 for name, x in of_runs.items()}


def test_liger_is_a_peer_where_it_is_installed(bench, monkeypatch):
    for spec, has in ((None, False), (object(), True)):
        monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name, spec=spec: spec)
        assert ("liger" in bench.peers_of("swiglu", [])) is has
        assert "liger" not in bench.peers_of("mlp", [])
        assert bench.peers_of("swiglu", [p for p in bench.PEERS if p != "eager"]) == ["eager"]


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
