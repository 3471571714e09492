"""Modules in two processes on the CPU: DDP, FSDP2, and tensor-parallel linear layers."""

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_processes_compute_what_one_does(tmp_path):
    """All cases in the same two processes, which take ten seconds each to start."""
    from tests import parallel  # late: not every PyTorch has what it imports

    parallel.together(",".join(parallel.CASES), 2, "gloo", tmp_path, seconds=400)
