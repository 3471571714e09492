"""Calls of batches, groups of rows and groups of K: memory of all kinds, refusals, orders of tiles, in place."""

import contextlib
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import cutlass_ops as co
from cutlass_ops.artifacts.loader import Reason, refusal
from cutlass_ops.base import mma
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.operand import reference
from cutlass_ops.run import named
from tests.gpu import kernels, oracle, tensors
from tests.unit import op_table

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
ALPHA = 0.5
BATCHED, GROUPED, RAGGED_K = kernels.batched(), kernels.grouped(), kernels.ragged_k()
ROWS = ["grouped-pingpong-plain", "grouped-swapped-plain"]
OVER_K = ["ragged_k-pingpong-plain", "ragged_k-cooperative-plain", "ragged_k-swapped-plain"]
hopper = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="groups need Hopper"
)


def normal(*shape, dtype=BF16, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def offsets_of(sizes):
    return torch.tensor(sizes, device="cuda").cumsum(0).int()


def poison(*shape):
    return torch.full(shape, math.nan, device="cuda", dtype=BF16)


def require_refused(spec, good, wrong):
    """Require that a kernel launches with good arguments, and refuses each wrong change in its words."""
    launch = co.build(spec).loaded.launch
    assert launch(*good.values(), 0, 1, None) == 0
    for changed, position, reason in wrong:
        status = launch(*(good | changed).values(), 0, 1, None)
        torch.cuda.synchronize()
        assert status, f"{changed} is not refused"
        assert refusal(status) == (position, reason)


# ---- Batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in BATCHED if n.endswith("plain")])
def test_permuted_views_of_heads(name):
    tokens, heads, head = 72, 3, 64
    packed = normal(2, tokens, 3, heads, head, scale=head**-0.25)  # (sequences, tokens, q k v, heads, head)
    q, k, _ = (packed[:, :, at].transpose(1, 2) for at in range(3))
    out = poison(2, tokens, heads, tokens).transpose(1, 2)
    assert co.build(BATCHED[name])(q, k.mT, out=out) is out
    oracle.assert_close(out, q.double() @ k.mT.double())


def test_heads_of_one_buffer_are_read_and_written():
    packed = normal(2, 72, 2, 3, 64, scale=0.3)
    x, out = packed[:, :, 0].transpose(1, 2), packed[:, :, 1].transpose(1, 2)
    b = normal(2, 3, 64, 64, scale=0.3)
    before, wanted = x.clone(), x.double() @ b.double()
    out.fill_(math.nan)
    co.gemm(x, b, out=out)
    oracle.assert_close(out, wanted)
    assert torch.equal(x, before)


@pytest.mark.parametrize("name", ["warp_specialized", "pingpong", "sm80", "small"])
def test_more_batches_than_a_grid_has(name):
    kernel, count = co.build(BATCHED[f"batched-{name}-plain"]), 70_000
    a, b, out = normal(count, 8, 8), normal(count, 8, 8).mT, poison(count, 8, 8)
    if name == "warp_specialized":
        with pytest.raises(ValueError, match="a has a shape"):
            kernel(a, b, out=out)
        return
    kernel(a, b, out=out)
    oracle.assert_close(out, a.double() @ b.double())


@pytest.mark.parametrize("order", [(0, 1), (1, 1), (1, 2), (2, 1), (2, 4), (5, 1), (6, 2)], ids=str)
@pytest.mark.parametrize("name", ["batched-pingpong-plain", "batched-cooperative-plain", "batched-cluster-plain"])
def test_every_order_of_tiles(name, order):
    count, m, n, k = 40, 200, 136, 72
    a, b, out = normal(count, m, k, scale=0.3), normal(count, n, k, scale=0.3).mT, poison(count, m, n)
    assert co.build(BATCHED[name]).loaded.launch(a, b, out, *order, None) == 0
    oracle.assert_close(out, a.double() @ b.double())


@pytest.mark.parametrize("name", ["batched-pingpong-plain", "batched-sm80-plain", "batched-small-plain"])
def test_a_kernel_refuses_batches_that_it_cannot_address(name):
    a, b, out = normal(3, 64, 64), normal(3, 64, 64).mT, normal(3, 64, 64)
    odd = normal(3 * (64 * 64 + 4)).as_strided((3, 64, 64), (64 * 64 + 4, 64, 1))
    wrong = [
        ({"a": a[:2]}, 0, Reason.SHAPE),
        ({"b": b[:2]}, 1, Reason.SHAPE),
        ({"a": a[:1], "b": b[:1]}, 2, Reason.SHAPE),
        ({"a": a[0], "b": b[0], "out": out[0]}, 2, Reason.SHAPE),
        ({"out": normal(1, 1, 3, 64, 64)}, 2, Reason.SHAPE),
        ({"out": normal(64, 64).expand(3, 64, 64)}, 2, Reason.MAJOR),
        ({"b": b.mT}, 1, Reason.MAJOR),
        ({"out": a}, 2, Reason.OVERLAP),
        ({"a": odd}, 0, Reason.ALIGNMENT),
    ]
    require_refused(BATCHED[name], {"a": a, "b": b, "out": out}, wrong)


def test_a_kernel_refuses_inputs_of_other_batches():
    m, n = 64, 64
    bias, scale, residual = normal(2, 3, n), normal(m), normal(m, n)
    good = {"a": normal(2, 3, m, 64), "b": normal(2, 3, n, 64).mT, "out": normal(2, 3, m, n)}
    good |= {"bias": bias, "scale": scale, "residual": residual, "alpha": 1.0}
    strided = bias[..., ::2].repeat_interleave(2, -1).mT.contiguous().mT
    wrong = [
        ({"bias": bias[0]}, 3, Reason.SHAPE),
        ({"scale": scale[None]}, 4, Reason.SHAPE),
        ({"residual": residual[None]}, 5, Reason.SHAPE),
        ({"bias": strided}, 3, Reason.MAJOR),
    ]
    require_refused(BATCHED["batched-pingpong-inputs"], good, wrong)


SHAPES = [
    ((1000, 64, 64), (1000, 64, 64)),
    ((8, 300, 256), (8, 256, 200)),
    ((3, 65, 63), (3, 63, 33)),
    ((2, 3, 100, 64), (3, 64, 72)),
    ((40, 72), (5, 72, 48)),
    ((2, 2, 3, 40, 64), (3, 64, 48)),
    ((4, 1, 256), (4, 256, 512)),
]


@pytest.mark.parametrize(("of_a", "of_b"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_calls_of_batches(of_a, of_b, dtype):
    k = of_a[-1]
    a, b = normal(*of_a, dtype=dtype, scale=k**-0.25), normal(*of_b, dtype=dtype, scale=k**-0.25)
    for _ in range(2):
        oracle.assert_close(co.gemm(a, b), a.double() @ b.double(), a @ b)


def test_every_named_op_takes_batches():
    a, b = normal(3, 200, 128, scale=0.3), normal(3, 128, 136, scale=0.3)
    for op in named.NAMED:
        given = {i.name: normal(3, 136) if i.kind.name == "ROW" else normal(3, 200, 136) for i in op.graph.inputs}
        wanted = reference.evaluate(op.graph, a.double() @ b.double(), given, torch.float64)["d"]
        oracle.assert_close(op(a, b, **given), wanted)


@hopper
def test_batches_in_fp8():
    a, b = (normal(3, rows, 256, scale=0.25).to(torch.float8_e4m3fn) for rows in (200, 136))
    assert oracle.error(co.gemm(a, b.mT), a.double() @ b.mT.double()) <= 2.0**-8


def test_a_residual_of_batches_in_place():
    a, b, residual = normal(3, 72, 64, scale=0.3), normal(3, 64, 136, scale=0.3), normal(3, 72, 136)
    wanted = a.double() @ b.double() + residual.double()
    assert co.gemm_residual(a, b, residual, out=residual) is residual
    oracle.assert_close(residual, wanted)


def drawn(seed):
    """Return random extents, broadcasting, majors and permuted memory: A, B and the inputs of an epilogue."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    lead = draw((3,), (17,), (2, 5), (1, 4))
    m, n, k = (draw(1, 8, 24, 63, 64, 136, 200) for _ in range(3))

    def matrix(rows, columns):
        own = draw(lead, lead, lead[1:] if len(lead) > 1 else lead, tuple(draw(1, x) for x in lead))
        outer, inner, turned = draw((rows, columns, False), (columns, rows, True))
        x = normal(*own, outer, inner, scale=k**-0.25)
        if len(own) == 2 and draw(True, False):
            x = normal(own[0], outer, own[1], inner, scale=k**-0.25).transpose(1, 2)
        return x.mT if turned else x

    a, b = matrix(m, k), matrix(k, n)
    if torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]) != lead:
        a = a.expand(*lead, m, k).contiguous()
    bias, residual = normal(*draw((n,), (*lead, n))), normal(*draw((m, n), (*lead, m, n)))
    return a, b, {"bias": bias, "scale": normal(m), "residual": residual, "alpha": ALPHA}


@pytest.mark.parametrize("seed", range(40))
def test_drawn_batches(seed):
    """By whatever kernel serves."""
    a, b, inputs = drawn(seed)
    found = co.gemm(a, b, epilogue=kernels.of_batches, **inputs)
    bias, scale, residual = (inputs[name].double() for name in ("bias", "scale", "residual"))
    acc = a.double() @ b.double()
    bias = bias if bias.ndim == 1 else bias.unsqueeze(-2)
    oracle.assert_close(found, (acc * scale[:, None] + bias).relu() * ALPHA + residual)


# ---- Groups of rows --------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("name", ROWS)
def test_a_kernel_refuses_groups_that_it_cannot_address(name):
    x, w, out, ends = normal(96, 64), normal(3, 136, 64).mT, normal(96, 136), offsets_of([10, 20, 60])
    wide = normal(96, 200)
    wrong = [
        ({"w": w[0]}, 1, Reason.SHAPE),
        ({"out": out[:90]}, 2, Reason.SHAPE),
        ({"ends": ends[:2]}, 3, Reason.SHAPE),
        ({"ends": ends.long()}, 3, Reason.DTYPE),
        ({"ends": ends.cpu()}, 3, Reason.DEVICE),
        ({"w": w.contiguous()}, 1, Reason.MAJOR),
        ({"x": x[:0], "out": out[:0]}, 0, Reason.SHAPE),
        # Offsets that the kernel would overwrite.
        ({"ends": out.view(-1).view(torch.int32)[8:11]}, 2, Reason.OVERLAP),
        ({"x": wide[:, :64], "out": wide[:, 56:192]}, 2, Reason.OVERLAP),
    ]
    require_refused(GROUPED[name], {"x": x, "w": w, "out": out, "ends": ends}, wrong)
    require_refused(GROUPED[name], {"x": wide[:, :64], "w": w, "out": wide[:, 64:], "ends": ends}, [])


@hopper
@pytest.mark.parametrize("name", ROWS)
def test_a_kernel_refuses_groups_whose_rooms_do_not_follow_each_other(name):
    x, w, out = normal(3, 40, 64), normal(3, 136, 64).mT, normal(3, 40, 136)
    counts = torch.tensor([40, 0, 3], device="cuda", dtype=torch.int32)
    wrong = [
        ({"x": x[:2]}, 0, Reason.SHAPE),
        ({"x": normal(3, 80, 64)[:, :40]}, 0, Reason.MAJOR),
        ({"out": normal(3, 80, 136)[:, :40]}, 2, Reason.MAJOR),
        ({"out": out.flatten(0, 1)}, 2, Reason.SHAPE),
        ({"x": x[:, :39].contiguous()}, 2, Reason.SHAPE),
    ]
    require_refused(GROUPED[name], {"x": x, "w": w, "out": out, "counts": counts}, wrong)


@co.epilogue
def routed(acc, bias: co.Row, weight: co.Col, residual: co.Tile, alpha: co.Scalar):
    return (co.silu(acc + bias) * weight) * alpha + residual


def drawn_groups(rows, experts, n, k, dtype=BF16, *, turned=False):
    """Draw x, weights (E, K, N), and the sizes of groups of all rows."""
    w = normal(experts, n, k, dtype=dtype, scale=k**-0.25).mT
    sizes = torch.bincount(torch.randint(0, experts, (rows,)), minlength=experts).tolist()
    return normal(rows, k, dtype=dtype, scale=k**-0.25), w.contiguous() if turned else w, sizes


def exact(x, w, sizes, *inputs, **named):
    """Return D of groups in float64."""
    wide = [each.double() if isinstance(each, torch.Tensor) else each for each in (x, w)]
    return op_table.grouped(*wide, torch.tensor(sizes).cumsum(0), *inputs, **named)


@hopper
@pytest.mark.parametrize(
    ("dtype", "experts", "rows", "n", "k"),
    [(BF16, 7, 264, 200, 96), (torch.float16, 3, 8, 100, 64), (BF16, 16, 40, 131, 128), (BF16, 4, 3000, 512, 256)],
    ids=str,
)
@pytest.mark.parametrize("turned", [False, True], ids=["E,N,K", "E,K,N"])
def test_calls_of_groups(dtype, experts, rows, n, k, turned):
    if turned and n % 8:
        pytest.skip("lines of w would not be aligned")
    x, w, sizes = drawn_groups(rows, experts, n, k, dtype, turned=turned)
    bias, weight, residual = (
        normal(experts, n, dtype=dtype),
        torch.rand(rows, device="cuda"),
        normal(rows, n, dtype=dtype),
    )
    inputs = {"bias": bias, "weight": weight, "residual": residual, "alpha": ALPHA}
    found = co.gemm(x, w, groups=co.Groups(offsets_of(sizes)), epilogue=routed, **inputs)
    wanted = exact(x, w, sizes, bias.double(), F.silu) * weight.double()[:, None] * ALPHA + residual.double()
    oracle.assert_close(found, wanted)
    for out_dtype in (dtype, torch.float32):
        oracle.assert_close(co.gemm(x, w, groups=co.Groups(offsets_of(sizes)), out_dtype=out_dtype), exact(x, w, sizes))


@hopper
def test_results_of_groups_in_fp8():
    x, w, _ = drawn_groups(96, 3, 144, 64)
    found = co.gemm(x, w, groups=co.Groups(offsets_of([30, 0, 66])), out_dtype=torch.float8_e4m3fn)
    assert oracle.error(found, exact(x, w, [30, 0, 66])) <= 2.0**-4


@hopper
@pytest.mark.parametrize("sizes", [[30, 0, 60], [0, 90, 0]], ids=str)
def test_two_weights_of_each_expert(sizes):
    (x, w, _), up = drawn_groups(90, 3, 136, 64), normal(3, 136, 64, scale=0.3).mT
    found = co.gemm(x, w, groups=co.Groups(offsets_of(sizes)), epilogue=composed.swiglu, up=up)
    oracle.assert_close(found, exact(x, w, sizes, activation=F.silu) * exact(x, up, sizes))


@hopper
def test_a_residual_of_groups_in_place():
    (x, w, _), out = drawn_groups(90, 3, 136, 64), normal(90, 136)
    before = out.clone()
    assert (
        co.gemm(x, w, groups=co.Groups(offsets_of([30, 0, 50])), epilogue=builtin.residual, residual=out, out=out)
        is out
    )
    oracle.assert_close(out[:80], exact(x, w, [30, 0, 50]) + before[:80].double())
    assert torch.equal(out[80:], before[80:])


@hopper
def test_other_numbers_of_rows_and_none():
    w = normal(8, 136, 64, scale=0.3).mT
    for rows in (100, 101, 64, 333):
        x, sizes = normal(rows, 64, scale=0.3), [rows // 8] * 8
        found = co.gemm(x, w, groups=co.Groups(offsets_of(sizes)))
        oracle.assert_close(found[: sum(sizes)], exact(x, w, sizes))
    assert co.gemm(normal(0, 64), w, groups=co.Groups(offsets_of([0] * 8))).shape == (0, 136)


@hopper
def test_a_compiled_program_counts_rows_of_groups():
    (x, w, _), bias = drawn_groups(96, 3, 136, 64), normal(3, 136)

    def program(x, w, counts, bias):
        ends = counts.cumsum(0, dtype=torch.int32)
        return co.gemm(x * 2, w, groups=co.Groups(ends), epilogue=builtin.bias, bias=bias)

    compiled = torch.compile(program, fullgraph=True)
    for sizes in ([10, 20, 66], [0, 96, 0]):
        found = compiled(x, w, torch.tensor(sizes, device="cuda"), bias)
        oracle.assert_close(found, exact(x * 2, w, sizes, bias.double()))


@hopper
def test_groups_of_positive_fp8_are_added_up_in_fp32():
    """Where nothing cancels, the Tensor Cores' own sums are off by percents."""
    n, k, sizes = 256, 4096, [30, 0, 98]
    x = torch.rand(128, k, device="cuda").to(torch.float8_e4m3fn)
    w = torch.rand(3, n, k, device="cuda").to(torch.float8_e4m3fn).mT
    wanted = exact(x, w, sizes)
    oracle.assert_close(co.gemm(x, w, groups=co.Groups(offsets_of(sizes))), wanted)
    assert 0.01 < oracle.error(co.gemm(x, w, groups=co.Groups(offsets_of(sizes)), math="fast"), wanted) < 0.2
    assert oracle.error(co.gemm(x, w, groups=co.Groups(offsets_of(sizes)), math="promoted"), wanted) < 0.004


@hopper
@pytest.mark.parametrize("of_w", [128, 1], ids=["128x128", "128x1"])
def test_a_call_of_groups_with_scales_of_blocks(of_w):
    """Groups that follow each other, and with room: one kernel serves both."""
    n, k, sizes = 264, 400, [30, 0, 66]
    x, w = normal(96, k).to(torch.float8_e4m3fn), normal(3, n, k).to(torch.float8_e5m2).mT
    scale_a = torch.rand(96, mma.blocks(k), device="cuda") + 0.1
    scale_b = torch.rand(3, -(-n // of_w), mma.blocks(k), device="cuda") + 0.1
    parts = [reference.dequantised(x, w[at], scale_a.double(), scale_b[at].double()) for at in range(3)]
    wanted = torch.cat([(parts[0][0] @ parts[0][1])[:30], (parts[2][0] @ parts[2][1])[30:]])
    oracle.assert_close(
        co.gemm(co.Scaled(x, scale_a), co.Scaled(w, scale_b), groups=co.Groups(offsets_of(sizes))), wanted
    )
    counts = torch.tensor([30, 0, 32], device="cuda", dtype=torch.int32)
    room = co.Scaled(x.view(3, 32, k), scale_a.view(3, 32, -1))
    found = co.gemm(room, co.Scaled(w, scale_b), groups=co.Groups(counts=counts, expected=32))
    oracle.assert_close(found[0, :30], wanted[:30])
    oracle.assert_close(found[2], (parts[2][0] @ parts[2][1])[64:])


# ---- Groups of K -----------------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("name", OVER_K)
def test_a_kernel_refuses_groups_of_k_that_it_cannot_address(name):
    x, y, out, ends = normal(96, 64), normal(96, 136), normal(3, 64, 136), offsets_of([10, 20, 60])
    wrong = [
        ({"y": y[:90]}, 1, Reason.SHAPE),
        ({"out": out[0]}, 2, Reason.SHAPE),
        ({"out": out[:2]}, 3, Reason.SHAPE),
        ({"ends": ends.long()}, 3, Reason.DTYPE),
        ({"ends": ends.cpu()}, 3, Reason.DEVICE),
        ({"x": x.mT.contiguous()}, 0, Reason.MAJOR),
        ({"out": out[:1].expand(3, 64, 136)}, 2, Reason.MAJOR),
    ]
    require_refused(RAGGED_K[name], {"x": x.mT, "y": y, "out": out, "ends": ends}, wrong)


@co.epilogue
def accumulate(acc, before: co.Tile, alpha: co.Scalar):
    return acc * alpha + before


def exact_weights(x, y, sizes):
    return op_table.of_weights(x.mT.double(), y.double(), torch.tensor(sizes).cumsum(0))


@hopper
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize(
    ("experts", "rows", "m", "n"),
    [(7, 264, 200, 96), (3, 8, 104, 64), (4, 3000, 512, 256), (2, 1, 64, 72), (3, 0, 64, 136)],
)
def test_gradients_of_weights(dtype, experts, rows, m, n):
    x, y = normal(rows, m, dtype=dtype, scale=0.3), normal(rows, n, dtype=dtype, scale=0.3)
    sizes = torch.bincount(torch.randint(0, experts, (rows,)), minlength=experts).tolist()
    for out_dtype in (dtype, torch.float32):
        found = co.gemm(x.mT, y, groups=co.Groups(offsets_of(sizes)), out_dtype=out_dtype)
        oracle.assert_close(found, exact_weights(x, y, sizes))


@hopper
def test_gradients_of_weights_are_added_in_place():
    x, y, sizes = normal(90, 64, scale=0.3), normal(90, 136, scale=0.3), [30, 0, 50]
    total = torch.randn(3, 64, 136, device="cuda")
    wanted = exact_weights(x, y, sizes) * 2 + total.double()
    inputs = {"before": total, "alpha": 2.0, "out": total}
    assert co.gemm(x.mT, y, groups=co.Groups(offsets_of(sizes)), epilogue=accumulate, **inputs) is total
    oracle.assert_close(total, wanted)


# ---- Gradients of groups ---------------------------------------------------------------------------------------------


@hopper
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    "sizes", [[5, 0, 130, 64, 77], [0, 300, 0, 0, 0], [0] * 5], ids=["ragged", "one group", "empty"]
)
@pytest.mark.parametrize("gated", [False, True], ids=["routed", "swiglu"])
def test_gradients_of_groups(gated, sizes, recompute):
    """Rows of no group have gradients of NaN, which reach nothing."""
    experts, rows, n, k = 5, 300, 136, 72
    given = {"x": normal(rows, k), "w": normal(experts, n, k, scale=0.1).mT}
    if gated:
        given["up"] = normal(experts, n, k, scale=0.1).mT
    else:
        given |= {"bias": normal(experts, n), "weight": normal(rows), "residual": normal(rows, n), "alpha": normal()}
    given = {name: x.requires_grad_() for name, x in given.items()}
    x, w, *_ = given.values()
    inputs = {name: x for name, x in given.items() if name not in ("x", "w")}
    gradient, used = normal(rows, n), sum(sizes)
    gradient[used:] = math.nan
    with co.recompute() if recompute else contextlib.nullcontext():
        d = co.gemm(x, w, groups=co.Groups(offsets_of(sizes)), epilogue=composed.swiglu if gated else routed, **inputs)
    found = torch.autograd.grad(d, list(given.values()), gradient)
    wide = {name: value.detach().double().requires_grad_() for name, value in given.items()}
    if gated:
        wanted = exact(wide["x"], wide["w"], sizes, activation=F.silu) * exact(wide["x"], wide["up"], sizes)
    else:
        acc = exact(wide["x"], wide["w"], sizes, wide["bias"], activation=F.silu)
        wanted = acc * wide["weight"][:used, None] * wide["alpha"] + wide["residual"][:used]
    theirs = torch.autograd.grad(wanted, list(wide.values()), gradient[:used].double())
    for mine, y, like in zip(found, theirs, given.values(), strict=True):
        assert (mine.shape, mine.dtype, mine.stride()) == (like.shape, like.dtype, like.stride())
        assert (mine.double() - y).norm() <= (0.01 if like.ndim else 0.05) * y.norm()


@hopper
def test_a_step_of_groups_waits_for_no_device():
    x, w, _ = drawn_groups(300, 5, 136, 72)
    x, w, ends = x.requires_grad_(), w.detach().requires_grad_(), offsets_of([5, 0, 130, 64, 77])

    def step():
        co.gemm(x, w, groups=co.Groups(ends)).sum().backward()

    step()
    with tensors.without_synchronisation():
        step()
