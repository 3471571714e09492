"""Which kernel serves a shape: by measurement there, else by the model, corrected by what was measured nearby.

A signature has a few kernels. For a weight, that is for given N and K, those are kept that some number of rows needs;
after they are compiled nothing is, whatever the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

from cutlass_ops import _env, _resources, arch, builtin, heuristics, legality, tables
from cutlass_ops.config import Config, Sm90Config
from cutlass_ops.errors import ConfigError
from cutlass_ops.heuristics import Device, Problem
from cutlass_ops.registry import OpSignature
from cutlass_ops.spec import KernelSpec, Operand
from cutlass_ops.tables import Table

Source = Literal["measured", "interpolated", "model"]

# Rows of A at which the choice for a weight is made in advance.
_ROWS = (
    *(1, 8),
    *range(16, 257, 16),
    *range(288, 513, 32),
    *range(576, 1025, 64),
    *range(1152, 2049, 128),
    *range(2304, 4097, 256),
    *(5120, 6144, 8192, 16384, 1 << 26),
)
# Kernels are kept for a weight until no number of rows would be so much faster with another.
_SLACK = {"measured": 0.015, "interpolated": 0.04, "model": 0.06}

# A peer is faster where it takes less than this part of the best kernel's time.
_CLEARLY = 0.99

# How far a measurement reaches: standard deviation in powers of two of M and of the number of tiles, and how much the
# model's own word weighs against it. `benchmarks/evaluate_dispatch.py` says how well that does.
_REACH = 0.3
_PRIOR = 0.05


@dataclass(frozen=True)
class Candidate:
    """A kernel at a problem.

    Attributes
    ----------
    config : Config
        Its configuration with the order of its tiles.
    microseconds : float
        Measured or predicted time.
    source : {"measured", "interpolated", "model"}
        Where the time comes from.
    """

    config: Config
    microseconds: float
    source: Source


@dataclass(frozen=True)
class _Note:
    """By how much the model was off for a kernel at a problem: logarithm of measured over predicted."""

    rows: float
    tiles: float
    error: float


@dataclass(frozen=True, eq=False)
class Policy:
    """What decides for one signature on one kind of device.

    Attributes
    ----------
    signature : OpSignature
        Epilogue and operand types.
    device : Device
        Where it runs.
    kernels : tuple of Config
        All that may be chosen, the most useful first.
    table : Table or None
        What was measured. It may be that of another epilogue, whose times are close.
    """

    signature: OpSignature
    device: Device
    kernels: tuple[Config, ...]
    table: Table | None
    _measured: Mapping[Problem, Mapping[Config, Candidate]] = field(repr=False)
    _notes: Mapping[Config, Sequence[_Note]] = field(repr=False)

    @classmethod
    def of(cls, table: Table | None, signature: OpSignature, device: Device, pool: Iterable[Config]) -> Policy:
        """Return what follows from a table, for kernels of a pool as far as they are legal.

        Parameters
        ----------
        table : Table or None
            What was measured.
        signature : OpSignature
            Epilogue and operand types.
        device : Device
            Where it runs.
        pool : iterable of Config
            What may be chosen, the most useful first.
        """
        legal = {c: _legal(signature, c, device) for c in dict.fromkeys(pool)}
        kernels = tuple(dict.fromkeys(c for c in legal.values() if c is not None))
        # What was measured counts for a kernel itself, not for the form of it that had to be taken instead.
        same = {c for c, found in legal.items() if found == c}
        measured, notes = _knowledge(table, same, device) if table is not None else ({}, {})
        return cls(signature, device, kernels, table, measured, notes)

    @property
    def borrowed(self) -> bool:
        """Whether the measurements are those of another epilogue, element type or device."""
        return self.table is not None and (self.table.signature, self.table.device) != (
            self.signature,
            self.device.name,
        )

    def candidate(self, config: Config, problem: Problem) -> Candidate:
        """Return what is known of a kernel at a problem."""
        known = self._measured.get(problem, {}).get(config)
        if known is not None:
            return known
        ordered = heuristics.with_order(config, problem)
        time = heuristics.predict(config, problem, self.device)
        notes = self._notes.get(config, ())
        if not notes or math.isinf(time):
            return Candidate(ordered, time, "model")
        rows, tiles = _place(config, problem, self.device)
        weights = [math.exp(-((rows - n.rows) ** 2 + (tiles - n.tiles) ** 2) / (2 * _REACH**2)) for n in notes]
        total = sum(weights)
        error = sum(w * n.error for w, n in zip(weights, notes, strict=True)) / (total + _PRIOR)
        return Candidate(ordered, time * math.exp(error), "interpolated" if total > 0.5 else "model")

    def ranked(self, problem: Problem, among: Iterable[Config] | None = None) -> list[Candidate]:
        """Return candidates for a problem, the best first; where kernels were measured, only these."""
        found = [self.candidate(c, problem) for c in (self.kernels if among is None else among)]
        measured = [c for c in found if c.source == "measured"]
        return sorted(measured or found, key=lambda c: c.microseconds)

    def peers(self, problem: Problem) -> Mapping[str, float]:
        """Return what others took for a problem, in microseconds by name, if that was measured here."""
        if self.table is None or self.borrowed:
            return {}
        return dict(next((p.peers for p in self.table.points if p.problem == problem), ()))

    def fallback(self, problem: Problem) -> str | None:
        """Return the peer that was measured to be faster than every kernel, if the user allowed to take it."""
        if self.table is None or not self.table.fallback or self.borrowed:
            return None
        point = next((p for p in self.table.points if p.problem == problem), None)
        if point is None or not point.peers:
            return None
        name, microseconds = min(point.peers, key=lambda peer: peer[1])
        return name if microseconds < _CLEARLY * point.measured[0].microseconds else None

    def choose(self, problem: Problem) -> Candidate:
        """Pick a kernel among those that are kept for the problem's weight."""
        _, n, k = problem
        return self.ranked(problem, kept(self, n, k))[0]


