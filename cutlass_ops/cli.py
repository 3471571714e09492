"""The command line: ``python -m cutlass_ops``, or ``cutlass-ops``.

Exit codes: 0 done, 1 an error or a negative answer, 2 wrong usage, 3 a kernel cannot be compiled, 4 a compiler, a GPU,
a store or a kernel that is needed is not there or not usable, 5 a bundle is not what it should be, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast, get_args

import typer

from cutlass_ops import _env, _resources, catalog, executors, ops, packing, shipping, signing, tables, tuning, verifying
from cutlass_ops.builder import build_many
from cutlass_ops.bundle import Bundle, open_bundle
from cutlass_ops.call import call_at, device_of
from cutlass_ops.device import Device
from cutlass_ops.doctor import diagnose
from cutlass_ops.epilogue import Epilogue
from cutlass_ops.errors import (
    BundleError,
    CompileError,
    ConfigError,
    CutlassOpsError,
    LoadError,
    MissingKernelError,
    NoDeviceError,
    StoreError,
    ToolchainError,
)
from cutlass_ops.explaining import explain_call
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


_EXIT_CODES: dict[type[Exception], int] = {
    CompileError: 3,
    ToolchainError: 4,
    StoreError: 4,
    MissingKernelError: 4,
    NoDeviceError: 4,
    BundleError: 5,
    LoadError: 4,  # other than of a bundle
}
_WRONG_USAGE = 2
_INTERRUPTED = 130


def main() -> None:
    """Run the command line; errors become one message and an exit code."""
    # To be told to end is the same as to be interrupted: compilers are ended, and nothing is left half-written.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        app()
    except (CutlassOpsError, ValueError, OSError) as exc:
        message = _message(exc)
        typer.echo(f"error: {message}", err=True)
        _say_error(type(exc).__name__, message)
        sys.exit(next((code for kind, code in _EXIT_CODES.items() if isinstance(exc, kind)), 1))
    except KeyboardInterrupt:
        _end_interrupted()
    except SystemExit as exc:
        if exc.code == _INTERRUPTED:
            _end_interrupted()
        if exc.code == _WRONG_USAGE:
            # Typer has said on standard error what is wrong, and keeps it in the exception that it ended with.
            said = getattr(exc.__context__, "format_message", lambda: "see standard error")
            _say_error("UsageError", said())
        raise
    except Exception as exc:
        # A mistake in this library: what calls it by machine gets its answer, and a person the traceback.
        _say_error(type(exc).__name__, str(exc))
        raise


def _message(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.filename is not None:
        return f"{exc.filename} cannot be used: {exc.strerror}"
    return str(exc)


def _say_error(kind: str, message: str) -> None:
    if "--json" in sys.argv:
        # If it is standard output that failed, nobody reads this either.
        with contextlib.suppress(OSError):
            typer.echo(json.dumps({"error": {"kind": kind, "message": message}}))


def _end_interrupted() -> NoReturn:
    message = "finished kernels stay in the store, and nothing is half-written"
    typer.echo(f"interrupted: {message}", err=True)
    _say_error("KeyboardInterrupt", message)
    sys.exit(_INTERRUPTED)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cutlass_ops {_resources.library_version()}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say which compiler, CUTLASS, GPU and store are used and why; exit code 0 if a kernel can be compiled or run."""
    found = diagnose()
    _show(as_json, found.to_json(), *found.lines())
    if not found.healthy:
        raise typer.Exit(1)


CatalogueName = Annotated[
    str | None,
    typer.Argument(metavar="[CATALOGUE]", help="A TOML or Python file, or MODULE:NAME; by default the library's own."),
]


