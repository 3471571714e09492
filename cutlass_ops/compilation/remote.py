"""A compilation in another process, on this machine or another: what goes there, and what comes back.

A worker has this library and the compilers, and needs no store: the library travels back as bytes.
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
from cutlass_ops.artifacts.store import LIBRARY, SOURCE
from cutlass_ops.base import arch, env
from cutlass_ops.base.errors import CompileError, CutlassOpsError, ToolchainError
from cutlass_ops.compilation.compiler import compile_kernel
from cutlass_ops.compilation.identity import kernel_identity
from cutlass_ops.compilation.toolchain import find_toolchain
from cutlass_ops.declare.spec import KernelSpec

_POLL = 0.05  # seconds
_NAMED = 10  # kernels that an error names

_log = logging.getLogger("cutlass_ops")


@dataclass(frozen=True)
class Product:
    """A compiled kernel: its library's bytes, and what the compiler reported."""

    library: bytes
    compiled: Compiled


def compile_source(declaration: Mapping[str, Any], source: str, identity: Mapping[str, Any]) -> Product:
    """Compile one kernel with the compilers that are here.

    Parameters
    ----------
    declaration : mapping
        The specification, as JSON values.
    source : str
        What it renders to.
    identity : mapping
        What :func:`cutlass_ops.compilation.identity.kernel_identity` gave where the kernel is wanted.

    Raises
    ------
    ToolchainError
        If another compiler, another version of this library or other headers are here: the kernel would be another.
    CompileError
        If the compiler refuses the source.
    """
    spec, toolchain = KernelSpec.from_json(declaration), find_toolchain()
    here = kernel_identity(spec, source, toolchain)
    if here != identity:
        names = sorted(name for name in {*here, *identity} if here.get(name) != identity.get(name))
        raise ToolchainError(
            f"a worker would build another kernel than is wanted: its {', '.join(names)} differ. Install the same "
            f"versions of this library and of the compilers there; its compilers are {here['toolchain']}"
        )
    with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
        place = Path(folder)
        (place / SOURCE).write_text(source, encoding="utf-8")
        try:
            compiled = compile_kernel(place, SOURCE, LIBRARY, arch.target(spec.target), toolchain)
        except CompileError as exc:
            # The folder that the command names will be gone.
            raise CompileError(str(exc).partition("\n  command: ")[0]) from None
        return Product((place / LIBRARY).read_bytes(), compiled)


class Elsewhere:
    """An executor that compiles kernels, for all threads that wait for it, and when it last gave anything back.

    Parameters
    ----------
    executor : concurrent.futures.Executor
        Whatever it is: nothing about it is taken for granted but its futures.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._limit = env.executor_timeout()
        self._last = time.monotonic()
        self._left: dict[Future[Product], str] = {}

    def compile(
        self, spec: KernelSpec, source: str, identity: Mapping[str, Any], cancel: threading.Event | None
    ) -> Product | None:
        """Have one kernel compiled; return None if the executor lost it or takes no more.

        Parameters
        ----------
        spec, source, identity
            As for :func:`compile_source`.
        cancel : threading.Event, optional
            Ends the wait when set.

        Raises
        ------
        ToolchainError, CompileError
            As :func:`compile_source` there, or if nothing came back from the executor for too long.
        CancelledError
            If ``cancel`` was set.
        """
        began = time.monotonic()
        try:
            future = self._executor.submit(compile_source, spec.to_json(), source, dict(identity))
        except Exception as exc:
            _log.warning("%s is compiled here, since the executor takes no more: %r", spec.slug, exc)
            return None
        self._left[future] = spec.slug
        # What an executor cancels when it is shut down is done, though waiting for it alone would never end.
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
            f"no kernel has come back from the executor for {self._limit:g} s, and {len(names)} are left: "
            f"{', '.join(names[:_NAMED])}{others}. See whether its workers are there and at work; "
            f"{env.EXECUTOR_TIMEOUT.name} sets for how many seconds to wait"
        )


def _result(future: Future[Product], spec: KernelSpec) -> Product | None:
    if future.cancelled():
        _log.warning("%s is compiled here, since the executor cancelled it", spec.slug)
        return None
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, CutlassOpsError):
        raise error
    # A worker that died took others' work along, or was told to end, or all workers are gone.
    _log.warning("%s is compiled here, since the executor lost it: %r", spec.slug, error)
    return None
