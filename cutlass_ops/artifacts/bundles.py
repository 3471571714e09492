"""The bundles of a session: those that it loaded, that its environment names, and that are installed as packages."""

from __future__ import annotations

import contextlib
import importlib.machinery
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cutlass_ops.base import env, forks
from cutlass_ops.base.session import Part, Session
from cutlass_ops.declare.signature import OpSignature

if TYPE_CHECKING:
    # What reads bundles is imported when there is one.
    from cutlass_ops.artifacts.bundle import Bundle, BundledKernel
    from cutlass_ops.artifacts.entry import Artifact
    from cutlass_ops.artifacts.installed import Installed
    from cutlass_ops.artifacts.manifest import Choice
    from cutlass_ops.artifacts.signing import PublicKeys
    from cutlass_ops.base.errors import BundleError
    from cutlass_ops.declare.config import Config
    from cutlass_ops.declare.problem import Problem
    from cutlass_ops.declare.spec import KernelSpec


class State(NamedTuple):
    """What changes whenever a look into the bundles may find something else."""

    generation: int  # counts the changes
    aside: bool  # whether this thread finds nothing in any bundle
    distributions: bool  # whether distributions of kernels are installed


class Bundles(Part):
    """A session's bundles, in the order of their precedence.

    The last loaded comes first, then those of the environment as it names them, then those that are installed, by name.
    Only what the user *asked* for, by loading or in the environment, serves its signatures. What is installed does not
    limit the choice, unless nothing else can be had (``choose.limits``).
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._reset()
        self._loaded: tuple[Bundle, ...] = ()
        self._named: tuple[Bundle, ...] | None = None
        self._installed: Installed | None = None
        self._text: tuple[str | None, ...] = ()
        self._local = threading.local()
        self.generation = 0
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.RLock()

    def load(
        self, path: str | os.PathLike[str], public_key: PublicKeys | None = None, minimum_version: int | None = None
    ) -> Bundle:
        """Open a bundle and put it before all others. What is not given is the environment's."""
        keys = env.bundle_keys() if public_key is None else public_key
        least = env.bundle_version() if minimum_version is None else minimum_version
        with env.naming_key(env.BUNDLE_KEY) if public_key is None else contextlib.nullcontext():
            bundle = _open(path, keys, least)
        with self._lock:
            others = tuple(b for b in self._loaded if b.path != bundle.path)
            self._loaded = (bundle, *others)
            self.generation += 1
        return bundle

    def asked(self) -> tuple[Bundle, ...]:
        """Return the bundles that the user asked for, the first to look in first."""
        if getattr(self._local, "aside", False):
            return ()
        text = (env.BUNDLES.given, env.BUNDLE_KEY.given, env.BUNDLE_VERSION.given)
        with self._lock:
            if self._named is None or text != self._text:
                key, least = env.bundle_keys(), env.bundle_version()
                with env.naming_key(env.BUNDLE_KEY):
                    self._named = tuple(_open(path, key, least) for path in env.bundles())
                self._installed = _installed(key, least)
                self._text = text
                self.generation += 1
            return self._loaded + self._named

    def state(self) -> State:
        """Return what changes whenever a look into the bundles may find something else."""
        self.asked()
        installed = self._installed is not None and bool(self._installed.distributions)
        return State(self.generation, getattr(self._local, "aside", False), installed)

    def installed(self, signature: OpSignature) -> tuple[Bundle, ...]:
        """Return the installed bundles that may have kernels for a signature, by the names of their distributions."""
        self.asked()
        if self._installed is None or getattr(self._local, "aside", False):
            return ()
        with self._lock:
            return self._installed.of(signature)

    def all(self) -> tuple[Bundle, ...]:
        """Return all bundles, the first to look in first. It opens every one that is installed."""
        asked = self.asked()
        if self._installed is None or getattr(self._local, "aside", False):
            return asked
        with self._lock:
            return (*asked, *(bundle for _, bundle in self._installed.every()))

    def distributions(self) -> list[str]:
        """Return the names and versions of the installed distributions of kernels."""
        self.asked()
        found = () if self._installed is None else self._installed.distributions
        return [str(each) for each in found]

    def refuse(self, kernel: Artifact, why: BundleError) -> bool:
        """Leave out the installed bundle of a kernel that cannot be read, with a warning."""
        with self._lock:
            refused = self._installed is not None and self._installed.refuse(kernel.folder, why)
            self.generation += refused
            return refused

    @classmethod
    @contextlib.contextmanager
    def aside(cls) -> Iterator[None]:
        """Context in which this thread finds nothing in any bundle of the session."""
        local = cls.current()._local
        local.aside = True
        try:
            yield
        finally:
            local.aside = False

    def find(self, spec: KernelSpec) -> BundledKernel | None:
        """Return a kernel from the first bundle that has it."""
        asked = (bundle.find(spec) for bundle in self.asked())
        found = next((kernel for kernel in asked if kernel is not None), None)
        return self.find_installed(spec) if found is None else found

    def find_installed(self, spec: KernelSpec) -> BundledKernel | None:
        """Return a kernel from the first installed bundle that has it."""
        found = (bundle.find(spec) for bundle in self.installed(OpSignature.of(spec)))
        return next((kernel for kernel in found if kernel is not None), None)

    def configs(
        self, signature: OpSignature, capability: tuple[int, int], *, installed: bool = False
    ) -> tuple[Config, ...]:
        """Return all configurations in which there are kernels for calls on a device."""
        bundles = self.installed(signature) if installed else self.asked()
        return tuple(dict.fromkeys(c for bundle in bundles for c in bundle.configs(signature, capability)))

    def of_one_kind(
        self, signature: OpSignature, capability: tuple[int, int], *, installed: bool = False
    ) -> tuple[Config, ...]:
        """Return the configurations that are chosen among: wgmma before mma.sync, and GEMV kernels with either."""
        found = self.configs(signature, capability, installed=installed)
        # Where wgmma takes copies of operands, these may last longer than all of mma.sync.
        if any(c.family.tma for c in found) and not signature.realigns:
            return tuple(c for c in found if c.family.tma or c.few_rows)
        return found

    def choice(
        self, signature: OpSignature, capability: tuple[int, int], problem: Problem, *, installed: bool = False
    ) -> Choice | None:
        """Return what the first bundle with this signature chose for a problem's weight when it was made, if it did."""
        if problem.count != 1:  # a choice is for one GEMM
            return None
        for bundle in self.installed(signature) if installed else self.asked():
            if bundle.configs(signature, capability):
                return bundle.choice(signature, capability, problem.n, problem.k)
        return None

    def tables(self, signature: OpSignature) -> Iterator[tuple[Path, bytes]]:
        """Yield the tuning tables of all bundles that may have some for a signature, with the paths of the bundles."""
        for bundle in (*self.asked(), *self.installed(signature)):
            for table in bundle.manifest.tables:
                yield bundle.path, bundle.read_table(table)

    def missing(self, specs: Iterable[KernelSpec]) -> str:
        """Say in words that no bundle has kernels, and what there is instead."""
        wanted, bundles = next(iter(specs)), self.all()
        names = dict.fromkeys(b.installed_with or str(b.path) for b in bundles)
        specs_there = (record.spec for bundle in bundles for record in bundle.manifest.kernels)
        near = {f"a {s.a}, b {s.b}, d {s.d} on {s.target}" for s in specs_there if s.epilogue == wanted.epilogue}
        there = f"with this epilogue they have {'; '.join(sorted(near))}" if near else "none has this epilogue"
        return (
            f"The loaded bundles ({', '.join(names)}) have no kernel for a {wanted.a}, "
            f"b {wanted.b}, d {wanted.d} on {wanted.target}: {there}. Add it to their catalogue and make them again"
        )


