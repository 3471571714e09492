"""Dynamic scales on the device: bit for bit the reference's where no sum is rounded, and close to FP64 elsewhere.

All outputs are NaN before a call, and so is the memory around them.
"""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.operand import reference
from tests.gpu import kernels, oracle
from tests.gpu.fp8_values import BF16, E4M3, F32, NAMES, SUMS, assert_same, draw, zeros
from tests.gpu.memory import Placed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]


# x itself where the accumulator is 0: a tile, which TMA loads, a column, and a row.
@co.epilogue
def kept(acc, x: co.Tile):
    return co.e.quantize(x - acc, "e4m3")


@co.epilogue
def kept_wide(acc, x: co.Tile):
    y = x - acc
    return {"d": co.e.quantize(y, "e5m2"), "row": co.e.amax(y, dim=1), "column": co.e.amax(y, dim=0)}


@co.epilogue
def kept_columns(acc, x: co.Col):
    return co.e.quantize(x - acc, "e4m3")


@co.epilogue
def kept_rows(acc, x: co.Row):
    return co.e.quantize(x - acc, "e5m2")


@co.epilogue
def kept_scaled(acc, x: co.Row, by: co.Col):
    """A row times a column: every element is another, and no tile is read."""
    return co.e.quantize(x * by - acc, "e4m3")


@co.epilogue
def biased(acc, bias: co.Row):
    return co.e.quantize(co.e.relu(acc + bias), "e4m3")


@co.epilogue
def biased_alone(acc, bias: co.Row):
    return co.e.relu(acc + bias)


@co.epilogue
def inverse(acc, by: co.Row):
    """Infinite where columns do not exist, if their share of the row were read as 0."""
    return co.e.quantize((acc + 1.0) / by, "e4m3")


@co.epilogue
def swiglu(acc, up: co.Product):
    return co.e.quantize(co.e.silu(acc) * up, "e4m3")


@co.epilogue
def normed(acc, residual: co.Tile):
    y = acc * co.e.rsqrt(co.e.mean_square_of_a() + 1e-6) + residual
    return {"d": co.e.quantize(y, "e4m3"), "amax": co.e.amax(y, dim=1)}


# ---- Kernels --------------------------------------------------------------------------------------------------------

# Tiles of one and two blocks, of one, two and three times 64 rows; warpgroups below and beside each other.
TILES = {
    "pingpong": ((64, 128), {"schedule": "pingpong"}),
    "pingpong, two": ((128, 128), {"schedule": "pingpong", "cluster": co.ClusterShape(2, 1)}),
    "pingpong, three": ((192, 128), {"schedule": "pingpong", "cluster": co.ClusterShape(1, 2)}),
    "pingpong, wide": ((64, 256), {"schedule": "pingpong"}),
    "cooperative": ((128, 128), {"schedule": "cooperative"}),
    "cooperative, wide": ((128, 256), {"schedule": "cooperative", "cluster": co.ClusterShape(2, 1)}),
    "cooperative, tall": ((256, 128), {"schedule": "cooperative", "cluster": co.ClusterShape(1, 2)}),
    "side by side": ((192, 256), {"schedule": "cooperative"}),
    "stream-K": ((128, 128), {"schedule": "cooperative", "scheduler": "stream_k"}),
    "warp-specialised": ((64, 128), {"schedule": "warp_specialized"}),
    "warp-specialised, two": ((128, 128), {"schedule": "warp_specialized", "cluster": co.ClusterShape(2, 1)}),
    "shared, three": ((192, 64), {"schedule": "pingpong", "cluster": co.ClusterShape(1, 2)}),
    "shared, four blocks": ((64, 64), {"schedule": "pingpong", "cluster": co.ClusterShape(1, 4)}),
    "shared, both ways": ((128, 64), {"schedule": "cooperative", "cluster": co.ClusterShape(2, 2)}),
    "shared, tall": ((256, 64), {"schedule": "cooperative", "cluster": co.ClusterShape(1, 2)}),
}
# Warpgroups side by side read no tile, nor do thread blocks that share scales.
READING = [name for name in TILES if name != "side by side" and not name.startswith("shared")]
# Tiles of which half is of each weight.
GATES = {
    "pingpong": ((64, 256), {"schedule": "pingpong"}, "e4m3"),
    "cooperative": ((128, 256), {"schedule": "cooperative", "cluster": co.ClusterShape(2, 1)}, "bf16"),
    "shared, three": ((192, 128), {"schedule": "pingpong", "cluster": co.ClusterShape(1, 2)}, "e4m3"),
    "shared, promoted": (
        (128, 128),
        {"schedule": "cooperative", "cluster": co.ClusterShape(1, 2), "accumulation": "promoted"},
        "e4m3",
    ),
    "shared, four blocks, promoted": (
        (64, 128),
        {"schedule": "pingpong", "cluster": co.ClusterShape(2, 4), "accumulation": "promoted"},
        "e4m3",
    ),
    "promoted, in turn": (
        (128, 256),
        {"schedule": "cooperative", "cluster": co.ClusterShape(2, 1), "accumulation": "promoted"},
        "e4m3",
    ),
    "shared, promoted, in turn": (
        (256, 128),
        {"schedule": "cooperative", "cluster": co.ClusterShape(1, 2), "accumulation": "promoted"},
        "e4m3",
    ),
    "shared, bf16": ((128, 128), {"schedule": "pingpong", "cluster": co.ClusterShape(1, 2)}, "bf16"),
}


