"""What a bundle says of itself: canonical JSON, signed as it stands, and believed only as far as it can be checked.

Kernels are grouped by signature, so that a dispatcher sees at once what there is for a call. No field is a path: the
names of files follow from keys and digests.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cutlass_ops.artifacts.container import MAX_FILE
from cutlass_ops.base import arch, checked_json, sass
from cutlass_ops.base.errors import BundleError, ConfigError
from cutlass_ops.base.mma import mma_of
from cutlass_ops.declare.config import Ordered, config_from_json, config_to_json
from cutlass_ops.declare.order import TileOrder
from cutlass_ops.declare.problem import MOST_EXTENT
from cutlass_ops.declare.signature import OpSignature, signature_from_json, signature_to_json
from cutlass_ops.declare.spec import KernelSpec

FORMAT = "cutlass_ops.bundle/2"
# A larger text is refused unread: this much untrusted text is read in a second or two.
MAX_BYTES = 4 << 20

_MAX_KERNELS = 4_000
_MAX_CHOICES = 4_096
_MAX_ROWS = 1_024
_MAX_TABLES = 256
_MAX_FUNCTIONS = 64
_MAX_NUMBER = (1 << 31) - 1  # of a configuration

_FIELDS = "format abi templates library_version toolchain flags signatures tables sha256"
_FURTHER = "version"  # there if the catalogue has one
# Users count versions themselves. Every reader of JSON keeps this many digits.
MAX_VERSION = 10**15 - 1
_TOOLCHAIN = "nvcc host_compiler cutlass tvm_ffi"
_STEPS = "device host link"
_RESOURCES = "registers stack spill_stores spill_loads static_shared_memory"
_DIGEST = re.compile(r"[0-9a-f]{64}")


class File(NamedTuple):
    """A file's digest (SHA-256) and size in bytes."""

    sha256: str
    size: int


@dataclass(frozen=True)
class KernelRecord:
    """One kernel."""

    spec: KernelSpec
    key: str  # hash of everything that changes the binary
    headers: str  # digest of this library's headers that went into it
    # The shared library and the C++ source.
    library: File
    source: File
    opcodes: Mapping[str, int] = field(compare=False)  # instructions in its machine code
    resources: tuple[Mapping[str, Any], ...] = field(compare=False)  # what ptxas said of each function

    @property
    def library_name(self) -> str:
        """The library's name in the bundle."""
        return f"kernels/{self.key}.so"

    @property
    def source_name(self) -> str:
        """The source's name in the bundle."""
        return f"sources/{self.key}.cu"

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a device of this compute capability takes the kernel."""
        found = arch.target_for(capability, self.spec.config.family)
        return found is not None and found.name == self.spec.target

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain values, without what its group says."""
        return {
            "config": config_to_json(self.spec.config),
            "target": self.spec.target,
            "key": self.key,
            "headers": self.headers,
            "library": self.library._asdict(),
            "source": self.source._asdict(),
            "sass": dict(self.opcodes),
            "resources": [dict(r) for r in self.resources],
        }


class Choice(NamedTuple):
    """Which kernel serves which number of rows of A, for one weight: chosen when the bundle was made."""

    capability: tuple[int, int]  # compute capability of the devices that it is for
    # B's extents.
    n: int
    k: int
    # Up to how many rows which configuration serves, with the order of its tiles; the last for all beyond.
    rows: tuple[tuple[int, Ordered], ...]

    def at(self, m: int) -> Ordered:
        """Return the configuration for a number of rows, and the order of its tiles."""
        place = bisect.bisect_left(self.rows, m, key=lambda row: row[0])
        return self.rows[min(place, len(self.rows) - 1)][1]


