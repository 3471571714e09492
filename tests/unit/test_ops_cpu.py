"""The public ops on CPU tensors, where PyTorch computes them: values, outputs, shapes, and errors in words."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.declare.device import Device
from cutlass_ops.operand.call import device_of
from cutlass_ops.operand.results import Outputs
from cutlass_ops.run import cold, kernels, named

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# What each named op is, written once more in PyTorch; in FP64 it is exact, in 16 bits it is what PyTorch would do.
COMPOSED = {
    co.gemm: lambda a, b: a @ b,
    co.gemm_bias: lambda a, b, bias: a @ b + bias,
    co.gemm_bias_relu: lambda a, b, bias: F.relu(a @ b + bias),
    co.gemm_bias_gelu: lambda a, b, bias: F.gelu(a @ b + bias),
    co.gemm_bias_silu: lambda a, b, bias: F.silu(a @ b + bias),
    co.gemm_residual: lambda a, b, residual: a @ b + residual,
    co.gemm_bias_residual: lambda a, b, bias, residual: a @ b + bias + residual,
    co.gemm_bias_relu_residual: lambda a, b, bias, residual: F.relu(a @ b + bias) + residual,
}
NAMED = [pytest.param(op, id=op.__name__) for op in COMPOSED]
# Ones, primes, and the neighbours of a tile's side.
SHAPES = [(1, 1, 1), (1, 64, 16), (7, 1, 31), (37, 101, 67), (63, 65, 129), (64, 128, 8), (129, 127, 1)]


@co.epilogue
def everything(acc, bias: co.Row, scale: co.Col, residual: co.Tile, alpha: co.Scalar):
    """An activation that is saved before and measured after."""
    pre = acc * scale + bias
    d = co.relu(pre) * alpha + residual
    return {"d": d, "pre": pre, "row_square": co.sum_square(d, dim=1), "col_max": co.max(pre, dim=0)}


def matrix(rows, cols, dtype, major="row"):
    x = torch.randn(rows, cols, dtype=F32) / math.sqrt(math.sqrt(max(rows, cols)))
    return x.to(dtype) if major == "row" else x.t().contiguous().t().to(dtype)


def arguments(op, shape, dtype=BF16, majors=("row", "row")):
    m, n, k = shape
    a, b = matrix(m, k, dtype, majors[0]), matrix(k, n, dtype, majors[1])
    names = [p for p in inspect.signature(COMPOSED[op]).parameters if p not in ("a", "b")]
    return a, b, {name: torch.randn(n).to(dtype) if name == "bias" else matrix(m, n, dtype) for name in names}


def error(x, wanted):
    return ((x.double() - wanted).norm() / wanted.norm().clamp_min(1e-30)).item()


def assert_accurate(x, op, a, b, inputs):
    """At most the error of one rounding; PyTorch's own composition rounds at every step."""
    wanted = COMPOSED[op](a.double(), b.double(), **{k: v.double() for k, v in inputs.items()})
    assert x.shape == wanted.shape
    assert error(x, wanted) <= torch.finfo(x.dtype).eps / 2 + 1e-6


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


# ---- Values -------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("dtype", [BF16, F16], ids=["bf16", "f16"])
@pytest.mark.parametrize("op", NAMED)
def test_every_op_rounds_once(op, dtype, shape):
    a, b, inputs = arguments(op, shape, dtype)
    d = op(a, b, **inputs)
    assert d.dtype == dtype
    assert d.is_contiguous()
    assert_accurate(d, op, a, b, inputs)


def test_whole_numbers_are_exact_until_the_one_rounding():
    # Sums beyond BF16's eight bits, which a bias then brings back: rounding in between would show.
    a, b = (torch.randint(-16, 17, s).to(BF16) for s in ((33, 257), (257, 65)))
    acc = a.double() @ b.double()
    residual = (-acc + torch.randint(-3, 4, acc.shape)).to(F32)
    assert torch.equal(co.gemm_residual(a, b, residual), (acc + residual).to(BF16))
    assert torch.equal(co.gemm(a, b, out_dtype=F32), acc.float())


