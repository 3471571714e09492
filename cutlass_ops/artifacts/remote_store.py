"""A kernel store that machines share, by URL: kernels are fetched from it, and published to it.

Layout of a remote store, which is safe to delete at any time::

    v1/kernels/<key>.bundle          a signed bundle of one kernel
    v1/sources/<source key>.bundle   the same, by what is known of a kernel without a compiler
    v1/claims/<key>.<number>         exists while a machine compiles the kernel

Only what one of the public keys has signed is believed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.bundle import BundledKernel, manifest_of, open_bundle, write_bundle
from cutlass_ops.artifacts.entry import Artifact, identity_key, source_part
from cutlass_ops.artifacts.signing import require_pair, require_public_keys
from cutlass_ops.base import claims, env
from cutlass_ops.base.errors import BundleError, CompileError, CutlassOpsError
from cutlass_ops.base.remote_files import RemoteFiles, TooLarge, Unreachable
from cutlass_ops.base.session import Part, Session

_MAX_OBJECT = 64 << 20  # bytes; a kernel and its source have about 200 KB

_log = logging.getLogger("cutlass_ops")


class RemoteStore:
    """A remote store."""

    def __init__(self, settings: env.RemoteStore) -> None:
        self.settings = settings
        self.files = RemoteFiles(settings.url, settings.timeout)
        self._rejected: set[str] = set()
        with env.naming_key(env.REMOTE_STORE_KEY):
            require_public_keys(settings.public_keys)
        if settings.signing_key is not None:
            # What it publishes, its own readers would refuse.
            with env.naming_key(env.REMOTE_STORE_SIGNING_KEY):
                require_pair(settings.signing_key, settings.public_keys)
            if not self.files.writable:
                raise ValueError(
                    f"{env.REMOTE_STORE_SIGNING_KEY.name} is set, but {self.where} can only be read: unset it, or name "
                    f"the store by a URL that can be written, such as s3://bucket/kernels"
                )

    @property
    def where(self) -> str:
        """The URL, without the user's name and password."""
        return self.files.where

    @property
    def publishes(self) -> bool:
        """Whether kernels that are compiled here are published."""
        return self.settings.signing_key is not None

    def reachable(self) -> bool:
        """Return whether the store answers in time."""
        try:
            self.files.read(_kernel("0" * 64), _MAX_OBJECT, self.settings.timeout)
        except TooLarge:
            return True
        except Unreachable:
            return False
        return True

    def fetch_source(self, identity: Mapping[str, Any]) -> BundledKernel | None:
        """Return a kernel with a source identity, from any compiler, or None, within the time limit."""
        with contextlib.suppress(Unreachable):
            found = self._opened(_source(identity_key(identity)), self.settings.timeout)
            if found is not None and source_part(found.manifest["identity"]) == identity:
                return found
        return None

    @contextlib.contextmanager
    def turn(self, key: str, name: str, cancel: threading.Event | None) -> Iterator[Turn]:
        """Fetch a kernel, or give the caller a turn to compile and publish it.

        Of all machines that publish, one compiles at a time, and the others wait for its kernel, at most the waiting
        limit. What comes before the turn takes at most the time limit, and so does the turn's end.
        """
        timeout, found, claim = self.settings.timeout, None, None
        limits = claims.Limits(timeout, time.monotonic() + timeout, self.settings.wait)
        with contextlib.suppress(Unreachable):
            found = self._by_key(key, timeout)
            if found is not None:
                self._complete(found, timeout)
            else:
                path = f"v1/claims/{key}"
                turns = claims.Turns(self.files, path, name, lambda limit: self._by_key(key, limit), limits, cancel)
                found, claim = turns.taken(claim=self.publishes)
        turn, failed = Turn(self, found), False
        try:
            yield turn
        except CompileError:
            # It would fail elsewhere too: those who wait find that out at the same time, not one after the other.
            failed = True
            raise
        finally:
            if claim is not None:
                claim.end(turn.until or time.monotonic() + timeout, failed=failed)

    def _complete(self, found: BundledKernel, limit: float) -> None:
        """Publish the kernel under its source too, if that object is missing: its builder may have died in between."""
        name = _source(_source_key(found))
        if not self.publishes or self._opened(name, limit) is not None:
            return
        with contextlib.suppress(TooLarge, OSError):  # the kernel is there all the same
            data = self.files.read(_kernel(found.key), _MAX_OBJECT, limit)
            if data is not None:
                self.files.write(name, data, limit)
                _log.info("published %s/%s again", self.where, name)

    def _by_key(self, key: str, limit: float) -> BundledKernel | None:
        found = self._opened(_kernel(key), limit)
        if found is not None and found.key != key:
            self._reject(_kernel(key), f"it is the kernel {found.key}")
            return None
        return found

    def _opened(self, name: str, limit: float) -> BundledKernel | None:
        """Return the kernel of an object that is a bundle of one signed kernel; ignore any other."""
        try:
            data = self.files.read(name, _MAX_OBJECT, limit)
            return None if data is None else _unpacked(data, self.settings.public_keys)
        except (TooLarge, CutlassOpsError, ValueError, OSError) as exc:
            self._reject(name, str(exc))
            return None

    def _reject(self, name: str, why: str) -> None:
        if name not in self._rejected:
            self._rejected.add(name)
            _log.warning("%s/%s is ignored: %s", self.where, name, why)


