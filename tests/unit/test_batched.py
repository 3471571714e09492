"""Batches: a GEMM for each, of operands whose leading dimensions broadcast, in one launch where a kernel can."""

import re
from contextlib import nullcontext

import pytest
import torch
from fake_device import fake_device
from hypothesis import example, given
from hypothesis import strategies as st
from signatures import A100, H100

import cutlass_ops as co
from cutlass_ops.choose import dispatch
from cutlass_ops.declare.form import BATCHED, DENSE
from cutlass_ops.declare.problem import Problem
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.operand import batches
from cutlass_ops.operand.call import call_at, check_call, signature_of
from cutlass_ops.run import backward, ops, requests
from tests.strategies import PATIENT

BF16 = torch.bfloat16


@co.epilogue
def mixed(acc, bias: co.Row, scale: co.Col, residual: co.Tile, factor: co.Scalar):
    return co.e.relu(acc * scale + bias) * factor + residual


@co.epilogue
def summed(acc):
    return {"d": acc, "of_rows": co.e.sum(acc, dim=1), "of_columns": co.e.max(acc, dim=0)}


@co.epilogue
def dropped(acc, seed: co.Integer):
    return co.e.where(co.e.uniform(seed) < 0.5, acc, 0.0)


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as found:
        yield found


def normal(*shape, dtype=BF16):
    return torch.randn(*shape).to(dtype)


def exact(a, b):
    return torch.matmul(a.double(), b.double())


def close(found, wanted):
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.double(), wanted.to(found.dtype).double(), rtol=2**-6, atol=2**-4)


# ---- Shapes ----------------------------------------------------------------------------------------------------------

SHAPES = {
    "bmm": ((3, 5, 16), (3, 16, 8)),
    "one batch": ((1, 5, 16), (1, 16, 8)),
    "two dimensions": ((2, 3, 5, 16), (2, 3, 16, 8)),
    "three dimensions": ((2, 2, 3, 5, 16), (2, 2, 3, 16, 8)),
    "a shared": ((5, 16), (3, 16, 8)),
    "b shared by some": ((2, 3, 5, 16), (3, 16, 8)),
    "a shared by some": ((3, 5, 16), (2, 3, 16, 8)),
    "both broadcast": ((2, 1, 5, 16), (1, 3, 16, 8)),
    "one row": ((3, 1, 16), (3, 16, 8)),
    "one column": ((3, 5, 16), (3, 16, 1)),
    "odd": ((3, 5, 7), (3, 7, 9)),
    "no batch": ((0, 5, 16), (0, 16, 8)),
    "no rows": ((3, 0, 16), (3, 16, 8)),
    "K of 0": ((3, 5, 0), (3, 0, 8)),
}


@pytest.mark.parametrize(("a", "b"), SHAPES.values(), ids=SHAPES)
def test_leading_dimensions_broadcast_as_those_of_matmul(a, b):
    a, b = normal(*a), normal(*b)
    close(co.gemm(a, b), exact(a, b))


def test_a_single_b_folds_all_of_a_into_rows():
    call = check_call(builtin.identity.graph, normal(2, 3, 16), normal(16, 8), {}, None, None)
    assert (call.arguments.form, call.problem) == (DENSE, Problem(6, 8, 16))


def test_permuted_views_are_read_where_they_lie():
    tokens = normal(2, 5, 3, 16)  # (sequences, tokens, heads, K)
    q, k = tokens.transpose(1, 2), normal(2, 7, 3, 16).transpose(1, 2)
    call = check_call(builtin.identity.graph, q, k.mT, {}, None, None)
    assert call.arguments.a.data_ptr() == tokens.data_ptr()
    assert call.arguments.a.stride() == q.stride()
    close(co.gemm(q, k.mT), exact(q, k.mT))


