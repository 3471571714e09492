"""New tensors of warm calls on a GPU: the allocator's, on the right device, and of a captured graph where one is."""

import threading

import pytest
import torch

from cutlass_ops.run import plan

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
SHAPE, STRIDES = (100, 30), (32, 1)


def made(like):
    return plan.new_tensor(like, SHAPE, STRIDES, BF16)


def counted():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


@pytest.mark.parametrize("inference", [True, False])
def test_a_new_tensor_is_pytorchs(inference, monkeypatch):
    like = torch.empty(1, device="cuda")
    with torch.inference_mode(inference):
        wanted = like.new_empty_strided(SHAPE, STRIDES, dtype=BF16)
        monkeypatch.setattr(torch.Tensor, "new_empty_strided", None)  # the quick road asks nobody else
        before = counted()
        found = made(like)
        assert counted() == before + 1
        found.fill_(1)
    for x in (found, wanted):
        assert (x.shape, x.stride(), x.dtype, x.device) == (SHAPE, STRIDES, BF16, like.device)
        assert (x.is_inference(), x.requires_grad, x.data_ptr() % 256) == (inference, False, 0)
    assert found.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()
    assert found.float().sum().item() == SHAPE[0] * SHAPE[1]


def test_in_another_thread():
    like, found = torch.empty(1, device="cuda"), []
    thread = threading.Thread(target=lambda: found.append(made(like)))
    thread.start()
    thread.join()
    assert found[0].device == like.device


def test_a_captured_graph_owns_what_is_made_in_it():
    like, graph = torch.empty(1, device="cuda"), torch.cuda.CUDAGraph()
    made(like)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = made(like).fill_(2)
    # Memory of the graph's pool is no other tensor's.
    others = [made(like).fill_(3) for _ in range(20)]
    assert found.data_ptr() not in {x.data_ptr() for x in others}
    graph.replay()
    assert found.unique().tolist() == [2]
    assert all(x.unique().tolist() == [3] for x in others)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_tensor_goes_to_its_likes_device_and_not_to_the_current_one():
    likes = [torch.empty(1, device=f"cuda:{index}") for index in (0, 1)]
    for current in (0, 1):
        with torch.cuda.device(current):
            assert [made(like).device.index for like in likes] == [0, 1]
            assert torch.cuda.current_device() == current
