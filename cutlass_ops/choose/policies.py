"""Policies: the choice between a signature's kernels, by measurement, else by the model, corrected nearby.

For a weight (N, K), the kernels are kept that some number of rows needs. Once they are compiled, no batch size compiles
another.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch, env, resources
from cutlass_ops.base.dtypes import FP8, OWN
from cutlass_ops.base.errors import BundleError, ConfigError, StoreError, UnsupportedError
from cutlass_ops.base.frozen import Itself
from cutlass_ops.base.session import cached, warn_once
from cutlass_ops.choose import limits, tables
from cutlass_ops.choose.knowledge import SOURCES, Candidate, Expected, Knowledge
from cutlass_ops.choose.limits import Limit
from cutlass_ops.choose.pool import Pool
from cutlass_ops.choose.tables import Recorded, Table
from cutlass_ops.choose.weight import Steps, Weight, steps_of
from cutlass_ops.compilation import memo
from cutlass_ops.declare.chips import OF_FP8, USUAL
from cutlass_ops.declare.config import Config, Ordered
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.rows import ROWS
from cutlass_ops.declare.signature import OpSignature, signature_to_json
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue import builtin, composed
from cutlass_ops.epilogue.nodes import Kind
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.arrays import Extents, Floats, Places
from cutlass_ops.kinds.kind import Kind as KernelKind
from cutlass_ops.kinds.table import KINDS, kind_of
from cutlass_ops.kinds.traits import Traits

_log = logging.getLogger("cutlass_ops")

# Kernels are added for a weight until no number of rows would gain more than this from another. Predictions are off by
# 4 to 5%, so a quarter fewer kernels lose at most 0.2% more with weights left out (benchmarks/NOTES.md), and each one
# is compiled, stored and loaded.
_SLACK = {"measured": 0.004, "interpolated": 0.025, "model": 0.025}
# Tables round to 1e-4, so a loss of exactly the slack must not exceed it by rounding of sums.
_ROUNDING = 1e-9
# What it costs if a number of rows has no kernel within the slack: one that serves many of them comes first.
_MISSED = 0.05


# Weights of which decisions are kept.
_WEIGHTS = 4096
# A peer is faster if it takes less than this part of the best kernel's time.
_CLEARLY = 0.99


@dataclass(frozen=True, eq=False)
class Policy:
    """The choice of kernels for one signature on one kind of device."""

    signature: OpSignature  # epilogue and operand types
    device: Device  # where it runs
    kernels: tuple[Config, ...]  # all that may be chosen, most useful first
    # Measurements. If several tables have a problem, the first counts. They may be of another epilogue, element type or
    # device with similar times.
    tables: tuple[Table, ...]
    knowledge: Knowledge = field(repr=False)  # what they say of the kernels
    of_package: bool = False  # whether all of it comes from this package, so that each process decides alike

    @classmethod
    def of(cls, known: Iterable[Table], signature: OpSignature, device: Device, pool: Iterable[Config]) -> Policy:
        """Return the policy of some tables for the legal kernels of a pool."""
        legal = {c: _legal(signature, c, device) for c in dict.fromkeys(pool)}
        kernels = tuple(dict.fromkeys(c for c in legal.values() if c is not None))
        # A measurement counts for the kernel itself, not for its legal replacement.
        same = {c for c, found in legal.items() if found == c}
        known = tuple(known)
        knowledge = _knowledge(tuple(map(Itself, known)), frozenset(same), kernels, Traits.of(signature), device)
        return cls(signature, device, kernels, known, knowledge)

    def with_further(self, kernels: Iterable[Config]) -> Policy:
        """Return the policy with more kernels."""
        return Policy.of(self.tables, self.signature, self.device, (*self.kernels, *kernels))

    @cached_property
    def own(self) -> Table | None:
        """The measurements of this signature on this kind of device."""
        return next((t for t in self.tables if t.is_about(self.signature, self.device.name)), None)

    def expected(self, problems: Sequence[Problem]) -> Expected:
        """Return the expected times of every kernel at some problems."""
        return self.knowledge.expected(problems)

    def ranked(
        self, problem: Problem, among: Iterable[Config] | None = None, count: int | None = None
    ) -> list[Candidate]:
        """Return the best candidates for a problem, best first. If some were measured, only these."""
        return self.knowledge.ranked(problem, self.kernels if among is None else among, count)

    def every(self, problem: Problem, among: Iterable[Config] | None = None) -> list[Candidate]:
        """Return all kernels, or some, that can be launched at a problem, the fastest first, measured or not."""
        return self.knowledge.every(problem, among)

    def peers(self, problem: Problem) -> Mapping[str, float]:
        """Return the measured microseconds of peers at a problem, by name."""
        point = self.own.at(problem) if self.own else None
        return dict(point.peers) if point else {}

    def fallback(self, problem: Problem) -> str | None:
        """Return the peer that was measured faster than every kernel, if the user allowed it."""
        point = self.own.at(problem) if self.own and self.own.fallback else None
        if point is None or not point.peers or not point.measured:
            return None
        name, microseconds = min(point.peers, key=lambda peer: peer[1])
        return name if microseconds < _CLEARLY * point.measured[0].microseconds else None

    def best(self, problem: Problem, among: Sequence[Config] | None = None) -> Candidate | None:
        """Return the best of the kernels kept for the problem's weight; None if none can be launched there."""
        among = kept(self, problem.n, problem.k, problem.count) if among is None else among
        found = self.ranked(problem, among, count=1) if among else []
        return found[0] if found and math.isfinite(found[0].microseconds) else None

    def weight_of(self, n: int, k: int, count: int) -> Weight:
        """Return what ``count`` weights (N, K) need at any number of rows: decided once for all policies alike."""
        if not self.kernels:
            return Weight(self.signature, self.device, (), Steps((1,), (-1,)), {}, {})
        tuned = self.measured_rows.get((n, k, count), frozenset())
        peers = {m: peer for m in tuned if (peer := self.fallback(Problem(m, n, k, count))) is not None}
        decided = self.knowledge.decided
        found = decided.get((tuned, n, k, count))
        if found is None:
            if len(decided) >= _WEIGHTS:
                decided.clear()
            found = decided[tuned, n, k, count] = _decide(self.knowledge, tuned, n, k, count)
        deterministic = self.own is not None and self.own.deterministic
        kept, steps, measured = found
        return Weight(self.signature, self.device, kept, steps, measured, peers, is_deterministic=deterministic)

    @cached_property
    def measured_rows(self) -> Mapping[tuple[int, int, int], frozenset[int]]:
        """The numbers of rows at which some table has measurements, by weight: N, K and how many."""
        found: dict[tuple[int, int, int], set[int]] = {}
        for m, n, k, count in (p for table in self.tables for p in table.columns.problems.tolist()):
            found.setdefault((n, k, count), set()).add(m)
        return {weight: frozenset(rows) for weight, rows in found.items()}

    def choose(self, problem: Problem, among: Sequence[Config] | None = None) -> Candidate:
        """Return the result of :meth:`best`; `among` are the kernels that are kept, if they are known."""
        found = self.best(problem, among)
        if found is None:
            m, n, k = problem.extents
            raise UnsupportedError(
                f"no kernel for a {self.signature.a}, b {self.signature.b} and d {self.signature.d} can be launched at "
                f"M={m} N={n} K={k}: the grid would have more thread blocks than a device supports. Split the call by "
                "a's rows or b's columns"
            )
        return found


