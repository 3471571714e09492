"""Compile kernels in another process, on this or another machine.

A worker needs this library and the compilers, but no store: it returns the compiled library as bytes.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError, Executor, Future, wait
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.entry import LIBRARY, SOURCE, Compiled
from cutlass_ops.base import arch, env
from cutlass_ops.base.errors import CompileError, CutlassOpsError, ToolchainError
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.identity import Identity, kernel_identity
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.quantizing import declaration_from_json

_POLL = 0.05  # seconds
_NAMED = 10  # maximum number of kernels named in an error

_log = logging.getLogger("cutlass_ops")


def compile_source(declaration: Mapping[str, Any], source: str, identity: Mapping[str, Any]) -> tuple[bytes, Compiled]:
    """Compile one kernel with this machine's compilers, from the parts of its identity in the process that asks.

    Return the library and the compiler's report.
    """
    spec, toolchain = declaration_from_json(declaration), find_toolchain()
    here = kernel_identity(spec, source, toolchain)
    if here != identity:
        names = sorted(name for name in {*here, *identity} if here.get(name) != identity.get(name))
        raise ToolchainError(
            f"a worker would build a different kernel: its {', '.join(names)} differ. Install the same versions of "
            f"this library and of the compilers there; its compilers are {here['toolchain']}"
        )
    with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
        place = Path(folder)
        (place / SOURCE).write_text(source, encoding="utf-8")
        try:
            compiled = compile_kernel(place, SOURCE, LIBRARY, arch.target(spec.target), toolchain)
        except CompileError as exc:
            # Drop the command: its folder will be removed.
            raise CompileError(str(exc).partition("\n  command: ")[0]) from None
        return (place / LIBRARY).read_bytes(), compiled


class Elsewhere:
    """An executor that compiles kernels for several threads, with a timeout on the time since its last result."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._limit = env.executor_timeout()
        self._last = time.monotonic()
        self._left: dict[Future[tuple[bytes, Compiled]], str] = {}

    def compile(self, what: Identity, cancel: threading.Event | None) -> tuple[bytes, Compiled] | None:
        """Compile one kernel on the executor; return None if the executor lost it or takes no more jobs."""
        began, slug = time.monotonic(), what.spec.slug
        try:
            future = self._executor.submit(compile_source, what.spec.to_json(), what.source, dict(what.parts))
        except Exception as exc:
            _log.warning("compiling %s locally: the executor takes no more jobs: %r", slug, exc)
            return None
        self._left[future] = slug
        # Poll: wait() alone never returns for a future that the executor cancelled on shutdown.
        while not future.done():
            if cancel is not None and cancel.is_set():
                future.cancel()
                raise CancelledError
            if time.monotonic() - max(began, self._last) > self._limit:
                future.cancel()
                raise ToolchainError(self._late())
            wait([future], timeout=_POLL)
        self._last = time.monotonic()
        del self._left[future]
        error = None if future.cancelled() else future.exception()
        if isinstance(error, CutlassOpsError):
            raise error
        if error is None and not future.cancelled():
            return future.result()
        # A worker died or was told to stop, or all workers are gone.
        _log.warning("compiling %s locally: the executor %s", slug, f"lost it: {error!r}" if error else "cancelled it")
        return None

    def _late(self) -> str:
        names = sorted(self._left.values())
        others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        return (
            f"the executor has returned no kernel for {self._limit:g} s, and {len(names)} are left: "
            f"{', '.join(names[:_NAMED])}{others}. Check that its workers are running, or set "
            f"{env.EXECUTOR_TIMEOUT.name} to more seconds"
        )
