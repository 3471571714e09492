"""Verify a bundle: every hash, key, target, symbol and instruction, and the signature."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from cutlass_ops.artifacts.bundle import Bundle, open_bundle
from cutlass_ops.artifacts.loader import SYMBOLS
from cutlass_ops.artifacts.manifest import KernelRecord
from cutlass_ops.artifacts.signing import PublicKeys
from cutlass_ops.base import arch, checked_json, elf, linkage
from cutlass_ops.base.errors import BundleError, CompileError, CutlassOpsError
from cutlass_ops.choose import tables
from cutlass_ops.kinds import legality, proof

_PREFIX = "__tvm_ffi_"


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a bundle.

    Attributes
    ----------
    path : str
        Path of the bundle.
    kernels, tables : int
        Number of kernels and tables that were checked.
    targets : tuple of str
        Targets of the kernels.
    signed : bool
        Whether one of the given keys verified the signature; False if no key was given.
    problems : tuple of str
        Problems, each with the file's name. The bundle is good if there are none.
    signed_by : str or None
        File of the key that verified the signature.
    version : int or None
        The bundle's version, if set in its catalogue.
    """

    path: str
    kernels: int
    tables: int
    targets: tuple[str, ...]
    signed: bool
    problems: tuple[str, ...]
    signed_by: str | None = None
    version: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**vars(self), "targets": list(self.targets), "problems": list(self.problems)}


def verify(
    path: str | os.PathLike[str], public_key: PublicKeys | None = None, *, minimum_version: int | None = None
) -> Verdict:
    """Check everything in a bundle without loading or running any of it.

    Parameters
    ----------
    path : path
        The archive or the folder.
    public_key : path or iterable of path, optional
        PEM files of Ed25519 keys. One of them must have signed the bundle.
    minimum_version : int, optional
        Minimum version of the bundle.

    Raises
    ------
    TypeError, ValueError, OSError
        If a public key cannot be read, or the minimum version is not valid.
    """
    try:
        bundle = open_bundle(path, public_key, minimum_version=minimum_version)
    except BundleError as exc:
        return Verdict(os.fspath(path), 0, 0, (), False, (str(exc),))
    manifest = bundle.manifest
    problems = [p for record in manifest.kernels for p in _of_kernel(bundle, record)]
    problems += [p for table in manifest.tables for p in _said(f"tables/{table.sha256}", _check_table, bundle, table)]
    signed_by = bundle.signed_by
    return Verdict(
        str(bundle.path), len(manifest.kernels), len(manifest.tables), manifest.targets, signed_by is not None,
        tuple(problems), None if signed_by is None else str(signed_by), manifest.version,
    )  # fmt: skip


def _of_kernel(bundle: Bundle, record: KernelRecord) -> Iterator[str]:
    for check in (_check_source, _check_library, _check_spec):
        yield from _said(record.library_name, check, bundle, record)


def _said(where: str, check: Callable[..., None], *arguments: Any) -> Iterator[str]:
    try:
        check(*arguments)
    except CutlassOpsError as exc:
        yield f"{where}: {checked_json.said(exc)}"


def _check_source(bundle: Bundle, record: KernelRecord) -> None:
    bundle.read_source(record)


def _check_spec(_: Bundle, record: KernelRecord) -> None:
    legality.require_legal(record.spec)


def _check_table(bundle: Bundle, table: Any) -> None:
    tables.parse(bundle.read_table(table), "it")


def _check_library(bundle: Bundle, record: KernelRecord) -> None:
    data = bundle.kernel(record).read_library()
    found = proof.proved(data, "it", record.spec)
    if found != record.opcodes:
        raise BundleError("the instruction counts of its machine code do not match the manifest")
    try:
        _require_targets(data, record.spec.target)
        _require_exports(data)
    except (struct.error, IndexError, UnicodeDecodeError) as exc:
        raise CompileError(f"it is not a shared library: {exc}") from None
    linkage.require_own_libraries(data, "it", BundleError)


def _require_targets(data: bytes, target: str) -> None:
    found = {elf.sm_version(image) for image in elf.gpu_images(data)}
    major, minor = arch.target(target).capability
    if found != {10 * major + minor}:
        names = ", ".join(f"sm_{version}" for version in sorted(found))
        raise BundleError(f"its machine code is for {names or 'no GPU'}, but the manifest says {target}")


def _require_exports(data: bytes) -> None:
    wanted = [_PREFIX + name for name in SYMBOLS]
    missing = sorted(set(wanted) - elf.exports(data, wanted), key=wanted.index)
    if missing:
        raise BundleError(f"it does not export {', '.join(missing)}")
