"""The benchmarks of norms and gates, as far as they run without a device: that their variants compute the same."""

import sys
from dataclasses import replace

import pytest
import torch
from signatures import H100, signature

from cutlass_ops.declare.config import GemvConfig, Sm90Config, ThreadblockShape
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import composed
from tests.scripts import script

BF16 = torch.bfloat16


def test_the_rmsnorms_variants_agree(monkeypatch):
    bench = script("bench_rmsnorm")
    draw = torch.randn
    monkeypatch.setattr(bench.torch, "randn", lambda *shape, device, dtype: draw(*shape, dtype=dtype))
    empty = torch.empty
    monkeypatch.setattr(bench.torch, "empty", lambda *shape, device, dtype: empty(*shape, dtype=dtype))
    tensors = bench.Inputs.draw(9, 24, 64, BF16)
    assert bench.check(tensors) <= 2
    exact = bench.eager(*(t.double() for t in (tensors.x, tensors.weight, tensors.gamma)))
    for name in ("ours", "statistic", "eager"):
        found = bench.VARIANTS[name](tensors).double()
        assert (found - exact).norm() <= 0.01 * exact.norm(), name
    assert set(bench.PEERS) == set(bench.VARIANTS) - {"ours"} | {"compile", "ways"}


@pytest.mark.parametrize(
    ("config", "others"),
    [
        (Sm90Config(ThreadblockShape(64, 16, 64), swap_ab=True), {"beside", "ahead"}),
        (Sm90Config(ThreadblockShape(128, 128, 64), means="beside"), {"ahead"}),
    ],
)
def test_the_rmsnorm_is_timed_in_every_legal_way_with_the_same_tiles(config, others, monkeypatch):
    bench = script("bench_rmsnorm")
    monkeypatch.setattr(bench, "device_of", lambda device: H100)
    monkeypatch.setattr(bench.dispatch, "choose", lambda signature, device, problem: (signature.spec(config), config))
    x, w = (torch.empty(shape, device="meta", dtype=BF16) for shape in ((96, 4096), (4096, 4096)))
    found = bench.ways(x, w.t())
    assert {way: spec.config for way, spec in found.items()} == {way: replace(config, means=way) for way in others}


def test_a_kernel_of_ordinary_loads_takes_means_in_one_way(monkeypatch, session):
    bench = script("bench_rmsnorm")
    monkeypatch.setattr(bench, "device_of", lambda device: H100)
    x, w = (torch.empty(shape, device="meta", dtype=BF16) for shape in ((1, 4096), (4096, 4096)))
    chosen, _ = bench.dispatch.choose(signature(composed.rms_norm), H100, Problem(1, 4096, 4096))
    assert isinstance(chosen.config, GemvConfig)
    assert bench.ways(x, w.t()) == {}


def test_swiglus_variants_agree():
    bench = script("bench_swiglu")
    x, both = torch.randn(9, 64).to(BF16), (torch.randn(48, 64) / 8).to(BF16)
    exact = bench.eager(x.double(), both.double())
    out = torch.empty(9, 24, dtype=BF16)
    for found in (bench.eager(x, both), bench.one_linear(x, both), bench.two_gemms(x, both, out)):
        assert (found.double() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.slow
def test_the_accuracy_of_norms_is_measured_and_holds():
    rows = list(script("accuracy_rmsnorm").measure(Problem(16, 48, 512), "cpu"))
    assert len({(r["op"], r["case"], r["dtype"], r["way"]) for r in rows}) == len(rows) == (2 + 4) * 2 * 9
    for row in rows:
        far = row["case"].startswith("mean") and int(row["case"].split()[1])
        allowed = far <= (50 if row["dtype"] == "f16" else 200) or row["op"] == "rmsnorm_gemm"
        assert not allowed or row["ratio"] <= 2, row
    assert max(r["ratio"] for r in rows) > 2  # it can tell: one pass at a mean of 1000


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_the_layer_agrees_with_transformers(phase, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds the examples' folder
    bench = script("bench_layer")
    block = bench.block
    config = block.configuration(block.SMALL)
    layer = block.random_layer(config, "cpu")
    batch, sequence = (1, 12) if phase == "prefill" else (3, 1)
    cache = None if phase == "prefill" else block.Cache(batch, 12, config, "cpu")
    x, first = torch.randn(batch, sequence, 256).to(BF16), 12 - sequence
    paired = None if cache is None else cache.in_pairs()
    positions = torch.arange(first, 12).repeat(batch, 1)
    rope = block.LlamaRotaryEmbedding(config)(x, positions)
    with torch.no_grad():
        theirs = bench.transformers_output(layer, x, rope, cache)
        exact = bench.exact_output(layer, x, rope, cache)
        for way in block.Statistic:
            fused = block.FusedLayer.of(layer, config, way)
            ours, statistic = fused(x, positions.float(), None, paired)
            assert bench.harness.check(ours, exact, theirs) <= 2
            torch._dynamo.reset()
            compiled, _ = torch.compile(fused, backend="aot_eager", fullgraph=True)(x, positions.float(), None, paired)
            assert torch.equal(compiled, ours)
            assert (statistic is None) == (way is block.Statistic.TAKEN)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("gemm_bf16row_bf16col_bf16row_sm90_128x192x64_2x1_pp_sm_90a_0123456789ab", "gemm"),
        ("gemm_bf16row_bf16col_bf16row_sm90_128x192x64_2x1_pp_ahead_sm_90a_0123456789ab_means", "gemm"),
        ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "gemm"),
        ("triton_tem_fused_mm_t_3", "gemm"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64>>", "attention"),
        ("triton_red_fused__to_copy__unsafe_view_add_mean_mm_mul_pow_rsqrt_t_view_7", "gemm"),
        ("triton_poi_fused_add_cat_mul_neg_0", "other"),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention__unsafe_view_add_cat_mm_mul_neg_slice", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel, kind):
    assert script("profile_layer").kind_of(kernel) == kind
