"""Tuning tables: measured times of configurations at problems, for one signature on one kind of device.

A table is plain JSON. Reading one runs no code and refuses configurations that :func:`cutlass_ops.kinds.legality.check`
refuses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cutlass_ops.base import checked_json, env, locks
from cutlass_ops.base.disk import DELETIONS, replacing
from cutlass_ops.base.errors import ConfigError, StoreError
from cutlass_ops.choose import selection
from cutlass_ops.declare.config import Config, Ordered, config_from_json, config_to_json
from cutlass_ops.declare.order import USUAL_ORDER, TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature, signature_from_json, signature_to_json
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.arrays import Flags, Floats, Places
from cutlass_ops.kinds.spreads import ASSUMED

# The least distance of an estimate behind the fastest: more than dispatch treats as equal.
ESTIMATED = 0.005
# Bounds of measurements: far beyond any kernel's, with finite ratios and logarithms. A table has three digits of a
# microsecond.
MICROSECONDS = (0.001, 1e12)
BEHIND = (-0.9, 1e6)

# A day, and the spreads of groups of rows.
Session: TypeAlias = tuple[str, tuple[str, ...]]


@dataclass(frozen=True)
class Measured:
    """One configuration's time at a problem."""

    config: Config
    microseconds: float  # median over the rounds
    behind: float  # median over the rounds of its time over the fastest's of the same round, minus one
    order: TileOrder = USUAL_ORDER  # the order of its tiles

    @property
    def ordered(self) -> Ordered:
        """The configuration with the order of its tiles."""
        return Ordered(self.config, self.order)


@dataclass(frozen=True)
class Point:
    """One problem, measured in one session."""

    problem: Problem  # its extents
    date: str  # day of the session, such as `"2026-11-21"`
    measured: tuple[Measured, ...]  # measurements, fastest first
    peers: tuple[tuple[str, float], ...] = ()  # microseconds of peers, by name
    # Of groups: how their rows were spread (`kinds/spreads.py`), if not in all ways that are assumed. Times are
    # geometric means over these.
    spreads: tuple[str, ...] = ()

    def joined(self, older: Point) -> Point:
        """Return the point with an older point's other kernels, rescaled by a kernel that both have.

        Without such a kernel, or of rows that were spread otherwise, the older measurements are not comparable and are
        dropped.
        """
        if self.spreads != older.spreads:
            return self
        before = {m.config: m for m in reversed(older.measured)}
        anchor = next((m for m in self.measured if m.config in before), None)
        if anchor is None:
            return self
        factor = (1 + anchor.behind) / (1 + before[anchor.config].behind)
        best = self.measured[0].microseconds
        known = {m.config for m in self.measured}
        further = [
            Measured(m.config, best * (1 + m.behind) * factor, (1 + m.behind) * factor - 1, m.order)
            for m in older.measured
            if m.config not in known
        ]
        # An estimate must neither displace nor equal the measured fastest, or kernels would be chosen by estimates.
        least = best * (1 + ESTIMATED)
        further = [m if m.behind > ESTIMATED else Measured(m.config, least, ESTIMATED, m.order) for m in further]
        further = [m for m in further if m.behind <= BEHIND[1] and m.microseconds <= MICROSECONDS[1]]
        measured = tuple(sorted([*self.measured, *further], key=lambda m: m.behind))
        return replace(self, measured=measured, peers=self.peers or older.peers)


