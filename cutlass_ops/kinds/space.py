"""Every configuration that is legal for a signature, and those worth compiling for a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import get_args

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.choose.heuristics import Pool
from cutlass_ops.declare.config import (
    ClusterShape,
    Config,
    GemvConfig,
    Means,
    Schedule,
    Sm80Config,
    Sm90Config,
    ThreadblockShape,
    WarpShape,
)
from cutlass_ops.declare.device import Device, Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.sm90 import model

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

_SM80_SIDES = (32, 64, 128, 256)
_SM80_TILES_K = (32, 64)
_SM80_WARP_SIDES = (32, 64)
_SM80_STAGES = (2, 3, 4, 5, 6)
_SM80_WARPS = (1, 2, 4, 8)

_GEMV_ROWS = (1, 2, 4, 8, 16)
_GEMV_WARPS = (4, 8, 16)
_GEMV_PIECES = {False: (4, 8, 16), True: (1, 2, 4, 8)}  # by column, by tile


@lru_cache(maxsize=64)
def configurations(signature: OpSignature) -> tuple[Sm90Config, ...]:
    """Return every legal configuration of Sm90: schedules, tiles, clusters, both orientations, whole and split tiles.

    Stages are the most that fit. Raster order and swizzle are launch arguments and no part of it.
    """
    forms = get_args(Means) if signature.epilogue.gathered else ("gathered",)
    every = (replace(c, means=means, realign=signature.realigns) for c in _all() for means in forms)
    return tuple(c for c in every if legality.is_legal(signature.spec(c, None)))


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


@lru_cache(maxsize=64)
def sm80_configurations(signature: OpSignature, device: Device) -> tuple[Sm80Config, ...]:
    """Return every legal configuration of Sm80: tiles, warps' tiles, stages, whole tiles and stream-K.

    The swizzle is a launch argument and no part of it.
    """
    return tuple(c for c in _all_sm80() if legality.is_legal(device.spec(signature, c)))


def _all_sm80() -> Iterator[Sm80Config]:
    for m, n, k, stages in product(_SM80_SIDES, _SM80_SIDES, _SM80_TILES_K, _SM80_STAGES):
        for warp_m, warp_n in product(_SM80_WARP_SIDES, _SM80_WARP_SIDES):
            config = Sm80Config(ThreadblockShape(m, n, k), WarpShape(warp_m, warp_n, k), stages=stages)
            if config.warps in _SM80_WARPS:
                yield config
                yield replace(config, stream_k=True)


@lru_cache(maxsize=64)
def gemv_configurations(signature: OpSignature, device: Device) -> tuple[GemvConfig, ...]:
    """Return every legal configuration of kernels of ordinary loads."""
    return tuple(c for c in all_gemv() if legality.is_legal(device.spec(signature, c)))


def all_gemv() -> Iterator[GemvConfig]:
    """Yield the configurations of kernels of ordinary loads that are worth measuring."""
    for rows, warps in product(_GEMV_ROWS, _GEMV_WARPS):
        yield from (GemvConfig(rows, warps, pieces) for pieces in _GEMV_PIECES[GemvConfig(rows).by_tile])


def few_rows(signature: OpSignature, problem: Problem, device: Device) -> list[Config]:
    """Return those of them that read B once for a problem's rows, and the least of Tensor Cores'."""
    rows = problem[0]
    return [c for c in gemv_configurations(signature, device) if c.rows >= rows and (c.rows < 2 * rows or c.rows == 8)]


def ranked(signature: OpSignature, problem: Problem, limit: int, device: Device) -> list[Config]:
    """Return the configurations of Tensor Core kernels that the model puts first for a problem, fastest first.

    The model does not see what a tile's K extent does, nor the orientation of a large tile: of those that differ in
    nothing else, the usual one stands for all. :func:`neighbours` has the others.

    Parameters
    ----------
    signature : OpSignature
        Epilogue and operand types.
    problem : tuple of int
        M, N and K, each at least 1.
    limit : int
        How many.
    device : Device
        Where they run.
    """
    pool = _pool(signature, device)
    times = pool.times([problem], device)[0]
    return [pool.configs[at] for at in times.argsort(kind="stable")[:limit] if np.isfinite(times[at])]


@lru_cache(maxsize=64)
def _pool(signature: OpSignature, device: Device) -> Pool:
    """Return what serves a signature on a device for any number of rows: kernels of Sm90, if there are any.

    Where these copy operands first, those of Sm80 as well.
    """
    found = usual(signature).configs if device.has_wgmma else ()
    if not found or signature.realigns:
        found = (*found, *sm80_configurations(signature, device))
    return Pool.of(found, signature)


@lru_cache(maxsize=64)
def usual(signature: OpSignature) -> Pool:
    """Return the configurations of Sm90 that the model can tell apart, each with the usual K extent and orientation."""
    return Pool.of((c for c in configurations(signature) if _is_usual(c, signature.a.dtype.bytes)), signature)


def neighbours(signature: OpSignature, config: Config, device: Device) -> list[Config]:
    """Return the legal configurations one step away.

    Of Sm90: another K extent, cluster, schedule or orientation, N ± 16, or means of A's rows taken another way. Of
    Sm80: another side of the tile, its K extent, the warps' tile, stages, or stream-K. Of kernels of ordinary loads:
    other rows, warps or pieces.
    """
    if isinstance(config, GemvConfig):
        return [c for c in gemv_configurations(signature, device) if c != config and _near_gemv(c, config)]
    if isinstance(config, Sm80Config):
        return [c for c in sm80_configurations(signature, device) if c != config and _near_sm80(c, config)]
    return [c for c in configurations(signature) if c != config and _near(c, config)]


def _near(one: Sm90Config, other: Sm90Config) -> bool:
    its, mine = one.threadblock, other.threadblock
    if replace(one, threadblock=replace(its, n=mine.n)) == other:
        return abs(mine.n - its.n) <= 16
    tiles, clusters = zip(model.along_problem(one), model.along_problem(other), strict=True)
    kinds = ((c.schedule, c.scheduler, c.split_k) for c in (one, other))
    changes = (its.k != mine.k) + (len(set(kinds)) > 1) + (len(set(clusters)) > 1)
    changes += one.means != other.means
    return len(set(tiles)) == 1 and changes <= 1


def _near_gemv(one: GemvConfig, other: GemvConfig) -> bool:
    return (one.rows != other.rows) + (one.warps != other.warps) + (one.pieces != other.pieces) == 1


def _near_sm80(one: Sm80Config, other: Sm80Config) -> bool:
    def features(c: Sm80Config) -> tuple[object, ...]:
        return c.threadblock.m, c.threadblock.n, c.threadblock.k, (c.warp.m, c.warp.n), c.stages, c.stream_k

    return sum(x != y for x, y in zip(features(one), features(other), strict=True)) == 1


def _is_usual(config: Sm90Config, element_bytes: int) -> bool:
    """Whether a tile has the usual K extent and orientation.

    K as long as a stage stays below 48 KiB, for the fewest barriers with enough stages left; B's columns on the wgmma's
    fixed side only where the rows then have a narrower one, or an extent that the fixed side cannot have.
    """
    tile = config.threadblock
    extents = [k for k in _TILES_K if k == 64 or (k > 64 and (tile.m + tile.n) * k * element_bytes <= _STAGE_BYTES)]
    return tile.k == extents[-1] and (not config.swap_ab or tile.n <= arch.WGMMA_M or tile.n not in _SIDES)
