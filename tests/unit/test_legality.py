"""The rules of legality: each with an accepted and a refused neighbour."""

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cutlass_ops as co
from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare.config import ClusterShape, InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.form import FORMS, Form
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import Epilogue, builtin, composed
from cutlass_ops.epilogue.graph import canonical
from cutlass_ops.epilogue.nodes import Input, Kind, Node, Output
from cutlass_ops.kinds.common import COMMON, VALUES
from cutlass_ops.kinds.gemv.config import GemvConfig
from cutlass_ops.kinds.legality import check, is_legal
from cutlass_ops.kinds.packed.config import PackedRowsConfig
from cutlass_ops.kinds.pointwise.config import PointwiseConfig
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config
from cutlass_ops.kinds.small.config import SmallConfig
from cutlass_ops.kinds.table import KINDS
from cutlass_ops.run import packed as packed_values
from cutlass_ops.run import sparse as sparse_values
from tests.gpu import kernels
from tests.strategies import PATIENT
from tests.unit.test_declarations import specs

DOCUMENT = Path(__file__).parents[2] / "docs" / "legality.md"
RULES = {r.name: r for r in (*VALUES, *COMMON, *(rule for kind in KINDS for rule in kind.rules))}


@co.epilogue
def bias_relu(acc, bias: co.Row):
    return co.relu(acc + bias)


@co.epilogue
def gated(acc, bias: co.Row, r: co.Tile, gate: co.Tile):
    return co.silu(acc + bias) * gate + r


@co.epilogue
def column_sum(acc):
    return {"d": acc, "total": co.sum(acc, dim=0)}


@co.epilogue
def row_sum(acc):
    return {"d": acc, "total": co.sum(acc, dim=1)}


@co.epilogue
def column_sum_and_tile(acc):
    return {"d": co.relu(acc), "pre": acc, "total": co.sum(acc, dim=0)}


@co.epilogue
def row_sum_and_tile(acc):
    return {"d": co.relu(acc), "pre": acc, "total": co.sum(acc, dim=1)}


@co.epilogue
def everything(acc, bias: co.Row, scale: co.Col, r: co.Tile, gate: co.Tile, alpha: co.Scalar):
    x = acc * scale + bias
    y = co.silu(x) * alpha + r * gate
    return {"d": y, "pre": x, "squares": co.sum_square(y, dim=1), "total": co.sum(y, dim=0)}


@co.epilogue
def everything_whole(acc, bias: co.Row, scale: co.Col, r: co.Tile, alpha: co.Scalar):
    x = acc * scale + bias
    return {"d": co.silu(x) * alpha + r, "pre": x}


@co.epilogue
def placed(acc):
    return {"d": acc, "at": co.argmax(acc, dim=1)}


@co.epilogue
def saved(acc):
    return {"d": co.relu(acc), "pre": acc}


@co.epilogue
def placed_and_saved(acc):
    return {"d": acc, "pre": acc, "at": co.argmin(acc, dim=1)}


@co.epilogue
def turned(acc):
    return co.swap_pairs(acc)


@co.epilogue
def turned_twice(acc):
    return {"d": co.swap_pairs(acc), "pre": acc}


rms, swiglu = composed.rms_norm, composed.swiglu


@co.epilogue
def quantised(acc, bias: co.Row):
    return co.e.quantize(co.e.relu(acc + bias), "e4m3")


@co.epilogue
def quantised_swiglu(acc, up: co.Product):
    return co.e.quantize(co.e.silu(acc) * up, "e4m3")


of_packed, of_zeros = packed_values._SCALED["int4"], packed_values._SCALED["uint4"]
summed_packed = Epilogue("summed_packed", "With sums of rows.", of_packed.graph.then(row_sum.graph))

TYPES = ("a", "b", "d", "epilogue", "inputs", "outputs", "target", "form")


def spec(config, changes):
    types = {"a": "bf16.row", "b": "bf16.col", "d": "bf16.row", "epilogue": bias_relu}
    return KernelSpec(config=config, **types | {k: v for k, v in changes.items() if k in TYPES})


def rest(changes):
    return {k: v for k, v in changes.items() if k not in TYPES}


def sm90(m=128, n=128, k=64, **changes):
    return spec(Sm90Config(ThreadblockShape(m, n, k), **rest(changes)), changes)


def norm(m=128, n=128, k=64, **changes):
    return sm90(m, n, k, epilogue=rms, **changes)


def sm80(threadblock=(128, 128, 32), warp=(64, 64, 32), **changes):
    return spec(Sm80Config(ThreadblockShape(*threadblock), WarpShape(*warp), **rest(changes)), changes)


def gemv(rows=1, warps=8, pieces=8, **changes):
    return spec(GemvConfig(rows, warps, pieces), changes)


def small(m=32, n=32, k=32, stages=3, warps=2, **changes):
    return spec(SmallConfig(ThreadblockShape(m, n, k), stages, warps), {"form": "batched", **changes})


BARE = canonical([Input("x", Kind.TILE)], [Node("input", (), "x"), Node("relu", (0,))], [Output("d", 1)])


def pointwise(rows=16, epilogue=BARE, **changes):
    return spec(PointwiseConfig(rows), {"epilogue": epilogue, **changes})


def cluster(m, n):
    return {"cluster": ClusterShape(m, n)}


