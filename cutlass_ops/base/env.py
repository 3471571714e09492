"""Every environment variable that this library reads. Each is read on use, never at import."""

from __future__ import annotations

import contextlib
import math
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from cutlass_ops.base import units

T = TypeVar("T")

# Compiled when they are first needed, as re does with texts.
_POSITIVE = r"0*[1-9][0-9]{0,14}"
_URL = r"[a-z][a-z0-9+.-]*://[!\"$->@-~]+"
# Schemes of URLs that mean nothing without a bucket or a server.
_HOSTED = ("s3", "s3a", "gs", "gcs", "http", "https")
# A user's name and password in a URL.
_USER = r"(?<=://)[^/?#]*@"
_DAY = 86_400.0  # seconds


class NoHomeError(ValueError):
    """The user has no home folder, and no variable names another folder."""


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    default: str  # applies while it is unset or empty; a value or words
    doc: str  # what it sets

    @property
    def text(self) -> str | None:
        """The raw value, or None while it is unset or empty."""
        return self.given or None

    @property
    def given(self) -> str | None:
        """The raw value, possibly empty, or None while it is unset."""
        return os.environ.get(self.name)


CACHE_DIR = Variable("CUTLASS_OPS_CACHE_DIR", "~/.cache/cutlass_ops", "folder of the kernel store")
CACHE_SIZE = Variable(
    "CUTLASS_OPS_CACHE_SIZE", "2GB", "maximum size of the kernel store, or none; the least recently used kernels go"
)
TUNING_DIR = Variable("CUTLASS_OPS_TUNING_DIR", "tuning/ in the cache folder", "folder of the user's tuning tables")
BUNDLES = Variable(
    "CUTLASS_OPS_BUNDLES", "none", "bundles of compiled kernels, separated by ':', searched in this order"
)
BUNDLE_KEY = Variable(
    "CUTLASS_OPS_BUNDLE_KEY",
    "none",
    "PEM files of Ed25519 keys, separated by ':'; each bundle must be signed with one of them",
)
BUNDLE_VERSION = Variable("CUTLASS_OPS_BUNDLE_VERSION", "none", "minimum version of every bundle")
REMOTE_STORE = Variable(
    "CUTLASS_OPS_REMOTE_STORE", "none", "URL of a kernel store that machines share; it is asked before compiling"
)
REMOTE_STORE_KEY = Variable(
    "CUTLASS_OPS_REMOTE_STORE_KEY",
    "none",
    "PEM files of Ed25519 public keys, separated by ':'; one must have signed each fetched kernel",
)
REMOTE_STORE_SIGNING_KEY = Variable(
    "CUTLASS_OPS_REMOTE_STORE_SIGNING_KEY",
    "none",
    "PEM file of an Ed25519 private key; kernels compiled here are signed with it and published",
)
REMOTE_STORE_TIMEOUT = Variable(
    "CUTLASS_OPS_REMOTE_STORE_TIMEOUT", "10", "seconds that asking the remote store for one kernel may take"
)
REMOTE_STORE_WAIT = Variable(
    "CUTLASS_OPS_REMOTE_STORE_WAIT", "120", "seconds to wait for a kernel that another machine is compiling"
)
XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", "~/.cache", "parent of the default kernel store folder")
JIT = Variable("CUTLASS_OPS_JIT", "1", "0: never compile, use only existing kernels")
STAND_IN = Variable(
    "CUTLASS_OPS_STAND_IN", "1", "0: a call waits until its best kernel is compiled, and PyTorch serves none"
)
CHOICES = Variable("CUTLASS_OPS_CHOICES", "1", "0: what is decided for a weight is not kept in the store's folder")
NVCC = Variable("CUTLASS_OPS_NVCC", "looked for", "path of nvcc, used before any other")
CUDA_HOME = Variable("CUDA_HOME", "looked for", "CUDA toolkit whose bin/nvcc is used before the one on PATH")
CUDA_PATH = Variable("CUDA_PATH", "looked for", "same as CUDA_HOME, which takes precedence")
NVCC_CCBIN = Variable("NVCC_CCBIN", "g++ on PATH", "host compiler, or the folder of its g++")
CUTLASS_DIR = Variable("CUTLASS_OPS_CUTLASS_DIR", "package nvidia-cutlass", "CUTLASS checkout to compile with")
JOBS = Variable("CUTLASS_OPS_JOBS", "CPUs of this process", "kernels compiled at the same time")
LINEINFO = Variable(
    "CUTLASS_OPS_LINEINFO", "0", "1: compile kernels with source line numbers for profilers (-lineinfo)"
)
NVTX = Variable("CUTLASS_OPS_NVTX", "0", "1: mark each call as an NVTX range with the op's name, for profilers")
EXECUTOR_TIMEOUT = Variable(
    "CUTLASS_OPS_EXECUTOR_TIMEOUT", "1800", "seconds to wait for the next kernel from an executor"
)
PROGRESS = Variable("CUTLASS_OPS_PROGRESS", "auto", "0: silent, 1: a bar, auto: a bar on a terminal, else plain lines")

