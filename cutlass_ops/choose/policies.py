"""What decides between a signature's kernels: measurement, else the model, corrected by what was measured nearby.

A signature has a few kernels. For a weight, that is for given N and K, those are kept that some number of rows needs;
after they are compiled nothing is, whatever the batch.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.base import arch, env, resources
from cutlass_ops.base.errors import BundleError, ConfigError, UnsupportedError
from cutlass_ops.base.session import cached
from cutlass_ops.choose import tables
from cutlass_ops.choose.knowledge import SOURCES, Candidate, Expected, Knowledge
from cutlass_ops.choose.pool import Pool
from cutlass_ops.choose.tables import Measured, Point, Table
from cutlass_ops.declare.chips import USUAL
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.gemv import space as gemv
from cutlass_ops.kinds.sm80 import space as sm80
from cutlass_ops.kinds.table import kind_of
from cutlass_ops.kinds.traits import Traits


# Rows of A at which the choice for a weight is made in advance.
def _rows() -> Iterator[int]:
    """Yield numbers of rows: few, and from eight on eight more than the last one, or at most a thirty-second of it."""
    yield from (1, 2, 4)
    rows = 8
    while rows <= 16384:
        yield rows
        rows += max(8, (1 << rows.bit_length()) >> 6)
    yield 1 << 26


ROWS = tuple(_rows())
# Kernels are kept for a weight until no number of rows would be so much faster with another. The model's word alone
# gets less than measurements nearby: with weights left out, its first choices lost clearly less than those within 2%.
_SLACK = {"measured": 0.004, "interpolated": 0.02, "model": 0.005}
# Tables round to a ten-thousandth: what is behind by just the slack is not behind by more, however sums are rounded.
_ROUNDING = 1e-9
# What is lost beyond that counts so many times more: it has to be mended by some kernel, and one may mend it for many.
_MISSED = 4.0


# A peer is faster where it takes less than this part of the best kernel's time.
_CLEARLY = 0.99


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
    tables : tuple of Table
        What was measured, at a problem that several have by the first. They may be of another epilogue, element type or
        device, where times are close.
    """

    signature: OpSignature
    device: Device
    kernels: tuple[Config, ...]
    tables: tuple[Table, ...]
    _knowledge: Knowledge = field(repr=False)

    @classmethod
    def of(cls, known: Iterable[Table], signature: OpSignature, device: Device, pool: Iterable[Config]) -> Policy:
        """Return what follows from tables, for kernels of a pool as far as they are legal.

        Parameters
        ----------
        known : iterable of Table
            What was measured, that which counts first before the others.
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
        known = tuple(known)
        return cls(signature, device, kernels, known, Knowledge.of(known, same, Pool.of(kernels, signature), device))

    def with_further(self, kernels: Iterable[Config]) -> Policy:
        """Return what would decide if there were further kernels."""
        return Policy.of(self.tables, self.signature, self.device, (*self.kernels, *kernels))

    @property
    def own(self) -> Table | None:
        """What was measured of this signature on this kind of device."""
        return next((t for t in self.tables if t.is_about(self.signature, self.device.name)), None)

    def expected(self, problems: Sequence[Problem]) -> Expected:
        """Return what is known of every kernel at some problems."""
        return self._knowledge.expected(problems)

    def ranked(
        self, problem: Problem, among: Iterable[Config] | None = None, count: int | None = None
    ) -> list[Candidate]:
        """Return the first candidates for a problem, the best first; where some of them were measured, only these."""
        return self._knowledge.ranked(problem, self.kernels if among is None else among, count)

    def peers(self, problem: Problem) -> Mapping[str, float]:
        """Return what others took for a problem, in microseconds by name, if that was measured here."""
        point = self.own.at(problem) if self.own else None
        return dict(point.peers) if point else {}

    def fallback(self, problem: Problem) -> str | None:
        """Return the peer that was measured to be faster than every kernel, if the user allowed to take it."""
        point = self.own.at(problem) if self.own and self.own.fallback else None
        if point is None or not point.peers or not point.measured:
            return None
        name, microseconds = min(point.peers, key=lambda peer: peer[1])
        return name if microseconds < _CLEARLY * point.measured[0].microseconds else None

    def best(self, problem: Problem) -> Candidate | None:
        """Return the best of the kernels that are kept for the problem's weight; None if none can be launched there."""
        among = kept(self, problem.n, problem.k, problem.count)
        found = self.ranked(problem, among, count=1) if among else []
        return found[0] if found and math.isfinite(found[0].microseconds) else None

    def choose(self, problem: Problem) -> Candidate:
        """Return what :meth:`best` does.

        Raises
        ------
        UnsupportedError
            If none of the kernels can be launched at the problem.
        """
        found = self.best(problem)
        if found is None:
            m, n, k = problem.extents
            raise UnsupportedError(
                f"no kernel for a {self.signature.a}, b {self.signature.b} and d {self.signature.d} can be launched at "
                f"M={m} N={n} K={k}: its grid would have more thread blocks than a device takes. Make several calls, "
                "each with a part of a's rows or of b's columns"
            )
        return found