def test_more_dimensions_are_folded_where_one_stride_leads_through_them():
    a, b = normal(2, 3, 4, 5, 16), normal(4, 16, 8)
    call = check_call(builtin.identity.graph, a, b, {}, None, None)
    assert call.arguments.is_folded
    assert (call.arguments.a.shape, call.arguments.b.shape) == ((6, 4, 5, 16), (6, 4, 16, 8))
    assert call.arguments.b.stride()[:2] == (0, 128)
    a = normal(4, 3, 2, 5, 16).permute(2, 1, 0, 3, 4)
    message = "need 3 strides, and kernels know 2: pass a.expand((2, 3, 4, 5, 16)).contiguous()"
    with pytest.raises(ValueError, match=re.escape(message)):
        co.gemm(a, b)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ((3, 5, 16), (2, 16, 8), "batches, which must be equal or 1"),
        ((2, 3, 5, 16), (2, 16, 8), "batches, which must be equal or 1"),
        ((3, 5, 16), (3, 8, 16), "b looks like weights of shape (..., N, K): pass b.mT"),
        ((3, 5, 16), (3, 17, 8), "a must be (..., M, K) and b (..., K, N) with the same K"),
        ((16,), (3, 16, 8), "a must be (..., M, K) and b (..., K, N) with the same K"),
    ],
)
def test_operands_that_do_not_fit_are_refused(a, b, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        co.gemm(normal(*a), normal(*b))


# ---- Epilogues -------------------------------------------------------------------------------------------------------

# Shapes that are given, each with the one by which PyTorch would broadcast it.
ROWS = {(8,): (8,), (2, 3, 8): (2, 3, 1, 8), (3, 1, 8): (3, 1, 8), (2, 1, 1, 8): (2, 1, 1, 8), (3, 8): (3, 1, 8)}
COLUMNS = {(5,): (5, 1), (5, 1): (5, 1), (2, 3, 5): (2, 3, 5, 1), (3, 5, 1): (3, 5, 1), (2, 1, 5): (2, 1, 5, 1)}
TILES = [(5, 8), (2, 3, 5, 8), (3, 5, 8), (2, 1, 5, 8), (3, 5, 1), (1, 1, 1, 8)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("row", ROWS, ids=str)
@pytest.mark.parametrize("column", COLUMNS, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_inputs_are_shared_or_have_batches(row, column, tile):
    a, b = normal(2, 3, 5, 16), normal(2, 3, 16, 8)
    bias, scale, residual = normal(*row), normal(*column), normal(*tile)
    found = co.gemm(a, b, epilogue=mixed, bias=bias, scale=scale, residual=residual, factor=0.5)
    bias, scale = bias.double().reshape(ROWS[row]), scale.double().reshape(COLUMNS[column])
    close(found, torch.relu(exact(a, b) * scale + bias) * 0.5 + residual)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("bias", (2, 8)), ("bias", (2, 3, 9)), ("scale", (2, 5)), ("residual", (8,)), ("residual", (2, 5, 8))],
)
def test_an_input_that_fits_no_batch_is_refused(name, shape):
    given = {"bias": normal(8), "scale": normal(5), "residual": normal(5, 8), name: normal(*shape)}
    with pytest.raises(ValueError, match=rf"^{name} has shape .*for a result of shape \(2, 3, 5, 8\)"):
        co.gemm(normal(2, 3, 5, 16), normal(2, 3, 16, 8), epilogue=mixed, factor=1.0, **given)


def test_epilogues_that_concern_one_gemm_are_computed_batch_by_batch():
    a, b = normal(2, 3, 5, 16), normal(3, 16, 8)
    found = co.gemm(a, b, epilogue=summed)
    assert (found.of_rows.shape, found.of_columns.shape) == ((2, 3, 5), (2, 3, 8))
    close(found.of_rows, exact(a, b).sum(-1).float())
    close(found.of_columns, exact(a, b).amax(-2).float())
    found = requests.called(composed.rms_norm)(a, b, 1e-5)
    close(found, exact(torch.nn.functional.rms_norm(a.double(), (16,), eps=1e-5), b))
    b, up = normal(3, 8, 16).mT, normal(3, 8, 16).mT
    found = requests.called(composed.swiglu)(a, b, up)
    close(found, torch.nn.functional.silu(exact(a, b)) * exact(a, up))


def test_random_numbers_would_repeat_in_every_batch():
    with pytest.raises(ValueError, match="the same for every batch: call the op for each batch with a seed of its own"):
        co.gemm(normal(3, 5, 16), normal(3, 16, 8), epilogue=dropped, seed=1)


# ---- Outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (normal(5, 8).expand(3, 5, 8), "with which elements share memory"),
        (normal(3, 8, 5), "it must have shape (3, 5, 8)"),
        (normal(5, 8), "it must have shape (3, 5, 8)"),
    ],
)
def test_a_d_that_batches_cannot_write_is_refused(out, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        co.gemm(normal(3, 5, 16), normal(3, 16, 8), out=out)


def test_heads_of_one_buffer_may_be_read_and_written():
    packed = normal(2, 5, 3, 4, 16)  # (sequences, tokens, (q, k, out), heads, head)
    q, k, out = (packed[:, :, at].transpose(1, 2) for at in range(3))
    wanted = exact(q, k.mT)
    assert wanted.shape == (2, 4, 5, 5)
    a, b = q, normal(2, 4, 16, 16)
    wanted = exact(a, b)
    close(co.gemm(a, b, out=out), wanted)
    with pytest.raises(ValueError, match="out shares memory with a"):
        co.gemm(a, b, out=packed[:, :, 0].transpose(1, 2))


@PATIENT
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=3),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.integers(0, 20),
)
@example([(2, 7), (2, 8), (1, 9)], [1, 1, 2], 6)
@example([(1, 10), (3, 7)], [1, 3, 1], 14)
def test_memory_meets_where_an_element_is_in_both(levels, others, offset):
    buffer = torch.arange(200)
    x = buffer.as_strided([extent for extent, _ in levels], [stride for _, stride in levels])
    y = buffer.as_strided(others[: len(levels)], [stride for _, stride in levels], offset)
    shared = bool(set(x.flatten().tolist()) & set(y.flatten().tolist()))
    assert batches.is_nested(x) <= (len(set(x.flatten().tolist())) == x.numel())
    larger = buffer.as_strided(list(map(max, x.shape, y.shape)), x.stride())
    if batches.is_nested(larger):
        assert batches.meet(x, y) == shared
    else:
        assert batches.meet(x, y)


