"""Calls at a new number of rows: planned from one that was checked, with the kernel that a checked call would have."""

import pytest
import torch
from fake_device import Everything, fake_device

import cutlass_ops as co
from cutlass_ops.base.errors import ToolchainError, UnsupportedError
from cutlass_ops.epilogue import builtin
from cutlass_ops.run import ops

BF16 = torch.bfloat16
N, K = 264, 128


@pytest.fixture
def device(monkeypatch):
    with fake_device(monkeypatch) as device:
        yield device


@co.epilogue
def several(acc, bias: co.Row, residual: co.Tile):
    """Two tiles and a reduction in each direction."""
    d = co.e.relu(acc + bias) + residual
    return {"d": d, "pre": acc, "top": co.e.max(d, dim=0), "sum": co.e.sum(d, dim=1)}


def matrix(*shape):
    return torch.randn(shape).to(BF16) / 8


W, BIAS = matrix(N, K).t(), torch.randn(N)


def checks(monkeypatch):
    """Note each call that is checked in Python."""
    seen, check = [], ops.check_call
    monkeypatch.setattr(ops, "check_call", lambda *x, **y: seen.append(1) or check(*x, **y))
    return seen


def load_all(op, device):
    """Have every kernel that the weight may need."""
    op.warm_up(matrix(8, K), W, BIAS, *((matrix(8, N),) if op.graph.outputs[1:] else ()))
    assert device.loaded


def test_a_new_number_of_rows_is_not_checked_and_has_the_kernel_of_a_checked_call(device, monkeypatch):
    op = ops.Op("relu", builtin.bias_relu)
    load_all(op, device)
    op(matrix(8, K), W, BIAS)
    seen = checks(monkeypatch)
    for m in (1, 7, 64, 300, 2049):
        a = matrix(m, K)
        found = op(a, W, BIAS)
        torch.testing.assert_close(found.float(), (a.float() @ W.float() + BIAS).relu(), rtol=1e-2, atol=1e-2)
        assert found.is_contiguous()
    assert not seen
    assert op.served_warm == 0
    # A fresh op checks each call, and takes the same kernels.
    chosen = [(x.spec, x.raster, x.swizzle) for x in device.launches[1:]]
    other = ops.Op("relu", builtin.bias_relu)
    for m in (1, 7, 64, 300, 2049):
        other._plans.clear()
        other(matrix(m, K), W, BIAS)
    assert [(x.spec, x.raster, x.swizzle) for x in device.launches[6:]] == chosen
    assert len({spec for spec, *_ in chosen}) > 1
    before = op.served_warm
    op(matrix(300, K), W, BIAS)
    assert op.served_warm == before + 1


@pytest.mark.parametrize("batch", [(5,), (2, 3), (3, 1, 2)])
def test_outputs_of_every_kind_have_the_shapes_of_a_checked_call(device, monkeypatch, batch):
    op = ops.Op("several", several)
    load_all(op, device)
    shape = (4,) * len(batch)
    op(matrix(*shape, K), W, BIAS, matrix(*shape, N))
    a, residual = matrix(*batch, K), matrix(*batch, N)
    seen = checks(monkeypatch)
    found = op(a, W, BIAS, residual)
    assert not seen
    op._plans.clear()
    wanted = op(a, W, BIAS, residual)
    assert seen
    for name in ("d", "pre", "top", "sum"):
        x, y = getattr(found, name), getattr(wanted, name)
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert torch.equal(x, y)


def test_what_is_not_as_before_is_checked(device, monkeypatch):
    op = ops.Op("relu", builtin.bias_relu)
    load_all(op, device)
    op(matrix(8, K), W, BIAS)
    seen = checks(monkeypatch)
    op(matrix(K, 24).t(), W, BIAS)  # another major
    assert len(seen) == 1
    assert op(matrix(0, K), W, BIAS).shape == (0, N)
    assert len(seen) == 2
    with pytest.raises(ValueError, match=r"^bias has shape"):
        op(matrix(40, K), W, BIAS[1:])
    out = torch.full((41, N), torch.nan, dtype=BF16)
    assert op(matrix(41, K), W, BIAS, out=out) is out
    assert not out.isnan().any()


