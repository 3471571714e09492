"""The command line: ``python -m cutlass_ops``, or ``cutlass-ops``.

Exit codes: 0 done, 1 an error or a negative answer, 2 wrong usage.
"""

from __future__ import annotations

import importlib
import json
import math
import re
import sys
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from cutlass_ops import _resources, catalog, ops, tuning
from cutlass_ops.builder import build_many
from cutlass_ops.call import call_at, device_of
from cutlass_ops.doctor import diagnose
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.errors import ConfigError, CutlassOpsError, LoadError
from cutlass_ops.explaining import explain_call
from cutlass_ops.heuristics import Device
from cutlass_ops.inspection import KernelReport
from cutlass_ops.inspection import inspect as inspect_kernel
from cutlass_ops.spec import HasGraph, KernelSpec, Major
from cutlass_ops.store import Artifact, KernelStore, open_entry
from cutlass_ops.tuning import Effort

app = typer.Typer(
    name="cutlass-ops",
    help="GEMMs with the epilogue you write in Python, as compiled CUTLASS kernels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# What `explain` goes by where there is no GPU.
H100 = Device((9, 0), 132, "NVIDIA H100 80GB HBM3")

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


Problems = Annotated[
    list[str],
    typer.Argument(metavar="MxNxK...", help="Problems; extents may be lists, such as 1,16,64x4096x4096."),
]
OpName = Annotated[
    str, typer.Argument(metavar="OP", help="A named op such as gemm_bias_relu, or MODULE:NAME of an epilogue.")
]
Dtypes = Annotated[list[str], typer.Option("--dtype", help="Of A and B: bf16 or f16; may be repeated.")]
MajorOf = Annotated[str, typer.Option(help="row or col; a weight (N, K) passed as weight.t() is col.")]


@app.command()
def tune(
    op: OpName,
    problems: Problems,
    dtypes: Dtypes = ["bf16"],  # noqa: B006
    a: MajorOf = "row",
    b: MajorOf = "col",
    kernels: Annotated[int, typer.Option(min=1, help="Compile at most so many kernels.")] = Effort.kernels,
    candidates: Annotated[int, typer.Option(min=1, help="Race at most so many at a problem.")] = Effort.candidates,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each race.")] = Effort.rounds,
    seconds: Annotated[float, typer.Option(help="Begin no further problem after so long.")] = math.inf,
    folder: Annotated[Path | None, typer.Option(help="Of the tables; by default where calls look for them.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what was measured before.")] = False,
    refine: Annotated[bool, typer.Option("--refine", help="Look around what was measured to be the best.")] = False,
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Let PyTorch serve calls where it was faster.")
    ] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Use only kernels of which none changes a bit of another's result.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure which kernels are the fastest for some problems and keep the result; stopped, it goes on where it was.

    Exit code 1 if a problem could not be measured or time was up.
    """
    effort = Effort(kernels=kernels, candidates=candidates, rounds=rounds, refine=refine, seconds=seconds)
    report = tuning.tune(
        _op(op), _problems(problems), dtypes=dtypes, a=_major(a), b=_major(b), effort=effort,
        folder=folder.absolute() if folder else None, again=again,
        allow_fallback=allow_fallback, deterministic=deterministic,
    )  # fmt: skip
    counts = {"measured": report.measured, "known": report.known, "left": report.left}
    lines = [f"failed: {name}: {why}" for name, why in report.failed.items()]
    summary = f"{report.measured} problems measured, {report.known} known before, {report.left} left"
    _show(as_json, counts | {"failed": report.failed}, *lines, summary)
    if report.measured + report.known < len(_problems(problems)) * len(dtypes):
        raise typer.Exit(1)


@app.command()
def explain(
    op: OpName,
    problems: Problems,
    dtype: Annotated[str, typer.Option(help="Of A and B: bf16 or f16.")] = "bf16",
    a: MajorOf = "row",
    b: MajorOf = "col",
    as_json: Json = False,
) -> None:
    """Say which kernel serves a problem and why; without a GPU, as an H100 would."""
    import torch

    here = torch.cuda.is_available()
    device = device_of(torch.device("cuda", torch.cuda.current_device())) if here else H100
    graph = _op(op).graph
    found = [explain_call(op, call_at(graph, p, dtype, _major(a), _major(b)), device) for p in _problems(problems)]
    note = [] if here else [f"no CUDA device here: as on {device.name}"]
    _show(as_json, [{"device": device.name, **e.to_json()} for e in found], *note, *map(str, found))


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


def _op(name: str) -> HasGraph:
    """Return a named op, or the epilogue that an import path names."""
    named = {op.name: op for op in ops.NAMED}
    if name in named:
        return named[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"{name} is no op: use {', '.join(named)}, or MODULE:NAME of an epilogue")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ValueError(f"{name} cannot be imported: {exc}") from None
    if not isinstance(found, Epilogue | ops.Op):
        raise ValueError(f"{name} is a {type(found).__name__}: it must be decorated with @cutlass_ops.epilogue")
    return found


def _problems(texts: list[str]) -> list[tuple[int, int, int]]:
    """Read problems such as ``1,16x4096x4096``, every combination of listed extents."""
    found: list[tuple[int, int, int]] = []
    for text in texts:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*(x[1-9]\d*(,[1-9]\d*)*){2}", text, re.ASCII):
            raise ValueError(f"{text} is no problem: write MxNxK, positive integers, such as 512x4096x4096")
        rows, columns, depths = ([int(e) for e in side.split(",")] for side in text.split("x"))
        found += [(m, n, k) for m in rows for n in columns for k in depths]
    return found


def _major(text: str) -> Major:
    if text not in get_args(Major):
        raise ValueError(f"{text} is no major: use row or col")
    return cast(Major, text)


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
        "bytes": artifact.size,
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