# ---- Kernels ---------------------------------------------------------------------------------------------------------


def signature_for(a, b, graph=builtin.identity.graph, device=H100, **inputs):
    return signature_of(check_call(graph, a, b, inputs, None, None), device)


def test_a_signature_says_that_there_are_batches_and_how_they_are_aligned():
    found = signature_for(normal(3, 64, 64), normal(3, 64, 64).mT)
    assert found.form == BATCHED
    assert (str(found.a), str(found.b), str(found.d)) == ("bf16.row", "bf16.col", "bf16.row")
    # Every batch has to lie as TMA needs it.
    apart = normal(3, 64 * 64 + 4).as_strided((3, 64, 64), (64 * 64 + 4, 64, 1))
    assert signature_for(apart, normal(3, 64, 64).mT).a.alignment == 4
    assert signature_for(normal(64, 64).expand(3, 64, 64), normal(3, 64, 64).mT).a.aligned


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("device", "n", "config"),
    [(H100, 64, Sm90Config), (H100, 63, Sm80Config), (A100, 64, Sm80Config), (A100, 63, Sm80Config)],
)
@pytest.mark.parametrize("problem", [(1000, 64, 64), (8, 2048, 2048), (100_000, 16, 16)], ids=str)
def test_a_legal_kernel_is_chosen(device, n, config, problem):
    count, m, k = problem
    call = call_at(mixed.graph, Problem(m, n, k, count), "bf16", "row", "row", form=BATCHED)
    found = dispatch.decide(signature_of(call, device), device, call.problem)
    assert isinstance(found.config, (config, SmallConfig))
    assert isinstance(found.config, config) or min(m, n) <= 64
    for spec in found.specs:
        assert spec.form == BATCHED
        assert legality.check(spec) == ()
    # The grid of a kernel that is not persistent counts to 65535.
    assert count <= 65535 or getattr(found.config, "schedule", None) != "warp_specialized"


