"""Warm calls: the second call of a kind goes straight to its kernel, however its outputs are given."""

import math
from types import SimpleNamespace

import pytest
import torch
from fake_device import fake_device
from signatures import A100

import cutlass_ops as co
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import gated, gemm, ops, plan

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
M, N, K = 48, 520, 264


@co.epilogue
def several(acc, bias: co.Row, alpha: co.Scalar):
    """Two tiles and a reduction."""
    pre = acc * alpha + bias
    return {"d": co.relu(pre), "pre": pre, "top": co.max(pre, dim=0)}


def matrix(rows, columns):
    return torch.randn(rows, columns).to(BF16) / 8


A, B, BIAS = matrix(M, K), matrix(N, K).t(), torch.randn(N)
SHAPES = {"d": ((M, N), BF16), "pre": ((M, N), BF16), "top": ((N,), F32)}
# What is given: nothing, D alone, by name, and every choice of names.
FORMS = ["nothing", "tensor", "d", "pre", "top", "d pre", "d top", "pre top", "d pre top"]


def empty(name):
    shape, dtype = SHAPES[name]
    return torch.full(shape, math.nan, dtype=dtype)


def given(form):
    if form == "nothing":
        return None
    return empty("d") if form == "tensor" else {name: empty(name) for name in form.split()}


def counted(monkeypatch):
    """Return the list that grows with each tensor that a plan makes."""
    made, new = [], plan.new_tensor
    monkeypatch.setattr(plan, "new_tensor", lambda *x: made.append(x) or new(*x))
    return made


def wanted():
    pre = A.double() @ B.double() * 0.5 + BIAS.double()
    return {"d": pre.relu(), "pre": pre, "top": pre.max(0).values}


@pytest.fixture
def op(device):
    return ops.Op("several", several)


@pytest.mark.parametrize("form", FORMS)
def test_the_second_call_is_warm_and_allocates_what_is_not_given(op, device, form, monkeypatch):
    op(A, B, BIAS, 0.5, out=given(form))
    assert (op.served_warm, len(device.launches)) == (0, 1)
    out, made = given(form), counted(monkeypatch)
    monkeypatch.setattr(ops, "check_call", None)  # which looks at a call
    found = op(A, B, BIAS, 0.5, out=out)
    assert (op.served_warm, op.refused_warm, len(device.launches)) == (1, 0, 2)
    by_name = {"d": out} if isinstance(out, torch.Tensor) else out or {}
    assert len(made) == len(SHAPES) - len(by_name)
    for name, x in wanted().items():
        result = getattr(found, name)
        assert name not in by_name or result is by_name[name]
        assert (tuple(result.shape), result.dtype) == SHAPES[name]
        torch.testing.assert_close(result.double(), x, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("form", ["nothing", "tensor", "d"])
def test_an_op_of_one_output_takes_a_mapping_warm_as_well(form):
    op = ops.Op("relu", builtin.bias_relu)
    for _ in range(3):
        out = given(form)
        found = op(A, B, BIAS, out=out)
        assert out is None or found is (out if form == "tensor" else out["d"])
        torch.testing.assert_close(found.double(), (A.double() @ B.double() + BIAS).relu(), rtol=1e-2, atol=1e-2)
    assert (op.served_warm, op.refused_warm) == (2, 0)


@pytest.mark.parametrize(("epilogue", "inputs"), [(builtin.identity, ()), (several, (BIAS, 0.5))])
def test_a_warm_launch_visits_tiles_in_the_order_of_a_cold_one(device, epilogue, inputs):
    """Raster and swizzle are the kernel's by their position alone."""
    config, order = co.Sm90Config(ThreadblockShape(128, 128, 64)), co.TileOrder("along_n", swizzle=4)
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "inputs": {"bias": "f32"} if inputs else {}}
    kernel = co.build(co.KernelSpec(**types, epilogue=epilogue, config=config, order=order))
    for _ in range(2):
        kernel(A, B, *inputs)
    assert kernel.served_warm == 1
    assert [(launch.raster, launch.swizzle) for launch in device.launches] == [order.numbers] * 2 == [(2, 4)] * 2


def test_what_an_output_was_given_in_once_is_not_what_others_get(op):
    op(A, B, BIAS, 0.5, out={"top": torch.empty(N, dtype=F16)})
    for _ in range(2):
        assert op(A, B, BIAS, 0.5).top.dtype == F32
    op(A, B, BIAS, 0.5, out={"d": torch.empty(M, N)})
    assert op(A, B, BIAS, 0.5).pre.dtype == BF16
    found = op(A, B, BIAS, 0.5, out={"pre": torch.empty(N, M, dtype=BF16).t()})
    assert found.pre.stride() == (1, M)
    assert op(A, B, BIAS, 0.5).pre.stride() == (N, 1)


