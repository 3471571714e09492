"""From an op's signature to loaded kernels. One function owns the look-up order: loaded, bundle, store, build."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.loader import LoadedKernel
from cutlass_ops.artifacts.store import Artifact
from cutlass_ops.base import forks
from cutlass_ops.base.errors import MissingKernelError, ToolchainError
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.signature import OpSignature as OpSignature
from cutlass_ops.declare.spec import KernelSpec


class Entry(NamedTuple):
    """One kernel that is loaded."""

    spec: KernelSpec
    kernel: LoadedKernel

    def to_json(self) -> dict[str, Any]:
        """Return the entry as plain values."""
        return {"slug": self.spec.slug, "key": self.kernel.artifact.key, "spec": self.spec.to_json()}


class Registry(Part):
    """The kernels that a session has loaded, by specification."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._entries: dict[KernelSpec, Entry] = {}
        self._reset()
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()

    def kernel(self, spec: KernelSpec) -> LoadedKernel:
        """Return the kernel for a spec, building it if nothing else has it.

        Raises
        ------
        ConfigError
            If the spec is illegal.
        MissingKernelError
            If nothing can be compiled here and the kernel is neither loaded, nor in a bundle or the store.
        CompileError, ToolchainError, StoreError, LoadError
            If it cannot be built, stored or loaded.
        """
        return self.kernels((spec,))[0]

    def kernels(self, specs: Iterable[KernelSpec]) -> list[LoadedKernel]:
        """Return the kernels for several specs, compiling missing ones in parallel."""
        wanted = list(specs)
        missing = [spec for spec in dict.fromkeys(wanted) if spec not in self._entries]
        if missing:
            for spec, artifact in _found(self.session.part(Bundles), missing).items():
                entry = Entry(spec, loader.load(artifact))
                with self._lock:
                    self._entries.setdefault(spec, entry)
        return [self._entries[spec].kernel for spec in wanted]

    def entries(self) -> tuple[Entry, ...]:
        """List the loaded kernels."""
        with self._lock:
            return tuple(self._entries.values())


def _found(bundles: Bundles, specs: Sequence[KernelSpec]) -> dict[KernelSpec, Artifact]:
    bundled = {spec: bundles.find(spec) for spec in specs}
    others = [spec for spec, kernel in bundled.items() if kernel is None]
    try:
        built = _build(others) if others else {}
    except (ToolchainError, MissingKernelError) as exc:
        if not bundles.all():
            raise
        raise MissingKernelError(f"{exc}. {bundles.missing(others)}") from exc
    return {spec: bundled[spec] or built[spec] for spec in specs}


def _build(specs: Sequence[KernelSpec]) -> dict[KernelSpec, Artifact]:
    # What compiles is half of this package, and not needed where a bundle has every kernel.
    from cutlass_ops.compilation.builder import build_many

    return dict(zip(specs, build_many(specs), strict=True))
