"""The notebooks run from their first cell to the last on the CPU, and are kept without outputs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NAMES = ["fused_epilogue", "tensor_cores"]


def _code(name):
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_every_notebook_is_run():
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_no_outputs(name):
    for cell in _code(name):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None


# The cells are plain Python, so Jupyter is not needed to run them.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"), [("fused_epilogue", "largest error: fused"), ("tensor_cores", "pad K to 4104")]
)
def test_a_notebook_runs(name, said, tmp_path):
    script = tmp_path / f"{name}.py"
    script.write_text("\n\n".join("".join(cell["source"]) for cell in _code(name)))
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=NOTEBOOKS, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert said in done.stdout
