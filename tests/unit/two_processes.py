"""What each of two processes runs in test_parallel.py: modules under DDP, FSDP2 and tensor parallel, on gloo."""

import copy
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import cutlass_ops as co

BF16 = torch.bfloat16
K, HIDDEN, ROWS = 16, 32, 8


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        co.nn.MLP(K, HIDDEN, dtype=BF16), co.nn.GatedMLP(K, HIDDEN, dtype=BF16), co.nn.RMSNormLinear(K, K, dtype=BF16)
    )


def data():
    torch.manual_seed(1)
    return torch.randn(ROWS, K).to(BF16)


def close(found, exact, allowed=0.02):
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == exact.shape, (whole.shape, exact.shape)
    assert (whole.double() - exact.double()).norm() <= allowed * exact.double().norm()


def ddp(rank):
    """Gradients are averaged over the processes' halves of a batch."""
    alone, spread = model(), DistributedDataParallel(model())
    alone(data()).float().square().mean().backward()
    spread(data()[rank * ROWS // 2 :][: ROWS // 2]).float().square().mean().backward()
    for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
        close(p.grad, q.grad)


def fsdp2(rank):
    """Parameters are whole in a forward and a backward, and sharded otherwise; a step gives what one process gets."""
    alone, spread = model(), model()
    for part in spread:
        fully_shard(part)
    fully_shard(spread)
    steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, spread)]
    for _ in range(2):
        alone(data()).float().square().mean().backward()
        spread(data()[rank * ROWS // 2 :][: ROWS // 2]).float().square().mean().backward()
        for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
            assert isinstance(p, DTensor)
            close(p.grad, q.grad)
        for step in steps:
            step.step()
            step.zero_grad()


def tensor_parallel(rank):
    """A column and a row linear: each process multiplies its part of both weights."""
    mesh = init_device_mesh("cpu", (2,))
    alone = model()[:2]
    with torch.no_grad():
        for p in alone.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    spread = copy.deepcopy(alone)
    plan = {
        "0.fc1": ColwiseParallel(),
        "0.fc2": RowwiseParallel(),
        "1.gate_proj": ColwiseParallel(),
        "1.up_proj": ColwiseParallel(),
        "1.down_proj": RowwiseParallel(),
    }
    parallelize_module(spread, mesh, plan)
    assert [p.to_local().shape for p in (spread[0].fc1.weight, spread[0].fc2.weight)] == [
        *((HIDDEN // 2, K), (K, HIDDEN // 2)),
    ]
    results = []
    for m in (alone, spread):
        x = data().requires_grad_()
        d = m(x)
        (d.full_tensor() if isinstance(d, DTensor) else d).float().square().mean().backward()
        results.append((d, x.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        close(found, wanted)
    for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
        close(p.grad, q.grad)


def dtensors(rank):
    """A linear layer takes and gives DTensors, with a residual, and refuses what is not one part of a product."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(2)
    x, residual = data(), torch.randn(ROWS, HIDDEN).to(BF16)
    for placement, of_x, of_d in ((Shard(0), Replicate(), Shard(1)), (Shard(1), Shard(1), Replicate())):
        alone = co.nn.Linear(K, HIDDEN, dtype=BF16, activation="gelu" if of_x.is_replicate() else None)
        dist.broadcast(alone.weight.data, 0)
        dist.broadcast(alone.bias.data, 0)
        spread = copy.deepcopy(alone)
        for name, where in (("weight", placement), ("bias", Shard(0) if of_x.is_replicate() else Replicate())):
            whole = getattr(alone, name).detach()
            setattr(spread, name, nn.Parameter(DTensor.from_local(whole, mesh).redistribute(mesh, [where])))
        parts = (DTensor.from_local(v, mesh).redistribute(mesh, [w]) for v, w in ((x, of_x), (residual, of_d)))
        d = spread(*parts)
        close(d, alone(x, residual))
        d.full_tensor().float().square().mean().backward()
        alone(x, residual).float().square().mean().backward()
        close(spread.weight.grad, alone.weight.grad)
        close(spread.bias.grad, alone.bias.grad)
    refused(lambda: co.gemm(spread.weight.data, x.t()), TypeError, "spread over several devices")
    spread.activation = "gelu"
    refused(lambda: spread(x[:, : K // 2]), NotImplementedError, "gelu needs the whole sum")
    spread.weight = nn.Parameter(DTensor.from_local(alone.weight.detach(), mesh))
    refused(lambda: spread(x), NotImplementedError, "use ColwiseParallel or RowwiseParallel")


def refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def main():
    """Run one of the functions above as one of two processes."""
    name, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    globals()[name](rank)
    dist.destroy_process_group()
    # Now and then, threads of PyTorch's that still run abort the interpreter's end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
