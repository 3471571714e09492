"""Open, check and write bundles of compiled kernels. Kernels are read one at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.artifacts import container
from cutlass_ops.artifacts.container import MANIFEST, SIGNATURE, Container, open_container
from cutlass_ops.artifacts.entry import LIBRARY, SOURCE, Artifact, identity_key
from cutlass_ops.artifacts.loader import ABI
from cutlass_ops.artifacts.manifest import (
    FORMAT,
    MAX_BYTES,
    MAX_VERSION,
    Choice,
    File,
    Group,
    KernelRecord,
    Manifest,
    table_name,
)
from cutlass_ops.artifacts.signing import SIGNATURE_BYTES, PublicKeys, public_key_paths, require_signature, sign
from cutlass_ops.base import checked_json, resources
from cutlass_ops.base.errors import BundleError
from cutlass_ops.base.units import counted
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.signature import OpSignature
from cutlass_ops.declare.spec import KernelSpec


@dataclass(frozen=True)
class BundledKernel(Artifact):
    """A compiled kernel in a bundle. ``folder`` is the bundle's path."""

    container: Container = field(compare=False, repr=False)
    installed_with: str | None = field(default=None, compare=False)

    @property
    def library(self) -> Path:
        """Path of the shared library. It exists only if the bundle is a folder."""
        return self.folder / f"kernels/{self.key}.so"

    @property
    def origin(self) -> str:
        """The distribution that the bundle was installed with, else the bundle, in words."""
        if self.installed_with is not None:
            return f"installed with {self.installed_with}"
        return f"from the bundle {self.folder}"

    @property
    def source(self) -> Path:
        """Path of the C++ source. It exists only if the bundle is a folder."""
        return self.folder / f"sources/{self.key}.cu"

    def read_library(self) -> bytes:
        """Read the library, and check its contents and its key against the manifest."""
        if identity_key(self.manifest["identity"]) != self.key:
            name = f"bundle {self.folder}: kernels/{self.key}.so"
            raise BundleError(f"{name}: its key does not match its identity in the manifest")
        return _read(self.container, f"kernels/{self.key}.so", File(self.sha256, self.size))

    def read_source(self) -> bytes:
        """Read the source, and check it against the manifest."""
        return _read(self.container, f"sources/{self.key}.cu", File(**self.manifest["files"][SOURCE]))


class Bundle:
    """An open bundle. The manifest is checked when the bundle is opened, each file when it is read.

    Attributes
    ----------
    path : Path
        Path of the archive or folder.
    manifest : Manifest
        Its contents.
    signed_by : Path or None
        File of the public key that verified the signature; None if no key was given.
    installed_with : str or None
        Name and version of the distribution that installed it; None if the user named it.

    Examples
    --------
    >>> bundle = co.load_bundle("kernels.bundle")  # doctest: +SKIP
    >>> [kernel.key for kernel in bundle.kernels()]  # doctest: +SKIP
    """

    def __init__(self, found: Container, manifest: Manifest, signed_by: Path | None = None) -> None:
        self.path = found.path
        self.manifest = manifest
        self.signed_by = signed_by
        self.installed_with: str | None = None
        self._container = found
        self._groups: dict[OpSignature, Group] = {group.signature: group for group in manifest.groups}
        self._records: dict[KernelSpec, KernelRecord] = {record.spec: record for record in manifest.kernels}

    def __repr__(self) -> str:
        return f"<bundle {self.path}: {counted(len(self._records), 'kernel')} for {', '.join(self.manifest.targets)}>"

    def find(self, spec: KernelSpec) -> BundledKernel | None:
        """Return the kernel of a declaration, or None."""
        record = self._records.get(spec)
        return None if record is None else self.kernel(record)

    def kernel(self, record: KernelRecord) -> BundledKernel:
        """Return one of the manifest's kernels as an artifact."""
        about = {
            "identity": self.manifest.identity(record),
            "files": {LIBRARY: record.library._asdict(), SOURCE: record.source._asdict()},
            "sass": dict(record.opcodes),
            "resources": [dict(r) for r in record.resources],
            "library_version": self.manifest.library_version,
        }
        return BundledKernel(record.key, self.path, record.library.sha256, about, self._container, self.installed_with)

    def kernels(self) -> tuple[BundledKernel, ...]:
        """Return all kernels, in the manifest's order."""
        return tuple(map(self.kernel, self.manifest.kernels))

    def configs(self, signature: OpSignature, capability: tuple[int, int]) -> tuple[Config, ...]:
        """Return the configurations of a signature's kernels that run on a device."""
        group = self._groups.get(signature)
        return tuple(r.spec.config for r in group.kernels if r.runs_on(capability)) if group else ()

    def choice(self, signature: OpSignature, capability: tuple[int, int], n: int, k: int) -> Choice | None:
        """Return which kernel serves which numbers of rows for a weight; None if the bundle has no choice for it."""
        group = self._groups.get(signature)
        here = (c for c in (group.choices if group else ()) if (c.capability, c.n, c.k) == (capability, n, k))
        return next(here, None)

    def read_table(self, table: File) -> bytes:
        """Return a tuning table's JSON.

        Raises
        ------
        BundleError
            If it does not match the manifest.
        """
        return _read(self._container, table_name(table), table)


