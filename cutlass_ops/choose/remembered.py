"""Decisions about weights, kept in files from one process to the next.

To decide about a weight takes some ten milliseconds, and to read the decision one. Only what follows from the
package's own tables is kept: a file is named after the signature, the device and the weight, and its folder after the
package's code and tables. A file that is lost, damaged or not private is computed again. A call leaves it to a thread
to write the file (:meth:`cutlass_ops.choose.weight.Weight.finish`).
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from pathlib import Path

import numpy as np

from cutlass_ops.artifacts import kept
from cutlass_ops.base import checked_json, env
from cutlass_ops.base.errors import ConfigError, LoadError
from cutlass_ops.base.private import read_private
from cutlass_ops.choose.weight import Weight
from cutlass_ops.declare.device import Device
from cutlass_ops.declare.signature import OpSignature, signature_to_json

_log = logging.getLogger("cutlass_ops")

# A file has a few thousand bytes.
_LIMIT = 1 << 20


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
    kept.keep(path.parents[2], path, json.dumps(weight.to_json(), separators=(",", ":")))


def folder() -> Path | None:
    """Return the folder of all decisions; None if none are kept."""
    try:
        return env.cache_dir() / "choices" if env.remembers_choices() else None
    except env.NoHomeError:
        return None


def path_of(signature: OpSignature, device: Device, n: int, k: int, count: int) -> Path | None:
    """Return the file of a decision about so many weights (N, K); None if none are kept."""
    root, package = folder(), kept.package()
    if root is None or package is None:
        return None
    return root / _with_numpy(package) / f"{_name(signature, device)}-{n}x{k}x{count}.json"


@functools.lru_cache(maxsize=1024)
def _name(signature: OpSignature, device: Device) -> str:
    about = [signature_to_json(signature), *device.capability, device.multiprocessors, device.name]
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


@functools.cache
def _with_numpy(package: str) -> str:
    """Return a name for everything that a decision follows from: the package's code and tables, and NumPy."""
    return hashlib.sha256(f"{package} {np.__version__}".encode()).hexdigest()[:32]
