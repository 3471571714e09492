"""Modules under DDP, FSDP2 and tensor parallel, in several processes: on gloo and the CPU, and on NCCL and GPUs.

Each process runs this file as a script, and in it one of :data:`CASES`.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import cutlass_ops as co

BF16 = torch.bfloat16
# A fourth of each is a line of 16 bytes.
K, HIDDEN, ROWS = 32, 64, 32


class Place(NamedTuple):
    """One of several processes: its number, how many there are, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def mesh(self) -> Any:
        """All processes in a row."""
        return init_device_mesh(self.device.type, (self.world,))

    def model(self) -> nn.Sequential:
        """The same model in each process."""
        torch.manual_seed(0)
        layers = (co.nn.MLP(K, HIDDEN), co.nn.GatedMLP(K, HIDDEN), co.nn.RMSNormLinear(K, K))
        return nn.Sequential(*layers).to(self.device, BF16)

    def data(self) -> Tensor:
        """The same rows in each process."""
        torch.manual_seed(1)
        return torch.randn(ROWS, K).to(self.device, BF16)

    def part(self) -> Tensor:
        """This process's rows."""
        return self.data().chunk(self.world)[self.rank]


def _close(found: Tensor, exact: Tensor, allowed: float = 0.02) -> None:
    whole = found.full_tensor() if isinstance(found, DTensor) else found
    assert whole.shape == exact.shape, (whole.shape, exact.shape)
    assert (whole.double() - exact.double()).norm() <= allowed * exact.double().norm()


def _backward(d: Tensor) -> None:
    d.float().square().mean().backward()


def ddp(place: Place) -> None:
    """Gradients are averaged over the processes' parts of a batch."""
    alone, spread = place.model(), DistributedDataParallel(place.model())
    _backward(alone(place.data()))
    _backward(spread(place.part()))
    for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
        _close(p.grad, q.grad)


class _Scaled(nn.Module):
    """A layer that notes the greatest value of its input, and with which scale it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.state, self.scales = co.nn.Linear(K, K), co.nn.Fp8State(history=2), []

    def forward(self, x: Tensor) -> Tensor:
        self.scales.append(self.state.scale.clone())
        self.state.quantize(x.detach())
        d: Tensor = self.layer(x)
        self.state.step()
        return d


def fp8_state(place: Place) -> None:
    """DDP sends the first process's scale and history to all before each pass, which then quantise alike."""
    module = _Scaled().to(place.device, BF16)
    spread = DistributedDataParallel(module)
    parts = [place.data() * (2.0 + rank) for rank in range(place.world)]
    for _ in range(3):
        _backward(spread(parts[place.rank]))
    assert {x.dtype for x in module.buffers()} == {torch.float32}
    every = [torch.zeros(3, device=place.device) for _ in range(place.world)]
    dist.all_gather(every, torch.stack(module.scales))
    scale = parts[0].abs().max().float().reshape(1) / 448
    for scales in every:
        torch.testing.assert_close(scales, torch.cat((torch.ones_like(scale), scale, scale)))


def fsdp2(place: Place) -> None:
    """Parameters are whole in a forward and a backward, and sharded otherwise; a step gives what one process gets."""
    alone, spread, mesh = place.model(), place.model(), place.mesh
    for part in spread:
        fully_shard(part, mesh=mesh)
    fully_shard(spread, mesh=mesh)
    steps = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, spread)]
    for _ in range(2):
        _backward(alone(place.data()))
        _backward(spread(place.part()))
        for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
            assert isinstance(p, DTensor)
            _close(p.grad, q.grad)
        for step in steps:
            step.step()
            step.zero_grad()