def kept(policy: Policy, n: int, k: int, count: int) -> tuple[Config, ...]:
    """Return the kernels that ``count`` weights (N, K) may need at any number of rows."""
    return policy.weight_of(n, k, count).kept


# What is known takes megabytes, and one who tunes makes new tables again and again.
_SHARED = 32


@lru_cache(maxsize=_SHARED)
def _knowledge(
    known: tuple[Itself[Table], ...],
    same: frozenset[Config],
    kernels: tuple[Config, ...],
    traits: Traits,
    device: Device,
) -> Knowledge:
    """Return what tables say of kernels: the same for all signatures with the same traits and legal kernels."""
    return Knowledge.of([table.value for table in known], same, Pool(kernels, traits), device)


def _decide(
    knowledge: Knowledge, tuned: frozenset[int], n: int, k: int, count: int
) -> tuple[tuple[Config, ...], Steps, Mapping[int, Ordered]]:
    """Return the kernels that ``count`` weights (N, K) need, which serves how many rows, and the measured ones."""
    rows = sorted({*ROWS, *tuned})
    extents = Extents.of_rows(rows, n, k, count)
    foretold = knowledge.foretold(extents)
    problems = {at: Problem(m, n, k, count) for at, m in enumerate(rows) if m in tuned}
    known = knowledge.with_measured(problems, foretold)
    chosen = _needed(known)
    measured = {}
    times, is_measured = known.decisive()[:, chosen], known.sources[:, chosen] == SOURCES.index("measured")
    for at, problem in problems.items():
        if is_measured[at].any():
            measured[problem.m] = knowledge.measured.ordered(problem, chosen[int(times[at].argmin())])
    kept = tuple(knowledge.pool.configs[at] for at in chosen)
    return kept, steps_of(knowledge, np.asarray(chosen), foretold, extents), measured


