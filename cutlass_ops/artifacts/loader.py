"""Load an artifact into this process. Only this module imports tvm-ffi."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from cutlass_ops.base import arch, elf, env, forks
from cutlass_ops.base.errors import LoadError

if TYPE_CHECKING:
    import torch

    from cutlass_ops.artifacts.entry import Artifact

# Version of a kernel library's interface. Raise it when the arguments or results of these functions change.
ABI = 5
SYMBOLS = ("launch", "workspace_size", "describe", "prepare", "load")


class Reason(IntEnum):
    """Why a launch rejected an argument. The numbers are those of ``templates/include/cutlass_ops/binding.h``."""

    KIND = 1
    SHAPE = 2
    DTYPE = 3
    DEVICE = 4
    MAJOR = 5
    ALIGNMENT = 6
    OVERLAP = 7
    WORKSPACE = 8
    COUNT = 9
    NULL = 10


def refusal(status: int) -> tuple[int, Reason]:
    """Return the position of the argument that a launch rejected, and the reason."""
    position, reason = divmod(status, 16)
    return position, Reason(reason)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel in this process. It stays loaded until the process ends."""

    artifact: Artifact
    # Launches on the current stream of the operands' device and returns 0. If it rejects an argument, it launches
    # nothing and returns a status for `refusal`.
    launch: Callable[..., int]
    # Takes M, N, K, the number of GEMMs, raster order and swizzle. Returns the bytes of workspace on the current
    # device.
    workspace_size: Callable[[int, int, int, int, int, int], int]
    _describe: Callable[[], str]
    # Takes what `launch` takes, and `stream_api`. Returns a function without arguments that launches with exactly
    # these tensors, a status for `refusal`, or None if the kernel needs more than that at each launch.
    prepare: Callable[..., Callable[[], None] | int | None]
    # Takes a device's number and has its driver load the kernel, which it would otherwise do at the first launch there.
    # Safe while another thread captures a graph. `load_on` says when to call it.
    load: Callable[[int], None]

    # A copy would share the library's memory and free it twice.
    def __copy__(self) -> LoadedKernel:
        return self

    def __deepcopy__(self, memo: object) -> LoadedKernel:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a loaded kernel cannot be pickled: pickle its specification, or the result of build()")

    def load_on(self, device: torch.device) -> None:
        """Load the kernel into a device's driver, so that its first launch there takes no longer than any other."""
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # nor is it in a forked process
            return
        try:
            self.load(device.index)
        except RuntimeError as exc:
            raise LoadError(f"{self.artifact.where} cannot be loaded on {device}: {exc}") from None

    def describe(self) -> dict[str, int]:
        """Return the kernel's ``stages``, ``threads`` and ``shared_memory`` (dynamic, in bytes)."""
        return dict(json.loads(self._describe()))


_loaded: dict[tuple[str, str], LoadedKernel] = {}
_lock = threading.Lock()


def _reset() -> None:
    global _lock
    _lock = threading.Lock()


forks.reset_in_child(_reset)


def load(artifact: Artifact) -> LoadedKernel:
    """Load a kernel, once per process."""
    name = (artifact.key, artifact.sha256)
    with _lock:
        if name not in _loaded:
            _loaded[name] = _load(artifact)
        return _loaded[name]


@functools.cache
def stream_api() -> int:
    """Return the address of PyTorch's functions for kernels, one of which says what stream is current."""
    import torch

    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return int(address(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api"))


@functools.cache
def prepare() -> None:
    """Import tvm-ffi if there is a GPU, before a program that launches kernels is compiled."""
    import torch

    # Otherwise, PyTorch 2.11's AOTInductor crashed when it loaded a package, even of PyTorch operations only.

    if torch.cuda.is_available():
        _import_tvm_ffi()


def _load(artifact: Artifact) -> LoadedKernel:
    from cutlass_ops.base import elf  # late, as all that only a kernel's load needs

    if arch.other_platform():
        raise LoadError(arch.other_platform())
    data = artifact.read_library()
    elf.require_own_libraries(data, artifact.where)
    tvm_ffi = _import_tvm_ffi()
    _provide_cudart(data, artifact.where)
    try:
        # load_module needs a file extension, which descriptors lack.
        open_library = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")
        with _mappable(data) as path:
            module = open_library(path, "so")
        functions = [module.get_function(name) for name in SYMBOLS]
    except (OSError, RuntimeError, AttributeError) as exc:
        raise LoadError(f"{artifact.where} cannot be loaded: {exc}") from None
    return LoadedKernel(artifact, *functions)


@contextlib.contextmanager
def _mappable(data: bytes) -> Iterator[str]:
    """Yield a path from which the dynamic linker loads exactly these bytes, which nobody can replace."""
    try:
        descriptor = _sealed(data)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="cutlass_ops.") as folder:
            path = Path(folder, "kernel.so")
            path.write_bytes(data)
            yield str(path)
        return
    try:
        yield _unique(descriptor)
    finally:
        os.close(descriptor)


def _sealed(data: bytes) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        descriptor = os.memfd_create("cutlass_ops", flags | _MFD_EXEC)
    except OSError:
        # Linux before 6.3 has no such flag and does not need it.
        descriptor = os.memfd_create("cutlass_ops", flags)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


_MFD_EXEC = 0x10
_serials = itertools.count()


def _unique(descriptor: int) -> str:
    """Return a path to a descriptor that this process has not used before."""
    # It identifies libraries by path: for a number that is used again, it would return the older kernel.
    high, low = divmod(next(_serials), 256)
    return f"/proc{'/' * (1 + high)}self{'/' * (1 + low)}fd/{descriptor}"


def as_exported(function: Callable[..., Any]) -> Any:
    """Return a Python function as a function of tvm-ffi, as kernels export them, for what calls those."""
    return _import_tvm_ffi().convert(function)


def _import_tvm_ffi() -> ModuleType:
    import torch

    # Without this attribute, importing tvm-ffi starts a compiler to build a replacement for it.
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        raise LoadError(f"PyTorch {torch.__version__} has no DLPack C exchange API: 2.10 or later is needed")
    import tvm_ffi

    return tvm_ffi


def _provide_cudart(library: bytes, where: str) -> None:
    """Load the CUDA runtime that a library needs, unless PyTorch already has."""
    # The library says itself which one, and was checked: its manifest may say anything.
    for name in elf.needed(library):
        if not name.startswith("libcudart.so."):
            continue
        for path in itertools.chain((name,), map(str, _cudart_files(name))):
            with contextlib.suppress(OSError):
                ctypes.CDLL(path)
                break
        else:
            raise LoadError(
                f"{where} needs {name}, which is neither loaded nor on the library path, in CUDA_HOME or in the "
                f'PyPI wheels: install it with pip install "cutlass_ops[toolkit]"'
            )


def _cudart_files(name: str) -> Iterator[Path]:
    for _, home in env.cuda_homes():
        yield from (home / folder / name for folder in ("lib64", "lib"))
    for root in filter(os.path.isabs, sys.path):
        yield from Path(root).glob(f"nvidia/cu*/lib/{name}")
    yield Path("/usr/local/cuda/lib64") / name
    # Last, the toolkit of the nvcc in CUTLASS_OPS_NVCC or on PATH. It is not started.
    for nvcc in filter(os.path.isabs, filter(None, (env.NVCC.text, shutil.which("nvcc")))):
        home = Path(nvcc).resolve().parent.parent
        yield from (home / folder / name for folder in ("lib64", "lib", "targets/x86_64-linux/lib"))
