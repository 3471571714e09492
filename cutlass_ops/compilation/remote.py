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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.compiled import Compiled
from cutlass_ops.artifacts.entry import LIBRARY, SOURCE
from cutlass_ops.base import arch, env
from cutlass_ops.base.errors import CompileError, CutlassOpsError, ToolchainError
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.identity import kernel_identity
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.quantizing import Declaration, declaration_from_json

_POLL = 0.05  # seconds
_NAMED = 10  # maximum number of kernels named in an error

_log = logging.getLogger("cutlass_ops")


@dataclass(frozen=True)
class Product:
    """A compiled kernel: the bytes of its library, and the compiler's report."""

    library: bytes
    compiled: Compiled


def compile_source(declaration: Mapping[str, Any], source: str, identity: Mapping[str, Any]) -> Product:
    """Compile one kernel with this machine's compilers.

    Parameters
    ----------
    declaration : mapping
        The specification, as JSON values.
    source : str
        Its rendered source.
    identity : mapping
        The result of :func:`cutlass_ops.compilation.identity.kernel_identity` in the requesting process.

    Raises
    ------
    ToolchainError
        If this machine has another identity: other compilers, headers or another version of this library.
    CompileError
        If the compiler rejects the source.
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
        return Product((place / LIBRARY).read_bytes(), compiled)


class Elsewhere:
    """An executor that compiles kernels for several threads, with a timeout on the time since its last result.

    Parameters
    ----------
    executor : concurrent.futures.Executor
        Any executor. Only its futures are relied on.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._limit = env.executor_timeout()
        self._last = time.monotonic()
        self._left: dict[Future[Product], str] = {}

    def compile(
        self, spec: Declaration, source: str, identity: Mapping[str, Any], cancel: threading.Event | None
    ) -> Product | None:
        """Compile one kernel on the executor; return None if the executor lost it or takes no more jobs.

        Parameters
        ----------
        spec, source, identity
            As for :func:`compile_source`.
        cancel : threading.Event, optional
            Set it to stop waiting.

        Raises
        ------
        ToolchainError, CompileError
            As for :func:`compile_source`; ToolchainError also if the executor returned nothing for too long.
        CancelledError
            If ``cancel`` was set.
        """
        began = time.monotonic()
        try:
            future = self._executor.submit(compile_source, spec.to_json(), source, dict(identity))
        except Exception as exc:
            _log.warning("compiling %s locally: the executor takes no more jobs: %r", spec.slug, exc)
            return None
        self._left[future] = spec.slug
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
        return _result(future, spec)

    def _late(self) -> str:
        names = sorted(self._left.values())
        others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        return (
            f"the executor has returned no kernel for {self._limit:g} s, and {len(names)} are left: "
            f"{', '.join(names[:_NAMED])}{others}. Check that its workers are running, or set "
            f"{env.EXECUTOR_TIMEOUT.name} to more seconds"
        )


def _result(future: Future[Product], spec: Declaration) -> Product | None:
    if future.cancelled():
        _log.warning("compiling %s locally: the executor cancelled it", spec.slug)
        return None
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, CutlassOpsError):
        raise error
    # A worker died or was told to stop, or all workers are gone.
    _log.warning("compiling %s locally: the executor lost it: %r", spec.slug, error)
    return None
