"""What users of other libraries reported in public, tried here: each program prints a line for each report."""

import runpy
from pathlib import Path

import pytest
import torch

PROGRAMS = sorted(Path(__file__).with_name("reports").glob("*.py"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # as for a user
]


# In this process: kernels are then foreseen. Compiled one by one, they take longer than a piece of a campaign.
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_holds(program, capsys):
    if program.stem == "large" and not torch.empty(0, device="cuda").is_cuda:
        pytest.skip("its tensors are too large for a made-up device")
    runpy.run_path(str(program), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("PASS")] == []
    assert len(lines) > 5
