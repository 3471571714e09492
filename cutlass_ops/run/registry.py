"""From an op's signature to loaded kernels.

One function has the look-up order: loaded, bundle, store, remote store, build.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.bundles import Bundles
from cutlass_ops.artifacts.loader import LoadedKernel
from cutlass_ops.base import forks
from cutlass_ops.base.errors import BundleError, MissingKernelError, ToolchainError
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.signature import OpSignature as OpSignature
from cutlass_ops.declare.spec import KernelSpec

if TYPE_CHECKING:
    import torch

    from cutlass_ops.artifacts.entry import Artifact
    from cutlass_ops.declare.quantizing import Declaration


class Entry(NamedTuple):
    """One kernel that is loaded."""

    spec: Declaration
    kernel: LoadedKernel


class Registry(Part):
    """The kernels that a session has loaded, by specification."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._entries: dict[Declaration, Entry] = {}
        self._reset()
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()

    def kernel(self, spec: Declaration) -> LoadedKernel:
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

    def has(self, spec: Declaration) -> bool:
        """Whether a kernel is loaded."""
        return spec in self._entries

    def take(self, spec: Declaration, artifact: Artifact, device: torch.device) -> bool:
        """Load a kernel that was found or built, also on a device, before any call is given it.

        Returns
        -------
        bool
            Whether it is loaded: a damaged one is left out where it was installed, and may be elsewhere.

        Raises
        ------
        LoadError
            If it cannot be loaded.
        """
        if spec not in self._entries:
            self._add(spec, artifact, device)
        return spec in self._entries

    def origin(self, spec: KernelSpec) -> str | None:
        """Return where a kernel comes from, in words: it is loaded, in a bundle or in the store. None otherwise."""
        from cutlass_ops.compilation import lookup  # late, as for _build

        entry = self._entries.get(spec)
        if entry is not None:
            return entry.kernel.artifact.origin
        found = self.session.part(Bundles).find(spec) or lookup.stored(spec)
        return None if found is None else found.origin

    def ready(self, specs: Iterable[KernelSpec], device: torch.device) -> int:
        """Load kernels, also on a device, compiling missing ones in parallel. Return how many there are.

        The errors are those of :meth:`kernel`.
        """
        kernels = self.kernels(specs)
        for kernel in kernels:
            kernel.load_on(device)
        return len(kernels)

    def kernels(self, specs: Iterable[Declaration]) -> list[LoadedKernel]:
        """Return the kernels for several specs, compiling missing ones in parallel."""
        wanted = list(specs)
        # If an installed bundle has lost a kernel, look for it once more, elsewhere.
        while missing := [spec for spec in dict.fromkeys(wanted) if spec not in self._entries]:
            for spec, artifact in _found(self.session.part(Bundles), missing).items():
                self._add(spec, artifact)
        return [self._entries[spec].kernel for spec in wanted]

    def _add(self, spec: Declaration, artifact: Artifact, device: torch.device | None = None) -> None:
        """Load a kernel. If it is damaged and was installed, its bundle is left out from now on instead."""
        try:
            entry = Entry(spec, loader.load(artifact))
            if device is not None:
                entry.kernel.load_on(device)
        except BundleError as exc:
            if not self.session.part(Bundles).refuse(artifact, exc):
                raise
            return
        with self._lock:
            self._entries.setdefault(spec, entry)

    def entries(self) -> tuple[Entry, ...]:
        """List the loaded kernels."""
        with self._lock:
            return tuple(self._entries.values())


def _found(bundles: Bundles, specs: Sequence[Declaration]) -> dict[Declaration, Artifact]:
    # Bundles have only kernels of GEMMs.
    bundled = {spec: bundles.find(spec) if isinstance(spec, KernelSpec) else None for spec in specs}
    others = [spec for spec, kernel in bundled.items() if kernel is None]
    try:
        built = _build(others) if others else {}
    except (ToolchainError, MissingKernelError) as exc:
        asked = [spec for spec in others if isinstance(spec, KernelSpec)]
        if not bundles.all() or not asked:
            raise
        raise MissingKernelError(f"{exc}. {bundles.missing(asked)}") from exc
    return {spec: bundled[spec] or built[spec] for spec in specs}


def _build(specs: Sequence[Declaration]) -> dict[Declaration, Artifact]:
    # The compiling code is half of this package, and not needed if a bundle has every kernel.
    from cutlass_ops.compilation.builder import build_many

    return dict(zip(specs, build_many(specs), strict=True))
