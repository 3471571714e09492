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
from pathlib import Path
from typing import Any

import numpy as np

from cutlass_ops.base import checked_json, env, locks
from cutlass_ops.base.atomic import DELETIONS, replacing
from cutlass_ops.base.errors import ConfigError, StoreError
from cutlass_ops.choose import format2, selection
from cutlass_ops.choose.points import BEHIND as BEHIND
from cutlass_ops.choose.points import MICROSECONDS as MICROSECONDS
from cutlass_ops.choose.points import Columns, Recorded, columns_of
from cutlass_ops.choose.points import Measured as Measured
from cutlass_ops.choose.points import Point as Point
from cutlass_ops.declare.config import Config, config_from_json, config_to_json
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.signature import signature_from_json as signature_from_json
from cutlass_ops.declare.signature import signature_to_json as signature_to_json
from cutlass_ops.kinds import legality
from cutlass_ops.kinds.spreads import ASSUMED

FORMAT = 3
# Kernels of a signature: so many for the problems that matter most, and so many in all.
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
    """All points of a signature on a kind of device.

    Attributes
    ----------
    device : str
        The driver's name.
    multiprocessors : int
        Number of multiprocessors.
    signature : OpSignature
        Epilogue and operand types.
    points : sequence of Point
        One for each problem, in the order of their problems.
    kernels : tuple of Config
        The kernels worth compiling, most useful first, as :meth:`select` found them.
    fallback : bool
        Whether a peer may serve calls at problems where it was faster than every kernel.
    deterministic : bool
        Whether only kernels that give bit-identical results may serve (those that sum a tile's whole K).
    """

    device: str
    multiprocessors: int
    signature: OpSignature
    points: Sequence[Point] = ()
    kernels: tuple[Config, ...] = ()
    fallback: bool = False
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
        return columns_of(self.points)

    @cached_property
    def _by_problem(self) -> dict[Problem, Point]:
        return {p.problem: p for p in self.points}

    def allows(self, config: Config) -> bool:
        """Whether a kernel may serve."""
        return config.whole_k or not self.deterministic

    def merged(self, other: Table) -> Table:
        """Return the points of both.

        If both have a problem, the later day's point is joined with the older one's. On the same day, `other` is later.

        Raises
        ------
        ConfigError
            If they are about different devices or signatures.
        """
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
        """Return the table with the few kernels that together lose least to each point's best.

        Exchanging one of the first `few` would not help; the others are added greedily. A kernel counts as twice as
        slow at points where it was not measured.

        Parameters
        ----------
        first : iterable of Problem
            Problems for which the first `few` kernels are chosen; by default all.
        few, most : int
            Number of kernels for these problems, and in all.
        """
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
        """Rebuild a table from :meth:`to_json`'s value.

        Raises
        ------
        ConfigError
            If anything is missing, unknown, of the wrong type or out of range, or a configuration is illegal for the
            signature. The message names the field.
        """
        if isinstance(data, dict) and data.get("format") == 2:
            data = format2.upgraded(data)
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
        """Rebuild a table that ships with the library, without the checks of :meth:`from_json`, which take long.

        A test makes them for each such table.
        """
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
    """Read a table.

    Raises
    ------
    ConfigError
        If the file is not a table. The message names it.
    OSError
        If it cannot be read.
    """
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ConfigError(f"{path} is not a tuning table: it is not a file")
    with path.open("rb") as file:
        return parse(file.read(_MAX_BYTES + 1), str(path))


def parse(text: bytes, where: str) -> Table:
    """Read a table from its JSON.

    Raises
    ------
    ConfigError
        If it is not a table. The message says where it is from.
    """
    try:
        return checked_json.read(text, "it", _MAX_BYTES, Table.from_json)
    except ConfigError as exc:
        raise ConfigError(f"{where} is not a tuning table: {checked_json.said(exc)}") from None


def update(path: Path, table: Table) -> Table:
    """Merge a table into a file, which is created if it is missing, and return the merged table.

    Concurrent updates lose nothing, and a reader sees the file before or after the update.

    Raises
    ------
    ConfigError
        If the file is not a table, or one of another signature or device.
    StoreError
        If the folder cannot be written, its lock is a link, or the file system has no locks.
    """
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
        text = json.dumps(merged.to_json(), separators=(",", ":"), allow_nan=False)
        # Readable by its owner alone, as all files of the tuner.
        with replacing(path) as aside, open(aside, "x", encoding="utf-8", opener=_privately) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    return merged


def _privately(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def prepare(folder: Path) -> None:
    """Make a folder for tables, and check that it can be written before measuring for long.

    Raises
    ------
    StoreError
        If it cannot be written.
    """
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
    # Left out where there are no groups, or rows were spread in all ways.
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
