"""A compiler that takes no time, so that what surrounds a compilation can be tested thousands of times."""

from __future__ import annotations

import struct
from pathlib import Path

from cutlass_ops.base.session import Session
from cutlass_ops.compilation import toolchain
from cutlass_ops.compilation.toolchain import Toolchain
from cutlass_ops.declare.config import ThreadblockShape, WarpShape
from cutlass_ops.declare.spec import KernelSpec
from cutlass_ops.epilogue.graph import Graph
from cutlass_ops.epilogue.nodes import Kind, Node, Output
from cutlass_ops.kinds.sm80.config import Sm80Config
from cutlass_ops.kinds.sm90.config import Sm90Config

HMMA, HGMMA, QGMMA, UTMALDG, FFMA = 0x723C, 0x79F0, 0x79F3, 0x75B4, 0x7223

IDENTITY = Graph((), (Node("acc"),), (Output("d", 0, Kind.TILE),))

_NVCC = """#!/bin/sh
here=$(cd "$(dirname "$0")/.." && pwd)
case " $* " in
    *" --version "*) cat "$here/version"; exit $?;;
    *" --dryrun "*) echo "#\\$ TOP=$here/bin/.."; exit 0;;
esac
all="$*"
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; last=$1; shift; done
[ "$last" = kernels.ptx ] || echo "$last" >> "$here/count"
. "$here/behaviour"
"""

_HOST = """#!/bin/sh
case " $* " in
    *" -print-prog-name="*) echo "$(cd "$(dirname "$0")" && pwd)/${1#*=}"; exit 0;;
    *" --version "*) echo "g++ 1.0"; echo "Copyright (C) Free Software Foundation, Inc."; exit 0;;
esac
link=
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; [ "$1" = -shared ] && link=1; shift; done
[ -n "$link" ] && exec cat kernel.fatbin > "$out"
. "$(dirname "$0")/../host_behaviour"
"""

_GOOD = 'cat "$here/library" > "$out"; cat "$here/log"\n'

LOG = """ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_80'
ptxas info    : Function properties for _Z6kernelv
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 72.899 ms
"""


def elf(machine: int, sections: dict[str, bytes], tail: bytes = b"", flags: int = 0) -> bytes:
    """An ELF64 file with these sections, those named ``.text`` executable, and ``tail`` behind it.

    It has segments as the dynamic linker reads them, which refuses it for its type: it would run what is no code.
    """
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".names"))
    count, body, headers, places = len(sections) + 1, b"", b"", {}
    start = 64 + 64 * count + 2 * 56
    for name, data in (*sections.items(), (".names", names)):
        at, place = names.index(b"\0" + name.encode() + b"\0") + 1, start + len(body)
        places[name] = place
        if name == ".dynamic":
            data += struct.pack("<QQQQ", 5, places[".dynstr"], 0, 0)
        kind = 6 if name.startswith(".text") else 2
        headers += struct.pack("<IIQQQQIIQQ", at, 1, kind, 0, place, len(data), 0, 0, 1, 0)
        body += data
    size, dynamic = start + len(body), places.get(".dynamic")
    segments = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, size, size, 4096)
    segments += struct.pack(
        "<IIQQQQQQ", *((0,) * 8 if dynamic is None else (2, 6, dynamic, dynamic, dynamic, 16, 16, 8))
    )
    ident = b"\x7fELF\x02\x01\x01"
    header = struct.pack(
        "<16sHHIQQQIHHHHHH", ident, 1, machine, 1, 0, 64 + 64 * count, 64, flags, 64, 56, 2, 64, count, count - 1
    )
    return header + headers + segments + body + tail


def parameter(size: int) -> bytes:
    """What machine code says of a kernel whose only parameter has this many bytes."""
    registers = struct.pack("<BBHII", 4, 0x2F, 8, 1, 168)
    narrow = struct.pack("<BBHIII", 4, 0x17, 12, 0, 0, (size & 0x3FFF) << 18 | 0x1F000)
    wide = struct.pack("<BBHIIHH", 4, 0x45, 12, 0, 0, size, 0)  # as nvcc does above 4 KB
    return registers + struct.pack("<BBH", 3, 0x19, size) + (wide if size > 4096 else narrow)