MN_MAJOR = {"a": "bf16.col", "b": "bf16.row"}
TF32 = {"a": "tf32.row", "b": "tf32.col", "instruction": InstructionShape(16, 8, 8)}
TF32_ACROSS = {"a": "tf32.col", "b": "tf32.row"}
INT8_90 = {"a": "i8.row", "b": "i8.col"}
INT8 = {**INT8_90, "instruction": InstructionShape(16, 8, 32), "stages": 3, "threadblock": (128, 128, 64)}
INT8["warp"] = (64, 64, 64)
FP64 = {"a": "f64.row", "b": "f64.col", "d": "f64.row", "instruction": InstructionShape(16, 8, 4), "stages": 3}
FP64 |= {"threadblock": (64, 64, 16), "warp": (32, 32, 16), "target": "sm_90"}
TF32X3 = {"a": "tf32x3.row", "b": "tf32x3.col", "instruction": InstructionShape(16, 8, 8), "stages": 3}
TF32X3 |= {"threadblock": (128, 128, 16), "warp": (64, 32, 16)}
FP64_OF_32 = FP64 | {"instruction": InstructionShape(16, 8, 16), "threadblock": (64, 64, 32), "warp": (32, 32, 32)}
FP64_OF_SM80 = {**FP64, "instruction": InstructionShape(8, 8, 4)}
WS, COOP = {"schedule": "warp_specialized"}, {"schedule": "cooperative"}
OF_K = {"a": "bf16.col", "b": "bf16.row", "form": "ragged_k"}


def stacked():
    """A declaration of a form that no kind serves yet."""
    form = Form("stacked", "the number of stacked GEMMs")
    with mock.patch.dict(FORMS, {form.name: form}):
        return KernelSpec(a="bf16.row", b="bf16.col", d="bf16.row", epilogue=bias_relu, config=sm90().config, form=form)


PROMOTED = {"accumulation": "promoted"}
SAVED = {"epilogue": saved}
QUANTIZED = {"epilogue": quantised, "d": "e4m3.row"}
GATED = {"epilogue": quantised_swiglu, "d": "e4m3.row"}
PAIR = {"cluster": ClusterShape(1, 2)}
FP8 = {"a": "e4m3.row", "b": "e4m3.col", "d": "bf16.row"}


def fp8(m=128, n=128, k=128, **changes):
    return sm90(m, n, k, **FP8 | changes)


PACKED = {"a": "bf16.row", "b": "i4.col.blocks128x1", "epilogue": of_packed, "inputs": {"scale_b": "bf16"}}
ZEROS = {**PACKED, "b": "u4.col.blocks16x1", "epilogue": of_zeros}


def packed(m=128, n=128, k=128, schedule="cooperative", **changes):
    return sm90(m, n, k, schedule=schedule, **PACKED | {"swap_ab": True, **changes})


SPARSE = {"a": "bf16.row", "b": "bf16s.col.blocks64x64", "epilogue": sparse_values._SPARSE}
SPARSE_I8 = {**SPARSE, "a": "i8.row", "b": "i8s.col.blocks64x64"}


def sparse(m=128, n=128, k=128, schedule="cooperative", **changes):
    return sm90(m, n, k, schedule=schedule, **SPARSE | {"swap_ab": True, **changes})


def few(rows=8, warps=8, pieces=2, lines=4, **changes):
    return spec(PackedRowsConfig(rows, warps, pieces, lines), {**PACKED, **changes})


