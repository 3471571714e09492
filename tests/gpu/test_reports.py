"""What users of other libraries reported in public, tried here: each program prints a line for each report."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = sorted(Path(__file__).with_name("reports").glob("*.py"))

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_it_holds(program):
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert (done.returncode, [line for line in lines if not line.startswith("PASS")]) == (0, []), done.stderr
    assert len(lines) > 5
