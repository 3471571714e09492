"""All legal configurations of a signature, and those worth compiling for a problem."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from cutlass_ops.base import arch
from cutlass_ops.choose.pool import Pool
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.kind import Kind
from cutlass_ops.kinds.table import KINDS, kind_of


@lru_cache(maxsize=192)
def legal(kind: Kind[Any], signature: OpSignature, device: Device) -> tuple[Any, ...]:
    """Return every legal configuration of a kind, without tile orders, which are launch arguments."""
    return tuple(_only_legal(kind.candidates(signature), signature, device))


def _only_legal(every: Iterable[Any], signature: OpSignature, device: Device) -> Iterator[Any]:
    return (c for c in every if legality.is_legal(device.spec(signature, c)))


def fitting(signature: OpSignature, problem: Problem, device: Device) -> list[Config]:
    """Return the configurations of kinds that are not for any number of rows, but are worth a race at a problem."""
    kinds = (kind for kind in KINDS if not kind.general and signature.form in kind.forms)
    every = (c for kind in kinds for c in kind.candidates(signature) if kind.fits(c, problem))
    return list(_only_legal(every, signature, device))


def ranked(signature: OpSignature, problem: Problem, limit: int, device: Device) -> list[Config]:
    """Return the Tensor Core configurations that the model predicts to be fastest for a problem, fastest first.

    The model ignores a tile's K extent and the orientation of large tiles. Of configurations that differ only in these,
    the usual one is returned; :func:`neighbours` has the others.
    """
    pool = _pool(signature, device)
    times = pool.times([problem], device)[0]
    return [pool.configs[at] for at in times.argsort(kind="stable")[:limit] if np.isfinite(times[at])]


@lru_cache(maxsize=64)
def _pool(signature: OpSignature, device: Device) -> Pool:
    """Return the kernels that serve a signature at any number of rows: those that load by TMA, if there are any."""
    found = usual(signature, device).configs
    if not found or signature.realigns:
        others = (kind for kind in KINDS if kind.general and not kind.config.family.tma)
        found = (*found, *(c for kind in others for c in legal(kind, signature, device)))
    return Pool.of(found, signature)


@lru_cache(maxsize=64)
def usual(signature: OpSignature, device: Device) -> Pool:
    """Return the configurations that load by TMA, each with the usual K and orientation: the model ignores these."""
    families = {t.family for t in arch.TARGETS.values() if t.capability == device.capability and t.family.tma}
    kinds = (kind for kind in KINDS if kind.general and kind.config.family in families)
    # Most are not usual, which is found out sooner than whether they are legal.
    every = (c for kind in kinds for c in kind.candidates(signature) if kind.is_usual(c, signature.a.dtype))
    return Pool.of(_only_legal(every, signature, device), signature)


def neighbours(signature: OpSignature, config: Config, device: Device) -> list[Config]:
    """Return the legal configurations one step away; the kind defines a step."""
    kind = kind_of(config)
    near = (c for c in _every(kind, signature) if c != config and kind.near(c, config))
    return list(_only_legal(near, signature, device))


@lru_cache(maxsize=4)
def _every(kind: Kind[Any], signature: OpSignature) -> tuple[Any, ...]:
    """Return every configuration of a kind, legal or not. Each takes several megabytes, so few are kept."""
    return tuple(kind.candidates(signature))