def _needed(known: Expected) -> list[int]:
    """Return the kernels that some number of rows needs, as indices."""
    times = known.decisive()
    best, fastest = times.min(1, keepdims=True), times.argmin(1, keepdims=True)
    slack = np.array([_SLACK[s] + _ROUNDING for s in SOURCES])[np.take_along_axis(known.sources, fastest, 1)]
    # If no kernel can be launched, none has a loss.
    possible = np.isfinite(best)
    each = _cost(np.where(possible, times / np.where(possible, best, 1) - 1, 0), slack)
    chosen: list[int] = []
    # What each number of rows costs by the kernels chosen so far, and if each kernel were added to these.
    now = _cost(np.ones_like(best), slack)
    costs = np.minimum(each, now)
    while (now > slack).any():
        left = costs.sum(0)
        left[chosen] = np.inf
        chosen.append(int(left.argmin()))
        # Most kernels help at a few numbers of rows only.
        mine = each[:, chosen[-1:]]
        new = (mine < now).nonzero()[0]
        now[new] = mine[new]
        costs[new] = np.minimum(costs[new], now[new])
    # The first ones served many rows that later ones serve as well.
    for at in tuple(chosen):
        others = [kernel for kernel in chosen if kernel != at]
        if others and (each[:, others].min(1, keepdims=True) <= slack).all():
            chosen = others
    return chosen


def _cost(losses: Floats, slack: Floats) -> Floats:
    """Return the costs of losses, which exceed the slack only where the losses do."""
    return losses + _MISSED * (losses > slack)


def forget(*, shipped: bool = False) -> None:
    """Clear the caches, so that the user's tables are read again.

    ``shipped`` forgets what follows from the package's tables alone as well. Nothing changes them while a process runs,
    so only those who measure or test a first choice need it.
    """
    for each in (_policy, weight, _stamp, warn_once):
        each.cache_clear()
    if shipped:
        for kept in (_of_package, _knowledge, restated):
            kept.cache_clear()


def policy(signature: OpSignature, device: Device, limited: Limit | None = None) -> Policy:
    """Return the policy for a signature on a device."""
    found = limits.limit(signature, device.capability) if limited is None else limited
    return _policy(signature, device, found.configs, found.generation)


