"""Verify a bundle: every hash, key, target, symbol and instruction, and the signature."""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cutlass_ops.artifacts.bundle import BundledKernel, open_bundle
from cutlass_ops.artifacts.loader import SYMBOLS
from cutlass_ops.artifacts.manifest import KernelRecord
from cutlass_ops.artifacts.signing import PublicKeys
from cutlass_ops.base import arch, checked_json, elf
from cutlass_ops.base.errors import BundleError, CompileError, CutlassOpsError
from cutlass_ops.choose import tables
from cutlass_ops.kinds import proof
from cutlass_ops.kinds.legality import require_legal

_EXPORTS = [f"__tvm_ffi_{name}" for name in SYMBOLS]


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a bundle."""

    path: str  # path of the bundle
    # Number of kernels and tables that were checked.
    kernels: int
    tables: int
    targets: tuple[str, ...]  # targets of the kernels
    signed: bool  # whether one of the given keys verified the signature; False if no key was given
    # Problems, each with the file's name. The bundle is good if there are none.
    problems: tuple[str, ...]
    signed_by: str | None = None  # file of the key that verified the signature
    version: int | None = None  # the bundle's version, if set in its catalogue

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**vars(self), "targets": list(self.targets), "problems": list(self.problems)}


def verify(
    path: str | os.PathLike[str], public_key: PublicKeys | None = None, *, minimum_version: int | None = None
) -> Verdict:
    """Check everything in a bundle without loading or running any of it."""
    try:
        bundle = open_bundle(path, public_key, minimum_version=minimum_version)
    except BundleError as exc:
        return Verdict(os.fspath(path), 0, 0, (), False, (str(exc),))
    manifest = bundle.manifest
    checks: list[tuple[str, Callable[[], object]]] = []
    for record in manifest.kernels:
        kernel = bundle.kernel(record)
        further = (functools.partial(_check_library, kernel, record), functools.partial(require_legal, record.spec))
        checks += [(record.library_name, check) for check in (kernel.read_source, *further)]
    for table in manifest.tables:
        read = functools.partial(bundle.read_table, table)
        checks.append((f"tables/{table.sha256}", lambda read=read: tables.parse(read(), "it")))  # type: ignore[misc]
    problems = [problem for where, check in checks if (problem := _problem(where, check)) is not None]
    signed_by = bundle.signed_by
    return Verdict(
        str(bundle.path), len(manifest.kernels), len(manifest.tables), manifest.targets, signed_by is not None,
        tuple(problems), None if signed_by is None else str(signed_by), manifest.version,
    )  # fmt: skip


def _problem(where: str, check: Callable[[], object]) -> str | None:
    try:
        check()
    except CutlassOpsError as exc:
        return f"{where}: {checked_json.said(exc)}"
    return None


def _check_library(kernel: BundledKernel, record: KernelRecord) -> None:
    data = kernel.read_library()
    found = proof.proved(data, "it", record.spec)
    if found != record.opcodes:
        raise BundleError("the instruction counts of its machine code do not match the manifest")
    try:
        found_for = {elf.sm_version(image) for image in elf.gpu_images(data)}
        exported = elf.exports(data, _EXPORTS)
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise CompileError(f"it is not a shared library: {exc}") from None
    elf.require_own_libraries(data, "it", BundleError)
    major, minor = arch.target(record.spec.target).capability
    if found_for != {10 * major + minor}:
        names = ", ".join(f"sm_{version}" for version in sorted(found_for))
        raise BundleError(f"its machine code is for {names or 'no GPU'}, but the manifest says {record.spec.target}")
    if missing := [name for name in _EXPORTS if name not in exported]:
        raise BundleError(f"it does not export {', '.join(missing)}")
