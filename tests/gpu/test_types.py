"""The other types on the device: against float64 of what is multiplied, over shapes and layouts that are not usual."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import f64, i8, tf32, tf32x3
from cutlass_ops.run import reference
from cutlass_ops.run.call import device_of
from cutlass_ops.run.ops import op_of
from tests.gpu import multiplied, oracle, tensors
from tests.gpu.multiplied import CALLS, doubles, exact, floats, whole

pytestmark = pytest.mark.gpu

KERNELS = multiplied.specs()
# One row, one more than a tile's, several tiles; with lines of any length also odd extents and a K of less than a step.
SHAPES = [(1, 256, 512), (65, 264, 528), (333, 512, 1024)]
ODD = [(129, 251, 1037), (3, 7, 5)]
SUMS, FP32_SUMS, DOUBLE_SUMS = (oracle.SUMS[name] for name in ("tf32", "tf32x3", "f64"))


@pytest.fixture(autouse=True)
def hopper():
    if not device_of(torch.device("cuda", torch.cuda.current_device())).has_wgmma:
        pytest.skip("these kernels are compiled for Hopper")


def draw(spec, m, n, k):
    """Draw operands and inputs for a kernel."""
    if spec.config.copies:
        drawn = (floats(m, k), floats(k, n)) if spec.a.dtype is tf32 else (whole(m, k), whole(k, n))
        pairs = zip(drawn, (spec.a, spec.b), strict=True)
        x, w = (multiplied.laid(y, operand.major, aligned=operand.aligned) for y, operand in pairs)
        size = k**0.5 / 16
    elif spec.a.dtype in (tf32, tf32x3):
        x, w = (
            floats(rows, columns, operand.major, aligned=operand.aligned)
            for rows, columns, operand in ((m, k, spec.a), (k, n, spec.b))
        )
        size = k**0.5 / 16
    elif spec.a.dtype is f64:
        x, w = (
            doubles(rows, columns, operand.major, aligned=operand.aligned)
            for rows, columns, operand in ((m, k, spec.a), (k, n, spec.b))
        )
        size = k**0.5
    else:
        x, w, size = whole(m, k), whole(n, k).t(), k**0.5 * 64
    drawn = {
        "bias": torch.randn(n, device="cuda"),
        "scale": torch.rand(m, device="cuda") / size,
        "r": tensors.matrix(m, n, "f32", aligned=spec.d.aligned),
        "up": floats(k, n, "col"),
    }
    if spec.a.dtype is f64:
        drawn = {name: given.double() for name, given in drawn.items()} | {"r": doubles(m, n, aligned=spec.d.aligned)}
    return x, w, {i.name: drawn[i.name] for i in spec.epilogue.inputs}


def fitting(spec, m, n, k):
    """Return the shape with the extents along lines of 16 bytes rounded up to whole ones."""
    sizes = {"m": m, "n": n, "k": k}
    for operand, across, along in ((spec.a, "m", "k"), (spec.b, "k", "n"), (spec.d, "m", "n")):
        line = along if operand.major == "row" else across
        step = 16 // operand.dtype.bytes if operand.aligned else 1
        sizes[line] = -(-sizes[line] // step) * step
    return sizes.values()


def wanted(spec, x, w, inputs):
    """Return D in float64. The CPU evaluates functions of FP64: on a GPU, PyTorch's hardswish divides in FP32."""
    acc = exact(x, w, mma.math_of(spec.a.dtype))
    if "up" in inputs:
        return F.silu(acc) * exact(x, inputs["up"])
    if not inputs:
        return acc
    if spec.epilogue == multiplied.requantised.graph:
        return acc * inputs["scale"].double()[:, None] + inputs["bias"].double()
    if "bias" not in inputs:
        given = {name: value.cpu() for name, value in inputs.items()}
        return reference.evaluate(spec.epilogue, acc.cpu(), given, torch.float64)["d"].cuda()
    if len(inputs) == 1:
        return (acc + inputs["bias"].double()).relu()
    bias, scale, r = (inputs[name].double() for name in ("bias", "scale", "r"))
    return F.gelu(acc * scale[:, None] + bias) + r


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_right(kernel):
    spec = KERNELS[kernel]
    shapes = SHAPES if spec.d.aligned else ODD
    served = co.build(spec)
    for m, n, k in (fitting(spec, *shape) for shape in shapes):
        x, w, inputs = draw(spec, m, n, k)
        found = served(x, w, **inputs)
        d = wanted(spec, x, w, inputs)
        if spec.epilogue.outputs[1:]:
            found, row, column = found
            assert oracle.error(row, d.sum(1)) <= max(SUMS, torch.finfo(found.dtype).eps)
            assert oracle.error(column, d.amax(0)) <= max(SUMS, torch.finfo(found.dtype).eps)
        if not found.dtype.is_floating_point:
            assert_whole(found, d)
        elif spec.a.dtype is i8 and not inputs:
            assert torch.equal(found, d.float())  # every sum, rounded to FP32 once
        else:
            oracle.assert_within(found, d, oracle.SUMS[spec.a.dtype.name])