def open_bundle(
    path: str | os.PathLike[str],
    public_key: PublicKeys | None = None,
    *,
    minimum_version: int | None = None,
    beside: Path | None = None,
) -> Bundle:
    """Open a bundle. Check everything except the contents of kernels, sources and tables."""
    if os.fspath(path) == "":
        # It would be the current folder, whatever that has.
        raise ValueError("the path of the bundle is empty: name a file or a folder")
    keys = None if public_key is None else public_key_paths(public_key)
    if minimum_version is not None:
        if type(minimum_version) is not int:
            raise TypeError(f"minimum_version must be an integer, not {type(minimum_version).__name__}")
        if not 1 <= minimum_version <= MAX_VERSION:
            given = checked_json.shown(minimum_version)
            raise ValueError(f"minimum_version must be an integer from 1 to {MAX_VERSION}, not {given}")
    found = open_container(path, beside)
    try:
        size = found.sizes.get(MANIFEST)
        if size is None:
            raise BundleError(f"it has no {MANIFEST}")
        if size > MAX_BYTES:
            raise BundleError(f"{MANIFEST} has {size} bytes: at most {MAX_BYTES} are allowed")
        text = found.read(MANIFEST)
        signed_by = None if keys is None else require_signature(text, _signature(found), keys)
        manifest = Manifest.from_bytes(text)
        _require_files(found, manifest)
        _require_version(manifest, minimum_version)
    except BundleError as exc:
        raise BundleError(f"bundle {found.path}: {exc}") from None
    return Bundle(found, manifest, signed_by)


def needs() -> str:
    """Return what bundles have to be for this library, in one word: the manifest's format, ABI and templates.

    It is the name of an installed distribution's entry point, so that one for another version is not even opened.
    """
    return f"{FORMAT.replace('/', '.')}-abi{ABI}-templates{TEMPLATE_VERSION}"


def write_bundle(
    path: Path,
    manifest: Manifest,
    files: Mapping[str, bytes],
    *,
    private_key: Path | None = None,
    folder: bool = False,
) -> None:
    """Write a bundle. The same contents give the same bytes."""
    if set(files) != set(manifest.files):
        raise BundleError("the files do not match the names in the manifest")
    for name, file in manifest.files.items():
        _require_content(name, files[name], file)
    text = manifest.to_bytes()
    # Do not ship a manifest that cannot be read back.
    Manifest.from_bytes(text)
    written = {**files, MANIFEST: text}
    if private_key is not None:
        written[SIGNATURE] = sign(text, private_key)
    container.write(path, written, folder=folder)


def _signature(found: Container) -> bytes:
    if SIGNATURE not in found.sizes:
        raise BundleError(f"it is not signed: it has no {SIGNATURE}")
    if found.sizes[SIGNATURE] != SIGNATURE_BYTES:
        raise BundleError(f"{SIGNATURE} must have {SIGNATURE_BYTES} bytes, not {found.sizes[SIGNATURE]}")
    return found.read(SIGNATURE)


