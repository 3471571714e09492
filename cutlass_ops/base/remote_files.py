"""Read and write small files at a URL, each request within a time limit. Only this module imports fsspec.

After a request that failed, the files count as down: for a while, every request fails at once. The first failure of a
session is a warning, later ones are not.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import difflib
import importlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from cutlass_ops.base import checked_json, env, forks
from cutlass_ops.base.errors import StoreError

T = TypeVar("T")

_PAUSE = 60.0  # seconds without requests after a failed one
_LOCAL = ("file", "local")
_READ_ONLY = ("http", "https")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "remote", "https": "remote"}
_INSTEAD = (
    f"set {env.REMOTE_STORE.name} to a folder such as s3://bucket/kernels, gs://bucket/kernels, "
    "https://host/kernels or file:///mnt/kernels"
)
# What the libraries are told. Listings are never asked for.
_OPTIONS: dict[str, dict[str, Any]] = {
    "s3": {"use_listings_cache": False},
    "s3a": {"use_listings_cache": False},
    "gs": {"use_listings_cache": False},
    "gcs": {"use_listings_cache": False},
    "file": {"auto_mkdir": True},
    "local": {"auto_mkdir": True},
}

_log = logging.getLogger("cutlass_ops")


class Unreachable(Exception):
    """A request failed or took too long, or an earlier one did."""


class _NotOpened(Exception):
    """A URL does not say all that its file system needs, or a package is missing: the message says what to do."""


class _Redirected(Exception):
    """A server sent a request on to another host."""


class TooLarge(Exception):
    """A file has more bytes than allowed."""


class RemoteFiles:
    """Files at a URL, such as a bucket. All methods may be called by several threads.

    A web server's redirects are followed on its own host only. ``usual`` is how many seconds a request may usually
    take. If one was given less than half of that and ran out of time, the files do not count as down. Raises StoreError
    if fsspec or its library for this kind of URL is not installed.
    """

    def __init__(self, url: str, usual: float) -> None:
        self._url = url
        self._usual = usual
        self._protocol = url.partition("://")[0]
        # Taking the next one is atomic.
        self._levels = iter((logging.WARNING,))
        self._down_until = 0.0
        self._why = ""
        _require_library(self._protocol)
        self._reset()
        forks.reset_in_child(self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        # Connections do not survive a fork.
        self._opened: tuple[Any, str] | None = None

    def __repr__(self) -> str:
        return f"RemoteFiles({self.where!r})"

    @property
    def where(self) -> str:
        """The URL for messages, without the user's name and password."""
        return env.without_user(self._url)

    @property
    def down(self) -> bool:
        """Whether requests fail at once, because an earlier request failed."""
        return time.monotonic() < self._down_until

    @property
    def writable(self) -> bool:
        """Whether files can be written at URLs of this kind."""
        return self._protocol not in _READ_ONLY

    def read(self, name: str, most: int, limit: float) -> bytes | None:
        """Return a file's contents, or None if there is none. Raises TooLarge or Unreachable."""
        try:
            data = self._asked(limit, lambda fs, root: _read(fs, f"{root}/{name}", most + 1, limit))
        except FileNotFoundError:
            return None
        if len(data) > most:
            raise TooLarge(f"it has more than {most} bytes")
        return data

    def write(self, name: str, data: bytes, limit: float) -> None:
        """Write or replace a file atomically. Raises Unreachable if the request fails or takes too long."""
        try:
            self._asked(limit, lambda fs, root: self._write(fs, f"{root}/{name}", data, limit))
        except FileNotFoundError as exc:
            raise self._failed(_said(exc)) from None

    def create(self, name: str, data: bytes, limit: float) -> bool:
        """Write a file unless there is one; return whether it was written. Raises Unreachable if neither is known."""
        began = time.monotonic()
        try:
            self._asked(limit, lambda fs, root: _create(fs, f"{root}/{name}", data, limit), any_error=True)
        except Unreachable:
            raise
        except FileExistsError:
            return False
        except Exception as exc:
            # Servers and libraries differ in how they say that a file exists.
            left = limit - (time.monotonic() - began)
            with contextlib.suppress(TooLarge):
                if self.read(name, len(data) + (1 << 16), max(left, 0.0)) is None:
                    raise Unreachable(_said(exc)) from None
            return False
        return True

    def remove(self, name: str, limit: float) -> None:
        """Remove a file, if there is one. Raises Unreachable if the request fails or takes too long."""
        with contextlib.suppress(FileNotFoundError):
            self._asked(limit, lambda fs, root: _call(fs, "rm_file", f"{root}/{name}", limit=limit))

    def _write(self, fs: Any, path: str, data: bytes, limit: float) -> None:
        if self._protocol not in _LOCAL:
            _call(fs, "pipe_file", path, data, limit=limit)
            return
        aside = f"{path}.{uuid.uuid4().hex}"
        fs.pipe_file(aside, data)
        fs.mv(aside, path)

    def _asked(self, limit: float, do: Callable[[Any, str], T], *, any_error: bool = False) -> T:
        """Return a function's result. Errors that say nothing about a file mark the files as down."""
        if self.down:
            raise Unreachable(self._why)
        if limit <= 0:
            raise Unreachable("no time is left")
        try:
            return _within(limit, lambda: do(*self._file_system()))
        except (concurrent.futures.TimeoutError, asyncio.TimeoutError):  # from Python 3.11 on, they are the same
            why = f"no answer within {limit:.3g} s"
        except FileNotFoundError:
            raise
        except Exception as exc:
            if any_error:
                raise
            raise self._failed(_said(exc)) from None
        if limit < self._usual / 2:
            # The caller had little time left: the server may be well.
            raise Unreachable(why)
        raise self._failed(why)

    def _failed(self, why: str) -> Unreachable:
        self._why = why
        self._down_until = time.monotonic() + _PAUSE
        _log.log(
            next(self._levels, logging.INFO),
            "the remote store %s cannot be used: %s. It is not asked again for %.0f s",
            self.where,
            why,
            _PAUSE,
        )
        return Unreachable(why)

    def _file_system(self) -> tuple[Any, str]:
        with self._lock:
            if self._opened is None:
                core = importlib.import_module("fsspec.core")
                options = _OPTIONS.get(self._protocol, {})
                try:
                    if self._protocol in _READ_ONLY:
                        options = {"client_kwargs": {"trace_configs": [_on_one_host()]}}
                    self._opened = core.url_to_fs(self._url, skip_instance_cache=True, **options)
                except ImportError as exc:
                    raise _NotOpened(_missing(self._protocol, exc)) from exc
                except (TypeError, ValueError, AttributeError, IsADirectoryError) as exc:
                    # Such as that of a ZIP file in another file system, or one that takes names of servers apart.
                    why = f"fsspec does not open {self._protocol}:// by a URL alone ({_said(exc)})"
                    raise _NotOpened(f"{why}: {_INSTEAD}") from exc
            return self._opened