@dataclass(frozen=True, eq=False)
class Columns:
    """The measurements of points as arrays: those of one point follow each other, the fastest first."""

    # The configurations, and the orders of tiles.
    configs: tuple[Config, ...]
    orders: tuple[TileOrder, ...]
    sessions: tuple[Session, ...]  # the day of each point, and its spreads
    problems: Places  # M, N, K and the number of GEMMs of each point, of shape (points, 4)
    # Each measurement's point, configuration and order of tiles, as indices into these.
    points: Places
    kernels: Places
    places: Places
    # Its numbers, as `Measured` has them.
    microseconds: Floats
    behind: Floats

    @classmethod
    def of(cls, points: Iterable[Point]) -> Columns:
        """Return the measurements of points."""
        points = tuple(points)
        # Points share objects: comparing identities is faster than hashing each measurement's configuration.
        shared = {id(m.config): m.config for point in points for m in point.measured}
        configs = {config: at for at, config in enumerate(dict.fromkeys(shared.values()))}
        orders = {order: at for at, order in enumerate(dict.fromkeys(m.order for p in points for m in p.measured))}
        place = {known: configs[config] for known, config in shared.items()}
        rows = [
            [(place[id(m.config)], orders[m.order], m.microseconds, m.behind) for m in point.measured]
            for point in points
        ]
        sessions = tuple((point.date, point.spreads) for point in points)
        return cls.read(tuple(configs), tuple(orders), sessions, [point.problem for point in points], rows)

    @classmethod
    def read(
        cls,
        configs: tuple[Config, ...],
        orders: tuple[TileOrder, ...],
        sessions: tuple[Session, ...],
        problems: Sequence[Problem],
        rows: Sequence[Sequence[Sequence[float]]],
    ) -> Columns:
        """Return measurements that are written as rows: the place of a configuration, of an order, and both numbers."""
        counts = [len(each) for each in rows]
        flat = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), np.float64, 4 * sum(counts)).reshape(-1, 4)
        kernels, places, microseconds, behind = np.ascontiguousarray(flat.T)
        points = np.repeat(np.arange(len(counts)), counts)
        extents = np.array(problems, np.int64).reshape(-1, len(Problem._fields))
        indices = points, kernels.astype(np.int64), places.astype(np.int64)
        return cls(configs, orders, sessions, extents, *indices, microseconds, behind)

    @cached_property
    def starts(self) -> Places:
        """The first measurement of each point, and the number of all: of shape (points + 1,)."""
        return np.searchsorted(self.points, np.arange(len(self.problems) + 1))

    @cached_property
    def raced(self) -> Floats:
        """The microseconds of each measurement by the fastest of its race.

        Medians of a race that was left early are of a cooler chip; ratios within a round are not.
        """
        return np.asarray(self.microseconds[self.starts[:-1]][self.points] * (1 + self.behind))

    def part(self, which: Flags) -> Columns:
        """Return some of the measurements, and the points that have any of them."""
        of = self.points[which]
        points = np.unique(of)
        return Columns(
            configs=self.configs,
            orders=self.orders,
            sessions=tuple(self.sessions[at] for at in points.tolist()),
            problems=self.problems[points],
            points=np.searchsorted(points, of),
            kernels=self.kernels[which],
            places=self.places[which],
            microseconds=self.microseconds[which],
            behind=self.behind[which],
        )


class Recorded(Sequence[Point]):
    """Points that are kept as arrays, and made when somebody looks at them."""

    def __init__(self, columns: Columns, peers: Sequence[tuple[tuple[str, float], ...]]) -> None:
        self.columns, self._peers = columns, peers

    @cached_property
    def _all(self) -> tuple[Point, ...]:
        of = self.columns
        rows = zip(of.kernels.tolist(), of.microseconds.tolist(), of.behind.tolist(), of.places.tolist(), strict=True)
        measured = [Measured(of.configs[at], us, behind, of.orders[order]) for at, us, behind, order in rows]
        starts = of.starts.tolist()
        about = zip(of.problems.tolist(), of.sessions, self._peers, starts, starts[1:], strict=False)
        return tuple(
            Point(Problem(*problem), date, tuple(measured[first:after]), peers, spreads)
            for problem, (date, spreads), peers, first, after in about
        )

    def __len__(self) -> int:
        return len(self.columns.problems)

    def __getitem__(self, at: Any) -> Any:
        return self._all[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recorded | tuple) and self._all == tuple(other)


FORMAT = 3
# Number of kernels of a signature: for the problems that matter most, and in all.
MAX_KERNELS = 16
MOST_KERNELS = 192


# Weight of a kernel's loss to a peer, beside its loss to the best kernel.
_TO_A_PEER = 3.0

_FIELDS = "format device multiprocessors signature fallback deterministic configs orders kernels points"
_MAX_BYTES = 64 << 20
_MAX_CONFIGS = 1 << 16
_MAX_POINTS = 1 << 16
_MAX_ORDERS = 64  # more than there are
_MAX_PEERS = 16
_MAX_SPREADS = 16
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