@app.command()
def generate(
    catalogue: CatalogueName = None,
    out: Annotated[Path | None, typer.Option(help="Folder; by default generated/ of this installation.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 if anything is stale.")] = False,
    as_json: Json = False,
) -> None:
    """Render a catalogue as C++ files and a manifest."""
    if catalogue is not None and out is None:
        raise ValueError("--out is missing: name the folder for the sources of this catalogue")
    folder = out or _resources.generated()
    entries = catalog.default() if catalogue is None else _entries(catalogue)
    changed = catalog.stale(folder, entries) if check else catalog.write(folder, entries)
    verb = "stale" if check else "updated"
    summary = f"{folder}: {len(entries)} kernels, {len(changed)} files {verb}"
    _show(as_json, {"folder": str(folder), "changed": changed}, *(f"{verb}: {name}" for name in changed), summary)
    if check and changed:
        raise typer.Exit(1)


Jobs = Annotated[
    int | None, typer.Option(min=1, help="Kernels compiled at the same time; by default as many as there are CPUs.")
]


Where = Annotated[
    str | None,
    typer.Option("--executor", metavar="EXECUTOR", help=f"What compiles, by default this process: {executors.FORMS}."),
]


@app.command()
def build(
    names: Annotated[
        list[str], typer.Argument(metavar="SPEC.json|CATALOGUE...", help="Declarations of kernels, or catalogues.")
    ],
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Compile kernels into the store; those that are there already are not compiled again."""
    specs = dict.fromkeys(spec for name in names for spec in _specs(name))
    with _executor(executor) as pool:
        artifacts = build_many(specs, jobs=jobs, executor=pool)
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])


@app.command()
def bundle(
    catalogue: CatalogueName = None,
    out: Annotated[Path, typer.Option(help="The bundle to write.")] = Path("kernels.bundle"),
    folder: Annotated[bool, typer.Option("--folder", help="Write a folder, and not one file.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    wheel: Annotated[
        str | None, typer.Option(metavar="NAME", help="Write a wheel of this name as well, beside the bundle.")
    ] = None,
    wheel_version: Annotated[str | None, typer.Option(help="Version of the wheel.")] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Build all kernels of a catalogue, without a GPU, and pack them with sources, choices and tuning tables."""
    _require_writable(out, folder, sign, wheel, wheel_version)
    began = time.monotonic()
    wanted = shipping.default() if catalogue is None else shipping.load(catalogue)
    with _executor(executor) as pool:
        contents = packing.pack(wanted, jobs=jobs, executor=pool)
    made = contents.write(out, private_key=sign, folder=folder)
    packed = None if wheel is None else packing.write_wheel(out, out.absolute().parent, wheel, wheel_version)
    about = _about(made) | {"signed": sign is not None, "wheel": None if packed is None else str(packed)}
    about |= {"bytes": _bytes(out), "seconds": round(time.monotonic() - began, 1)}
    lines = [_about_line(about), *([f"wheel: {packed}"] if packed else [])]
    _show(as_json, about, *lines)


def _require_writable(out: Path, folder: bool, sign: Path | None, wheel: str | None, wheel_version: str | None) -> None:
    """Refuse what would fail once all kernels are compiled, before the first one is."""
    if wheel is not None and folder:
        raise ValueError("--wheel and --folder exclude each other: a wheel holds one file")
    if wheel_version is not None and wheel is None:
        raise ValueError("--wheel-version is the version of a wheel: name one with --wheel")
    if wheel is not None:
        packing.require_wheel(wheel, wheel_version)
    if folder and os.path.lexists(out):
        raise ValueError(f"{out} is there already: remove it, or name another folder")
    if not folder and out.is_dir():
        raise ValueError(f"{out} is a folder: name a file, or a new folder with --folder")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{out} cannot be written: {above} is no folder in which this user may make files")
    if sign is not None:
        signing.require_private_key(sign)


PublicKeyFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--key",
        help=f"PEM file of an Ed25519 public key; one of several must have signed. Default: {_env.BUNDLE_KEY.name}.",
    ),
]
MinimumVersion = Annotated[
    int | None,
    typer.Option(help=f"Refuse a bundle of a lower version, or none. Default: {_env.BUNDLE_VERSION.name}."),
]


