"""Kernels of batches compile, and their machine code has the instructions of their kind."""

import pytest

from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.tools.inspection import inspect
from tests.gpu import kernels

pytestmark = pytest.mark.compile

# Each way in which a kernel finds a batch's operands, inputs and outputs. Those marked gpu compile only on
# machines that run the GPU tests. The others cover all their parts.
NAMES = (
    "batched-small-tiles",
    "batched-small-misaligned",
    "batched-small-col-row-bf16.col",
    "batched-sm80-registers",
    pytest.param("batched-warp_specialized-plain", marks=pytest.mark.gpu),
    pytest.param("batched-cluster-inputs", marks=pytest.mark.slow),
    pytest.param("batched-swapped-inputs", marks=pytest.mark.gpu),
    # Tiles by TMA in CUTLASS's epilogue: "ragged_k-pingpong-tiles" has the same ones.
    pytest.param("batched-pingpong-tiles", marks=pytest.mark.gpu),
    pytest.param("batched-cooperative-registers", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_of_batches_compiles(name):
    spec = kernels.batched()[name]
    report = inspect(build_artifact(spec))
    assert report.spill_stores == report.spill_loads == 0