def test_pytorch_serves_a_number_of_rows_whose_best_kernel_is_not_loaded_without_a_check(device, monkeypatch):
    op = ops.Op("relu", builtin.bias_relu)
    op(matrix(8, K), W, BIAS)
    (first,) = device.loaded
    device.absent.update(spec for spec in op.specs_of(matrix(8, K), W, BIAS) if spec != first)
    seen = checks(monkeypatch)
    for m in (4096, 2000, 4096):
        a = matrix(m, K)
        found = op(a, W, BIAS)
        torch.testing.assert_close(found.float(), (a.float() @ W.float() + BIAS).relu(), rtol=1e-2, atol=2e-2)
    assert not seen
    assert list(device.loaded) == [first]  # it serves no other number of rows meanwhile
    assert op.served_by_pytorch == 3
    awaited = op.plan(matrix(4096, K), W, BIAS).spec
    assert awaited in device.needed
    device.built(awaited)
    del seen[:]
    op(matrix(4096, K), W, BIAS)
    assert not seen
    assert device.launches[-1].spec == awaited
    assert op.served_by_pytorch == 3


def test_operands_whose_alignment_may_change_are_checked_each_time(device, monkeypatch):
    op = ops.Op("gemm", builtin.identity)
    w = matrix(N, 129).t()
    op(matrix(8, 129), w)
    seen = checks(monkeypatch)
    op(matrix(9, 129), w)
    assert len(seen) == 1


@pytest.mark.parametrize("shape", [(40, K - 8), (3, 8, 2 * K)])
def test_what_a_checked_call_refuses_is_refused_at_other_rows_too(device, shape):
    op = ops.Op("relu", builtin.bias_relu)
    load_all(op, device)
    op(matrix(8, K), W, BIAS)
    launches = len(device.launches)
    with pytest.raises(ValueError, match=r"^a "):
        op(matrix(*shape), W, BIAS)
    assert len(device.launches) == launches
    (weight,) = op._plans.values()
    assert list(weight.plans) == [(8, K)]
    assert weight.rows is not None
    assert weight.rows.plan(torch.Size(shape)) is None  # it never reaches a kernel


# ---- While PyTorch serves ----


@pytest.fixture
def missing(device):
    """No kernel is there."""
    device.absent = Everything()
    return device


def right(op, a, *rest, out=None):
    """Compare a call with a fresh op's, which checks it."""
    found = op(a, W, BIAS, *rest, out=out)
    wanted = ops.Op(op.name, op.epilogue)(a, W, BIAS, *rest)
    for x, y in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, wanted)), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)
        assert torch.equal(x, y)
    return found


@pytest.fixture
def op(missing):
    """An op with two checked calls: the first only has the weight decided."""
    op = ops.Op("relu", builtin.bias_relu)
    for _ in range(2):
        op(matrix(8, K), W, BIAS)
        op(matrix(16, K), W, BIAS)
    return op


def test_pytorch_serves_new_numbers_of_rows_by_one_plan(op, monkeypatch):
    for m in (1, 7, 64, 300):
        a = matrix(m, K)
        with monkeypatch.context() as patch:
            seen = checks(patch)
            found = op(a, W, BIAS)
            assert not seen
        assert torch.equal(found, right(op, a))
    (weight,) = op._plans.values()
    assert list(weight.plans) == [(8, K), (16, K)]  # a new one for each number of rows would be garbage soon
    assert op.served_by_pytorch == 12


