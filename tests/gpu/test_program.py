"""The C++ program of examples/cpp on the device: a bundle's kernel without Python, compared with the host's own sum."""

import subprocess
from pathlib import Path

import pytest

from cutlass_ops.ship import packing, shipping
from tests import cmake

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cpp"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The program, and the bundle that its catalogue names."""
    folder = tmp_path_factory.mktemp("program")
    packing.pack(shipping.load(str(EXAMPLE / "catalogue.toml"))).write(folder / "kernels.bundle")
    cmake.build(EXAMPLE, folder / "build")
    return folder / "build" / "bias_relu", folder / "kernels.bundle"


# The catalogue's own problem; one row; extents that no tile divides.
@pytest.mark.parametrize("problem", [(512, 1024, 1024), (1, 64, 64), (1000, 520, 72)], ids=str)
def test_every_element_is_within_its_bound(program, problem):
    done = subprocess.run([*program, *map(str, problem)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every element is within the bound" in done.stdout