def shifted(x):
    """Place a matrix one element after an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("first", ["aligned", "misaligned"])
def test_aligned_and_misaligned_operands_of_one_shape_have_kernels_of_their_own(device, first):
    """The misaligned ones' kernel would take both, and is slower."""
    op, odd = ops.Op("gemm", builtin.identity), (shifted(A), shifted(B.t()).t())
    calls = {"aligned": (A, B), "misaligned": odd}
    for name in sorted(calls, key=lambda name: name != first):
        op(*calls[name])
    device.launches.clear()
    for _ in range(2):
        for name in ("misaligned", "aligned", "aligned", "misaligned"):
            op(*calls[name])
    assert (op.served_warm, op.refused_warm) == (8, 1)
    served = [launch.spec for launch in device.launches]
    aligned, misaligned = op.plan(A, B).spec, op.plan(*odd).spec
    assert aligned != misaligned
    assert served == 2 * [misaligned, aligned, aligned, misaligned]


WRONG = {
    "an unknown name": ({"e": empty("d")}, None, ValueError, "out names e: the outputs are d, pre, top"),
    "D's dtype": ({"d": empty("d")}, F32, TypeError, "out is torch.bfloat16, and out_dtype asks for torch.float32"),
    "a gradient": ({"d": empty("d").requires_grad_()}, None, ValueError, "out requires grad"),
    "no tensor": ({"pre": 1.0}, None, TypeError, r"out\['pre'\] must be a torch.Tensor"),
    "neither": ([empty("d")], None, TypeError, "out must be a tensor or a mapping"),
}


