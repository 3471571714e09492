"""Results to the last bit: reductions at edges, functions against float64, more than 2^31 elements."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.run.registry import Registry
from tests.gpu import cases, edges, kernels
from tests.gpu.cases import Case
from tests.gpu.memory import dirty_the_allocator, placed, torch_dtype, whole

pytestmark = pytest.mark.gpu

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True, scope="module")
def _built():
    Registry.current().kernels(edges.specs().values())


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
    a, b, bias = (torch.randn(*e, device="cuda", dtype=torch.bfloat16) for e in ((m, k), (n, k), (n,)))
    results = [co.build(s)(a, b.t(), bias) for s in specs]
    assert all(torch.equal(results[0], r) for r in results[1:])
    assert all(torch.equal(co.build(s)(a[5:6], b.t(), bias), results[0][5:6]) for s in specs)


# ---- Reductions ---------------------------------------------------------------------------------------------------

SUMS = kernels.multi_output() | kernels.reductions() | edges.stream_k_sums()


@pytest.mark.parametrize("name", list(SUMS))
def test_reductions_see_no_element_beyond_the_edge(name):
    """All values are far below zero: the zeros of a tile's unused part would be the maximum, and show in the sums."""
    spec = SUMS[name]
    for shape in [(1, 1, 8), (63, 65, 64), (65, 1, 8), (1, 131, 8), (193, 259, 128), (1093, 1127, 131)]:
        case = Case(spec, *cases.fit(spec, shape), exact=True)
        case.inputs["scale"].fill_(0.0)
        case.inputs["bias"].copy_(-100 - torch.arange(case.n, device="cuda") % 7)
        if "residual" in case.inputs:
            case.inputs["residual"].sub_(1000)
        if "other" in case.inputs:
            case.inputs["other"].copy_(whole(case.m, case.n))
        dirty_the_allocator()
        co.build(spec)(*case.operands, out=case.out)
        case.assert_nothing_else_written()
        wanted, found = case.wanted(), case.out
        for key in ("row_max", "col_max"):
            assert (found[key].double() - wanted[key][0]).abs().max() <= 1e-3, f"{key} at {shape}"
            assert found[key].max() < 0
        for key in ("row_sum", "row_square", "col_sum", "col_square"):
            off = (found[key].double() / wanted[key][0] - 1).abs().max()
            assert off <= 1e-5, f"{key} at {shape}: off by {off:.1e}"


@pytest.mark.parametrize("name", list(SUMS))
def test_repeats_give_the_same_bits_whatever_the_workspace_held(name):
    case, kernel, first = (
        Case(SUMS[name], *cases.fit(SUMS[name], (321, 259, 520)), exact=True),
        co.build(SUMS[name]),
        None,
    )
    for _ in range(8):
        case.refill()
        dirty_the_allocator()
        kernel(*case.operands, out=case.out)
        again = [x.clone() for x in case.out.values()]
        first = first or again
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def make_nan(case):
    """Make D at (97, 101) NaN, and nothing else; return which reductions it reaches, and where it is in those."""
    if "residual" in case.inputs:
        case.inputs["residual"][97, 101] = NAN
        # It is in d, and not in z: d's sums and maxima along a row, d's maxima and squares along a column.
        return {"row_sum": 97, "row_max": 97, "col_square": 101, "col_max": 101}
    # An infinite sum of products meets its opposite; one made by `scale` would not be: that is fused with the bias.
    case.a[:, 0], case.b[0] = 0, 0
    case.a[97, 0], case.b[0, 101] = 3e38, 3e38
    case.inputs["scale"][97], case.inputs["bias"][101] = 1, -INF
    return {o.name: 97 if o.kind is Kind.COL else 101 for o in case.spec.epilogue.outputs if o.reduce is not None}


@pytest.mark.parametrize("name", list(SUMS))
def test_one_nan_reaches_its_own_row_and_column_only(name):
    case = Case(SUMS[name], *cases.fit(SUMS[name], (130, 134, 64)), exact=True)
    reached = make_nan(case)
    co.build(case.spec)(*case.operands, out=case.out)
    for key, x in case.out.items():
        if key != "d":
            assert x.isnan().nonzero().flatten().tolist() == ([reached[key]] if key in reached else []), key
    assert case.out["d"].isnan().nonzero().tolist() == [[97, 101]]


# ---- Functions ----------------------------------------------------------------------------------------------------