@cached(maxsize=4096)
def kept(policy: Policy, n: int, k: int, count: int = 1) -> tuple[Config, ...]:
    """Return the kernels that any number of rows of A may be served by, given B's extents and the number of GEMMs.

    Greedy: the next kernel is always that which helps most over all numbers of rows, until none helps much.
    """
    if not policy.kernels:
        return ()
    known_at = (p.problem for table in policy.tables for p in table.points)
    tuned = {p.m for p in known_at if (p.n, p.k, p.count) == (n, k, count)}
    problems = [Problem(m, n, k, count) for m in sorted({*ROWS, *tuned})]
    known = policy.expected(problems)
    times = known.decisive()
    best, fastest = times.min(1, keepdims=True), times.argmin(1, keepdims=True)
    slack = np.array([_SLACK[s] + _ROUNDING for s in SOURCES])[np.take_along_axis(known.sources, fastest, 1)]
    # Where no kernel can be launched, none loses anything.
    possible = np.isfinite(best)
    losses = np.where(possible, times / np.where(possible, best, 1) - 1, 0)
    chosen: list[int] = []
    reached = np.ones_like(best)
    while (reached > slack).any():
        after = np.minimum(reached, losses)
        left = (_MISSED * np.maximum(after - slack, 0) + after).sum(0)
        left[chosen] = np.inf
        chosen.append(int(left.argmin()))
        reached = after[:, chosen[-1:]]
    return tuple(policy.kernels[at] for at in chosen)


def forget() -> None:
    """Read the user's tables anew from now on."""
    for each in (_policy, kept, _warn_once):
        each.cache_clear()


def policy(signature: OpSignature, device: Device) -> Policy:
    """Return what decides for a signature on a device.

    Where loaded bundles have kernels for it, only these may be picked. Measurements are looked for in the bundles, in
    the user's folder and in the package, for this signature and device; for kernels of Sm90 the package's tables of
    other epilogues say what these do not.
    """
    bundles = Bundles.current()
    return _policy(signature, device, bundles.of_one_kind(signature, device.capability), bundles.generation)


@cached(maxsize=256)
def _policy(signature: OpSignature, device: Device, bundled: tuple[Config, ...], generation: int) -> Policy:
    if arch.target_for(device.capability, wgmma=False) is None:
        return Policy.of((), signature, device, ())
    own = _own(signature, device)
    mine = (own,) if own else ()

    def allowed(pool: Iterable[Config]) -> Iterator[Config]:
        return (c for c in pool if own is None or own.allows(c))

    if bundled:
        wgmma = any(c.wgmma for c in bundled)
        known = (*mine, *_borrowed(own, signature, device)) if wgmma else mine
        return Policy.of(known, signature, device, allowed(bundled))

    usual: tuple[Config, ...] = (*sm80.UNTUNED, *gemv.UNTUNED)
    if min(signature.alignments) == 1:
        usual = sm80.UNTUNED_UNALIGNED
    if device.has_wgmma:
        known = (*mine, *_borrowed(own, signature, device))
        # A kernel takes other times with operands of other majors: where there are any of these, it is one of them.
        alike = [t for t in known if t.signature.majors == signature.majors]
        pool = [c for table in alike or known for c in table.kernels]
        # Operands that have to be copied for TMA are read faster as they are where there are few rows.
        found = Policy.of(known, signature, device, allowed([*pool, *usual] if signature.realigns else pool))
        if _serves_many_rows(found):
            return found
    found = Policy.of(mine, signature, device, allowed([*(c for table in mine for c in table.kernels), *usual]))
    return found if _serves_many_rows(found) else Policy.of((), signature, device, ())


def _serves_many_rows(policy: Policy) -> bool:
    """Whether there are kernels of Tensor Cores: those for few rows serve others as well, but far too slowly."""
    return any(not c.few_rows for c in policy.kernels)