def tensor_parallel(place: Place) -> None:
    """A column and a row linear: each process multiplies its part of both weights."""
    mesh, world = place.mesh, place.world
    alone = place.model()[:2]
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
        *((HIDDEN // world, K), (K, HIDDEN // world))
    ]
    results = []
    for m in (alone, spread):
        x = place.data().requires_grad_()
        d = m(x)
        _backward(d.full_tensor() if isinstance(d, DTensor) else d)
        results.append((d, x.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        _close(found, wanted)
    for p, q in zip(spread.parameters(), alone.parameters(), strict=True):
        _close(p.grad, q.grad)


def residuals(place: Place) -> None:
    """Residuals reach row-parallel layers, whose hooks drop arguments by position; autocast gives one dtype."""
    torch.manual_seed(0)
    layers = co.nn.MLP(K, HIDDEN), co.nn.GatedMLP(K, HIDDEN), co.nn.DecoderBlock(K, HIDDEN, 8, head_dim=8)
    alone = nn.ModuleList(layers)
    column, row = ColwiseParallel(), RowwiseParallel()
    gated = {"gate_proj": column, "up_proj": column, "down_proj": row}
    attention = {"q_proj": column, "k_proj": column, "v_proj": column, "o_proj": row}
    block = {f"{part}.{n}": p for part, plan in (("self_attn", attention), ("mlp", gated)) for n, p in plan.items()}
    spread, mixed = copy.deepcopy(alone).to(place.device, BF16), copy.deepcopy(alone).to(place.device)
    alone = alone.to(place.device, BF16)
    for module, plan in zip(spread, ({"fc1": column, "fc2": row}, gated, block), strict=True):
        parallelize_module(module, place.mesh, plan)
    x, residual = place.data().unflatten(0, (2, -1)), 4 * place.data().flip(0).unflatten(0, (2, -1))
    for i in range(2):
        _close(spread[i](x, residual=residual), alone[i](x, residual=residual))
    _close(spread[2](x), alone[2](x))
    parallelize_module(mixed[0], place.mesh, {"fc1": column, "fc2": row})
    with torch.autocast(place.device.type, BF16):
        assert mixed[0](x.float()).dtype is BF16
    patched = nn.Sequential(nn.Linear(K, HIDDEN), nn.Linear(HIDDEN, K)).to(x)
    wanted = patched(x)
    co.patch(patched)
    parallelize_module(patched, place.mesh, {"0": column, "1": row})
    _close(patched(x), wanted)
    co.unpatch(patched)
    assert co.patch(co.patch(patched), dry_run=True).kept == {
        "0": "its weight is a DTensor",
        "1": "its weight is a DTensor",
    }


def dtensors(place: Place) -> None:
    """A linear layer takes and gives DTensors, with a residual, and refuses what is not one part of a product."""
    mesh, x = place.mesh, place.data()
    torch.manual_seed(2)
    residual = torch.randn(ROWS, HIDDEN).to(x)
    for placement, of_x, of_d in ((Shard(0), Replicate(), Shard(1)), (Shard(1), Shard(1), Replicate())):
        alone = co.nn.Linear(K, HIDDEN, activation="gelu" if of_x.is_replicate() else None).to(x)
        dist.broadcast(alone.weight.data, 0)
        dist.broadcast(alone.bias.data, 0)
        spread = copy.deepcopy(alone)
        for name, where in (("weight", placement), ("bias", Shard(0) if of_x.is_replicate() else Replicate())):
            whole = getattr(alone, name).detach()
            setattr(spread, name, nn.Parameter(DTensor.from_local(whole, mesh).redistribute(mesh, [where])))
        parts = (DTensor.from_local(v, mesh).redistribute(mesh, [w]) for v, w in ((x, of_x), (residual, of_d)))
        of_x, of_residual = parts
        d = spread(of_x, residual=of_residual)
        _close(d, alone(x, residual=residual))
        _backward(d.full_tensor())
        _backward(alone(x, residual=residual))
        _close(spread.weight.grad, alone.weight.grad)
        _close(spread.bias.grad, alone.bias.grad)
    _refused(lambda: co.gemm(spread.weight.data, x.t()), TypeError, "spread over several devices")
    activated = co.nn.Linear(K, HIDDEN, activation="gelu")
    activated.weight = spread.weight
    _refused(lambda: activated(x[:, : K // place.world]), NotImplementedError, "gelu needs the whole sum")
    spread.weight = nn.Parameter(DTensor.from_local(alone.weight.detach(), mesh))
    _refused(lambda: spread(x), NotImplementedError, "use ColwiseParallel or RowwiseParallel")


def _refused(call: Callable[[], object], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call()


CASES: dict[str, Callable[[Place], None]] = {
    "ddp": ddp,
    "fp8_state": fp8_state,
    "fsdp2": fsdp2,
    "tensor_parallel": tensor_parallel,
    "residuals": residuals,
    "dtensors": dtensors,
}


# ---- Processes -------------------------------------------------------------------------------------------------------


def together(name: str, world: int, backend: str, folder: Path, *, seconds: float = 180, pretended: Any = None) -> Any:
    """Run cases, with commas between their names, in several processes that meet in an empty folder.

    gloo computes on the CPU, and NCCL on a GPU for each process. Processes on the CPU take a pretended device for
    theirs, and the kernels that the first one launched there are returned. Raises AssertionError, with what they said,
    if one failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pretended").write_bytes(pickle.dumps(pretended))
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, name, str(rank), str(world), backend, str(folder)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [each.communicate(timeout=seconds)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0] * world, "\n".join(said)
    return pickle.loads((folder / "kernels").read_bytes())


def _main() -> None:
    """Run cases as one of several processes."""
    name, rank, world, backend, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
    torch.set_num_threads(1)
    place = Place(rank, world, torch.device("cpu" if backend == "gloo" else f"cuda:{rank}"))
    pretended = pickle.loads((folder / "pretended").read_bytes())
    kernels: list[Any] = []
    if backend == "nccl":
        torch.cuda.set_device(rank)
        only_what_is_called()
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world)

    def run() -> None:
        for each in name.split(","):
            print(f"---- {each}", flush=True)
            CASES[each](place)

    if pretended is None:
        run()
    else:
        kernels = _on(pretended, run)
    dist.destroy_process_group()
    if rank == 0:
        (folder / "kernels").write_bytes(pickle.dumps(kernels))
    # Now and then, threads of PyTorch's that still run abort the interpreter's end.
    sys.stdout.flush()
    os._exit(0)


def only_what_is_called() -> None:
    """Have calls wait for their kernels, and compile none that other rows might need."""
    from cutlass_ops.base import env
    from cutlass_ops.compilation.background import Background

    os.environ[env.STAND_IN.name] = "0"
    Background.current().close()


def _on(device: Any, run: Callable[[], object]) -> list[Any]:
    """Run on a device that is made up; return its kernels."""
    from tests.gpu import foreseen

    return foreseen.noted(device, run)


if __name__ == "__main__":
    _main()
