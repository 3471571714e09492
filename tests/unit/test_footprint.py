"""What a kernel takes of shared memory, against what the compiler measured and what the target has."""

from typing import get_args

import pytest
from hypothesis import given

import cutlass_ops as co
from cutlass_ops.base import arch
from cutlass_ops.declare.config import InstructionShape, Means
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.legality import check
from cutlass_ops.kinds.sm90.footprint import means_smem, pipeline_stages
from cutlass_ops.kinds.table import shared_memory
from tests.strategies import PATIENT
from tests.unit.test_declarations import specs
from tests.unit.test_legality import COOP, WS, cluster, gated, rms, sm80, sm90


@co.epilogue
def scaled(acc, alpha: co.Scalar):
    return acc * alpha


MISALIGNED = {"d": "bf16.row.align1", "inputs": {"r": "bf16.row.align1", "gate": "bf16.row.align4"}}

# Bytes that nvcc 13.0 gave for sizeof(GemmKernel::SharedStorage) with CUTLASS 4.2.
MEASURED = [
    (sm90(), 6, 205824),
    (sm90(stages=4), 4, 140288),
    (sm90(stages=2), 2, 74752),  # where barriers of the order of warpgroups take another 128 bytes
    (sm90(128, 256, 64, **COOP, **cluster(2, 1)), 4, 214016),
    (sm90(256, 128, 64, **COOP, d="bf16.col"), 4, 215040),
    (sm90(64, 32, 128, swap_ab=True), 9, 231424),
    (sm90(64, 32, 256, swap_ab=True, **WS), 4, 197632),
    (sm90(64, 8, 64, swap_ab=True), 24, 225280),
    (sm90(128, 128, 64, epilogue=gated, inputs={"gate": "f32.row", "r": "f16.col"}), 5, 215040),
    (sm90(epilogue=gated, **MISALIGNED), 6, 205824),
    (sm80(stages=4), 4, 65536),
    (sm80((16, 128, 64), (16, 32, 64), d="f32.row"), 3, 55296),
    (sm80((128, 128, 16), (64, 64, 16), instruction=InstructionShape(16, 8, 8), stages=2), 2, 17424),
    (
        sm80((128, 128, 16), (64, 64, 16), instruction=InstructionShape(16, 8, 8), stages=2, d="bf16.row.align4"),
        2,
        16384,
    ),
]


@pytest.mark.parametrize(
    ("changes", "gathered", "staged"),
    [
        ({"m": 64}, 1, 12),
        ({"n": 136, "swap_ab": True}, 2, 12),  # more rows than are legal
        ({**COOP, "m": 256, "n": 64, "swap_ab": True}, 1, 12),
        ({**WS, "n": 8, "k": 256, "swap_ab": True}, 1, 0),
        ({"m": 64, "realign": True, "a": "bf16.row.align2"}, 1, 12),
        ({"m": 64, "a": "bf16.row.align2"}, 1, 0),  # such rows cannot be read in pieces, nor by TMA
    ],
)
def test_means_of_rows_take_whole_kib_besides(changes, gathered, staged):
    """Where the main loop gathers them, and where warps of persistent kernels read rows beside it."""
    ways = {means: sm90(epilogue=rms, stages=2, means=means, **changes) for means in get_args(Means)}
    sizes = {"gathered": gathered * arch.KIB, "beside": staged * arch.KIB, "ahead": 0}
    assert {means: means_smem(way) for means, way in ways.items()} == sizes
    without = sm90(epilogue=scaled, stages=2, **changes)
    assert shared_memory(ways["gathered"]) == shared_memory(without) + sizes["gathered"]
    if not ways["beside"].config.swap_ab:  # each thread has the means of its own rows in registers
        assert shared_memory(ways["beside"]) == shared_memory(without) + sizes["beside"]
        assert shared_memory(ways["ahead"]) == shared_memory(without)


@pytest.mark.parametrize(("kernel", "stages", "size"), MEASURED)
def test_shared_memory_is_what_the_compiler_measured(kernel, stages, size):
    assert shared_memory(kernel) == size
    assert (pipeline_stages(kernel) if kernel.config.arch == "sm90" else kernel.config.stages) == stages


@pytest.mark.slow
@PATIENT
@given(specs())
def test_open_stages_are_as_many_as_fit(drawn):
    if drawn.config.arch != "sm90" or drawn.config.stages is not None or check(drawn):
        return
    limit, stages = arch.target(drawn.target).shared_memory, pipeline_stages(drawn)
    assert shared_memory(drawn) <= limit
    one_more = KernelSpec.from_json(drawn.to_json() | {"config": drawn.to_json()["config"] | {"stages": stages + 1}})
    assert stages == 64 or {v.rule for v in check(one_more)} == {"shared_memory"}
