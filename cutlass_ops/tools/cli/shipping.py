"""Arguments of commands about what is shipped: bundles and distributions."""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cutlass_ops.base import disk
from cutlass_ops.base.errors import BundleError, ConfigError
from cutlass_ops.base.units import counted
from cutlass_ops.tools.cli.options import (
    EXIT_CODES,
    CatalogueName,
    Jobs,
    Json,
    MinimumVersion,
    PublicKeyFiles,
    Where,
    compiling_on,
    dtypes_of,
    later,
    readable,
    required,
    show,
)

if TYPE_CHECKING:
    from cutlass_ops.declare.spec import KernelSpec
    from cutlass_ops.ship import distributing


def require_version(version: str) -> None:
    """Require a version that a package may have; raise ValueError otherwise."""
    from cutlass_ops.ship import packing

    packing.require_wheel("name", version)


def bundle(
    catalogue: CatalogueName = None,
    out: Annotated[Path, typer.Option(help="The bundle to write.")] = Path("kernels.bundle"),
    folder: Annotated[bool, typer.Option("--folder", help="Write a folder instead of one file.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    wheel: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            callback=later("ship.packing", "require_wheel"),
            help="Also write a wheel of this name, beside the bundle.",
        ),
    ] = None,
    wheel_version: Annotated[
        str | None, typer.Option(callback=readable(require_version), help="Version of the wheel.")
    ] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Compile a catalogue's kernels and pack them into a bundle. No GPU is needed.

    The bundle also contains their sources, the choice of kernels for each weight, and tuning tables.
    """
    if wheel is not None and folder:
        raise typer.BadParameter("--wheel and --folder exclude each other: a wheel holds one file")
    if wheel_version is not None and wheel is None:
        raise typer.BadParameter("--wheel-version needs --wheel: name the wheel")
    from cutlass_ops.artifacts import signing
    from cutlass_ops.ship import packing, shipping

    # A bad path must not fail after compiling.
    _require_writable(out, folder)
    parent = out.absolute().parent
    if wheel is not None:
        disk.require_file(packing.wheel_path(parent, wheel, wheel_version or "0" * 64))
    if sign is not None:
        signing.require_private_key(sign)
    began = time.monotonic()
    wanted = shipping.default() if catalogue is None else shipping.load(catalogue)
    with compiling_on(executor) as pool:
        contents = packing.pack(wanted, jobs=jobs, executor=pool)
    made = contents.write(out, private_key=sign, folder=folder)
    packed = None if wheel is None else packing.write_wheel(out, parent, wheel, wheel_version)
    kernels, files = made.manifest.kernels, [out] if out.is_file() else out.rglob("*")
    about = {
        "path": str(made.path),
        "kernels": len(kernels),
        "targets": list(made.manifest.targets),
        "library_bytes": sum(record.library.size for record in kernels),
        "largest_library": max(record.library.size for record in kernels),
        "tables": len(made.manifest.tables),
        "version": made.manifest.version,
        "manifest_sha256": hashlib.sha256(made.manifest.to_bytes()).hexdigest(),
        "toolchain": dict(made.manifest.toolchain),
        "signed": sign is not None,
        "wheel": None if packed is None else str(packed),
        "bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "seconds": round(time.monotonic() - began, 1),
    }
    said = (
        f"{about['path']}: {counted(len(kernels), 'kernel')} for {', '.join(made.manifest.targets)}, "
        f"{about['library_bytes']:,} bytes of libraries, the largest {about['largest_library']:,}, "
        f"{about['bytes']:,} in all; {'signed' if sign else 'not signed'}; {about['seconds']} s"
    )
    show(as_json, about, said, *([f"wheel: {packed}"] if packed else []))


def _require_writable(out: Path, folder: bool) -> None:
    (disk.require_new if folder else disk.require_file)(out)
    # A key or a catalogue that was named by mistake stays.
    if out.is_file() and not zipfile.is_zipfile(out):
        raise ValueError(f"{out} exists and is not a bundle: remove it, or name another file")


def distribution(
    arch: Annotated[
        str,
        typer.Argument(
            metavar="ARCH",
            callback=later("ship.distributing", "require_arch"),
            help="sm_80, sm_86, sm_89 or sm_90a.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the wheel.")] = Path("dist"),
    op: Annotated[
        list[str] | None,
        typer.Option(callback=later("ship.distributing", "require_op"), help="Only this named op. May be repeated."),
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(callback=readable(dtypes_of), help="Only this dtype of A and B. May be repeated."),
    ] = None,
    behind: Annotated[
        float,
        typer.Option(
            min=0,
            max=100,
            help="At tuned problems, the wheel's best kernel is at most this many percent slower than the fastest.",
        ),
    ] = 3.0,
    most: Annotated[
        int | None, typer.Option(min=1, help="Keep at most this many kernels for each signature, the most useful ones.")
    ] = None,
    only: Annotated[
        int | None, typer.Option(min=1, help="Compile at most this many of the missing kernels; run again to continue.")
    ] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Print what would be built, and compile nothing.")] = False,
    sign: Annotated[Path | None, typer.Option(help="PEM file of the Ed25519 private key to sign with.")] = None,
    version: Annotated[
        str | None,
        typer.Option(callback=readable(require_version), help="Version of the wheel. Default: this library's."),
    ] = None,
    jobs: Jobs = None,
    executor: Where = None,
    as_json: Json = False,
) -> None:
    """Build a wheel of precompiled kernels for an architecture. No GPU is needed.

    Compiled kernels stay in the store, so an interrupted build continues where it stopped.
    """
    if plan and only is not None:
        raise typer.BadParameter("--plan and --only exclude each other: --plan compiles nothing")
    if dtype is not None:
        from cutlass_ops.ship import distributing

        try:
            distributing.require_served(arch, op or distributing.OPS, dtypes_of(dtype))
        except ConfigError as exc:
            others = "" if op else ". Name ops that do by --op"
            raise typer.BadParameter(f"{exc}{others}") from None
    from cutlass_ops.artifacts import signing
    from cutlass_ops.artifacts.store import KernelStore
    from cutlass_ops.compilation.builder import build_many
    from cutlass_ops.ship import distributing

    if not plan:
        disk.require_folder(out)
    if sign is not None:
        signing.require_private_key(sign)
    dtypes = distributing.DTYPES if dtype is None else dtypes_of(dtype)
    parts = distributing.parts(arch, op or distributing.OPS, dtypes, behind=behind / 100, most=most)
    missing = distributing.missing(parts) if plan or only is not None else []
    wheel = None
    if not plan:
        with compiling_on(executor) as pool:
            if missing and only is not None:
                build_many(missing[:only], jobs=jobs, store=KernelStore.of_user(), executor=pool)
                missing = missing[only:]
            if not missing:
                wheel = distributing.build(
                    arch, parts, out, version=version, private_key=sign, jobs=jobs, executor=pool
                )
    about = _distributed(arch, parts, missing, wheel)
    show(as_json, about, *_distribution_lines(about))


def _distributed(
    arch: str, parts: Sequence[distributing.Part], missing: Sequence[KernelSpec], wheel: Path | None
) -> dict[str, Any]:
    from cutlass_ops.ship import distributing

    present, taken, packed = distributing.compressed(parts)
    kernels = sum(len(part.specs) for part in parts)
    return {
        "arch": arch,
        "wheel": None if wheel is None else str(wheel),
        "bytes": None if wheel is None else wheel.stat().st_size,
        "kernels": kernels,
        "missing": len(missing),
        "devices": [device.name for device in distributing.devices_of(arch)],
        # By what the store has of them.
        "expected_bytes": packed * kernels // present if present else None,
        "expected_bytes_installed": taken * kernels // present if present else None,
        "signatures": [
            {
                "op": part.op,
                "dtype": part.dtype,
                "kernels": len(part.specs),
                "problems": part.pool.problems,
                "measured": part.pool.measured,
                "beyond": part.pool.beyond,
                "worst": round(part.pool.worst, 4),
                "mean": round(part.pool.mean, 4),
            }
            for part in parts
        ],
    }


def _distribution_lines(about: dict[str, Any]) -> list[str]:
    devices = ", ".join(about["devices"])
    lines = [f"{about['arch']}, for {devices}", "  kernels  problems  measured  worst  mean   beyond  signature"]
    lines += [
        f"  {s['kernels']:7}  {s['problems']:8}  {s['measured']:8}  {s['worst']:5.1%}  {s['mean']:5.1%}  "
        f"{s['beyond']:5}  {s['op']} {s['dtype']}"
        for s in about["signatures"]
    ]
    if about["wheel"] is not None:
        return [*lines, f"{about['wheel']}: {counted(about['kernels'], 'kernel')}, {about['bytes']:,} bytes"]
    size = "of unknown size: the store has none of them"
    if about["expected_bytes"] is not None:
        wheel, installed = (about[name] / 1e6 for name in ("expected_bytes", "expected_bytes_installed"))
        size = f"about {wheel:.0f} MB as a wheel and {installed:.0f} MB installed, by those in the store"
    return [*lines, f"{counted(about['kernels'], 'kernel')}, {size}; not compiled yet: {about['missing']}"]


def verify(
    path: Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle: a file or a folder.")],
    key: PublicKeyFiles = None,
    minimum_version: MinimumVersion = None,
    as_json: Json = False,
) -> None:
    """Check a bundle.

    Compares hashes, keys, targets, symbols, instructions and the signature. Exit code 5 if anything is wrong.
    """
    from cutlass_ops.ship import verifying

    if not path.exists():  # a report would be about a bundle
        raise BundleError(f"bundle {path} cannot be read: no such file or folder")
    keys, least = required(key, minimum_version)
    found = verifying.verify(path, keys, minimum_version=least)
    lines = [f"wrong: {problem}" for problem in found.problems]
    if not lines:
        signed = f"signed by {found.signed_by}" if found.signed else "no signature was required"
        version = "" if found.version is None else f", version {found.version}"
        kernels, match = counted(found.kernels, "kernel"), "matches" if found.kernels == 1 else "match"
        lines = [f"{found.path}{version}: {kernels} for {', '.join(found.targets)} {match} the manifest; {signed}"]
    show(as_json, found.to_json(), *lines, code=EXIT_CODES[BundleError] if found.problems else 0)