@lru_cache(maxsize=4096)
def kept(policy: Policy, n: int, k: int) -> tuple[Config, ...]:
    """Return the kernels that any number of rows of A may be served by, given B's extents.

    Greedy: the next kernel is always that which helps most over all numbers of rows, until none helps much.
    """
    tuned = (p.problem[0] for p in policy.table.points if p.problem[1:] == (n, k)) if policy.table else ()
    losses: list[dict[Config, float]] = []
    slack: list[float] = []
    for m in sorted({*_ROWS, *tuned}):
        ranked = policy.ranked((m, n, k))
        best = ranked[0].microseconds
        losses.append({c.config.binary(): math.log(c.microseconds / best) for c in ranked})
        slack.append(_SLACK[ranked[0].source])
    chosen: list[Config] = []
    reached = [math.log(2.0)] * len(losses)
    while any(r > s for r, s in zip(reached, slack, strict=True)):
        after = {
            c: [min(r, loss.get(c, r)) for r, loss in zip(reached, losses, strict=True)]
            for c in policy.kernels
            if c not in chosen
        }
        gains = {c: sum(max(r - s, 0.0) for r, s in zip(a, slack, strict=True)) for c, a in after.items()}
        best_config = min(gains, key=gains.__getitem__)
        chosen.append(best_config)
        reached = after[best_config]
    return tuple(chosen)


def specs(signature: OpSignature, device: Device) -> tuple[KernelSpec, ...]:
    """Return every kernel that may be picked for a signature on a device; none if none serves it."""
    return tuple(heuristics.spec(signature, c, device) for c in policy(signature, device).kernels)


def specs_for(signature: OpSignature, device: Device, n: int, k: int) -> tuple[KernelSpec, ...]:
    """Return the kernels that may be picked for any number of rows of A, given B's extents."""
    return tuple(heuristics.spec(signature, c, device) for c in kept(policy(signature, device), n, k))


def choose(signature: OpSignature, device: Device, problem: Problem) -> tuple[KernelSpec, Config]:
    """Pick a kernel for a problem.

    Returns
    -------
    KernelSpec, Config
        The kernel, and its configuration with the launch arguments.
    """
    config = policy(signature, device).choose(problem).config
    return heuristics.spec(signature, config.binary(), device), config


