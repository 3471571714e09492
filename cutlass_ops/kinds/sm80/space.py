"""The search space of Sm80 configurations, and the choices without a tuning table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cutlass_ops.base.arch import MMA_SYNC
from cutlass_ops.base.dtypes import f64, i32
from cutlass_ops.base.mma import sums_of, unit_of
from cutlass_ops.declare.config import InstructionShape, ThreadblockShape, WarpShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.order import SWIZZLES, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm80.types import multiplied

_SIDES = (32, 64, 128, 256)
_WARP_SIDES = (32, 64)
_STAGES = (2, 3, 4, 5, 6)
_WARPS = (1, 2, 4, 8)


def _sm80(m: int, n: int, k: int, warp_m: int, warp_n: int, stages: int, stream_k: bool = False) -> Sm80Config:
    warp = WarpShape(warp_m, warp_n, k)
    return Sm80Config(ThreadblockShape(m, n, k), warp, stages=stages, stream_k=stream_k)


def _fp64(m: int, n: int, warp_m: int, warp_n: int, stages: int, stream_k: bool = False) -> Sm80Config:
    return replace(_sm80(m, n, 16, warp_m, warp_n, stages, stream_k), instruction=InstructionShape(16, 8, 4))


# Choices without a tuning table: the set that loses least in benchmarks/results/sweep_sm80_h100.json, where operands
# are aligned to two elements, and two deeper pipelines for wider alignments.
UNTUNED = (
    *(_sm80(128, 256, 32, 64, 64, 3, True), _sm80(32, 128, 64, 32, 32, 3, True), _sm80(256, 128, 64, 64, 64, 3)),
    *(_sm80(64, 256, 64, 32, 64, 3, True), _sm80(256, 128, 32, 64, 64, 3, True), _sm80(64, 64, 64, 32, 32, 3)),
    *(_sm80(64, 64, 32, 32, 32, 5), _sm80(128, 128, 32, 64, 64, 4)),
)
# Operands aligned to less than 4 bytes cannot use cp.async. They are loaded through registers, with two stages.
UNTUNED_UNALIGNED = (
    *(_sm80(64, 256, 64, 32, 64, 2, True), _sm80(128, 256, 32, 64, 64, 2, True), _sm80(32, 256, 32, 32, 64, 2, True)),
    *(_sm80(128, 128, 64, 64, 32, 2), _sm80(256, 128, 32, 64, 64, 2, True), _sm80(128, 128, 32, 64, 64, 2, True)),
    _sm80(64, 64, 64, 32, 32, 2),
)


# FP64: tiles of CUTLASS's own library (generator.py, GenerateSM90_TensorOp_1684). Those for few rows, few columns or a
# long K divide K, in four warps or more: CUTLASS's order of stream-K gives a multiprocessor one block then.
UNTUNED_FP64 = (
    *(_fp64(128, 128, 32, 64, 3), _fp64(128, 128, 32, 64, 4), _fp64(64, 128, 32, 64, 4), _fp64(128, 64, 64, 32, 4)),
    *(_fp64(64, 64, 32, 32, 4), _fp64(32, 64, 32, 32, 5), _fp64(32, 128, 32, 32, 4)),
    *(_fp64(32, 128, 32, 32, 5, True), _fp64(128, 32, 32, 32, 5, True), _fp64(64, 64, 32, 32, 5, True)),
    *(_fp64(64, 128, 32, 32, 4, True), _fp64(128, 64, 32, 32, 4, True), _fp64(128, 128, 32, 64, 4, True)),
)


def untuned(signature: OpSignature) -> tuple[Sm80Config, ...]:
    """Return the choices for a signature without a tuning table."""
    if signature.a.dtype is f64:
        return UNTUNED_FP64
    return UNTUNED_UNALIGNED if min(signature.alignments) == 1 else UNTUNED


def candidates(signature: OpSignature) -> Iterator[Sm80Config]:
    """Yield all combinations of tiles, warp tiles and stages, each with and without stream-K."""
    dtype = signature.a.dtype
    how = multiplied(dtype)
    tiles_k = [dtype.count_in(k) for k in how.tiles_k_bytes]
    instruction, *others = _instructions(signature)
    others = others if how.every_instruction else []
    for m, n, k, stages in product(_SIDES, _SIDES, tiles_k, _STAGES):
        for warp_m, warp_n in product(_WARP_SIDES, _WARP_SIDES):
            tile, warp = ThreadblockShape(m, n, k), WarpShape(warp_m, warp_n, k)
            config = Sm80Config(tile, warp, instruction, stages=stages)
            if config.warps in _WARPS:
                for each in (config, *(replace(config, instruction=other) for other in others)):
                    yield each
                    yield replace(each, stream_k=True)


def _instructions(signature: OpSignature) -> tuple[InstructionShape, ...]:
    """Return the instructions for a signature's operands, Hopper's own first, or the usual one if there are none."""
    unit = unit_of(signature.a.dtype, signature.b.dtype, MMA_SYNC)
    shapes = (*unit.hopper_shapes, *unit.shapes) if unit is not None else ()
    return tuple(InstructionShape(*shape) for shape in shapes) or (InstructionShape(16, 8, 16),)


def variants(signature: OpSignature, config: Sm80Config) -> Iterator[Sm80Config]:
    """Yield a configuration, for batches and integers without stream-K.

    For types of other than 16 bits it has as many bytes along K, an instruction for them, and three stages or more. For
    3xTF32 warps' tiles are smaller, which leaves registers for both parts of operands.
    """
    known = _instructions(signature)
    if config.instruction not in known:
        k = signature.a.dtype.count_in(2 * config.threadblock.k)
        config = replace(
            config,
            threadblock=replace(config.threadblock, k=k),
            warp=replace(config.warp, k=k),
            instruction=known[0],
            stages=max(3, config.stages),
        )
    how = multiplied(signature.a.dtype)
    if how.small_warps and config.warp.m * config.warp.n > 64 * 32 and config.warps <= 4:
        config = replace(config, warp=replace(config.warp, n=config.warp.n // 2))
    whole = signature.form == BATCHED or sums_of(signature.a.dtype, signature.b.dtype) is i32
    config = replace(config, stream_k=False) if whole else config
    yield config
    if how.every_instruction:
        yield replace(config, instruction=known[-1])  # which every device has


def usual(signature: OpSignature) -> Iterator[Sm80Config]:
    """Yield configurations of which one is legal if any is."""
    return (config for each in untuned(signature) for config in variants(signature, each))


def near(one: Sm80Config, other: Sm80Config) -> bool:
    """Return whether two configurations differ in exactly one of: tile M, N, K, warp tile, stages, stream-K."""

    def features(c: Sm80Config) -> tuple[object, ...]:
        return c.threadblock.m, c.threadblock.n, c.threadblock.k, (c.warp.m, c.warp.n), c.stages, c.stream_k

    return sum(x != y for x, y in zip(features(one), features(other), strict=True)) == 1


def orders(config: Sm80Config, _: Problem, __: Device) -> list[TileOrder]:
    """Return every swizzle; stream-K has an order of its own."""
    return [] if config.stream_k else [TileOrder(swizzle=swizzle) for swizzle in SWIZZLES]
