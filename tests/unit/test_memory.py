"""New tensors of warm calls: by a quick road, and the same as PyTorch's own."""

import math
from types import SimpleNamespace

import pytest
import torch
from fake_device import fake_device

import cutlass_ops as co
from cutlass_ops.run import memory, ops

BF16, F32 = torch.bfloat16, torch.float32

LAYOUTS = [
    ((3, 5), (5, 1)),
    ((3, 5), (1, 3)),
    ((3, 5), (8, 1)),
    ((7,), (1,)),
    ((2, 3, 4), (12, 4, 1)),
    ((0, 4), (4, 1)),
    ((), ()),
]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize(("shape", "strides"), LAYOUTS)
def test_a_new_tensor_is_pytorchs(shape, strides, inference, quick, monkeypatch):
    if not quick:  # as in a PyTorch that has it no more
        monkeypatch.setattr(memory, "_on_cpu", None)
    like = torch.empty(2, dtype=F32)
    with torch.inference_mode(inference):
        wanted = like.new_empty_strided(shape, strides, dtype=BF16)
        found = memory.new_tensor(like, shape, strides, BF16)
    for x in (found, wanted):
        assert (x.shape, x.stride(), x.dtype, x.device) == (shape, strides, BF16, like.device)
        assert type(x) is torch.Tensor
    for question in ("requires_grad", "is_leaf", "is_inference", "is_neg", "storage_offset", "numel"):
        answers = [getattr(x, question) for x in (found, wanted)]
        assert len({answer() if callable(answer) else answer for answer in answers}) == 1, question
    assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    if not inference:  # autograd records what is computed in it
        factor = torch.ones((), dtype=BF16, requires_grad=True)
        assert (found.zero_() * factor).grad_fn is not None


class OnCuda(SimpleNamespace):
    """What is asked of a tensor on a GPU."""

    is_cuda, is_cpu = True, False

    def get_device(self):
        return self.index

    def new_empty_strided(self, shape, strides, *, dtype):
        return "by the dispatcher", shape, strides, dtype


@pytest.mark.parametrize(("current", "how"), [(0, "at once"), (1, "by the dispatcher")])
def test_the_quick_road_leads_to_the_current_device_alone(current, how, monkeypatch):
    monkeypatch.setattr(memory, "_on_cuda", lambda *given: ("at once", *given))
    monkeypatch.setattr(memory, "_current_device", lambda: current)
    given = (2, 3), (3, 1), BF16
    assert memory.new_tensor(OnCuda(index=0), *given) == (how, *given)


@pytest.mark.parametrize("missing", ["_on_cuda", "_current_device"])
def test_a_pytorch_without_the_quick_road_has_its_own(missing, monkeypatch):
    monkeypatch.setattr(memory, "_on_cuda", lambda *_: "at once")
    monkeypatch.setattr(memory, "_current_device", lambda: 0)
    monkeypatch.setattr(memory, missing, None)
    assert memory.new_tensor(OnCuda(index=0), (2,), (1,), BF16)[0] == "by the dispatcher"


@co.epilogue
def with_sums(acc):
    """One output of each kind of shape."""
    return {"d": acc, "rows": co.e.sum(acc, dim=1), "columns": co.e.sum(acc, dim=0)}


def test_the_installed_pytorch_has_the_quick_road():
    assert memory._on_cpu is not None
    assert memory._on_cuda is not None


@pytest.mark.parametrize("leading", [(24,), (2, 12), (2, 3, 4)])
def test_outputs_of_every_shape_are_made_quickly(leading, monkeypatch):
    """A ``torch.Size`` would be refused there."""
    with fake_device(monkeypatch):
        monkeypatch.setattr(torch.Tensor, "new_empty_strided", None)
        op = ops.Op("with_sums", with_sums)
        b = torch.randn(64, 32).to(BF16).t()
        for rows, warm in ((1, 0), (1, 1), (2, 1), (2, 2)):  # the third is of new rows
            a = torch.randn(rows * leading[0], *leading[1:], 32).to(BF16)
            found = op(a, b)
            monkeypatch.setattr(ops, "check_call", None)  # only the first call is checked
            assert op.served_warm == warm
            exact = a.double() @ b.double()
            torch.testing.assert_close(found.d.double(), exact, rtol=1e-2, atol=1e-1)
            torch.testing.assert_close(found.rows.double(), exact.sum(-1), rtol=1e-2, atol=1e-1)
            torch.testing.assert_close(found.columns.double(), exact.reshape(-1, 64).sum(0), rtol=1e-2, atol=1e-1)


def test_workspace_is_new_at_each_call(monkeypatch):
    """A kept one would be the memory of a captured graph as well: docs/design.md."""
    with fake_device(monkeypatch) as device:
        device.workspace = 1000
        op, a, b = ops.Op("with_sums", with_sums), torch.randn(8, 32).to(BF16), torch.randn(64, 32).to(BF16).t()
        for _ in range(3):
            op(a, b)
        assert op.served_warm == 2
        spaces = [launch.workspace for launch in device.launches]
        assert all((x.shape, x.stride(), x.dtype) == ((1000,), (1,), torch.uint8) for x in spaces)
        assert len({x.data_ptr() for x in spaces}) == 3
        assert math.prod(spaces[0].shape) == spaces[0].untyped_storage().nbytes()
