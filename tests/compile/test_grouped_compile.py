"""Kernels of groups of rows compile, and their machine code has the instructions of their kind."""

import pytest

from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.tools.inspection import inspect
from tests.gpu import kernels

pytestmark = pytest.mark.compile

# Those marked gpu compile only on machines that run the GPU tests. The others cover all their parts.
NAMES = (
    "grouped-swapped-inputs",
    pytest.param("grouped-pingpong-inputs", marks=pytest.mark.gpu),
    pytest.param("grouped-swapped-tiles", marks=pytest.mark.slow),
    "grouped-swapped-blocks",
    pytest.param("grouped-rows-blocks", marks=pytest.mark.gpu),
)


OF_K = (
    "ragged_k-rows-plain",
    pytest.param("ragged_k-cooperative-inputs", marks=pytest.mark.gpu),
    pytest.param("ragged_k-pingpong-tiles", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_of_groups_compiles(name):
    spec = kernels.grouped()[name]
    report = inspect(build_artifact(spec))
    assert report.spill_stores == report.spill_loads == 0


@pytest.mark.parametrize("name", OF_K)
def test_a_kernel_of_groups_of_k_compiles(name):
    spec = kernels.ragged_k()[name]
    report = inspect(build_artifact(spec))
    assert report.spill_stores == report.spill_loads == 0
