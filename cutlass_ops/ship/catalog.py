"""The default catalogue: which kernels ship as readable source under ``generated/``, and whether that is up to date.

One kernel stands for each named op, element type and target: it shows what the library writes, and a golden test turns
every change of a template into a diff that a person reads. What runs for a shape is chosen elsewhere.
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
from cutlass_ops.base.atomic import replacing
from cutlass_ops.base.errors import ConfigError, ToolchainError
from cutlass_ops.declare.config import ClusterShape, Config, Sm80Config, Sm90Config, ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue import builtin
from cutlass_ops.kinds import render

MANIFEST = "manifest.json"
_MAX_MANIFEST = 64 << 20

_CONFIGS: tuple[Config, ...] = (
    Sm80Config(threadblock=ThreadblockShape(128, 128, 32), warp=WarpShape(64, 64, 32), stages=4),
    Sm90Config(threadblock=ThreadblockShape(128, 128, 64), cluster=ClusterShape(2, 1), schedule="pingpong"),
)

# Every op in BF16; FP16 differs in type names only, which one op shows.
_OPS = (*((op, "bf16") for op in builtin.BY_OP), ("gemm_bias_relu", "f16"))

_FILE = re.compile(r"sm_\w+/\w+\.cu")


@dataclass(frozen=True)
class Entry:
    """One kernel of the catalogue.

    Attributes
    ----------
    op : str
        The named op that it serves, or the kernel's own name.
    spec : KernelSpec
        The declaration.
    """

    op: str
    spec: KernelSpec

    @property
    def file(self) -> str:
        """Path of its source in the catalogue's folder."""
        return f"{self.spec.target}/{self.op}_{self.spec.a.dtype}.cu"


def default() -> tuple[Entry, ...]:
    """Return the default catalogue: A and D row-major, B column-major, which is ``torch.nn.Linear``'s layout."""
    return tuple(
        Entry(op, KernelSpec(a=f"{t}.row", b=f"{t}.col", d=f"{t}.row", epilogue=builtin.BY_OP[op], config=config))
        for config in _CONFIGS
        for op, t in _OPS
    )


def files(entries: Sequence[Entry] | None = None) -> dict[str, str]:
    """Render a catalogue.

    Parameters
    ----------
    entries : sequence of Entry, optional
        By default those of :func:`default`.

    Returns
    -------
    dict of str to str
        Text by path in the catalogue's folder, the same bytes every time: the sources, and a manifest that names
        versions, declarations and SHA-256 of each.

    Raises
    ------
    ToolchainError
        If what makes kernels, ``cutlass_ops[build]``, is not installed.
    """
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
    return sources | {MANIFEST: _manifest(head, kernels)}


def _cutlass_version() -> str:
    try:
        return importlib.metadata.version("nvidia-cutlass")
    except importlib.metadata.PackageNotFoundError:
        raise ToolchainError(
            "sources name the version of the package nvidia-cutlass, and it is not here: "
            'pip install "cutlass_ops[build]"'
        ) from None


def _manifest(head: dict[str, object], kernels: list[dict[str, object]]) -> str:
    """Write one line for each kernel, so that a diff names the kernels that changed."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    rows = ",\n".join(f"  {json.dumps(kernel, sort_keys=True)}" for kernel in kernels)
    return "\n".join(["{", *lines, ' "kernels": [', rows, " ]", "}", ""])


def stale(folder: Path, entries: Sequence[Entry] | None = None) -> list[str]:
    """Return the paths that :func:`write` would write or remove in a folder, sorted."""
    wanted = files(entries)
    return sorted(_differing(folder, wanted) | _abandoned(folder, wanted))


def write(folder: Path, entries: Sequence[Entry] | None = None) -> list[str]:
    """Bring a folder up to date with a catalogue; a run that is stopped leaves whole files, and the next one goes on.

    Parameters
    ----------
    folder : Path
        Made if it is not there. Files that no manifest of a catalogue names are left alone.
    entries : sequence of Entry, optional
        By default those of :func:`default`.

    Returns
    -------
    list of str
        What was written or removed, sorted.

    Raises
    ------
    ToolchainError
        As for :func:`files`.
    OSError
        If the folder cannot be written.
    """
    wanted = files(entries)
    changed, abandoned = _differing(folder, wanted), _abandoned(folder, wanted)
    for name in sorted(changed - {MANIFEST}):
        _replace(folder / name, wanted[name].encode())
    for name in abandoned:
        (folder / name).unlink()
    # Last: until then, the old one names what there is to remove.
    if MANIFEST in changed:
        _replace(folder / MANIFEST, wanted[MANIFEST].encode())
    return sorted(changed | abandoned)


def _replace(path: Path, data: bytes) -> None:
    with replacing(path) as aside, aside.open("xb") as file:
        file.write(data)


def _differing(folder: Path, wanted: dict[str, str]) -> set[str]:
    return {name for name, text in wanted.items() if _read(folder / name) != text.encode()}


def _abandoned(folder: Path, wanted: dict[str, str]) -> set[str]:
    """Return the files that the folder's manifest names and the catalogue no longer has."""
    try:
        manifest = checked_json.parsed(_read(folder / MANIFEST) or b"{}", MANIFEST, _MAX_MANIFEST)
        named = {str(kernel["file"]) for kernel in manifest["kernels"]}
    except (ConfigError, KeyError, TypeError):
        return set()
    # The manifest may be anybody's: only names like the catalogue's own count.
    unwanted = named - wanted.keys()
    return {name for name in unwanted if _FILE.fullmatch(name) and (folder / name).is_file()}


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
