"""Which Sm90 configurations there are to choose from, and which stand for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from cutlass_ops.base import arch
from cutlass_ops.declare.config import ClusterShape, Means, Schedule, Sm90Config, ThreadblockShape
from cutlass_ops.declare.signature import OpSignature

_TILES_M: dict[Schedule, tuple[int, ...]] = {
    "warp_specialized": (64, 128),
    "pingpong": (64, 128, 192),
    "cooperative": (128, 192, 256),
}
_SIDES = {m for each in _TILES_M.values() for m in each}
_TILES_N = range(arch.WGMMA_N_STEP, arch.WGMMA_N_MAX + 1, arch.WGMMA_N_STEP)
_TILES_K = (32, 64, 128, 256)
_STAGE_BYTES = 48 * 1024
_SPLITS = (2, 4, 8)
_SPLIT_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4))


def candidates(signature: OpSignature) -> Iterator[Sm90Config]:
    """Yield schedules, tiles, clusters, both orientations, whole and split tiles; stages are the most that fit."""
    ways = get_args(Means) if signature.epilogue.gathered else ("gathered",)
    return (replace(c, means=means, realign=signature.realigns) for c in _all() for means in ways)


def _all() -> Iterator[Sm90Config]:
    for schedule, rows in _TILES_M.items():
        for m, n, k, cluster, swap in product(rows, _TILES_N, _TILES_K, _CLUSTERS, (False, True)):
            # Stores of eight columns of D are pieces of 16 bytes, unless the columns are rows of D^T.
            if n % 16 and n != 8 and not swap:
                continue
            config = Sm90Config(ThreadblockShape(m, n, k), ClusterShape(*cluster), schedule=schedule, swap_ab=swap)
            yield config
            if schedule == "cooperative" and cluster in _SPLIT_CLUSTERS:
                yield replace(config, scheduler="stream_k")
            if schedule != "pingpong" and cluster == (1, 1):
                yield from (replace(config, split_k=blocks) for blocks in _SPLITS)


def near(one: Sm90Config, other: Sm90Config) -> bool:
    """Whether one differs by K extent, cluster, schedule or orientation, by N ± 16, or by the way to take means."""
    its, mine = one.threadblock, other.threadblock
    if replace(one, threadblock=replace(its, n=mine.n)) == other:
        return abs(mine.n - its.n) <= 16
    tiles, clusters = zip(one.along_problem, other.along_problem, strict=True)
    kinds = ((c.schedule, c.scheduler, c.split_k) for c in (one, other))
    changes = (its.k != mine.k) + (len(set(kinds)) > 1) + (len(set(clusters)) > 1)
    changes += one.means != other.means
    return len(set(tiles)) == 1 and changes <= 1


def variants(signature: OpSignature, config: Sm90Config) -> Iterator[Sm90Config]:
    """Yield a configuration, and what may stand for it where it is not legal.

    That is one that copies operands which TMA cannot read, that has means of A's rows from elsewhere, or its pingpong
    form: CUTLASS's reductions are persistent.
    """
    if signature.realigns:
        config = replace(config, realign=True)
    tried = [config]
    if signature.epilogue.gathered:
        tried += [replace(config, means=way) for way in get_args(Means) if way != config.means]
    yield from tried
    if config.schedule == "warp_specialized":
        yield from (replace(c, schedule="pingpong") for c in tried)


def is_usual(config: Sm90Config, element_bytes: int) -> bool:
    """Whether a tile has the usual K extent and orientation.

    K as long as a stage stays below 48 KiB, for the fewest barriers with enough stages left; B's columns on the wgmma's
    fixed side only where the rows then have a narrower one, or an extent that the fixed side cannot have.
    """
    tile = config.threadblock
    extents = [k for k in _TILES_K if k == 64 or (k > 64 and (tile.m + tile.n) * k * element_bytes <= _STAGE_BYTES)]
    return tile.k == extents[-1] and (not config.swap_ab or tile.n <= arch.WGMMA_M or tile.n not in _SIDES)
