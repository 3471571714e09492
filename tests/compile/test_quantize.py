"""Kernels that quantise, through the real compiler: how D is stored, registers and shared memory."""

import pytest

import cutlass_ops as co
from cutlass_ops.base.dtypes import bf16, e4m3, e5m2, f32
from cutlass_ops.base.sass import count_opcodes
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.declare.quantizing import QuantizeSpec
from cutlass_ops.kinds.proof import prove_tensor_cores
from cutlass_ops.kinds.table import shared_memory
from cutlass_ops.tools.inspection import inspect
from tests.sampling import compiled

pytestmark = [pytest.mark.compile, pytest.mark.slow]


@co.epilogue
def biased(acc, bias: co.Row, residual: co.Tile):
    y = co.e.relu(acc + bias) + residual
    return {"d": co.e.quantize(y, "e5m2"), "amax": co.e.amax(y, dim=1)}


@co.epilogue
def swiglu(acc, up: co.Product):
    return co.e.quantize(co.e.silu(acc) * up, "e4m3")


@co.epilogue
def scaled_swiglu(acc, up: co.Product, scale_x: co.Col, scale_gate: co.Row, scale_up: co.Row):
    return co.e.quantize(co.e.silu(acc * scale_x * scale_gate) * (up * scale_x * scale_up), "e4m3")


FP32_SCALES = dict.fromkeys(("scale_x", "scale_gate", "scale_up"), "f32")
COOPERATIVE, PINGPONG = {"schedule": "cooperative"}, {"schedule": "pingpong"}
# How often a thread stores by TMA: four times 32 columns for each block and each 64 or 128 rows. Not at all where each
# warp stores its own rows, as nothing is read for all warps or added up over them.
SHARED_BY_TWO = {"schedule": "pingpong", "cluster": (1, 2)}
KERNELS = {
    "swiglu": (swiglu, {}, "bf16", "e4m3.row", (128, 256, 64), COOPERATIVE, 0),
    "of two blocks": (scaled_swiglu, FP32_SCALES, "e4m3", "e4m3.row", (192, 128, 128), SHARED_BY_TWO, 0),
    "promoted, of two blocks": (
        scaled_swiglu,
        FP32_SCALES,
        "e4m3",
        "e4m3.row",
        (128, 128, 128),
        {"schedule": "cooperative", "cluster": (2, 2), "accumulation": "promoted"},
        0,
    ),
    "scaled": (scaled_swiglu, FP32_SCALES, "e4m3", "e4m3.row", (128, 256, 128), COOPERATIVE, 0),
    "small": (scaled_swiglu, FP32_SCALES, "e4m3", "e4m3.row", (64, 256, 128), PINGPONG, 0),
    "residual": (biased, {"bias": "bf16", "residual": "bf16.row"}, "e4m3", "e5m2.row", (128, 128, 128), PINGPONG, 8),
}


@pytest.mark.parametrize(
    ("epilogue", "inputs", "a", "d", "tile", "config", "stores"),
    compiled(KERNELS, beside_gpu_tests={"small", "scaled", "of two blocks"}),
)
def test_a_kernel_quantises_what_it_stores(epilogue, inputs, a, d, tile, config, stores):
    cluster = co.ClusterShape(*config.get("cluster", (2, 1)))
    made = co.Sm90Config(co.ThreadblockShape(*tile), **config | {"cluster": cluster})
    wanted = co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, inputs=inputs, config=made)
    artifact = build_artifact(wanted)
    report = inspect(artifact)
    prove_tensor_cores(artifact.library, wanted)
    assert count_opcodes(artifact.library).get("UTMASTG", 0) == stores
    assert report.spill_stores == report.spill_loads == 0
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)


@pytest.mark.parametrize("block", [128, None])
@pytest.mark.parametrize(("x", "d"), [(bf16, e4m3), (f32, e5m2)])
def test_the_kernel_of_a_tensor(x, d, block):
    wanted = QuantizeSpec(x, d, block, "sm_90")
    artifact = build_artifact(wanted)
    assert artifact.spec == wanted
    report = inspect(artifact)
    assert report.slug == wanted.slug
    assert report.spill_stores == report.spill_loads == report.stack == 0
    assert (report.threads, report.stages) == (256, 1)
    # Enough threads that loads of 16 bytes are on their way from all of memory.
    assert report.blocks_per_sm >= 5
