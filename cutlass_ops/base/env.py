"""Every environment variable that this library reads: typed, and read when it is needed, never at import."""

from __future__ import annotations

import math
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from cutlass_ops.base import units

T = TypeVar("T")

_POSITIVE = re.compile(r"0*[1-9][0-9]{0,14}")


class NoHomeError(ValueError):
    """The user has no home folder, and no variable names another place."""


class Variable(NamedTuple):
    """One environment variable.

    Attributes
    ----------
    name : str
        Its name in the environment.
    default : str
        What holds while it is unset or empty, in words.
    doc : str
        What it decides.
    """

    name: str
    default: str
    doc: str

    @property
    def text(self) -> str | None:
        """The raw value, or None while it is unset or empty."""
        return self.given or None

    @property
    def given(self) -> str | None:
        """The raw value, which may be empty, or None while it is unset."""
        return os.environ.get(self.name)


CACHE_DIR = Variable("CUTLASS_OPS_CACHE_DIR", "~/.cache/cutlass_ops", "folder of the kernel store")
XDG_CACHE_HOME = Variable("XDG_CACHE_HOME", "~/.cache", "parent folder of the default kernel store")
JIT = Variable("CUTLASS_OPS_JIT", "1", "0: never compile, use only existing kernels")
NVCC = Variable("CUTLASS_OPS_NVCC", "found by search", "path of the nvcc to use before any other")
CUDA_HOME = Variable("CUDA_HOME", "found by search", "CUDA toolkit whose bin/nvcc is used before that on PATH")
CUDA_PATH = Variable("CUDA_PATH", "found by search", "the same as CUDA_HOME, which takes precedence")
NVCC_CCBIN = Variable("NVCC_CCBIN", "g++ on PATH", "host compiler, or the folder of its g++")
CUTLASS_DIR = Variable("CUTLASS_OPS_CUTLASS_DIR", "package nvidia-cutlass", "CUTLASS checkout to compile with")
JOBS = Variable("CUTLASS_OPS_JOBS", "CPUs of this process", "kernels compiled at the same time")
LINEINFO = Variable("CUTLASS_OPS_LINEINFO", "0", "1: kernels have C++ line numbers for profilers (-lineinfo)")
NVTX = Variable("CUTLASS_OPS_NVTX", "0", "1: profilers show calls as NVTX ranges with the op's name")
PROGRESS = Variable("CUTLASS_OPS_PROGRESS", "auto", "0: silent, 1: a bar, auto: a bar on a terminal, else plain lines")

EXECUTOR_TIMEOUT = Variable(
    "CUTLASS_OPS_EXECUTOR_TIMEOUT", "1800", "most seconds to wait for the next kernel from an executor"
)

CACHE_SIZE = Variable(
    "CUTLASS_OPS_CACHE_SIZE", "2GB", "size limit of the kernel store, which removes the least recently used, or none"
)
TUNING_DIR = Variable("CUTLASS_OPS_TUNING_DIR", "tuning/ in the cache folder", "folder of the user's tuning tables")

BUNDLES = Variable("CUTLASS_OPS_BUNDLES", "none", "bundles of compiled kernels in search order, separated by ':'")
BUNDLE_KEY = Variable(
    "CUTLASS_OPS_BUNDLE_KEY",
    "none",
    "PEM files of Ed25519 keys, separated by ':'; one of them must have signed each bundle",
)
BUNDLE_VERSION = Variable("CUTLASS_OPS_BUNDLE_VERSION", "none", "minimum version of every bundle")

VARIABLES = (
    CACHE_DIR,
    CACHE_SIZE,
    TUNING_DIR,
    BUNDLES,
    BUNDLE_KEY,
    BUNDLE_VERSION,
    XDG_CACHE_HOME,
    JIT,
    NVCC,
    CUDA_HOME,
    CUDA_PATH,
    NVCC_CCBIN,
    CUTLASS_DIR,
    JOBS,
    LINEINFO,
    NVTX,
    EXECUTOR_TIMEOUT,
    PROGRESS,
)


def cache_dir() -> Path:
    """Return the kernel store's folder, which need not exist.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_CACHE_DIR`` is relative.
    NoHomeError
        If it is unset and there is no home folder; a ValueError as well.
    """
    given = _path(CACHE_DIR)
    if given is not None:
        return given
    xdg = XDG_CACHE_HOME.text
    # The XDG specification has relative values ignored.
    if xdg is not None and os.path.isabs(xdg):
        return Path(xdg, "cutlass_ops")
    home = _home()
    if home is None:
        raise NoHomeError(f"this user has no home folder: set {CACHE_DIR.name} to a folder for compiled kernels")
    return home / ".cache" / "cutlass_ops"


def cache_size() -> int | None:
    """Return how many bytes the kernels in the store may have; None if as many as there are.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_CACHE_SIZE`` is neither a size, such as 2GB, nor none.
    """
    text = CACHE_SIZE.text or CACHE_SIZE.default
    if text == "none":
        return None
    try:
        return units.size(text, CACHE_SIZE.name)
    except ValueError as exc:
        raise ValueError(f"{exc}, or none for no limit") from None


def executor_timeout() -> float:
    """Return for how many seconds no kernel may come back from an executor.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_EXECUTOR_TIMEOUT`` is not a positive number.
    """
    text = EXECUTOR_TIMEOUT.text or EXECUTOR_TIMEOUT.default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ValueError(f"{EXECUTOR_TIMEOUT.name} must be a positive number of seconds, not {text!r}")
    return seconds


