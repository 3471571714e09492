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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cutlass_ops.artifacts.bundle import manifest_of, open_bundle, write_bundle
from cutlass_ops.artifacts.entry import Artifact, identity_key, source_part
from cutlass_ops.artifacts.signing import require_pair, require_public_keys
from cutlass_ops.base import claims, env, forks
from cutlass_ops.base.errors import BundleError, CompileError, CutlassOpsError
from cutlass_ops.base.remote_files import RemoteFiles, TooLarge, Unreachable
from cutlass_ops.base.session import Part, Session

_MAX_OBJECT = 64 << 20  # bytes; a kernel and its source have about 200 KB

_log = logging.getLogger("cutlass_ops")


@dataclass(frozen=True)
class Fetched:
    """A kernel from a remote store. It is signed and whole, and has the key or the source that was asked for.

    Attributes
    ----------
    key : str
        Its key.
    identity : mapping
        What the key hashes.
    library, source : bytes
        Contents of its files.
    resources : tuple of dict
        The compiler's report on each function.
    url : str
        The store.
    """

    key: str
    identity: Mapping[str, Any]
    library: bytes
    source: bytes
    resources: tuple[dict[str, Any], ...]
    url: str


class RemoteStore:
    """A remote store.

    Whatever is wrong with the server or its files, a look-up finds nothing and ends in time.

    Parameters
    ----------
    settings : env.RemoteStore
        URL, keys and limits.

    Raises
    ------
    StoreError
        If a package is missing.
    BundleError, ValueError, OSError
        If a key cannot be used, or there is a signing key and the URL cannot be written.
    """

    def __init__(self, settings: env.RemoteStore) -> None:
        self.settings = settings
        self._files = RemoteFiles(settings.url, settings.timeout)
        self._rejected: set[str] = set()
        with env.naming_key(env.REMOTE_STORE_KEY):
            require_public_keys(settings.public_keys)
        if settings.signing_key is not None:
            # What it publishes, its own readers would refuse.
            with env.naming_key(env.REMOTE_STORE_SIGNING_KEY):
                require_pair(settings.signing_key, settings.public_keys)
            if not self._files.writable:
                raise ValueError(
                    f"{env.REMOTE_STORE_SIGNING_KEY.name} is set, but {self.where} can only be read: unset it, or name "
                    f"the store by a URL that can be written, such as s3://bucket/kernels"
                )

    @property
    def where(self) -> str:
        """The URL, without the user's name and password."""
        return self._files.where

    @property
    def publishes(self) -> bool:
        """Whether kernels that are compiled here are published."""
        return self.settings.signing_key is not None

    def reachable(self) -> bool:
        """Return whether the store answers in time."""
        try:
            self._files.read(_kernel("0" * 64), _MAX_OBJECT, self.settings.timeout)
        except TooLarge:
            return True
        except Unreachable:
            return False
        return True

    def fetch(self, key: str) -> Fetched | None:
        """Return the kernel with a key, or None. It takes no longer than the time limit."""
        with contextlib.suppress(Unreachable):
            return self._by_key(key, self.settings.timeout)
        return None

    def fetch_source(self, identity: Mapping[str, Any]) -> Fetched | None:
        """Return a kernel with a source identity, from any compiler, or None, within the time limit."""
        with contextlib.suppress(Unreachable):
            found = self._opened(_source(identity_key(identity)), self.settings.timeout)
            if found is not None and source_part(found.identity) == identity:
                return found
        return None

    @contextlib.contextmanager
    def turn(self, key: str, name: str, cancel: threading.Event | None) -> Iterator[Turn]:
        """Fetch a kernel, or give the caller a turn to compile and publish it.

        Of all machines that publish, one compiles at a time, and the others wait for its kernel. It takes at most the
        time limit until the kernel is there or the caller's turn has come, or if another machine is compiling, at most
        the waiting limit more. The end of the turn, with publishing, takes at most the time limit.

        Parameters
        ----------
        key, name : str
            The kernel's key, and its name for messages.
        cancel : threading.Event, optional
            Set it to stop waiting.

        Raises
        ------
        CancelledError
            If ``cancel`` is set while waiting.
        """
        timeout, found, claim = self.settings.timeout, None, None
        limits = claims.Limits(timeout, time.monotonic() + timeout, self.settings.wait)
        with contextlib.suppress(Unreachable):
            found = self._by_key(key, timeout)
            if found is not None:
                self._complete(found, timeout)
            else:
                found, claim = claims.take_turns(
                    self._files,
                    f"v1/claims/{key}",
                    name,
                    lambda limit: self._by_key(key, limit),
                    limits,
                    cancel,
                    claim=self.publishes,
                )
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

    def publish(self, artifact: Artifact, until: float) -> None:
        """Sign and publish a kernel that this process compiled, if there is a signing key. Log a failure.

        Parameters
        ----------
        artifact : Artifact
            The kernel in the local store.
        until : float
            Monotonic time at which this must be done.
        """
        if self.settings.signing_key is None:
            return
        names = _kernel(artifact.key), _source(identity_key(source_part(artifact.manifest["identity"])))
        try:
            data = _bundled(artifact, self.settings.signing_key)
            for name in names:
                self._files.write(name, data, until - time.monotonic())
        except (Unreachable, CutlassOpsError, ValueError, OSError) as exc:
            # Where the store is down, that has been said.
            level = logging.INFO if isinstance(exc, Unreachable) else logging.WARNING
            _log.log(level, "%s is not published at %s: %s", artifact.spec.slug, self.where, exc)
        else:
            _log.info("published %s at %s", artifact.spec.slug, self.where)

    def _complete(self, found: Fetched, limit: float) -> None:
        """Publish the kernel under its source too, if that object is missing: its builder may have died in between."""
        name = _source(identity_key(source_part(found.identity)))
        if not self.publishes or self._opened(name, limit) is not None:
            return
        with contextlib.suppress(TooLarge, OSError):  # the kernel is there all the same
            data = self._files.read(_kernel(found.key), _MAX_OBJECT, limit)
            if data is not None:
                self._files.write(name, data, limit)
                _log.info("published %s/%s again", self.where, name)

    def _by_key(self, key: str, limit: float) -> Fetched | None:
        found = self._opened(_kernel(key), limit)
        if found is not None and found.key != key:
            self._reject(_kernel(key), f"it is the kernel {found.key}")
            return None
        return found

    def _opened(self, name: str, limit: float) -> Fetched | None:
        """Return the kernel of an object that is a bundle of one signed kernel; ignore any other."""
        try:
            data = self._files.read(name, _MAX_OBJECT, limit)
            return None if data is None else _unpacked(data, self.settings.public_keys, self.where)
        except (TooLarge, CutlassOpsError, ValueError, OSError) as exc:
            self._reject(name, str(exc))
            return None

    def _reject(self, name: str, why: str) -> None:
        if name not in self._rejected:
            self._rejected.add(name)
            _log.warning("%s/%s is ignored: %s", self.where, name, why)


