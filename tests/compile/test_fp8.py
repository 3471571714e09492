"""FP8 kernels through the real compiler: the instruction in the machine code, registers and shared memory."""

import pytest

import cutlass_ops as co
from cutlass_ops.base.sass import count_opcodes
from cutlass_ops.compilation.builder import build_artifact
from cutlass_ops.epilogue import composed
from cutlass_ops.kinds.proof import prove_tensor_cores
from cutlass_ops.kinds.table import shared_memory
from cutlass_ops.tools.inspection import inspect
from tests.sampling import compiled

pytestmark = [pytest.mark.compile, pytest.mark.slow]


@co.epilogue
def scaled(acc, scale_a: co.Col, scale_b: co.Row, bias: co.Row):
    return acc * scale_a * scale_b + bias


@co.epilogue
def bias(acc, bias: co.Row):
    return acc + bias


# Columns of a tile, and instructions: four along K, of each piece. With few columns, each of two warpgroups has 64 rows
# in two pieces of 64 columns, twice in the loop over two steps and once for an odd one. So it is where sums are scaled,
# see "kept" below. Sums that leave few registers, from 184 columns on, have a loop over one step: in three pieces, they
# spilled 400 bytes and took twice as long.
PROMOTED = {"pieces": (128, 2 * 4 * 3), "whole": (184, 4), "in_turn": (256, 2 * 4)}


@pytest.mark.parametrize(("columns", "instructions"), compiled(PROMOTED, beside_gpu_tests={"pieces"}))
def test_a_kernel_promotes_its_sums(columns, instructions):
    made = co.Sm90Config(
        co.ThreadblockShape(128, columns, 128), co.ClusterShape(2, 1), schedule="cooperative", accumulation="promoted"
    )
    scales = {"scale_a": "f32", "scale_b": "f32"}
    wanted = co.KernelSpec(a="e4m3.row", b="e4m3.col", d="bf16.row", epilogue=scaled, inputs=scales, config=made)
    artifact = build_artifact(wanted)
    report = inspect(artifact)
    assert prove_tensor_cores(artifact.library, wanted)["QGMMA"] == instructions
    assert report.spill_stores == report.spill_loads == 0


# The most accumulators that two blocks on a multiprocessor may have: 64 registers a thread.
RESIDENT = {
    "fast": ("e4m3", "e4m3", (128, 64, 128), {"swap_ab": True}),
    "promoted": ("e5m2", "e4m3", (128, 32, 128), {"swap_ab": True, "accumulation": "promoted"}),
    "16_bits": ("bf16", "bf16", (64, 128, 64), {}),
}


@pytest.mark.parametrize(("a", "b", "tile", "config"), compiled(RESIDENT, beside_gpu_tests={"fast"}))
def test_two_blocks_have_room_on_a_multiprocessor(a, b, tile, config):
    made = co.Sm90Config(co.ThreadblockShape(*tile), schedule="warp_specialized", resident=2, **config)
    inputs = {"scale_a": "f32", "scale_b": "f32", "bias": "f32"}
    wanted = co.KernelSpec(a=f"{a}.row", b=f"{b}.col", d="bf16.row", epilogue=scaled, inputs=inputs, config=made)
    artifact = build_artifact(wanted)
    report = inspect(artifact)
    prove_tensor_cores(artifact.library, wanted)
    assert report.blocks_per_sm == 2
    assert report.stages >= 3
    assert report.spill_stores == report.spill_loads == 0
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)


# Few scales of columns are kept in registers, and a whole step is multiplied at once. More are read after the products,
# out of a stage that is released later; then there are two pieces of a warpgroup's rows, as with "pieces" above.
BLOCKS = {
    "kept": ("128x128", (128, 128), (1, 1), {"schedule": "cooperative"}, 4),
    "late": ("128x1", (128, 64), (1, 2), {"schedule": "pingpong", "swap_ab": True}, 2 * 4 * 3),
}


@pytest.mark.parametrize(("b", "tile", "cluster", "config", "instructions"), BLOCKS.values(), ids=BLOCKS)
def test_a_kernel_scales_its_sums(b, tile, cluster, config, instructions):
    made = co.Sm90Config(co.ThreadblockShape(*tile, 128), co.ClusterShape(*cluster), accumulation="promoted", **config)
    wanted = co.KernelSpec(
        a="e4m3.row.blocks1x128",
        b=f"e4m3.col.blocks{b}",
        d="bf16.row",
        epilogue=composed.scaled_blocks.graph.then(bias.graph),
        config=made,
    )
    artifact = build_artifact(wanted)
    report = inspect(artifact)
    proved = prove_tensor_cores(artifact.library, wanted)
    assert proved["QGMMA"] == instructions
    assert proved["LDGSTS"] >= 2  # scales of rows and of columns
    assert report.spill_stores == report.spill_loads == 0
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)


