"""Compile the rungs in CUDA C++, and call them."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from cutlass_ops.compilation.toolchain import Toolchain

from .problem import Product

FOLDER = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-gencode=arch=compute_90a,code=sm_90a",  # without the a, there is no wgmma and no setmaxnreg
    "-lineinfo",
    "--no-compress",  # the proof reads the machine code
    "-Xptxas=-v",
    "-Xcompiler=-fPIC",
    "-shared",
)
# ptxas mentions serialised wgmma and ignored setmaxnreg as mere information.
_SLOW = re.compile(r"^.*\(C75(?:10|08)\).*$", re.MULTILINE)
_RESOURCES = re.compile(r"(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


class BuildError(RuntimeError):
    """A rung does not compile as it should."""


def compile_rung(source: str, toolchain: Toolchain, folder: Path) -> Path:
    """Compile a rung into a shared library, unless the folder has one that is newer than all sources.

    Parameters
    ----------
    source : str
        Name of the file beside this one.
    toolchain : Toolchain
        From :func:`cutlass_ops.compilation.toolchain.find_toolchain`.
    folder : Path
        Where the library goes.

    Raises
    ------
    BuildError
        If the compiler refuses it, reports serialised wgmma, or spills registers. The message has its words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / source.replace(".cu", ".so")
    if library.exists() and library.stat().st_mtime > max(each.stat().st_mtime for each in FOLDER.glob("*.cu*")):
        return library
    folders = [f"-L{each}" for each in toolchain.lib_dirs]
    command = [str(toolchain.nvcc), f"-ccbin={toolchain.host_compiler}", *FLAGS, *folders]
    command += ["-o", str(library), str(FOLDER / source)]
    environment = os.environ | {"PATH": toolchain.path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    said = done.stdout + done.stderr
    if done.returncode:
        raise BuildError(f"{source} does not compile:\n{said}\n{' '.join(command)}")
    slow = _SLOW.search(said)
    if slow is not None:
        library.unlink()
        raise BuildError(f"{source} compiles into slow code: {slow[0].strip()}")
    spilled = [int(stores) for stores, _ in _RESOURCES.findall(said)]
    if any(spilled):
        library.unlink()
        raise BuildError(f"{source} spills {max(spilled)} bytes of registers a thread")
    return library


def product_of(library: Path) -> Product:
    """Return a library's GEMM, on PyTorch's current stream. K and the rows of A and B are as the rung needs them."""
    launch = ctypes.CDLL(str(library)).launch
    launch.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
    launch.restype = ctypes.c_int

    def product(a: Tensor, b: Tensor, d: Tensor) -> None:
        stream = torch.cuda.current_stream(d.device).cuda_stream
        status = launch(a.data_ptr(), b.data_ptr(), d.data_ptr(), *d.shape, a.shape[1], stream)
        if status:
            raise RuntimeError(f"{library.name}: CUDA error {status} at M, N {tuple(d.shape)}, K {a.shape[1]}")

    return product
