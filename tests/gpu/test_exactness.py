"""Results to the last bit, where whole numbers leave one right answer, and every function against float64."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run import reference
from cutlass_ops.run.registry import Registry
from tests.gpu import edges, kernels, placement
from tests.gpu.placement import Placed, PlacedVector, fit, place, torch_dtype, whole

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")
# GELU and SiLU of a whole number are no whole numbers.
WHOLE_OPS = [n for n in kernels.matrix() if n.split("-")[0] not in ("gemm_bias_gelu", "gemm_bias_silu")]
SHAPES = [(1, 1, 1), (63, 65, 129), (65, 1, 64), (1, 131, 67), (197, 331, 257)]
# 18 × 18 tiles of 64 × 64: more than two for each multiprocessor, so that persistent kernels take several in a row.
MANY_TILES = (1093, 1127, 131)


@pytest.fixture(autouse=True, scope="module")
def _built():
    Registry.current().kernels(edges.specs().values())


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def draw(spec, shape):
    """Draw a whole-numbered problem, and place it as badly as the kernel allows."""
    m, n, k = fit(spec, shape)
    a, b = Placed(m, k, spec.a).set(whole(m, k)).view, Placed(k, n, spec.b).set(whole(k, n)).view
    inputs = {}
    for i, operand in zip(spec.epilogue.inputs, spec.inputs, strict=True):
        if i.kind is Kind.SCALAR:
            inputs[i.name] = 2.0
            continue
        shape_of = {Kind.ROW: (n,), Kind.COL: (m,), Kind.TILE: (m, n)}[i.kind]
        inputs[i.name] = place(i.kind, operand, m, n).set(whole(*shape_of, largest=200)).view
    return a, b, inputs


def place_outputs(spec, m, n):
    operands = (spec.d, *spec.outputs)
    return {o.name: place(o.kind, operand, m, n) for o, operand in zip(spec.epilogue.outputs, operands, strict=True)}


def check_exact(spec, shape):
    a, b, inputs = draw(spec, shape)
    placed = place_outputs(spec, a.shape[0], b.shape[1])
    before = [x.clone() for x in (a, b, *inputs.values()) if isinstance(x, torch.Tensor)]
    co.build(spec)(a, b, out={name: p.view for name, p in placed.items()}, **inputs)
    wanted = reference.evaluate(spec.epilogue, a.double() @ b.double(), inputs, torch.float64, a=a)
    for name, p in placed.items():
        right = wanted[name].to(p.view.dtype)
        wrong = (p.view != right).nonzero()
        assert not len(wrong), (
            f"{name} of {spec.slug} at {tuple(a.shape)} @ {tuple(b.shape)}: {len(wrong)} of {right.numel()} differ, "
            f"the first at {wrong[0].tolist()}: {p.view[tuple(wrong[0])]} for {right[tuple(wrong[0])]}"
        )
        p.assert_frame_untouched()
    after = (x for x in (a, b, *inputs.values()) if isinstance(x, torch.Tensor))
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True)), "an input was changed"


@pytest.mark.parametrize("name", WHOLE_OPS)
def test_named_ops_round_once_and_read_nothing_beyond_their_operands(name):
    # Sums leave BF16's eight and FP16's eleven bits, and bias and residual add to them: rounding in between would show,
    # and so would one NaN from outside.
    for shape in SHAPES:
        check_exact(kernels.matrix()[name], shape)


@pytest.mark.parametrize("name", list(kernels.configurations()))
def test_configurations(name):
    for shape in [*SHAPES, MANY_TILES]:
        check_exact(kernels.configurations()[name], shape)


@pytest.mark.parametrize("name", list(kernels.multicast()))
def test_partly_filled_tiles_of_clusters_that_multicast(name):
    """Which block of a cluster brings what depends on the major, and so does what is beyond the matrix and left out."""
    for tail in (8, 24, 64, 72, 96, 128, 136, 200):
        for shape in [(tail, 208 - tail, 72), (256 + tail, 384 + tail, 200)]:
            check_exact(kernels.multicast()[name], shape)


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_kernels_that_take_all_of_k_round_alike(arch):
    """What deterministic tuning promises: whichever of them serves, and with however many rows, no bit changes."""
    types = ["bf16.row", "bf16.col", "bf16.row"]
    specs = [
        s
        for s in kernels.configurations().values()
        if (s.config.arch, s.config.whole_k) == (arch, True)
        and [f"{o.dtype.name}.{o.major}" for o in (s.a, s.b, s.d)] == types
    ]
    assert len(specs) > 1
    m, n, k = 333, 264, 4136
    a, b, bias = (torch.randn(*e, device=placement.DEVICE, dtype=torch.bfloat16) for e in ((m, k), (n, k), (n,)))
    results = [co.build(s)(a, b.t(), bias) for s in specs]
    assert all(torch.equal(results[0], r) for r in results[1:])
    assert all(torch.equal(co.build(s)(a[5:6], b.t(), bias), results[0][5:6]) for s in specs)


@pytest.mark.parametrize("name", list(edges.mixed()))
def test_mixed_dtypes_and_alignments(name):
    for shape in [*SHAPES, MANY_TILES]:
        check_exact(edges.mixed()[name], shape)


FEW_ROWS = [n for n in kernels.few_rows() if n.split("-")[0] in ("gemm", "gemm_bias", "gemm_bias_relu", "bias")]


@pytest.mark.parametrize("name", FEW_ROWS)
def test_kernels_for_few_rows_read_nothing_beyond_their_operands(name):
    for shape in [*SHAPES, (1, 4097, 333), (7, 33, 2049)]:
        check_exact(kernels.few_rows()[name], shape)


# ---- Reductions ---------------------------------------------------------------------------------------------------

SUMS = kernels.multi_output() | kernels.reductions() | edges.stream_k_sums()


@pytest.mark.parametrize("name", list(SUMS))
def test_reductions_see_no_element_beyond_the_edge(name):
    """All values are far below zero: the zeros of a tile's unused part would be the maximum, and show in the sums."""
    spec = SUMS[name]
    for shape in [(1, 1, 8), (63, 65, 64), (65, 1, 8), (1, 131, 8), (193, 259, 128), MANY_TILES]:
        a, b, inputs = draw(spec, shape)
        m, n = a.shape[0], b.shape[1]
        inputs["scale"].fill_(0.0)
        inputs["bias"].copy_(-100 - torch.arange(n, device=placement.DEVICE) % 7)
        if "residual" in inputs:
            inputs["residual"].sub_(1000)
        if "other" in inputs:
            inputs["other"].copy_(whole(m, n))
        placed = place_outputs(spec, m, n)
        placement.dirty_the_allocator()
        co.build(spec)(a, b, out={key: p.view for key, p in placed.items()}, **inputs)
        wanted = reference.evaluate(spec.epilogue, a.double() @ b.double(), inputs, torch.float64, a=a)
        for key in ("row_max", "col_max"):
            assert (placed[key].view.double() - wanted[key]).abs().max() <= 1e-3, f"{key} at {shape}"
            assert placed[key].view.max() < 0
        for key in ("row_sum", "row_square", "col_sum", "col_square"):
            found = (placed[key].view.double() / wanted[key] - 1).abs().max()
            assert found <= 1e-5, f"{key} at {shape}: off by {found:.1e}"
        for p in placed.values():
            p.assert_frame_untouched()


