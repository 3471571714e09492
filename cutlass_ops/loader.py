"""From an artifact on disk to callables. Only this module imports tvm-ffi."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType

from cutlass_ops import _env
from cutlass_ops.errors import LoadError, ToolchainError
from cutlass_ops.store import Artifact, read_private
from cutlass_ops.toolchain import find_toolchain


class Reason(IntEnum):
    """Why a launch refused an argument; numbered as in ``templates/include/cutlass_ops/binding.h``."""

    KIND = 1
    SHAPE = 2
    DTYPE = 3
    DEVICE = 4
    MAJOR = 5
    ALIGNMENT = 6
    OVERLAP = 7
    WORKSPACE = 8
    COUNT = 9


def refusal(status: int) -> tuple[int, Reason]:
    """Return the position of the argument that a launch refused, and the reason.

    Parameters
    ----------
    status : int
        What :attr:`LoadedKernel.launch` returned, other than 0.
    """
    position, reason = divmod(status, 16)
    return position, Reason(reason)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in this process. It stays loaded until the process ends.

    Attributes
    ----------
    artifact : Artifact
        What was loaded.
    launch : callable
        Launches on the current stream of the operands' device and returns 0, or launches nothing and returns a
        status for :func:`refusal`.
    workspace_size : callable
        Bytes of workspace for a problem's M, N, K with a raster order and a swizzle, on the current device.
    """

    artifact: Artifact
    launch: Callable[..., int]
    workspace_size: Callable[[int, int, int, int, int], int]
    _describe: Callable[[], str]

    def describe(self) -> dict[str, int]:
        """Return what the kernel reports of itself: ``stages``, ``threads`` and ``shared_memory`` (dynamic, bytes)."""
        return dict(json.loads(self._describe()))


_loaded: dict[tuple[str, str], LoadedKernel] = {}
_lock = threading.Lock()


def load(artifact: Artifact) -> LoadedKernel:
    """Load a kernel, once in a process.

    Raises
    ------
    LoadError
        If the library is no longer what its manifest says, or cannot be loaded here.
    """
    name = (artifact.key, artifact.sha256)
    with _lock:
        if name not in _loaded:
            _loaded[name] = _load(artifact)
        return _loaded[name]


def _load(artifact: Artifact) -> LoadedKernel:
    _verify(artifact)
    tvm_ffi = _import_tvm_ffi()
    _provide_cudart(artifact)
    try:
        module = tvm_ffi.load_module(str(artifact.library))
        functions = [module.get_function(name) for name in ("launch", "workspace_size", "describe")]
    except (OSError, RuntimeError, AttributeError) as exc:
        raise LoadError(f"{artifact.library} cannot be loaded: {exc}") from None
    return LoadedKernel(artifact, *functions)


def _verify(artifact: Artifact) -> None:
    """Hash the library right before it is mapped.

    It is then opened again by its name, and not as ``/proc/self/fd/N``: the dynamic linker knows libraries by the name
    that they were opened under, and would return another kernel once that number is used again. Between the two
    only this user and root can exchange the file, since nobody else can write the store.
    """
    size = artifact.manifest["files"][artifact.library.name]["size"]
    try:
        data = read_private(artifact.library, limit=size)
    except OSError as exc:
        raise LoadError(f"{artifact.library} cannot be read: {exc}") from None
    if hashlib.sha256(data).hexdigest() != artifact.sha256:
        raise LoadError(f"{artifact.library} changed since it was looked up: its SHA-256 is not the manifest's")


def _import_tvm_ffi() -> ModuleType:
    import torch

    # Without this attribute, importing tvm-ffi starts a compiler to build a replacement for it.
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise LoadError(f"PyTorch {torch.__version__} has no DLPack C exchange API: 2.10 or later is needed")
    import tvm_ffi

    return tvm_ffi


def _provide_cudart(artifact: Artifact) -> None:
    """Map the CUDA runtime that the kernel was linked with, unless PyTorch already has.

    PyTorch may come without one (CPU) or with another major version; both can be in one process.
    """
    version = str(artifact.manifest["identity"]["toolchain"]["nvcc"])
    name = f"libcudart.so.{version.partition('.')[0]}"
    for candidate in (name, *map(str, _cudart_files(name))):
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return
    raise LoadError(
        f"{artifact.library} needs {name}, which is neither loaded nor on the library path, in CUDA_HOME or in the "
        f'PyPI wheels: pip install "cutlass_ops[toolkit]" brings it'
    )


def _cudart_files(name: str) -> Iterator[Path]:
    for _, home in _env.cuda_homes():
        yield from (home / folder / name for folder in ("lib64", "lib"))
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield from Path(root).glob(f"cu*/lib/{name}")
    yield Path("/usr/local/cuda/lib64") / name
    # Last, since it starts a compiler: not where kernels are only deployed.
    with contextlib.suppress(ToolchainError):
        yield from (folder / name for folder in find_toolchain().lib_dirs)