def launches(device):
    return [launch.spec for launch in device.launches]


@pytest.mark.parametrize("a", [(3, 48, 64), (2, 3, 48, 64), (48, 64)], ids=str)
def test_a_call_is_one_launch_and_the_next_one_is_warm(device, a):
    a, b, bias = normal(*a), normal(3, 64, 32).contiguous(), normal(3, 32)
    wanted = torch.relu(exact(a, b) + bias.double()[..., None, :])
    for _ in range(2):
        close(co.gemm_bias_relu(a, b, bias if a.ndim != 4 else bias.expand(2, 3, 32)), wanted)
    (first, second) = launches(device)
    assert first == second
    assert first.form == BATCHED


def test_batches_apart_are_a_launch_each(device):
    op = ops.graph_op("apart", summed.graph)
    a, b = normal(3, 48, 64), normal(3, 64, 32)
    for _ in range(2):
        close(op(a, b).of_rows, exact(a, b).sum(-1).float())
    assert [spec.form for spec in launches(device)] == [DENSE] * 6
    assert op.warm_up(a, b) > 0
    with pytest.raises(co.errors.UnsupportedError, match="finishes the reductions of one GEMM"):
        op.plan(a, b)
    with pytest.raises(co.errors.UnsupportedError, match="a prepared launch is one kernel"):
        co.prepare_launch(op, a, b)


def test_batches_apart_are_refused_as_a_whole_before_one_is_computed(device):
    op = ops.graph_op("apart", summed.graph)
    a = torch.zeros(2 * 48 * 64 + 8, dtype=E4M3).as_strided(
        (2, 48, 64), (48 * 64 + 8, 64, 1)
    )  # the second is misaligned
    b, out = torch.zeros(32, 64, dtype=E4M3).t()[None], torch.full((2, 48, 32), 7.0).bfloat16()
    for call in (lambda: op(a, b, out=out), lambda: op.warm_up(a, b)):
        with pytest.raises(
            ValueError, match=r"strides \(3080, 64, 1\) and storage offset 0, and its lines do not begin at multi"
        ):
            call()
    assert not device.launches
    assert (out == 7).all()


def spec(config=None, **changes):
    config = config or Sm90Config(co.ThreadblockShape(128, 128, 64), co.ClusterShape(2, 1))
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "epilogue": mixed, "form": "batched"}
    return co.KernelSpec(config=config, **types | changes)


def test_an_exact_kernel_serves_its_form_alone(device):
    kernel = co.build(spec(epilogue=builtin.identity))
    a, b = normal(3, 48, 64), normal(3, 32, 64).mT
    close(kernel(a, b), exact(a, b))
    with pytest.raises(ValueError, match=re.escape("is batched: pass b (..., K, N)")):
        kernel(a, b[0])
    with pytest.raises(ValueError, match=re.escape("is dense: pass b (K, N)")):
        co.build(spec(epilogue=builtin.identity, form="dense"))(a, b)


def test_an_exact_kernel_allocates_columns_of_each_batch(device):
    kernel = co.build(spec(epilogue=builtin.identity, d="bf16.col"))
    a, b = normal(3, 48, 64), normal(3, 32, 64).mT
    for _ in range(2):
        found = kernel(a, b)
        assert found.stride() == (48 * 32, 1, 48)
        close(found, exact(a, b))


# ---- Gradients -------------------------------------------------------------------------------------------------------


class Rounded(torch.autograd.Function):
    """A value as a forward stores it: the derivative is that at the rounded value, and relu has a kink."""

    @staticmethod
    def forward(ctx, x):
        return x.to(BF16).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def by_pytorch(a, b, bias, scale, residual, factor):
    return torch.relu(Rounded.apply(torch.matmul(a, b)) * scale[..., None] + bias) * factor + residual


