"""Build a catalogue's kernels, and pack them into a bundle with their sources, choices and tuning tables."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.artifacts.bundle import Bundle, manifest_of, needs, open_bundle, write_bundle
from cutlass_ops.artifacts.entry import Artifact
from cutlass_ops.artifacts.installed import GROUP, NAMESPACE, SUFFIX
from cutlass_ops.artifacts.manifest import Manifest, table_name
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import checked_json, resources
from cutlass_ops.base.disk import replacing
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.compilation.toolchain import Toolchain
from cutlass_ops.ship.shipping import Catalogue, shipment

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,62}[A-Za-z0-9])?")
_VERSION = re.compile(r"[0-9]+(\.[0-9]+)*((a|b|rc)[0-9]+)?(\.post[0-9]+)?(\.dev[0-9]+)?(\+[a-z0-9]+(\.[a-z0-9]+)*)?")
_TAG = "py3-none-linux_x86_64"
_FIRST_DAY = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Packed:
    """A bundle's contents before they are written."""

    manifest: Manifest
    files: Mapping[str, bytes]  # kernels, sources and tables by name

    def write(self, path: Path, *, private_key: Path | None = None, folder: bool = False) -> Bundle:
        """Write the bundle, then open it."""
        write_bundle(path, self.manifest, self.files, private_key=private_key, folder=folder)
        return open_bundle(path)


def pack(
    catalogue: Catalogue,
    *,
    jobs: int | None = None,
    store: KernelStore | None = None,
    toolchain: Toolchain | None = None,
    executor: Executor | None = None,
) -> Packed:
    """Build and pack everything in a catalogue. No GPU is needed."""
    wanted = shipment(catalogue)
    artifacts = build_many(wanted.specs, jobs=jobs, store=store, toolchain=toolchain, executor=executor)
    tables = [checked_json.canonical(table.to_json()) for table in wanted.tables]
    manifest = manifest_of(artifacts, wanted.choices, tables, catalogue.version)
    return packed(manifest, artifacts, tables)


def packed(manifest: Manifest, artifacts: Sequence[Artifact], tables: Sequence[bytes]) -> Packed:
    """Return a bundle's contents: the files of its kernels and tables, by the names that its manifest has for them."""
    by_key = {artifact.key: artifact for artifact in artifacts}
    by_digest = {hashlib.sha256(table).hexdigest(): table for table in tables}
    files = {record.library_name: by_key[record.key].read_library() for record in manifest.kernels}
    files |= {record.source_name: by_key[record.key].read_source() for record in manifest.kernels}
    files |= {table_name(table): by_digest[table.sha256] for table in manifest.tables}
    return Packed(manifest, files)


def write_wheel(bundle: Path, folder: Path, name: str, version: str | None = None) -> Path:
    """Pack a bundle into a wheel. Once the wheel is installed, the library finds the bundle by itself."""
    data = bundle.read_bytes()
    version = version or f"{resources.library_version()}+{hashlib.sha256(data).hexdigest()[:12]}"
    return write_distribution({f"{_stem(name)}{SUFFIX}": data}, folder, name, version)


def write_distribution(bundles: Mapping[str, bytes], folder: Path, name: str, version: str) -> Path:
    """Pack bundles into a wheel. The same bundles give the same bytes."""
    path, stem = wheel_path(folder, name, version), _stem(name)
    info = f"{stem}-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: Compiled kernels for cutlass_ops\n"
        f"Requires-Dist: cutlass_ops~={resources.library_version()}\n"
    )
    files = {f"{NAMESPACE}/{stem}/{file}": bundles[file] for file in sorted(bundles)} | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: cutlass_ops\nRoot-Is-Purelib: false\nTag: {_TAG}\n".encode(),
        f"{info}/entry_points.txt": f"[{GROUP}]\n{needs()} = {NAMESPACE}.{stem}\n".encode(),
    }
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    _write_zip(path, files)
    return path


def wheel_path(folder: Path, name: str, version: str) -> Path:
    """Return the path of the wheel that :func:`write_wheel` writes."""
    require_wheel(name, version)
    return folder / f"{_stem(name)}-{version}-{_TAG}.whl"


def _stem(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def require_wheel(name: str, version: str | None = None) -> None:
    """Check the name and the version of a package."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a valid package name: use letters, digits, '-', '_' and '.'")
    if re.sub(r"[-_.]+", "-", name).lower() == "cutlass-ops":
        raise ValueError(f"{name!r} is this library, which the wheel would replace: use a name of your own")
    if version is not None and not _VERSION.fullmatch(version):
        raise ValueError(f"{version!r} is not a valid package version: use a version such as 1.2 or 1.2.post1")


def _record(files: Mapping[str, bytes], own: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(data)])
    rows.writerow([own, "", ""])
    return text.getvalue().encode()


def _write_zip(path: Path, files: Mapping[str, bytes]) -> None:
    with replacing(path) as aside, zipfile.ZipFile(aside, "x") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _FIRST_DAY)
            entry.external_attr = 0o100644 << 16
            entry.compress_type = zipfile.ZIP_DEFLATED  # a kernel takes a third of its size
            archive.writestr(entry, data, compresslevel=9)