VARIABLES = tuple(each for each in globals().values() if isinstance(each, Variable))


def cache_dir() -> Path:
    """Return the kernel store's folder, which need not exist. Raises NoHomeError if nothing names one."""
    given = _path(CACHE_DIR)
    if given is not None:
        return given
    xdg = XDG_CACHE_HOME.text
    # The XDG specification says to ignore relative values.
    if xdg is not None and os.path.isabs(xdg):
        return Path(xdg, "cutlass_ops")
    home = _home()
    if home is None:
        raise NoHomeError(f"this user has no home folder: set {CACHE_DIR.name} to a folder for compiled kernels")
    return home / ".cache" / "cutlass_ops"


def cache_size() -> int | None:
    """Return the store's maximum size in bytes, None for no limit. Raises ValueError if it is no size such as 2GB."""
    text = CACHE_SIZE.text or CACHE_SIZE.default
    if text == "none":
        return None
    try:
        return units.size(text, CACHE_SIZE.name)
    except ValueError as exc:
        raise ValueError(f"{exc}, or none for no limit") from None


def executor_timeout() -> float:
    """Return how many seconds to wait for an executor's next kernel. Raises ValueError unless it is positive."""
    return _seconds(EXECUTOR_TIMEOUT)


def tuning_dir() -> Path:
    """Return the folder of the user's tuning tables, which need not exist. Raises the errors of :func:`cache_dir`."""
    return _path(TUNING_DIR) or cache_dir() / "tuning"


def bundles() -> tuple[Path, ...]:
    """Return the user's bundles in search order. Raises ValueError if ``CUTLASS_OPS_BUNDLES`` has a relative path."""
    parts = (part for part in (BUNDLES.text or "").split(os.pathsep) if part)
    return tuple(_absolute(BUNDLES, part) for part in parts)


def bundle_keys() -> tuple[Path, ...] | None:
    """Return the keys that may sign bundles, or None if unset. Raises ValueError for an empty or relative path."""
    text = BUNDLE_KEY.given
    # An empty value is likely a mistake: it must not turn signature checks off.
    return None if text is None else _keys(BUNDLE_KEY, text, ", or unset it to load unsigned bundles")


@contextlib.contextmanager
def naming_key(variable: Variable) -> Iterator[None]:
    """Replace an OSError about a key's file by a ValueError that also names the variable that named the file."""
    try:
        yield
    except OSError as exc:
        raise ValueError(
            f"{variable.name} names {exc.filename}, which cannot be read ({exc.strerror}): name the PEM file of a key"
        ) from None


def bundle_version() -> int | None:
    """Return the minimum version of bundles, or None if unset. Raises ValueError if it is not a positive integer."""
    text = BUNDLE_VERSION.given
    return None if text is None else _positive(BUNDLE_VERSION, text)


class RemoteStore(NamedTuple):
    """The settings of the remote store."""

    url: str  # of its folder, without a slash at the end
    public_keys: tuple[Path, ...]  # one of these must have signed each fetched kernel
    signing_key: Path | None  # signs the kernels that are published; None publishes none
    timeout: float  # seconds for the requests for one kernel
    wait: float  # seconds to wait for another machine's compiler


def without_user(url: str) -> str:
    """Return a URL for messages, without the user's name and password."""
    return re.sub(_USER, "", url)


def _without_secrets(url: str) -> str:
    """Return a wrong URL for messages, without the text before the last @, which may be a password."""
    before, _, shown = url.rpartition("@")
    scheme, separator, _ = before.partition("://")
    return scheme + separator + shown if separator else shown


def remote_store() -> RemoteStore | None:
    """Return the remote store's settings, or None. Raises ValueError for a bad value, or a URL without a public key."""
    url = REMOTE_STORE.text
    if url is None:
        return None
    # The paths of kernels are appended. "::" would have fsspec chain file systems.
    if not re.fullmatch(_URL, url) or "::" in url:
        raise ValueError(
            f"{REMOTE_STORE.name} must be the URL of a folder, such as s3://bucket/kernels, its scheme in lower case, "
            f"in ASCII without spaces, ?, # and ::, not {reprlib.repr(_without_secrets(url))}"
        )
    scheme, _, path = url.partition("://")
    if scheme in ("file", "local") and not path.startswith("/"):
        raise ValueError(
            f"{REMOTE_STORE.name} must name an absolute folder, such as {scheme}:///mnt/kernels, not "
            f"{reprlib.repr(_without_secrets(url))}"
        )
    if scheme in _HOSTED and path.startswith(("/", ":")):
        raise ValueError(
            f"{REMOTE_STORE.name} must name a bucket or a server behind {scheme}://, such as {scheme}://name/kernels, "
            f"not {reprlib.repr(_without_secrets(url))}"
        )
    text = REMOTE_STORE_KEY.text
    if text is None:
        raise ValueError(
            f"{REMOTE_STORE.name} needs {REMOTE_STORE_KEY.name}, since only signed kernels are loaded from a remote "
            "store: name PEM files of Ed25519 public keys"
        )
    return RemoteStore(
        url.rstrip("/"),
        _keys(REMOTE_STORE_KEY, text),
        _path(REMOTE_STORE_SIGNING_KEY),
        min(_seconds(REMOTE_STORE_TIMEOUT), _DAY),
        min(_seconds(REMOTE_STORE_WAIT, zero=True), _DAY),
    )