@co.epilogue
def quantised(acc, scale: co.Scalar):
    return {"d": acc * co.e.reciprocal(scale), "amax": co.e.amax(acc, dim=1)}


@co.epilogue
def saved(acc):
    return {"d": co.e.relu(acc), "pre": acc}


# Stored by the epilogue of this project, by CUTLASS's, and by threads; of FP8 and of 16 bits.
RESULTS = {
    "own": ("e4m3", "e4m3.row", quantised, {}, {"schedule": "pingpong"}),
    "cutlass": ("bf16", "e4m3.row", saved, {"pre": "e5m2.row"}, {"schedule": "cooperative", "swap_ab": True}),
    "threads": ("i8", "e5m2.row.align8", quantised, {}, {"schedule": "pingpong"}),
}


@pytest.mark.parametrize(("a", "d", "epilogue", "outputs", "config"), compiled(RESULTS, beside_gpu_tests={"own"}))
def test_a_kernel_stores_8_bits(a, d, epilogue, outputs, config):
    made = co.Sm90Config(co.ThreadblockShape(128, 64, 64 if a == "bf16" else 128), **config)
    wanted = co.KernelSpec(a=f"{a}.row", b=f"{a}.col", d=d, epilogue=epilogue, outputs=outputs, config=made)
    artifact = build_artifact(wanted)
    report = inspect(artifact)
    # 64x64x32 each: a warpgroup's tile has two along M and four along K, once for the first step and once in the loop.
    assert prove_tensor_cores(artifact.library, wanted).get("QGMMA", 0) == (2 * 4 * 2 if a == "e4m3" else 0)
    assert ("UTMASTG" in count_opcodes(artifact.library)) == wanted.d.aligned
    assert report.spill_stores == report.spill_loads == 0
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)


# The kernels of a layer in FP8: a copy of the stream beside it and the squares of its rows, and two weights.
_COLUMNS = composed.SCALED[False, True].graph
_NORM = _COLUMNS.then(composed.rms_norm_of_sums.graph)
_GATE = _NORM.then(composed.swiglu.graph, products=_NORM.renamed({"scale_b": "scale_up"}))
LAYER = {
    "residual": (
        _COLUMNS.then(composed.residual_rms_quantised("bf16", False, True, True, "e4m3")),
        "bf16.row",
        co.Sm90Config(co.ThreadblockShape(128, 128, 128), co.ClusterShape(1, 2), schedule="pingpong"),
        6,
        16,
    ),
    "gate": (
        _GATE.then(composed.quantised(False, False).graph),
        "e4m3.row",
        co.Sm90Config(co.ThreadblockShape(128, 208, 128), co.ClusterShape(2, 1), schedule="pingpong", swap_ab=True),
        5,
        20,
    ),
}


@pytest.mark.parametrize(("graph", "d", "config", "stages", "spilled"), LAYER.values(), ids=LAYER)
def test_a_kernel_of_a_layer(graph, d, config, stages, spilled):
    """Its most bytes that are spilled: a few registers of as many accumulators as a thread may have."""
    read = {i.name: "f32" for i in graph.inputs if i.name in ("scale_b", "scale_up", "row_sum_square", "gamma")}
    wanted = co.KernelSpec(a="e4m3.row", b="e4m3.col", d=d, epilogue=graph, inputs=read, config=config)
    artifact = build_artifact(wanted)
    report = inspect(artifact)
    # 64x128x32 or 64x208x32 each: a warpgroup's tile has two along M and four along K, once for the first step and once
    # in the loop. The weights of a gate share the rows.
    assert prove_tensor_cores(artifact.library, wanted)["QGMMA"] == 2 * 4 * 2
    opcodes = count_opcodes(artifact.library)
    assert "UTMASTG" in opcodes
    assert not {"HGMMA", "HMMA", "IGMMA"} & set(opcodes)
    assert report.stages == stages
    assert max(report.spill_stores, report.spill_loads) <= spilled
    assert report.dynamic_shared_memory + report.static_shared_memory == shared_memory(wanted)
