"""Commands about kernels: rendered, compiled, and those in the store.

Each function prints its answer, as one JSON value or as lines, and returns the exit code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.bundle import open_bundle
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.entry import MANIFEST, Artifact, open_entry
from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import resources, writable
from cutlass_ops.base.errors import ConfigError, LoadError
from cutlass_ops.base.units import counted
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.quantizing import Declaration
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.ship import catalog, shipping
from cutlass_ops.tools.commands.common import compiling_on, required, show
from cutlass_ops.tools.doctor import diagnose
from cutlass_ops.tools.inspection import KernelReport
from cutlass_ops.tools.inspection import inspect as inspect_kernel


def doctor(as_json: bool) -> int:
    """Print what this installation can do; 1 if it can neither compile nor run a kernel."""
    found = diagnose()
    show(as_json, found.to_json(), *found.lines())
    return 0 if found.healthy else 1


def generate(catalogue: str | None, out: Path | None, check: bool, as_json: bool) -> int:
    """Render a catalogue, or check it; 1 if the check finds stale files."""
    folder = out or resources.generated()
    if not check:
        writable.require_folder(folder)
    entries = catalog.default() if catalogue is None else _entries(catalogue)
    changed = catalog.stale(folder, entries) if check else catalog.write(folder, entries)
    verb = "stale" if check else "updated"
    summary = f"{folder}: {counted(len(entries), 'kernel')}, {counted(len(changed), 'file')} {verb}"
    show(as_json, {"folder": str(folder), "changed": changed}, *(f"{verb}: {name}" for name in changed), summary)
    return 1 if check and changed else 0


def build(names: list[str], jobs: int | None, executor: str | None, as_json: bool) -> int:
    """Compile into the store."""
    specs = dict.fromkeys(spec for name in names for spec in _declarations(name))
    with compiling_on(executor) as pool:
        artifacts = build_many(specs, jobs=jobs, executor=pool)
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])
    return 0


def list_kernels(
    in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None, installed: bool, as_json: bool
) -> int:
    """Print the kernels in the store, in a bundle, or in installed distributions."""
    distributions = Bundles.current().distributions() if in_bundle is None else []
    where, artifacts = _installed(distributions) if installed else _kernels(in_bundle, key, minimum_version)
    rows = [_row(artifact) for artifact in artifacts]
    lines = [
        f"{row['key'][:12]}  {row['bytes']:>9,} bytes  {row['created'] or ''}  {row['slug']}  {row['origin']}"
        for row in rows
    ]
    more = [] if installed else [f"installed: {name} (--installed lists its kernels)" for name in distributions]
    show(as_json, rows, *lines, f"{where}: {counted(len(rows), 'kernel')}", *more)
    return 0


def _installed(names: Sequence[str]) -> tuple[str, Iterable[Artifact]]:
    """Return the names of installed distributions, and their kernels."""
    bundles = (bundle for bundle in Bundles.current().all() if bundle.installed_with is not None)
    where = f"installed with {', '.join(names)}" if names else "no distribution of kernels is installed"
    return where, [kernel for bundle in bundles for kernel in bundle.kernels()]


def inspect(
    kernels: list[str], in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None, as_json: bool
) -> int:
    """Print reports on kernels."""
    artifacts = [_find(text, in_bundle, key, minimum_version) for text in kernels]
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])
    return 0


def clean(unused_for: float | None, keep: int | None, as_json: bool) -> int:
    """Remove kernels from the store: all, those unused for so many seconds, or those beyond so many bytes."""
    store = KernelStore.default()
    removed = store.clean(unused_for=unused_for, keep=keep)
    show(as_json, {"store": str(store.root), "removed": removed}, f"{store.root}: {counted(removed, 'kernel')} removed")
    return 0


def cmakedir(as_json: bool) -> int:
    """Print the folder of the CMake package."""
    folder = resources.cmake()
    show(as_json, {"folder": str(folder)}, str(folder))
    return 0


def _declarations(name: str) -> Sequence[Declaration]:
    """Return the kernels of one argument of ``build``, which may be those of no GEMM."""
    return [shipping.read_declaration(Path(name))] if name.endswith(".json") else _specs(name)


def _specs(name: str) -> list[KernelSpec]:
    """Return the kernels of one argument: a declaration, or a catalogue."""
    if name.endswith(".json"):
        return [shipping.read_spec(Path(name))]
    return list(shipping.shipment(shipping.load(name)).specs)


def _entries(catalogue: str) -> list[catalog.Entry]:
    return [catalog.Entry(spec.slug, spec) for spec in _specs(catalogue)]


def _kernels(
    in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None
) -> tuple[str, Iterable[Artifact]]:
    """Return the store or bundle, and its kernels."""
    if in_bundle is not None:
        keys, least = required(key, minimum_version)
        return str(in_bundle), open_bundle(in_bundle, keys, minimum_version=least).kernels()
    store = KernelStore.default()
    return str(store.root), store.entries()


def _row(artifact: Artifact) -> dict[str, Any]:
    return {
        "key": artifact.key,
        "slug": _slug(artifact),
        "target": artifact.target,
        "bytes": artifact.size,
        "created": artifact.manifest.get("created"),
        "origin": artifact.origin,
        "folder": str(artifact.folder),
    }


def _slug(artifact: Artifact) -> str:
    try:
        return artifact.spec.slug
    except ConfigError:
        return "(declared by another version of this library)"


def _find(text: str, in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> Artifact:
    """Find a kernel by its folder, or in the store or a bundle by the beginning of its key or slug."""
    path = Path(text).absolute()
    folder = path if path.is_dir() else path.parent
    is_kernels = path.exists() and (folder / MANIFEST).exists()
    if in_bundle is None and not key and minimum_version is None and is_kernels:
        return open_entry(folder)
    where, artifacts = _kernels(in_bundle, key, minimum_version)
    found = [a for a in artifacts if a.key.startswith(text) or _slug(a).startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        keys = ", ".join(a.key[:12] for a in found)
        raise ValueError(f"{text} matches {len(found)} kernels: {keys}. Give more of the key")
    raise LoadError(
        f"{text!r} is not a kernel's folder, and no key or slug in {where} starts with it: `list` shows the kernels"
    )


def _show_reports(as_json: bool, reports: list[tuple[Artifact, KernelReport]]) -> None:
    values = [report.to_json() | {"folder": str(artifact.folder)} for artifact, report in reports]
    show(as_json, values, *(line for artifact, report in reports for line in _report_lines(artifact, report)))


def _report_lines(artifact: Artifact, report: KernelReport) -> list[str]:
    sass = ", ".join(f"{count} {opcode}" for opcode, count in report.sass.items())
    block = {
        ("stage", "stages"): report.stages,
        ("thread", "threads"): report.threads,
        ("byte of dynamic shared memory", "bytes of dynamic shared memory"): report.dynamic_shared_memory,
        ("block an SM", "blocks an SM"): report.blocks_per_sm,
    }
    known = ", ".join(counted(number, *names) for names, number in block.items() if number is not None)
    return [
        report.slug,
        f"  {artifact.where}",
        f"  library   {report.library_bytes:,} bytes for {report.target}",
        f"  SASS      {sass}",
        f"  thread    {report.registers} registers, {report.stack} bytes of stack, "
        f"spills: {report.spill_stores} bytes stored, {report.spill_loads} loaded",
        f"  block     {known or 'unknown: the kernel cannot be loaded here'}",
    ]