@dataclass(frozen=True)
class Table:
    """All points of a signature on a kind of device."""

    device: str  # the driver's name
    multiprocessors: int  # number of multiprocessors
    signature: OpSignature  # epilogue and operand types
    points: Sequence[Point] = ()  # one for each problem, in the order of their problems
    kernels: tuple[Config, ...] = ()  # the kernels worth compiling, most useful first, as `select` found them
    fallback: bool = False  # whether a peer may serve calls at problems where it was faster than every kernel
    # Whether only kernels that give bit-identical results may serve (those that sum a tile's whole K).
    deterministic: bool = False

    def __post_init__(self) -> None:
        # Those were in order when they were written, and were checked.
        if isinstance(self.points, Recorded):
            return
        ordered = tuple(sorted(self.points, key=lambda p: p.problem))
        if len({p.problem for p in ordered}) != len(ordered):
            raise ConfigError("a table must have one point for each problem, and has two for one")
        for point in ordered:
            refusal = self.signature.form.refuses(point.problem)
            if refusal:
                raise ConfigError(refusal)
            if point.spreads and not self.signature.form.operands:
                raise ConfigError(f"problem {point.problem} has spreads, but form {self.signature.form} has no groups")
        object.__setattr__(self, "points", ordered)

    def is_about(self, signature: OpSignature, device: str) -> bool:
        """Whether a signature was measured on a kind of device, given by its name."""
        return (self.signature, self.device) == (signature, device)

    def at(self, problem: Problem) -> Point | None:
        """Return the measurements at a problem, or None."""
        return self._by_problem.get(problem)

    @cached_property
    def configs(self) -> frozenset[Config]:
        """All its kernels, those that may serve and those that were measured."""
        columns = self.columns
        return frozenset((*self.kernels, *(columns.configs[at] for at in np.unique(columns.kernels).tolist())))

    @cached_property
    def columns(self) -> Columns:
        """Its measurements as arrays."""
        return self.points.columns if isinstance(self.points, Recorded) else Columns.of(self.points)

    @cached_property
    def _by_problem(self) -> dict[Problem, Point]:
        return {p.problem: p for p in self.points}

    def allows(self, config: Config) -> bool:
        """Whether a kernel may serve."""
        return config.whole_k or not self.deterministic

    def merged(self, other: Table) -> Table:
        """Return the points of both."""
        for name in ("device", "multiprocessors", "signature"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ConfigError(f"tables of different {name} cannot be merged: {mine} and {theirs}")
        points = {p.problem: p for p in self.points}
        for point in other.points:
            known = points.get(point.problem)
            if known is None:
                points[point.problem] = point
            else:
                later, older = (point, known) if known.date <= point.date else (known, point)
                points[point.problem] = later.joined(older)
        kernels = other.kernels or self.kernels
        return replace(
            self, points=tuple(points.values()), kernels=kernels, fallback=other.fallback,
            deterministic=other.deterministic,
        )  # fmt: skip

    def select(self, first: Iterable[Problem] = (), few: int = MAX_KERNELS, most: int = MOST_KERNELS) -> Table:
        """Return the table with the few kernels that together lose least to each point's best."""
        wanted = set(first)
        usable = (replace(p, measured=tuple(m for m in p.measured if self.allows(m.config))) for p in self.points)
        points = [p for p in usable if p.measured]
        preferred = [p for p in points if p.problem in wanted]
        chosen = selection.chosen([_losses(p) for p in preferred or points], few)
        return replace(self, kernels=selection.extended([_losses(p) for p in points], chosen, most))

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values; each configuration and order once, referred to by its place."""
        measured = [m for p in self.points for m in p.measured]
        places = {c: at for at, c in enumerate(dict.fromkeys([*self.kernels, *(m.config for m in measured)]))}
        orders = {o: at for at, o in enumerate(dict.fromkeys(m.order for m in measured))}
        return {
            "format": FORMAT,
            "device": self.device,
            "multiprocessors": self.multiprocessors,
            "signature": signature_to_json(self.signature),
            "fallback": self.fallback,
            "deterministic": self.deterministic,
            "configs": [config_to_json(c) for c in places],
            "orders": [o.to_json() for o in orders],
            "kernels": [places[c] for c in self.kernels],
            "points": [
                {
                    "problem": p.problem.to_json(),
                    "date": p.date,
                    "measured": [
                        [places[m.config], orders[m.order], round(m.microseconds, 3), round(m.behind, 4)]
                        for m in p.measured
                    ],
                    "peers": {name: round(us, 3) for name, us in p.peers},
                    **({"spreads": list(p.spreads)} if p.spreads else {}),
                }
                for p in self.points
            ],
        }

    @classmethod
    def from_json(cls, data: object) -> Table:
        """Rebuild a table from :meth:`to_json`'s value."""
        fields = checked_json.mapping(data, "a tuning table", _FIELDS)
        if type(fields["format"]) is not int or fields["format"] != FORMAT:
            raise ConfigError(
                f"format is {checked_json.shown(fields['format'])}: this version reads {FORMAT}; tune again"
            )
        for name in ("fallback", "deterministic"):
            if type(fields[name]) is not bool:
                raise ConfigError(f"{name} is {checked_json.shown(fields[name])}: true or false is needed")
        signature = signature_from_json(fields["signature"])
        configs = [config_from_json(c) for c in checked_json.sequence(fields["configs"], "configs", _MAX_CONFIGS)]
        for config in dict.fromkeys(configs):
            _require_legal(config, signature)
        orders = [TileOrder.from_json(o) for o in checked_json.sequence(fields["orders"], "orders", _MAX_ORDERS)]
        return cls(
            device=checked_json.text(fields["device"], "device"),
            multiprocessors=checked_json.integer(fields["multiprocessors"], "multiprocessors", 1, 1 << 16),
            signature=signature,
            points=tuple(
                _point(p, configs, orders) for p in checked_json.sequence(fields["points"], "points", _MAX_POINTS)
            ),
            kernels=tuple(
                configs[_place(p, "configuration", configs)]
                for p in checked_json.sequence(fields["kernels"], "kernels", _MAX_CONFIGS)
            ),
            fallback=fields["fallback"],
            deterministic=fields["deterministic"],
        )

    @classmethod
    def of_ours(cls, data: Any) -> Table:
        """Rebuild a table that ships with the library, without the checks of :meth:`from_json`, which take long."""
        points = data["points"]
        configs = tuple(map(config_from_json, data["configs"]))
        columns = Columns.read(
            configs,
            tuple(TileOrder(**order) for order in data["orders"]),
            tuple((point["date"], tuple(point.get("spreads", ()))) for point in points),
            [Problem(*point["problem"]) for point in points],
            [point["measured"] for point in points],
        )
        return cls(
            device=data["device"],
            multiprocessors=data["multiprocessors"],
            signature=signature_from_json(data["signature"]),
            points=Recorded(columns, [tuple(point["peers"].items()) for point in points]),
            kernels=tuple(configs[at] for at in data["kernels"]),
            fallback=data["fallback"],
            deterministic=data["deterministic"],
        )


def path_of(folder: Path, device: str, signature: OpSignature) -> Path:
    """Return the path of a signature's table for a kind of device in a folder of tables."""
    text = json.dumps([device, signature_to_json(signature)], sort_keys=True)
    return folder / f"{_slug(device)}_{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def has_any(folder: Path, device: str) -> bool:
    """Whether a folder of tables has one for a kind of device."""
    return any(folder.glob(f"{_slug(device)}_*.json"))


def load_ours(path: Path) -> Table:
    """Read a table that ships with the library: :meth:`Table.of_ours`."""
    return Table.of_ours(json.loads(path.read_bytes()))


def load(path: Path) -> Table:
    """Read a table."""
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"{path} is not a tuning table: it is not a file")
    with path.open("rb") as file:
        return parse(file.read(_MAX_BYTES + 1), str(path))