# Rule, a declaration that keeps it, and a neighbour that breaks it and nothing else.
NEIGHBOURS = [
    ("field_values", sm90(stages=2), sm90(stages=1)),
    ("field_values", sm80(stages=2), sm80(stages=65)),
    ("field_values", gemv(8, pieces=4), gemv(3)),
    ("field_values", gemv(warps=16), gemv(warps=12)),
    ("field_values", gemv(pieces=16), gemv(pieces=3)),
    ("target", sm90(target="sm_90a"), sm90(target="sm_90")),
    ("target", gemv(target="sm_90"), gemv(target="sm_90a")),
    ("target", sm80(target="sm_90"), sm80(target="sm_90a")),
    ("form", sm90(), stacked()),
    ("form", sm80(form="batched"), gemv(form="batched")),
    ("one_gemm", sm90(epilogue=row_sum), sm90(epilogue=row_sum, form="batched")),
    ("one_gemm", sm80(epilogue=saved, form="batched"), sm80(epilogue=column_sum, form="batched")),
    ("one_gemm", sm90(form="batched"), sm90(epilogue=rms, means="ahead", form="batched")),
    ("one_gemm", sm90(epilogue=swiglu), sm90(epilogue=swiglu, form="batched")),
    ("one_gemm", sm90(**QUANTIZED), sm90(**QUANTIZED, form="batched")),
    ("batched", sm90(form="batched", **COOP), sm90(form="batched", scheduler="stream_k", **COOP)),
    ("batched", sm90(form="batched", **COOP), sm90(form="batched", split_k=2, **COOP)),
    ("batched", sm90(a="bf16.row.align4", realign=True), sm90(a="bf16.row.align4", realign=True, form="batched")),
    ("batched", sm90(form="grouped", **COOP), sm90(form="grouped", split_k=2, **COOP)),
    ("one_gemm", sm90(form="grouped"), sm90(epilogue=row_sum, form="grouped")),
    ("form", sm90(form="grouped"), sm80(form="grouped")),
    ("grouped", sm90(form="grouped"), sm90(form="grouped", **WS)),
    ("grouped", sm90(form="grouped"), sm90(a="bf16.col", form="grouped")),
    ("grouped", sm90(form="grouped", swap_ab=True), sm90(d="bf16.col", form="grouped", swap_ab=True)),
    ("grouped", sm90(epilogue=saved), sm90(epilogue=saved, form="grouped")),
    ("ragged_k", sm90(**OF_K), sm90(**OF_K, **WS)),
    ("ragged_k", sm90(**OF_K), sm90(**{**OF_K, "a": "bf16.row"})),
    ("ragged_k", sm90(**OF_K), sm90(**{**OF_K, "b": "bf16.col"})),
    ("one_gemm", sm90(**OF_K), sm90(epilogue=row_sum, **OF_K)),
    ("batched", sm90(**OF_K, **COOP), sm90(**OF_K, split_k=2, **COOP)),
    ("batched_stream_k", sm80(form="batched"), sm80(form="batched", stream_k=True)),
    ("operand_dtypes", sm90(a="f16.row", b="f16.col"), sm90(a="f16.row", b="bf16.col")),
    ("operand_dtypes", sm90(d="f32.row"), sm90(a="f32.row", b="f32.col")),
    ("operand_dtypes", fp8(), fp8(b="bf16.col")),
    ("operand_dtypes", fp8(a="e5m2.row"), sm80(**FP8)),
    ("operand_dtypes", fp8(b="e5m2.col"), gemv(**FP8)),
    ("fp8_outputs", gemv(d="e4m3.row", target="sm_90"), gemv(d="e4m3.row", target="sm_89")),
    ("fp8_outputs", fp8(d="e4m3.row"), sm80(d="e4m3.row")),
    ("fp8_outputs", sm90(**SAVED, outputs={"pre": "e5m2.row"}), sm80(**SAVED, outputs={"pre": "e5m2.row"})),
    ("stored_lines", fp8(n=16, d="e5m2.row"), fp8(n=8, d="e5m2.row")),
    ("stored_lines", fp8(n=8, d="e4m3.row", swap_ab=True), fp8(n=8, d="e4m3.col", swap_ab=True)),
    ("stored_lines", sm90(n=8, **SAVED), sm90(n=8, **SAVED, outputs={"pre": "e4m3.row"})),
    ("stored_lines", sm90(n=16, d="e4m3.row.align8"), sm90(n=8, d="e4m3.row.align8")),
    ("operand_majors", fp8(), fp8(a="e4m3.col")),
    ("operand_majors", fp8(swap_ab=True), fp8(b="e4m3.row", swap_ab=True)),
    ("epilogue_dtypes", fp8(inputs={"bias": "f32"}), fp8(inputs={"bias": "e4m3"})),
    ("tma_alignment", fp8(), fp8(a="e4m3.row.align8")),
    ("realign", fp8(), fp8(a="e4m3.row.align8", realign=True)),
    ("tile_k", fp8(k=96), fp8(k=48)),
    ("accumulation", fp8(**PROMOTED, **COOP), sm90(k=128, **PROMOTED, **COOP)),
    ("accumulation", fp8(64, **PROMOTED), fp8(64, k=64, **PROMOTED)),
    ("accumulation", fp8(split_k=2, **COOP), fp8(split_k=2, **PROMOTED, **COOP)),
    ("accumulators", fp8(**PROMOTED, **COOP), fp8(**PROMOTED)),
    ("means", norm(means="ahead"), fp8(epilogue=rms, means="ahead")),
    ("epilogue_dtypes", sm90(epilogue=swiglu), sm90(epilogue=swiglu, inputs={"up": "f16.col"})),
    ("scaling", sm90(), sm90(a="bf16.row.blocks1x128", b="bf16.col.blocks128x128")),
    ("scaling", sm80(), sm80(d="bf16.row.blocks1x128")),
    ("alignment", sm90(d="bf16.row.align4"), sm90(d="bf16.row.align3")),
    ("alignment", sm80(d="bf16.row.align8"), sm80(d="bf16.row.align16")),
    ("alignment", sm90(epilogue=gated), sm90(epilogue=gated, inputs={"r": "f32.row.align8"})),
    ("shared_memory", sm90(stages=6), sm90(stages=7)),
    ("shared_memory", sm90(128, 256, 128, **COOP), sm90(256, 128, 256, **COOP)),
    ("shared_memory", sm80(stages=6, target="sm_89"), sm80(stages=7, target="sm_89")),
    ("tma_alignment", sm90(), sm90(a="bf16.row.align4")),
    ("tma_alignment", sm90(d="bf16.row.align1"), sm90(b="bf16.col.align1")),
    ("tma_alignment", sm90(a="bf16.row.align1", realign=True), sm90(a="bf16.row.align1")),
    ("realign", sm90(b="bf16.col.align2", realign=True), sm90(realign=True)),
    ("tile_m", sm90(192), sm90(96)),
    ("tile_m", sm90(256, **COOP), sm90(64, **COOP)),
    ("side_by_side", sm90(192, 128, 64, **COOP), sm90(192, 120, 64, **COOP)),
    ("side_by_side", sm90(192, 128, 64, **COOP, **MN_MAJOR), sm90(192, 96, 64, **COOP, **MN_MAJOR)),
    ("side_by_side", sm90(192, 64, 64, **COOP, **MN_MAJOR), sm90(192, 192, 64, **COOP, **MN_MAJOR)),
    ("side_by_side", sm90(256, 128, 64, **COOP, epilogue=gated), sm90(192, 128, 64, **COOP, epilogue=gated)),
    ("side_by_side", sm90(192, 128, 64, **COOP), sm90(192, 128, 64, **COOP, d="bf16.row.align2")),
    ("side_by_side", sm90(128, **COOP, scheduler="stream_k"), sm90(192, **COOP, scheduler="stream_k")),
    ("tile_n", sm90(64, 256), sm90(64, 272)),
    ("tile_n", sm90(n=40, **MN_MAJOR), sm90(n=44, **MN_MAJOR)),
    ("tile_k", sm90(k=48), sm90(k=40)),
    ("tile_size", sm90(256, 64), sm90(320, 64)),
    ("tile_size", sm90(64, 64, 256), sm90(64, 64, 272)),
    ("epilogue_step", sm90(n=16, **MN_MAJOR), sm90(n=24, **MN_MAJOR)),
    ("accumulators", sm90(128, 208), sm90(128, 224)),
    ("accumulators", sm90(128, 224, **WS), sm90(128, 240, **WS)),
    ("accumulators", sm90(256, 208, **COOP), sm90(256, 224, **COOP)),
    ("scheduler", sm90(scheduler="stream_k", **COOP), sm90(scheduler="stream_k")),
    ("field_values", sm90(split_k=2, **COOP), sm90(split_k=3, **COOP)),
    ("field_values", sm90(64, 64, resident=2, **WS), sm90(64, 64, resident=3, **WS)),
    ("resident", sm90(64, 64, resident=2, **WS), sm90(64, 64, resident=2)),
    ("resident", sm90(128, 64, resident=2, **WS), sm90(128, 72, resident=2, **WS, **MN_MAJOR)),
    ("resident", sm90(128, 64, resident=2, stages=4, **WS), sm90(128, 64, resident=2, stages=5, **WS)),
    ("split_k", sm90(split_k=2, **COOP), sm90(split_k=2)),
    ("split_k", sm90(split_k=2, **WS), sm90(split_k=2, **WS, **cluster(2, 1))),
    ("split_k", sm90(n=64, split_k=8, **WS), sm90(n=80, split_k=8, **WS, **MN_MAJOR)),
    ("split_k", sm90(stages=6, k=32, split_k=4, **COOP), sm90(stages=4, k=32, split_k=4, **COOP)),
    ("split_k", sm90(epilogue=row_sum, **COOP), sm90(epilogue=row_sum, split_k=2, **COOP)),
    ("cluster_size", sm90(**cluster(2, 4)), sm90(**cluster(4, 4))),
    ("cluster_shape", sm90(**cluster(2, 1)), sm90(n=96, **cluster(3, 1))),
    ("multicast", sm90(n=8, k=16, stages=4, **cluster(2, 1)), sm90(n=8, k=16, stages=4, **cluster(4, 1))),
    ("multicast", sm90(n=40, k=16, **MN_MAJOR, **cluster(2, 1)), sm90(n=40, k=16, **MN_MAJOR, **cluster(4, 1))),
    ("means", norm(means="ahead"), sm90(means="ahead")),
    ("means", norm(means="beside"), sm90(means="beside")),
    ("means", norm(64, a="bf16.col", means="ahead"), norm(64, a="bf16.col")),
    ("means", norm(a="bf16.col", means="ahead"), norm(a="bf16.col", means="beside")),
    ("means", norm(n=64, swap_ab=True, split_k=2, means="ahead", **WS), norm(n=64, swap_ab=True, split_k=2, **WS)),
    ("means", norm(split_k=2, means="ahead", **COOP), norm(split_k=2, means="beside", **COOP)),
    ("means", norm(means="beside", **COOP), norm(means="beside", scheduler="stream_k", **COOP)),
    ("means", norm(64, d="bf16.row.align2", means="ahead"), norm(64, d="bf16.row.align2")),
    ("means", norm(d="bf16.row.align2", means="ahead"), norm(d="bf16.row.align2", means="beside")),
    ("gathered", norm(64), norm(64, k=32)),
    ("gathered", norm(64, k=96, means="beside"), norm(64, k=96)),
    ("gathered", norm(64), norm(128)),
    ("gathered", norm(256, means="beside", **COOP), norm(256, **COOP)),
    ("gathered", norm(n=64, swap_ab=True), norm(n=72, swap_ab=True)),
    ("second_weight", sm90(epilogue=swiglu), sm90(epilogue=swiglu, b="bf16.row")),
    ("second_weight", sm90(epilogue=swiglu, n=208), sm90(epilogue=swiglu, n=200)),
    ("second_weight", sm90(epilogue=swiglu, swap_ab=True), sm90(64, epilogue=swiglu, swap_ab=True)),
    ("second_weight", sm90(256, epilogue=swiglu, swap_ab=True, **COOP), sm90(epilogue=swiglu, swap_ab=True, **COOP)),
    ("second_weight", sm90(epilogue=swiglu), sm90(epilogue=swiglu, d="bf16.row.align2")),
    ("second_weight", sm90(epilogue=swiglu, **COOP), sm90(epilogue=swiglu, scheduler="stream_k", **COOP)),
    ("second_weight", sm80(), sm80(epilogue=swiglu)),
    ("swap_pairs", sm90(epilogue=turned, swap_ab=True), sm90(epilogue=turned, d="bf16.row.align2")),
    ("swap_pairs", sm90(epilogue=turned), sm90(epilogue=turned_twice)),
    ("quantized", sm90(**QUANTIZED), sm90(**QUANTIZED, swap_ab=True)),
    ("quantized", sm90(n=256, **QUANTIZED, **COOP), sm90(n=192, **QUANTIZED, **COOP)),
    ("quantized", sm90(192, 256, **QUANTIZED, **COOP), sm90(192, 128, **QUANTIZED, **COOP)),
    ("quantized", sm90(**QUANTIZED, **WS), sm90(**QUANTIZED, split_k=2, **WS)),
    ("quantized", sm90(**QUANTIZED), sm90(epilogue=quantised, d="e5m2.row")),
    ("quantized", sm90(**QUANTIZED), sm90(epilogue=quantised, d="e4m3.row.align8")),
    ("quantized", sm90(**QUANTIZED), sm90(epilogue=quantised, d="e4m3.col")),
    ("quantized", sm90(**QUANTIZED), sm90(**QUANTIZED, outputs={"d_scale": "bf16"})),
    ("quantized", sm90(n=256, **GATED, **COOP), sm90(n=192, **GATED, **COOP)),
    ("quantized", sm90(n=128, **GATED, **COOP, **PAIR), sm90(n=128, **GATED, **COOP)),
    ("quantized", sm90(n=128, **GATED, **COOP, **PAIR), sm90(n=128, **GATED, **WS, **PAIR)),
    (
        "quantized",
        sm90(n=64, **QUANTIZED, **COOP, **PAIR),
        sm90(n=64, **QUANTIZED, **COOP, **PAIR, scheduler="stream_k"),
    ),
    ("quantized", gemv(d="e4m3.row", target="sm_90"), gemv(**QUANTIZED, target="sm_90")),
    ("packed", packed(), packed(swap_ab=False)),
    ("packed", packed(k=256), packed(k=64)),
    ("packed", packed(**cluster(2, 1)), packed(**cluster(1, 2))),
    ("packed", packed(64, 256, schedule="pingpong"), packed(128, 136, schedule="pingpong")),
    ("packed", packed(64, 64, schedule="pingpong", **ZEROS), packed(64, 64, 256, schedule="pingpong", **ZEROS)),
    ("packed", packed(), packed(inputs={"scale_b": "f16"})),
    ("scaling", packed(), packed(b="i4.col.blocks48x1")),
    ("sparse", sparse(), sparse(swap_ab=False)),
    ("sparse", sparse(k=64), sparse(k=192)),
    ("sparse", sparse(k=128, **SPARSE_I8), sparse(k=64, **SPARSE_I8)),
    ("sparse", sparse(n=192, k=64, schedule="pingpong"), sparse(n=200, k=64, schedule="pingpong")),
    ("sparse", sparse(n=192, k=64, schedule="pingpong"), sparse(n=192, k=128, schedule="pingpong")),
    ("scaling", sparse(), sparse(b="bf16s.col.blocks128x64")),
    ("packed_rows", few(), few(a="bf16.row.align4")),
    ("packed_rows", few(), few(inputs={"scale_b": "f16"})),
    ("packed_rows", packed(epilogue=summed_packed), few(epilogue=summed_packed)),
    ("packed_registers", few(8, 4, 2, 4), few(8, 4, 4, 4)),
    ("packed_memory", few(16, 8, 2, 2), few(16, 16, 2, 2)),
    ("field_values", few(lines=4), few(lines=3)),
    ("paired_reduction", sm90(epilogue=placed, swap_ab=True), sm90(epilogue=placed, d="bf16.row.align2")),
    ("paired_reduction", sm90(epilogue=placed), sm90(epilogue=placed_and_saved)),
    ("swap_pairs", sm80(epilogue=turned_twice, d="bf16.row.align2"), sm80(epilogue=turned, d="bf16.row.align1")),
    ("swap_pairs", sm80(epilogue=turned), sm80(epilogue=turned, d="bf16.col")),
    ("swap_pairs", gemv(warps=2, epilogue=turned), gemv(warps=1, epilogue=turned)),
    ("swap_pairs", gemv(8, 1, 8, epilogue=turned), gemv(4, 1, 8, epilogue=turned)),
    ("reduction_schedule", sm90(epilogue=row_sum_and_tile), sm90(epilogue=row_sum_and_tile, **WS)),
    ("reduction_schedule", sm90(epilogue=row_sum, **WS), sm90(epilogue=row_sum, d="bf16.row.align2", **WS)),
    ("reduction_tile", sm90(n=48, epilogue=column_sum_and_tile), sm90(n=96, epilogue=column_sum_and_tile)),
    ("reduction_tile", sm90(n=96, epilogue=row_sum_and_tile), sm90(n=96, epilogue=row_sum_and_tile, swap_ab=True)),
    ("reduction_tile", sm90(n=128, epilogue=column_sum_and_tile), sm90(n=160, epilogue=column_sum_and_tile)),
    ("reduction_tile", sm90(n=160, epilogue=column_sum), sm90(n=160, epilogue=column_sum_and_tile)),
    ("instruction", sm80(), sm80(instruction=InstructionShape(16, 8, 4))),
    ("warp_tile", sm80((128, 64, 32), (64, 32, 32)), sm80((128, 64, 32), (64, 36, 32))),
    ("sliced_k", sm80((128, 128, 64), (64, 64, 64)), sm80((128, 128, 64), (64, 64, 32))),
    (
        "k_steps",
        sm80((128, 128, 16), (64, 64, 16), instruction=InstructionShape(16, 8, 8)),
        sm80((128, 128, 16), (64, 64, 16)),
    ),
    ("warp_accumulators", sm80((256, 128, 32), (64, 64, 32)), sm80((256, 128, 32), (128, 64, 32))),
    ("warp_accumulators", sm80((256, 128, 32), (64, 64, 32)), sm80((256, 256, 32), (64, 64, 32))),
    ("k_extent", sm80((64, 64, 64), (32, 32, 64)), sm80((64, 64, 128), (32, 32, 128))),
    ("k_extent", sm80((64, 64, 128), (32, 32, 128), **MN_MAJOR), sm80((64, 64, 128), (32, 32, 128), a="bf16.col")),
    (
        "short_lines",
        sm80((32, 16, 32), (32, 16, 32), **MN_MAJOR, d="bf16.row.align1"),
        sm80((32, 8, 32), (32, 8, 32), **MN_MAJOR, d="bf16.row.align1"),
    ),
    ("load_map", sm80((64, 128, 32), (64, 32, 32)), sm80((48, 128, 32), (48, 32, 32))),
    ("load_map", sm80((128, 128, 32), (32, 64, 32)), sm80((192, 128, 32), (64, 64, 32))),
    (
        "load_predicates",
        sm80((128, 128, 64), (64, 64, 64), a="bf16.row.align1", stages=2),
        sm80((128, 64, 64), (64, 64, 64), a="bf16.row.align1", stages=2),
    ),
    ("store_map", sm80((64, 256, 32), (32, 64, 32)), sm80((64, 256, 32), (64, 32, 32))),
    ("store_map", sm80((128, 64, 32), (64, 32, 32)), sm80((128, 96, 32), (64, 48, 32))),
    ("store_map", sm80((128, 192, 32), (32, 96, 32), d="f32.row"), sm80((128, 192, 32), (32, 96, 32))),
    ("cp_async", sm80(a="bf16.row.align2", stages=3), sm80(a="bf16.row.align1", stages=3)),
    ("cp_async", sm80(b="bf16.col.align1", stages=2), sm80(b="bf16.col.align1", stages=4)),
    ("two_stages", sm80(**TF32, stages=3), sm80(**TF32, stages=2)),
    ("two_stages", sm80(**INT8), sm80(**INT8 | {"stages": 2})),
    ("whole_sums", sm80(**INT8), sm80(**INT8, stream_k=True)),
    ("two_stages", sm80(**FP64), sm80(**FP64 | {"stages": 2})),
    ("instruction", sm80(**FP64), sm80(**FP64 | {"target": "sm_80"})),
    ("instruction", sm80(**FP64_OF_SM80 | {"target": "sm_80"}), sm80(**FP64 | {"target": "sm_86"})),
    ("k_extent", sm80(**FP64_OF_32), sm80(**FP64 | {"threadblock": (64, 64, 64), "warp": (32, 32, 64)})),
    ("stream_k_registers", sm80(**FP64_OF_32), sm80(**FP64_OF_32, stream_k=True)),
    ("k_steps", sm80(**FP64_OF_32), sm80(**FP64 | {"instruction": InstructionShape(16, 8, 16)})),
    (
        "warp_accumulators",
        sm80(**FP64 | {"instruction": InstructionShape(16, 8, 8)}),
        sm80(**FP64 | {"instruction": InstructionShape(16, 8, 8), "threadblock": (64, 128, 16), "warp": (32, 64, 16)}),
    ),
    ("warp_tile", sm80(**FP64), sm80(**FP64 | {"threadblock": (32, 32, 16), "warp": (32, 8, 16)})),
    ("warps", sm80(**FP64), sm80(**FP64 | {"threadblock": (32, 32, 16)})),
    ("warp_accumulators", sm80(**FP64), sm80(**FP64 | {"threadblock": (128, 128, 16), "warp": (64, 64, 16)})),
    ("load_map", sm80(**FP64), sm80(**FP64 | {"threadblock": (96, 64, 16), "warp": (32, 32, 16)})),
    ("two_stages", sm80(**TF32X3), sm80(**TF32X3 | {"stages": 2})),
    ("warp_accumulators", sm80(**TF32X3), sm80(**TF32X3 | {"warp": (64, 64, 16)})),
    ("fp64_epilogue", sm80(**FP64), sm80(**FP64, epilogue=row_sum)),
    ("epilogue_dtypes", sm80(**FP64), sm80(**FP64 | {"d": "f32.row"})),
    ("operand_dtypes", sm80(**FP64), sm90(64, 64, 32, a="f64.row", b="f64.col", d="f64.row")),
    ("integer_sums", sm90(**INT8_90, **COOP), sm90(**INT8_90, **COOP, split_k=2)),
    ("tile_n", sm90(n=48, **INT8_90), sm90(n=40, **INT8_90)),
    ("accumulation", sm90(n=64, k=128, **INT8_90), sm90(n=64, k=128, **INT8_90, accumulation="promoted")),
    ("operand_majors", sm80(**INT8), sm80(**INT8 | {"b": "i8.row"})),
    (
        "operand_majors",
        sm90(64, 64, 128, b="i8.row", a="i8.row", realign=True),
        sm90(64, 64, 128, a="i8.row", b="i8.row"),
    ),
    ("operand_majors", sm90(64, 64, 32, **TF32_ACROSS, realign=True), sm90(64, 64, 32, **TF32_ACROSS)),
    (
        "realign",
        sm90(64, 64, 32, **TF32_ACROSS, realign=True),
        sm90(64, 64, 32, a="tf32.row", b="tf32.col", realign=True),
    ),
    (
        "batched",
        sm90(64, 64, 32, **TF32_ACROSS, realign=True),
        sm90(64, 64, 32, **TF32_ACROSS, realign=True, form="batched"),
    ),
    ("whole_lines", sm80(**INT8), sm80(**INT8 | {"a": "i8.row.align8"})),
    ("integer_d", sm90(n=64, **INT8_90, d="i32.row", epilogue=builtin.identity), sm90(n=64, **INT8_90, d="i32.row")),
    (
        "grouped",
        sm90(n=64, **INT8_90, form="grouped"),
        sm90(n=64, **INT8_90, d="i32.row", epilogue=builtin.identity, form="grouped"),
    ),
    ("integer_d", sm80(**INT8, d="i32.row", epilogue=builtin.identity), sm80(**INT8, d="i32.row")),
    ("epilogue_dtypes", sm90(n=64, **INT8_90, d="i8.row"), sm90(d="i8.row")),
    (
        "epilogue_dtypes",
        sm90(n=64, **INT8_90, d="i32.row", epilogue=builtin.identity),
        sm90(d="i32.row", epilogue=builtin.identity),
    ),
    ("stored_lines", sm90(n=16, **INT8_90, d="i8.row"), sm90(n=8, **INT8_90, d="i8.row")),
    ("means_of_rows", sm80(epilogue=rms), sm80(**TF32, epilogue=rms)),
    ("lines", gemv(d="bf16.col.align1"), gemv(a="bf16.col")),
    ("lines", gemv(epilogue=gated, inputs={"r": "bf16.col.align1"}), gemv(b="bf16.col.align4")),
    ("whole_outputs", gemv(epilogue=everything_whole), gemv(epilogue=row_sum)),
    ("form", small(), small(form="dense")),
    ("field_values", small(warps=8), small(warps=3)),
    ("small_tile", small(64, 16, 32), small(128, 16, 32)),
    ("small_tile", small(a="bf16.col.align1"), small(32, 32, 128)),
    ("small_pairs", small(epilogue=saved), small(epilogue=turned)),
    ("product", pointwise(), sm90(epilogue=BARE)),
    ("product", sm80(), pointwise(epilogue=builtin.identity)),
    ("field_values", pointwise(32), pointwise(3)),
    ("shared_memory", small(64, 64, 64, 2, 4, target="sm_90"), small(64, 64, 64, 4, 4, target="sm_90")),
    ("registers", gemv(2, 8, 16, epilogue=swiglu), gemv(2, 16, 16, epilogue=swiglu)),
    ("registers", gemv(16, 8, 8), gemv(8, 8, 16)),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("rule", "kept", "broken"), NEIGHBOURS)
