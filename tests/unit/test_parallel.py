"""Modules in two processes on the CPU: DDP, FSDP2, and tensor-parallel linear layers."""

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"),
]

CASES = ["ddp", "fsdp2", "tensor_parallel", "residuals", "dtensors"]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_compute_what_one_does(name, tmp_path):
    from tests import parallel  # late: not every PyTorch has what it imports

    assert list(parallel.CASES) == CASES
    parallel.together(name, 2, "gloo", tmp_path)
