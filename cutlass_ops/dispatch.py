"""Which kernel serves a shape: by measurement there, else by the model, corrected by what was measured nearby.

A signature has a few kernels. For a weight, that is for given N and K, those are kept that some number of rows needs;
after they are compiled nothing is, whatever the batch.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from cutlass_ops import _env, _resources, arch, builtin, heuristics, legality, tables
from cutlass_ops.config import Config, Sm90Config
from cutlass_ops.errors import ConfigError
from cutlass_ops.heuristics import Device, Pool, Problem
from cutlass_ops.registry import OpSignature
from cutlass_ops.spec import KernelSpec, Operand
from cutlass_ops.tables import Table

Source = Literal["model", "interpolated", "measured"]
SOURCES: tuple[Source, ...] = ("model", "interpolated", "measured")


# Rows of A at which the choice for a weight is made in advance.
def _rows() -> Iterator[int]:
    """Yield numbers of rows: eight more than the one before, or at most a sixteenth of it."""
    yield 1
    rows = 8
    while rows <= 16384:
        yield rows
        rows += max(8, (1 << rows.bit_length()) >> 5)
    yield 1 << 26


_ROWS = tuple(_rows())
# Kernels are kept for a weight until no number of rows would be so much faster with another.
_SLACK = {"measured": 0.015, "interpolated": 0.03, "model": 0.03}

# A peer is faster where it takes less than this part of the best kernel's time.
_CLEARLY = 0.99

# How far a measurement reaches: standard deviation in powers of two of M, of the number of tiles and of K, and how much
# the model's own word weighs against it. `benchmarks/evaluate_dispatch.py` says how well that does.
_REACH = (0.6, 0.6, 1.3)
_PRIOR = 1.0
# How much must have been measured nearby for a time to be more than the model's word.
_NEAR = 0.5


@dataclass(frozen=True)
class Candidate:
    """A kernel at a problem.

    Attributes
    ----------
    config : Config
        Its configuration with the order of its tiles.
    microseconds : float
        Measured or predicted time.
    source : {"model", "interpolated", "measured"}
        Where the time comes from.
    """

    config: Config
    microseconds: float
    source: Source


@dataclass(frozen=True, eq=False)
class Expected:
    """What is known of kernels at problems. Tensors of shape (problems, kernels).

    Attributes
    ----------
    times : Tensor
        Microseconds.
    sources : Tensor
        Where they come from, as places in :data:`SOURCES`.
    by_gpc : Tensor
        Where the model would have an order of tiles by GPC.
    """

    times: Tensor
    sources: Tensor
    by_gpc: Tensor

    def decisive(self) -> Tensor:
        """Return the times, infinite for what was not measured where others were."""
        measured = self.sources == SOURCES.index("measured")
        return torch.where(measured.any(1, keepdim=True) & ~measured, torch.inf, self.times)


@dataclass(frozen=True, eq=False)
class _Notes:
    """By how much the model was off where kernels were measured. Tensors of shape (configurations, most notes of one).

    Attributes
    ----------
    places : Tensor
        Powers of two of M, of the number of tiles and of K, in a last dimension; infinite where there are fewer notes.
    error : Tensor
        Logarithm of measured over predicted.
    """

    places: Tensor
    error: Tensor

    def near(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the error to expect at places (problems, configurations, 3), and how much was measured nearby."""
        errors, totals = torch.zeros(places.shape[:2]), torch.zeros(places.shape[:2])
        # One problem after the other: PyTorch shares larger work among threads, and these wait on a busy host.
        for at, place in enumerate(places):
            away = torch.zeros(())
            for mine, its, reach in zip(place.unbind(1), self.places.unbind(2), _REACH, strict=True):
                away = away + ((mine[:, None] - its) / reach).square_()
            weights = torch.exp(away / -2)
            totals[at] = weights.sum(1)
            errors[at] = (weights * self.error).sum(1) / (totals[at] + _PRIOR)
        return errors, totals