@pytest.mark.parametrize("out_dtype", [F16, BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_d_in_any_dtype(dtype, out_dtype):
    a, b, inputs = arguments(co.gemm_bias_gelu, (31, 33, 65), dtype)
    inputs["bias"] = inputs["bias"].float()
    d = co.gemm_bias_gelu(a, b, **inputs, out_dtype=out_dtype)
    assert d.dtype == out_dtype
    assert_accurate(d, co.gemm_bias_gelu, a, b, inputs)
    out = torch.full_like(d, math.nan)
    assert co.gemm_bias_gelu(a, b, **inputs, out=out) is out
    assert torch.equal(out, d)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_through_as_in_pytorch(value):
    a, b, bias = matrix(5, 8, BF16), matrix(8, 6, BF16), torch.zeros(6, dtype=BF16)
    bias[2], a[3, 1] = value, value
    for op in (co.gemm_bias, co.gemm_bias_relu):
        wanted = COMPOSED[op](a.float(), b.float(), bias.float()).to(BF16)
        assert torch.equal(op(a, b, bias).nan_to_num(7.0), wanted.nan_to_num(7.0))
        assert torch.equal(op(a, b, bias).isnan(), wanted.isnan())


def test_pairs_of_an_odd_number_of_columns_are_refused_before_anything_runs():
    @co.epilogue
    def swapped(acc):
        return co.swap_pairs(acc)

    a, b = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8, 5, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="N must be even"):
        co.gemm(a, b, epilogue=swapped)
    found = co.gemm(a, b[:, :4], epilogue=swapped)
    assert torch.equal(found, co.gemm(a, b[:, :4])[:, [1, 0, 3, 2]])


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (5, 6, 0), (0, 0, 0)])
def test_empty_extents(shape):
    m, n, k = shape
    a, b = torch.zeros(m, k, dtype=BF16), torch.zeros(k, n, dtype=BF16)
    bias, residual = torch.randn(n).to(BF16), torch.randn(m, n).to(BF16)
    d = co.gemm_bias_relu_residual(a, b, bias, residual)
    assert d.shape == (m, n)
    # With K = 0 the accumulator is zero, and its epilogue is not.
    assert torch.equal(d, (bias.double().relu().expand(m, n) + residual.double()).to(BF16))
    out = torch.full((m, n), math.nan, dtype=BF16)
    assert torch.equal(co.gemm_bias_relu_residual(a, b, bias, residual, out=out), d)


# ---- Epilogues of one's own ---------------------------------------------------------------------------------------


def everything_inputs(m=9, n=14):
    return {"bias": torch.randn(n), "scale": torch.randn(m), "residual": torch.randn(m, n).to(F16), "alpha": -0.75}


def everything_exact(a, b, bias, scale, residual, alpha):
    pre = (a.double() @ b.double()) * scale.double().reshape(*a.shape[:-1], 1) + bias.double()
    d = pre.relu() * alpha + residual.double()
    return {"d": d, "pre": pre, "row_square": d.square().sum(-1), "col_max": pre.flatten(0, -2).amax(0)}


@pytest.mark.parametrize("alpha", [2, 0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=F16)], ids=repr)
def test_a_scalar_is_a_number_or_a_tensor_without_dimensions(alpha):
    a, b, inputs = matrix(9, 20, BF16), matrix(20, 14, BF16), everything_inputs() | {"alpha": alpha}
    wanted = everything_exact(a, b, **inputs | {"alpha": float(alpha)})["d"]
    assert error(co.gemm(a, b, epilogue=everything, **inputs).d, wanted) <= torch.finfo(BF16).eps


@co.epilogue
def tallied(acc):
    return {"d": acc, "count": co.e.sum(acc > 0, dim=1), "index": co.e.argmax(acc, dim=1)}


def test_outputs_may_be_called_as_methods_of_tuples_are():
    a, b = matrix(3, 20, BF16), matrix(20, 14, BF16)
    found = co.gemm(a, b, epilogue=tallied, out_dtype=F32)
    assert found.count is found[1]
    assert found.index is found[2]
    usual = Outputs(("d", "pre"), (1, 2))
    assert (usual.count(2), usual.index(2)) == (1, 1)


# ---- Shapes, slices, outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (2, 1, 3), (0, 3), (1,)])
def test_leading_dimensions_are_folded_and_come_back(batch):
    a, b = torch.randn(*batch, 20).to(BF16), matrix(20, 14, BF16)
    inputs = {"bias": torch.randn(14), "scale": torch.randn(batch), "residual": torch.randn(*batch, 14), "alpha": 1.5}
    result = co.gemm(a, b, epilogue=everything, **inputs)
    assert result.d.shape == (*batch, 14)
    assert result.row_square.shape == batch
    assert result.col_max.shape == (14,)
    if math.prod(batch):
        wanted = everything_exact(a, b, **inputs) if batch else None
        for name in wanted or ():
            assert error(getattr(result, name), wanted[name]) <= torch.finfo(BF16).eps
    out = torch.full((*batch, 14), math.nan, dtype=BF16)
    assert co.gemm(a, b, epilogue=everything, **inputs, out=out).d is out
    assert torch.equal(out, result.d)