@pytest.mark.parametrize("name", list(SUMS))
def test_repeats_give_the_same_bits_whatever_the_workspace_held(name):
    spec = SUMS[name]
    a, b, inputs = draw(spec, (321, 259, 520))
    kernel, first = co.build(spec), None
    for _ in range(8):
        placed = place_outputs(spec, a.shape[0], b.shape[1])
        placement.dirty_the_allocator()
        kernel(a, b, out={key: p.view for key, p in placed.items()}, **inputs)
        again = [p.view.clone() for p in placed.values()]
        first = first or again
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def make_nan(spec, a, b, inputs):
    """Make D at (97, 101) NaN, and nothing else; return which reductions it reaches, and where it is in those."""
    if "residual" in inputs:
        inputs["residual"][97, 101] = NAN
        # It is in d, and not in z: d's sums and maxima along a row, d's maxima and squares along a column.
        return {"row_sum": 97, "row_max": 97, "col_square": 101, "col_max": 101}
    # An infinite sum of products meets its opposite; one made by `scale` would not be: that is fused with the bias.
    a[:, 0], b[0] = 0, 0
    a[97, 0], b[0, 101] = 3e38, 3e38
    inputs["scale"][97], inputs["bias"][101] = 1, -INF
    return {o.name: 97 if o.name.startswith("row") else 101 for o in spec.epilogue.outputs if o.reduce is not None}