@cached(maxsize=4096)
def weight(signature: OpSignature, device: Device, limited: Limit, n: int, k: int, count: int) -> Weight | None:
    """Return what is decided for ``count`` weights (N, K), from the memo or anew; None if no kernel serves."""
    alone = not limited.configs and not has_tables_of_its_own(signature, device)
    place = _place(signature, device, n, k, count) if alone else None
    known = memo.recall(place)
    try:
        if known is not None:
            return Weight.from_json(known, signature, device)
    except ConfigError as exc:
        _log.info("a decision is made again: %s", exc)
    found = policy(signature, device, limited)
    if not found.kernels:
        return None
    decided = found.weight_of(n, k, count)
    if found.of_package:
        memo.keep(place, decided.to_json())
    return decided


def _place(signature: OpSignature, device: Device, n: int, k: int, count: int) -> Path | None:
    """Return the file of what the package's own tables decide for a weight; None if nothing is kept."""
    try:
        store = env.cache_dir() if env.remembers_choices() else None
    except env.NoHomeError:
        store = None
    about = [signature_to_json(signature), *device.capability, device.multiprocessors, device.name, n, k, count]
    return None if store is None else memo.place(store, "choices", [*about, np.__version__], _stamp())


@cached(maxsize=1)
def _stamp() -> str | None:
    """Return the memo's stamp when it was first asked for: the package's part of it stays, and decides."""
    return memo.stamp()


def has_tables_of_its_own(signature: OpSignature, device: Device) -> bool:
    """Whether the user or a bundle may have a table about a signature on a device."""
    if next(Bundles.current().tables(signature), None) is not None:
        return True
    try:
        folder = _tuning_dir()
    except ValueError:  # the policy warns of it
        return True
    return folder is not None and os.path.lexists(tables.path_of(folder, device.name, signature))


def _tuning_dir() -> Path | None:
    """Return the folder of the user's tables; None if it is in a store that cannot be used, or there is no home folder.

    Raises ValueError if a variable cannot be read.
    """
    try:
        if env.TUNING_DIR.text is None:
            KernelStore.of_user().require_private()
    except StoreError:  # who looks for a kernel there warns of it
        return None
    return env.tuning_dir()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python collect no garbage for as long as the context lasts.

    It is for work that makes many objects and keeps them. They bring about collections of all generations, each of
    which visits every object of the process: with PyTorch imported, some take 0.1 s.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cached(maxsize=256)
@_uncollected()
def _policy(signature: OpSignature, device: Device, bundled: tuple[Config, ...], generation: int) -> Policy:
    if arch.best_target(device.capability) is None:
        return Policy.of((), signature, device, ())
    own = _own(signature, device)
    if not bundled and own is _shipped(device.name, signature):
        return _of_package(signature, device)
    return _of_tables(signature, device, bundled, own)


@lru_cache(maxsize=256)
def _of_package(signature: OpSignature, device: Device) -> Policy:
    """Return the policy of the package's tables alone: the same in every session."""
    return replace(_of_tables(signature, device, (), _shipped(device.name, signature)), of_package=True)


def _of_tables(signature: OpSignature, device: Device, bundled: tuple[Config, ...], own: Table | None) -> Policy:
    mine = (own,) if own else ()

    def allowed(pool: Iterable[Config]) -> Iterator[Config]:
        return (c for c in pool if own is None or own.allows(c))

    if signature.epilogue.is_pointwise:
        return Policy.of((), signature, device, allowed(bundled or _untuned(signature, KINDS)))
    if bundled:
        by_tma = any(c.family.tma for c in bundled)
        known = (*mine, *_borrowed(own, signature, device)) if by_tma else mine
        return Policy.of(known, signature, device, allowed(bundled))

    usual = _untuned(signature, (kind for kind in KINDS if not kind.config.family.tma))
    if device.has_tma:
        known = (*mine, *_borrowed(own, signature, device))
        # Times depend on how operands lie as TMA loads them: prefer kernels from tables with the same majors.
        alike = [t for t in known if t.signature.majors == signature.loaded_majors]
        beside = (kind for kind in KINDS if kind.config.family.tma or not kind.in_tables)
        pool = [*(c for table in alike or known for c in table.kernels), *_untuned(signature, beside)]
        # Errors at elements of another width mislead: choices at weights left out lost 1 to 3% more.
        told = tuple(t for t in known if t.signature.a.dtype.bits == signature.a.dtype.bits) or known
        # With few rows, reading operands as they lie is faster than copying them first.
        found = Policy.of(told, signature, device, allowed([*pool, *usual] if signature.realigns else pool))
        if _serves_many_rows(found):
            return found
    found = Policy.of(mine, signature, device, allowed([*(c for table in mine for c in table.kernels), *usual]))
    return found if _serves_many_rows(found) else Policy.of((), signature, device, ())


