"""Modules in several processes with a GPU each: DDP, FSDP2, and tensor-parallel linear layers, on NCCL."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"),
]

CASES = ["ddp", "fp8_state", "fsdp2", "tensor_parallel", "residuals", "dtensors"]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_processes_compute_what_one_does(name, world, tmp_path):
    from tests import parallel  # late: not every PyTorch has what it imports

    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    assert list(parallel.CASES) == CASES
    parallel.together(name, world, "nccl", tmp_path)