def jit_enabled() -> bool:
    """Return whether kernels may be compiled. Raises ValueError if ``CUTLASS_OPS_JIT`` is neither 0 nor 1."""
    return _choice(JIT, {"0": False, "1": True}, True)


def nvcc() -> Path | None:
    """Return the nvcc that the user named, if any. Raises ValueError if ``CUTLASS_OPS_NVCC`` is a relative path."""
    return _path(NVCC)


def cuda_homes() -> tuple[tuple[str, Path], ...]:
    """Return (variable name, toolkit folder) of the user's toolkits, the first in precedence first."""
    return tuple((v.name, _expanded(v, v.text)) for v in (CUDA_HOME, CUDA_PATH) if v.text is not None)


def host_compiler() -> str | None:
    """Return the user's host compiler, if set: a command, a path or a folder."""
    return NVCC_CCBIN.text


def cutlass_dir() -> Path | None:
    """Return the user's CUTLASS checkout. Raises ValueError if ``CUTLASS_OPS_CUTLASS_DIR`` is a relative path."""
    return _path(CUTLASS_DIR)


def jobs() -> int:
    """Return how many kernels to compile at a time. Raises ValueError unless it is a positive integer."""
    text = JOBS.text
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _positive(JOBS, text)


def lineinfo_enabled() -> bool:
    """Return whether kernels have source line numbers, which changes keys. Raises ValueError if it is not 0 or 1."""
    return _choice(LINEINFO, {"0": False, "1": True}, False)


def stand_in() -> bool:
    """Whether PyTorch serves a call until its best kernel is compiled. Raises ValueError if the value is not 0 or 1."""
    # Each call that PyTorch serves asks. The variable is usually unset: nothing more is looked up then.
    return os.environ.get(STAND_IN.name) is None or _choice(STAND_IN, {"0": False, "1": True}, True)


def remembers_choices() -> bool:
    """Whether choices for weights outlast the process. Raises ValueError unless ``CUTLASS_OPS_CHOICES`` is 0 or 1."""
    return _choice(CHOICES, {"0": False, "1": True}, True)


def nvtx_enabled() -> bool:
    """Return whether calls are NVTX ranges. Raises ValueError if ``CUTLASS_OPS_NVTX`` is neither 0 nor 1."""
    return _choice(NVTX, {"0": False, "1": True}, False)


def progress() -> bool | None:
    """Return how to show progress: as a bar (True), not at all (False), or to suit standard error (None)."""
    return _choice(PROGRESS, {"0": False, "1": True, "auto": None}, None)


def _choice(variable: Variable, choices: Mapping[str, T], default: T) -> T:
    text = variable.text
    if text is None:
        return default
    if text not in choices:
        raise ValueError(f"{variable.name} must be one of {', '.join(choices)}, not {text!r}")
    return choices[text]


def _positive(variable: Variable, text: str) -> int:
    if not re.fullmatch(_POSITIVE, text):
        raise ValueError(f"{variable.name} must be a positive integer of at most 15 digits, not {reprlib.repr(text)}")
    return int(text)


def _seconds(variable: Variable, *, zero: bool = False) -> float:
    text = variable.text or variable.default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (seconds > 0 or (zero and seconds == 0)):
        raise ValueError(f"{variable.name} must be a positive number of seconds{', or 0' * zero}, not {text!r}")
    return seconds


def _keys(variable: Variable, text: str, otherwise: str = "") -> tuple[Path, ...]:
    parts = text.split(os.pathsep)
    if not all(parts):
        raise ValueError(
            f"{variable.name} is {text!r}, which has an empty path: name PEM files, separated by {os.pathsep!r}"
            f"{otherwise}"
        )
    return tuple(_absolute(variable, part) for part in parts)


def _path(variable: Variable) -> Path | None:
    text = variable.text
    return None if text is None else _absolute(variable, text)


def _absolute(variable: Variable, text: str) -> Path:
    path = _expanded(variable, text)
    # A relative path would mean different folders in different working directories.
    if not path.is_absolute():
        raise ValueError(f"{variable.name} must be an absolute path, not {text!r}")
    return path


def _expanded(variable: Variable, text: str) -> Path:
    """Expand a leading ``~`` or ``~user``."""
    user, *rest = Path(text).parts or ("",)
    if not user.startswith("~"):
        return Path(text)
    home = _home(user)
    if home is None:
        raise ValueError(f"{variable.name} is {text!r}, but that home folder does not exist: use an absolute path")
    return Path(home, *rest)


def _home(user: str = "~") -> Path | None:
    """Return a user's home folder, or None if it is empty, relative or unknown."""
    if user == "~" and os.environ.get("HOME") == "":
        return None
    try:
        home = Path.home() if user == "~" else Path(user).expanduser()
    except (RuntimeError, KeyError):
        return None
    return home if home.is_absolute() else None
