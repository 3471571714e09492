"""Scales of blocks of FP8 operands on the device: against float64 of what operands and scales stand for."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.epilogue import composed
from cutlass_ops.operand import reference
from tests.gpu import kernels, oracle
from tests.gpu.fp8_values import BF16, E4M3, E5M2, SUMS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

BLOCKS = ("128x128", "128x1")
# One row, one more than a tile's; N of one, beyond a block; K of one block, with a partial last one, of many.
SHAPES = [
    (1, 256, 128),
    (3, 264, 1040),
    (65, 1, 1040),
    (77, 129, 1040),
    (333, 512, 7168),
    (130, 1000, 7168),
    (257, 384, 16384),
]


@co.epilogue
def bias_gelu_sum(acc, bias: co.Row):
    d = co.e.gelu(acc + bias)
    return {"d": d, "row": co.e.sum(d, dim=1)}


@co.epilogue
def bias_residual(acc, bias: co.Row, residual: co.Tile):
    return acc + bias + residual


def draw(m, n, k, of_b="128x128", a=E4M3, b=E4M3):
    """Quantise random matrices whose blocks have very different sizes, so that a wrong scale shows."""

    def quantised(rows, dtype, block):
        steps = -(-k // 128)
        x = torch.randn(rows, steps * 128, device="cuda")
        blocks = torch.exp2(torch.randint(-6, 7, (-(-rows // block), steps), device="cuda").float())
        spread = blocks.repeat_interleave(block, 0)[:rows].repeat_interleave(128, 1)
        whole = x * spread
        largest = whole.view(rows, steps, 128).abs().amax(2)
        padded = torch.zeros(-(-rows // block) * block, steps, device="cuda")
        padded[:rows] = largest
        scale = padded.view(-1, block, steps).amax(1) / torch.finfo(dtype).max
        each = scale.repeat_interleave(block, 0)[:rows].repeat_interleave(128, 1)
        return (whole / each).to(dtype)[:, :k].contiguous(), scale

    x, scale_x = quantised(m, a, 1)
    w, scale_w = quantised(n, b, 128 if of_b == "128x128" else 1)
    first, second = reference.dequantised(x, w.t(), scale_x.double(), scale_w.double())
    return x, w.t(), scale_x, scale_w, first @ second


def assert_close(found, wanted):
    oracle.assert_within(found, wanted, SUMS)


def kernel(of_b, tile, cluster=(1, 1), graph=composed.scaled_blocks, d="f32.row", **config):
    made = co.Sm90Config(
        co.ThreadblockShape(*tile, 128), co.ClusterShape(*cluster), **{"accumulation": "promoted", **config}
    )
    return co.build(
        co.KernelSpec(a="e4m3.row.blocks1x128", b=f"e4m3.col.blocks{of_b}", d=d, epilogue=graph, config=made)
    )


# All schedules; tiles that end within a block, of several instructions, side by side; clusters either way.
KERNELS = {
    "pingpong": ((64, 128), (1, 1), {}),
    "pingpong, two instructions": ((128, 64), (2, 1), {}),
    "pingpong, three instructions": ((192, 64), (1, 2), {}),
    "pingpong, across blocks": ((64, 96), (1, 1), {}),
    "pingpong, many runs": ((64, 144), (2, 1), {}),
    "cooperative": ((128, 128), (2, 1), {"schedule": "cooperative"}),
    "cooperative, alone": ((128, 128), (1, 1), {"schedule": "cooperative"}),
    "cooperative, wide": ((128, 208), (1, 2), {"schedule": "cooperative"}),
    "cooperative, tall": ((256, 96), (2, 2), {"schedule": "cooperative"}),
    "cooperative, in turn": ((128, 256), (2, 1), {"schedule": "cooperative"}),
    "cooperative, tall, in turn": ((256, 128), (1, 2), {"schedule": "cooperative"}),
    "side by side": ((192, 128), (2, 1), {"schedule": "cooperative"}),
    "side by side, across blocks": ((192, 80), (1, 2), {"schedule": "cooperative"}),
    "stream-K": ((128, 128), (1, 1), {"schedule": "cooperative", "scheduler": "stream_k"}),
    "warp-specialised": ((64, 128), (2, 1), {"schedule": "warp_specialized"}),
    "warp-specialised, wide": ((64, 224), (1, 1), {"schedule": "warp_specialized"}),
    "swapped, few rows": ((64, 16), (1, 1), {"swap_ab": True}),
    "swapped, pingpong": ((128, 64), (1, 2), {"swap_ab": True}),
    "swapped, cooperative": ((128, 64), (2, 1), {"schedule": "cooperative", "swap_ab": True}),
    "swapped, side by side": ((192, 64), (1, 1), {"schedule": "cooperative", "swap_ab": True}),
    "swapped, warp-specialised": ((64, 8), (2, 1), {"schedule": "warp_specialized", "swap_ab": True}),
    "two stages": ((128, 128), (1, 1), {"schedule": "cooperative", "stages": 2}),
}


@pytest.mark.parametrize("of_b", BLOCKS)
@pytest.mark.parametrize(("tile", "cluster", "config"), KERNELS.values(), ids=KERNELS)
def test_every_schedule_is_right(of_b, tile, cluster, config):
    run = kernel(of_b, tile, cluster, **config)
    for m, n, k in ((77, 264, 1040), (333, 1000, 7168), (1, 128, 128), (64, 136, 880), (1030, 776, 2048)):
        x, w, scale_a, scale_b, wanted = draw(m, n, k, of_b)
        found = run(x, w, scale_a, scale_b)
        assert_close(found, wanted)
        # The same bits again, and with the scales' other layout.
        columns = scale_a.t().contiguous().t()
        for scales in ((scale_a, scale_b), (columns, scale_b), (scale_a, scale_b.t().contiguous().t())):
            for _ in range(3):
                again = run(x, w, *scales)
                if config.get("scheduler") == "stream_k":
                    assert_close(again, wanted)
                else:
                    assert torch.equal(again, found)


@pytest.mark.parametrize("of_b", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_call_is_right(of_b, shape):
    x, w, scale_a, scale_b, wanted = draw(*shape, of_b)
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    assert found.dtype is BF16
    assert_close(found, wanted)
    assert_close(co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), out_dtype=torch.float32), wanted)


@pytest.mark.parametrize(("a", "b"), list(itertools.product((E4M3, E5M2), repeat=2)))
def test_all_pairs_of_types(a, b):
    x, w, scale_a, scale_b, wanted = draw(129, 256, 1040, a=a, b=b)
    assert_close(co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b)), wanted)


def test_promoted_sums_are_better_than_the_tensor_cores_own():
    """Sums of positive products over a long K, which lose bits where the Tensor Core adds them up."""
    x, w = (torch.rand(rows, 16384, device="cuda").to(E4M3) for rows in (128, 256))
    wanted = x.double() @ w.double().t()
    scales = torch.ones(128, 128, device="cuda"), torch.ones(2, 128, device="cuda")
    blocks = co.gemm(*map(co.Scaled, (x, w.t()), scales), out_dtype=torch.float32)
    plain = co.gemm(co.Scaled(x, 1.0), co.Scaled(w.t(), 1.0), out_dtype=torch.float32)
    assert oracle.error(blocks, wanted) <= oracle.error(plain, wanted)


@pytest.mark.parametrize("of_b", BLOCKS)
def test_scales_may_have_any_strides(of_b):
    x, w, scale_a, scale_b, _ = draw(77, 264, 1040, of_b)
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    wide = torch.full((9, 81), math.nan, device="cuda")[:, 1:78].t().copy_(scale_a)  # odd addresses and lines
    assert torch.equal(co.gemm(co.Scaled(x, wide), co.Scaled(w, scale_b)), found)
    repeated = scale_a[:, :1].expand(77, 9)
    assert torch.equal(
        co.gemm(co.Scaled(x, repeated), co.Scaled(w, scale_b)),
        co.gemm(co.Scaled(x, repeated.contiguous()), co.Scaled(w, scale_b)),
    )
    batch = co.gemm(co.Scaled(x.view(7, 11, 1040), scale_a.view(7, 11, 9)), co.Scaled(w, scale_b))
    assert torch.equal(batch, found.view(7, 11, 264))


@pytest.mark.parametrize("of_b", BLOCKS)
@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0, 2.0**-140, 2.0**100])
def test_scales_that_are_not_usual(of_b, scale):
    x, w, scale_a, scale_b, _ = draw(48, 256, 512, of_b)
    for of, place in ((scale_a, (5, 2)), (scale_b, (1, 3))):
        scales = {"scale_a": scale_a, "scale_b": scale_b}
        changed = of.clone()
        changed[place] = scale
        scales["scale_a" if of is scale_a else "scale_b"] = changed
        found = co.gemm(*map(co.Scaled, (x, w), scales.values()), out_dtype=torch.float32)
        exact = reference.accumulator(composed.scaled_blocks.graph, x, w, scales, torch.float64)
        wanted = exact.float()
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.isinf(), wanted.isinf())
        finite = wanted.isfinite()
        assert finite.any()
        assert_close(found[finite], exact[finite])


def test_blocks_of_zeros():
    """A quantiser gives such blocks a scale of 0, or of anything."""
    x, w, scale_a, scale_b, _ = draw(77, 264, 1040)
    x[:, 128:256], scale_a[:, 1] = 0, 0
    x[3], scale_a[3] = 0, 1e30
    first, second = reference.dequantised(x, w, scale_a.double(), scale_b.double())
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    assert_close(found, first @ second)
    assert (found[3] == 0).all()


@pytest.mark.parametrize("of_b", BLOCKS)
@pytest.mark.parametrize(("m", "n"), [(3, 264), (333, 250), (129, 512)])
def test_an_epilogue_and_a_reduction_follow(of_b, m, n):
    x, w, scale_a, scale_b, acc = draw(m, n, 1040, of_b)
    bias = torch.randn(n, device="cuda").to(BF16)
    d, row = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), epilogue=bias_gelu_sum, bias=bias)
    wanted = F.gelu(acc + bias.double())
    assert_close(d, wanted)
    assert oracle.error(row, wanted.sum(1)) <= SUMS
    residual = torch.randn(m, n, device="cuda").to(BF16)
    found = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), epilogue=bias_residual, bias=bias, residual=residual)
    assert_close(found, acc + bias.double() + residual.double())


@pytest.mark.parametrize("m", [16, 512])
@pytest.mark.parametrize("of_b", BLOCKS)
def test_every_kernel_that_a_weight_may_need_is_right(m, of_b):
    x, w, scale_a, scale_b, wanted = draw(m, 512, 2048, of_b)
    for results in kernels.by_every_kernel(co.gemm, co.Scaled(x, scale_a), co.Scaled(w, scale_b), most=8):
        assert_close(results, wanted)


def test_scales_of_other_blocks_or_layouts_are_served_as_well():
    x, w, scale_a, scale_b, _ = draw(77, 264, 1040)
    first = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    assert torch.equal(co.gemm(co.Scaled(x, scale_a.t().contiguous().t()), co.Scaled(w, scale_b)), first)
    spread = scale_b.repeat_interleave(128, 0)[:264]
    assert_close(co.gemm(co.Scaled(x, scale_a), co.Scaled(w, spread)), first.double())
    assert torch.equal(co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b)), first)


def test_a_kernel_refuses_other_scales():
    x, w, scale_a, scale_b, _ = draw(77, 264, 1040)
    run = kernel("128x128", (64, 128))
    with pytest.raises(ValueError, match="scale_b"):
        run(x, w, scale_a, scale_b.repeat_interleave(128, 0)[:264])
    with pytest.raises(ValueError, match="scale_a"):
        run(x, w, scale_a[:, :8], scale_b)
    with pytest.raises(TypeError, match="scale_a"):
        run(x, w, scale_a.half(), scale_b)


@pytest.mark.parametrize("of_b", BLOCKS)
@pytest.mark.parametrize("shape", [(256, 512, 7168), (1024, 4096, 4096)], ids=str)
def test_the_error_is_no_worse_than_pytorchs(of_b, shape):
    """The scales lie as cuBLASLt wants them; PyTorch builds without these scales skip."""
    x, w, scale_a, scale_b, wanted = draw(*shape, of_b)
    columns = scale_a.t().contiguous().t()
    of_w = scale_b.t() if of_b == "128x128" else scale_b.t().contiguous()
    try:
        theirs = torch._scaled_mm(x, w, columns, of_w, out_dtype=BF16)
    except (RuntimeError, ValueError, NotImplementedError) as reason:
        pytest.skip(f"torch._scaled_mm has no such scales here: {reason}")
    ours = co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b))
    assert oracle.error(ours, wanted) <= 1.05 * oracle.error(theirs, wanted)