def gate(name):
    """Return a kernel of SwiGLU."""
    (m, n), config, a = GATES[name]
    made = co.Sm90Config(co.ThreadblockShape(m, n, 128 if a == "e4m3" else 64), **config)
    promoted = ".promoted" if made.accumulation == "promoted" else ""
    a, b = f"{a}.row{promoted}", f"{a}.col{promoted}"
    return co.KernelSpec(a=a, b=b, d="e4m3.row", epilogue=swiglu, inputs={"up": b}, config=made)


def spec(epilogue, tile, d=None, a="bf16", inputs=None, **more):
    (m, n), config = TILES[tile]
    made = co.Sm90Config(co.ThreadblockShape(m, n, 128 if a == "e4m3" else 64), **config, **more)
    d = d or f"{epilogue.graph.quantized}.row"
    return co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, inputs=inputs or {}, config=made)


X = {"x": "f32.row"}
EXACT = {
    **{f"kept, {tile}": (kept, tile, X) for tile in READING},
    **{f"kept_wide, {tile}": (kept_wide, tile, X) for tile in ("pingpong, two", "cooperative, wide", "stream-K")},
    **{f"kept_columns, {tile}": (kept_columns, tile, {"x": "f32"}) for tile in ("pingpong", "side by side")},
    **{f"kept_rows, {tile}": (kept_rows, tile, {"x": "f32"}) for tile in ("cooperative, tall", "side by side")},
    **{f"kept_scaled, {tile}": (kept_scaled, tile, {"x": "f32", "by": "f32"}) for tile in TILES},
}


# ---- Tensors --------------------------------------------------------------------------------------------------------


def poisoned(m, n, dtype, margin=16):
    """Place a matrix in poison, `margin` elements from the ends of each line."""
    pitch = n + 2 * margin
    return Placed.within((m, n), (pitch, 1), pitch + margin, (m + 2) * pitch, dtype, "cuda")