def parse(text: bytes, where: str) -> Table:
    """Read a table from its JSON."""
    try:
        return checked_json.read(text, "it", _MAX_BYTES, lambda data: Table.from_json(_unsealed(data)))
    except ConfigError as exc:
        raise ConfigError(f"{where} is not a tuning table: {checked_json.said(exc)}") from None


def _unsealed(data: object) -> object:
    """Return a table's value without its digest, which those have that :func:`update` wrote."""
    if not isinstance(data, dict) or "sha256" not in data:
        return data
    rest = {name: value for name, value in data.items() if name != "sha256"}
    if checked_json.sealed(rest) != checked_json.canonical(data):
        raise ConfigError("it was changed since it was written: its sha256 does not match")
    return rest


def update(path: Path, table: Table) -> Table:
    """Merge a table into a file, which is created if it is missing, and return the merged table."""
    attempts = 0
    while True:
        attempts += 1
        try:
            return _updated(path, table)
        except StoreError as exc:
            # The folder was deleted meanwhile: what was measured for long is written to a new one.
            if attempts > DELETIONS or not isinstance(exc.__cause__, FileNotFoundError):
                raise


def _updated(path: Path, table: Table) -> Table:
    lock = path.with_name(f".{path.name}.lock")
    held = locks.held(lock, f"the tuning table {path}", "name a folder on a local disk for the tables")
    with _writing(path.parent), held:
        merged = load(path).merged(table) if path.exists() else table
        text = checked_json.sealed(merged.to_json())
        # Readable by its owner alone, as all files of the tuner.
        with replacing(path) as aside, open(aside, "xb", opener=_privately) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return merged


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def prepare(folder: Path) -> None:
    """Make a folder for tables, and check that it can be written before measuring for long."""
    with _writing(folder), tempfile.TemporaryFile(dir=folder):
        pass


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make a folder, and turn errors with its files into a StoreError."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield
    except OSError as exc:
        raise StoreError(
            f"tuning tables cannot be kept in {folder}: {exc}. Set {env.TUNING_DIR.name} to a folder of your own, or "
            f"{env.CACHE_DIR.name} to one for compiled kernels as well"
        ) from exc