def _own(signature: OpSignature, device: Device) -> Table | None:
    """Return what was measured for a signature on a device, the user's own results first.

    After them comes a bundle's table, and only without one that which ships.
    """
    found = _from_bundle(device.name, signature) or _shipped(device.name, signature)
    try:
        mine = _read(signature, device)
        return found if mine is None else _with_users(mine, found)
    except (ValueError, ConfigError) as exc:
        # It costs speed, not results: no reason to fail a call, and none to say nothing.
        _warn_once(f"a tuning table is left out: {exc}")
        return found


def _with_users(mine: Table, found: Table | None) -> Table:
    mine = mine if mine.kernels else mine.select()
    if found is None:
        return mine
    # Of a chip of the same name that has fewer multiprocessors, as a part of one does, other times say less.
    alike = mine.multiprocessors == found.multiprocessors
    return replace(found.merged(mine) if alike else mine, kernels=_both(mine, found))


def _read(signature: OpSignature, device: Device) -> Table | None:
    """Return the user's own table; None if none is there.

    Raises
    ------
    ValueError
        If it cannot be used.
    """
    try:
        folder = env.tuning_dir()
    except env.NoHomeError:
        return None
    path = tables.path_of(folder, device.name, signature)
    try:
        table = tables.load(path)
    except ConfigError as exc:
        raise ValueError(f"{exc}. Remove it, or tune again") from None
    except OSError as exc:
        if isinstance(exc, FileNotFoundError | NotADirectoryError) and not _is_there(path):
            return None
        hint = f"Let this user read it, or set {env.TUNING_DIR.name} to another folder"
        raise ValueError(f"{folder} cannot be read: {exc.strerror}. {hint}") from None
    if not table.is_about(signature, device.name):
        raise ValueError(f"{path} is about other calls or another device. Remove it, or tune again")
    return table


def _is_there(path: Path) -> bool:
    """Whether something has the name of a table, or that of its folder and is no folder."""
    folder = path.parent
    return os.path.lexists(path) or (os.path.lexists(folder) and not os.path.isdir(folder))


@cached(maxsize=1024)
def _warn_once(message: str) -> None:
    try:
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        # Where warnings are errors it is still said, and still fails no call.
        print(f"cutlass_ops: {message}", file=sys.stderr)


def _from_bundle(device: str, signature: OpSignature) -> Table | None:
    for path, text in Bundles.current().tables():
        try:
            table = tables.parse(text, f"a table in {path}")
        except ConfigError as exc:
            raise BundleError(str(exc)) from None
        if table.is_about(signature, device):
            return table
    return None


def _both(first: Table, second: Table) -> tuple[Config, ...]:
    return tuple(dict.fromkeys([*first.kernels, *second.kernels]))


@lru_cache(maxsize=256)
def _shipped(device: str, signature: OpSignature) -> Table | None:
    path = tables.path_of(resources.tuned(), device, signature)
    return tables.load(path) if path.is_file() else None


def _borrowed(own: Table | None, signature: OpSignature, device: Device) -> tuple[Table, ...]:
    """Return what other tables say of kernels of Sm90, the nearest first; nothing if one's own says it.

    First a nearer signature's than the reference, then the reference: each as this device has it, then as an H100 does.
    """
    reference = _reference()
    if own is not None and own.is_about(reference.signature, reference.device):
        return ()
    like = _like if signature.majors == reference.signature.majors else _plain
    ways = [(name, s) for s in (like(signature), reference.signature) if s for name in (device.name, USUAL.name)]
    if own is not None:
        ways = [(name, s) for name, s in ways if not own.is_about(s, name)]
    found = [t for name, s in dict.fromkeys(ways) if (t := _shipped(name, s)) is not None]
    return tuple(_as_if_about(t, signature, device) for t in found)


def _reference() -> Table:
    """Return the table that stands in where there is no better: bias + ReLU in BF16 on an H100."""
    operand, bias = Operand.of("bf16.row"), Operand.of("bf16.row.align1")
    signature = OpSignature(builtin.bias_relu.graph, operand, operand.transposed, operand, (bias,), ())
    table = _shipped(USUAL.name, signature)
    if table is None:
        raise FileNotFoundError(f"cutlass_ops is incomplete: {resources.tuned()} has no table; reinstall the package")
    return table