def _places(problems: Sequence[Problem], pool: Pool, device: Device) -> Tensor:
    """Return where problems lie for each kernel of a pool, as notes are compared by it."""
    m, _, k = torch.tensor(problems, dtype=torch.float64).reshape(-1, 3, 1).unbind(1)
    tiles = pool.tiles(problems, device)
    return torch.stack([m.expand_as(tiles), tiles, k.expand_as(tiles)], 2).log2().float()


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
    _pool: Pool = field(repr=False)
    _measured: Mapping[Problem, Mapping[Config, Candidate]] = field(repr=False)
    _notes: _Notes = field(repr=False)

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
        measured = _measurements(table, same) if table is not None else {}
        mine = Pool(kernels)
        return cls(signature, device, kernels, table, mine, measured, _notes(measured, mine, device))

    @property
    def borrowed(self) -> bool:
        """Whether the measurements are those of another epilogue, element type or device."""
        return self.table is not None and (self.table.signature, self.table.device) != (
            self.signature,
            self.device.name,
        )

    def expected(self, problems: Sequence[Problem]) -> Expected:
        """Return what is known of every kernel at some problems."""
        error, weight = self._notes.near(_places(problems, self._pool, self.device))
        model, by_gpc = self._pool.times_and_order(problems, self.device)
        times = model * error.exp()
        sources = torch.where(weight > _NEAR, SOURCES.index("interpolated"), SOURCES.index("model"))
        for at, problem in enumerate(problems):
            for config, candidate in self._measured.get(problem, {}).items():
                place = self._places[config]
                times[at, place], sources[at, place] = candidate.microseconds, SOURCES.index("measured")
        return Expected(times, sources, by_gpc)

    def ranked(
        self, problem: Problem, among: Iterable[Config] | None = None, count: int | None = None
    ) -> list[Candidate]:
        """Return the first candidates for a problem, the best first; where some of them were measured, only these."""
        places = [self._places[c] for c in (self.kernels if among is None else among)]
        known = self.expected([problem])
        times, sources = known.times[0, places], known.sources[0, places]
        measured = sources == SOURCES.index("measured")
        wanted = measured.nonzero()[:, 0] if bool(measured.any()) else torch.arange(len(places))
        wanted = wanted[times[wanted].argsort(stable=True)][:count]
        return [
            self._candidate(
                problem, self.kernels[places[at]], float(times[at]), int(sources[at]), bool(known.by_gpc[0, places[at]])
            )
            for at in wanted.tolist()
        ]

    def _candidate(self, problem: Problem, config: Config, time: float, source: int, by_gpc: bool) -> Candidate:
        if SOURCES[source] == "measured":
            return self._measured[problem][config]
        orders = heuristics.orders_by_gpc(config, problem, self.device) if by_gpc else ()
        return Candidate(orders[0] if orders else heuristics.with_order(config, problem), time, SOURCES[source])

    @cached_property
    def _places(self) -> dict[Config, int]:
        return {c: at for at, c in enumerate(self.kernels)}

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
        return self.ranked(problem, kept(self, n, k), count=1)[0]


@lru_cache(maxsize=4096)
def kept(policy: Policy, n: int, k: int) -> tuple[Config, ...]:
    """Return the kernels that any number of rows of A may be served by, given B's extents.

    Greedy: the next kernel is always that which helps most over all numbers of rows, until none helps much.
    """
    tuned = (p.problem[0] for p in policy.table.points if p.problem[1:] == (n, k)) if policy.table else ()
    problems = [(m, n, k) for m in sorted({*_ROWS, *tuned})]
    known = policy.expected(problems)
    times = known.decisive()
    best, fastest = times.min(1)
    slack = torch.tensor([_SLACK[SOURCES[s]] for s in known.sources.gather(1, fastest[:, None])[:, 0].tolist()])
    losses = (times / best[:, None]).log()
    chosen: list[int] = []
    reached = torch.full_like(best, math.log(2.0))
    while bool((reached > slack).any()):
        after = torch.minimum(reached[:, None], losses)
        left = (after - slack[:, None]).clamp(min=0).sum(0)
        left[chosen] = torch.inf
        chosen.append(int(left.argmin()))
        reached = after[:, chosen[-1]]
    return tuple(policy.kernels[at] for at in chosen)


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
    """Read the user's tables anew from now on."""
    for cache in (policy, kept):
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


def _measurements(table: Table, kernels: set[Config]) -> dict[Problem, dict[Config, Candidate]]:
    """Return what was measured of some kernels, each in its best order of tiles."""
    found: dict[Problem, dict[Config, Candidate]] = {}
    # A table's points share their configurations; to compare objects is enough, and much faster.
    configs = {id(m.config): m.config for point in table.points for m in point.measured}
    binaries = {at: config.binary() for at, config in configs.items()}
    mine = {at: kernel for at, kernel in binaries.items() if kernel in kernels}
    for point in table.points:
        here = found.setdefault(point.problem, {})
        for m in point.measured:
            kernel = mine.get(id(m.config))
            if kernel is not None and kernel not in here:
                # Medians of a race that was left early are of a cooler chip; ratios within a round are not.
                here[kernel] = Candidate(m.config, point.measured[0].microseconds * (1 + m.behind), "measured")
    return found


def _notes(measured: Mapping[Problem, Mapping[Config, Candidate]], pool: Pool, device: Device) -> _Notes:
    """Return where and by how much the model is off for the kernels of a pool."""
    index = {c: at for at, c in enumerate(pool.configs)}
    counts = [0] * len(index)
    entries: list[tuple[int, int, int]] = []  # problem, kernel, and which of the kernel's notes it is
    times: list[float] = []
    for problem, known in enumerate(measured.values()):
        for config, candidate in known.items():
            at = index[config]
            entries.append((problem, at, counts[at]))
            times.append(candidate.microseconds)
            counts[at] += 1
    problems, most = list(measured), max(counts, default=0)
    places, errors = torch.full((len(index), most, 3), torch.inf), torch.zeros(len(index), most)
    if entries:
        row, kernel, note = torch.tensor(entries).unbind(1)
        predicted = pool.times(problems, device)[row, kernel]
        places[kernel, note] = _places(problems, pool, device)[row, kernel]
        errors[kernel, note] = (torch.tensor(times, dtype=torch.float64) / predicted).log().float()
    return _Notes(places, errors)