def test_each_rule_accepts_one_neighbour_and_refuses_the_other(rule, kept, broken):
    assert check(kept) == ()
    assert {v.rule for v in check(broken)} == {rule}


# Rules that none can break alone, and what else the broken neighbour breaks.
COMPANIONS = [
    (
        "reduction_buffer",
        sm90(64, 56, epilogue=column_sum_and_tile, **MN_MAJOR),
        sm90(64, 72, epilogue=column_sum_and_tile, **MN_MAJOR),
        {"reduction_tile"},
    ),
    (
        "warps",
        sm80((128, 128, 32), (32, 32, 32)),
        sm80((512, 128, 32), (16, 64, 32), stages=2, d="bf16.row.align4"),
        {"load_map", "warp_accumulators"},
    ),
]


@pytest.mark.parametrize(("rule", "kept", "broken", "others"), COMPANIONS)
def test_a_rule_that_is_never_broken_alone(rule, kept, broken, others):
    assert rule not in {v.rule for v in check(kept)}
    assert {v.rule for v in check(broken)} == {rule} | others


def test_every_rule_has_neighbours():
    assert {n[0] for n in (*NEIGHBOURS, *COMPANIONS)} == set(RULES)


def test_every_rule_is_documented_with_its_ground():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE))
    assert rows == {name: rule.ground for name, rule in RULES.items()}


