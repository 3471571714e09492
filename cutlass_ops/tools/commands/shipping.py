"""Commands about what is shipped: bundles and distributions.

Each function prints its answer, as one JSON value or as lines, and returns the exit code.
"""

from __future__ import annotations

import hashlib
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts import signing
from cutlass_ops.artifacts.bundle import Bundle
from cutlass_ops.base import writable
from cutlass_ops.base.errors import BundleError
from cutlass_ops.base.units import counted
from cutlass_ops.compilation.builder import build_many
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.ship import distributing, packing, shipping, verifying
from cutlass_ops.tools.commands.common import compiling_on, required, show


def bundle(
    catalogue: str | None,
    out: Path,
    *,
    folder: bool,
    sign: Path | None,
    wheel: str | None,
    wheel_version: str | None,
    jobs: int | None,
    executor: str | None,
    as_json: bool,
) -> int:
    """Build and pack."""
    _require_writable(out, folder, sign, wheel, wheel_version)
    began = time.monotonic()
    wanted = shipping.default() if catalogue is None else shipping.load(catalogue)
    with compiling_on(executor) as pool:
        contents = packing.pack(wanted, jobs=jobs, executor=pool)
    made = contents.write(out, private_key=sign, folder=folder)
    packed = None if wheel is None else packing.write_wheel(out, out.absolute().parent, wheel, wheel_version)
    about = _about(made) | {"signed": sign is not None, "wheel": None if packed is None else str(packed)}
    about |= {"bytes": _bytes(out), "seconds": round(time.monotonic() - began, 1)}
    lines = [_about_line(about), *([f"wheel: {packed}"] if packed else [])]
    show(as_json, about, *lines)
    return 0


def distribution(
    arch: str,
    out: Path,
    *,
    ops: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    behind: float,
    most: int | None,
    only: int | None,
    plan: bool,
    sign: Path | None,
    version: str | None,
    jobs: int | None,
    executor: str | None,
    as_json: bool,
) -> int:
    """Build a distribution of ready kernels, a part of its kernels, or only say what it would have."""
    if not plan:
        writable.require_folder(out)
    if sign is not None:
        signing.require_private_key(sign)
    parts = distributing.parts(arch, ops or distributing.OPS, dtypes or distributing.DTYPES, behind=behind, most=most)
    missing = distributing.missing(parts) if plan or only is not None else []
    wheel = None
    if not plan:
        with compiling_on(executor) as pool:
            if missing[:only] and only is not None:
                build_many(missing[:only], jobs=jobs, executor=pool)
                missing = missing[only:]
            if not missing:
                wheel = distributing.build(
                    arch, parts, out, version=version, private_key=sign, jobs=jobs, executor=pool
                )
    about = _distributed(arch, parts, missing, wheel)
    show(as_json, about, *_distribution_lines(about))
    return 0


def _distributed(
    arch: str, parts: Sequence[distributing.Part], missing: Sequence[KernelSpec], wheel: Path | None
) -> dict[str, Any]:
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


def _require_writable(out: Path, folder: bool, sign: Path | None, wheel: str | None, version: str | None) -> None:
    """Check the outputs before compiling, so that a bad path does not fail after it."""
    (writable.require_new if folder else writable.require_file)(out)
    # A key or a catalogue that was named by mistake stays.
    if out.is_file() and not zipfile.is_zipfile(out):
        raise ValueError(f"{out} exists and is not a bundle: remove it, or name another file")
    if wheel is not None:
        writable.require_file(packing.wheel_path(out.absolute().parent, wheel, version or "0" * 64))
    if sign is not None:
        signing.require_private_key(sign)


def verify(path: Path, key: list[Path] | None, minimum_version: int | None, failing: int, as_json: bool) -> int:
    """Check a bundle; `failing` if anything is wrong."""
    if not path.exists():  # a report would be about a bundle
        raise BundleError(f"bundle {path} cannot be read: no such file or folder")
    keys, least = required(key, minimum_version)
    found = verifying.verify(path, keys, minimum_version=least)
    signed = f"signed by {found.signed_by}" if found.signed else "no signature was required"
    version = "" if found.version is None else f", version {found.version}"
    kernels, match = counted(found.kernels, "kernel"), "matches" if found.kernels == 1 else "match"
    good = f"{found.path}{version}: {kernels} for {', '.join(found.targets)} {match} the manifest; {signed}"
    show(
        as_json,
        found.to_json(),
        *(f"wrong: {problem}" for problem in found.problems),
        *([] if found.problems else [good]),
    )
    return failing if found.problems else 0


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
        f"{about['path']}: {counted(about['kernels'], 'kernel')} for {', '.join(about['targets'])}, "
        f"{about['library_bytes']:,} bytes of libraries, the largest {about['largest_library']:,}, "
        f"{about['bytes']:,} in all; {signed}; {about['seconds']} s"
    )
