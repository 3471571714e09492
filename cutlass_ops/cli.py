"""The command line: ``python -m cutlass_ops``, or ``cutlass-ops``.

Exit codes: 0 done, 1 an error or a negative answer, 2 wrong usage.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cutlass_ops import _resources, catalog
from cutlass_ops.builder import build_many
from cutlass_ops.doctor import diagnose
from cutlass_ops.errors import ConfigError, CutlassOpsError, LoadError
from cutlass_ops.inspection import KernelReport
from cutlass_ops.inspection import inspect as inspect_kernel
from cutlass_ops.spec import KernelSpec
from cutlass_ops.store import Artifact, KernelStore, open_entry

app = typer.Typer(
    name="cutlass-ops",
    help="GEMMs with the epilogue you write in Python, as compiled CUTLASS kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of lines.")]


def main() -> None:
    """Run the command line; errors of this library become one message and exit code 1."""
    try:
        app()
    except (CutlassOpsError, ValueError, OSError) as exc:
        typer.echo(f"error: {exc}", err=True)
        sys.exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say which compiler, CUTLASS, GPU and store are used and why; exit code 0 if a kernel can be compiled or run."""
    found = diagnose()
    _show(as_json, found.to_json(), *found.lines())
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def generate(
    out: Annotated[Path | None, typer.Option(help="Folder; by default generated/ of this installation.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if anything is stale.")] = False,
    as_json: Json = False,
) -> None:
    """Render the default catalogue as C++ files and a manifest."""
    folder = out or _resources.generated()
    changed = catalog.stale(folder) if check else catalog.write(folder)
    verb = "stale" if check else "updated"
    summary = f"{folder}: {len(catalog.default())} kernels, {len(changed)} files {verb}"
    _show(as_json, {"folder": str(folder), "changed": changed}, *(f"{verb}: {name}" for name in changed), summary)
    if check and changed:
        raise typer.Exit(1)


@app.command()
def build(
    specs: Annotated[list[Path], typer.Argument(metavar="SPEC.json...", help="Declarations of kernels.")],
    as_json: Json = False,
) -> None:
    """Compile kernels into the store; those that are there already are not compiled again."""
    artifacts = build_many([_read_spec(path) for path in specs])
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])


@app.command(name="list")
def list_kernels(as_json: Json = False) -> None:
    """List the kernels in the store."""
    store = KernelStore.default()
    rows = [_row(artifact) for artifact in store.entries()]
    lines = [f"{row['key'][:12]}  {row['bytes']:>9,} bytes  {row['created']}  {row['slug']}" for row in rows]
    _show(as_json, rows, *lines, f"{store.root}: {len(rows)} kernels")


@app.command()
def inspect(
    kernels: Annotated[
        list[str], typer.Argument(metavar="KERNEL...", help="A kernel's folder, or how its key or slug begins.")
    ],
    as_json: Json = False,
) -> None:
    """Show a kernel's Tensor Core instructions, registers, shared memory, spills and occupancy."""
    artifacts = [_find(text) for text in kernels]
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])


@app.command()
def clean(as_json: Json = False) -> None:
    """Remove every compiled kernel from the store."""
    store = KernelStore.default()
    removed = store.clean()
    _show(as_json, {"store": str(store.root), "removed": removed}, f"{store.root}: {removed} kernels removed")


def _show(as_json: bool, value: Any, *lines: str) -> None:
    for line in [json.dumps(value, indent=1)] if as_json else lines:
        typer.echo(line)


def _read_spec(path: Path) -> KernelSpec:
    try:
        data = json.loads(path.read_bytes())
        if not isinstance(data, dict):
            raise ConfigError("a kernel spec is a JSON object")
        return KernelSpec.from_json(data)
    except ValueError as exc:
        raise ConfigError(f"{path}: {exc}") from None


def _row(artifact: Artifact) -> dict[str, Any]:
    return {
        "key": artifact.key,
        "slug": _slug(artifact),
        "target": artifact.target,
        "bytes": artifact.library.stat().st_size,
        "created": artifact.manifest.get("created"),
        "folder": str(artifact.folder),
    }


def _slug(artifact: Artifact) -> str:
    try:
        return artifact.spec.slug
    except ConfigError:
        return "(declared by another version of this library)"


def _find(text: str) -> Artifact:
    """Find a kernel by its folder, or in the store by the beginning of its key or slug."""
    path = Path(text).absolute()
    if path.exists():
        return open_entry(path if path.is_dir() else path.parent)
    store = KernelStore.default()
    found = [a for a in store.entries() if a.key.startswith(text) or _slug(a).startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise LoadError(f"{text} names {len(found)} kernels: {', '.join(a.key[:12] for a in found)}")
    raise LoadError(f"{text} is no folder, and no key or slug in {store.root} begins so: `list` shows what is there")


def _show_reports(as_json: bool, reports: list[tuple[Artifact, KernelReport]]) -> None:
    values = [report.to_json() | {"folder": str(artifact.folder)} for artifact, report in reports]
    _show(as_json, values, *(line for artifact, report in reports for line in _report_lines(artifact, report)))


def _report_lines(artifact: Artifact, report: KernelReport) -> list[str]:
    sass = ", ".join(f"{count} {opcode}" for opcode, count in report.sass.items())
    block = {
        "stages": report.stages,
        "threads": report.threads,
        "bytes of dynamic shared memory": report.dynamic_shared_memory,
        "blocks an SM": report.blocks_per_sm,
    }
    known = ", ".join(f"{number:,} {what}" for what, number in block.items() if number is not None)
    return [
        report.slug,
        f"  {artifact.folder}",
        f"  library   {report.library_bytes:,} bytes for {report.target}",
        f"  SASS      {sass}",
        f"  thread    {report.registers} registers, {report.stack} bytes of stack, "
        f"spills: {report.spill_stores} bytes stored, {report.spill_loads} loaded",
        f"  block     {known or 'unknown: the kernel cannot be loaded here'}",
    ]