def _require_library(protocol: str) -> None:
    try:
        import fsspec
    except ImportError:
        raise StoreError('a remote store needs the package fsspec: pip install "cutlass_ops[remote]"') from None
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as exc:
        raise StoreError(_missing(protocol, exc)) from None
    except ValueError:
        near = difflib.get_close_matches(protocol, [*_OPTIONS, *_READ_ONLY], 1)
        meant = f". Did you mean {near[0]}://?" if near else ""
        raise StoreError(f"{protocol}:// is not a kind of URL that fsspec knows: {_INSTEAD}{meant}") from None


def _on_one_host() -> Any:
    """Return a setting of aiohttp that refuses redirects to other hosts.

    A server may move its files. The user named it, and not others, which may be inside the user's network.
    """
    aiohttp, yarl = importlib.import_module("aiohttp"), importlib.import_module("yarl")

    async def refuse(session: Any, context: Any, params: Any) -> None:
        here, headers = params.url, params.response.headers
        there = here.join(yarl.URL(headers.get("Location") or headers.get("URI") or ""))
        same = (here.scheme, here.host, here.port) == (there.scheme, there.host, there.port)
        if not same and (here.scheme, here.host, there.scheme) != ("http", there.host, "https"):
            where = checked_json.printable(f"{there.scheme}://{there.host}:{there.port}")
            raise _Redirected(
                f"it redirects to another server, {where}: if you trust that one, name its URL in "
                f"{env.REMOTE_STORE.name}"
            )

    found = aiohttp.TraceConfig()
    found.on_request_redirect.append(refuse)
    return found


def _missing(protocol: str, exc: ImportError) -> str:
    extra = _EXTRAS.get(protocol)
    what = f"a remote store at {protocol}:// needs another package"
    # We name no other packages: what fsspec says of them changes.
    said = checked_json.printable(str(exc)).rstrip(".")
    return f'{what} ({said}): pip install "cutlass_ops[{extra}]"' if extra else f"{what}: {said}. Or {_INSTEAD}"


def _within(limit: float, do: Callable[[], T]) -> T:
    """Return a function's result. If it takes longer than the limit, leave its thread behind, which ends by itself."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(do())
        except BaseException as exc:
            future.set_exception(exc)

    # The threads of an executor would delay the interpreter's end.
    threading.Thread(target=work, name="cutlass_ops_remote", daemon=True).start()
    return future.result(limit)


def _call(fs: Any, name: str, *args: Any, limit: float, **named: Any) -> Any:
    """Call a method. An asynchronous file system cancels its request at the limit."""
    if not fs.async_impl:
        return getattr(fs, name)(*args, **named)
    asyn = importlib.import_module("fsspec.asyn")
    return asyn.sync(fs.loop, getattr(fs, f"_{name}"), *args, timeout=limit, **named)


def _create(fs: Any, path: str, data: bytes, limit: float) -> None:
    if fs.async_impl:
        _call(fs, "pipe_file", path, data, limit=limit, mode="create")
        return
    with fs.open(path, "xb") as file:
        file.write(data)


def _read(fs: Any, path: str, most: int, limit: float) -> bytes:
    """Return at most a given number of bytes. They are read piece by piece: a server may send more than requested."""
    if not fs.async_impl:
        with fs.open(path, "rb") as file:
            return bytes(file.read(most))
    asyn = importlib.import_module("fsspec.asyn")
    if type(fs).open_async is asyn.AsyncFileSystem.open_async:
        return bytes(_call(fs, "cat_file", path, limit=limit, start=0, end=most))
    return bytes(asyn.sync(fs.loop, _streamed, fs, path, most, timeout=limit))


async def _streamed(fs: Any, path: str, most: int) -> bytes:
    # With a size, no request is made for it.
    file = await fs.open_async(path, "rb", size=most)
    data = bytearray()
    try:
        while len(data) < most:
            piece = await file.read(most - len(data))
            if not piece:
                break
            data += piece
    finally:
        # Not all have a close() that works. The destructor would try to close one that is not closed.
        body, file.closed = getattr(file, "r", None), True
        if body is not None:
            body.close()
    return bytes(data)


def _said(error: Exception) -> str:
    if isinstance(error, _NotOpened | _Redirected):
        return str(error)
    return checked_json.printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
