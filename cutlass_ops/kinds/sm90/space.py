"""The search space of Sm90 configurations, and their substitutes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from cutlass_ops.base.arch import WGMMA
from cutlass_ops.base.dtypes import FP8, DType, i32
from cutlass_ops.base.mma import BLOCK_K, sums_of
from cutlass_ops.declare.config import ClusterShape, Means, ThreadblockShape
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds.sm90.config import Schedule, Sm90Config
from cutlass_ops.kinds.sm90.own import own_loop

_TILES_M: dict[Schedule, tuple[int, ...]] = {
    "warp_specialized": (64, 128),
    "pingpong": (64, 128, 192),
    "cooperative": (128, 192, 256),
}
_SIDES = {m for each in _TILES_M.values() for m in each}
_TILES_N = range(WGMMA.n_step, WGMMA.n_max + 1, WGMMA.n_step)
_TILES_K_BYTES = (64, 128, 256, 512)
_USUAL_K_BYTES = 128
_STAGE_BYTES = 48 * 1024
# Of the stages of two blocks on a multiprocessor, so that each has at least three.
_STAGE_OF_TWO = 37 * 1024
_SPLITS = (2, 4, 8)
_SPLIT_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4))


def candidates(signature: OpSignature) -> Iterator[Sm90Config]:
    """Yield all combinations of schedule, tile, cluster, orientation and K splitting, with the most stages that fit."""
    ways = get_args(Means) if signature.epilogue.gathered else ("gathered",)
    of = _all(signature.a.dtype)
    if signature.promoted:
        of = (replace(c, accumulation="promoted") for c in of if c.threadblock.k == BLOCK_K and c.split_k == 1)
    return (replace(c, means=means, realign=signature.realigns) for c in of for means in ways)


def untuned(signature: OpSignature) -> tuple[Sm90Config, ...]:
    """Return configurations for a signature that tables of other signatures lack.

    Where D is quantised, a warpgroup has 128 columns of D, or 64 if another thread block of the cluster has the others,
    and tables hardly have such tiles for several products. In a pingpong kernel, one warpgroup's long epilogue overlaps
    with the other's main loop.

    An FP8 weight is read so fast that the pause between two waves of tiles counts: for few rows, all tiles of a large
    one are there at once where two blocks share a multiprocessor.
    """
    if own := own_loop(signature.b.dtype):
        return own.untuned(signature)
    if signature.epilogue.quantized is None:
        return _FEW_ROWS_OF_FP8 if signature.a.dtype in FP8 and signature.form == DENSE else ()
    products, k = 1 + len(signature.epilogue.products), signature.a.dtype.count_in(_USUAL_K_BYTES)
    clusters = [ClusterShape(*each) for each in _CLUSTERS]
    rows: dict[Schedule, tuple[int, ...]] = {"pingpong": (64,), "cooperative": (128,)}
    found = [(BLOCK_K, schedule, m, each) for schedule in rows for m in rows[schedule] for each in clusters]
    if products > 1:
        rows = {"pingpong": (64, 128, 192), "cooperative": (128, 256)}
        pairs = [each for each in clusters if each.n % 2 == 0]
        found += [(BLOCK_K // 2, schedule, m, each) for schedule in rows for m in rows[schedule] for each in pairs]
    return tuple(Sm90Config(ThreadblockShape(m, products * n, k), c, schedule=s) for n, s, m, c in found)


_FEW_ROWS_OF_FP8 = tuple(
    Sm90Config(ThreadblockShape(128, n, k), schedule="warp_specialized", swap_ab=True, resident=2)
    for n, k in ((8, 256), (16, 256), (32, 128))
)


def _all(dtype: DType) -> Iterator[Sm90Config]:
    tiles_k = [dtype.count_in(k) for k in _TILES_K_BYTES]
    for schedule, rows in _TILES_M.items():
        for m, n, k, cluster, swap in product(rows, _TILES_N, tiles_k, _CLUSTERS, (False, True)):
            # D is stored in pieces of 16 bytes, 8 columns, unless the kernel computes D^T.
            if n % 16 and n != 8 and not swap:
                continue
            config = Sm90Config(ThreadblockShape(m, n, k), ClusterShape(*cluster), schedule=schedule, swap_ab=swap)
            yield config
            if schedule == "warp_specialized" and cluster == (1, 1) and dtype.bytes_of((m + n) * k) <= _STAGE_OF_TWO:
                yield replace(config, resident=2)
            if schedule == "cooperative" and cluster in _SPLIT_CLUSTERS:
                yield replace(config, scheduler="stream_k")
            if schedule != "pingpong" and cluster == (1, 1):
                yield from (replace(config, split_k=blocks) for blocks in _SPLITS)


def of_width(config: Sm90Config, before: int, after: int) -> Sm90Config:
    """Return a configuration for elements of another size, whose tile has as many bytes along K."""
    if before == after:
        return config
    tile = config.threadblock
    return replace(config, threadblock=replace(tile, k=max(1, tile.k * before // after)))


def near(one: Sm90Config, other: Sm90Config) -> bool:
    """Return whether two configurations differ in one of: tile K, cluster, schedule, orientation, N ± 16, means."""
    its, mine = one.threadblock, other.threadblock
    if (its.m, its.k) == (mine.m, mine.k) and replace(one, threadblock=replace(its, n=mine.n)) == other:
        return abs(mine.n - its.n) <= 16
    tiles, clusters = zip(one.along_problem, other.along_problem, strict=True)
    kinds = ((c.schedule, c.scheduler, c.split_k, c.resident) for c in (one, other))
    changes = (its.k != mine.k) + (len(set(kinds)) > 1) + (len(set(clusters)) > 1)
    changes += one.means != other.means
    return len(set(tiles)) == 1 and changes <= 1


def variants(signature: OpSignature, config: Sm90Config) -> Iterator[Sm90Config]:
    """Yield a configuration and its substitutes for a signature for which it is not legal.

    Those of several GEMMs, and of integers, do not split K. Substitutes copy operands that cannot be read as they lie,
    compute means of A's rows in another way, or use the pingpong schedule, since CUTLASS's reductions need a persistent
    kernel. Promoted ones, as with scales of blocks, add up each step's sums, for which a tile may take two warpgroups.
    """
    if own := own_loop(signature.b.dtype):
        config = own.fitted(config, signature)
    if signature.promoted:
        if signature.form != DENSE:
            config = replace(config, scheduler="persistent")
        config = replace(config, accumulation="promoted", split_k=1)
        config = replace(config, threadblock=replace(config.threadblock, k=BLOCK_K))
        yield config
        yield replace(config, schedule="cooperative")
        return
    if signature.form != DENSE or sums_of(signature.a.dtype, signature.b.dtype) is i32:
        config = replace(config, split_k=1, scheduler="persistent")
    if signature.form == DENSE and signature.realigns:
        config = replace(config, realign=True)
    # One after the other: the first is legal nearly always.
    others = get_args(Means) if signature.epilogue.gathered else ()
    schedules: tuple[Schedule, ...] = ("warp_specialized", "pingpong")
    for schedule in schedules if config.schedule == "warp_specialized" else (config.schedule,):
        # A persistent block has its multiprocessor to itself, and no other computes a part of its K.
        like = config if schedule == config.schedule else replace(config, schedule=schedule, resident=1, split_k=1)
        yield like
        yield from (replace(like, means=way) for way in others if way != config.means)


def usual(signature: OpSignature) -> Iterator[Sm90Config]:
    """Yield configurations of which one is legal if any is: the wider tile is for whole scales of two weights."""
    k = signature.a.dtype.count_in(_USUAL_K_BYTES)
    for swap, n in product((False, True), (128, 256)):
        yield from variants(signature, Sm90Config(ThreadblockShape(128, n, k), schedule="cooperative", swap_ab=swap))


def is_usual(config: Sm90Config, dtype: DType) -> bool:
    """Return whether a tile has the usual K extent and orientation.

    The usual K is the largest with which a stage has at most 48 KiB: fewer barriers, and still enough stages. The usual
    orientation is not swapped, unless A's rows then get a side of at most 64 or one that a tile's M cannot have.
    """
    tile = config.threadblock
    if config.accumulation == "promoted":
        return not config.swap_ab or tile.n <= WGMMA.m or tile.n not in _SIDES
    most = _STAGE_BYTES if config.resident == 1 else _STAGE_OF_TWO
    wider = (k for k in _TILES_K_BYTES if k > _USUAL_K_BYTES and (tile.m + tile.n) * k <= most)
    return dtype.bytes_of(tile.k) == max(wider, default=_USUAL_K_BYTES) and (
        not config.swap_ab or tile.n <= WGMMA.m or tile.n not in _SIDES
    )