def test_a_message_says_what_it_is_and_what_to_do():
    for violation in (each for _, _, broken in NEIGHBOURS for each in check(broken)):
        assert re.search(r"\b(use|give|convert|pad)\b", violation.message), violation
        assert not violation.message.endswith("."), violation
        assert len(violation.message) < 300
        assert str(violation) == f"{violation.rule}: {violation.message}"


# ---- Advice --------------------------------------------------------------------------------------------------------

_VALUE = r"(?:'\w+'|\w+\([\d, ]+\)|\d+|None|True|False)"
_CHANGE = re.compile(rf"[a-z_]+(?:\.[mnk])?={_VALUE}(?:, [a-z_]+(?:\.[mnk])?={_VALUE})*")


def taken(spec, advice):
    """The declaration after the change that a message names, such as ``schedule='cooperative', threadblock.m=128``."""
    shapes = {c.__name__: c for c in (ClusterShape, InstructionShape)}
    config, target = spec.config, spec.target
    for name, value in re.findall(rf"([a-z_.]+)=({_VALUE})", advice):
        value, (field, _, side) = eval(value, shapes), name.partition(".")
        if name == "target":
            target = value
        else:
            value = replace(getattr(config, field), **{side: value}) if side else value
            config = replace(config, **{field: value})
    return spec.with_config(config, target)


