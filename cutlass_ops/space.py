"""Every Sm90 configuration that is legal for a signature, and those worth compiling for a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from cutlass_ops import arch, legality, model
from cutlass_ops.config import ClusterShape, Schedule, Sm90Config, ThreadblockShape
from cutlass_ops.heuristics import Device, Pool, Problem
from cutlass_ops.registry import OpSignature

_TILES_M: dict[Schedule, tuple[int, ...]] = {
    "warp_specialized": (64, 128),
    "pingpong": (64, 128),
    "cooperative": (128, 192, 256),
}
_SIDES = {m for each in _TILES_M.values() for m in each}
_TILES_N = range(arch.WGMMA_N_STEP, arch.WGMMA_N_MAX + 1, arch.WGMMA_N_STEP)
_TILES_K = (32, 64, 128, 256)
_STAGE_BYTES = 48 * 1024
_SPLITS = (2, 4, 8)
_SPLIT_CLUSTERS = ((1, 1), (2, 1), (1, 2))
_CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (4, 2), (2, 4))


@lru_cache(maxsize=64)
def configurations(signature: OpSignature) -> tuple[Sm90Config, ...]:
    """Return every legal configuration: schedules, tiles, clusters, both orientations, whole tiles and split ones.

    Stages are the most that fit. Raster order and swizzle are launch arguments and no part of it.
    """
    return tuple(c for c in _all() if not legality.check(signature.spec(c, None)))


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


def ranked(signature: OpSignature, problem: Problem, limit: int, device: Device) -> list[Sm90Config]:
    """Return the configurations that the model puts first for a problem, fastest first.

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
    pool = usual(signature)
    times = pool.times([problem], device)[0]
    return [pool.configs[at] for at in times.argsort(stable=True)[:limit] if times[at].isfinite()]


@lru_cache(maxsize=64)
def usual(signature: OpSignature) -> Pool:
    """Return the configurations that the model can tell apart, each with the K extent and orientation that is usual."""
    configs = tuple(c for c in configurations(signature) if _is_usual(c, signature.a.dtype.bytes))
    return Pool(configs, signature.majors)


def neighbours(signature: OpSignature, config: Sm90Config) -> list[Sm90Config]:
    """Return the legal configurations one step away: another K extent, cluster, schedule or orientation, or N ± 16."""
    mine = config.threadblock
    tile, cluster = model.along_problem(config)

    def near(c: Sm90Config) -> bool:
        its = c.threadblock
        if replace(c, threadblock=replace(its, n=mine.n)) == config:
            return abs(mine.n - its.n) <= 16
        its_tile, its_cluster = model.along_problem(c)
        kind = (c.schedule, c.scheduler, c.split_k) != (config.schedule, config.scheduler, config.split_k)
        changes = (its.k != mine.k) + kind + (its_cluster != cluster)
        return its_tile == tile and changes <= 1

    return [c for c in configurations(signature) if c != config and near(c)]


def _is_usual(config: Sm90Config, element_bytes: int) -> bool:
    """Whether a tile has the usual K extent and orientation.

    K as long as a stage stays below 48 KiB, for the fewest barriers with enough stages left; B's columns on the wgmma's
    fixed side only where the rows then have a narrower one, or an extent that the fixed side cannot have.
    """
    tile = config.threadblock
    extents = [k for k in _TILES_K if k == 64 or (k > 64 and (tile.m + tile.n) * k * element_bytes <= _STAGE_BYTES)]
    return tile.k == extents[-1] and (not config.swap_ab or tile.n <= arch.WGMMA_M or tile.n not in _SIDES)