def gradients(function, tensors, weight):
    leaves = [x.detach().double().requires_grad_() if weight.dtype is torch.float64 else x for x in tensors]
    for x in leaves:
        x.grad = None
    (function(*leaves) * weight).sum().backward()
    return [x.grad for x in leaves]


def near(found, wanted):
    assert found.shape == wanted.shape
    error = (found.double() - wanted).norm() / wanted.norm().clamp(min=1e-6)
    assert error < 0.02, float(error)


@pytest.mark.parametrize(
    ("a", "b", "bias", "scale", "residual"),
    [
        ((3, 5, 16), (3, 16, 8), (8,), (5,), (5, 8)),
        ((2, 3, 5, 16), (2, 3, 16, 8), (2, 3, 1, 8), (2, 3, 5), (2, 3, 5, 8)),
        ((2, 3, 5, 16), (3, 16, 8), (3, 1, 8), (1, 5), (2, 1, 5, 8)),
        ((5, 16), (3, 16, 8), (1, 8), (3, 5), (3, 5, 1)),
        ((2, 1, 5, 16), (1, 3, 16, 8), (8,), (5,), (1, 1, 1, 8)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_gradients_are_those_of_matmul(a, b, bias, scale, residual, turned):
    b = normal(*b[:-2], b[-1], b[-2]).mT if turned else normal(*b)
    tensors = [x.requires_grad_() for x in (normal(*a), b, normal(*bias), normal(*scale), normal(*residual))]

    def ours(a, b, bias, scale, residual):
        return co.gemm(a, b, epilogue=mixed, bias=bias, scale=scale, residual=residual, factor=0.5)

    with torch.no_grad():
        weight = torch.randn(ours(*tensors).shape)
    found = gradients(ours, tensors, weight)
    wanted = gradients(lambda *x: by_pytorch(*x, 0.5), tensors, weight.double())
    for one, other in zip(found, wanted, strict=True):
        near(one, other)


@co.epilogue
def by_columns(acc, factor: co.Col):
    y = acc * factor
    return {"d": y, "squares": co.e.sum_square(y, dim=0), "most": co.e.max(y, dim=0), "log": co.e.logsumexp(y, dim=0)}


@pytest.mark.parametrize("lead", [(2, 3), (1,)])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_what_columns_give(lead, recompute):
    tensors = [x.requires_grad_() for x in (torch.randn(*lead, 5, 16), torch.randn(*lead, 16, 8), torch.randn(5))]
    weight = torch.randn(3, *lead, 8)

    def ours(a, b, factor):
        with co.recompute() if recompute else nullcontext():
            return torch.stack(co.gemm(a, b, epilogue=by_columns, factor=factor, math="3xtf32")[1:])

    def theirs(a, b, factor):
        y = torch.matmul(a, b) * factor[:, None]
        return torch.stack([y.square().sum(-2), y.max(-2).values, y.logsumexp(-2)])

    wanted = gradients(theirs, tensors, weight.double())
    for one, other in zip(gradients(ours, tensors, weight), wanted, strict=True):
        near(one, other)


def test_what_a_step_of_batches_launches(device, monkeypatch):
    monkeypatch.setattr(backward, "has_kernels", lambda a: True)
    a, b, bias = (normal(*s).requires_grad_() for s in ((3, 48, 64), (3, 64, 32), (32,)))
    co.gemm_bias_gelu(a, b, bias).backward(torch.ones(3, 48, 32, dtype=BF16))
    launched = [(x.spec.form, [o.name for o in x.spec.epilogue.outputs]) for x in device.launches]
    assert launched == [
        (BATCHED, ["d", "saved_0"]),
        # The rows of all batches are those of one D, whose product is of zeros.
        (DENSE, ["d", "grad_bias"]),
        (BATCHED, ["d"]),
        (BATCHED, ["d"]),
    ]


@pytest.mark.parametrize("shape", [(3, 16, 8), (1, 16, 8)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_gradient_of_batches_is_added_to_its_main_grad(shape, turned):
    a = normal(2 if shape[0] == 1 else 3, 5, 16)
    parameter = torch.nn.Parameter(normal(shape[0], 8, 16) if turned else normal(*shape))
    up = torch.nn.Parameter(normal(*parameter.shape))

    def of(x):
        return x.mT if turned else x

    def call():
        co.gemm(a, of(parameter), epilogue=composed.swiglu, up=of(up)).sum().backward()

    call()
    wanted = [x.grad.float() for x in (parameter, up)]
    for x in (parameter, up):
        x.grad, x.main_grad = None, torch.ones(x.shape)
    call()
    for x, gradient in zip((parameter, up), wanted, strict=True):
        assert x.grad is None
        near(x.main_grad, gradient.double() + 1)
    with pytest.raises(ValueError, match="pass the parameter or its transpose"):
        co.gemm(a, of(parameter)[:, :, 1:])


# ---- FP8 -------------------------------------------------------------------------------------------------------------

E4M3 = torch.float8_e4m3fn


@co.epilogue
def quantised(acc, bias: co.Row):
    return co.e.quantize(co.e.relu(acc + bias), "e4m3")


@pytest.mark.parametrize(
    ("rows", "columns"), [((3, 5), (3, 32)), ((3, 5, 1), (3, 1, 32)), ((5,), (32,)), ((3, 5), (1, 32))]
)
def test_scales_of_rows_and_columns_have_batches(rows, columns):
    a, b = normal(3, 5, 64).to(E4M3), normal(3, 32, 64).to(E4M3).mT
    scale_a, scale_b = torch.rand(rows) + 0.5, torch.rand(columns) + 0.5
    found = co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b))
    wanted = exact(a.float(), b.float()) * scale_a.reshape(-1, 5, 1) * scale_b.reshape(-1, 1, 32)
    near(found, wanted)


@pytest.mark.parametrize(
    ("scale_a", "scale_b"),
    [
        (torch.ones(3, 5, 2), torch.ones(3, 1, 2)),
        (torch.ones(3, 5, 2), 1.0),
        (1.0, torch.ones(3, 1, 2).expand(3, 32, 2)),
    ],
)
def test_scales_of_blocks_have_no_batches(scale_a, scale_b):
    a, b = normal(3, 5, 256).to(E4M3), normal(3, 32, 256).to(E4M3).mT
    with pytest.raises(ValueError, match="b has batches, and scale_a and scale_b are scales of blocks of one A and on"):
        co.gemm(co.Scaled(a, scale_a), co.Scaled(b, scale_b))


def test_d_is_quantised_batch_by_batch(device):
    op = ops.graph_op("quantised", quantised.graph)
    a, b, bias = normal(2, 3, 48, 64), normal(3, 64, 256), normal(3, 1, 256)
    for _ in range(2):
        found = op(a, b, bias)
        assert (found.d.dtype, found.d_scale.shape) == (E4M3, (2, 3, 48, 2))
        assert found.d_scale.stride() == (3 * 48, 48, 1, 2 * 3 * 48)
        for at in [(0, 0), (1, 2)]:
            d, scale = co.gemm(a[at], b[at[1]], epilogue=quantised, bias=bias[at[1], 0])
            assert torch.equal(found.d[at].float(), d.float())
            assert torch.equal(found.d_scale[at], scale)
    assert [spec.form for spec in launches(device)] == [DENSE] * 2 * (6 + 2)
    out = {"d": torch.empty(2, 3, 48, 256, dtype=E4M3), "d_scale": torch.empty(2, 3, 48, 2)}
    op(a, b, bias, out=out)
    assert torch.equal(out["d_scale"], found.d_scale)
    with pytest.raises(co.errors.UnsupportedError, match="a kernel writes the scales of one GEMM"):
        op.plan(a, b, bias)


def test_a_tile_of_no_batches_may_be_broadcast():
    a, b, residual = torch.zeros(0, 3, 4, 16).bfloat16(), torch.zeros(3, 16, 8).bfloat16(), torch.zeros(0, 3, 1, 8)
    assert co.gemm_residual(a, b, residual.bfloat16()).shape == (0, 3, 4, 8)