def take_all_advice(spec):
    """Take each advice that names a change: it keeps its rule, breaks no other one, and so leads in no circle."""
    found = check(spec)
    for violation in found:
        assert re.search(r"\b(use|give|convert|pad)\b", violation.message), violation
        assert not violation.message.endswith((" ", ":", ",")), violation
        for advice in _CHANGE.findall(violation.message.partition("use another tile with")[0]):
            left = {v.rule for v in check(taken(spec, advice))}
            assert left < {v.rule for v in found} - {violation.rule} | {""}, (spec, violation, left)
            assert violation.rule not in left
    return found


@pytest.mark.slow
@PATIENT
@given(specs())
def test_advice_about_any_declaration_can_be_taken(drawn):
    take_all_advice(drawn)


@pytest.mark.sample(3)
@pytest.mark.parametrize("broken", [n[2] for n in NEIGHBOURS], ids=[n[0] for n in NEIGHBOURS])
def test_advice_about_a_neighbour_can_be_taken(broken):
    take_all_advice(broken)


@pytest.mark.parametrize(
    ("broken", "rule", "named", "unnamed"),
    [
        # Cooperative tiles of 192 rows take no reading of a tile, and no number of columns that 16 does not divide.
        (sm90(192, 144, epilogue=gated), "accumulators", "warp_specialized", "cooperative"),
        (sm90(128, 224), "accumulators", "schedule='cooperative'", "pingpong'$"),
        (sm90(64, scheduler="stream_k"), "scheduler", "scheduler='persistent'", "cooperative'$"),
        (sm90(64, split_k=2), "split_k", "schedule='warp_specialized'", "schedule='cooperative'"),
        (sm90(64, epilogue=row_sum_and_tile, **WS), "reduction_schedule", "schedule='pingpong'", "cooperative"),
        (sm90(n=72, epilogue=column_sum_and_tile), "reduction_tile", "threadblock.n=64", "multiple of 32"),
        (sm80((128, 128, 64), (64, 64, 32)), "sliced_k", "warp.k=64", "stream_k"),
        (sm80((256, 256, 32), (64, 64, 32)), "warp_accumulators", "smaller threadblock", "warp tile$"),
        (sm80(target="sm_90a", stages=7), "target", "target='sm_80'", "sm_86"),
        (sm80(stages=7, target="sm_89"), "shared_memory", "stages=6", "fewer stages"),
        (sm90(256, 256, 128, **COOP), "shared_memory", "smaller tile", "fewer stages"),
        (sm80(epilogue=turned, d="bf16.col.align2"), "swap_pairs", "use bf16.row", "Sm90Config"),
        (sm90(epilogue=turned, d="bf16.col.align2"), "swap_pairs", "give d 16 bytes", "Sm80Config"),
        (gemv(a="bf16.col", epilogue=swiglu), "lines", "use bf16.row", "Sm80Config"),
    ],
)
def test_advice_is_named_only_where_it_helps(broken, rule, named, unnamed):
    (message, *_) = [v.message for v in check(broken) if v.rule == rule]
    advice = message.rpartition(": ")[2] if ": " in message else message.rpartition("; ")[2]
    assert named in message
    assert not re.search(unnamed, advice)


