"""Modules in two processes on the CPU: DDP, FSDP2, and tensor-parallel linear layers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("two_processes.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed"),
]


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "tensor_parallel", "dtensors"])
def test_two_processes_compute_what_one_does(name, tmp_path):
    root = str(SCRIPT.parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    started = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(rank), str(tmp_path / "together")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=180)[0] for each in started]
    finally:
        for each in started:
            each.kill()
    assert [each.returncode for each in started] == [0, 0], "\n".join(said)