class Turn:
    """A kernel that was fetched, or the turn to compile it.

    Attributes
    ----------
    fetched : Fetched or None
        The kernel; None if the caller must compile it.
    until : float or None
        Monotonic time at which publishing must be done, once it has begun.
    """

    def __init__(self, store: RemoteStore, fetched: Fetched | None) -> None:
        self._store = store
        self.fetched = fetched
        self.until: float | None = None

    def publish(self, artifact: Artifact) -> None:
        """Publish what was compiled."""
        self.until = time.monotonic() + self._store.settings.timeout
        self._store.publish(artifact, self.until)


class RemoteStores(Part):
    """The remote store that the environment names, for a session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._made: tuple[env.RemoteStore, RemoteStore] | None = None
        self._reset()
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()

    def store(self) -> RemoteStore | None:
        """Return the remote store, or None if there is none.

        Raises
        ------
        StoreError, BundleError, ValueError, OSError
            If a variable or a key is wrong, or a package is missing.
        """
        settings = env.remote_store()
        if settings is None:
            return None
        with self._lock:
            if self._made is None or self._made[0] != settings:
                self._made = settings, RemoteStore(settings)
            return self._made[1]


def _kernel(key: str) -> str:
    return f"v1/kernels/{key}.bundle"


def _source(key: str) -> str:
    return f"v1/sources/{key}.bundle"


def _unpacked(data: bytes, public_keys: tuple[Path, ...], url: str) -> Fetched:
    """Check a bundle of one kernel: its signature, its manifest and every file.

    Raises
    ------
    BundleError, ValueError, OSError
        If a check fails.
    """
    with _private_file() as path:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        try:
            bundle = open_bundle(path, public_keys)
            if len(bundle.manifest.kernels) != 1 or bundle.manifest.tables:
                raise BundleError("it must have one kernel and nothing else")
            (kernel,) = bundle.kernels()
            library, source = kernel.read_library(), kernel.read_source()
        except BundleError as exc:
            # The path is that of a temporary file.
            name = str(path.resolve())
            raise BundleError(str(exc).replace(f"bundle {name}: ", "").replace(name, "it")) from None
    return Fetched(kernel.key, kernel.manifest["identity"], library, source, tuple(kernel.manifest["resources"]), url)


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
