"""Headers that the host compiler has read once for all kernels: they take two thirds of its time for one.

They lie in the kernel store, 260 MB for Hopper's kernels and one set of compilers. If g++ finds ``NAME.gch``
first, it takes that for a header NAME, and makes the same code of it. If there is none, it reads the header itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from pathlib import Path

from cutlass_ops.artifacts.store import KernelStore
from cutlass_ops.base import arch
from cutlass_ops.base.errors import CutlassOpsError
from cutlass_ops.compilation.compiler import compile_flags, precompile
from cutlass_ops.compilation.identity import headers_digest
from cutlass_ops.compilation.toolchain import Toolchain

_log = logging.getLogger("cutlass_ops")

HEADER = "cutlass_ops/sm90_gemm.h"
_INCLUDE = f'#include "{HEADER}"\n'


def folder(store: KernelStore, toolchain: Toolchain) -> Path:
    """Return the folder in a store for headers that are precompiled with some compilers. It need not exist."""
    about = {
        "toolchain": toolchain.identity,
        "flags": compile_flags(arch.target("sm_90a"))["host"],
        "headers": headers_digest(_INCLUDE),
    }
    return store.root / "headers" / hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def serve(source: str) -> bool:
    """Whether a rendered source includes what can be precompiled: those of Hopper's kernels do."""
    return _INCLUDE in source


def make(store: KernelStore, source: str, toolchain: Toolchain, cancel: threading.Event | None = None) -> bool:
    """Precompile the headers of a source for the kernels that follow, unless they are there; if it fails, do without.

    Returns whether others are doing that. They take less time than device code does.
    """
    if not serve(source) or (place := folder(store, toolchain)).is_dir():
        return False
    try:
        with store.lock_if_free(place.name, "precompiled headers") as free:
            if free and not place.is_dir():
                work = store.workspace(place.name, "")
                try:
                    file = precompile(work, HEADER, arch.target("sm_90a"), toolchain, cancel)
                    store.publish_headers(work, file, HEADER)
                except BaseException:
                    store.discard(work)
                    raise
        return not free
    except (CutlassOpsError, OSError) as exc:
        _log.warning("kernels take longer to compile, since their headers cannot be precompiled: %s", exc)
        return False
