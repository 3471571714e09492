"""Calls at a new number of rows: planned from one that was checked, with the kernel that a checked call would have."""

import pytest
import torch
from fake_device import fake_device

import cutlass_ops as co
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


def test_pytorch_serves_a_number_of_rows_whose_best_kernel_is_not_loaded_after_one_check(device, monkeypatch):
    op = ops.Op("relu", builtin.bias_relu)
    op(matrix(8, K), W, BIAS)
    (first,) = device.loaded
    device.absent.update(spec for spec in op.specs_of(matrix(8, K), W, BIAS) if spec != first)
    seen = checks(monkeypatch)
    for m in (4096, 2000, 4096):
        a = matrix(m, K)
        found = op(a, W, BIAS)
        torch.testing.assert_close(found.float(), (a.float() @ W.float() + BIAS).relu(), rtol=1e-2, atol=2e-2)
    assert len(seen) == 2
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
