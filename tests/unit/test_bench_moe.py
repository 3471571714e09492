"""The benchmark of mixtures of experts, as far as it runs without a device: that its variants compute the same."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from cutlass_ops.choose import dispatch
from cutlass_ops.declare.device import Device
from cutlass_ops.run.call import signature_of
from cutlass_ops.run.grouped import grouped_op
from cutlass_ops.tuner.comparing import Timing
from tests.scripts import script

pytest.importorskip("transformers")

H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds the examples' folder
    torch.manual_seed(0)
    with torch.no_grad():
        yield script("bench_moe")


@pytest.fixture(params=["qwen3", "mixtral"])
def block(bench, request):
    model = bench.moe_layer.MODELS[request.param]
    return bench.moe_layer.random_block(model, model.small, "cpu")


# Dynamo says so of what transformers asks about PyTorch's version on the CPU.
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("tokens", [5, 65])
def test_the_variants_agree(bench, block, tokens, monkeypatch):
    compiler = torch.compile
    torch._dynamo.reset()
    monkeypatch.setattr(bench.harness, "compiled", lambda function: compiler(function, backend="aot_eager"))
    monkeypatch.setattr(bench.torch, "compile", lambda function, **_: function)
    layer = bench.MoeLayer.of(block)
    (x,) = bench.draw(layer, tokens, 1)
    assert x.shape == ((5, 1, 128) if tokens == 5 else (1, 65, 128))
    calls = bench.variants(layer, block, tokens, list(bench.PEERS))
    assert list(calls) == ["ours", *(p for p in bench.PEERS if p != "batched" or tokens == 5)]
    found = bench.errors(block, x, {name: call(x) for name, call in calls.items()})
    assert list(found["errors"]) == list(calls)
    assert 0 < found["errors"]["ours"] == found["errors"]["plain"]
    assert max(found["errors"].values()) <= 2.0**-7
    assert not found["elsewhere"]


@pytest.fixture
def timed(bench, monkeypatch):
    """Run each variant once instead of timing it, and keep what it returns. The n-th takes n milliseconds."""
    found = {}

    def once(runs, expected_us):
        assert expected_us > 0
        found.update({name: run(1) for name, run in runs.items()})
        return {name: Timing((float(at),)) for at, name in enumerate(runs, 1)}

    monkeypatch.setattr(bench.harness, "time_interleaved", once)
    monkeypatch.setattr(bench.torch, "compile", lambda function, **_: function)
    return found


@pytest.mark.parametrize("tokens", [3, 70])
def test_parts_are_those_of_the_layer(bench, block, tokens, timed):
    layer = bench.MoeLayer.of(block)
    torch.manual_seed(1)
    row = bench.run_parts("qwen3", layer, block, tokens)
    torch.manual_seed(1)
    _, second = bench.draw(layer, tokens, 2)
    wanted = layer(second).flatten(0, 1)
    assert (
        list(row["ms"]) == list(timed) == ["layer", *bench.WITHOUT, *bench.steps(layer), *bench.other_combines(layer)]
    )
    assert set(bench.STEPS) <= set(timed)
    for same in ("layer", "no_gather", "combine"):
        assert torch.equal(timed[same], wanted), same
    for near in ("combine_sum", "combine_bag", "combine_add"):
        torch.testing.assert_close(timed[near], wanted, atol=0.03 * float(wanted.abs().max()), rtol=0)
    for rows in ("no_combine", "neither"):
        assert torch.equal(timed[rows], timed["project"])
    for other in ("arrange_wide", "arrange_sort"):
        for mine, alike in zip(timed["arrange"], timed[other], strict=True):
            assert torch.equal(mine, alike), other
    # Of experts that are equally likely, any may be chosen.
    (shares, experts), (alike, others) = timed["route"], timed["route_maxima"]
    assert torch.equal(shares, alike)
    assert (experts == others).float().mean() > 0.9
    assert all(len(set(each)) == layer.chosen for each in others.tolist())
    assert (row["phase"], row["errors"]["ours"] > 0) == ("decode" if tokens == 3 else "prefill", True)
    assert {without: gain["median"] for without, gain in row["gain"].items()} == {
        "no_gather": 0.5, "no_combine": 0.3333, "neither": 0.25
    }  # fmt: skip


def test_parts_end_in_a_table(bench, monkeypatch, tmp_path, capsys, timed):
    moe = bench.moe_layer
    made = moe.random_block
    monkeypatch.setattr(moe, "random_block", lambda model, sizes, device: made(model, model.small, "cpu"))
    monkeypatch.setattr(bench.harness, "begin", lambda: {"chip": "none"})
    out = tmp_path / "parts.json"
    monkeypatch.setattr(sys, "argv", ["bench_moe.py", "--parts", "--tokens", "1", "80", "--out", str(out)])
    bench.main()
    rows = json.loads(out.read_text())["rows"]
    assert [(row["model"], row["tokens"]) for row in rows] == [(m, t) for m in ("qwen3", "mixtral") for t in (1, 80)]
    lines = capsys.readouterr().out.splitlines()[-6:]
    assert lines[0].startswith("| Model | Tokens | Layer, µs | route | arrange | gather | expand |")
    assert lines[2] == (
        "| qwen3 | 1 | 1000.0 | 5000.0 | 6000.0 | 7000.0 | 8000.0 | 9000.0 | 10000.0 | 0.500 | 0.333 | 0.250 |"
    )


def test_a_wrong_result_would_be_seen(bench, block):
    layer = bench.MoeLayer.of(block)
    (x,) = bench.draw(layer, 16, 1)
    right = layer(x)
    for wrong in (replace(layer, normalizes=not layer.normalizes)(x), torch.full_like(x, torch.nan)):
        with pytest.raises(AssertionError, match="16 of 16 tokens are far off"):
            bench.errors(block, x, {"ours": wrong})
    with pytest.raises(AssertionError, match="and transformers' is"):
        bench.errors(block, x, {"ours": right * 1.015625})
    right[3, 0, 5] = torch.nan
    with pytest.raises(AssertionError, match="1 of 16 tokens are far off"):
        bench.errors(block, x, {"ours": right})


def test_few_of_many_tokens_may_have_other_experts(bench, block):
    layer = bench.MoeLayer.of(block)
    (x,) = bench.draw(layer, 200, 1)
    found, every = layer(x), bench.errors(block, x, {"ours": layer(x)})
    found[0, :2] *= 2
    assert bench.errors(block, x, {"ours": found})["elsewhere"] == {"ours": 2}
    assert every["errors"]["ours"] == pytest.approx(bench.errors(block, x, {"ours": found})["errors"]["ours"], rel=0.1)
    found[0, 2] *= 2
    with pytest.raises(AssertionError, match="3 of 200"):
        bench.errors(block, x, {"ours": found})


def test_another_way_has_the_same_weights(bench, block):
    other = bench.by(block, "batched_mm")
    assert other.experts.config._experts_implementation == "batched_mm"
    assert block.experts.config._experts_implementation == "grouped_mm"
    for mine, theirs in zip(other.parameters(), block.parameters(), strict=True):
        assert mine is theirs


def test_sets_choose_other_experts(bench, block):
    layer = bench.MoeLayer.of(block)
    chosen = {tuple(layer.route(x.flatten(0, 1))[1].flatten().sort().values.tolist()) for x in bench.draw(layer, 1, 8)}
    assert len(chosen) > 1


def test_a_gemm_alike_has_the_active_experts(bench, block):
    layer = bench.MoeLayer.of(block)
    (x,) = bench.draw(layer, 2, 1)
    assert layer.chosen <= bench.active(layer, x) <= 2 * layer.chosen
    alike = bench.problem(layer, x)
    assert alike.m * bench.active(layer, x) <= 2 * layer.chosen
    experts, hidden, inner = layer.gate.shape
    assert alike.n * alike.k == layer.gate[0].numel() + layer.up[0].numel() + layer.down[0].numel()
    assert (experts, hidden, inner) in {(32, 128, 96), (8, 128, 352)}


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_full_sizes_have_kernels_without_copies(bench, name):
    moe = bench.moe_layer
    model = moe.MODELS[name]
    layer = bench.MoeLayer.of(moe.random_block(model, model.full, "meta"))
    experts, hidden, inner = layer.gate.shape
    for tokens in bench.TOKENS:
        rows = tokens * layer.chosen
        x, between = (torch.empty(rows, k, dtype=moe.DTYPE, device="meta") for k in (hidden, inner))
        offsets = torch.empty(experts, dtype=torch.int32, device="meta")
        share = torch.empty(rows, device="meta")
        for epilogue, operands in (
            (moe.swiglu, (x, layer.gate, (offsets, layer.up))),
            (moe.weighted, (between, layer.down, (offsets, share))),
        ):
            call = grouped_op(epilogue).checked(*operands, {}, None, None)
            assert not call.arguments.copied
            signature = signature_of(call, H100)
            spec, _ = dispatch.choose(signature, H100, call.chosen_for)
            assert (spec.target, signature.form.name, signature.a.aligned, signature.b.aligned) == (
                "sm_90a", "grouped", True, True
            )  # fmt: skip