def test_every_reason_is_reported_at_once():
    config = {"schedule": "pingpong", "scheduler": "stream_k", "cluster": ClusterShape(4, 4)}
    found = [v.rule for v in check(sm90(96, 128, 40, a="bf16.row.align1", **config))]
    assert found == ["tma_alignment", "tile_m", "tile_k", "scheduler", "cluster_size"]


def test_meaningless_numbers_are_reported_alone():
    assert [v.rule for v in check(sm90(96, 44, 40, stages=0, split_k=3))] == ["field_values", "field_values"]


@pytest.mark.parametrize("value", [None, "spec", Sm90Config(ThreadblockShape(128, 128, 64))])
@pytest.mark.parametrize("take", [co.check, co.source])
def test_only_declarations_can_be_checked_and_rendered(take, value):
    with pytest.raises(TypeError, match="spec must be a KernelSpec, not"):
        take(value)


@pytest.mark.parametrize(
    ("spec", "rule"),
    [
        (sm90(split_k=0), "field_values"),
        (sm90(resident=0), "field_values"),
        (sm90(a="e4m3.row"), "operand_dtypes"),
        (sm90(96, 128, 40), "tile_k"),
    ],
)
def test_the_source_of_an_illegal_declaration_is_refused_with_the_reasons(spec, rule):
    # Some would divide by zero or fail an assertion, others would give C++ that computes something else.
    with pytest.raises(ConfigError, match=rf"illegal for sm_90a(?s:.*){rule}: "):
        co.source(spec)


@pytest.mark.slow
@PATIENT
@given(specs())
def test_no_declaration_makes_check_raise(drawn):
    found = check(drawn)
    assert all(v.rule in RULES for v in found)
    assert check(drawn) == found
    assert is_legal(drawn) == (not found)


@PATIENT
@given(
    st.integers(-(2**70), 2**70),
    st.integers(1, 2**70),
    st.sampled_from((sm90, sm80)),
    st.sampled_from((bias_relu, everything, rms, swiglu)),
    st.booleans(),
)
def test_no_number_makes_check_raise(stages, side, make, epilogue, swap):
    tile = (side, side, side) if make is sm90 else ((side, 64, side), (side, 32, side))
    swapped = {"swap_ab": swap, "split_k": 8} if make is sm90 else {}
    assert check(make(*tile, stages=stages, epilogue=epilogue, **swapped)) is not None


def test_the_kernels_that_the_gpu_tests_build_are_legal():
    groups = (
        *(kernels.matrix(), kernels.configurations(), kernels.multi_output(), kernels.drawn_specs()),
        kernels.gathering(),
    )
    assert {name: check(spec) for group in groups for name, spec in group.items() if check(spec)} == {}