def forget() -> None:
    """Read tables anew from now on."""
    for cache in (policy, kept, _shipped):
        cache.cache_clear()


@lru_cache(maxsize=256)
def policy(signature: OpSignature, device: Device) -> Policy:
    """Return what decides for a signature on a device.

    Measurements are looked for in the user's folder and in the package, for this signature and device; then, for the
    same kind of kernels, in the package's table of another epilogue.
    """
    if arch.target_for(device.capability, wgmma=False) is None:
        return Policy.of(None, signature, device, ())
    own = _own(signature, device)
    if device.capability == (9, 0) and signature.a.aligned and signature.b.aligned:
        reference = _reference()
        found = Policy.of(own or reference, signature, device, [*(own.kernels if own else ()), *reference.kernels])
        if found.kernels:
            return found
    narrow = min(signature.a.alignment, signature.b.alignment) == 1
    return Policy.of(own, signature, device, heuristics.SM80_UNALIGNED if narrow else heuristics.SM80)


def _own(signature: OpSignature, device: Device) -> Table | None:
    """Return what was measured for a signature on a device, the user's own results before those that ship."""
    found = _shipped(device.name, signature)
    mine = _users(tables.path_of(_env.tuning_dir(), device.name, signature))
    if mine is None:
        return found
    mine = mine if mine.kernels else mine.select()
    return mine if found is None else replace(found.merged(mine), kernels=_both(mine, found))


def _users(path: Path) -> Table | None:
    if not path.is_file():
        return None
    try:
        return tables.load(path)
    except (ConfigError, OSError) as exc:
        # It costs speed, not results: no reason to fail a call, and none to say nothing.
        warnings.warn(f"a tuning table is left out: {exc}. Remove it, or tune again", RuntimeWarning, stacklevel=2)
        return None


def _both(first: Table, second: Table) -> tuple[Config, ...]:
    return tuple(dict.fromkeys([*first.kernels, *second.kernels]))


@lru_cache(maxsize=256)
def _shipped(device: str, signature: OpSignature) -> Table | None:
    path = tables.path_of(_resources.tuned(), device, signature)
    return tables.load(path) if path.is_file() else None


def _reference() -> Table:
    """Return the table that stands in where there is no better: bias + ReLU in BF16 on an H100."""
    operand, bias = Operand.of("bf16.row"), Operand.of("bf16.row.align1")
    signature = OpSignature(builtin.bias_relu.graph, operand, operand.transposed, operand, (bias,), ())
    table = _shipped("NVIDIA H100 80GB HBM3", signature)
    if table is None:
        raise FileNotFoundError(f"cutlass_ops is incomplete: {_resources.tuned()} has no table; reinstall the package")
    return table


def _legal(signature: OpSignature, config: Config, device: Device) -> Config | None:
    """Return a configuration if it is legal, else its pingpong form: reductions need a persistent workspace."""
    tried: list[Config] = [config]
    if isinstance(config, Sm90Config) and config.schedule == "warp_specialized":
        tried.append(replace(config, schedule="pingpong"))
    return next((c for c in tried if not legality.check(heuristics.spec(signature, c, device))), None)


def _knowledge(
    table: Table, kernels: set[Config], device: Device
) -> tuple[dict[Problem, dict[Config, Candidate]], dict[Config, list[_Note]]]:
    measured: dict[Problem, dict[Config, Candidate]] = {}
    notes: dict[Config, list[_Note]] = {}
    for point in table.points:
        for m in point.measured:
            kernel = m.config.binary()
            here = measured.setdefault(point.problem, {})
            if kernel not in kernels or kernel in here:
                continue
            # Medians of a race that was left early are of a cooler chip; ratios within a round are not.
            time = point.measured[0].microseconds * (1 + m.behind)
            here[kernel] = Candidate(m.config, time, "measured")
            error = math.log(time / heuristics.predict(kernel, point.problem, device))
            notes.setdefault(kernel, []).append(_Note(*_place(kernel, point.problem, device), error))
    return measured, notes


def _place(config: Config, problem: Problem, device: Device) -> tuple[float, float]:
    return math.log2(problem[0]), math.log2(heuristics.tiles(config, problem, device))
