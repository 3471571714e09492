"""FP8 on the device: against float64 of the same operands, over types, shapes and scales that are not usual."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.epilogue import builtin
from tests.gpu import kernels, oracle
from tests.gpu.fp8_values import BF16, E4M3, E5M2, SUMS, wide
from tests.gpu.fp8_values import quantised as draw

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

PAIRS = list(itertools.product((E4M3, E5M2), repeat=2))
# One row, one more than a tile's, several tiles; K beyond whole steps of the main loop; an N that TMA cannot store.
SHAPES = [(1, 256, 512), (65, 264, 528), (333, 512, 4096), (129, 250, 1040)]


@co.epilogue
def bias_gelu_sum(acc, bias: co.Row):
    d = co.e.gelu(acc + bias)
    return {"d": d, "row": co.e.sum(d, dim=1)}


@co.epilogue
def swiglu(acc, up: co.Product, scale_x: co.Col, scale_gate: co.Row, scale_up: co.Row):
    return co.e.silu(acc * scale_x * scale_gate) * (up * scale_x * scale_up)


def assert_close(found, wanted):
    oracle.assert_within(found, wanted, SUMS)


@pytest.mark.parametrize(("a", "b"), PAIRS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(False, False), (True, True)])
def test_a_scaled_gemm_is_right(a, b, shape, rows, columns):
    m, n, k = shape
    (x, scale_x), (w, scale_w) = draw(m, k, a), draw(n, k, b)
    scale_x, scale_w = scale_x if rows else scale_x.amax(), scale_w if columns else scale_w.amax()
    wanted = wide(x, scale_x) @ wide(w, scale_w).t()
    found = co.gemm(co.Scaled(x, scale_x), co.Scaled(w.t(), scale_w))
    assert found.dtype is BF16
    assert_close(found, wanted)
    assert_close(co.gemm(co.Scaled(x, scale_x), co.Scaled(w.t(), scale_w), out_dtype=torch.float32), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_epilogue_and_a_reduction_follow(shape):
    m, n, k = shape
    (x, scale_x), (w, scale_w) = draw(m, k, E4M3), draw(n, k, E4M3)
    bias = torch.randn(n, device="cuda").to(BF16)
    d, row = co.gemm(co.Scaled(x, scale_x), co.Scaled(w.t(), scale_w), epilogue=bias_gelu_sum, bias=bias)
    acc = x.double() @ w.double().t() * scale_x[:, None].double() * scale_w.double()
    wanted = F.gelu(acc + bias.double())
    assert_close(d, wanted)
    assert oracle.error(row, wanted.sum(1)) <= SUMS


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_two_weights_of_another_type_than_a(a, b):
    (x, sx), (gate, sg), (up, su) = draw(96, 512, a), draw(256, 512, b), draw(256, 512, b)
    found = co.gemm(x, gate.t(), epilogue=swiglu, up=up.t(), scale_x=sx, scale_gate=sg, scale_up=su)
    first, second = (x.double() @ w.double().t() * sx[:, None].double() * s.double() for w, s in ((gate, sg), (up, su)))
    assert_close(found, F.silu(first) * second)


@pytest.mark.parametrize("k", [128, 256, 512, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, E4M3], ids=str)
def test_sums_of_positive_products_are_as_good_as_pytorch_s(k, dtype):
    """By default, without a name for how they are added up."""
    x, w = (torch.rand(rows, k, device="cuda").to(E4M3) for rows in (256, 512))
    one = torch.ones((), device="cuda") / k
    wanted = x.double() @ w.double().t() / k
    theirs = torch._scaled_mm(x, w.t(), one, torch.ones_like(one), out_dtype=torch.float32).to(dtype)
    found = co.gemm(co.Scaled(x, one), co.Scaled(w.t(), 1.0), out_dtype=dtype)
    assert oracle.error(found, wanted) <= 1.15 * oracle.error(theirs, wanted)


@pytest.mark.parametrize("m", [16, 512])
def test_every_kernel_that_a_weight_may_need_is_right(m):
    (x, scale_x), (w, scale_w) = draw(m, 2048, E4M3), draw(512, 2048, E5M2)
    for results in kernels.by_every_kernel(co.gemm, co.Scaled(x, scale_x), co.Scaled(w.t(), scale_w)):
        assert_close(results, wide(x, scale_x) @ wide(w, scale_w).t())


# Before flags of ptxas were cleared that gave a register its former value, D of the first kernel was zero in four
# columns of 192, in every second eight rows. Two blocks of the others share a multiprocessor, with more than two
# tiles for each, and no tile is whole at the end.
NAMED = {
    "register": ((512, 768, 1024), (128, 192, 128), "fast", {"cluster": co.ClusterShape(2, 1), "schedule": "pingpong"})
}
NAMED |= {
    f"resident, {sums}, {m} rows": (
        (m, 36000, 1040),
        (128, n, 128 if sums == "promoted" else k),
        sums,
        {"schedule": "warp_specialized", "swap_ab": True, "accumulation": sums, "resident": 2},
    )
    for sums in ("fast", "promoted")
    for m, n, k in ((1, 8, 256), (16, 16, 256), (27, 32, 128))
}


@pytest.mark.parametrize(("shape", "tile", "sums", "config"), NAMED.values(), ids=NAMED)
def test_a_kernel_of_a_call_is_right(shape, tile, sums, config):
    m, n, k = shape
    (x, scale_x), (w, scale_w) = draw(m, k, E4M3), draw(n, k, E4M3)
    made = co.Sm90Config(co.ThreadblockShape(*tile), **config)
    found = kernels.by_kernel(made, co.gemm, co.Scaled(x, scale_x), co.Scaled(w.t(), scale_w), math=sums)
    assert_close(found, wide(x, scale_x) @ wide(w, scale_w).t())


# What is added up while the next is multiplied follows from a tile's registers (mainloop.h).
PROMOTED = {
    "two pieces of columns": ((128, 128), {"schedule": "cooperative"}),
    "two, not alike": ((128, 168), {"schedule": "cooperative"}),
    "three pieces": ((128, 192), {"schedule": "cooperative"}),
    "whole": ((128, 208), {"schedule": "cooperative"}),
    "two instructions": ((256, 64), {"schedule": "cooperative"}),
    "two, a step at a time": ((256, 96), {"schedule": "cooperative"}),
    "pingpong, three instructions": ((192, 40), {}),
    "swapped": ((128, 176), {"schedule": "cooperative", "swap_ab": True}),
    "one piece, of two steps": ((128, 64), {"schedule": "cooperative"}),
    "the widest of two steps": ((64, 104), {"schedule": "warp_specialized", "swap_ab": True}),
    "the narrowest of two steps": ((64, 8), {"swap_ab": True}),
    "two steps, two blocks on a multiprocessor": ((64, 48), {"schedule": "warp_specialized", "resident": 2}),
    "one piece, a step at a time": ((128, 112), {"schedule": "cooperative"}),
    "in turn, two pieces of columns": ((128, 256), {"schedule": "cooperative"}),
    "in turn, two instructions": ((256, 128), {"schedule": "cooperative"}),
    "in turn, three instructions": ((192, 144), {"schedule": "cooperative"}),
    "in turn, swapped": ((128, 232), {"schedule": "cooperative", "swap_ab": True}),
}


def promoted(tile, config):
    made = co.Sm90Config(co.ThreadblockShape(*tile, 128), accumulation="promoted", **config)
    return co.build(
        co.KernelSpec(a="e4m3.row.promoted", b="e4m3.col.promoted", d="f32.row", epilogue=builtin.identity, config=made)
    )


@pytest.mark.parametrize(("tile", "config"), PROMOTED.values(), ids=PROMOTED)
def test_promoted_sums_are_right_in_every_tile(tile, config):
    run = promoted(tile, config)
    # One to three steps along K, and so many beyond a multiple of four; the last one not whole.
    for m, n, k in (
        (77, 264, 128),
        (300, 1000, 256),
        (91, 136, 384),
        (333, 520, 1040),
        (64, 776, 880),
        (1030, 776, 7168),
    ):
        # Positive ones lose bits where the Tensor Cores add them up.
        x, w = (torch.rand(rows, k, device="cuda").to(E4M3) for rows in (m, n))
        found = run(x, w.t())
        assert_close(found, x.double() @ w.double().t())
        assert torch.equal(run(x, w.t()), found)


def test_promoted_sums_have_the_same_bits_in_every_tile():
    runs = [promoted(tile, config) for tile, config in PROMOTED.values()]
    for k in (16, 256, 384, 1040, 1152, 7168):
        x, w = (torch.randn(rows, k, device="cuda").to(E4M3) for rows in (131, 264))
        first, *others = [run(x, w.t()) for run in runs]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan, -1.0, 2.0**-140, 2.0**120])
def test_scales_that_are_not_usual(scale):
    (x, _), (w, _) = draw(48, 512, E4M3), draw(64, 512, E4M3)
    scales = torch.full((48,), scale, device="cuda"), torch.ones(64, device="cuda")
    found = co.gemm(*map(co.Scaled, (x, w.t()), scales), out_dtype=torch.float32)
    plain = co.gemm(x, w.t(), out_dtype=torch.float32)
    assert torch.equal(found.nan_to_num(1.0, 2.0, 3.0), (plain * scale).nan_to_num(1.0, 2.0, 3.0))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_that_are_not_usual(dtype):
    """Every value of the type, NaN and infinities among them, times one."""
    values = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype)
    x = torch.zeros(256, 16, device="cuda").to(dtype)
    x[:, 0] = values
    one = torch.zeros(16, 16, device="cuda").to(dtype)
    one[:, 0] = torch.ones(16, device="cuda").to(dtype)
    found = co.gemm(x, one.t(), out_dtype=torch.float32)[:, 0]
    wanted = values.float()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])


def test_lines_may_be_longer_than_k():
    (x, _), (w, _) = draw(48, 512, E4M3), draw(64, 512, E4M3)
    wanted = x[:, :500].double() @ w[:, :500].double().t()
    assert_close(co.gemm(x[:, :500], w[:, :500].t(), out_dtype=torch.float32), wanted)
