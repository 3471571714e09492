"""Decisions about weights, kept in files from one process to the next.

To decide about a weight takes some ten milliseconds, and to read the decision one. Only what follows from the
package's own tables is kept: a file is named after the signature, the device and the weight, and its folder after the
package's code and tables. A file that is lost, damaged or not private is computed again. A call leaves it to a thread
to write the file (:meth:`cutlass_ops.choose.weight.Weight.finish`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import checked_json, env, resources
from cutlass_ops.base.atomic import replacing
from cutlass_ops.base.errors import ConfigError, LoadError, StoreError
from cutlass_ops.base.private import read_private
from cutlass_ops.choose.weight import Weight
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.signature import OpSignature, signature_to_json

_log = logging.getLogger("cutlass_ops")

# A file has a few thousand bytes.
_LIMIT = 1 << 20
# Folders of other versions of the package that stay.
_OTHERS = 4


def recalled(signature: OpSignature, device: Device, n: int, k: int, count: int) -> Weight | None:
    """Return what another process decided for so many weights (N, K); None if that is not known."""
    path = path_of(signature, device, n, k, count)
    if path is None:
        return None
    try:
        text = read_private(path, _LIMIT)
        return checked_json.read(text, str(path), _LIMIT, lambda data: Weight.from_json(data, signature, device))
    except FileNotFoundError:
        return None
    except (OSError, LoadError, ConfigError) as exc:
        _log.info("a decision is computed again: %s", exc)
        return None


def remember(path: Path, weight: Weight) -> None:
    """Keep a decision for later processes, if it can be written: see :func:`path_of`."""
    with contextlib.suppress(OSError, StoreError):
        is_new = not path.parent.is_dir()
        KernelStore(path.parents[2]).folder(*path.parts[-3:-1])  # private, as the store has to be
        with replacing(path) as aside, open(aside, "x", opener=_private) as file:
            json.dump(weight.to_json(), file, separators=(",", ":"))
        if is_new:
            _forget_others(path.parent)


def folder() -> Path | None:
    """Return the folder of all decisions; None if none are kept."""
    try:
        return env.cache_dir() / "choices" if env.remembers_choices() else None
    except env.NoHomeError:
        return None


def path_of(signature: OpSignature, device: Device, n: int, k: int, count: int) -> Path | None:
    """Return the file of a decision about so many weights (N, K); None if none are kept."""
    root = folder()
    return None if root is None else root / _package() / f"{_name(signature, device)}-{n}x{k}x{count}.json"


@functools.lru_cache(maxsize=1024)
def _name(signature: OpSignature, device: Device) -> str:
    about = [signature_to_json(signature), *device.capability, device.multiprocessors, device.name]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _package() -> str:
    """Return a name for everything in the package that a decision follows from: its code and its tables."""
    found = hashlib.sha256(f"{resources.library_version()} {np.__version__}".encode())
    for name, info in _files(resources.package()):
        found.update(f" {name} {info.st_size} {info.st_mtime_ns}".encode())
    return found.hexdigest()[:32]


def _files(place: Path) -> Iterator[tuple[str, os.stat_result]]:
    for each in sorted(os.scandir(place), key=lambda each: each.name):
        if each.is_dir():
            if each.name != "__pycache__":
                yield from _files(Path(each.path))
        elif each.name.endswith((".py", ".json", ".gz")):
            yield each.path, each.stat()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _forget_others(mine: Path) -> None:
    """Remove the folders of other versions of the package, but for the latest."""
    others = [each for each in os.scandir(mine.parent) if each.name != mine.name]
    others.sort(key=lambda each: each.stat().st_mtime_ns)
    for each in others[:-_OTHERS]:
        shutil.rmtree(each.path, ignore_errors=True)