@pytest.mark.parametrize("name", list(SUMS))
def test_one_nan_reaches_its_own_row_and_column_only(name):
    spec = SUMS[name]
    a, b, inputs = draw(spec, (130, 134, 64))
    reached = make_nan(spec, a, b, inputs)
    placed = place_outputs(spec, a.shape[0], b.shape[1])
    co.build(spec)(a, b, out={key: p.view for key, p in placed.items()}, **inputs)
    for key in placed.keys() - {"d"}:
        assert placed[key].view.isnan().nonzero().flatten().tolist() == ([reached[key]] if key in reached else []), key
    assert placed["d"].view.isnan().nonzero().tolist() == [[97, 101]]


# ---- Functions ----------------------------------------------------------------------------------------------------


def samples(rows, cols):
    """FP32 values of both signs over the range in which the functions do something, and those that are special."""
    special = [0.0, -0.0, NAN, INF, -INF, 3.4e38, -3.4e38, 1e-40, -1e-40, 1e-45, 1.0, -1.0, 0.5, -3.0, 3.0, 20.0, 20.5]
    # Ties, what e^x and 2^x overflow and underflow for, and numbers beyond those that have fractions.
    special += [-0.5, 1.5, -1.5, 2.5, -2.5, 88.8, -104.0, 128.0, -150.0, 8388609.0, -8388607.5, 2147483648.0]
    special = torch.tensor(special)
    sizes = torch.logspace(-6, 1.9, (rows * cols - len(special)) // 2)
    values = torch.cat([special, sizes, -sizes])
    return torch.cat([values, torch.zeros(rows * cols - len(values))]).view(rows, cols).to(placement.DEVICE)


@pytest.mark.parametrize("group", list(edges.function_groups()))
def test_functions_against_float64(group):
    spec = edges.functions_specs()[group]
    m, n, k = 96, 100, 8
    value = samples(m, n)
    a, b = (torch.zeros(s, dtype=torch.bfloat16, device=placement.DEVICE) for s in ((m, k), (n, k)))
    result = co.build(spec)(a, b.t(), value=value)
    assert torch.equal(result.d.nan_to_num(), value.nan_to_num())
    for name in edges.function_groups()[group]:
        found, function = getattr(result, name), edges.FUNCTIONS[name][1]
        own, exact = function(value), function(value.double())
        assert torch.equal(found.isnan(), own.isnan()), f"{name} is NaN elsewhere than in PyTorch"
        infinite = own.isinf()
        assert torch.equal(found[infinite], own[infinite]), f"{name} is infinite elsewhere than in PyTorch"
        finite = own.isfinite()
        zero = own == 0
        if name not in edges.EITHER_ZERO:
            assert torch.equal(found[zero].signbit(), own[zero].signbit()), f"{name} has zeros of another sign"
        if name.startswith("to_"):
            assert torch.equal(found[finite], own[finite])
            continue
        # A few units in FP32's last place; e^x by way of 2^x loses one for each doubling of x, where it is tiny,
        # and 1 + erf(x) is left with no more than what erf(x) has.
        size = value.double().abs()
        allowed = 1e-6 * exact.abs() * (1 + size.clamp_max(100)) + 1.5e-7 * size.clamp_max(8) + 1e-38
        off = ((found.double() - exact).abs() > allowed) & finite
        assert not off.any(), (
            f"{name} at {off.sum()} of {off.numel()} values, such as {value[off][0]:.6g}: {found[off][0]:.8g} for "
            f"{exact[off][0]:.8g}"
        )


def test_relu_of_what_is_not_finite():
    for kind in ("tma", "unaligned"):
        spec = kernels.matrix()[f"gemm_bias_relu-bf16-row-col-{kind}"]
        a, b, inputs = draw(spec, (9, 11, 16))
        a[4, 3], inputs["bias"][7] = NAN, -INF
        out = place_outputs(spec, a.shape[0], b.shape[1])["d"]
        co.build(spec)(a, b, out=out.view, **inputs)
        wanted = torch.relu(a.double() @ b.double() + inputs["bias"].double())
        assert torch.equal(out.view.isnan(), wanted.isnan())
        assert out.view[4].isnan().all()
        assert (out.view[:4, 7] == 0).all()
        out.assert_frame_untouched()


# ---- Size ---------------------------------------------------------------------------------------------------------


def check_large(spec, shape):
    """Compare all of a whole-numbered product, in parts."""
    m, n, k = fit(spec, shape)
    needed = 2.2 * (2 * (m * k + k * n) + torch_dtype(spec.d).itemsize * m * n) + 6e9
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of free device memory")
    dtype = torch_dtype(spec.a)
    a = torch.randint(-2, 3, (m, k), device="cuda", dtype=dtype)
    w = torch.randint(-2, 3, (n, k), device="cuda", dtype=dtype)
    bias = torch.randint(-2, 3, (n,), device="cuda", dtype=torch_dtype(spec.inputs[0]))
    out = torch.full((m, n), NAN, device="cuda", dtype=torch_dtype(spec.d))
    co.build(spec)(a, w.t(), bias, out=out)
    rows, columns = max(1, (1 << 27) // n), 1 << 25
    for top in range(0, m, rows):
        for left in range(0, n, columns):
            at = slice(top, top + rows), slice(left, left + columns)
            wanted = a[at[0]].float() @ w[at[1]].t().float()
            wanted.add_(bias[at[1]]).relu_()
            assert torch.equal(out[at], wanted.to(out.dtype)), f"at row {top}, column {left}"


# A, B or D beyond 2^31 elements, and more tiles along N than a grid is high.
LARGE = [(46_360, 46_360, 8), (33_600_000, 8, 64), (8, 33_600_000, 64), (3, 64 * 65_536 + 40, 8)]


@pytest.mark.parametrize("shape", LARGE, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(kernels.matrix()["gemm_bias_relu-bf16-row-col-unaligned"], id="sm80"),
        pytest.param(kernels.configurations()["sm90_128x128x64_1x1_pp"], id="sm90"),
    ],
)
def test_more_than_two_to_the_31_elements(spec, shape):
    check_large(spec, shape)


def test_the_placement_itself():
    """What the tests above rely on: the alignment that was asked for and no better, and a frame that is watched."""
    for text in ("bf16.row", "bf16.col.align4", "f16.row.align2", "f32.col.align1", "bf16.row.align1"):
        operand = co.Operand.of(text)
        placed = Placed(5, 7, operand)
        size, view = operand.alignment * operand.dtype.bytes, placed.view
        outer = 0 if operand.major == "row" else 1
        starts = [view.select(outer, i).data_ptr() for i in range(view.shape[outer])]
        assert all(start % size == 0 for start in starts)
        assert any(start % (2 * size) for start in starts)
        placed.assert_frame_untouched()
        view.zero_()
        placed.assert_frame_untouched()
        view.as_strided((1,), (1,), view.storage_offset() - 1).zero_()
        with pytest.raises(AssertionError, match="outside"):
            placed.assert_frame_untouched()
    vector = PlacedVector(3, co.Operand.of("bf16.align1"))
    vector.view.as_strided((1,), (1,), 4).zero_()
    with pytest.raises(AssertionError, match="after"):
        vector.assert_frame_untouched()