def _untuned(signature: OpSignature, kinds: Iterable[KernelKind[Any]]) -> tuple[Config, ...]:
    """Return the choices without a tuning table of some kinds, of those for such an epilogue."""
    pointwise = signature.epilogue.is_pointwise
    return tuple(c for kind in kinds if kind.pointwise == pointwise for c in kind.untuned(signature))


def _serves_many_rows(policy: Policy) -> bool:
    """Whether there are Tensor Core kernels. GEMV kernels can serve many rows too, but far too slowly."""
    return any(not c.few_rows for c in policy.kernels)


def _own(signature: OpSignature, device: Device) -> Table | None:
    """Return the measurements of a signature on a device: the user's, then a bundle's, else the package's."""
    found = _from_bundle(device.name, signature) or _shipped(device.name, signature)
    try:
        mine = _read(signature, device)
        return found if mine is None else _with_users(mine, found)
    except (ValueError, ConfigError) as exc:
        # A bad table costs only speed, so warn instead of failing the call.
        warn_once(f"a tuning table is ignored: {exc}")
        return found


def _with_users(mine: Table, found: Table | None) -> Table:
    mine = mine if mine.kernels else mine.select()
    if found is None:
        return mine
    # A part of a chip has the same name but fewer multiprocessors, and other times.
    alike = mine.multiprocessors == found.multiprocessors
    return replace(found.merged(mine) if alike else mine, kernels=_both(mine, found))


def _read(signature: OpSignature, device: Device) -> Table | None:
    """Return the user's own table, or None."""
    folder = _tuning_dir()
    if folder is None:
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
        raise ValueError(f"{path} is for other calls or another device. Remove it, or tune again")
    return table


def _is_there(path: Path) -> bool:
    """Whether the table's path exists, or its folder's path exists and is not a folder."""
    folder = path.parent
    return os.path.lexists(path) or (os.path.lexists(folder) and not os.path.isdir(folder))


def _from_bundle(device: str, signature: OpSignature) -> Table | None:
    for path, text in Bundles.current().tables(signature):
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
    return tables.load_ours(path) if path.is_file() else None


def _borrowed(own: Table | None, signature: OpSignature, device: Device) -> tuple[Table, ...]:
    """Return other tables to borrow from for kernels of Sm90, nearest first; none if the own table is the reference.

    None for a weight in a form of its own either: its kernels convert it, or take half of the instructions, which the
    model knows and no table.

    For FP8 operands the signature's own of another device, then that of similar FP8. Then a similar signature's, and
    the reference. Each is from this device first, then from the one that was measured first.
    """
    usual = reference()
    if signature.b.dtype in OWN or (own is not None and own.is_about(usual.signature, usual.device)):
        return ()
    like = _like if signature.loaded_majors == usual.signature.majors else _plain
    ways = [(name, s) for s in (like(signature), usual.signature) if s for name in (device.name, USUAL.name)]
    if signature.a.dtype in FP8:
        places = device.name, OF_FP8.name
        ways[-2:-2] = [(name, _scaled(signature)) for name in places]
        if signature.epilogue.products and signature.epilogue.quantized is not None:
            ways[:0] = [(name, _quantized_gate(signature)) for name in places]
        # Those of the device that FP8 was measured on first, or of the usual one.
        ways[:0] = [(name, signature) for name in (OF_FP8.name, USUAL.name) if name != device.name]
    if own is not None:
        ways = [(name, s) for name, s in ways if not own.is_about(s, name)]
    found = [t for name, s in dict.fromkeys(ways) if (t := _shipped(name, s)) is not None]
    return tuple(_as_if_about(t, signature, device) for t in found)