def _require_files(found: Container, manifest: Manifest) -> None:
    named = {name: file.size for name, file in manifest.files.items()}
    there = {name: size for name, size in found.sizes.items() if name not in (MANIFEST, SIGNATURE)}
    if there != named:
        missing, further = sorted(set(named) - set(there)), sorted(set(there) - set(named))
        other = sorted(name for name in set(named) & set(there) if named[name] != there[name])
        what = {"missing": missing, "not in the manifest": further, "of another size": other}
        raise BundleError("; ".join(f"{how}: {_some(names)}" for how, names in what.items() if names))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _require_version(manifest: Manifest, least: int | None) -> None:
    ours, theirs = (ABI, TEMPLATE_VERSION), (manifest.abi, manifest.templates)
    if ours != theirs:
        raise BundleError(
            f"its kernels are by cutlass_ops {manifest.library_version} (ABI {theirs[0]}, templates {theirs[1]}), and "
            f"this is {resources.library_version()} (ABI {ours[0]}, templates {ours[1]}): build it again with this "
            "version's `cutlass-ops bundle`, or install that one"
        )
    if least is not None and manifest.version is None:
        raise BundleError(f"it has no version, but version {least} or later is required: set one in its catalogue")
    if least is not None and (manifest.version or 0) < least:
        raise BundleError(f"its version is {manifest.version}, but {least} or later is required: use a newer one")


def _read(found: Container, name: str, file: File) -> bytes:
    data = found.read(name)
    try:
        _require_content(name, data, file)
    except BundleError as exc:
        raise BundleError(f"bundle {found.path}: {exc}") from None
    return data


def _require_content(name: str, data: bytes, file: File) -> None:
    if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
        raise BundleError(f"{name} does not match the manifest: its SHA-256 differs")


def manifest_of(
    artifacts: Iterable[Artifact],
    choices: Mapping[OpSignature, tuple[Choice, ...]],
    tables: Iterable[bytes],
    version: int | None = None,
) -> Manifest:
    """Return the manifest of a bundle with these contents."""
    groups: dict[OpSignature, list[KernelRecord]] = {}
    heads: dict[bytes, dict[str, object]] = {}
    flags: dict[str, dict[str, tuple[str, ...]]] = {}
    for artifact in sorted(artifacts, key=lambda a: a.key):
        identity, spec = artifact.manifest["identity"], artifact.spec
        if not isinstance(spec, KernelSpec):
            raise BundleError(f"{spec.slug} is not a GEMM kernel, and a bundle has only these: leave it out")
        head = {"toolchain": identity["toolchain"], "templates": identity["templates"]}
        heads[checked_json.canonical(head)] = head
        flags[spec.target] = {step: tuple(values) for step, values in identity["flags"].items()}
        groups.setdefault(OpSignature.of(spec), []).append(_record(artifact, spec))
    if len(heads) != 1:
        found = "; ".join(sorted(head.decode() for head in heads)) or "there are none"
        raise BundleError(f"all kernels of a bundle must come from one toolchain, not: {found}")
    (head,) = heads.values()
    return Manifest(
        abi=ABI,
        templates=int(str(head["templates"])),
        library_version=resources.library_version(),
        toolchain=dict(head["toolchain"]),  # type: ignore[call-overload]
        flags=flags,
        groups=tuple(Group(s, tuple(records), choices.get(s, ())) for s, records in groups.items()),
        tables=tuple(sorted((_file(table) for table in tables), key=lambda t: t.sha256)),
        version=version,
    )


def _record(artifact: Artifact, spec: KernelSpec) -> KernelRecord:
    files = artifact.manifest["files"]
    return KernelRecord(
        spec=spec,
        key=artifact.key,
        headers=artifact.manifest["identity"]["headers"],
        library=File(files[LIBRARY]["sha256"], files[LIBRARY]["size"]),
        source=File(files[SOURCE]["sha256"], files[SOURCE]["size"]),
        opcodes=artifact.manifest["sass"],
        resources=tuple(artifact.manifest["resources"]),
    )


def _file(data: bytes) -> File:
    return File(hashlib.sha256(data).hexdigest(), len(data))