def assert_whole(found, wanted):
    """Require every sum, or values that were rounded to INT8 but for those nearly between two of its numbers."""
    rounded = reference.rounded(wanted, found.dtype)
    if found.dtype is torch.int32:
        assert torch.equal(found, rounded)
        return
    others = (found.int() - rounded.int()).abs()
    assert others.max() <= 1
    assert (others > 0).double().mean() < 1e-3
    assert found.numel() < 1000 or len(found.unique()) > 100


@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_right(call):
    op, (x, w), named = CALLS[call]()
    acc = exact(x, w, op.math)
    found = op(x, w, **named)
    if not found.dtype.is_floating_point:
        scaled = acc * named["scale"].double()[:, None] + named["bias"].double() if "bias" in named else acc
        assert_whole(found, scaled)
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
        assert oracle.error(found.d[:, 0], F.gelu(reference.as_multiplied(x[:, 0], tf32).double())) <= 1e-3
        return
    found = found[:, :1]
    assert ((found - x[:, :1]).abs() <= 2.0**-11).all()
    assert torch.equal(found, reference.as_multiplied(found, tf32))


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


def test_int32_is_what_pytorch_has():
    x, w = whole(64, 128), whole(32, 128).t()
    assert torch.equal(co.gemm(x, w, out_dtype=torch.int32), torch._int_mm(x, w))


COPIED = [name for name, spec in KERNELS.items() if spec.config.copies]


@pytest.mark.parametrize("kernel", COPIED)
def test_copies_are_of_what_was_written_just_before(kernel):
    """Launches overlap: a copy must not read what the kernel before it is still writing, nor overwrite what is read."""
    spec, served, found = KERNELS[kernel], co.build(KERNELS[kernel]), []
    source, w, inputs = draw(spec, 300, 264, 528)
    x = torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cuda")
    factors = [1, -1, 0, 2] if source.dtype.is_floating_point else [1, -1, 0]
    for step in range(20):
        torch.mul(source, factors[step % len(factors)], out=x)
        found.append(served(x, w, **inputs))
    for step, d in enumerate(found):
        torch.mul(source, factors[step % len(factors)], out=x)
        torch.cuda.synchronize()
        assert torch.equal(d, served(x, w, **inputs)), f"launch {step} differs"


@pytest.mark.parametrize("kernel", ["tf32-copied-col-row", "i8-copied-row-row.align1"])
def test_copies_are_a_part_of_prepared_launches_and_of_graphs(kernel):
    served = co.build(KERNELS[kernel])
    x, w, inputs = draw(KERNELS[kernel], 129, 264, 528)
    d = torch.empty(129, 264, device="cuda")
    launch = served.prepare_launch(x, w, **inputs, out=d)
    served(x, w, **inputs)
    graph, captured = torch.cuda.CUDAGraph(), torch.empty_like(d)
    with torch.cuda.graph(graph):
        served(x, w, **inputs, out=captured)
    for factor in (1, -1, 0):
        x.mul_(factor)
        wanted = served(x, w, **inputs)
        for out, run in ((d, launch), (captured, graph.replay)):
            out.fill_(math.nan)
            run()
            assert torch.equal(out, wanted)


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
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 4096), (31, 1000, 4095), (257, 300, 2049), (150, 4100, 33), (64, 64, 5)]
)
def test_blocks_that_share_a_tile_of_fp64_add_up_right_and_always_alike(kernel, m, n, k):
    """Several blocks add to a tile, in turn or in a step of its own, in FP64, in one order whatever runs beside."""
    spec = KERNELS[kernel]
    m, n, k = fitting(spec, m, n, k)
    served = co.build(spec)
    x, w, inputs = draw(spec, m, n, k)
    found = served(x, w, **inputs)
    oracle.assert_within(found, wanted(spec, x, w, inputs), DOUBLE_SUMS)
    again = torch.full_like(found, math.nan)
    for _ in range(5):
        served(x, w, **inputs, out=again)
        assert torch.equal(again, found)
    # What FP32 would lose: sums of 1 and of parts that it does not have.
    x.fill_(1)
    w.fill_(1 + 2.0**-40)
    exact_sums = wanted(spec, x, w, inputs)
    oracle.assert_within(served(x, w, **inputs), exact_sums, DOUBLE_SUMS)


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
    drawn = [draw(spec, *fitting(spec, *shape)) for shape in ((32, 4096, 4096), (7, 512, 8192), (300, 264, 1040))]
    exact_d = [served(x, w, **inputs) for x, w, inputs in drawn]
    torch.cuda.synchronize()
    found = []
    for step in range(60):
        which = step % len(drawn)
        x, w, inputs = drawn[which]
        with torch.cuda.stream(streams[step * 7 // 3 % len(streams)]):
            found.append((which, served(x, w, **inputs)))
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
    x, w, _ = draw(KERNELS["tf32-f32-wgmma-plain"], 64, 64, 64)
    with pytest.raises(ValueError, match="b must be col-major"):
        co.build(KERNELS["tf32-f32-wgmma-plain"])(x, w.t().contiguous().t().contiguous())