def test_slices_and_transposed_views_leave_their_surroundings_alone():
    whole = torch.full((40, 50), math.nan, dtype=BF16)
    memory = torch.full((30, 70), math.nan, dtype=BF16)
    a, b, inputs = arguments(co.gemm_bias_relu, (12, 17, 23))
    memory[3:15, 5:28] = a
    wanted = co.gemm_bias_relu(a, b, **inputs)
    for out in (whole[7:19, 11:28], whole[20:37, 30:42].t()):
        assert co.gemm_bias_relu(memory[3:15, 5:28], b, **inputs, out=out) is out
        assert torch.equal(out, wanted)
    assert whole.isfinite().sum() == 2 * wanted.numel()


# ---- Errors -------------------------------------------------------------------------------------------------------


A, B, BIAS = torch.zeros(4, 8, dtype=BF16), torch.zeros(8, 6, dtype=BF16), torch.zeros(6, dtype=BF16)
TILE = torch.zeros(4, 6, dtype=BF16)
GRAD = torch.zeros(6, requires_grad=True)
ERRORS = {
    "nothing given": (lambda: co.gemm_bias(A, B), TypeError, r"^gemm_bias takes \(a, b, bias\): bias is missing$"),
    "one too many": (lambda: co.gemm_bias(A, B, BIAS, TILE), TypeError, r"^gemm_bias takes .*: 4 were given$"),
    "an unknown name": (lambda: co.gemm_bias(A, B, BIAS, beta=1), TypeError, r"beta is unknown$"),
    "twice": (lambda: co.gemm_bias(A, B, BIAS, bias=BIAS), TypeError, r"bias is given twice$"),
    "gemm with an input": (lambda: co.gemm(A, B, bias=BIAS), TypeError, r"^gemm takes \(a, b\): .* \(pass an epi"),
    "not an epilogue": (lambda: co.gemm(A, B, epilogue=F.relu), TypeError, r"decorated with @cutlass_ops\.epilogue"),
    "B as NumPy": (
        lambda: co.gemm(A, A.float().numpy()),
        TypeError,
        r"^b must be a torch\.Tensor, not ndarray: pass torch\.from_dlpack\(b\)$",
    ),
    "a gradient and out": (lambda: co.gemm_bias(A, B, GRAD, out=TILE), ValueError, r"^bias requires grad.*no_grad"),
}


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_the_argument_and_say_what_to_do(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("alpha", [1e39, -3.4028236e38, torch.tensor(1e39, dtype=torch.float64), 10**40], ids=repr)
def test_a_scalar_that_would_be_infinite_is_refused(alpha):
    inputs = everything_inputs(4, 6) | {"alpha": alpha}
    with pytest.raises(
        ValueError, match=r"^alpha is .*, beyond FP32's range: pass a number up to 3\.4e38, or math\.inf"
    ):
        co.gemm(A, B, epilogue=everything, **inputs)
    for finite in (float("inf"), 3.4028235e38, float("nan")):
        co.gemm(A, B, epilogue=everything, **inputs | {"alpha": finite})


def test_a_refused_call_writes_nothing():
    out = torch.full((4, 6), 7.0, dtype=BF16)
    with pytest.raises(ValueError, match="bias"):
        co.gemm_bias(A, B, BIAS[:5], out=out)
    assert (out == 7).all()


# ---- What ops say of themselves -----------------------------------------------------------------------------------


def test_an_op_describes_itself():
    assert repr(co.gemm_bias_relu_residual) == "<op gemm_bias_relu_residual(a, b, bias, residual)>"
    found = list(inspect.signature(co.gemm_bias_residual).parameters)
    assert found == ["a", "b", "bias", "residual", "groups", "out", "out_dtype", "math"]
    assert "D = relu(A @ B + bias)." in co.gemm_bias_relu.__doc__
    for op in named.NAMED:
        for name in ("Parameters", "Returns", "Raises", *(i.name for i in op.graph.inputs)):
            assert name in op.__doc__
    assert {op.name for op in named.NAMED} == {op.__name__ for op in COMPOSED}


SPEC = co.KernelSpec(
    a="bf16.row",
    b="bf16.col",
    d="f32.row",
    epilogue=everything,
    outputs={"pre": "bf16.col"},
    config=co.Sm80Config(co.ThreadblockShape(64, 64, 32), co.WarpShape(32, 32, 32)),
)


def test_an_exact_kernel_needs_a_device():
    kernel = kernels.Kernel(SPEC, None)
    with pytest.raises(co.errors.NoDeviceError, match=r"a is on cpu, and .* runs only on CUDA devices"):
        kernel(matrix(9, 20, BF16), matrix(20, 14, BF16), **everything_inputs())
    with pytest.raises(TypeError, match="alpha is missing"):
        kernel(A, B, BIAS, BIAS, TILE)


def test_a_device_that_no_kernel_serves_is_said_to_be_that(monkeypatch):
    monkeypatch.setattr(cold, "device_of", lambda device: Device((9, 0), 132))
    monkeypatch.setattr(cold.dispatch, "decide", lambda *_: None)
    with pytest.raises(
        co.errors.UnsupportedError, match=r"no kernel supports gemm_bias with a bf16\.row.* capability 9\.0"
    ):
        co.gemm_bias.plan(A, B, BIAS)


@pytest.mark.parametrize(
    ("capability", "says"),
    [
        ((7, 0), "this device is not supported"),
        ((7, 5), "this device is not supported"),
        ((8, 7), "this device is not supported"),
        ((10, 0), "newer devices are not supported yet"),
        ((12, 0), "newer devices are not supported yet"),
    ],
)
def test_a_device_of_another_generation_says_what_there_is_and_what_to_do(monkeypatch, capability, says):
    monkeypatch.setattr(cold, "device_of", lambda device: Device(capability, 40, "Some GPU"))
    with pytest.raises(co.errors.UnsupportedError) as error:
        co.gemm_bias.plan(A, B, BIAS)
    major, minor = capability
    message = str(error.value)
    assert "no kernel supports gemm_bias with a bf16.row" in message
    assert f"compute capability {major}.{minor} (sm_{major}{minor}): there are kernels for" in message
    assert f"sm_80, sm_86, sm_89 and sm_90, and {says}. Use PyTorch's operation on this device, or" in message


@pytest.mark.parametrize("device", ["xpu:0", "mps", "hpu"])
def test_a_device_that_is_neither_cuda_nor_the_cpu(device):
    with pytest.raises(
        co.errors.NoDeviceError, match=rf"tensors are on {device}: .* Move the tensors, or use PyTorch's operation$"
    ):
        device_of(torch.device(device))


# ---- What is broadcast ---------------------------------------------------------------------------------------------


def test_what_is_broadcast_is_what_its_full_shape_would_be_and_copies_are_counted():
    a, b = torch.randn(6, 16).to(BF16), torch.randn(16, 10).to(BF16)
    bias, row, column = torch.randn(10).to(BF16), torch.randn(1, 10).to(BF16), torch.randn(6, 1).to(BF16)
    op = co.gemm_bias_residual
    before = op.copied_inputs
    for residual in (row, column, row.expand(6, 10), column.expand(6, 10)):
        wanted = op(a, b, bias, residual.expand(6, 10).contiguous())
        assert torch.equal(op(a, b, bias, residual), wanted)
        assert torch.equal(op(a, b, bias[None], residual), wanted)
    assert op.copied_inputs == before + 8
    assert torch.equal(op(a, b, bias[:1].expand(10), row), op(a, b, bias[:1].repeat(10), row.repeat(6, 1)))
    assert op.copied_inputs == before + 10
    # In its place nothing is written: what is read for it is a copy.
    with pytest.raises(ValueError, match="out"):
        op(a, b, bias, row, out=row)


def test_names_that_only_cpp_would_mind_are_served():
    @co.epilogue
    def named(acc, c: co.Row, d: co.Col, n: co.Scalar, new: co.Tile):
        return {"d": acc * c + d * n + new, "k": co.sum(acc, dim=1)}

    a, b = torch.randn(3, 8).to(BF16), torch.randn(8, 5).to(BF16)
    c, d, new = torch.randn(5), torch.randn(3), torch.randn(3, 5)
    found = co.gemm(a, b, epilogue=named, c=c, d=d, n=0.5, new=new, out_dtype=F32)
    acc = a.float() @ b.float()
    torch.testing.assert_close(found.d, acc * c + d[:, None] * 0.5 + new)
    torch.testing.assert_close(found.k, acc.sum(1))
    assert torch.equal(co.gemm(a, b, epilogue=named, c=c, d=d, n=0.5, new=new, out={"k": found.k}).k, found.k)


@pytest.mark.parametrize("name", ["s", "c", "at"])
def test_a_reduction_is_written_to_contiguous_vectors(name):
    @co.epilogue
    def reduced(acc):
        return {"d": acc, "s": co.e.sum(acc, dim=1), "c": co.e.sum(acc, dim=0), "at": co.e.argmax(acc, dim=1)}

    a, b = torch.randn(8, 16).bfloat16(), torch.randn(16, 32).bfloat16()
    sizes = {"s": (8, torch.float32), "c": (32, torch.float32), "at": (8, torch.int32)}
    out = {"d": torch.empty(8, 32).bfloat16()} | {k: torch.empty(n, dtype=dtype) for k, (n, dtype) in sizes.items()}
    co.gemm(a, b, epilogue=reduced, out=out)
    out[name] = out[name].new_empty(2 * len(out[name]))[::2]
    with pytest.raises(ValueError, match=rf"^out\['{name}'\] has stride 2, and must be contiguous"):
        co.gemm(a, b, epilogue=reduced, out=out)
