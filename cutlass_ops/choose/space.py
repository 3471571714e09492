"""All legal configurations of a signature, and those worth compiling for a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from cutlass_ops.choose.pool import Pool
from cutlass_ops.declare.config import Config, GemvConfig, Sm80Config, Sm90Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.form import BATCHED
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.gemv.kind import GEMV
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.sm80.kind import SM80
from cutlass_ops.kinds.sm90 import space as sm90
from cutlass_ops.kinds.sm90.kind import SM90
from cutlass_ops.kinds.small.kind import SMALL
from cutlass_ops.kinds.table import kind_of

_SMALL = 128  # extents of D up to which small kernels are worth a race


@lru_cache(maxsize=192)
def _legal(kind: Kind[Any], signature: OpSignature, capability: tuple[int, int]) -> tuple[Any, ...]:
    """Return every legal configuration of a kind, without tile orders, which are launch arguments."""
    return tuple(_only_legal(kind.candidates(signature), signature, capability))


def _only_legal(every: Iterable[Any], signature: OpSignature, capability: tuple[int, int]) -> Iterator[Any]:
    return (c for c in every if legality.is_legal(signature.spec(c, c.target_on(capability))))


def configurations(signature: OpSignature) -> tuple[Sm90Config, ...]:
    """Return every legal configuration of Sm90."""
    return _legal(SM90, signature, (9, 0))


def sm80_configurations(signature: OpSignature, device: Device) -> tuple[Sm80Config, ...]:
    """Return every legal configuration of Sm80."""
    return _legal(SM80, signature, device.capability)


def gemv_configurations(signature: OpSignature, device: Device) -> tuple[GemvConfig, ...]:
    """Return every legal configuration of GEMV kernels."""
    return _legal(GEMV, signature, device.capability)


def few_rows(signature: OpSignature, problem: Problem, device: Device) -> list[Config]:
    """Return the GEMV configurations that read B once for a problem's rows, and the smallest with Tensor Cores."""
    rows = problem.m
    return [c for c in gemv_configurations(signature, device) if c.rows >= rows and (c.rows < 2 * rows or c.rows == 8)]


def small_tiles(signature: OpSignature, problem: Problem, device: Device) -> list[Config]:
    """Return the small kernels of which a warp's tile is no larger than a batch's D needs, if that is small."""
    if signature.form != BATCHED or max(problem.m, problem.n) > _SMALL:
        return []

    def fits(side: int, extent: int) -> bool:
        return side <= 16 or side < 2 * extent

    every = _legal(SMALL, signature, device.capability)
    return [c for c in every if fits(c.threadblock.m, problem.m) and fits(c.threadblock.n, problem.n)]


def ranked(signature: OpSignature, problem: Problem, limit: int, device: Device) -> list[Config]:
    """Return the Tensor Core configurations that the model predicts to be fastest for a problem, fastest first.

    The model ignores a tile's K extent and the orientation of large tiles. Of configurations that differ only in these,
    the usual one is returned; :func:`neighbours` has the others.

    Parameters
    ----------
    signature : OpSignature
        Epilogue and operand types.
    problem : Problem
        Each extent at least 1.
    limit : int
        Most configurations to return.
    device : Device
        Where they run.
    """
    pool = _pool(signature, device)
    times = pool.times([problem], device)[0]
    return [pool.configs[at] for at in times.argsort(kind="stable")[:limit] if np.isfinite(times[at])]


@lru_cache(maxsize=64)
def _pool(signature: OpSignature, device: Device) -> Pool:
    """Return the kernels that serve a signature at any number of rows: those of Sm90, if there are any.

    If these copy operands first, or there are none, those of Sm80 as well.
    """
    found = usual(signature).configs if device.has_wgmma else ()
    if not found or signature.realigns:
        found = (*found, *sm80_configurations(signature, device))
    return Pool.of(found, signature)


@lru_cache(maxsize=64)
def usual(signature: OpSignature) -> Pool:
    """Return the Sm90 configurations that the model can distinguish, each with the usual K extent and orientation."""
    # Most are not usual, which is found out sooner than whether they are legal.
    every = (c for c in SM90.candidates(signature) if sm90.is_usual(c, signature.a.dtype.bytes))
    return Pool.of(_only_legal(every, signature, (9, 0)), signature)


def neighbours(signature: OpSignature, config: Config, device: Device) -> list[Config]:
    """Return the legal configurations one step away; the kind defines a step."""
    kind = kind_of(config)
    near = (c for c in _every(kind, signature) if c != config and kind.near(c, config))
    return list(_only_legal(near, signature, device.capability))


@lru_cache(maxsize=4)
def _every(kind: Kind[Any], signature: OpSignature) -> tuple[Any, ...]:
    """Return every configuration of a kind, legal or not. Of several megabytes, few are kept."""
    return tuple(kind.candidates(signature))