def poisoned_scales(rows, blocks, layout):
    """Scales of NaN in one of the layouts that a call may ask for."""
    if layout == "m-major":
        return torch.full((blocks, -(-rows // 4) * 4), math.nan, device="cuda").t()[:rows]
    if layout == "row-major":
        return torch.full((rows, blocks), math.nan, device="cuda")
    return torch.full((rows, 2 * blocks + 3), math.nan, device="cuda")[:, 1 : 2 * blocks : 2]


LAYOUTS = ("m-major", "row-major", "strided")


def assert_m_major(scale):
    """Require the layout of new scales, where there is more than one row or block."""
    m, blocks = scale.shape
    assert m == 1 or scale.stride(0) == 1
    assert blocks == 1 or scale.stride(1) == -(-m // 4) * 4


def wanted_of(x, name, block=128):
    """D and its scales of values in FP32, by PyTorch on the CPU."""
    quotient, scale = reference.quantized(x.cpu(), NAMES[name], block)
    return reference.rounded(quotient, NAMES[name]).cuda(), scale.cuda()


def special(m, n):
    """Values of all sizes, with blocks of zeros, of tiny values, with infinities and with NaN."""
    generator = torch.Generator().manual_seed(m * 10007 + n)
    sizes = torch.randint(-100, 100, (m, -(-n // 128)), generator=generator).float().repeat_interleave(128, 1)[:, :n]
    x = torch.randn(m, n, generator=generator) * torch.exp2(sizes)
    for row in range(0, m, 7):
        at = (row * 37) % n
        begin = at // 128 * 128
        kind = row // 7 % 6
        if kind == 0:
            x[row, begin : begin + 128] = 0
        elif kind == 1:
            x[row, begin : begin + 128] *= 2.0**-120
        elif kind == 2:
            x[row, at] = -math.inf
        elif kind == 3:
            x[row, at] = math.nan
        elif kind == 4:
            x[row, at], x[row, begin] = math.nan, math.inf
        else:
            x[row, begin : begin + 128] = -0.0
    return x.cuda()


def assert_near(d, scale, exact, sums=SUMS):
    """Require each block's scale, and at most one rounding to FP8 and an error of the sum."""
    m, n = exact.shape
    info, steps = torch.finfo(d.dtype), -(-n // 128)
    assert scale.shape == (m, steps)
    most = F.pad(exact.abs(), (0, steps * 128 - n)).view(m, steps, 128).amax(2)
    slack = 8 * sums * exact.norm() / exact.numel() ** 0.5
    assert ((scale.double() * info.max - most).abs() <= 1e-6 * most + slack).all()
    spread = scale.double().repeat_interleave(128, 1)[:, :n]
    quotient = exact / spread
    rounding = torch.maximum(
        quotient.abs() * info.eps / 2, torch.full_like(quotient, info.smallest_normal * info.eps / 2)
    )
    excess = (d.double() * spread - exact).abs() - 1.05 * rounding * spread - slack
    assert excess.max() <= 0
    assert oracle.error(d.double() * spread, exact) <= info.eps / 2 + sums


# ---- Bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", EXACT)
def test_every_value_and_scale_is_the_references(kernel):
    """M is odd; N ends within a block, within a tile, and with neither."""
    epilogue, tile, inputs = EXACT[kernel]
    run, name = co.build(spec(epilogue, tile, inputs=inputs)), epilogue.graph.quantized
    for at, (m, n) in enumerate(((333, 208), (77, 400), (512, 512), (1, 16), (1030, 1040))):
        x = special(m, n)
        given = {"x": x}
        if epilogue is kept_columns:
            given = {"x": x[:, 0].contiguous()}
            x = given["x"][:, None].expand(m, n)
        elif epilogue is kept_rows:
            given = {"x": x[-1].contiguous()}
            x = given["x"].expand(m, n)
        elif epilogue is kept_scaled:
            given = {"x": x[0].contiguous(), "by": torch.randn(m, device="cuda")}
            x = given["x"] * given["by"][:, None]
        placed = poisoned(m, n, NAMES[name])
        d = placed.view
        scale = poisoned_scales(m, -(-n // 128), LAYOUTS[at % 3])
        found = run(*zeros(m, n), **given, out={"d": d, "d_scale": scale})
        wanted = wanted_of(x, name)
        assert_same(found.d_scale, wanted[1])
        assert_same(found.d, wanted[0])
        placed.assert_only()
        if epilogue is kept_wide:
            assert_same(found.row, x.abs().amax(1))
            assert_same(found.column, x.abs().amax(0))
        # New outputs, and the same bits again.
        again = run(*zeros(m, n), **given)
        assert_m_major(again.d_scale)
        assert_same(again.d, wanted[0])
        assert_same(again.d_scale, wanted[1])


def test_columns_that_do_not_exist_count_for_nothing():
    """The last block has sixteen columns. Where others would be, the epilogue's values are infinite or NaN."""
    m, n = 100, 272
    a, b = zeros(m, n)
    by = torch.rand(n, device="cuda") + 0.5
    found = co.gemm(a, b, epilogue=inverse, by=by)
    d, scale = wanted_of((1 / by).expand(m, n), "e4m3")
    # The kernel's division may be one unit off.
    torch.testing.assert_close(found.d_scale, scale, rtol=5e-7, atol=0)
    assert found.d_scale.isfinite().all()
    step = torch.finfo(E4M3).eps
    torch.testing.assert_close(found.d.float(), d.float(), rtol=step, atol=0)


@pytest.mark.parametrize("tile", TILES)
def test_the_values_are_those_that_a_kernel_without_scales_stores(tile):
    """The same tile adds up in the same order, so D in FP32 has the values that were quantised."""
    m, n, k = 333, 528, 1024
    a, b, bias = draw(m, k, BF16), draw(n, k, BF16).t(), torch.randn(n, device="cuda").to(BF16)
    plain = spec(biased_alone, tile, "f32.row", inputs={"bias": "bf16"})
    whole = co.build(plain)(a, b, bias=bias)
    d, scale = co.build(spec(biased, tile))(a, b, bias=bias)
    if "stream-K" in tile:  # its parts of K may be others
        assert_near(d, scale, F.relu(a.double() @ b.double() + bias.double()), sums=1e-5)
        return
    wanted = wanted_of(whole, "e4m3")
    assert_same(d, wanted[0])
    assert_same(scale, wanted[1])


# ---- Calls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [BF16, E4M3])
@pytest.mark.parametrize("m", [1, 16, 17, 300, 2048])
def test_calls_of_any_number_of_rows(m, of):
    n, k = 528, 1024
    a, b, bias = draw(m, k, of), draw(n, k, of).t(), torch.randn(n, device="cuda").to(BF16)
    exact = F.relu(a.double() @ b.double() + bias.double())
    out = {"d": poisoned(m, n, E4M3, margin=0).view, "d_scale": poisoned_scales(m, 5, "m-major")}
    found = co.gemm(a, b, epilogue=biased, bias=bias, out=out)
    assert found.d is out["d"]
    assert_near(found.d, found.d_scale, exact, SUMS if of is E4M3 else 1e-5)
    # Warm, and at another number of rows.
    again = co.gemm(a, b, epilogue=biased, bias=bias)
    assert_same(again.d, found.d)
    assert_same(again.d_scale, found.d_scale)
    fewer = co.gemm(a[: m // 2 + 1], b, epilogue=biased, bias=bias)
    assert_m_major(fewer.d_scale)
    assert_near(fewer.d, fewer.d_scale, exact[: m // 2 + 1], SUMS if of is E4M3 else 1e-5)


def test_calls_with_leading_dimensions_and_misaligned_operands():
    a, w = torch.randn(3, 37, 250, device="cuda").to(BF16), torch.randn(272, 250, device="cuda").to(BF16)
    bias = torch.randn(272, device="cuda").to(BF16)
    exact = F.relu(a.double().view(-1, 250) @ w.t().double() + bias.double())
    d, scale = co.gemm(a, w.t(), epilogue=biased, bias=bias)
    assert (d.shape, scale.shape, scale.stride()) == ((3, 37, 272), (3, 37, 3), (37, 1, 112))
    assert_near(d.view(-1, 272), scale.view(-1, 3), exact, 1e-5)
    # The other majors.
    columns = a.view(-1, 250).t().contiguous().t()
    d, scale = co.gemm(columns, w.t().contiguous(), epilogue=biased, bias=bias)
    assert_near(d, scale, exact, 1e-5)


def test_a_norm_a_residual_and_a_reduction_beside_it():
    a, w = torch.randn(77, 512, device="cuda").to(BF16), torch.randn(272, 512, device="cuda").to(BF16)
    residual = torch.randn(77, 272, device="cuda").to(BF16)
    exact = (a.double() @ w.t().double()) * (a.double().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    exact += residual.double()
    d, scale, amax = co.gemm(a, w.t(), epilogue=normed, residual=residual)
    assert_near(d, scale, exact, 1e-5)
    assert torch.equal(scale.amax(1), amax / torch.full_like(amax, 448.0))


@pytest.mark.parametrize("of", [BF16, E4M3])
@pytest.mark.parametrize("m", [1, 16, 129, 1000])
def test_a_gate_feeds_the_next_projection(m, of):
    """SwiGLU, quantised in its epilogue, then a GEMM whose main loop reads its scales."""
    k, n, out = 512, 784, 256
    x, gate, up = draw(m, k, of), draw(n, k, of), draw(n, k, of)
    if of is E4M3:
        gate, up = ((t.float() / 256).to(of) for t in (gate, up))
    h = co.gemm(x, gate.t(), epilogue=swiglu, up=up.t())
    exact = F.silu(x.double() @ gate.t().double()) * (x.double() @ up.t().double())
    assert_near(h.d, h.d_scale, exact, SUMS if of is E4M3 else 1e-4)
    down = co.Scaled.quantize(torch.randn(out, n, device="cuda"), "e4m3")
    y = co.gemm(co.Scaled(h.d, h.d_scale), co.Scaled(down.values.t(), down.scale))
    first, second = reference.dequantised(h.d, down.values.t(), h.d_scale.double(), down.scale.double())
    assert oracle.error(y, first @ second) <= torch.finfo(BF16).eps + SUMS


@pytest.mark.parametrize("gate_of", GATES)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(333, 208, 64), (77, 400, 640), (1, 16, 128), (1030, 1040, 256), (4096, 4096, 128)]
)
def test_gates_of_every_tile(gate_of, m, n, k):
    """M is odd; N ends within a block, within its first half, and with neither; a thread block has one tile or many."""
    made = gate(gate_of)
    of = NAMES.get(made.a.dtype.name, BF16)
    x, of_gate, up = draw(m, k, of), draw(n, k, of), draw(n, k, of)
    if of is E4M3:
        of_gate, up = ((t.float() / 256).to(of) for t in (of_gate, up))
    exact = F.silu(x.double() @ of_gate.t().double()) * (x.double() @ up.t().double())
    placed = poisoned(m, n, E4M3)
    d = placed.view
    scale = poisoned_scales(m, -(-n // 128), "m-major")
    co.build(made)(x, of_gate.t(), up=up.t(), out={"d": d, "d_scale": scale})
    assert_near(d, scale, exact, 2 * SUMS if of is E4M3 else 1e-4)  # a product of two sums
    placed.assert_only()
    for _ in range(8):  # whichever of the two thread blocks is first
        again = co.build(made)(x, of_gate.t(), up=up.t())
        assert_same(again.d, d)
        assert_same(again.d_scale, scale)


def test_scales_of_blocks_in_and_out():
    m, n, k = 200, 384, 1040
    x, w = (
        co.Scaled.quantize(torch.randn(m, k, device="cuda"), "e4m3"),
        co.Scaled.quantize(torch.randn(n, k, device="cuda"), "e5m2"),
    )
    bias = torch.randn(n, device="cuda").to(BF16)
    d, scale = co.gemm(x, w.t(), epilogue=biased, bias=bias)
    first, second = reference.dequantised(x.values, w.values.t(), x.scale.double(), w.scale.double())
    assert_near(d, scale, F.relu(first @ second + bias.double()))


@pytest.mark.parametrize("epilogue", [biased, swiglu], ids=["biased", "swiglu"])
def test_every_kernel_that_a_weight_may_need_is_right(epilogue):
    m, n, k = 300, 512, 1024
    a, b, other = draw(m, k, BF16), draw(n, k, BF16).t(), draw(n, k, BF16).t()
    acc = a.double() @ b.double()
    bias = torch.randn(n, device="cuda").to(BF16)
    inputs = {"bias": bias} if epilogue is biased else {"up": other}
    exact = F.relu(acc + bias.double()) if epilogue is biased else F.silu(acc) * (a.double() @ other.double())
    for results in kernels.by_every_kernel(co.gemm, a, b, epilogue=epilogue, **inputs):
        assert_near(*results, exact, 1e-4)


def test_a_captured_graph_sees_new_values():
    m, n, k = 64, 384, 512
    x, gate, up = (draw(rows, k, BF16) for rows in (m, n, n))
    down = co.Scaled.quantize(torch.randn(256, n, device="cuda"), "e4m3")

    def layer():
        h = co.gemm(x, gate.t(), epilogue=swiglu, up=up.t())
        a = co.Scaled.quantize(h.d.to(BF16), "e5m2", block=None)
        return co.gemm(co.Scaled(h.d, h.d_scale), co.Scaled(down.values.t(), down.scale)), a

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, a = layer()
    x.copy_(draw(m, k, BF16))
    graph.replay()
    wanted, again = layer()
    assert torch.equal(y, wanted)
    assert_same(a.values, again.values)
    assert_same(a.scale, again.scale)


# ---- Tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize("n", [1, 3, 16, 100, 128, 136, 200, 256, 1000, 1001, 4096, 8200])
def test_a_tensor_is_quantised_as_the_reference_does(name, dtype, block, n):
    for at, m in enumerate((1, 5, 77, 130)):
        x = special(m, n).to(dtype)
        placed = poisoned(m, n, NAMES[name], margin=8 if at % 2 else 3)
        d = placed.view
        blocks = -(-n // 128)
        layout = LAYOUTS[at % 3]
        scale = torch.full((m,), math.nan, device="cuda") if block is None else poisoned_scales(m, blocks, layout)
        wanted = wanted_of(x.float(), name, block)
        found = co.Scaled.quantize(x, name, block, out=co.Scaled(d, scale))
        assert_same(found.scale.view(m, -1) if block is None else found.scale, wanted[1])
        assert_same(found.values, wanted[0])
        placed.assert_only()
        # Rows within longer lines, which begin anywhere.
        for left, right in ((8, 8), (1, 2)):
            wide = torch.full((m, n + left + right), math.nan, device="cuda").to(dtype)
            wide[:, left : left + n] = x
            again = co.Scaled.quantize(wide[:, left : left + n], name, block)
            assert_same(again.values, wanted[0])
            assert_same(again.scale.view(m, -1) if block is None else again.scale, wanted[1])


def test_tensors_with_leading_dimensions_and_many_rows():
    x = torch.randn(3, 5, 7, 384, device="cuda").to(BF16)
    d, scale = co.Scaled.quantize(x, "e4m3")
    assert (d.shape, scale.shape, scale.stride()) == (x.shape, (3, 5, 7, 3), (35, 7, 1, 108))
    wanted = wanted_of(x.float().view(-1, 384), "e4m3")
    assert_same(d.view(-1, 384), wanted[0])
    assert_same(scale.view(-1, 3), wanted[1])
    rows = co.Scaled.quantize(x, "e4m3", block=None)
    assert rows.scale.shape == (3, 5, 7)
    x = torch.randn(200_001, 128, device="cuda").to(BF16)
    d, scale = co.Scaled.quantize(x, "e4m3")
    wanted = wanted_of(x.float(), "e4m3")
    assert_same(d, wanted[0])
    assert_same(scale, wanted[1])
    empty = co.Scaled.quantize(x[:0], "e4m3")
    assert (empty.values.shape, empty.scale.shape) == ((0, 128), (0, 1))