@app.command()
def verify(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle: a file or a folder.")],
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Check a bundle's hashes, keys, targets, symbols, instructions and signature; exit code 5 if anything is wrong."""
    keys, least = _asked(key, minimum_version)
    found = verifying.verify(path, keys, minimum_version=least)
    signed = f"signed by {found.signed_by}" if found.signed else "no signature was asked for"
    version = "" if found.version is None else f", version {found.version}"
    good = (
        f"{found.path}{version}: {found.kernels} kernels for {', '.join(found.targets)} are what the manifest says; "
        f"{signed}"
    )
    _show(
        as_json,
        found.to_json(),
        *(f"wrong: {problem}" for problem in found.problems),
        *([] if found.problems else [good]),
    )
    if found.problems:
        raise typer.Exit(_EXIT_CODES[BundleError])


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
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Measure which kernels are the fastest for some problems and keep the result; stopped, it goes on where it was.

    Exit code 1 if a problem could not be measured or time was up.
    """
    effort = Effort(kernels=kernels, candidates=candidates, rounds=rounds, refine=refine, seconds=seconds)
    with _executor(executor) as pool:
        report = tuning.tune(
            _op(op), _problems(problems), dtypes=dtypes, a=_major(a), b=_major(b), effort=effort,
            folder=folder.absolute() if folder else None, again=again,
            allow_fallback=allow_fallback, deterministic=deterministic, executor=pool,
        )  # fmt: skip
    where = folder.absolute() if folder else _env.tuning_dir()
    files = [str(tables.path_of(where, t.device, s)) for s, t in report.tables.items() if t.points]
    counts = {"measured": report.measured, "known": report.known, "left": report.left, "tables": files}
    lines = [f"failed: {name}: {why}" for name, why in report.failed.items()]
    lines += [f"table: {file}" for file in files]
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


FromBundle = Annotated[Path | None, typer.Option("--bundle", help="Look in this bundle, and not in the store.")]


@app.command(name="list")
def list_kernels(
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """List the kernels in the store, or in a bundle."""
    where, artifacts = _kernels(in_bundle, key, minimum_version)
    rows = [_row(artifact) for artifact in artifacts]
    lines = [f"{row['key'][:12]}  {row['bytes']:>9,} bytes  {row['created'] or ''}  {row['slug']}" for row in rows]
    _show(as_json, rows, *lines, f"{where}: {len(rows)} kernels")


@app.command()
def inspect(
    kernels: Annotated[
        list[str], typer.Argument(metavar="KERNEL...", help="A kernel's folder, or how its key or slug begins.")
    ],
    in_bundle: FromBundle = None,
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Show a kernel's Tensor Core instructions, registers, shared memory, spills and occupancy."""
    artifacts = [_find(text, in_bundle, key, minimum_version) for text in kernels]
    _show_reports(as_json, [(artifact, inspect_kernel(artifact)) for artifact in artifacts])


@app.command()
def clean(as_json: Json = False) -> None:
    """Remove every compiled kernel from the store."""
    store = KernelStore.default()
    removed = store.clean()
    _show(as_json, {"store": str(store.root), "removed": removed}, f"{store.root}: {removed} kernels removed")


@app.command()
def cmakedir(as_json: Json = False) -> None:
    """Print the folder of the CMake package with which C++ programs open bundles."""
    folder = _resources.cmake()
    _show(as_json, {"folder": str(folder)}, str(folder))


def _executor(name: str | None) -> contextlib.AbstractContextManager[Executor | None]:
    return contextlib.nullcontext() if name is None else executors.named(name)


def _show(as_json: bool, value: Any, *lines: str) -> None:
    for line in [json.dumps(value, indent=1)] if as_json else lines:
        typer.echo(line)


def _op(name: str) -> HasGraph:
    """Return a named op, or the epilogue that an import path names."""
    named = {op.name: op for op in ops.NAMED}
    if name in named:
        return named[name]
    if ":" not in name:
        raise ValueError(f"{name} is no op: use {', '.join(named)}, or MODULE:NAME of an epilogue")
    sys.path.insert(0, str(Path.cwd()))
    found = shipping.import_object(name, "MODULE:NAME of an epilogue")
    if not isinstance(found, Epilogue | ops.Op):
        raise ValueError(f"{name} is a {type(found).__name__}: it must be decorated with @cutlass_ops.epilogue")
    return found


def _problems(texts: list[str]) -> list[tuple[int, int, int]]:
    return [problem for text in texts for problem in shipping.problems_of(text)]


def _major(text: str) -> Major:
    if text not in get_args(Major):
        raise ValueError(f"{text} is no major: use row or col")
    return cast(Major, text)


def _specs(name: str) -> list[KernelSpec]:
    """Return the kernels of one argument: a declaration, or a catalogue."""
    if name.endswith(".json"):
        return [shipping.read_spec(Path(name))]
    return list(shipping.shipment(shipping.load(name)).specs)


def _entries(catalogue: str) -> list[catalog.Entry]:
    return [catalog.Entry(spec.slug, spec) for spec in _specs(catalogue)]


def _about(bundle: Bundle) -> dict[str, Any]:
    manifest, kernels = bundle.manifest, bundle.manifest.kernels
    return {
        "path": str(bundle.path),
        "kernels": len(kernels),
        "targets": list(manifest.targets),
        "library_bytes": sum(record.library.size for record in kernels),
        "largest_library": max(record.library.size for record in kernels),
        "tables": len(manifest.tables),
        "version": manifest.version,
        "manifest_sha256": hashlib.sha256(manifest.to_bytes()).hexdigest(),
        "toolchain": dict(manifest.toolchain),
    }


def _bytes(bundle: Path) -> int:
    files = [bundle] if bundle.is_file() else bundle.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _about_line(about: dict[str, Any]) -> str:
    signed = "signed" if about["signed"] else "not signed"
    return (
        f"{about['path']}: {about['kernels']} kernels for {', '.join(about['targets'])}, {about['library_bytes']:,} "
        f"bytes of libraries, the largest {about['largest_library']:,}, {about['bytes']:,} in all; {signed}; "
        f"{about['seconds']} s"
    )


def _asked(key: list[Path] | None, minimum_version: int | None) -> tuple[Sequence[Path] | None, int | None]:
    """Return which keys and which version are asked of a bundle: those of the command line, else the environment's."""
    least = _env.bundle_version() if minimum_version is None else minimum_version
    return key or _env.bundle_keys(), least


def _kernels(
    in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None
) -> tuple[str, Iterable[Artifact]]:
    """Return where kernels are looked for, and those there."""
    if in_bundle is not None:
        keys, least = _asked(key, minimum_version)
        return str(in_bundle), open_bundle(in_bundle, keys, minimum_version=least).kernels()
    if key:
        raise ValueError("--key is for --bundle: kernels in the store are not signed")
    if minimum_version is not None:
        raise ValueError("--minimum-version is for --bundle: kernels in the store have no version")
    store = KernelStore.default()
    return str(store.root), store.entries()


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


def _find(text: str, in_bundle: Path | None, key: list[Path] | None, minimum_version: int | None) -> Artifact:
    """Find a kernel by its folder, or in the store or a bundle by the beginning of its key or slug."""
    path = Path(text).absolute()
    if in_bundle is None and not key and minimum_version is None and path.exists():
        return open_entry(path if path.is_dir() else path.parent)
    where, artifacts = _kernels(in_bundle, key, minimum_version)
    found = [a for a in artifacts if a.key.startswith(text) or _slug(a).startswith(text)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{text} names {len(found)} kernels: {', '.join(a.key[:12] for a in found)}")
    raise LoadError(f"{text} is no folder, and no key or slug in {where} begins so: `list` shows what is there")


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
        f"  {artifact.where}",
        f"  library   {report.library_bytes:,} bytes for {report.target}",
        f"  SASS      {sass}",
        f"  thread    {report.registers} registers, {report.stack} bytes of stack, "
        f"spills: {report.spill_stores} bytes stored, {report.spill_loads} loaded",
        f"  block     {known or 'unknown: the kernel cannot be loaded here'}",
    ]