def _like(signature: OpSignature) -> OpSignature | None:
    """Return the signature in BF16 that takes of A what another does, and as many weights, if that is not a GEMM alone.

    That is a norm, a gate, or both; what follows these costs little beside.
    """
    norm, gate = bool(signature.epilogue.gathered), bool(signature.epilogue.products)
    graph = builtin.rms_norm.graph if norm else builtin.swiglu.graph
    if norm and gate:
        graph = graph.then(builtin.swiglu.graph, products=True)
    if not norm and not gate:
        return None
    operand = Operand.of("bf16.row")
    inputs = {Kind.SCALAR: Operand.of("f32.row.align1"), Kind.PRODUCT: operand.transposed}
    types = tuple(inputs[i.kind] for i in graph.inputs)
    return OpSignature(graph, operand, operand.transposed, operand, types, ())


def _plain(signature: OpSignature) -> OpSignature:
    """Return plain GEMM in BF16 with a signature's majors of A and B."""
    a, b = (Operand.of(f"bf16.{major}") for major in signature.majors)
    return OpSignature(builtin.identity.graph, a, b, Operand.of("bf16.row"), (), ())


def _as_if_about(table: Table, signature: OpSignature, device: Device) -> Table:
    """Return another signature's table as if it were about this one, which may take more of A and multiply it by more.

    Kernels stand for the form of them that serves; what it takes to copy operands, to have means of A's rows and to
    scatter D counts. Two weights of N columns are what one of 2N was.
    """
    theirs = table.signature
    if _kind(signature) == _kind(theirs):
        return table
    weights = Traits.of(signature).weights // Traits.of(theirs).weights
    gathers = bool(signature.epilogue.gathered) and not theirs.epilogue.gathered
    # A table's thousands of measurements share some hundred configurations; to compare objects is enough.
    shared: dict[int, Config | None] = {}

    def form(config: Config) -> Config | None:
        if id(config) not in shared:
            wanted = kind_of(config).gathering(config) if gathers else config
            # Kernels of Sm80 were measured beside those of Sm90 for few problems: they would seem better than they are.
            shared[id(config)] = _legal(signature, wanted, device) if config.wgmma or config.few_rows else None
        return shared[id(config)]

    def restated(point: Point) -> Point:
        best = point.measured[0].microseconds
        later = more[point.problem]
        times = [
            (best * (1 + measured.behind) + later[config], config, measured.order)
            for measured in point.measured
            if (config := form(measured.config)) is not None
        ]
        times.sort(key=lambda time: time[0])
        ranked = tuple(Measured(config, us, us / times[0][0] - 1, order) for us, config, order in times)
        return replace(point, problem=_of_one(point.problem, weights), measured=ranked, peers=())

    whole = [p for p in table.points if p.problem.n % weights == 0]
    kernels = tuple(found for c in table.kernels if (found := form(c)) is not None)
    raced = (found for p in whole for m in p.measured if (found := form(m.config)) is not None)
    more = _later(theirs, signature, dict.fromkeys(raced), [p.problem for p in whole], device)
    points = map(restated, whole)
    return replace(table, points=tuple(p for p in points if p.measured), kernels=kernels)


def _later(
    theirs: OpSignature, mine: OpSignature, kernels: Iterable[Config], problems: Sequence[Problem], device: Device
) -> dict[Problem, dict[Config, float]]:
    """Return by how many microseconds what one signature's kernels do not do makes another's later.

    Problems count the columns of the first one's weights.
    """
    pools = Pool.of(kernels, theirs), Pool.of(kernels, mine)
    weights = pools[1].traits.weights // pools[0].traits.weights
    without = pools[0].besides(problems, device)
    later = pools[1].besides([_of_one(p, weights) for p in problems], device) - without
    return {p: dict(zip(pools[0].configs, row, strict=True)) for p, row in zip(problems, later.tolist(), strict=True)}


def _of_one(problem: Problem, weights: int) -> Problem:
    """Return a problem with the columns of one of several weights."""
    return problem._replace(n=problem.n // weights)


def _kind(signature: OpSignature) -> tuple[bool, int, bool, bool]:
    """Return what decides whether one signature's times are another's."""
    traits = Traits.of(signature)
    return traits.gathers, traits.weights, signature.realigns, traits.scatters


def _legal(signature: OpSignature, config: Config, device: Device) -> Config | None:
    """Return a configuration if it is legal, else the form of it that is."""
    variants = kind_of(config).variants(signature, config)
    return next((c for c in variants if not legality.check(device.spec(signature, c))), None)
