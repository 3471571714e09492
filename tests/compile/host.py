"""Programs by the host's compiler that include the library's headers, for tests without a GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cutlass_ops.artifacts.loader import refusal
from cutlass_ops.base import resources
from cutlass_ops.compilation.toolchain import find_toolchain

# CUTLASS names what only nvcc declares; nothing of that is called.
LENIENT = ("-w", "-fpermissive")
# What is not called, a stream and a device, needs no library: only the functions that are called are linked.
UNLINKED = (*LENIENT, "-ffunction-sections", "-Wl,--gc-sections")
UNRESOLVED = ("-O1", *LENIENT, "-Wl,--unresolved-symbols=ignore-all")


def program(folder: Path, source: Path | str, *flags: str, standard: str = "c++17") -> Path:
    """Compile a source, a file beside this one or a text, and return the path of the program."""
    found, path = find_toolchain(), folder / "program"
    if isinstance(source, str):
        (folder / "program.cpp").write_text(source)
        source = folder / "program.cpp"
    cutlass = [found.cutlass_dir / "include", found.cutlass_dir / "tools/util/include"]
    include = [f"-I{each}" for each in (resources.include(), *cutlass, found.tvm_ffi_dir / "include")]
    include += [f"-isystem{each}" for each in found.include_dirs]
    # Flags come last, since those of libraries must follow the source.
    command = [found.host_compiler, f"-std={standard}", *include, source, "-o", path, *flags]
    subprocess.run([str(part) for part in command], check=True)
    return path


def tvm_ffi() -> tuple[str, ...]:
    """Return the flags with which a program finds tvm-ffi's library."""
    folder = find_toolchain().tvm_ffi_dir / "lib"
    return f"-L{folder}", "-ltvm_ffi", f"-Wl,-rpath,{folder}"


# Reads calls from standard input, a line each: of every tensor its place in bytes, its DLPack type, its number of
# dimensions, its shape and its strides.
READER = r"""
#include <iostream>
#include <sstream>
#include <string>

#include "cutlass/numeric_types.h"

CUTLASS_OPS_TYPE(cutlass::half_t, kDLFloat)

using namespace cutlass_ops;
using Half = cutlass::half_t;
constexpr uintptr_t kBase = 1 << 20;

int64_t place(void const* data) { return int64_t(reinterpret_cast<uintptr_t>(data) - kBase); }

template <int kCount>
struct Given {
  int64_t shapes[kCount][8], strides[kCount][8];
  DLTensor tensors[kCount]{};
  TVMFFIAny arguments[kCount]{};

  explicit Given(std::string const& line) {
    std::istringstream in(line);
    for (int i = 0; i < kCount; ++i) {
      DLTensor& t = tensors[i];
      int64_t at = 0, code = 0, bits = 0;
      in >> at >> code >> bits >> t.ndim;
      for (int d = 0; d < t.ndim; ++d) in >> shapes[i][d];
      for (int d = 0; d < t.ndim; ++d) in >> strides[i][d];
      t.data = reinterpret_cast<void*>(kBase + uintptr_t(at));
      t.device = {kDLCUDA, 0};
      t.dtype = {uint8_t(code), uint8_t(bits), 1};
      t.shape = shapes[i];
      t.strides = strides[i];
      arguments[i].type_index = kTVMFFIDLTensorPtr;
      arguments[i].v_ptr = &t;
    }
  }
};
"""


@contextmanager
def running(folder: Path, source: str) -> Iterator[subprocess.Popen[str]]:
    """Compile a program that answers each line, and keep it running."""
    path = program(folder, source, *UNLINKED)
    with subprocess.Popen([str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        yield found
        found.stdin.close()


def ask(asked: subprocess.Popen[str], buffer: torch.Tensor, given: Iterable[Any]) -> Any:
    """Pass tensors of a buffer to a program that reads them; return its numbers, or the argument and the reason."""
    words = []
    for x in given:
        code = 0 if x.dtype in (torch.int32, torch.int64) else 2
        words += [x.data_ptr() - buffer.data_ptr(), code, 8 * x.element_size(), x.ndim, *x.shape, *x.stride()]
    asked.stdin.write(" ".join(map(str, words)) + "\n")
    asked.stdin.flush()
    status, *rest = map(int, asked.stdout.readline().split())
    return refusal(status) if status else rest