def reference() -> Table:
    """Return the default table: bias + ReLU in BF16 on an H100."""
    operand, bias = Operand.of("bf16.row"), Operand.of("bf16.row.align1")
    signature = OpSignature(builtin.bias_relu.graph, operand, operand.transposed, operand, (bias,), ())
    table = _shipped(USUAL.name, signature)
    if table is None:
        raise FileNotFoundError(f"cutlass_ops is incomplete: {resources.tuned()} has no table; reinstall the package")
    return table


def _e4m3(signature: OpSignature) -> Operand:
    """Return A of the measured signatures, with products that are added up as a signature's are."""
    return Operand.of("e4m3.row.promoted" if signature.promoted else "e4m3.row")


def _scaled(signature: OpSignature) -> OpSignature:
    """Return the signature of FP8 products with scales of blocks, or of the tensors, added up in the same way."""
    scale, d = Operand.of("f32.row.align1"), Operand.of("bf16.row")
    if signature.epilogue.block_scales:
        a, b = Operand.of("e4m3.row.blocks1x128"), Operand.of("e4m3.col.blocks128x128")
        return OpSignature(composed.scaled_blocks.graph, a, b, d, (scale, scale), ())
    a = _e4m3(signature)
    return OpSignature(composed.scaled.graph, a, a.transposed, d, (scale, scale), ())


def _quantized_gate(signature: OpSignature) -> OpSignature:
    """Return the signature of SwiGLU that is quantised, of FP8 products added up in the same way."""
    a, scale = _e4m3(signature), Operand.of("f32.row.align1")
    graph = composed.quantized_swiglu.graph
    inputs = tuple(a.transposed if i.kind is Kind.PRODUCT else scale for i in graph.inputs)
    return OpSignature(graph, a, a.transposed, Operand.of("e4m3.row"), inputs, (scale,))


def _like(signature: OpSignature) -> OpSignature | None:
    """Return the BF16 signature with the same norm and gate, or None for a plain GEMM."""
    norm, gate = bool(signature.epilogue.gathered), bool(signature.epilogue.products)
    graph = composed.rms_norm.graph if norm else composed.swiglu.graph
    if norm and gate:
        graph = graph.then(composed.swiglu.graph, products=True)
    if not norm and not gate:
        return None
    operand = Operand.of("bf16.row")
    inputs = {Kind.SCALAR: Operand.of("f32.row.align1"), Kind.PRODUCT: operand.transposed}
    types = tuple(inputs[i.kind] for i in graph.inputs)
    return OpSignature(graph, operand, operand.transposed, operand, types, ())


def _plain(signature: OpSignature) -> OpSignature:
    """Return the signature of plain GEMM in BF16 with the same majors of A and B, as TMA loads them."""
    a, b = (Operand.of(f"bf16.{major}") for major in signature.loaded_majors)
    return OpSignature(builtin.identity.graph, a, b, Operand.of("bf16.row"), (), ())