@pytest.mark.parametrize("batch", [(5,), (2, 3), (3, 1, 2)])
def test_pytorch_serves_outputs_and_inputs_of_every_kind_at_new_rows(missing, monkeypatch, batch):
    @co.epilogue
    def every(acc, bias: co.Row, residual: co.Tile, scale: co.Col, alpha: co.Scalar):
        d = co.e.relu(acc + bias) * scale + alpha * residual
        return {"d": d, "pre": acc, "top": co.e.max(d, dim=0), "sum": co.e.sum(d, dim=1)}

    op = ops.Op("every", every)
    for m in (8, 16):
        op(matrix(m, K), W, BIAS, matrix(m, N), torch.rand(m), 0.5)
    a, residual, scale = matrix(*batch, K), matrix(*batch, N), torch.rand(batch)
    seen = checks(monkeypatch)
    op(a, W, BIAS, residual, scale, 0.25)
    assert not seen
    right(op, a, residual, scale, 0.25)


def test_what_pytorch_may_compute_otherwise_is_checked_at_new_rows(op, monkeypatch):
    seen = checks(monkeypatch)
    others = [
        (matrix(K, 24).t(), W, BIAS),  # another major, which is for another kernel
        (matrix(9, K), W.contiguous(), BIAS),
        (matrix(9, K), W, BIAS.to(BF16)),
        (matrix(2, 9, 2 * K)[..., :K], W, BIAS),
        (matrix(9, K + 1)[:, :K], W, BIAS),  # lines at other addresses
    ]
    for at, (a, w, bias) in enumerate(others):
        found = op(a, w, bias)
        torch.testing.assert_close(found.float(), (a.float() @ w.float() + bias).relu(), rtol=1e-2, atol=2e-2)
        assert len(seen) == at + 1
    with pytest.raises(ValueError, match=r"^bias has shape"):
        op(matrix(40, K), W, BIAS[1:])
    with pytest.raises(ValueError, match=r"^a "):
        op(matrix(40, K - 8), W, BIAS)
    with pytest.raises(TypeError, match=r"^bias"):
        op(matrix(40, K), W, 1.0)