def linkage(exports: tuple[str, ...], needed: tuple[str, ...], search: dict[int, str]) -> dict[str, bytes]:
    """Sections that say what a shared library defines, what it needs, and where that is looked for, by tag."""
    names, at = b"\0", {}
    for name in (*exports, *needed, *search.values()):
        at[name] = len(names)
        names += name.encode() + b"\0"
    symbols = b"".join(struct.pack("<IBBHQQ", at[name], 0x12, 0, 1, 0, 0) for name in exports)
    entries = b"".join(struct.pack("<QQ", 1, at[name]) for name in needed)
    entries += b"".join(struct.pack("<QQ", tag, at[name]) for tag, name in search.items())
    return {".dynsym": bytes(24) + symbols, ".dynstr": names, ".dynamic": entries}


# IADD3.X R15, RZ, R23.reuse, RZ; FMUL R23, R134, R6; F2FP R23, R120, R23: the last one gets the former R23.
STALE_FLAG = struct.pack(
    "<6Q",
    *(0x00000017FF0F7210, 0x080FE200007FE4FF),
    *(0x0000000686177220, 0x000FE20000400000),
    *(0x000000177817723E, 0x000FE200000010FF),
)
EXPORTS = ("__tvm_ffi_launch", "__tvm_ffi_workspace_size", "__tvm_ffi_describe", "__tvm_ffi_prepare", "__tvm_ffi_load")
NEEDED = ("libcudart.so.13", "libtvm_ffi.so", "libstdc++.so.6", "libc.so.6")


def library(
    *opcodes: int,
    host: int = 528,
    device: int = 528,
    sm: int = 80,
    exports: tuple[str, ...] = EXPORTS,
    needed: tuple[str, ...] = NEEDED,
    search: dict[int, str] | None = None,
    more: bytes = b"",
) -> bytes:
    """Something like a kernel's shared library, as far as the store and the proofs look at it."""
    code = b"".join(struct.pack("<QQ", 0xABCD_0000 | op, 0) for op in opcodes) + more
    image = elf(190, {".text.kernel": code, ".nv.info.kernel": parameter(device)}, b"tail", sm)
    own = {".text": b"", ".cutlass_ops.kernel": struct.pack("<I", host), **linkage(exports, needed, search or {})}
    return elf(62, own, image)


class FakeToolkit:
    """A toolkit folder whose nvcc and g++ do as told; nvcc counts how often it compiled a source."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bin", "include/nv", "lib"):
            (root / folder).mkdir(parents=True)
        for name in ("include/cuda_runtime.h", "include/nv/target", "lib/libcudart.so.13", "count"):
            (root / name).touch()
        self.nvcc = root / "bin" / "nvcc"
        self.nvcc.write_text(_NVCC)
        self.nvcc.chmod(0o755)
        self.host = root / "host" / "g++"
        self.host.parent.mkdir()
        self.host.write_text(_HOST)
        self.host.chmod(0o755)
        programs = [root / "bin" / name for name in ("cicc", "ptxas", "fatbinary")]
        programs += [self.host.parent / name for name in ("cc1plus", "collect2", "as", "ld")]
        for program in programs:
            program.write_text(program.name)
            program.chmod(0o755)
        self.host_does('echo > "$out"')
        self.says_version("13.0.88")
        self.makes(library(HMMA, FFMA, HMMA))

    def says_version(self, version: str) -> None:
        (self.root / "version").write_text(f"Cuda compilation tools, release 13.0, V{version}\n")

    def makes(self, data: bytes, *, log: str = LOG, before: str = "") -> None:
        (self.root / "library").write_bytes(data)
        (self.root / "log").write_text(log)
        self.does(before + _GOOD)

    def does(self, script: str) -> None:
        (self.root / "behaviour").write_text(script)

    def host_does(self, script: str) -> None:
        (self.root / "host_behaviour").write_text(script)

    @property
    def compilations(self) -> int:
        return len((self.root / "count").read_text().splitlines())

    def find_anew(self) -> Toolchain:
        with Session().active():
            return self.find()

    def find(self) -> Toolchain:
        return toolchain._examine(self.nvcc, "test", self.host, None)


def sm80_spec(stages: int = 3, dtype: str = "bf16") -> KernelSpec:
    config = Sm80Config(threadblock=ThreadblockShape(128, 128, 32), warp=WarpShape(64, 64, 32), stages=stages)
    return KernelSpec(a=f"{dtype}.row", b=f"{dtype}.col", d=f"{dtype}.row", epilogue=IDENTITY, config=config)


def sm90_spec(a: str = "bf16.row") -> KernelSpec:
    config = Sm90Config(threadblock=ThreadblockShape(64, 128, 64))
    return KernelSpec(a=a, b="bf16.col", d="bf16.row", epilogue=IDENTITY, config=config)
