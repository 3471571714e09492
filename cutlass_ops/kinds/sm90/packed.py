"""Sm90 kernels of packed weights (``packed_mainloop.h``): rules, shared memory, tiles and the instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cutlass_ops.base.arch import WGMMA
from cutlass_ops.base.dtypes import PACKED, u4
from cutlass_ops.base.mma import WHOLE_K, mma_of
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.kind import Broken
from cutlass_ops.kinds.layout import Block
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config

LINE = 16  # rows of the weight in a line
_TILES_K = (128, 256)  # whole pieces of 64, an even number; a box of TMA has at most 256 elements
_MOST_SCALES = 256  # elements in a box of TMA
# Accumulators of a thread. The numbers that it converts take 32 registers more than in other kernels.
_MOST_ACCUMULATORS = 128
_TILES: dict[Schedule, tuple[tuple[int, int], ...]] = {
    "pingpong": ((64, 64), (64, 128), (64, 192), (64, 256), (128, 128)),
    # 128x256 lost to the others at every number of rows.
    "cooperative": ((128, 96), (128, 128), (128, 192), (256, 64), (256, 96), (256, 128)),
}


def is_packed(spec: KernelSpec) -> bool:
    """Return whether B is a packed weight."""
    return spec.b.dtype in PACKED


def group_of(spec: KernelSpec) -> int:
    """Return how many numbers along K share a scale, or WHOLE_K."""
    return (spec.b.scaling or (WHOLE_K, 1))[0]


def scales_of_line(spec: KernelSpec, config: Sm90Config) -> int:
    """Return how many 16-bit values a stage has for a line: scales, and perhaps zero points."""
    groups = max(1, config.threadblock.k // group_of(spec))
    return groups * (2 if spec.b.dtype is u4 else 1) * LINE


def memory(spec: KernelSpec, config: Sm90Config, numbers: int, other: int, stages: int) -> tuple[Block, ...]:
    """Return the main loop's shared memory, given the bytes of a stage's tiles (``packed_mainloop.h``)."""
    scales = config.threadblock.m // LINE * scales_of_line(spec, config) * 2
    return Block(stages * other), Block(stages * numbers, 128), Block(stages * scales, 128)


def rule(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    """Yield what a kernel of a packed weight breaks of what its main loop supports."""
    if not is_packed(spec):
        return
    what, tile = f"b is {spec.b}", config.threadblock
    if not config.swap_ab:
        yield Broken(f"{what}, and wgmma takes a packed weight as its first operand", ({"swap_ab": True},))
    if tile.k not in _TILES_K:
        yield Broken(
            f"{what}, and threadblock.k is {tile.k}: a stage has an even number of pieces of 64",
            tuple({"threadblock.k": k} for k in _TILES_K),
        )
    elif scales_of_line(spec, config) > _MOST_SCALES:
        yield Broken(f"{what}, and threadblock.k is {tile.k}: TMA brings at most 256 scales", ({"threadblock.k": 128},))
    if config.cluster.n != 1:
        one = ClusterShape(config.cluster.m, 1)
        yield Broken(f"{what}, and cluster is {config.cluster}: no blocks share a tile of it", ({"cluster": one},))
    threads = 256 if config.schedule == "cooperative" else 128
    if tile.m * tile.n // threads > _MOST_ACCUMULATORS:
        yield Broken(
            f"{what}, and threadblock {tile} with schedule {config.schedule!r} takes {tile.m * tile.n // threads} "
            f"accumulator registers a thread, and more than {_MOST_ACCUMULATORS} spill beside its numbers",
            ({"schedule": "cooperative"},),
            "use a smaller tile",
        )
    if spec.form != DENSE or spec.epilogue.products or spec.epilogue.gathered:
        yield f"{what}, of which there is one dense product: use form dense, and no Product or means of A's rows"
    scales = [operand.dtype for given, operand in spec.typed_inputs if given.name in spec.epilogue.parts]
    if any(dtype is not spec.a.dtype for dtype in scales):
        yield f"{what} with scales in {scales[0]}, and a is {spec.a}: use scales in a's type"


def fitted(config: Sm90Config, _: OpSignature) -> Sm90Config:
    """Return a configuration with the least tile along K, and without blocks that share a weight's tile."""
    tile = config.threadblock
    k = tile.k if tile.k in _TILES_K else _TILES_K[0]
    return replace(config, threadblock=replace(tile, k=k), cluster=ClusterShape(config.cluster.m, 1))


def untuned(_: OpSignature | None = None) -> tuple[Sm90Config, ...]:
    """Return tiles for any number of rows."""
    two = [
        Sm90Config(ThreadblockShape(64, n, 256), schedule="warp_specialized", swap_ab=True, resident=2)
        for n in (8, 16, 32, 64)
    ]
    split = [
        Sm90Config(ThreadblockShape(128, n, 256), schedule="cooperative", swap_ab=True, split_k=blocks)
        for n in (8, 16, 32, 64)
        for blocks in (1, 2, 4)
        if n % (8 * blocks) == 0
    ]
    many = [
        Sm90Config(ThreadblockShape(m, n, 128), ClusterShape(blocks, 1), schedule=schedule, swap_ab=True)
        for schedule, tiles in _TILES.items()
        for m, n in tiles
        for blocks in (1, 2)
    ]
    return (*two, *split, *many)


def instruction(spec: KernelSpec, config: Sm90Config) -> str:
    """Spell the instruction of the one N that a warpgroup has."""
    n = config.threadblock.n // (2 if config.side_by_side else 1)
    mma = mma_of(spec.a.dtype, spec.a.dtype)
    assert mma is not None
    places = ", ".join(str(n // 2 + i) for i in range(6))
    return f'CUTLASS_OPS_PACKED_WGMMA({n}, {places}, {spec.a.dtype.cpp}, "{mma.wgmma_types}")'


# wgmma's rows, of which each warp has a line.
assert WGMMA.m == 4 * LINE