def _losses(point: Point) -> dict[Config, float]:
    """Return the log loss of each kernel of a point to the best one. A loss to a peer counts several times."""
    found: dict[Config, float] = {}
    for m in point.measured:
        found[m.config] = min(found.get(m.config, math.inf), math.log1p(max(m.behind, 0.0)))
    best = min(found.values())
    peer = min((time for _, time in point.peers), default=math.inf)
    lead = max(0.0, math.log(peer / point.measured[0].microseconds))
    return {c: loss - best + _TO_A_PEER * max(0.0, loss - lead) for c, loss in found.items()}


def _require_legal(config: Config, signature: OpSignature) -> None:
    # Checked for the default target here; policies check again for the device.
    violations = legality.check(signature.spec(config, config.default_target))
    if violations:
        raise ConfigError(f"configuration {config.slug} is illegal: {violations[0]}")


def _point(data: object, configs: Sequence[Config], orders: Sequence[TileOrder]) -> Point:
    # Left out if there are no groups, or rows were spread in all ways.
    spread = isinstance(data, dict) and "spreads" in data
    fields = checked_json.mapping(data, "a point", "problem date measured peers" + " spreads" * spread)
    problem = Problem.from_json(fields["problem"])
    date = checked_json.text(fields["date"], "date")
    if not _DATE.fullmatch(date):
        raise ConfigError(f"date is {date!r}: write it like 2026-11-21")
    rows = checked_json.sequence(fields["measured"], "measured", _MAX_CONFIGS)
    if not rows:
        raise ConfigError("measured is empty: a point needs the time of at least one kernel")
    peers = checked_json.mapping(fields["peers"], "peers", None)
    if len(peers) > _MAX_PEERS:
        raise ConfigError(f"peers are {len(peers)}: at most {_MAX_PEERS} are allowed")
    times = tuple(
        (checked_json.text(n, "peers"), checked_json.number(us, "peers", *MICROSECONDS)) for n, us in peers.items()
    )
    names = checked_json.sequence(fields["spreads"], "spreads", _MAX_SPREADS) if spread else ()
    spreads = tuple(checked_json.text(name, "spreads") for name in names)
    known = tuple(each.name for each in ASSUMED if each.name in spreads)
    if spread and (known != spreads or len(known) in (0, len(ASSUMED))):
        raise ConfigError(f"spreads is {checked_json.shown(spreads)}: some of the known ones, in their order")
    return Point(problem, date, tuple(_measured(row, configs, orders) for row in rows), times, spreads)


def _place(value: object, what: str, among: Sequence[object]) -> int:
    place = checked_json.integer(value, f"a place of {what}", 0, 1 << 20)
    if place >= len(among):
        raise ConfigError(f"the table refers to {what} {place} of {len(among)}")
    return place


def _measured(data: object, configs: Sequence[Config], orders: Sequence[TileOrder]) -> Measured:
    row = checked_json.sequence(data, "measured")
    if len(row) != 4:
        raise ConfigError(
            f"measured has rows of {len(row)}: they have the places of a configuration and of an order of its tiles, "
            "microseconds, and a part"
        )
    place, order, microseconds, behind = row
    found = Measured(
        configs[_place(place, "configuration", configs)],
        checked_json.number(microseconds, "measured", *MICROSECONDS),
        checked_json.number(behind, "measured", *BEHIND),
        orders[_place(order, "order", orders)],
    )
    refusal = found.config.refuses(found.order)
    if refusal:
        raise ConfigError(f"configuration {found.config.slug} has no order {found.order}: {refusal}")
    return found


def _slug(text: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in text.lower()).split())