@dataclass(frozen=True)
class Group:
    """All kernels of a signature, and the choices among them."""

    signature: OpSignature
    kernels: tuple[KernelRecord, ...]
    choices: tuple[Choice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the group as plain values."""
        places = {(r.spec.config, r.spec.target): at for at, r in enumerate(self.kernels)}

        # Thousands of rows name a few kernels.
        @functools.cache
        def serves(capability: tuple[int, int], chosen: Ordered) -> list[Any]:
            target = arch.target_for(capability, chosen.config.family)
            return [places[chosen.config, target.name if target else ""], chosen.order.to_json()]

        def row(choice: Choice, most: int, chosen: Ordered) -> list[Any]:
            return [most, *serves(choice.capability, chosen)]

        return {
            "signature": signature_to_json(self.signature),
            "kernels": [r.to_json() for r in self.kernels],
            "choices": [
                {"capability": list(c.capability), "n": c.n, "k": c.k, "rows": [row(c, *r) for r in c.rows]}
                for c in self.choices
            ],
        }


@dataclass(frozen=True)
class Manifest:
    """Everything that a bundle says of itself."""

    # What its kernels expect of the library that loads them, and what their declarations mean.
    abi: int
    templates: int
    library_version: str  # of the library that made it
    toolchain: Mapping[str, str]  # versions of nvcc, host compiler, CUTLASS and tvm-ffi
    flags: Mapping[str, Mapping[str, Sequence[str]]]  # compiler flags of each target and step
    groups: tuple[Group, ...]  # kernels by signature
    tables: tuple[File, ...] = ()  # tuning tables
    version: int | None = None  # the catalogue's, by which a newer bundle is told from an older one

    @property
    def kernels(self) -> tuple[KernelRecord, ...]:
        """All kernels."""
        return tuple(record for group in self.groups for record in group.kernels)

    @property
    def targets(self) -> tuple[str, ...]:
        """The machine-code targets of its kernels."""
        return tuple(sorted({record.spec.target for record in self.kernels}))

    @property
    def files(self) -> dict[str, File]:
        """Every file that the bundle has besides manifest and signature, by name."""
        kernels = self.kernels
        return (
            {record.library_name: record.library for record in kernels}
            | {record.source_name: record.source for record in kernels}
            | {table_name(table): table for table in self.tables}
        )

    def identity(self, record: KernelRecord) -> dict[str, Any]:
        """Return what a kernel's key hashes, as :func:`cutlass_ops.compilation.identity.kernel_identity` does."""
        return {
            "templates": self.templates,
            "spec": record.spec.to_json(),
            "source": record.source.sha256,
            "headers": record.headers,
            "flags": {step: list(flags) for step, flags in self.flags[record.spec.target].items()},
            "target": record.spec.target,
            "toolchain": dict(self.toolchain),
        }

    def to_bytes(self) -> bytes:
        """Return the manifest's text, the same for equal contents."""
        fields = {
            "format": FORMAT,
            "abi": self.abi,
            "templates": self.templates,
            "library_version": self.library_version,
            "toolchain": dict(self.toolchain),
            "flags": {target: {s: list(f) for s, f in steps.items()} for target, steps in self.flags.items()},
            "signatures": [group.to_json() for group in self.groups],
            "tables": [table._asdict() for table in self.tables],
        }
        return checked_json.sealed(fields if self.version is None else {**fields, "version": self.version})

    @classmethod
    def from_bytes(cls, text: bytes) -> Manifest:
        """Read a manifest, which need not be trusted."""
        # One spelling for each content: nothing stands in it twice, in another order, or unread. What is read has one
        # value for each content (_require_own), so its text is compared, and need not be made from what was read.
        try:
            return checked_json.written(text, "the manifest", MAX_BYTES, _sealed_again, cls._of)
        except ConfigError as exc:
            raise BundleError(f"the manifest is wrong: {checked_json.said(exc)}") from None

    @classmethod
    def _of(cls, data: object) -> Manifest:
        every = checked_json.mapping(data, "it", None)
        found = every.get("format")
        if found != FORMAT:
            shown = checked_json.shown(found)
            raise ConfigError(
                f"its format is {shown}: this version reads {FORMAT!r}; make the bundle again with `cutlass-ops bundle`"
            )
        further = _FURTHER in every
        fields = checked_json.mapping(data, "it", f"{_FIELDS} {_FURTHER}" if further else _FIELDS)
        toolchain = checked_json.mapping(fields["toolchain"], "toolchain", _TOOLCHAIN)
        manifest = cls(
            abi=checked_json.integer(fields["abi"], "abi", 1, 1 << 16),
            templates=checked_json.integer(fields["templates"], "templates", 1, 1 << 16),
            library_version=checked_json.text(fields["library_version"], "library_version"),
            toolchain={name: checked_json.text(value, name, 300) for name, value in toolchain.items()},
            flags=_flags(fields["flags"]),
            groups=tuple(map(_group, checked_json.sequence(fields["signatures"], "signatures", _MAX_KERNELS))),
            tables=tuple(_file(t, "a table") for t in checked_json.sequence(fields["tables"], "tables", _MAX_TABLES)),
            version=checked_json.integer(fields["version"], "version", 1, MAX_VERSION) if further else None,
        )
        _require_unique([group.signature for group in manifest.groups], "a signature")
        _require_unique([record.key for record in manifest.kernels], "a kernel's key")
        _require_unique([table.sha256 for table in manifest.tables], "a table")
        if len(manifest.kernels) > _MAX_KERNELS:
            raise ConfigError(f"it has {len(manifest.kernels)} kernels: at most {_MAX_KERNELS} are allowed")
        if set(manifest.targets) != set(manifest.flags):
            raise ConfigError("flags must name the targets of its kernels, and no others")
        return manifest


def _sealed_again(data: Mapping[str, Any]) -> bytes:
    return checked_json.sealed({name: value for name, value in data.items() if name != "sha256"})


def table_name(table: File) -> str:
    """Return a tuning table's name in the bundle."""
    return f"tables/{table.sha256}.json"


# ---- Reading -----------------------------------------------------------------------------------------------------


def _group(data: object) -> Group:
    fields = checked_json.mapping(data, "a signature's entry", "signature kernels choices")
    signature = signature_from_json(fields["signature"])
    if any(o.alignment < 1 for o in (signature.a, signature.b, signature.d, *signature.inputs, *signature.outputs)):
        raise ConfigError("an operand is aligned to at least one element")
    # As text, which tells 1 from 1.0.
    own, given = (checked_json.canonical(x) for x in (signature_to_json(signature), fields["signature"]))
    _require_own(own, given, "a signature")
    mma = mma_of(signature.a.dtype, signature.b.dtype)
    if signature.a.promoted != signature.b.promoted or signature.d.promoted:
        raise ConfigError(f"no kernel has a {signature.a}, b {signature.b} and d {signature.d}")
    blocks = (signature.a.scaling, signature.b.scaling)
    if signature.d.scaling or (blocks != (None, None) and (mma is None or not mma.scales(blocks))):
        raise ConfigError(f"no kernel has a {signature.a}, b {signature.b} and d {signature.d}")
    if tuple(block is not None for block in blocks) != signature.epilogue.in_blocks:
        raise ConfigError("operands have blocks, or the epilogue has scales of them, and not both")
    kernels = tuple(_kernel(k, signature) for k in checked_json.sequence(fields["kernels"], "kernels", _MAX_KERNELS))
    if not kernels:
        raise ConfigError("a signature has no kernels")
    _require_unique([record.spec for record in kernels], "a kernel")
    orders = _Orders(kernels)
    choices = tuple(_choice(c, orders) for c in checked_json.sequence(fields["choices"], "choices", _MAX_CHOICES))
    _require_unique([(c.capability, c.n, c.k) for c in choices], "a choice")
    return Group(signature, kernels, choices)


def _kernel(data: object, signature: OpSignature) -> KernelRecord:
    fields = checked_json.mapping(data, "a kernel", "config target key headers library source sass resources")
    target = checked_json.text(fields["target"], "target")
    if target not in arch.TARGETS:
        raise ConfigError(f"target is {target!r}: use one of {', '.join(arch.TARGETS)}")
    config = config_from_json(fields["config"])
    own = config_to_json(config)
    _require_own(own, fields["config"], "a configuration")
    _require_sizes(own)
    opcodes = checked_json.mapping(fields["sass"], "sass", None)
    if not set(opcodes) <= sass.COUNTED:
        raise ConfigError("sass names an unknown instruction")
    functions = checked_json.sequence(fields["resources"], "resources", _MAX_FUNCTIONS)
    return KernelRecord(
        spec=signature.spec(config, target),
        key=_digest(fields["key"], "key"),
        headers=_digest(fields["headers"], "headers"),
        library=_file(fields["library"], "library"),
        source=_file(fields["source"], "source"),
        opcodes={name: checked_json.integer(count, "sass", 0, MAX_FILE) for name, count in opcodes.items()},
        resources=tuple(map(_resources_of, functions)),
    )


def _require_own(own: object, given: object, what: str) -> None:
    """Refuse values that say the same as another spelling, such as defaults."""
    if own != given:
        raise ConfigError(f"{what} is not written as this library writes it")


def _require_sizes(config: Mapping[str, Any]) -> None:
    """Refuse numbers that no kernel has, and C++ could not hold. Which of the others make sense, legality says."""
    for name, value in config.items():
        extents, least = (tuple(value.values()), 1) if isinstance(value, dict) else ((value,), -_MAX_NUMBER)
        if any(type(n) is int and not least <= n <= _MAX_NUMBER for n in extents):
            raise ConfigError(f"{name} of a configuration is a number that no kernel has")


def _resources_of(data: object) -> dict[str, Any]:
    fields = checked_json.mapping(data, "resources", f"function {_RESOURCES}")
    numbers = {name: checked_json.integer(fields[name], name, 0, 1 << 32) for name in _RESOURCES.split()}
    return {"function": checked_json.text(fields["function"], "function", 1 << 16), **numbers}


def _choice(data: object, orders: _Orders) -> Choice:
    fields = checked_json.mapping(data, "a choice", "capability n k rows")
    pair = checked_json.sequence(fields["capability"], "capability", 2)
    if len(pair) != 2:
        raise ConfigError("capability has a major and a minor number")
    capability = (
        checked_json.integer(pair[0], "capability", 1, 99),
        checked_json.integer(pair[1], "capability", 0, 99),
    )
    rows = tuple(orders.rows(checked_json.sequence(fields["rows"], "rows", _MAX_ROWS), capability))
    if not rows or any(row[0] >= after[0] for row, after in itertools.pairwise(rows)):
        raise ConfigError("rows of a choice are in increasing order, and there is at least one")
    n, k = (checked_json.integer(fields[name], name, 1, MOST_EXTENT) for name in ("n", "k"))
    return Choice(capability, n, k, rows)


class _Orders:
    """Kernels in orders of their tiles, each read once: thousands of rows of choices name a few."""

    def __init__(self, kernels: Sequence[KernelRecord]) -> None:
        self._kernels = kernels
        self._known: dict[tuple[int, int], dict[str, Ordered]] = {}

    def rows(self, data: Sequence[object], capability: tuple[int, int]) -> Iterator[tuple[int, Ordered]]:
        """Yield the greatest number of rows of A that each row of a choice is for, and what serves them."""
        known = self._known.setdefault(capability, {})
        for each in data:
            if not isinstance(each, list) or len(each) != 3:
                raise ConfigError("a row of a choice has a number of rows, a kernel and an order of tiles")
            most, place, order = each
            if type(most) is not int or not 1 <= most <= MOST_EXTENT:
                checked_json.integer(most, "rows", 1, MOST_EXTENT)
            # Unlike equality, its text tells True from 1; and it takes a tenth of the time of JSON.
            key = repr((place, order))
            if key not in known:
                known[key] = self._read(place, order, capability)
            yield most, known[key]

    def _read(self, place: object, given: object, capability: tuple[int, int]) -> Ordered:
        record = self._kernels[checked_json.integer(place, "rows", 0, len(self._kernels) - 1)]
        order = TileOrder.from_json(checked_json.mapping(given, "an order of tiles", None))
        _require_own(order.to_json(), given, "an order of tiles")
        refusal = record.spec.config.refuses(order)
        if refusal:
            raise ConfigError(f"a choice has an order of tiles that {record.spec.config.slug} does not take: {refusal}")
        if not record.runs_on(capability):
            raise ConfigError(f"a choice for compute capability {capability} names a kernel for {record.spec.target}")
        return Ordered(record.spec.config, order)


def _flags(data: object) -> dict[str, dict[str, tuple[str, ...]]]:
    targets = checked_json.mapping(data, "flags", None)
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for target, value in targets.items():
        steps = checked_json.mapping(value, "flags of a target", _STEPS)
        found[target] = {
            step: tuple(checked_json.text(flag, "a flag") for flag in checked_json.sequence(flags, "flags", 100))
            for step, flags in steps.items()
        }
    return found


def _file(data: object, what: str) -> File:
    fields = checked_json.mapping(data, what, "sha256 size")
    return File(_digest(fields["sha256"], what), checked_json.integer(fields["size"], what, 0, MAX_FILE))


def _digest(data: object, what: str) -> str:
    if not isinstance(data, str) or not _DIGEST.fullmatch(data):
        raise ConfigError(f"{what} is not a SHA-256 in lower-case hexadecimal")
    return data


def _require_unique(values: Iterable[object], what: str) -> None:
    seen = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"{what} stands twice")
        seen.add(value)
