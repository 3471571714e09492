"""Results in FP8 on the device: bit for bit the reference's where no sum is rounded, and close to FP64 elsewhere."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.kinds.serving import plain_epilogue
from cutlass_ops.operand import reference
from tests.gpu import kernels, multiplied, oracle
from tests.gpu.fp8_values import BF16, E4M3, E5M2, NAMES, SUMS, assert_near, assert_same, draw, spread, zeros
from tests.gpu.multiplied import whole

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

NAME_OF = {dtype: name for name, dtype in NAMES.items()}
types = pytest.mark.parametrize("dtype", NAMES.values(), ids=NAMES)


# x itself, -0.0 as well, where the accumulator is 0: read as a tile, as a column, and as a row.
@co.epilogue
def kept(acc, x: co.Tile):
    return x - acc


@co.epilogue
def kept_columns(acc, x: co.Col):
    return x - acc


@co.epilogue
def kept_rows(acc, x: co.Row):
    return x - acc


@co.epilogue
def kept_twice(acc, x: co.Tile):
    z = x - acc
    return {"d": z, "again": z, "most": co.e.amax(z, dim=1)}


@co.epilogue
def through_both(acc, x: co.Tile):
    z = x - acc
    return {"d": co.e.cast(z, "e4m3"), "wide": co.e.cast(z, "e5m2")}


@co.epilogue
def quantised(acc, scale: co.Scalar):
    return {"d": acc * co.e.reciprocal(scale), "amax": co.e.amax(acc, dim=1)}


@co.epilogue
def quantised_rows(acc, bias: co.Row, scale: co.Col):
    z = co.e.gelu(acc + bias)
    return {"d": z * co.e.reciprocal(scale), "amax": co.e.amax(z, dim=0)}


@co.epilogue
def saved(acc, scale: co.Scalar):
    return {"d": acc, "q": acc * co.e.reciprocal(scale)}


CONFIGS = {
    "pingpong": {"schedule": "pingpong"},
    "cooperative": {"schedule": "cooperative"},
    "warp_specialized": {"schedule": "warp_specialized"},
    "stream_k": {"schedule": "cooperative", "scheduler": "stream_k"},
    "split_k": {"schedule": "cooperative", "split_k": 2},
}


def spec(d, epilogue, outputs=None, a="bf16", tile=(128, 64, 64), inputs=None, **config):
    made = co.Sm90Config(co.ThreadblockShape(*tile), **config)
    return co.KernelSpec(
        a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, outputs=outputs or {}, inputs=inputs or {}, config=made
    )


# ---- Every value -----------------------------------------------------------------------------------------------------


@types
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("read", ["tile", "col", "row"])
def test_every_value_is_stored_as_the_reference_does(dtype, config, swap, read):
    """M is odd and N a multiple of 16 that no tile divides."""
    m, n = 333, 208
    epilogue, shape = {"tile": (kept, (m, n)), "col": (kept_columns, (m,)), "row": (kept_rows, (n,))}[read]
    kernel = spec(
        f"{NAME_OF[dtype]}.row", epilogue, inputs={"x": "f32.row" if read == "tile" else "f32"}, swap_ab=swap, **config
    )
    x = spread(dtype, shape)
    found = co.build(kernel)(*zeros(m, n), x=x)
    full = x[:, None] if read == "col" else x
    assert_same(found, reference.rounded(full.expand(m, n).contiguous(), dtype))


@types
@pytest.mark.parametrize(
    ("m_tile", "n_tile", "swap"), [(64, 16, False), (64, 48, False), (64, 8, True), (64, 192, False), (192, 64, True)]
)
def test_tiles_of_other_sides(dtype, m_tile, n_tile, swap):
    kernel = spec(f"{NAME_OF[dtype]}.row", kept_columns, tile=(m_tile, n_tile, 64), inputs={"x": "f32"}, swap_ab=swap)
    x = spread(dtype, (1001,))
    found = co.build(kernel)(*zeros(1001, 208), x=x)
    assert_same(found, reference.rounded(x[:, None].expand(1001, 208).contiguous(), dtype))


def test_warpgroups_side_by_side():
    kernel = spec("e4m3.row", kept_columns, tile=(192, 128, 64), inputs={"x": "f32"}, schedule="cooperative")
    x = spread(E4M3, (333,))
    found = co.build(kernel)(*zeros(333, 208), x=x)
    assert_same(found, reference.rounded(x[:, None].expand(333, 208).contiguous(), E4M3))


@pytest.mark.parametrize("schedule", ["pingpong", "cooperative", "warp_specialized"])
@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("d", [BF16, E4M3, E5M2])
@pytest.mark.parametrize("n", [208, 200, 201])
def test_a_further_tile_in_fp8(schedule, swap, d, n):
    """Beside D in BF16 and in FP8, stored by TMA, and by threads where lines are no multiple of 16 bytes."""
    # CUTLASS's kernel has no reductions with that schedule.
    epilogue = through_both if schedule == "warp_specialized" else kept_twice
    x = spread(E5M2, (333, n))
    name = "wide" if epilogue is through_both else "again"
    d_name = {BF16: "bf16"}.get(d) or NAME_OF[d]
    fit = math.gcd(n, 16)

    def typed(element, widest):
        return f"{element}.row" if fit >= widest else f"{element}.row.align{fit}"

    kernel = spec(
        typed(d_name, 8 if d is BF16 else 16),
        epilogue,
        {name: typed("e5m2", 16)},
        inputs={"x": "f32.row" if n % 4 == 0 else f"f32.row.align{fit}"},
        schedule=schedule,
        swap_ab=swap,
    )
    outputs = co.build(kernel)(*zeros(333, n), x=x)
    if epilogue is through_both:
        once = reference.rounded(x, E4M3)
        assert_same(outputs.wide, reference.rounded(x, E5M2))
        wanted = reference.rounded(once.float(), d)
        if d is not BF16:
            assert_same(outputs.d, wanted)
        return
    assert_same(outputs.again, reference.rounded(x, E5M2))
    if d is not BF16:
        assert_same(outputs.d, reference.rounded(x, d))
    most = x.abs().amax(1)
    assert torch.equal(outputs.most.isnan(), most.isnan())
    assert torch.equal(outputs.most.nan_to_num(0.0), most.nan_to_num(0.0))


# Beside a reduction threads store a further tile, whatever the tile of the kernel (tile_output.h).
BESIDE_REDUCTIONS = {
    "eight columns": ((64, 8, 64), "row", {"swap_ab": True}),
    "parts of eight columns": ((64, 40, 64), "row", {"swap_ab": True}),
    "sixteen columns": ((64, 16, 64), "row", {}),
    "warp_specialized": ((128, 48, 64), "row", {"schedule": "warp_specialized"}),
    "several parts": ((256, 96, 64), "row", {"schedule": "cooperative", "cluster": co.ClusterShape(1, 2)}),
    "columns": ((128, 64, 64), "col", {"schedule": "cooperative"}),
    "columns, swapped": ((128, 64, 64), "col", {"swap_ab": True}),
    "side by side": ((192, 96, 64), "row", {"schedule": "cooperative"}),
    "side by side, swapped": ((192, 64, 64), "row", {"schedule": "cooperative", "swap_ab": True}),
}


@co.epilogue
def columns_twice(acc, x: co.Row):
    z = x - acc
    return {"d": z, "again": z, "most": co.e.amax(z, dim=1)}


@pytest.mark.parametrize(("tile", "major", "config"), BESIDE_REDUCTIONS.values(), ids=BESIDE_REDUCTIONS)
def test_threads_store_a_further_tile_beside_a_reduction(tile, major, config):
    """M and N are multiples of 16 that no tile divides. Warpgroups side by side read no tile."""
    m, n = 336, 208
    x = spread(E4M3, (n,) if tile[0] == 192 else (m, n))
    epilogue, inputs = (columns_twice, {"x": "f32"}) if tile[0] == 192 else (kept_twice, {"x": "f32.row"})
    kernel = spec("bf16.row", epilogue, {"again": f"e4m3.{major}"}, tile=tile, inputs=inputs, **config)
    assert plain_epilogue(kernel)
    outputs = co.build(kernel)(*zeros(m, n), x=x)
    x = x.expand(m, n).contiguous()
    assert_same(outputs.again.contiguous(), reference.rounded(x, E4M3))
    for found, wanted in ((outputs.d, x.to(BF16)), (outputs.most, x.abs().amax(1))):
        assert torch.equal(found.isnan(), wanted.isnan())
        assert torch.equal(found.nan_to_num(0.0), wanted.nan_to_num(0.0))


@types
@pytest.mark.parametrize("math", [None, "tf32"], ids=["i8", "tf32"])
def test_other_operands(math, dtype):
    m, n, k = 333, 208, 528
    x, w = (multiplied.floats(m, k), multiplied.floats(n, k)) if math else (whole(m, k), whole(n, k))
    acc = multiplied.exact(x, w.t(), math)
    scale = acc.abs().max() / torch.finfo(dtype).max * 0.9  # a few values saturate
    d, amax = co.gemm(x, w.t(), epilogue=quantised, scale=scale.item(), out_dtype=dtype, math=math)
    assert_near(d, acc * scale.reciprocal())
    assert oracle.error(amax, acc.abs().amax(1)) <= SUMS


@types
@pytest.mark.parametrize("n", [208, 200, 202, 201])
@pytest.mark.parametrize("m", [1, 7, 16, 333])
def test_calls_of_any_extents(dtype, n, m):
    """Few rows are served by kernels of ordinary loads, and lines that TMA cannot store by threads."""
    x = spread(dtype, (m, n))
    found = co.gemm(*zeros(m, n), epilogue=kept, x=x, out_dtype=dtype)
    assert_same(found, reference.rounded(x, dtype))


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_kernels_for_few_rows(rows):
    kernel = co.KernelSpec(
        a="bf16.row",
        b="bf16.col",
        d="e4m3.row.align1",
        epilogue=through_both,
        inputs={"x": "f32.row.align1"},
        outputs={"wide": "e5m2.row.align1"},
        config=co.types.GemvConfig(rows, pieces=2),
        target="sm_90",
    )
    x = spread(E5M2, (37, 201))
    found = co.build(kernel)(*zeros(37, 201), x=x)
    assert_same(found.d, reference.rounded(x, E4M3))
    assert_same(found.wide, reference.rounded(x, E5M2))


@pytest.mark.parametrize("name", ["bf16", "f16", "e4m3", "e5m2"])
def test_a_cast_rounds_as_the_reference_does(name):
    @co.epilogue
    def cast(acc, x: co.Tile):
        return co.e.cast(x - acc, name)

    x = spread(E4M3, (333, 208))
    found = co.gemm(*zeros(333, 208), epilogue=cast, x=x, out_dtype=torch.float32)
    wanted = reference.evaluate(cast.graph, torch.zeros(333, 208, device="cuda"), {"x": x})["d"]
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~wanted.isnan()], wanted[~wanted.isnan()])


# ---- Static scales ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [BF16, E4M3])
@types
@pytest.mark.parametrize("shape", [(1, 256, 512), (65, 272, 528), (333, 512, 4096)], ids=str)
def test_a_static_scale_of_the_tensor(of, dtype, shape):
    m, n, k = shape
    a, b = draw(m, k, of), draw(n, k, of).t()
    exact = a.double() @ b.double()
    scale = float(exact.abs().max()) / torch.finfo(dtype).max / 2  # half of the range is cut off
    d, amax = co.gemm(a, b, epilogue=quantised, scale=torch.tensor(scale, device="cuda"), out_dtype=dtype)
    assert_near(d, exact / scale)
    assert d.float().abs().max() == torch.finfo(dtype).max
    torch.testing.assert_close(amax.double(), exact.abs().amax(1), rtol=SUMS * 8, atol=0)


@pytest.mark.parametrize("of", [BF16, E4M3])
@types
@pytest.mark.parametrize("shape", [(17, 256, 512), (333, 528, 1024)], ids=str)
def test_a_static_scale_of_each_row(of, dtype, shape):
    m, n, k = shape
    a, b, bias = draw(m, k, of), draw(n, k, of).t(), torch.randn(n, device="cuda").to(BF16)
    exact = F.gelu(a.double() @ b.double() + bias.double())
    scale = exact.abs().amax(1).float() / torch.finfo(dtype).max
    d, amax = co.gemm(a, b, epilogue=quantised_rows, bias=bias, scale=scale, out_dtype=dtype)
    assert_near(d, exact / scale.double()[:, None])
    torch.testing.assert_close(amax.double(), exact.abs().amax(0), rtol=SUMS * 8, atol=1e-5)


def test_a_quantised_copy_beside_d():
    a, b = draw(333, 512, BF16), draw(512, 512, BF16).t()
    out = {"q": torch.empty(333, 512, dtype=E4M3, device="cuda")}
    d, q = co.gemm(a, b, epilogue=saved, scale=0.25, out=out)
    exact = a.double() @ b.double()
    assert_near(q, exact / 0.25)
    oracle.assert_close(d, exact)


def test_scales_in_and_out():
    """FP8 to FP8, as a chain of quantised layers has it."""
    a, b = draw(129, 1024, E4M3), draw(272, 1024, E4M3).t()
    scale_a, scale_b = torch.rand(129, device="cuda") + 0.5, torch.rand(272, device="cuda") + 0.5
    exact = a.double() @ b.double() * scale_a[:, None].double() * scale_b.double()
    scale = float(exact.abs().max()) / 448
    d, _ = co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b), epilogue=quantised, scale=scale, out_dtype=E4M3)
    assert_near(d, exact / scale)


def test_two_weights():
    a, gate, up = draw(129, 512, BF16), draw(272, 512, BF16), draw(272, 512, BF16)
    exact = F.silu(a.double() @ gate.t().double()) * (a.double() @ up.t().double())
    assert_near(co.gemm_swiglu(a, gate.t(), up.t(), out_dtype=E5M2), exact)


@pytest.mark.parametrize(("m", "dtype"), list(itertools.product((16, 512), NAMES.values())))
def test_every_kernel_that_a_weight_may_need_is_right(m, dtype):
    a, b = draw(m, 2048, BF16), draw(512, 2048, BF16).t()
    exact = a.double() @ b.double()
    scale = float(exact.abs().max()) / torch.finfo(dtype).max

    @co.epilogue
    def scaled(acc, scale: co.Scalar):
        return acc * co.e.reciprocal(scale)

    for results in kernels.by_every_kernel(co.gemm, a, b, epilogue=scaled, scale=scale, out_dtype=dtype):
        assert_near(results, exact / scale)
