"""The search space of Sm80 configurations, and the choices without a tuning table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from cutlass_ops.base.dtypes import i8
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.config import InstructionShape, Sm80Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.order import SWIZZLES, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature

_SIDES = (32, 64, 128, 256)
_TILES_K_BYTES = (64, 128)
_WARP_SIDES = (32, 64)
_STAGES = (2, 3, 4, 5, 6)
_WARPS = (1, 2, 4, 8)


def _sm80(m: int, n: int, k: int, warp_m: int, warp_n: int, stages: int, stream_k: bool = False) -> Sm80Config:
    warp = WarpShape(warp_m, warp_n, k)
    return Sm80Config(ThreadblockShape(m, n, k), warp, stages=stages, stream_k=stream_k)


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


def candidates(signature: OpSignature) -> Iterator[Sm80Config]:
    """Yield all combinations of tiles, warp tiles and stages, each with and without stream-K."""
    tiles_k = [k // signature.a.dtype.bytes for k in _TILES_K_BYTES]
    instruction = _instructions(signature)[0]
    for m, n, k, stages in product(_SIDES, _SIDES, tiles_k, _STAGES):
        for warp_m, warp_n in product(_WARP_SIDES, _WARP_SIDES):
            tile, warp = ThreadblockShape(m, n, k), WarpShape(warp_m, warp_n, k)
            config = Sm80Config(tile, warp, instruction, stages=stages)
            if config.warps in _WARPS:
                yield config
                yield replace(config, stream_k=True)


def _instructions(signature: OpSignature) -> tuple[InstructionShape, ...]:
    """Return the instructions for a signature's operands, or the usual one if there are none."""
    mma = mma_of(signature.a.dtype, signature.b.dtype)
    shapes = mma.shapes if mma is not None else ()
    return tuple(InstructionShape(*shape) for shape in shapes) or (InstructionShape(16, 8, 16),)


def variants(signature: OpSignature, config: Sm80Config) -> Iterator[Sm80Config]:
    """Yield a configuration, for batches and integers without stream-K.

    For types of other than 16 bits it has as many bytes along K, an instruction for them, and three stages or more.
    """
    known = _instructions(signature)
    if config.instruction not in known:
        k = config.threadblock.k * 2 // signature.a.dtype.bytes
        config = replace(
            config,
            threadblock=replace(config.threadblock, k=k),
            warp=replace(config.warp, k=k),
            instruction=known[0],
            stages=max(3, config.stages),
        )
    whole = signature.form == BATCHED or signature.a.dtype is i8
    yield replace(config, stream_k=False) if whole else config


def near(one: Sm80Config, other: Sm80Config) -> bool:
    """Return whether two configurations differ in exactly one of: tile M, N, K, warp tile, stages, stream-K."""

    def features(c: Sm80Config) -> tuple[object, ...]:
        return c.threadblock.m, c.threadblock.n, c.threadblock.k, (c.warp.m, c.warp.n), c.stages, c.stream_k

    return sum(x != y for x, y in zip(features(one), features(other), strict=True)) == 1


def orders(config: Sm80Config, _: Problem, __: Device) -> list[TileOrder]:
    """Return every swizzle; stream-K has an order of its own."""
    return [] if config.stream_k else [TileOrder(swizzle=swizzle) for swizzle in SWIZZLES]