@pytest.mark.parametrize(("out", "out_dtype", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_after_warm_calls_as_before(op, out, out_dtype, kind, message):
    for form in ("nothing", "d", "pre"):
        op(A, B, BIAS, 0.5, out=given(form), out_dtype=out_dtype if form != "d" else None)
    with pytest.raises(kind, match=message):
        op(A, B, BIAS, 0.5, out=out, out_dtype=out_dtype)


@co.epilogue
def weighted(acc, weight: co.Col):
    return acc * weight


def test_a_row_of_two_dimensions_is_served_warm(op, device):
    op(A, B, BIAS[None], 0.5)
    found = op(A, B, BIAS[None], 0.5)
    assert (op.served_warm, op.refused_warm, len(device.launches)) == (1, 0, 2)
    assert (found.d.double() - wanted()["d"]).abs().max() < 0.05


def test_scales_of_two_dimensions_are_served_warm(device):
    a, b = (co.Scaled.quantize(matrix(64, 128), torch.float8_e4m3fn) for _ in range(2))
    rows = co.Scaled(a.values, torch.rand(64, 1)), co.Scaled(b.values.t(), torch.rand(1, 64))
    first, op = co.gemm(*rows), gemm.op_for(None, "dense", (True, True, False))
    before = op.served_warm, op.refused_warm
    assert torch.equal(co.gemm(*rows), first)
    assert (op.served_warm, op.refused_warm) == (before[0] + 1, before[1])
    assert len(device.launches) == 2


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_scales_of_one_element_or_of_one_block_are_served_warm(device, shape):
    a, b = (matrix(64, 128).to(torch.float8_e4m3fn) for _ in range(2))
    scales = torch.rand(64, 1) if len(shape) == 2 else torch.tensor(0.5), torch.full(shape, 2.0)
    call = lambda: co.gemm(co.Scaled(a, scales[0]), co.Scaled(b.t(), scales[1]))  # noqa: E731
    exact = scales[0].double() * (a.double() @ b.double().t()) * 2
    for _ in range(2):
        assert (call().double() - exact).norm() <= 0.01 * exact.norm()


def test_a_column_of_another_shape_is_refused_warm_as_before(device, monkeypatch):
    op, batches = ops.Op("weighted", weighted), torch.stack([A, A])
    flat, weights = torch.ones(M), torch.ones(2, M)
    for a, x in ((A, flat), (A, flat[:, None]), (batches, weights), (batches, weights[..., None])):
        op(a, B, x)
        served = op.served_warm
        op(a, B, x)
        assert op.served_warm == served + 1
    served = op.served_warm
    monkeypatch.setattr(plan.Plan, "run", lambda *_: pytest.fail("a kernel takes it"))
    for a, x in ((A, flat[None]), (batches, weights.flatten()[None]), (A, flat.view(2, -1))):
        with pytest.raises(ValueError, match="weight has shape"):
            op(a, B, x)
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor"):
        op(A, B, 1.0)
    assert op.served_warm == served


@pytest.mark.parametrize("alpha", [1e39, -1e39, 10**39])
def test_numbers_beyond_fp32_are_refused_warm_as_before(op, alpha, device, monkeypatch):
    """A kernel would take them for infinity, which may be given."""
    op(A, B, BIAS, math.inf)
    op(A, B, BIAS, math.inf)
    assert (op.served_warm, len(device.launches)) == (1, 2)
    monkeypatch.setattr(plan.Plan, "run", None)
    with pytest.raises(ValueError, match="beyond FP32's range"):
        op(A, B, BIAS, alpha)


@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_a_warm_call_loses_no_gradient(op, name, device):
    arguments = {"a": A, "b": B, "bias": BIAS}
    for _ in range(2):
        op(*arguments.values(), 0.5)
    arguments[name] = arguments[name].detach().requires_grad_()
    assert op(*arguments.values(), 0.5)[0].grad_fn is not None
    before = op.served_warm
    with torch.no_grad():
        assert op(*arguments.values(), 0.5)[0].grad_fn is None
    assert op.served_warm == before + 1
    device.launches.clear()  # its tensors know the op, and programs find an op that is still there


def test_each_device_has_plans_of_its_own(op, monkeypatch):
    for index in (0, 1):
        monkeypatch.setattr(torch.Tensor, "get_device", lambda x, index=index: index)
        before = op.served_warm
        op(A, B, BIAS, 0.5)
        assert op.served_warm == before
        op(A, B, BIAS, 0.5)
        assert op.served_warm == before + 1
    assert len(op._plans) == 2


@co.epilogue
def with_sums(acc):
    """One output of each kind of shape."""
    return {"d": acc, "rows": co.e.sum(acc, dim=1), "columns": co.e.sum(acc, dim=0)}


@pytest.mark.parametrize("missing", [None, "_on_cuda", "_current_device"])
@pytest.mark.parametrize("current", [0, 1])
def test_only_the_current_device_has_the_quick_function(current, missing, monkeypatch):
    monkeypatch.setattr(plan, "_on_cuda", lambda *given: ("at once", *given))
    monkeypatch.setattr(plan, "_current_device", lambda: current)
    if missing:
        monkeypatch.setattr(plan, missing, None)
    usual = SimpleNamespace(is_cuda=True, get_device=lambda: 0, new_empty_strided=lambda *_, dtype: ("usual", dtype))
    assert plan.new_tensor(usual, (2, 3), (3, 1), BF16)[0] == ("usual" if current or missing else "at once")


def test_workspace_is_new_at_each_call(device):
    """A kept one would be the memory of a captured graph as well: cutlass_ops/run/README.md."""
    device.workspace = 1000
    op = ops.Op("with_sums", with_sums)
    for _ in range(3):
        op(A, B)
    spaces = [launch.workspace for launch in device.launches]
    assert all((x.shape, x.stride(), x.dtype) == ((1000,), (1,), torch.uint8) for x in spaces)
    assert len({x.data_ptr() for x in spaces}) == 3


# ---- One exact kernel ----------------------------------------------------------------------------------------------


def spec(pre="bf16.row", d="bf16.row"):
    config = co.Sm80Config(ThreadblockShape(64, 64, 32), WarpShape(32, 32, 32))
    types = {"a": "bf16.row", "b": "bf16.col", "d": d, "inputs": {"bias": "f32"}, "outputs": {"pre": pre}}
    return co.KernelSpec(**types, epilogue=several, config=config)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("batch", [(M,), (3, 16)])
def test_an_exact_kernels_outputs_have_its_own_majors_and_dtypes(batch):
    kernel = co.build(spec(pre="f32.col", d="f16.col"))
    cold, warm = (kernel(A.view(*batch, K), B, BIAS, 0.5) for _ in range(2))
    assert kernel.served_warm == 1
    for name in ("d", "pre", "top"):
        first, second = getattr(cold, name), getattr(warm, name)
        assert (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
        assert torch.equal(first, second)
    assert (warm.d.dtype, warm.pre.dtype) == (F16, F32)


# ---- What would serve a call ---------------------------------------------------------------------------------------


def test_to_plan_a_call_asks_for_nothing(op, device):
    device.closed = True
    choice = op.plan(A, B, BIAS, alpha=0.5)
    assert (device.needed, device.guessed, device.loaded, device.launches) == ([], [], {}, [])
    device.closed = False
    op(A, B, BIAS, 0.5)
    (launch,) = device.launches
    assert choice.spec == launch.spec
    assert choice.config == launch.spec.config
    assert choice.order.numbers == (launch.raster, launch.swizzle)
    assert choice.peer is None


# ---- Several ops in one op's place ---------------------------------------------------------------------------------


@pytest.mark.usefixtures("session")
def test_two_gemms_are_warm_too(monkeypatch):
    with fake_device(monkeypatch, A100) as device:
        op, up = gated.swiglu_op(None), matrix(N, K).t()
        before = op.served_warm
        for out in (None, None, {"d": empty("d")}, {"d": empty("d")}):
            op(A, B, up, out=out)
        # A given output's dtype is that of one that is not asked for otherwise: of a key of its own.
        assert op.served_warm == before + 2
        assert len(device.launches) == 8
