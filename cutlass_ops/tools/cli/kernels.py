"""Commands about kernels: rendered, compiled, and those in the store."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutlass_ops.base import units
from cutlass_ops.tools.cli.options import (
    CatalogueName,
    FromBundle,
    Jobs,
    Json,
    MinimumVersion,
    PublicKeyFiles,
    Where,
    compiling_on,
    readable,
    required,
    show,
)

if TYPE_CHECKING:
    from cutlass_ops.artifacts.entry import Artifact


def doctor(as_json: Json = False) -> None:
    """Show which compiler, CUTLASS, GPU and store are used, and why.

    Exit code 0 if a kernel can be compiled or run.
    """
    from cutlass_ops.tools.doctor import diagnose

    found = diagnose()
    show(as_json, found.to_json(), *found.lines(), code=0 if found.healthy else 1)


def generate(
    catalogue: CatalogueName = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write. Default, without CATALOGUE: generated/.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; print stale files. Exit code 1 if there are any.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Render the C++ sources of a catalogue or a declaration, and a manifest. No compiler is needed."""
    if catalogue is not None and out is None:
        raise typer.BadParameter("--out is missing: name a folder for the sources of this catalogue")
    from cutlass_ops.base import disk, resources
    from cutlass_ops.ship import catalog, shipping

    folder = out or resources.generated()
    if not check:
        disk.require_folder(folder)
    if catalogue is None:
        entries = catalog.default()
    else:
        is_one = catalogue.endswith(".json")
        specs = [shipping.read_spec(Path(catalogue))] if is_one else shipping.shipment(shipping.load(catalogue)).specs
        entries = tuple(catalog.Entry(spec.slug, spec) for spec in specs)
    changed = catalog.stale(folder, entries) if check else catalog.write(folder, entries)
    verb = "stale" if check else "updated"
    summary = f"{folder}: {units.counted(len(entries), 'kernel')}, {units.counted(len(changed), 'file')} {verb}"
    lines = [f"{verb}: {name}" for name in changed]
    show(as_json, {"folder": str(folder), "changed": changed}, *lines, summary, code=1 if check and changed else 0)


def build(
    names: Annotated[
        list[str], typer.Argument(metavar="SPEC.json|CATALOGUE...", help="Kernel declarations or catalogues.")
    ],
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Compile kernels into the store. Kernels that are already there are not compiled again."""
    from cutlass_ops.artifacts.store import KernelStore
    from cutlass_ops.compilation.builder import build_many
    from cutlass_ops.declare.quantizing import Declaration
    from cutlass_ops.ship import shipping

    specs: dict[Declaration, None] = {}
    for name in names:
        if name.endswith(".json"):
            specs[shipping.read_declaration(Path(name))] = None
        else:
            specs |= dict.fromkeys(shipping.shipment(shipping.load(name)).specs)
    with compiling_on(executor) as pool:
        artifacts = build_many(specs, jobs=jobs, store=KernelStore.of_user(), executor=pool)
    _show_reports(as_json, artifacts)


def list_kernels(
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    installed: Annotated[bool, typer.Option("--installed", help="List installed distributions of kernels.")] = False,
    as_json: Json = False,
) -> None:
    """List the kernels in the store, in a bundle, or in installed distributions."""
    if installed and in_bundle is not None:
        raise typer.BadParameter("--installed and --bundle exclude each other")
    _require_bundle(in_bundle, key, minimum_version)
    from cutlass_ops.artifacts.bundles import Bundles

    distributions = Bundles.current().distributions() if in_bundle is None else []
    if installed:
        bundles = (bundle for bundle in Bundles.current().all() if bundle.installed_with is not None)
        names = ", ".join(distributions)
        where = f"installed with {names}" if names else "no distribution of kernels is installed"
        artifacts: Iterable[Artifact] = [kernel for bundle in bundles for kernel in bundle.kernels()]
    else:
        where, artifacts = _kernels(in_bundle, key, minimum_version)
    rows = [_row(artifact) for artifact in artifacts]
    lines = [
        f"{row['key'][:12]}  {row['bytes']:>9,} bytes  {row['created'] or ''}  {row['slug']}  {row['origin']}"
        for row in rows
    ]
    more = [] if installed else [f"installed: {name} (--installed lists its kernels)" for name in distributions]
    show(as_json, rows, *lines, f"{where}: {units.counted(len(rows), 'kernel')}", *more)


def inspect(
    kernels: Annotated[
        list[str], typer.Argument(metavar="KERNEL...", help="A kernel's folder, or the beginning of its key or slug.")
    ],
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Show the properties of compiled kernels.

    Shows Tensor Core instructions, registers, shared memory, spills, stages and occupancy.
    """
    _require_bundle(in_bundle, key, minimum_version)
    _show_reports(as_json, [_find(text, in_bundle, key, minimum_version) for text in kernels])


def clean(
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            callback=readable(lambda text: units.duration(text, "--older-than")),
            help="Remove only kernels unused for this long, such as 30d or 12h.",
        ),
    ] = None,
    keep_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            callback=readable(lambda text: units.size(text, "--keep-size")),
            help="Remove the least recently used kernels beyond this size, such as 1GB.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Remove kernels from the store: all of them, unless an option selects some."""
    from cutlass_ops.artifacts.store import KernelStore

    store = KernelStore.of_user()
    unused_for = None if older_than is None else units.duration(older_than, "--older-than")
    keep = None if keep_size is None else units.size(keep_size, "--keep-size")
    removed = store.clean(unused_for=unused_for, keep=keep)
    summary = f"{store.root}: {units.counted(removed, 'kernel')} removed"
    show(as_json, {"store": str(store.root), "removed": removed}, summary)


def cmakedir(as_json: Json = False) -> None:
    """Print the folder of the CMake package.

    C++ programs use it to open bundles.
    """
    from cutlass_ops.base import resources

    folder = str(resources.cmake())
    show(as_json, {"folder": folder}, folder)


def _require_bundle(in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> None:
    if in_bundle is not None:
        return
    if key:
        raise typer.BadParameter("--key needs --bundle: kernels in the store are not signed")
    if minimum_version is not None:
        raise typer.BadParameter("--minimum-version needs --bundle: kernels in the store have no version")


def _kernels(
    in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None
) -> tuple[str, Iterable[Artifact]]:
    """Return the store or bundle, and its kernels."""
    from cutlass_ops.artifacts.bundle import open_bundle
    from cutlass_ops.artifacts.store import KernelStore

    if in_bundle is not None:
        keys, least = required(key, minimum_version)
        return str(in_bundle), open_bundle(in_bundle, keys, minimum_version=least).kernels()
    store = KernelStore.of_user()
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
    from cutlass_ops.base.errors import ConfigError

    try:
        return artifact.spec.slug
    except ConfigError:
        return "(declared by another version of this library)"


def _find(text: str, in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> Artifact:
    """Find a kernel by its folder, or in the store or a bundle by the beginning of its key or slug."""
    from cutlass_ops.artifacts.entry import MANIFEST, open_entry
    from cutlass_ops.base.errors import LoadError

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


def _show_reports(as_json: bool, artifacts: Iterable[Artifact]) -> None:
    from cutlass_ops.tools.inspection import inspect as inspect_kernel

    reports = [(artifact, inspect_kernel(artifact)) for artifact in artifacts]
    values = [report.to_json() | {"folder": str(artifact.folder)} for artifact, report in reports]
    show(as_json, values, *(line for artifact, report in reports for line in report.lines(artifact.where)))