def tuning_dir() -> Path:
    """Return the folder of the user's tuning tables, which need not exist.

    Raises
    ------
    ValueError, NoHomeError
        As for :func:`cache_dir`.
    """
    return _path(TUNING_DIR) or cache_dir() / "tuning"


def bundles() -> tuple[Path, ...]:
    """Return the bundles that the user named, the first to look in first.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_BUNDLES`` holds a relative path.
    """
    parts = (part for part in (BUNDLES.text or "").split(os.pathsep) if part)
    return tuple(_absolute(BUNDLES, part) for part in parts)


def bundle_keys() -> tuple[Path, ...] | None:
    """Return the keys of which one must have signed each bundle, or None while the variable is unset.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_BUNDLE_KEY`` is set and empty, or holds an empty or a relative path.
    """
    text = BUNDLE_KEY.given
    if text is None:
        return None
    parts = text.split(os.pathsep)
    # A variable that was to name a key, and names none, must not have unsigned bundles loaded.
    if not all(parts):
        raise ValueError(
            f"{BUNDLE_KEY.name} is {text!r}, which has an empty path: name PEM files, separated by {os.pathsep!r}, or "
            "unset it to load bundles that nobody signed"
        )
    return tuple(_absolute(BUNDLE_KEY, part) for part in parts)


def bundle_version() -> int | None:
    """Return the minimum version of every bundle, or None while the variable is unset.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_BUNDLE_VERSION`` is set and no positive integer.
    """
    text = BUNDLE_VERSION.given
    return None if text is None else _positive(BUNDLE_VERSION, text)


def jit_enabled() -> bool:
    """Return whether kernels may be compiled.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_JIT`` is neither 0 nor 1.
    """
    return _choice(JIT, {"0": False, "1": True}, True)


def nvcc() -> Path | None:
    """Return the nvcc that the user named, if any.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_NVCC`` is a relative path.
    """
    return _path(NVCC)


def cuda_homes() -> tuple[tuple[str, Path], ...]:
    """Return the toolkit folders that the user named, with each variable's name, the first to use first.

    Raises
    ------
    ValueError
        If one lies in a home folder that there is not.
    """
    return tuple((v.name, _expanded(v, v.text)) for v in (CUDA_HOME, CUDA_PATH) if v.text is not None)


def host_compiler() -> str | None:
    """Return the host compiler that the user named, if any: a command, a path or a folder."""
    return NVCC_CCBIN.text


def cutlass_dir() -> Path | None:
    """Return the CUTLASS checkout that the user named, if any.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_CUTLASS_DIR`` is a relative path.
    """
    return _path(CUTLASS_DIR)


def jobs() -> int:
    """Return how many kernels to compile at the same time.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_JOBS`` is not a positive integer.
    """
    text = JOBS.text
    if text is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _positive(JOBS, text)


def lineinfo_enabled() -> bool:
    """Return whether kernels are compiled with the lines of their source, which makes other kernels of them.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_LINEINFO`` is neither 0 nor 1.
    """
    return _choice(LINEINFO, {"0": False, "1": True}, False)


def nvtx_enabled() -> bool:
    """Return whether calls are NVTX ranges.

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_NVTX`` is neither 0 nor 1.
    """
    return _choice(NVTX, {"0": False, "1": True}, False)


def progress() -> bool | None:
    """Return whether progress is a bar (True), nothing (False), or what suits standard error (None).

    Raises
    ------
    ValueError
        If ``CUTLASS_OPS_PROGRESS`` is none of 0, 1 and auto.
    """
    return _choice(PROGRESS, {"0": False, "1": True, "auto": None}, None)


def _choice(variable: Variable, choices: Mapping[str, T], default: T) -> T:
    text = variable.text
    if text is None:
        return default
    if text not in choices:
        raise ValueError(f"{variable.name} must be one of {', '.join(choices)}, not {text!r}")
    return choices[text]


def _positive(variable: Variable, text: str) -> int:
    if not _POSITIVE.fullmatch(text):
        raise ValueError(f"{variable.name} must be a positive integer of at most 15 digits, not {reprlib.repr(text)}")
    return int(text)


def _path(variable: Variable) -> Path | None:
    text = variable.text
    return None if text is None else _absolute(variable, text)


def _absolute(variable: Variable, text: str) -> Path:
    path = _expanded(variable, text)
    # A relative path would mean something else in every working folder.
    if not path.is_absolute():
        raise ValueError(f"{variable.name} must be an absolute path, not {text!r}")
    return path


def _expanded(variable: Variable, text: str) -> Path:
    """Return a path with the home folder that it may begin with."""
    user, *rest = Path(text).parts or ("",)
    if not user.startswith("~"):
        return Path(text)
    home = _home(user)
    if home is None:
        raise ValueError(f"{variable.name} is {text!r}, and there is no such home folder: name an absolute path")
    return Path(home, *rest)


def _home(user: str = "~") -> Path | None:
    """Return a user's home folder, by default this one's. One that is empty or relative is none."""
    if user == "~" and os.environ.get("HOME") == "":
        return None
    try:
        home = Path.home() if user == "~" else Path(user).expanduser()
    except (RuntimeError, KeyError):
        return None
    return home if home.is_absolute() else None