def test_pytorch_writes_given_outputs_at_new_rows(op, monkeypatch):
    op(matrix(8, K), W, BIAS, out=torch.empty(8, N, dtype=BF16))
    seen = checks(monkeypatch)
    a, out = matrix(2, 5, K), torch.full((2, 5, N), torch.nan, dtype=BF16)
    assert op(a, W, BIAS, out=out) is out
    assert not seen
    assert torch.equal(out, op(a, W, BIAS))
    del seen[:]
    # An output that lies in an input's memory, or otherwise than a new one, is checked.
    memory = matrix(11, K + N)
    with pytest.raises(ValueError, match=r"overlap|memory"):
        op(memory[:, :K], W, BIAS, out=memory[:, K // 2 : K // 2 + N])
    apart = torch.empty(13, 2 * N, dtype=BF16)[:, :N]
    assert op(matrix(13, K), W, BIAS, out=apart) is apart
    with pytest.raises(ValueError, match=r"^out"):
        op(matrix(12, K), W, BIAS, out=torch.empty(11, N, dtype=BF16))
    assert len(seen) == 3


def test_a_kernel_that_cannot_be_had_costs_new_rows_no_check(missing, monkeypatch):
    op = ops.Op("relu", builtin.bias_relu)
    missing.failed = dict.fromkeys(op.specs_of(matrix(8, K), W, BIAS), ToolchainError("no compiler"))
    with pytest.warns(RuntimeWarning, match="no compiler"):
        op(matrix(8, K), W, BIAS)
    seen = checks(monkeypatch)
    for m in (9, 300, 9):
        op(matrix(m, K), W, BIAS)
    assert not seen
    assert op.served_by_pytorch == 4


def test_calls_at_new_rows_wait_where_pytorch_must_not_serve(op, missing, monkeypatch):
    op(matrix(300, K), W, BIAS)
    monkeypatch.setenv("CUTLASS_OPS_STAND_IN", "0")
    op(matrix(300, K), W, BIAS)
    assert missing.launches[-1].outputs[0].shape == (300, N)


def test_pytorch_reads_no_layout_at_new_rows_that_kernels_refuse(missing):
    @co.epilogue
    def scaled(acc, scale: co.Col, residual: co.Tile):
        return acc * scale + residual

    op = ops.Op("scaled", scaled)
    for _ in range(2):
        for m in (8, 16):
            op(matrix(m, K), W, torch.rand(m), matrix(m, N))
    a, scale, residual = matrix(9, K), torch.rand(9), matrix(9, N)
    for wrong, name in [
        ((matrix(1, K).expand(9, K), scale, residual), "a"),
        ((matrix(9 * K).as_strided((9, K), (8, 1)), scale, residual), "a"),
        ((a, torch.rand(18)[::2], residual), "scale"),
        ((a, scale, matrix(9 * N).as_strided((9, N), (8, 1))), "residual"),
    ]:
        with pytest.raises(ValueError, match=f"^{name} has .*stride"):
            op(wrong[0], W, *wrong[1:])
    before = op.copied_inputs
    op(a, W, torch.rand(1).expand(9), residual)
    assert op.copied_inputs == before + 1


def test_pytorch_serves_groups_at_new_rows_as_a_checked_call_does(missing):
    w = torch.randn(3, N, K).to(BF16).mT

    def call(a, *ends, **out):
        return co.gemm(a, w, groups=co.Groups(torch.tensor(ends, dtype=torch.int32)), **out)

    for _ in range(2):
        for m in (64, 96):
            call(matrix(m, K), 10, 20, m)
    out = torch.full((72, N), 7.0, dtype=BF16)
    assert call(matrix(72, K), 10, 20, 30, out=out) is out
    assert (out[30:] == 7).all()  # rows of no group
    assert (out[:30] != 7).all()
    call(matrix(40, K), 10, 20, 40)
    with pytest.raises(ValueError, match=r"a must be \(T, K\)"):
        call(matrix(4, 10, K), 10, 20, 40)


@pytest.mark.parametrize("batch", [(9,), (3, 3)])
def test_results_of_pytorch_are_no_views_and_share_no_memory(missing, batch):
    @co.epilogue
    def again(acc, residual: co.Tile):
        return {"d": acc + residual, "same": acc + residual, "given": residual}

    op = ops.Op("again", again)
    for _ in range(2):
        for m in (8, 16):
            op(matrix(m, K), W, matrix(m, N))
    residual = matrix(*batch, N)
    for _ in range(2):
        results = op(matrix(*batch, K), W, residual)
        memory = {x.untyped_storage().data_ptr() for x in (*results, residual)}
        assert len(memory) == 4
        assert torch.equal(results.given, residual)
        assert not any(x._is_view() for x in results)


def misaligned(x):
    """The same values, one element beyond an aligned address."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def test_what_no_kernel_reads_is_refused_at_other_rows_too(missing):
    """Whatever came before: a server must not fail once its kernels are there."""
    f8 = torch.float8_e4m3fn
    w, x = (matrix(rows, 32).to(f8) for rows in (48, 8))
    experts, grouped = matrix(3 * 24, 16).view(3, 24, 16), matrix(9, 16)

    def groups(a, b):
        return co.gemm(a, b.mT, groups=co.Groups(torch.tensor([3, 3, len(a)], dtype=torch.int32)))

    for rows in (5, 6):
        co.gemm(x[:rows], w.t())
        groups(grouped[:rows], experts)
    off = torch.zeros(w.numel() + 1, dtype=f8)[1:].view(w.shape).copy_(w)
    one = torch.zeros(33, dtype=f8)[1:].view(1, 32).copy_(x[:1])
    calls = [
        lambda: co.gemm(x[:3], off.t()),
        lambda: co.gemm(one, w.t()),
        lambda: groups(grouped[:4], misaligned(experts)),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="multiples of 16 bytes"):
            call()


@pytest.mark.parametrize("shapes", [((3, 8), (8, 0)), ((0, 3, 8), (0, 8, 8))], ids=str)
def test_a_result_without_elements_has_no_plan(shapes):
    a, b = (torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes)
    with pytest.raises(UnsupportedError, match="D has no elements"):
        co.gemm_bias.plan(a, b, torch.zeros(b.shape[-1], dtype=torch.bfloat16))