def samples(rows, cols):
    """FP32 values of both signs over the range in which the functions do something, and those that are special."""
    special = [0.0, -0.0, NAN, INF, -INF, 3.4e38, -3.4e38, 1e-40, -1e-40, 1e-45, 1.0, -1.0, 0.5, -3.0, 3.0, 20.0, 20.5]
    # Ties, what e^x and 2^x overflow and underflow for, and numbers beyond those that have fractions.
    special += [-0.5, 1.5, -1.5, 2.5, -2.5, 88.8, -104.0, 128.0, -150.0, 8388609.0, -8388607.5, 2147483648.0]
    special = torch.tensor(special)
    sizes = torch.logspace(-6, 1.9, (rows * cols - len(special)) // 2)
    values = torch.cat([special, sizes, -sizes])
    return torch.cat([values, torch.zeros(rows * cols - len(values))]).view(rows, cols).to("cuda")


@pytest.mark.parametrize("group", list(edges.function_groups()))
def test_functions_against_float64(group):
    spec = edges.functions_specs()[group]
    m, n, k = 96, 100, 8
    value = samples(m, n)
    a, b = (torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in ((m, k), (n, k)))
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


@pytest.mark.parametrize("name", ["gemm_bias_relu-bf16-row-col-tma", "gemm_bias_relu-bf16-row-col-unaligned"])
def test_relu_of_what_is_not_finite(name):
    spec = kernels.matrix()[name]
    case = Case(spec, *cases.fit(spec, (9, 11, 16)), exact=True)
    case.a[4, 3], case.inputs["bias"][7], case.inputs["bias"][8] = NAN, -INF, INF
    co.build(spec)(*case.operands, out=case.out)
    case.assert_right(case.wanted())
    d = case.out["d"]
    assert d[4].isnan().all()
    assert (d[:4, 7] == 0).all()
    assert (d[:4, 8] == INF).all()


# ---- Size ---------------------------------------------------------------------------------------------------------


def check_large(spec, shape):
    """Compare all of a whole-numbered product, in parts."""
    m, n, k = cases.fit(spec, shape)
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


# More than 2^31 elements from one line, batch or expert to the next.
FAR = 2**31 + 8


def apart(*extents):
    """Return a new tensor of whole numbers whose first dimension has that stride."""
    count, *shape = extents
    within = torch.empty(shape, device="meta").stride()
    length = (count - 1) * FAR + torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 2 * length + 6e9:
        pytest.skip(f"needs {2e-9 * length + 6:.0f} GB of free device memory")
    x = torch.empty(length, device="cuda", dtype=torch.bfloat16).as_strided(extents, (FAR, *within))
    return x.copy_(torch.randint(-2, 3, extents, device="cuda"))


@co.epilogue
def added(acc, residual: co.Tile):
    return acc + residual


@pytest.mark.parametrize("argument", ["a", "b", "residual", "out"])
@pytest.mark.parametrize("m", [1, 3])
def test_lines_may_be_more_than_two_to_the_31_elements_apart(argument, m):
    n = 3 if argument == "b" else 64
    shapes = {"a": (m, 64), "b": (n, 64), "residual": (m, n), "out": (m, n)}
    given = {
        name: apart(*shape) if name == argument else torch.randint(-2, 3, shape, device="cuda").to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    a, w, residual, out = given.values()
    wanted = a.double() @ w.double().t() + residual.double()
    for _ in range(2):
        found = co.gemm(a, w.t(), epilogue=added, residual=residual, out=out)
        assert torch.equal(found.double(), wanted)


@pytest.mark.parametrize("argument", ["a", "b", "out"])
def test_batches_may_be_more_than_two_to_the_31_elements_apart(argument):
    shapes = {"a": (3, 40, 64), "b": (3, 72, 64), "out": (3, 40, 72)}
    given = {
        name: apart(*shape) if name == argument else torch.randint(-2, 3, shape, device="cuda").to(torch.bfloat16)
        for name, shape in shapes.items()
    }
    a, w, out = given.values()
    for _ in range(2):
        found = co.gemm(a, w.mT, out=out)
        assert torch.equal(found.double(), a.double() @ w.double().mT)


def test_experts_may_be_more_than_two_to_the_31_elements_apart():
    x, w = torch.randint(-2, 3, (40, 64), device="cuda").to(torch.bfloat16), apart(3, 72, 64)
    offsets = torch.tensor([8, 24, 40], device="cuda", dtype=torch.int32)
    found = co.gemm(x, w.mT, groups=co.Groups(offsets))
    for expert, (first, last) in enumerate(((0, 8), (8, 24), (24, 40))):
        assert torch.equal(found[first:last].double(), x[first:last].double() @ w[expert].double().t())


@pytest.mark.parametrize(("x", "y"), [(-128, -128), (-128, 127), (127, 127)])
@pytest.mark.parametrize("rows", [1, 80])
def test_the_longest_sums_of_int8_do_not_overflow(x, y, rows):
    k = 131_071
    a, w = (torch.full((m, k), value, device="cuda", dtype=torch.int8) for m, value in ((rows, x), (48, y)))
    assert (co.gemm(a, w.t(), out_dtype=torch.int32) == x * y * k).all()
    longer = torch.zeros(rows, k + 1, device="cuda", dtype=torch.int8)
    with pytest.raises(ValueError, match="up to K=131071 none does"):
        co.gemm(longer, longer[:1].t())


def test_the_placement_itself():
    """What the tests above rely on: the alignment that was asked for and no better, and a frame that is watched."""
    for text in ("bf16.row", "bf16.col.align4", "f16.row.align2", "f32.col.align1", "bf16.row.align1", "e4m3.row"):
        operand = Operand.of(text)
        here = placed((5, 7), operand)
        size, view = operand.dtype.bytes_of(operand.alignment), here.view
        outer = 0 if operand.major == "row" else 1
        starts = [view.select(outer, i).data_ptr() for i in range(view.shape[outer])]
        assert all(start % size == 0 for start in starts)
        assert any(start % (2 * size) for start in starts)
        here.assert_only()
        view.zero_()
        here.assert_only()
        view.as_strided((1,), (1,), view.storage_offset() - 1).zero_()
        with pytest.raises(AssertionError, match="outside"):
            here.assert_only()
    vector = placed((3,), Operand.of("bf16.align1"))
    vector.view.as_strided((1,), (1,), 4).zero_()
    with pytest.raises(AssertionError, match="outside"):
        vector.assert_only()
