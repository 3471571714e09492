"""The other types on the device: what calls give, roundings, and sums that several blocks share."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.base.dtypes import f64, tf32
from cutlass_ops.operand import matrices, reference
from cutlass_ops.run.ops import op_of
from tests.gpu import cases, multiplied, oracle
from tests.gpu.cases import Case, check
from tests.gpu.multiplied import CALLS, doubles, exact, whole

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

KERNELS = multiplied.specs()
SUMS, FP32_SUMS, DOUBLE_SUMS = (oracle.SUMS[name] for name in ("tf32", "tf32x3", "f64"))


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_right(call):
    op, (x, w), named = CALLS[call]()
    acc = exact(x, w, op.math)
    found = op(x, w, **named)
    if not found.dtype.is_floating_point:
        scaled = acc * named["scale"].double()[:, None] + named["bias"].double() if "bias" in named else acc
        oracle.assert_within(found, scaled)
        return
    d = (acc + named["bias"].double()).relu()
    if found.dtype in (torch.float32, torch.float64):
        sums = {"tf32": SUMS, "3xtf32": FP32_SUMS, None: SUMS if found.dtype is torch.float32 else DOUBLE_SUMS}[op.math]
        assert oracle.error(found, d) <= sums
    else:
        found = found.clamp(max=torch.finfo(found.dtype).max)
        oracle.assert_close(found, d.clamp(max=torch.finfo(found.dtype).max))


@pytest.mark.parametrize("kernel", ["tf32-f32-wgmma-plain", "tf32-mma_sync-col-row"])
def test_tf32_rounds_to_nearest(kernel):
    """Truncation would lose up to a whole unit in the last place; ties may go either way."""
    spec, k, n = KERNELS[kernel], 64, 64
    x = torch.zeros(256, k, device="cuda")
    x[:, 0] = 1 + torch.arange(256, device="cuda") * 2.0**-18
    one = torch.zeros(k, n, device="cuda")
    one[0] = 1
    x, one = (y if operand.major == "row" else y.t().contiguous().t() for y, operand in ((x, spec.a), (one, spec.b)))
    nothing = {"bias": torch.zeros(n, device="cuda"), "scale": torch.ones(256, device="cuda")}
    nothing |= {"r": torch.zeros(256, n, device="cuda")}
    found = co.build(spec)(x, one, **{i.name: nothing[i.name] for i in spec.epilogue.inputs})
    if spec.epilogue.inputs:
        assert oracle.error(found.d[:, 0], F.gelu(matrices.as_multiplied(x[:, 0], tf32).double())) <= 1e-3
        return
    found = found[:, :1]
    assert ((found - x[:, :1]).abs() <= 2.0**-11).all()
    assert torch.equal(found, matrices.as_multiplied(found, tf32))


@pytest.mark.parametrize("kernel", ["i8-f32-wgmma-plain", "i8-mma_sync-f32-plain"])
def test_the_greatest_sums_of_int8_are_exact(kernel):
    k = 65536
    x, w = torch.full((130, k), -128, dtype=torch.int8, device="cuda"), whole(64, k)
    w[0] = -128
    w[1, 1:] = -128
    assert torch.equal(co.build(KERNELS[kernel])(x, w.t()), exact(x, w.t()).float())


@pytest.mark.parametrize("kernel", ["i8-i32-pingpong", "i8-i32-odd", "i8-i32-mma_sync"])
def test_sums_beyond_fp32_are_exact_in_int32(kernel):
    k = 131_056
    x, w = torch.full((130, k), -128, dtype=torch.int8, device="cuda"), whole(64, k)
    w[:2] = -128
    x[:, 0] = w[0, 0] = w[1, 1] = 1
    wanted = exact(x, w.t())
    assert (wanted.float().double() != wanted).any()
    assert torch.equal(co.build(KERNELS[kernel])(x, w.t()).double(), wanted)


@pytest.mark.parametrize("kernel", ["i8-i8-pingpong", "i8-i8-odd", "i8-i8-mma_sync", "i8-i8-swapped"])
def test_int8_rounds_to_nearest_even_and_nan_is_0(kernel):
    values = [0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -127.5, -128.5, 1e9, -1e9, 1e30, -1e30]
    values += [math.inf, -math.inf, math.nan]
    bias = torch.tensor(values * 4, device="cuda")
    x, w = torch.zeros(65, 64, dtype=torch.int8, device="cuda"), torch.zeros(64, 64, dtype=torch.int8, device="cuda")
    found = co.build(KERNELS[kernel])(x, w.t(), bias=bias, scale=torch.ones(65, device="cuda"))
    wanted = reference.rounded(bias, torch.int8)
    assert wanted[:16].tolist() == [0, 2, 2, 0, -2, 126, 127, -128, -128, 127, -128, 127, -128, 127, -128, 0]
    assert torch.equal(found, wanted.expand(65, 64))


COPIED = [name for name, spec in KERNELS.items() if spec.config.copies]


@pytest.mark.parametrize("kernel", COPIED)
def test_copies_are_of_what_was_written_just_before(kernel):
    """Launches overlap: a copy must not read what the kernel before it is still writing, nor overwrite what is read."""
    case = Case(KERNELS[kernel], *cases.fit(KERNELS[kernel], (300, 264, 528)))
    factors = [1, -1, 0, 2] if case.a.dtype.is_floating_point else [1, -1, 0]
    cases.check_written_just_before(case, factors)


def test_a_call_says_what_it_copies_and_counts_it():
    op, (x, w), named = CALLS["tf32 copied"]()
    found = co.explain(op, x, w, **named)
    assert found.candidates[0].config.realign
    assert "a and b, " in found.to_json()["contract"]["copied"]
    before = op.copied_operands
    for calls in range(1, 4):
        op(x, w, **named)
        assert op.copied_operands == before + 2 * calls
    along_k = co.prepare(w).matrix
    op(x.contiguous(), along_k, **named)
    assert op.copied_operands == before + 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["tf32", "f64"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_nothing_is_a_matrix_as_well(m, n, k, dtype):
    x, w = (torch.ones(*shape, device="cuda", dtype=dtype) for shape in ((m, k), (k, n)))
    named = {"math": "tf32"} if dtype is torch.float32 else {}
    found = co.gemm(x, w, **named)
    assert found.dtype is dtype
    assert found.tolist() == torch.zeros(m, n).tolist()


DIVIDED = [name for name in KERNELS if name.startswith("f64-stream_k")]


@pytest.mark.parametrize("kernel", DIVIDED)
@pytest.mark.parametrize("shape", [(1, 128, 4096), (31, 1000, 4095), (257, 300, 2049), (150, 4100, 33), (64, 64, 5)])
def test_blocks_that_share_a_tile_of_fp64_add_up_right_and_always_alike(kernel, shape):
    """Several blocks add to a tile, in turn or in a step of its own, in FP64, in one order whatever runs beside."""
    case, served = check(KERNELS[kernel], shape), co.build(KERNELS[kernel])
    found = case.out["d"].clone()
    for _ in range(5):
        case.refill()
        served(*case.operands, out=case.out)
        assert torch.equal(case.out["d"], found)
    # What FP32 would lose: sums of 1 and of parts that it does not have.
    case.a.fill_(1)
    case.b.fill_(1 + 2.0**-40)
    served(*case.operands, out=case.out)
    case.assert_right(case.wanted())


def test_instructions_of_fp64_add_up_in_one_order():
    """Deterministic choices take kernels that add up all of K to agree in every bit, whatever their instruction."""
    wholes = {
        name: spec
        for name, spec in KERNELS.items()
        if spec.a.dtype is f64 and not spec.config.stream_k and spec.epilogue == multiplied.elementwise.graph
    }
    assert {spec.config.instruction.k for spec in wholes.values()} == {4, 8, 16}
    x, w = torch.randn(78, 1040, device="cuda").double(), torch.randn(1040, 136, device="cuda").double()
    x, w = x * torch.rand_like(x), w * torch.rand_like(w)  # with all bits of FP64
    inputs = {"bias": torch.randn(136, device="cuda").double(), "scale": torch.rand(78, device="cuda").double() / 32}
    inputs["r"] = torch.randn(78, 136, device="cuda").double()
    found = {}
    for name, spec in wholes.items():
        a, b = (y if operand.major == "row" else y.t().contiguous().t() for y, operand in ((x, spec.a), (w, spec.b)))
        found[name] = co.build(spec)(a, b, **inputs)
    first = next(iter(found.values()))
    assert [name for name, d in found.items() if not torch.equal(d, first)] == []


def test_few_rows_of_fp64_divide_k():
    x, w = doubles(32, 4096), doubles(4096, 4096).t()
    assert op_of(None).plan(x, w).spec.config.stream_k
    oracle.assert_within(co.gemm(x, w), x @ w, DOUBLE_SUMS)


def test_divided_sums_of_fp64_on_several_streams():
    """Each stream has flags of its own, which every launch leaves as it found them, whatever the problem."""
    spec = KERNELS[DIVIDED[0]]
    served, streams = co.build(spec), [torch.cuda.Stream() for _ in range(3)]
    drawn = [Case(spec, *shape).operands for shape in ((32, 4096, 4096), (7, 512, 8192), (300, 264, 1040))]
    exact_d = [served(*operands) for operands in drawn]
    torch.cuda.synchronize()
    found = []
    for step in range(60):
        which = step % len(drawn)
        with torch.cuda.stream(streams[step * 7 // 3 % len(streams)]):
            found.append((which, served(*drawn[which])))
    torch.cuda.synchronize()
    assert all(torch.equal(d, exact_d[which]) for which, d in found)


def test_divided_sums_of_fp64_are_a_part_of_graphs():
    """A captured launch has flags of its own, also when a graph is played again."""
    x, w = doubles(32, 4096), doubles(1024, 4096).t()
    d = torch.empty(32, 1024, device="cuda", dtype=torch.float64)
    co.gemm(x, w, out=d)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        co.gemm(x, w, out=d)
    for factor in (1, -2, 0):
        x.mul_(factor)
        d.fill_(math.nan)
        graph.replay()
        assert torch.equal(d, co.gemm(x, w))


@co.epilogue
def scaled_twice(acc, s: co.Scalar, c: co.Col):
    return co.e.silu(acc * s) * c


def test_numbers_and_gradients_are_in_fp64():
    x, w, c = doubles(65, 136), doubles(72, 136).t(), torch.randn(65, device="cuda").double()
    leaves = [y.clone().requires_grad_() for y in (x, w, c)]
    found = co.gemm(leaves[0], leaves[1], epilogue=scaled_twice, s=math.pi / 100, c=leaves[2])
    again = [y.clone().requires_grad_() for y in (x, w, c)]
    d = F.silu(again[0] @ again[1] * (math.pi / 100)) * again[2][:, None]
    assert oracle.error(found.detach(), d.detach()) <= DOUBLE_SUMS
    found.square().sum().backward()
    d.square().sum().backward()
    for mine, theirs in zip(leaves, again, strict=True):
        assert mine.grad.dtype is torch.float64
        assert oracle.error(mine.grad, theirs.grad) <= DOUBLE_SUMS


def test_a_scalar_on_the_device_is_refused():
    x, s = doubles(8, 8), torch.tensor(0.5, device="cuda")
    with pytest.raises(TypeError, match=r"^s is a tensor on a GPU .* pass a number"):
        co.gemm(x, x, epilogue=scaled_twice, s=s, c=x[0])


def test_a_kernel_says_which_operands_it_takes():
    kernel, x, w = co.build(KERNELS["tf32-f32-wgmma-plain"]), multiplied.floats(64, 64), multiplied.floats(64, 64)
    with pytest.raises(ValueError, match="b must be col-major"):
        kernel(x, w)