class Turn:
    """A kernel that was fetched, or the turn to compile it."""

    def __init__(self, store: RemoteStore, fetched: BundledKernel | None) -> None:
        self._store = store
        self.fetched = fetched  # None if the caller must compile it
        self.until: float | None = None  # monotonic time at which publishing must be done, once it has begun

    def publish(self, artifact: Artifact) -> None:
        """Sign and publish a kernel that this process compiled, if there is a signing key. Log a failure."""
        store, self.until = self._store, time.monotonic() + self._store.settings.timeout
        if store.settings.signing_key is None:
            return
        try:
            data = _bundled(artifact, store.settings.signing_key)
            for name in (_kernel(artifact.key), _source(_source_key(artifact))):
                store.files.write(name, data, self.until - time.monotonic())
        except (Unreachable, CutlassOpsError, ValueError, OSError) as exc:
            # If the store is down, that has been said.
            level = logging.INFO if isinstance(exc, Unreachable) else logging.WARNING
            _log.log(level, "%s is not published at %s: %s", artifact.spec.slug, store.where, exc)
        else:
            _log.info("published %s at %s", artifact.spec.slug, store.where)


class RemoteStores(Part):
    """The remote store that the environment names, for a session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._made: dict[env.RemoteStore, RemoteStore] = {}

    def store(self) -> RemoteStore | None:
        """Return the remote store, or None if there is none."""
        settings = env.remote_store()
        if settings is None:
            return None
        # If two threads make one at the same time, both get the first.
        return self._made.get(settings) or self._made.setdefault(settings, RemoteStore(settings))


def _kernel(key: str) -> str:
    return f"v1/kernels/{key}.bundle"


def _source(key: str) -> str:
    return f"v1/sources/{key}.bundle"


def _source_key(artifact: Artifact) -> str:
    return identity_key(source_part(artifact.manifest["identity"]))


def _unpacked(data: bytes, public_keys: tuple[Path, ...]) -> BundledKernel:
    """Check a bundle of one kernel: its signature, its manifest and every file."""
    with _private_file() as path:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        try:
            bundle = open_bundle(path, public_keys)
            if len(bundle.manifest.kernels) != 1 or bundle.manifest.tables:
                raise BundleError("it must have one kernel and nothing else")
            (kernel,) = bundle.kernels()
            kernel.read_library(), kernel.read_source()
        except BundleError as exc:
            # The path is that of a temporary file.
            name = str(path.resolve())
            raise BundleError(str(exc).replace(f"bundle {name}: ", "").replace(name, "it")) from None
    return kernel  # its file stays open


def _bundled(artifact: Artifact, private_key: Path) -> bytes:
    manifest = manifest_of([artifact], {}, ())
    (record,) = manifest.kernels
    files = {record.library_name: artifact.read_library(), record.source_name: artifact.read_source()}
    with _private_file() as path:
        write_bundle(path, manifest, files, private_key=private_key)
        data = path.read_bytes()
    if len(data) > _MAX_OBJECT:
        raise BundleError(f"it has {len(data)} bytes: at most {_MAX_OBJECT} are allowed")
    return data


@contextlib.contextmanager
def _private_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
        yield Path(folder, "kernel.bundle")