def _open(path: str | os.PathLike[str], keys: PublicKeys | None, least: int | None) -> Bundle:
    from cutlass_ops.artifacts.bundle import open_bundle

    return open_bundle(path, keys, minimum_version=least)


def _installed(keys: tuple[Path, ...] | None, least: int | None) -> Installed | None:
    from cutlass_ops.base import resources

    # To import what reads bundles takes half of a process's first look for a kernel.
    if importlib.machinery.PathFinder.find_spec(resources.BUNDLES) is None:
        return None
    from cutlass_ops.artifacts.installed import Installed

    return Installed(keys, least)


def load_bundle(
    path: str | os.PathLike[str], *, public_key: PublicKeys | None = None, minimum_version: int | None = None
) -> Bundle:
    """Load a bundle: calls with its signatures then run its kernels, and no others.

    No kernel is loaded into the process yet; each one's SHA-256 is checked before it is. Of several bundles, the last
    one loaded comes first. Those of ``CUTLASS_OPS_BUNDLES`` come after them, in their order.

    Parameters
    ----------
    path : path
        The archive or the folder that ``cutlass-ops bundle`` made.
    public_key : path or iterable of path, optional
        PEM files of Ed25519 public keys, one of which must have signed the bundle. Default: those of
        ``CUTLASS_OPS_BUNDLE_KEY``; if that is unset, no signature is required. Like a bundle, the files must not be
        writable by other users.
    minimum_version : int, optional
        The lowest version that is accepted, as set in the catalogue: old bundles are signed too. Default:
        ``CUTLASS_OPS_BUNDLE_VERSION``; if that is unset, any bundle is accepted, with or without a version.

    Returns
    -------
    Bundle
        The opened bundle.

    Raises
    ------
    BundleError
        If the bundle is not safe to read, incomplete, not signed as required, older than required, or made for another
        version of this library.
    TypeError, ValueError, OSError
        If a public key cannot be read, or the minimum version is not a positive integer.

    Examples
    --------
    >>> bundle = co.load_bundle("kernels.bundle", public_key="/etc/keys/kernels.pem")  # doctest: +SKIP
    >>> d = co.gemm_bias_relu(x, weight.t(), bias)  # from the bundle, without a compiler  # doctest: +SKIP
    """
    return Bundles.current().load(path, public_key, minimum_version)