def _as_if_about(table: Table, signature: OpSignature, device: Device) -> Table:
    """Convert another signature's table to this one, which may also have means of A's rows and a second weight.

    Kernels are replaced by their legal forms. The model adds the time for copies of operands, means of A's rows and
    scattered stores of D. Two weights of N columns count as one of 2N, and elements of half the size as a K twice as
    long: instructions, loads and steps along K are the same.
    """
    theirs = table.signature
    if _kind(signature) == _kind(theirs):
        return table
    gathers = bool(signature.epilogue.gathered) and not theirs.epilogue.gathered

    def form(config: Config) -> Config | None:
        wanted = kind_of(config).gathering(config) if gathers else config
        wanted = kind_of(config).of_width(wanted, theirs.a.dtype.bits, signature.a.dtype.bits)
        # Kernels of Sm80 were measured beside those of Sm90 for few problems: they would seem better than they are.
        return _legal(signature, wanted, device) if config.family.tma or config.few_rows else None

    forms = tuple((config, form(config)) for config in table.configs)
    return restated(Itself(table), Traits.of(signature), forms, device)


def _kind(signature: OpSignature) -> tuple[object, ...]:
    """Return the properties in which signatures with the same times agree."""
    traits = Traits.of(signature)
    own = traits.element_bytes, traits.gathers, traits.weights, signature.realigns, traits.scatters, traits.promotes
    return *own, traits.clocks, signature.form


def _legal(signature: OpSignature, config: Config, device: Device) -> Config | None:
    """Return a configuration if it is legal, else its legal variant, or None."""
    return _legal_on(signature, config, device.capability, device.name)


@lru_cache(maxsize=1 << 14)
def _legal_on(signature: OpSignature, config: Config, capability: tuple[int, int], device: str) -> Config | None:
    target = config.target_on(capability)
    known = _shipped(device, signature) if target == config.default_target else None
    # Tables that ship were checked.
    if known is not None and config in known.configs:
        return config
    variants = kind_of(config).variants(signature, config)
    return next((c for c in variants if legality.is_legal(signature.spec(c, c.target_on(capability)))), None)


# A table takes megabytes, and one who tunes makes new ones again and again.
_KEPT = 32


@lru_cache(maxsize=_KEPT)
def restated(
    known: Itself[Table], mine: Traits, forms: tuple[tuple[Config, Config | None], ...], device: Device
) -> Table:
    """Convert a table to a signature's traits, with the form that takes each kernel's place, if any."""
    table, of = known.value, dict(forms)
    before, theirs = table.columns, Traits.of(table.signature)
    weights = mine.weights // theirs.weights
    _, n, k, _ = before.problems.T
    line = k * theirs.element_bytes
    whole = np.asarray((n % weights == 0) & (line % mine.element_bytes == 0))
    problems = before.problems.copy()
    problems[:, 1], problems[:, 2] = n // weights, line // mine.element_bytes

    taken = [of.get(config) for config in before.configs]
    configs = tuple(dict.fromkeys(config for config in taken if config is not None))
    place = {config: at for at, config in enumerate(configs)}
    form = np.array([-1 if config is None else place[config] for config in taken], np.int64)
    which = whole[before.points] & (form[before.kernels] >= 0)
    points, kernels = before.points[which], form[before.kernels[which]]
    pools = Pool(configs, theirs), Pool(configs, mine)
    times = before.raced[which] + _later(pools, kernels, (before.problems[points], problems[points]), device)

    part = replace(before, configs=configs, problems=problems).part(which)
    order = np.lexsort((times, points))  # within each point
    times = times[order]
    behind = times / times[part.starts[:-1]][part.points] - 1
    columns = replace(part, kernels=kernels[order], places=part.places[order], microseconds=times, behind=behind)
    kept = tuple(found for config in table.kernels if (found := of[config]) is not None)
    return replace(table, points=Recorded(columns, [()] * len(columns.problems)), kernels=kept)


def _later(pools: tuple[Pool, Pool], kernels: Places, problems: tuple[Places, Places], device: Device) -> Floats:
    """Return the extra microseconds of kernels, besides the GEMM, at the second pool's problems over the first's."""
    before, after = (
        pool.besides_of(kernels, Extents.of_array(each), device) for pool, each in zip(pools, problems, strict=True)
    )
    return np.asarray(after - before)
