"""What several commands do: compile elsewhere, read keys, and print an answer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from cutlass_ops.base import env, executors


def compiling_on(name: str | None) -> contextlib.AbstractContextManager[Executor | None]:
    """Return where to compile, by the name of an executor; without one, that is this process."""
    return contextlib.nullcontext() if name is None else executors.named(name)


def required(key: list[Path] | None, minimum_version: int | None) -> tuple[Sequence[Path] | None, int | None]:
    """Return the required keys and version of a bundle: from the command line, else from the environment."""
    least = env.bundle_version() if minimum_version is None else minimum_version
    return key or env.bundle_keys(), least


def show(as_json: bool, value: Any, *lines: str) -> None:
    """Print an answer: as JSON, or as lines."""
    for line in [json.dumps(_finite(value), indent=1)] if as_json else lines:
        print(line, flush=True)


def _finite(value: Any) -> Any:
    """Return a JSON value with null for what JSON has no number, such as the time of a kernel that cannot run."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
