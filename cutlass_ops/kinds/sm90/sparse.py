"""Sm90 kernels of 2:4 sparse weights (``sparse_mainloop.h``): rules, shared memory, tiles and the instruction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cutlass_ops.base.dtypes import SPARSE, STORED_OF, DType, i32
from cutlass_ops.base.mma import META_BLOCK, mma_of, sums_of
from cutlass_ops.declare.config import ClusterShape, ThreadblockShape
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.kinds.kind import Broken
from cutlass_ops.kinds.layout import Block
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config

_META_BYTES = 512  # of a block of 64 rows and 64 along K
_TILES_K = (64, 128, 256)  # whole blocks of metadata; a box of TMA has at most 256 elements
_STAGE_BYTES = 56 * 1024  # so that there are four stages
# Registers of a thread for accumulators, and for metadata of two steps. With 198 and fewer instructions overlap. With
# 200 and more, ptxas has each wait for the one before, without a word, and with 212 some spill (nvcc 13.0).
_MOST_REGISTERS = 198
_TILES: dict[Schedule, tuple[tuple[int, int], ...]] = {
    "pingpong": (
        *((64, n) for n in (64, 128, 192, 256)),
        *((128, n) for n in (64, 96, 128, 160, 176, 184, 192)),
        *((192, n) for n in (96, 128)),
    ),
    "cooperative": (
        *((128, n) for n in (128, 160, 192, 224, 256)),
        *((256, n) for n in (64, 96, 128, 144, 160, 176, 184, 192)),
    ),
}


def is_sparse(spec: KernelSpec) -> bool:
    """Return whether B is a sparse weight."""
    return spec.b.dtype in SPARSE


def memory(_: KernelSpec, config: Sm90Config, stored: int, other: int, stages: int) -> tuple[Block, ...]:
    """Return the main loop's shared memory, given the bytes of a stage's tiles (``sparse_mainloop.h``)."""
    return Block(stages * stored), Block(stages * other), Block(stages * meta_bytes(config), 128)


def meta_bytes(config: Sm90Config) -> int:
    """Return the bytes of a stage's metadata."""
    return config.threadblock.m // META_BLOCK * (config.threadblock.k // META_BLOCK) * _META_BYTES


def rule(spec: KernelSpec, config: Sm90Config) -> Iterator[str | Broken]:
    """Yield what a kernel of a sparse weight breaks of what its main loop supports."""
    if not is_sparse(spec):
        return
    what, tile = f"b is {spec.b}", config.threadblock
    if not config.swap_ab:
        yield Broken(f"{what}, and wgmma takes a sparse matrix as its first operand", ({"swap_ab": True},))
    known = _tiles_k(spec.a.dtype)
    if tile.k not in known:
        yield Broken(
            f"{what}, and threadblock.k is {tile.k}: a stage has whole blocks of metadata, in one box of TMA",
            tuple({"threadblock.k": k} for k in known),
        )
    accumulators, metadata = _registers(config)
    if accumulators + metadata > _MOST_REGISTERS:
        yield Broken(
            f"{what}, and threadblock {tile} with schedule {config.schedule!r} takes {accumulators} accumulator "
            f"registers a thread and {metadata} for metadata of two steps: with more than {_MOST_REGISTERS} in all, "
            "no two instructions overlap",
            ({"schedule": "cooperative"}, *({"threadblock.k": k} for k in known if k < tile.k)),
            "use a smaller tile",
        )
    if spec.form != DENSE or spec.epilogue.products or spec.epilogue.gathered:
        yield f"{what}, of which there is one dense product: use form dense, and no Product or means of A's rows"


def _registers(config: Sm90Config) -> tuple[int, int]:
    """Return a thread's registers for accumulators, and for metadata of the two steps in flight."""
    tile, groups = config.threadblock, 2 if config.schedule == "cooperative" else 1
    rows = tile.m // META_BLOCK // (1 if config.side_by_side else groups)
    return tile.m * tile.n // (128 * groups), 2 * rows * (tile.k // META_BLOCK)


def _tiles_k(of_a: DType) -> tuple[int, ...]:
    """Return the extents of a tile along K: both operands have lines of at least 64 bytes."""
    return _TILES_K if of_a.bits == 16 else _TILES_K[1:]


def fitted(config: Sm90Config, signature: OpSignature) -> Sm90Config:
    """Return a configuration that computes the transpose, with the longest tile along K of which four stages fit."""
    tile, of_a = config.threadblock, signature.a.dtype
    each = of_a.bytes_of(tile.m) // 2 + tile.m // 8 + of_a.bytes_of(tile.n)  # bytes for one of K
    most = _STAGE_BYTES if config.resident == 1 else _STAGE_BYTES // 2
    shortest, *longer = _tiles_k(of_a)
    of = {k: replace(config, threadblock=replace(tile, k=k), swap_ab=True) for k in (shortest, *longer)}
    return next(
        (of[k] for k in longer[::-1] if k * each <= most and sum(_registers(of[k])) <= _MOST_REGISTERS), of[shortest]
    )


def untuned(signature: OpSignature) -> tuple[Sm90Config, ...]:
    """Return tiles for any number of rows."""
    of_a = signature.a.dtype
    few: list[Sm90Config] = [
        Sm90Config(ThreadblockShape(64, n, 256), schedule="warp_specialized", resident=2) for n in (8, 16, 32, 64)
    ]
    # Sums of integers have all of K.
    splits = (1,) if sums_of(of_a, of_a) is i32 else (1, 2, 4)
    split = [
        Sm90Config(ThreadblockShape(128, n, 256), schedule="cooperative", split_k=blocks)
        for n in (8, 16, 32, 64)
        for blocks in splits
        if n % (8 * blocks) == 0
    ]
    many = [
        Sm90Config(ThreadblockShape(m, n, 128), ClusterShape(*cluster), schedule=schedule)
        for schedule, tiles in _TILES.items()
        for m, n in tiles
        for cluster in ((1, 1), (2, 1), (1, 2))
    ]
    return tuple(fitted(each, signature) for each in (*few, *split, *many))


def instruction(spec: KernelSpec, config: Sm90Config) -> str:
    """Spell the instruction of the one N that a warpgroup has."""
    n = config.threadblock.n // (2 if config.side_by_side else 1)
    stored = STORED_OF[spec.b.dtype]
    mma = mma_of(stored, spec.a.dtype)  # the weight is the instruction's first operand
    assert mma is not None
    k, types = mma.wgmma_types[1:].split(".", 1)
    integers, in_16_bits = mma.accumulator is i32, spec.a.dtype.bits == 16
    registers = "CUTLASS_OPS_INTEGERS" if integers else "CUTLASS_OPS_OPERANDS"
    rest = "" if integers else ", 1, 1, 0, 0" if in_16_bits else ", 1, 1"
    places = ", ".join(str(n // 2 + i) for i in range(5))
    return (
        f"CUTLASS_OPS_SPARSE_WGMMA({n}, {places}, {stored.cpp}, {'int32_t' if integers else 'float'}, "
        f'{registers}, "k{2 * int(k)}.{types}", "{rest}")'
    )
