"""The default catalogue: kernels whose readable source is kept in ``generated/``.

It has one kernel per named op, element type and target. The files show what the library generates, and a golden test
turns every template change into a readable diff. Dispatch does not use this catalogue.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops._version import TEMPLATE_VERSION
from cutlass_ops.base import checked_json, resources
from cutlass_ops.base.disk import replacing
from cutlass_ops.base.errors import ConfigError, ToolchainError
from cutlass_ops.declare.config import ClusterShape, Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import render
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config

MANIFEST = "manifest.json"
_MAX_MANIFEST = 64 << 20

_CONFIGS: tuple[Config, ...] = (
    Sm80Config(threadblock=ThreadblockShape(128, 128, 32), warp=WarpShape(64, 64, 32), stages=4),
    Sm90Config(threadblock=ThreadblockShape(128, 128, 64), cluster=ClusterShape(2, 1), schedule="pingpong"),
)

# Every op in BF16. FP16 differs only in type names, so one op is enough.
_OPS = (*((op, "bf16") for op in builtin.BY_OP), ("gemm_bias_relu", "f16"))

_FILE = re.compile(r"sm_\w+/\w+\.cu")


@dataclass(frozen=True)
class Entry:
    """One kernel of the catalogue."""

    op: str  # name of the op, or of the kernel
    spec: KernelSpec

    @property
    def file(self) -> str:
        """Path of the source, relative to the catalogue's folder."""
        return f"{self.spec.target}/{self.op}_{self.spec.a.dtype}.cu"


def default() -> tuple[Entry, ...]:
    """Return the default catalogue. Layouts are those of ``torch.nn.Linear``: A and D row-major, B column-major."""
    return tuple(
        Entry(op, KernelSpec(a=f"{t}.row", b=f"{t}.col", d=f"{t}.row", epilogue=builtin.BY_OP[op], config=config))
        for config in _CONFIGS
        for op, t in _OPS
    )


def files(entries: Sequence[Entry] | None = None) -> dict[str, str]:
    """Render a catalogue."""
    entries = default() if entries is None else entries
    sources = {entry.file: render.render(entry.spec) for entry in entries}
    head = {
        "cutlass_ops": resources.library_version(),
        "nvidia-cutlass": _cutlass_version(),
        "templates": TEMPLATE_VERSION,
    }
    kernels: list[dict[str, object]] = [
        {
            "file": entry.file,
            "op": entry.op,
            "sha256": hashlib.sha256(sources[entry.file].encode()).hexdigest(),
            "spec": entry.spec.to_json(),
        }
        for entry in entries
    ]
    # One line for each kernel, so that a diff shows which kernels changed.
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(kernel, sort_keys=True)}" for kernel in kernels)
    return sources | {MANIFEST: "\n".join(["{", *lines, ' "kernels": [', rows, " ]", "}", ""])}


def _cutlass_version() -> str:
    try:
        return importlib.metadata.version("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainError(
            "the package nvidia-cutlass, whose version generated sources name, is not installed: "
            'pip install "cutlass_ops[build]"'
        ) from None


def stale(folder: Path, entries: Sequence[Entry] | None = None) -> list[str]:
    """Return the sorted paths that :func:`write` would write or remove in a folder."""
    wanted = files(entries)
    return sorted(_differing(folder, wanted) | _abandoned(folder, wanted))


def write(folder: Path, entries: Sequence[Entry] | None = None) -> list[str]:
    """Bring a folder up to date with a catalogue, and return what changed. An interrupted run can resume."""
    wanted = files(entries)
    changed, abandoned = _differing(folder, wanted), _abandoned(folder, wanted)
    for name in sorted(changed - {MANIFEST}):
        _replace(folder / name, wanted[name].encode())
    for name in abandoned:
        (folder / name).unlink()
    # Write the manifest last: until then, the old one names the files to remove.
    if MANIFEST in changed:
        _replace(folder / MANIFEST, wanted[MANIFEST].encode())
    return sorted(changed | abandoned)


def _replace(path: Path, data: bytes) -> None:
    with replacing(path) as aside, aside.open("xb") as file:
        file.write(data)


def _differing(folder: Path, wanted: dict[str, str]) -> set[str]:
    return {name for name, text in wanted.items() if _read(folder / name) != text.encode()}


def _abandoned(folder: Path, wanted: dict[str, str]) -> set[str]:
    """Return files that are in the folder's manifest but no longer in the catalogue."""
    try:
        manifest = checked_json.parsed(_read(folder / MANIFEST) or b"{}", MANIFEST, _MAX_MANIFEST)
        named = {str(kernel["file"]) for kernel in manifest["kernels"]}
    except (ConfigError, KeyError, TypeError):
        return set()
    # The manifest is not trusted: accept only names of the catalogue's form.
    unwanted = named - wanted.keys()
    return {name for name in unwanted if _FILE.fullmatch(name) and (folder / name).is_file()}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
