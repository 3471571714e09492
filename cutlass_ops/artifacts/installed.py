"""Bundles that were installed as distributions of kernels: found by an entry point, opened when a call needs them.

A distribution has one bundle for each signature, named after it, or one bundle for all. So a call opens only the bundle
that has its signature: a manifest of two thousand kernels would take longer to read than everything else of a call.
What is wrong with a distribution costs speed, not results: it is left out, with one warning.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cutlass_ops.artifacts.bundle import Bundle, needs, open_bundle
from cutlass_ops.base import checked_json, env, resources
from cutlass_ops.base.errors import BundleError
from cutlass_ops.base.session import warn_once
from cutlass_ops.declare.signature import OpSignature, signature_to_json

GROUP = "cutlass_ops.bundles"
NAMESPACE = resources.BUNDLES
SUFFIX = ".bundle"

# Number of a digest's digits, which tell the signatures of one distribution apart.
_DIGITS = 32
_OF_A_SIGNATURE = re.compile(rf"[0-9a-f]{{{_DIGITS}}}{re.escape(SUFFIX)}")
_FOLDER = re.compile(rf"{NAMESPACE}\.(\w+)", re.ASCII)


def file_name(signature: OpSignature) -> str:
    """Return the name of the bundle that has a signature's kernels and no others."""
    text = checked_json.canonical(signature_to_json(signature))
    return hashlib.sha256(text).hexdigest()[:_DIGITS] + SUFFIX


@dataclass(frozen=True)
class Distribution:
    """An installed distribution of kernels."""

    # As pip knows them.
    name: str
    version: str
    folder: Path  # where its bundles are
    packages: Path  # the folder of packages: who may write there can have this process run any code anyway

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def paths(self, signature: OpSignature | None = None) -> list[Path]:
        """Return the bundles that may have kernels for a signature, or all."""
        found = sorted(self.folder / name for name in os.listdir(self.folder) if name.endswith(SUFFIX))
        if signature is None:
            return found
        mine = file_name(signature)
        return [path for path in found if path.name == mine or not _OF_A_SIGNATURE.fullmatch(path.name)]


def distributions() -> list[Distribution]:
    """Return the distributions of kernels for this version of the library, by name; warn of those for others."""
    found: dict[str, Distribution] = {}
    for packages, stem in _folders():
        try:
            here = list(_distributions(packages, stem))
        except Exception as exc:  # whatever importlib.metadata makes of files that are damaged
            warn_once(
                f"the kernels in {packages / NAMESPACE / stem} are not used: their metadata cannot "
                f"be read ({type(exc).__name__}: {exc}). Install them again, or remove that folder"
            )
            continue
        for each in here:
            found.setdefault(each.name, each)  # the first on the path, as for any import
    return [found[name] for name in sorted(found)]


def _distributions(packages: Path, stem: str) -> Iterator[Distribution]:
    for about in importlib.metadata.distributions(name=stem, path=[str(packages)]):
        for entry in about.entry_points.select(group=GROUP):
            each = _distribution(about, entry, packages)
            if each is not None:
                yield each


def _folders() -> Iterator[tuple[Path, str]]:
    """Yield the folders in the namespace: that of packages, and the name."""
    # To read the entry points of all installed packages takes ten milliseconds.
    namespace = importlib.machinery.PathFinder.find_spec(NAMESPACE)
    for place in (namespace and namespace.submodule_search_locations) or ():
        try:
            folders = list(Path(place).iterdir())
        except OSError as exc:
            # One in a ZIP file on the path, or that this user may not list.
            warn_once(f"the kernels in {place} are not used: it is not a folder that can be read ({exc.strerror})")
            continue
        for folder in folders:
            yield folder.parent.parent, folder.name


def _distribution(
    about: importlib.metadata.Distribution, entry: importlib.metadata.EntryPoint, packages: Path
) -> Distribution | None:
    match = _FOLDER.fullmatch(entry.value)
    if match is None:
        warn_once(f"an entry point of {GROUP} is ignored: {checked_json.shown(entry.value)} is not {NAMESPACE}.NAME")
        return None
    # None where the file is empty.
    if not isinstance(about.name, str) or not isinstance(about.version, str):
        raise ValueError("METADATA has no name or no version")
    found = Distribution(about.name, about.version, packages / NAMESPACE / match[1], packages)
    if entry.name != needs():
        library = resources.library_version()
        why = f"they are for {checked_json.printable(entry.name)}, and this is cutlass_ops {library} ({needs()})"
        _warn(found, f"{why}. Install one that is made for it")
        return None
    return found


def _warn(distribution: Distribution, why: object) -> None:
    # It names no command to install: on an index, another package may have this name.
    warn_once(
        f"the kernels of the installed distribution {distribution} are not used: {why}. To leave them out without this "
        f"warning, pip uninstall {distribution.name}"
    )


class Installed:
    """The bundles of all installed distributions. Each is opened once, and left out if something is wrong with it."""

    def __init__(self, keys: tuple[Path, ...] | None = None, least: int | None = None) -> None:
        self._keys, self._least = keys, least
        self.distributions = tuple(distributions())
        self._opened: dict[Path, Bundle | None] = {}
        self._of: dict[OpSignature, tuple[Bundle, ...]] = {}

    def of(self, signature: OpSignature) -> tuple[Bundle, ...]:
        """Return the bundles that may have kernels for a signature, in the order of their distributions' names."""
        if not self.distributions:
            return ()
        known = self._of.get(signature)
        if known is None:
            known = tuple(b for each in self.distributions for b in self._open(each, signature))
            self._of[signature] = known
        return known

    def every(self) -> Iterator[tuple[Distribution, Bundle]]:
        """Yield every bundle with its distribution."""
        for each in self.distributions:
            for bundle in self._open(each, None):
                yield each, bundle

    def refuse(self, bundle: Path, why: BundleError) -> bool:
        """Leave a bundle out from now on, if it is one of these; return whether it is."""
        owner = next((each for each in self.distributions if str(bundle.parent) == os.path.realpath(each.folder)), None)
        if owner is None:
            return False
        _warn(owner, why)
        self._opened = {p: None if b is not None and b.path == bundle else b for p, b in self._opened.items()}
        self._of.clear()
        return True

    def _open(self, distribution: Distribution, signature: OpSignature | None) -> Iterator[Bundle]:
        try:
            paths = distribution.paths(signature)
        except OSError as exc:
            _warn(distribution, f"its folder cannot be read ({exc.strerror})")
            return
        for path in paths:
            if path not in self._opened:
                self._opened[path] = self._tried(distribution, path)
            found = self._opened[path]
            if found is not None:
                yield found

    def _tried(self, distribution: Distribution, path: Path) -> Bundle | None:
        try:
            with env.naming_key(env.BUNDLE_KEY):
                found = open_bundle(path, self._keys, minimum_version=self._least, beside=distribution.packages)
        except BundleError as exc:
            _warn(distribution, exc)
            return None
        found.installed_with = str(distribution)
        return found
